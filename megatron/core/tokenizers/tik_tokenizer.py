"""tiktoken vocabularies through their own library, with the special tokens that Megatron puts in front of them."""

import base64
import binascii
import functools
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core.tokenizers.base_tokenizer import PIP_EXTRA, BaseTokenizer

# Megatron's defaults: ids 0 to 999 are special, the ranks of the file come behind them, and all are at most 2**17.
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
NUM_SPECIAL_TOKENS = 1000
LARGEST_VOCAB = 1 << 17
# How text is cut before merging, as Megatron's pattern "v2" cuts it: words by their capitals, single digits,
# punctuation with the line ends behind it, blanks.
_LOWER, _UPPER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}", r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
PATTERN = "|".join(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


_MOST_BLANKS = 100_000
_MANY_BLANKS = re.compile(rf"(\s{{{_MOST_BLANKS}}})")


class TikTokenizer(BaseTokenizer):
    """The ranks of a file, 1000 higher: Megatron's JSON list or OpenAI's .tiktoken lines.

    vocab_size: with the special tokens; a smaller one than the file gives leaves out its last ranks (None: at most
    2**17, as in Megatron). Special tokens in text stay text.
    """

    def __init__(self, path: str, vocab_size: int | None = None) -> None:
        self.name = f"TikTokenizer {path}"
        ranks = _read_ranks(Path(path))
        available = NUM_SPECIAL_TOKENS + len(ranks)
        self.vocab_size = min(available, LARGEST_VOCAB) if vocab_size is None else vocab_size
        if not NUM_SPECIAL_TOKENS + 256 <= self.vocab_size <= available:
            raise ValueError(
                f"--vocab-size is {vocab_size}: {self.name} takes {NUM_SPECIAL_TOKENS + 256} to {available} "
                f"({NUM_SPECIAL_TOKENS} special tokens and {len(ranks)} ranks); or leave the flag out"
            )
        kept = ranks[: self.vocab_size - NUM_SPECIAL_TOKENS]
        # Merging asks only which rank is lower: moved ranks merge alike, and are the ids at once.
        shifted = {token: NUM_SPECIAL_TOKENS + rank for rank, token in enumerate(kept)}
        self._encoding = _library().Encoding(
            name=self.name, pat_str=PATTERN, mergeable_ranks=shifted, special_tokens=self.special_tokens
        )
        self.bos, self.eod, self.pad = (self.special_tokens[name] for name in ("<s>", "</s>", "<pad>"))

    @functools.cached_property
    def special_tokens(self) -> dict[str, int]:
        fillers = (f"<SPECIAL_{token}>" for token in range(len(SPECIAL_TOKENS), NUM_SPECIAL_TOKENS))
        return {text: token for token, text in enumerate((*SPECIAL_TOKENS, *fillers))}

    def tokenize(self, text: str) -> list[int]:
        """As the library; blanks in a row are cut every 100,000, since it crashes at some hundred thousand."""
        if len(text) <= _MOST_BLANKS:
            return self._encode(text)
        return list(itertools.chain.from_iterable(map(self._encode, _MANY_BLANKS.split(text))))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._encoding.encode_ordinary(text)
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """Bytes that are not UTF-8 become U+FFFD."""
        text: str = self._encoding.decode(self._checked(ids), errors="replace")
        return text

    @property
    def vocab(self) -> dict[str, int]:
        tokens = (self._encoding.decode_single_token_bytes(token) for token in range(self.vocab_size))
        return {token.decode(errors="backslashreplace"): number for number, token in enumerate(tokens)}


def _library() -> Any:
    try:
        import tiktoken
    except ImportError as error:
        raise ValueError(f"--tokenizer-type TikTokenizer needs the package tiktoken: {PIP_EXTRA}") from error
    return tiktoken


def _read_ranks(path: Path) -> list[bytes]:
    """Bytes of each rank. Raises OSError, or ValueError for a file that is neither form, or lacks a rank or a byte."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: --tokenizer-model must name a .json or .tiktoken vocabulary")
    data = path.read_bytes()
    try:
        pairs = _of_json(data) if data.lstrip()[:1] == b"[" else _of_lines(data)
    except (ValueError, KeyError, TypeError, binascii.Error) as error:
        raise ValueError(
            f"{path} is no tiktoken vocabulary: must be a JSON list of objects with rank and token_bytes, "
            f"or lines of base64 and rank ({error})"
        ) from error
    tokens = [token for _, token in sorted(pairs)]
    if sorted(rank for rank, _ in pairs) != list(range(len(pairs))) or len(set(tokens)) < len(tokens):
        raise ValueError(f"{path} has {len(pairs)} tokens: ranks must be 0 to {len(pairs) - 1}, tokens all different")
    missing = {bytes([byte]) for byte in range(256)} - set(tokens[:256])
    if missing:
        raise ValueError(f"{path}: the first 256 ranks must be the single bytes; {min(missing)!r} is not there")
    return tokens


def _of_json(data: bytes) -> list[tuple[int, bytes]]:
    return [(int(entry["rank"]), base64.b64decode(entry["token_bytes"], validate=True)) for entry in json.loads(data)]


def _of_lines(data: bytes) -> list[tuple[int, bytes]]:
    pairs = [line.split() for line in data.splitlines() if line.strip()]
    return [(int(rank), base64.b64decode(token, validate=True)) for token, rank in pairs]
