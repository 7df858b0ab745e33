"""Command-line fields of the tokenizer; build.py makes the tokenizer from them."""

from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config_field import config_field, validate_fields

AVAILABLE = ("ByteLevelTokenizer", "HuggingFaceTokenizer", "NullTokenizer")


@dataclass(kw_only=True)
class TokenizerConfig:
    """Flags of the group "tokenizer"."""

    cli_group: ClassVar[str] = "tokenizer"

    vocab_size: int | None = config_field(
        None,
        help="Number of token ids, end of document included, before padding. Needed by NullTokenizer alone.",
        at_least=1,
    )
    tokenizer_type: str | None = config_field(
        None,
        help="ByteLevelTokenizer needs no file, HuggingFaceTokenizer reads --tokenizer-model, NullTokenizer reads ids.",
        choices=AVAILABLE,
    )
    tokenizer_model: str | None = config_field(
        None, help="A tokenizer.json, or the folder that holds it; never downloaded."
    )
    null_tokenizer_eod_id: int | None = config_field(
        None, help="End-of-document id of NullTokenizer; by default the last one.", at_least=0
    )

    def __post_init__(self) -> None:
        validate_fields(self)
        self.validate_needs()

    def validate_needs(self) -> None:
        """Refuses fields that the chosen type does not read, and asks for those it cannot do without."""
        if self.tokenizer_type == "HuggingFaceTokenizer" and self.tokenizer_model is None:
            raise ValueError("--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model: a tokenizer.json")
        if self.tokenizer_type == "NullTokenizer" and self.vocab_size is None:
            raise ValueError("--tokenizer-type NullTokenizer needs --vocab-size: the number of token ids")
        if self.tokenizer_type in ("ByteLevelTokenizer", "NullTokenizer") and self.tokenizer_model is not None:
            raise ValueError(
                f"--tokenizer-model {self.tokenizer_model} contradicts --tokenizer-type {self.tokenizer_type}, "
                "which reads no file"
            )
        if self.null_tokenizer_eod_id is not None and self.tokenizer_type != "NullTokenizer":
            raise ValueError(f"--null-tokenizer-eod-id contradicts --tokenizer-type {self.tokenizer_type}")
