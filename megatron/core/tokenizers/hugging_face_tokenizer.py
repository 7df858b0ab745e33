"""Hugging Face's tokenizer.json, read by the tokenizers library alone: no download, no remote code."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from megatron.core.tokenizers.base_tokenizer import MarkedTokens
from megatron.core.tokenizers.chat_template import read_template
from megatron.core.tokenizers.library_tokenizer import LibraryTokenizer

EOD_NAMES = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>")
BOS_NAMES = ("<s>", "<bos>", "<|begin_of_text|>")
PAD_NAMES = ("<pad>", "[PAD]", "<|pad|>")


class HuggingFaceTokenizer(LibraryTokenizer):
    """The tokenizer in a tokenizer.json, or in the folder that holds one.

    Special ids are those that a tokenizer_config.json beside it names, else the first of the usual names that the
    vocabulary has; without an end-of-document token ValueError. As in transformers, `tokenize` adds the special
    tokens that tokenizer.json asks for (a leading <s>, say), and never the eod.
    """

    def __init__(self, path: str) -> None:
        self._path = _tokenizer_file(path)
        super().__init__(_read(self._path), name=f"HuggingFaceTokenizer {self._path}")
        self._settings = _read_settings(self._path.with_name("tokenizer_config.json"))
        named = self.special_names
        self.bos = self._find(named.get("bos_token"), BOS_NAMES)
        self.pad = self._find(named.get("pad_token"), PAD_NAMES)
        eod = self._find(named.get("eos_token"), EOD_NAMES)
        if eod is None:
            raise ValueError(f"{self._path} has no end-of-document token: must have one of {', '.join(EOD_NAMES)}")
        self.eod = eod

    @property
    def special_names(self) -> dict[str, str]:
        """bos_token, eos_token and the like of tokenizer_config.json: strings, or objects with their text."""
        names = {}
        for key, value in self._settings.items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                names[key] = text
        return names

    @property
    def chat_template(self) -> str | None:
        """The template in chat_template.jinja beside tokenizer.json, else the default one of tokenizer_config.json."""
        file = self._path.with_name("chat_template.jinja")
        if file.is_file():
            return read_template(file)
        found = self._settings.get("chat_template")
        if isinstance(found, list):
            found = next((one.get("template") for one in found if one.get("name") == "default"), None)
        return found if isinstance(found, str) else None

    def tokenize_marked(self, text: str, spans: Sequence[tuple[int, int]]) -> MarkedTokens:
        """As transformers: the whole text at once; a token is marked where it has a character of a span."""
        found = self._tokenizer.encode(text, add_special_tokens=False)
        marks = [False] * len(found.ids)
        remaining = list(reversed(spans))
        for number, (begin, end) in enumerate(found.offsets):
            # Bytes of one character share its offsets; blanks may have lost theirs (trim_offsets): (end, end).
            while remaining and remaining[-1][1] <= min(begin, end - 1):
                remaining.pop()
            marks[number] = bool(remaining) and remaining[-1][0] < end
        return MarkedTokens(found.ids, marks)

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
        tokenizer = Tokenizer.from_buffer(text)
    except ValueError as error:
        raise ValueError(f"{path} is no tokenizer.json: {error}") from error
    # The file may ask for both, for models of short texts: documents would be cut, and filled up to their neighbours.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a JSON object: {error}") from error
