"""Tokenizers of two optional packages: SentencePiece models, and tiktoken vocabularies in Megatron's format."""

import base64
import binascii
import functools
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core.tokenizers.tokenizer import PIP_EXTRA, BaseTokenizer

# Defaults of Megatron: ids 0 to 999 are special, the ranks of the file follow, and there are at most 2**17 ids.
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
NUM_SPECIAL_TOKENS = 1000
LARGEST_VOCAB = 1 << 17
# Splits text before merging, like Megatron's pattern "v2": into words, also at capital letters, single digits,
# punctuation with the line ends that follow, and blanks.
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


class SentencePieceTokenizer(BaseTokenizer):
    """SentencePiece tokenizer from a .model file.

    The id of </s> ends documents. The characters </s> within a text are tokenized as text.
    """

    def __init__(self, path: str, *, kind: str = "SentencePieceTokenizer") -> None:
        self.name = f"{kind} {path}"
        self._model = _read_sentencepiece(path, kind=kind)
        self.vocab_size = self._model.get_piece_size()
        # The library returns -1 for a piece that is not in the model.
        bos, eos, pad = (
            None if token < 0 else token for token in (self._model.bos_id(), self._model.eos_id(), self._model.pad_id())
        )
        if eos is None:
            raise ValueError(f"{path} has no </s>: train the model with an eos piece, which ends documents")
        self.eod, self.bos, self.pad = eos, bos, pad

    def tokenize(self, text: str) -> list[int]:
        return self.tokenize_piece(text)

    def tokenize_piece(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(text)
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids. Control pieces such as <s> and </s> produce no text."""
        text: str = self._model.decode(self._checked(ids))
        return text

    @property
    def vocab(self) -> dict[str, int]:
        return {self._model.id_to_piece(token): token for token in range(self.vocab_size)}

    @functools.cached_property
    def special_tokens(self) -> dict[str, int]:
        """Control pieces of the model, with their ids. Cached, because all pieces must be tested."""
        return {
            self._model.id_to_piece(token): token for token in range(self.vocab_size) if self._model.is_control(token)
        }


class Llama2Tokenizer(SentencePieceTokenizer):
    """SentencePiece tokenizer that adds <s> at the start of every document."""

    def __init__(self, path: str) -> None:
        super().__init__(path, kind="Llama2Tokenizer")
        if self.bos is None:
            raise ValueError(f"{path} has no <s>, which Llama2Tokenizer puts at the start of documents")

    def tokenize(self, text: str) -> list[int]:
        assert self.bos is not None, "the constructor checks this"
        return [self.bos, *self.tokenize_piece(text)]


def _read_sentencepiece(path: str, *, kind: str) -> Any:
    try:
        import sentencepiece
    except ImportError as error:
        raise ValueError(f"--tokenizer-type {kind} requires the package sentencepiece: {PIP_EXTRA}") from error
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} does not exist: --tokenizer-model must be a SentencePiece .model file")
    data = Path(path).read_bytes()
    if not data:
        raise ValueError(f"{path} is not a SentencePiece model: it is empty")
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=data)
    except RuntimeError as error:
        raise ValueError(f"{path} is not a SentencePiece model") from error


class TikTokenizer(BaseTokenizer):
    """tiktoken tokenizer from a vocabulary file. Ids are the ranks in the file plus 1000.

    The file is Megatron's JSON list, or lines in OpenAI's .tiktoken format. vocab_size: number of ids, including
    special tokens; the last ranks of a larger file are dropped. None means all, up to 2**17 as in Megatron. The
    characters of a special token within a text are tokenized as text.
    """

    def __init__(self, path: str, vocab_size: int | None = None) -> None:
        self.name = f"TikTokenizer {path}"
        ranks = _read_ranks(Path(path))
        available = NUM_SPECIAL_TOKENS + len(ranks)
        self.vocab_size = min(available, LARGEST_VOCAB) if vocab_size is None else vocab_size
        if not NUM_SPECIAL_TOKENS + 256 <= self.vocab_size <= available:
            raise ValueError(
                f"--vocab-size is {vocab_size}: {self.name} supports {NUM_SPECIAL_TOKENS + 256} to {available} "
                f"({NUM_SPECIAL_TOKENS} special tokens and {len(ranks)} ranks); or omit the flag"
            )
        kept = ranks[: self.vocab_size - NUM_SPECIAL_TOKENS]
        # Merging depends only on the order of ranks, so shifted ranks merge identically and serve as ids.
        shifted = {token: NUM_SPECIAL_TOKENS + rank for rank, token in enumerate(kept)}
        try:
            import tiktoken
        except ImportError as error:
            raise ValueError(f"--tokenizer-type TikTokenizer requires the package tiktoken: {PIP_EXTRA}") from error
        self._encoding = tiktoken.Encoding(
            name=self.name, pat_str=PATTERN, mergeable_ranks=shifted, special_tokens=self.special_tokens
        )
        self.bos, self.eod, self.pad = (self.special_tokens[name] for name in ("<s>", "</s>", "<pad>"))

    @functools.cached_property
    def special_tokens(self) -> dict[str, int]:
        fillers = (f"<SPECIAL_{token}>" for token in range(len(SPECIAL_TOKENS), NUM_SPECIAL_TOKENS))
        return {text: token for token, text in enumerate((*SPECIAL_TOKENS, *fillers))}

    def tokenize(self, text: str) -> list[int]:
        """Returns the ids of a text. Splits long runs of blanks into runs of 100,000, which the library can process."""
        if len(text) <= _MOST_BLANKS:
            return self._encode(text)
        return list(itertools.chain.from_iterable(map(self._encode, _MANY_BLANKS.split(text))))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._encoding.encode_ordinary(text)
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids, with U+FFFD for invalid UTF-8."""
        text: str = self._encoding.decode(self._checked(ids), errors="replace")
        return text

    @property
    def vocab(self) -> dict[str, int]:
        tokens = (self._encoding.decode_single_token_bytes(token) for token in range(self.vocab_size))
        return {token.decode(errors="backslashreplace"): number for number, token in enumerate(tokens)}


def _read_ranks(path: Path) -> list[bytes]:
    """Returns the token bytes of each rank in a vocabulary file.

    Raises OSError, or ValueError for an unknown format, a missing rank or a missing single byte.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: --tokenizer-model must be a .json or .tiktoken vocabulary")
    data = path.read_bytes()
    try:
        pairs = _of_json(data) if data.lstrip()[:1] == b"[" else _of_lines(data)
    except (ValueError, KeyError, TypeError, binascii.Error) as error:
        raise ValueError(
            f"{path} is not a tiktoken vocabulary: must be a JSON list of objects with rank and token_bytes, or "
            f"lines of base64 and rank ({error})"
        ) from error
    tokens = [token for _, token in sorted(pairs)]
    if sorted(rank for rank, _ in pairs) != list(range(len(pairs))) or len(set(tokens)) < len(tokens):
        raise ValueError(
            f"{path} has {len(pairs)} tokens: ranks must be 0 to {len(pairs) - 1}, and all tokens must differ"
        )
    missing = {bytes([byte]) for byte in range(256)} - set(tokens[:256])
    if missing:
        raise ValueError(f"{path}: the first 256 ranks must be the single bytes; {min(missing)!r} is missing")
    return tokens


def _of_json(data: bytes) -> list[tuple[int, bytes]]:
    return [(int(entry["rank"]), base64.b64decode(entry["token_bytes"], validate=True)) for entry in json.loads(data)]


def _of_lines(data: bytes) -> list[tuple[int, bytes]]:
    pairs = [line.split() for line in data.splitlines() if line.strip()]
    return [(int(rank), base64.b64decode(token, validate=True)) for token, rank in pairs]
