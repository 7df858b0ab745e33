"""What data has to know of a tokenizer; every tokenizer of megatron.core.tokenizers fits."""

from typing import Protocol


class Vocabulary(Protocol):
    """Token ids 0 to vocab_size - 1; `eod` ends a document, `name` says in errors whose ids they are."""

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eod(self) -> int: ...
