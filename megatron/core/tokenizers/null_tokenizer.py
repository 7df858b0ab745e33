"""The tokenizer of data that is token ids already: text is numbers between blanks."""

from collections.abc import Sequence

from megatron.core.tokenizers.base_tokenizer import BaseTokenizer


class NullTokenizer(BaseTokenizer):
    """`vocab_size` ids, eod included; eod is the last one unless `eod_id` names another."""

    bos: int | None = None
    pad: int | None = None

    def __init__(self, vocab_size: int, eod_id: int | None = None) -> None:
        eod = vocab_size - 1 if eod_id is None else eod_id
        if not 0 <= eod < vocab_size:
            raise ValueError(
                f"null_tokenizer_eod_id is {eod}: must be 0 to {vocab_size - 1} with vocab_size {vocab_size}"
            )
        self.name = f"NullTokenizer of {vocab_size} ids"
        self.vocab_size = vocab_size
        self.eod = eod

    def tokenize(self, text: str) -> list[int]:
        """Raises ValueError naming the first word that is no id."""
        ids = []
        for word in text.split():
            if not (word.isascii() and word.isdigit()) or int(word) >= self.vocab_size:
                raise ValueError(f"{word[:40]!r} is no token of the {self.name}: must be 0 to {self.vocab_size - 1}")
            ids.append(int(word))
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(token)) for token in ids)

    @property
    def vocab(self) -> dict[str, int]:
        return {str(token): token for token in range(self.vocab_size)}
