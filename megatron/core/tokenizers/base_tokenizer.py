"""What all tokenizers of this package share: the other names that scripts use, and text with special tokens in it.

No tokenizer is implemented here; what the framework itself asks of a tokenizer is in tokenizer.py.
"""

import functools
import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

PIP_EXTRA = "pip install 'megatron-stash[tokenizers]'"


@dataclass(frozen=True)
class MarkedTokens:
    """Token ids and, for each, whether it lies in one of the marked spans of the text."""

    ids: list[int]
    marks: list[bool]


class BaseTokenizer(ABC):
    """Subclasses set the fields below in __init__ or as class attributes, and implement tokenize, detokenize, vocab."""

    name: str
    vocab_size: int
    eod: int
    bos: int | None
    pad: int | None

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Token ids of plain text."""

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids."""

    @property
    @abstractmethod
    def vocab(self) -> dict[str, int]:
        """Every token as readable text, with its id."""

    @functools.cached_property
    def inv_vocab(self) -> dict[int, str]:
        """`vocab` the other way round."""
        return {token: text for text, token in self.vocab.items()}

    @property
    def eos(self) -> int:
        return self.eod

    def encode(self, text: str) -> list[int]:
        return self.tokenize(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self.detokenize(ids)

    @property
    def special_tokens(self) -> dict[str, int]:
        """The special tokens that chat templates may write as text."""
        return {}

    @property
    def special_names(self) -> dict[str, str]:
        """What templates may ask for: bos_token, eos_token, pad_token and the like, as text."""
        texts = {token: text for text, token in self.special_tokens.items()}
        ids = {"bos_token": self.bos, "eos_token": self.eod, "pad_token": self.pad}
        return {name: texts[token] for name, token in ids.items() if token in texts}

    def tokenize_marked(self, text: str, spans: Sequence[tuple[int, int]]) -> MarkedTokens:
        """Tokens of a rendered chat: special tokens in the text become their ids, and none is added.

        spans: (begin, end) in characters, in order. Pieces between special tokens and borders of spans are tokenized
        alone, as they are when a model answers: it sees the prompt's tokens, then its own.
        """
        borders = [0, *itertools.chain.from_iterable(spans), len(text)]
        ids: list[int] = []
        marks: list[bool] = []
        # Every second stretch is a span: before, span, between, span, ..., behind.
        for number, (begin, end) in enumerate(itertools.pairwise(borders)):
            tokens = self._with_special_tokens(text[begin:end])
            ids += tokens
            marks += [number % 2 == 1] * len(tokens)
        return MarkedTokens(ids, marks)

    def tokenize_piece(self, text: str) -> list[int]:
        """As `tokenize`, without the tokens that it adds."""
        return self.tokenize(text)

    def _checked(self, ids: Sequence[int]) -> list[int]:
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"token {token} is outside the {self.vocab_size} ids of {self.name}")
        return [int(token) for token in ids]

    def _with_special_tokens(self, text: str) -> list[int]:
        special = self.special_tokens
        if not special:
            return self.tokenize_piece(text)
        ids = []
        for piece in self._special_pattern.split(text):
            if piece in special:
                ids.append(special[piece])
            elif piece:
                ids += self.tokenize_piece(piece)
        return ids

    @functools.cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        # Once: there may be a thousand of them, and a chat has many pieces.
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})")
