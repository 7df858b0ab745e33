"""Prints prepared chats with their loss masks, for a terminal. Reads the files that training reads.

Each line of the output has tokens of one kind: after `loss |` those with a loss, after `     |` all others.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.text import Text

from megatron.core.datasets.indexed_dataset import IndexedDataset, loss_mask_prefix
from megatron.core.datasets.padding import open_padding_mask
from megatron.core.tokenizers.tokenizer import BaseTokenizer

WITH_LOSS, WITHOUT_LOSS = "  loss | ", "       | "
_NARROWEST = 20


@dataclass(frozen=True)
class ShownLine:
    """A line of text whose tokens all have a loss, or all have none."""

    text: str
    has_loss: bool


def show_samples(prefix: str, tokenizer: BaseTokenizer, *, count: int, console: Console) -> None:
    """Prints the first `count` documents of PREFIX.bin and its masks. Padding, at their ends, is only counted."""
    tokens, masks = IndexedDataset(prefix), IndexedDataset(loss_mask_prefix(prefix))
    padding_masks = open_padding_mask(prefix, tokens.sequence_lengths, mmap=True)
    for number in range(min(count, len(tokens))):
        padding = 0 if padding_masks is None else int(np.count_nonzero(padding_masks[number]))
        num_tokens = len(tokens[number]) - padding
        ids, mask = tokens[number][:num_tokens].tolist(), masks[number][:num_tokens].tolist()
        title = f"sample {number + 1} of {len(tokens)}: {num_tokens:,} tokens, {sum(mask):,} with a loss"
        title += f", and padding of {padding:,}" if padding else ""
        console.print(Text(title, style="bold"), soft_wrap=True)
        for line in shown_lines(ids, mask, tokenizer):
            _print_line(line, console)


def shown_lines(ids: Sequence[int], mask: Sequence[int], tokenizer: BaseTokenizer) -> Iterator[ShownLine]:
    """Yields the text of a sample in lines. A line ends with a newline, an end of document or a change of the mask.

    Newlines and other characters that move the cursor are written as escapes.
    """
    text, has_loss, is_ended = "", False, False
    for piece, one, ends in _pieces(ids, mask, tokenizer):
        # The newline that a template writes after an end token stays in its line.
        if text and (one != has_loss or (is_ended and not piece.startswith("\n"))):
            yield ShownLine(text, has_loss)
            text = ""
        has_loss, is_ended = one, ends
        *lines, rest = piece.split("\n")
        for line in lines:
            yield ShownLine(text + _printable(line) + "\\n", has_loss)
            text = ""
        text += _printable(rest)
    if text:
        yield ShownLine(text, has_loss)


def _pieces(ids: Sequence[int], mask: Sequence[int], tokenizer: BaseTokenizer) -> Iterator[tuple[str, bool, bool]]:
    """Yields (text, has a loss, ends a document). Tokens of text are decoded together, special ones alone."""
    special = tokenizer.special_ids
    for (token, one), run in itertools.groupby(
        zip(ids, mask), lambda pair: (pair[0] if pair[0] in special else None, bool(pair[1]))
    ):
        found = [number for number, _ in run]
        if token is None:
            yield tokenizer.detokenize(found), one, False
            continue
        name = tokenizer.inv_vocab[token]
        for _ in found:
            yield name, one, token == tokenizer.eod


def _printable(text: str) -> str:
    """Replaces control characters, with which a text could change the terminal, by escapes."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def _print_line(line: ShownLine, console: Console) -> None:
    start = WITH_LOSS if line.has_loss else WITHOUT_LOSS
    # A redirected output is not cut into lines, so that it can be searched.
    width = max(_NARROWEST, console.width - len(start)) if console.is_terminal else max(1, len(line.text))
    for begin in range(0, len(line.text), width):
        shown = Text(start + line.text[begin : begin + width], style="green" if line.has_loss else "")
        console.print(shown, soft_wrap=True)
