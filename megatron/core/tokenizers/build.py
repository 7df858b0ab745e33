"""Tokenizer flags of the command line, and build_tokenizer, which builds the tokenizer that they select."""

from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config_field import config_field, validate_fields
from megatron.core.tokenizers.library_tokenizers import GPT2BPETokenizer, HuggingFaceTokenizer
from megatron.core.tokenizers.optional_tokenizers import Llama2Tokenizer, SentencePieceTokenizer, TikTokenizer
from megatron.core.tokenizers.tokenizer import BaseTokenizer, ByteLevelTokenizer, NullTokenizer

AVAILABLE = (
    "ByteLevelTokenizer",
    "GPT2BPETokenizer",
    "GPTSentencePieceTokenizer",
    "HuggingFaceTokenizer",
    "Llama2Tokenizer",
    "NullTokenizer",
    "SentencePieceTokenizer",
    "TikTokenizer",
)
# Required flags of each type, with a description of the value.
_SENTENCEPIECE = {"--tokenizer-model": "a SentencePiece .model file"}
_NEEDS = {
    "GPT2BPETokenizer": {"--vocab-file": "a vocab.json", "--merge-file": "a merges.txt"},
    "GPTSentencePieceTokenizer": _SENTENCEPIECE,
    "HuggingFaceTokenizer": {"--tokenizer-model": "a tokenizer.json"},
    "Llama2Tokenizer": _SENTENCEPIECE,
    "NullTokenizer": {"--vocab-size": "the number of token ids"},
    "SentencePieceTokenizer": _SENTENCEPIECE,
    "TikTokenizer": {"--tokenizer-model": "a .json or .tiktoken vocabulary"},
}
_FILES = ("--tokenizer-model", "--vocab-file", "--merge-file")


@dataclass(kw_only=True)
class TokenizerConfig:
    """Selects a tokenizer and its files."""

    cli_group: ClassVar[str] = "tokenizer"

    vocab_size: int | None = config_field(
        None,
        help="Number of token ids of the model, including the end of document, before padding; default: the number of "
        "ids of the tokenizer. NullTokenizer requires it, and TikTokenizer truncates its vocabulary to it.",
        at_least=1,
    )
    tokenizer_type: str | None = config_field(
        None,
        help="Type of tokenizer. ByteLevelTokenizer requires no file. NullTokenizer reads ids. GPT2BPETokenizer reads "
        "--vocab-file and --merge-file and is the default if both are given. The others read --tokenizer-model.",
        choices=AVAILABLE,
    )
    tokenizer_model: str | None = config_field(
        None,
        help="A tokenizer.json or its folder, a SentencePiece .model, or a tiktoken vocabulary; never downloaded.",
    )
    vocab_file: str | None = config_field(None, help="The vocab.json of GPT2BPETokenizer.")
    merge_file: str | None = config_field(None, help="The merges.txt of GPT2BPETokenizer.")
    tiktoken_pattern: str | None = config_field(
        None, help="Pattern with which TikTokenizer splits text before merging.", choices=("v2",)
    )
    null_tokenizer_eod_id: int | None = config_field(
        None, help="End-of-document id of NullTokenizer; default: the last id.", at_least=0
    )

    def __post_init__(self) -> None:
        validate_fields(self)
        # Old scripts give only the files.
        if self.tokenizer_type is None and self.vocab_file is not None and self.merge_file is not None:
            self.tokenizer_type = "GPT2BPETokenizer"
        self.validate_needs()

    def validate_needs(self) -> None:
        """Raises ValueError for fields that the selected type does not use, and for missing required fields."""
        if self.tokenizer_type is None:
            return
        needs = _NEEDS.get(self.tokenizer_type, {})
        values = {flag: vars(self)[flag[2:].replace("-", "_")] for flag in (*_FILES, *needs)}
        for flag, value in values.items():
            if flag in needs and value is None:
                raise ValueError(f"--tokenizer-type {self.tokenizer_type} requires {flag}: {needs[flag]}")
            if flag not in needs and value is not None:
                reads = " and ".join(name for name in needs if name in _FILES) or "no file"
                raise ValueError(
                    f"{flag} {value} conflicts with --tokenizer-type {self.tokenizer_type}, which reads {reads}"
                )
        if self.null_tokenizer_eod_id is not None and self.tokenizer_type != "NullTokenizer":
            raise ValueError(f"--null-tokenizer-eod-id conflicts with --tokenizer-type {self.tokenizer_type}")


def build_tokenizer(config: TokenizerConfig) -> BaseTokenizer:
    """Builds the tokenizer that `config` selects. Raises ValueError or OSError for an invalid type, file or vocab_size.

    Should be called within `all_ranks_agree`, because a file may be missing on this node only.
    """
    tokenizer = _build(config)
    if config.vocab_size is not None and config.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"--vocab-size is {config.vocab_size}: {tokenizer.name} has {tokenizer.vocab_size} ids; increase the "
            "flag to at least that number, or omit it"
        )
    return tokenizer


def _build(config: TokenizerConfig) -> BaseTokenizer:
    if config.tokenizer_type not in AVAILABLE:
        raise ValueError(f"--tokenizer-type is {config.tokenizer_type}: must be one of {', '.join(AVAILABLE)}")
    # validate_needs has checked the files.
    model = config.tokenizer_model or ""
    match config.tokenizer_type:
        case "ByteLevelTokenizer":
            return ByteLevelTokenizer()
        case "GPT2BPETokenizer":
            return GPT2BPETokenizer(config.vocab_file or "", config.merge_file or "")
        case "HuggingFaceTokenizer":
            return HuggingFaceTokenizer(model)
        case "Llama2Tokenizer":
            return Llama2Tokenizer(model)
        case "NullTokenizer":
            return NullTokenizer(config.vocab_size or 0, config.null_tokenizer_eod_id)
        case "TikTokenizer":
            return TikTokenizer(model, config.vocab_size)
        case kind:
            return SentencePieceTokenizer(model, kind=kind)
