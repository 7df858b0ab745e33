"""MegatronTokenizer.from_pretrained, with which scripts written for Megatron Core build a tokenizer."""

import json
import os
from pathlib import Path
from typing import Any

from megatron.core.tokenizers.build import TokenizerConfig, build_tokenizer
from megatron.core.tokenizers.tokenizer import BaseTokenizer, NullTokenizer

# Library in a tokenizer's metadata -> tokenizer type that reads its files.
_KINDS = {
    "byte-level": "ByteLevelTokenizer",
    "huggingface": "HuggingFaceTokenizer",
    "megatron": "GPT2BPETokenizer",
    "sentencepiece": "SentencePieceTokenizer",
    "tiktoken": "TikTokenizer",
}
_NULL = ("null", "null-text")
# Default location of a tokenizer's metadata in Megatron Core.
_METADATA = "tokenizer_metadata.json"


class MegatronTokenizer:
    """Builds tokenizers from a path and the metadata next to it. The class has no instances."""

    @staticmethod
    def from_pretrained(
        tokenizer_path: str | None = None,
        metadata_path: str | os.PathLike[str] | dict[str, Any] | None = None,
        *,
        vocab_size: int | None = None,
        vocab_file: str | None = None,
        merges_file: str | None = None,
    ) -> BaseTokenizer:
        """Builds a tokenizer from files or from a number of ids; see TokenizerConfig for the files of each type.

        metadata_path: a dictionary, or a JSON file containing one, whose "library" is byte-level, huggingface,
        megatron, null-text, sentencepiece or tiktoken; None reads tokenizer_metadata.json next to the tokenizer.
        vocab_size: for null-text, the number of ids without the end of document, which is added. vocab_file,
        merges_file: for megatron, which selects GPT-2's tokenizer. Raises ValueError for an unknown library, for files
        that the library does not read, and for missing files. Raises OSError for a file that cannot be read.
        """
        library = _library_of(tokenizer_path, metadata_path)
        if library in _NULL:
            if vocab_size is None:
                raise ValueError(f"vocab_size is None: must be the number of token ids for the library {library}")
            return NullTokenizer(vocab_size + 1)
        if library not in _KINDS:
            known = ", ".join(sorted({*_KINDS, *_NULL}))
            raise ValueError(f"library is {library!r} in the tokenizer's metadata: must be one of {known}")
        return build_tokenizer(
            TokenizerConfig(
                tokenizer_type=_KINDS[library],
                tokenizer_model=tokenizer_path,
                vocab_size=vocab_size,
                vocab_file=vocab_file,
                merge_file=merges_file,
            )
        )


def _library_of(tokenizer_path: str | None, metadata: str | os.PathLike[str] | dict[str, Any] | None) -> Any:
    if not isinstance(metadata, dict):
        if metadata is None:
            if tokenizer_path is None:
                raise ValueError(
                    "tokenizer_path and metadata_path are both None: give one of them to select a tokenizer"
                )
            path = Path(tokenizer_path)
            metadata = (path if path.is_dir() else path.parent) / _METADATA
        metadata = json.loads(Path(metadata).read_text(encoding="utf-8"))
    if not isinstance(metadata, dict) or "library" not in metadata:
        raise ValueError(f"the tokenizer's metadata is {metadata!r}: must have a key 'library'")
    return metadata["library"]
