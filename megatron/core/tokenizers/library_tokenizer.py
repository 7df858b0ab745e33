"""What tokenizers that run in Hugging Face's `tokenizers` library share; their files are read by the subclasses."""

from collections.abc import Sequence

from tokenizers import Tokenizer

from megatron.core.tokenizers.base_tokenizer import BaseTokenizer


class LibraryTokenizer(BaseTokenizer):
    """A tokenizer of the library under a name for errors; a subclass finds the special ids."""

    def __init__(self, tokenizer: Tokenizer, *, name: str) -> None:
        self.name = name
        self._tokenizer = tokenizer
        self._vocab: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        # Not the number of entries: ids may have gaps, and the model needs a row for the highest one.
        self.vocab_size = max(self._vocab.values(), default=-1) + 1

    def tokenize(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`tokenize` of each text, faster: what nobody reads here is not made."""
        return [found.ids for found in self._tokenizer.encode_batch_fast(list(texts))]

    def detokenize(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)
        return text

    @property
    def vocab(self) -> dict[str, int]:
        return self._vocab
