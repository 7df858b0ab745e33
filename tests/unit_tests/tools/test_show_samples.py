"""Samples of chats are printed with their loss masks, in lines that no text can disturb."""

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path, loss_mask_prefix
from megatron.core.datasets.padding import padding_mask_prefix
from megatron.core.tokenizers.tokenizer import ByteLevelTokenizer
from megatron.tools.show_samples import ShownLine, show_samples, shown_lines

TOKENIZER = ByteLevelTokenizer()
EOD = TOKENIZER.eod


def sample(*pieces: tuple[str, int]) -> tuple[list[int], list[int]]:
    """Returns the ids and mask of (text, mask) pairs, in which $ is the end of a document."""
    ids = [[EOD if one == ord("$") else one for one in text.encode()] for text, _ in pieces]
    masks = [[mask] * len(part) for part, (_, mask) in zip(ids, pieces)]
    return sum(ids, []), sum(masks, [])


@pytest.mark.parametrize(
    "pieces, lines",
    [
        ([("q:\na", 0), ("b\n\nc$", 1)], [(0, "q:\\n"), (0, "a"), (1, "b\\n"), (1, "\\n"), (1, "c<|endoftext|>")]),
        ([("a", 0), ("b$", 1), ("c", 0)], [(0, "a"), (1, "b<|endoftext|>"), (0, "c")]),
        ([("a$\nb$", 1)], [(1, "a<|endoftext|>\\n"), (1, "b<|endoftext|>")]),
        ([("a$b$", 1)], [(1, "a<|endoftext|>"), (1, "b<|endoftext|>")]),
        ([("a", 1), ("$$$", 0)], [(1, "a"), *[(0, "<|endoftext|>")] * 3]),
        ([("$$$$", 1)], [(1, "<|endoftext|>")] * 4),
        # Nothing moves the cursor or changes its color.
        ([("\x1b[2J\r\t", 0), ("\u00e9\u202e", 1)], [(0, "\\x1b[2J\\r\\t"), (1, "\u00e9\\u202e")]),
        ([], []),
    ],
)
def test_lines_have_one_kind_of_tokens(pieces: list[tuple[str, int]], lines: list[tuple[int, str]]) -> None:
    assert list(shown_lines(*sample(*pieces), TOKENIZER)) == [ShownLine(text, bool(mask)) for mask, text in lines]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_as_many_samples_as_asked_for_are_printed(tmp_path: Path, is_terminal: bool) -> None:
    prefix = str(tmp_path / "a")
    samples = [sample(("q" * 30, 0), ("r" * 30, 1)), sample(("s", 0), ("t$", 1), ("$$", 0)), sample(("u", 0), ("v", 1))]
    padding = [[0] * 60, [0, 0, 0, 1, 1], [0, 0]]
    samples = [(*one, mask) for one, mask in zip(samples, padding)]
    names = ((prefix, np.uint16), (loss_mask_prefix(prefix), np.uint8), (padding_mask_prefix(prefix), np.uint8))
    for column, (name, dtype) in enumerate(names):
        with IndexedDatasetBuilder(get_bin_path(name), dtype=dtype) as builder:
            for one in samples:
                builder.add_concatenated(np.asarray(one[column], dtype), [len(one[column])])
            builder.finalize(get_idx_path(name))
    written = io.StringIO()
    console = Console(file=written, width=29, force_terminal=is_terminal, color_system=None, highlight=False)
    show_samples(prefix, TOKENIZER, count=2, console=console)
    # Lines are cut at the width of a terminal, and never in a file.
    cuts = [20, 10] if is_terminal else [30]
    assert written.getvalue().splitlines() == [
        "sample 1 of 3: 60 tokens, 30 with a loss",
        *["       | " + "q" * cut for cut in cuts],
        *["  loss | " + "r" * cut for cut in cuts],
        "sample 2 of 3: 3 tokens, 2 with a loss, and padding of 2",
        "       | s",
        "  loss | t<|endoftext|>",
    ]
