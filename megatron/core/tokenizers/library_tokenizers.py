"""Tokenizers based on Hugging Face's `tokenizers` library. Reads only local files and runs no remote code."""

import functools
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megatron.core.tokenizers.chat_template import read_template
from megatron.core.tokenizers.tokenizer import END_OF_TEXT, BaseTokenizer, MarkedTokens

EOD_NAMES = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>")
BOS_NAMES = ("<s>", "<bos>", "<|begin_of_text|>")
PAD_NAMES = ("<pad>", "[PAD]", "<|pad|>")


class LibraryTokenizer(BaseTokenizer):
    """Wraps a tokenizer of the library. Subclasses determine the special ids. name: used in error messages."""

    def __init__(self, tokenizer: Tokenizer, *, name: str) -> None:
        self.name = name
        self._tokenizer = tokenizer
        self._vocab: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        # Ids may have gaps, and the model requires a row for the highest id.
        self.vocab_size = max(self._vocab.values(), default=-1) + 1

    def tokenize(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenizes several texts, faster than `tokenize` because offsets are not computed."""
        return [found.ids for found in self._tokenizer.encode_batch_fast(list(texts))]

    def detokenize(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)
        return text

    @property
    def vocab(self) -> dict[str, int]:
        return self._vocab


class HuggingFaceTokenizer(LibraryTokenizer):
    """Tokenizer from a tokenizer.json file, or from a folder that contains one.

    tokenizer_config.json in the same folder defines the special ids. Without an entry there, the first of the usual
    names in the vocabulary is used. As in transformers, `tokenize` adds the special tokens that tokenizer.json
    configures, such as a leading <s>, and never the end of document. Raises ValueError if there is no end-of-document
    token.
    """

    def __init__(self, path: str) -> None:
        self._path = _tokenizer_file(path)
        super().__init__(_read_tokenizer(self._path), name=f"HuggingFaceTokenizer {self._path}")
        self._settings = _read_settings(self._path.with_name("tokenizer_config.json"))
        named = self.special_names
        self.bos = self._find(named.get("bos_token"), BOS_NAMES)
        self.pad = self._find(named.get("pad_token"), PAD_NAMES)
        eod = self._find(named.get("eos_token"), EOD_NAMES)
        if eod is None and "eos_token" in named:
            raise ValueError(
                f"eos_token of tokenizer_config.json is {named['eos_token']!r}: must be a token of {self._path}"
            )
        if eod is None:
            raise ValueError(f"{self._path} has no end-of-document token: must contain one of {', '.join(EOD_NAMES)}")
        self.eod = eod
        if absent := [text for text in self._declared_tokens() if text not in self._vocab]:
            warnings.warn(
                f"{self._path} lacks {', '.join(absent)} of tokenizer_config.json, which transformers would add: they "
                "are tokenized as text; save the tokenizer with transformers to write them into tokenizer.json",
                stacklevel=2,
            )

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens that tokenizer.json declares special or tokenizer_config.json names, including eod."""
        declared = [number for number, token in self._tokenizer.get_added_tokens_decoder().items() if token.special]
        named = [self._vocab[text] for text in self.special_names.values() if text in self._vocab]
        return frozenset((self.eod, *declared, *named))

    @property
    def special_names(self) -> dict[str, str]:
        """Texts of bos_token, eos_token and similar entries of tokenizer_config.json."""
        names = {}
        for key, value in self._settings.items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                names[key] = text
        return names

    def _declared_tokens(self) -> list[str]:
        """Returns the texts of all tokens that tokenizer_config.json declares."""
        added = self._settings.get("added_tokens_decoder") or {}
        named = [*self.special_names.values()]
        for key in ("additional_special_tokens", "extra_special_tokens"):
            more = self._settings.get(key) or ()
            named += more.values() if isinstance(more, dict) else more
        texts = [one.get("content") if isinstance(one, dict) else one for one in (*added.values(), *named)]
        return list(dict.fromkeys(text for text in texts if isinstance(text, str)))

    @property
    def chat_templates(self) -> dict[str, str]:
        """Chat templates by name, from .jinja files in the same folder, or else from tokenizer_config.json."""
        found = self._settings.get("chat_template")
        if isinstance(found, str):
            templates = {"default": found}
        else:
            entries = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
            templates = {one["name"]: one["template"] for one in entries if {"name", "template"} <= one.keys()}
        others = self._path.with_name("additional_chat_templates").glob("*.jinja")
        files = {path.stem: path for path in others} | {"default": self._path.with_name("chat_template.jinja")}
        return templates | {name: read_template(path) for name, path in files.items() if path.is_file()}

    def tokenize_marked(self, text: str, spans: Sequence[tuple[int, int]]) -> MarkedTokens:
        """Tokenizes the whole text in one call, like transformers. Marks tokens that contain a character of a span."""
        found = self._tokenizer.encode(text, add_special_tokens=False)
        marks = [False] * len(found.ids)
        remaining = list(reversed(spans))
        for number, (begin, end) in enumerate(found.offsets):
            # Bytes of one character share its offsets. With trim_offsets, blanks have empty offsets, (end, end).
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
        raise FileNotFoundError(f"{file} does not exist: --tokenizer-model must be a tokenizer.json or its folder")
    return file


def _read_tokenizer(path: Path) -> Tokenizer:
    text = path.read_bytes()
    try:
        tokenizer = Tokenizer.from_buffer(text)
    except ValueError as error:
        raise ValueError(f"{path} is not a tokenizer.json: {error}") from error
    # Files of models for short texts may configure both, and documents would be truncated or padded.
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


class GPT2BPETokenizer(LibraryTokenizer):
    """GPT-2's byte-level BPE tokenizer from a vocab.json and a merges.txt.

    The id of <|endoftext|> ends documents. The characters <|endoftext|> within a text are tokenized as text.
    """

    bos: int | None = None
    pad: int | None = None

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        super().__init__(_read_bpe(Path(vocab_file), Path(merge_file)), name=f"GPT2BPETokenizer {vocab_file}")
        if END_OF_TEXT not in self._vocab:
            raise ValueError(f"{vocab_file} has no {END_OF_TEXT}, which ends documents")
        missing = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(self._vocab))
        if missing:
            # The library would silently drop these bytes.
            raise ValueError(f"{vocab_file} lacks {len(missing)} of the 256 byte tokens, for example {missing[0]!r}")
        self.eod = self._vocab[END_OF_TEXT]

    @property
    def special_tokens(self) -> dict[str, int]:
        return {END_OF_TEXT: self.eod}


def _read_bpe(vocab_file: Path, merge_file: Path) -> Tokenizer:
    for path, flag, usual in ((vocab_file, "--vocab-file", "vocab.json"), (merge_file, "--merge-file", "merges.txt")):
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist: {flag} must be a {usual}")
    # BPE.from_file raises a bare Exception, which cannot be handled precisely.
    try:
        vocab = {str(token): int(number) for token, number in json.loads(vocab_file.read_bytes()).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{vocab_file} is not a vocab.json, an object of tokens and ids: {error}") from error
    merges = _read_merges(merge_file, vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _read_merges(path: Path, vocab: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        words = line.split(" ")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        if len(words) != 2 or not {*words, "".join(words)} <= vocab.keys():
            raise ValueError(f"{path}:{number}: {line!r} must be two tokens whose merge is in the vocabulary")
        merges.append((words[0], words[1]))
    return merges
