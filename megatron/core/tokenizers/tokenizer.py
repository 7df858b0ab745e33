"""Tokenizer interface, base class of this package's tokenizers, and the two tokenizers that require no library."""

import functools
import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

PIP_EXTRA = "pip install 'megatron-stash[tokenizers]'"
END_OF_TEXT = "<|endoftext|>"
NUM_BYTES = 256


class Tokenizer(Protocol):
    """Tokenizer interface that the framework uses. Ids are in [0, vocab_size). Error messages contain `name`."""

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int:
        """Number of ids, including special ids but not the padding of the model's vocabulary."""
        ...

    @property
    def eod(self) -> int:
        """Id that ends a document."""
        ...

    @property
    def bos(self) -> int | None: ...

    @property
    def pad(self) -> int | None: ...

    def tokenize(self, text: str) -> list[int]: ...

    def detokenize(self, ids: Sequence[int]) -> str: ...


def vocab_size_with_padding(vocab_size: int, *, divisible_by: int, tensor_parallel_size: int = 1) -> int:
    """Rounds `vocab_size` up so that each tensor-parallel rank stores a multiple of `divisible_by` rows."""
    multiple = divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


@dataclass(frozen=True)
class MarkedTokens:
    """Token ids of a text. marks: for each token, whether it is in one of the marked spans of the text."""

    ids: list[int]
    marks: list[bool]


class BaseTokenizer(ABC):
    """Base class that provides Megatron's tokenizer methods and handles special tokens within text.

    Subclasses set the fields below and implement tokenize, detokenize and vocab.
    """

    name: str
    vocab_size: int
    eod: int
    bos: int | None
    pad: int | None

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Returns the token ids of plain text."""

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids."""

    @property
    @abstractmethod
    def vocab(self) -> dict[str, int]:
        """Id of each token, by its readable text."""

    @functools.cached_property
    def inv_vocab(self) -> dict[int, str]:
        """Readable text of each token, by its id."""
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
        """Special tokens that chat templates may write as text, with their ids."""
        return {}

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens, including eod."""
        return frozenset((self.eod, *self.special_tokens.values()))

    @property
    def special_names(self) -> dict[str, str]:
        """Texts of bos_token, eos_token, pad_token and similar names that templates use."""
        texts = {token: text for text, token in self.special_tokens.items()}
        ids = {"bos_token": self.bos, "eos_token": self.eod, "pad_token": self.pad}
        return {name: texts[token] for name, token in ids.items() if token in texts}

    @property
    def chat_templates(self) -> dict[str, str]:
        """Chat templates that belong to the tokenizer, by name. "tool_use" is for conversations with tools."""
        return {}

    def tokenize_marked(self, text: str, spans: Sequence[tuple[int, int]]) -> MarkedTokens:
        """Tokenizes a rendered chat. Converts special tokens in the text to their ids, and adds no special tokens.

        spans: (begin, end) in characters, in order. Pieces between special tokens and span borders are tokenized
        separately, as in generation, where the tokens of the answer follow the tokens of the prompt.
        """
        borders = [0, *itertools.chain.from_iterable(spans), len(text)]
        ids: list[int] = []
        marks: list[bool] = []
        # Every second piece is a span: before, span, between, span, ..., after.
        for number, (begin, end) in enumerate(itertools.pairwise(borders)):
            tokens = self._with_special_tokens(text[begin:end])
            ids += tokens
            marks += [number % 2 == 1] * len(tokens)
        return MarkedTokens(ids, marks)

    def tokenize_piece(self, text: str) -> list[int]:
        """Returns the token ids of a part of a text, without the special tokens that `tokenize` adds."""
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
        # Cached, because there may be a thousand special tokens and a chat has many pieces.
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})")


class ByteLevelTokenizer(BaseTokenizer):
    """Tokenizer whose ids 0 to 255 are UTF-8 bytes. Id 256 ends a document, and there are no bos and pad ids."""

    name = "ByteLevelTokenizer"
    vocab_size = NUM_BYTES + 1
    eod = NUM_BYTES
    bos: int | None = None
    pad: int | None = None

    def tokenize(self, text: str) -> list[int]:
        """Returns the bytes of a text. Raises UnicodeEncodeError for lone surrogates."""
        return list(text.encode())

    def detokenize(self, ids: Sequence[int]) -> str:
        """Decodes ids, with U+FFFD for invalid UTF-8, because a generated text may end within a character."""
        pieces = bytearray()
        for token in self._checked(ids):
            pieces += END_OF_TEXT.encode() if token == self.eod else bytes([token])
        return pieces.decode(errors="replace")

    @property
    def vocab(self) -> dict[str, int]:
        return {f"<0x{byte:02X}>": byte for byte in range(NUM_BYTES)} | self.special_tokens

    @property
    def special_tokens(self) -> dict[str, int]:
        return {END_OF_TEXT: self.eod}


class NullTokenizer(BaseTokenizer):
    """Tokenizer for text that consists of token ids, written as decimal numbers.

    vocab_size: number of ids, including the end of document. eod_id: id of the end of document; None means the last id.
    """

    bos: int | None = None
    pad: int | None = None

    def __init__(self, vocab_size: int, eod_id: int | None = None) -> None:
        eod = vocab_size - 1 if eod_id is None else eod_id
        if not 0 <= eod < vocab_size:
            raise ValueError(
                f"null_tokenizer_eod_id is {eod}: must be 0 to {vocab_size - 1} with vocab_size {vocab_size}"
            )
        self.name = f"NullTokenizer of {vocab_size} ids"
        self.vocab_size = vocab_size
        self.eod = eod

    def tokenize(self, text: str) -> list[int]:
        """Returns the ids in a text. Raises ValueError naming the first word that is not an id."""
        ids = []
        for word in text.split():
            if not (word.isascii() and word.isdigit()) or int(word) >= self.vocab_size:
                raise ValueError(f"{word[:40]!r} is not a token of the {self.name}: must be 0 to {self.vocab_size - 1}")
            ids.append(int(word))
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(token)) for token in ids)

    @property
    def vocab(self) -> dict[str, int]:
        return {str(token): token for token in range(self.vocab_size)}
