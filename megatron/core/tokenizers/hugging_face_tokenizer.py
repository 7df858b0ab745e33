"""Hugging Face's tokenizer.json, read by the tokenizers library alone: no download, no remote code."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

EOD_NAMES = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>")
BOS_NAMES = ("<s>", "<bos>", "<|begin_of_text|>")
PAD_NAMES = ("<pad>", "[PAD]", "<|pad|>")


class HuggingFaceTokenizer:
    """The tokenizer in a tokenizer.json, or in the folder that holds one.

    Special ids are those that a tokenizer_config.json beside it names, else the first of the usual names that the
    vocabulary has; without an end-of-document token ValueError. As in transformers, `tokenize` adds the special
    tokens that tokenizer.json asks for (a leading <s>, say), and never the eod.
    """

    def __init__(self, path: str) -> None:
        self._path = _tokenizer_file(path)
        self.name = f"HuggingFaceTokenizer {self._path}"
        self._tokenizer = _read(self._path)
        self._vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        # Not the number of entries: ids may have gaps, and the model needs a row for the highest one.
        self.vocab_size = max(self._vocab.values(), default=-1) + 1
        named = _special_names(self._path.with_name("tokenizer_config.json"))
        self.bos = self._find(named.get("bos_token"), BOS_NAMES)
        self.pad = self._find(named.get("pad_token"), PAD_NAMES)
        eod = self._find(named.get("eos_token"), EOD_NAMES)
        if eod is None:
            raise ValueError(f"{self._path} has no end-of-document token: must have one of {', '.join(EOD_NAMES)}")
        self.eod = eod

    def tokenize(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)

    def _find(self, named: str | None, usual: tuple[str, ...]) -> int | None:
        names = usual if named is None else (named,)
        return next((self._vocab[name] for name in names if name in self._vocab), None)


def _tokenizer_file(path: str) -> Path:
    file = Path(path)
    if file.is_dir():
        file = file / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist: --tokenizer-model must name a tokenizer.json or its folder")
    return file


def _read(path: Path) -> Tokenizer:
    text = path.read_bytes()
    try:
        return Tokenizer.from_buffer(text)
    except ValueError as error:
        raise ValueError(f"{path} is no tokenizer.json: {error}") from error


def _special_names(path: Path) -> dict[str, str]:
    """bos_token, eos_token and pad_token of a tokenizer_config.json: strings, or objects with their text in content."""
    if not path.is_file():
        return {}
    try:
        facts: dict[str, Any] = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a JSON object: {error}") from error
    names = {}
    for key in ("bos_token", "eos_token", "pad_token"):
        value = facts.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            names[key] = value
    return names
