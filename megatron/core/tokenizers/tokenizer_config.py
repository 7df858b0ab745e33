"""Command-line fields of the tokenizer; build.py makes the tokenizer from them."""

from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config_field import config_field, validate_fields

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
# The flags that a type cannot do without, each with what its value is.
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
    """Flags of the group "tokenizer"."""

    cli_group: ClassVar[str] = "tokenizer"

    vocab_size: int | None = config_field(
        None,
        help="Number of token ids of the model, end of document included, before padding; unset: the tokenizer's. "
        "NullTokenizer needs it, TikTokenizer cuts its vocabulary there.",
        at_least=1,
    )
    tokenizer_type: str | None = config_field(
        None,
        help="ByteLevelTokenizer needs no file, NullTokenizer reads ids, GPT2BPETokenizer reads --vocab-file and "
        "--merge-file and is taken where both are given, the others read --tokenizer-model.",
        choices=AVAILABLE,
    )
    tokenizer_model: str | None = config_field(
        None,
        help="A tokenizer.json or its folder, a SentencePiece .model, or a tiktoken vocabulary; never downloaded.",
    )
    vocab_file: str | None = config_field(None, help="The vocab.json of GPT2BPETokenizer.")
    merge_file: str | None = config_field(None, help="The merges.txt of GPT2BPETokenizer.")
    tiktoken_pattern: str | None = config_field(
        None, help="How TikTokenizer cuts text; there is one way.", choices=("v2",)
    )
    null_tokenizer_eod_id: int | None = config_field(
        None, help="End-of-document id of NullTokenizer; by default the last one.", at_least=0
    )

    def __post_init__(self) -> None:
        validate_fields(self)
        self.validate_needs()

    def validate_needs(self) -> None:
        """Refuses fields that the chosen type does not read, and asks for those it cannot do without."""
        if self.tokenizer_type is None:
            return
        needs = _NEEDS.get(self.tokenizer_type, {})
        values = {flag: vars(self)[flag[2:].replace("-", "_")] for flag in (*_FILES, *needs)}
        for flag, value in values.items():
            if flag in needs and value is None:
                raise ValueError(f"--tokenizer-type {self.tokenizer_type} needs {flag}: {needs[flag]}")
            if flag not in needs and value is not None:
                reads = " and ".join(name for name in needs if name in _FILES) or "no file"
                raise ValueError(
                    f"{flag} {value} contradicts --tokenizer-type {self.tokenizer_type}, which reads {reads}"
                )
        if self.null_tokenizer_eod_id is not None and self.tokenizer_type != "NullTokenizer":
            raise ValueError(f"--null-tokenizer-eod-id contradicts --tokenizer-type {self.tokenizer_type}")
