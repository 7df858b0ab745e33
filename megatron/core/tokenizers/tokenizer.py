"""What the rest of the framework asks of any tokenizer; no tokenizer is implemented here."""

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """Text to token ids and back. Ids lie in [0, vocab_size); `name` says in errors which tokenizer it is."""

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int:
        """Number of ids, special ones included, without any padding of the model's vocabulary."""
        ...

    @property
    def eod(self) -> int:
        """The id that ends a document."""
        ...

    @property
    def bos(self) -> int | None: ...

    @property
    def pad(self) -> int | None: ...

    def tokenize(self, text: str) -> list[int]: ...

    def detokenize(self, ids: Sequence[int]) -> str: ...


def vocab_size_with_padding(vocab_size: int, *, divisible_by: int, tensor_parallel_size: int = 1) -> int:
    """`vocab_size` rounded up so that each of the tensor-parallel ranks gets a multiple of `divisible_by` rows."""
    multiple = divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple
