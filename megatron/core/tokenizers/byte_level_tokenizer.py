"""The tokenizer without a model file: the 256 bytes of UTF-8 text, and one id that ends a document."""

from collections.abc import Sequence

from megatron.core.tokenizers.base_tokenizer import BaseTokenizer

NUM_BYTES = 256
END_OF_TEXT = "<|endoftext|>"


class ByteLevelTokenizer(BaseTokenizer):
    """Ids 0 to 255 are bytes, 256 ends a document. There are no bos and pad ids."""

    name = "ByteLevelTokenizer"
    vocab_size = NUM_BYTES + 1
    eod = NUM_BYTES
    bos: int | None = None
    pad: int | None = None

    def tokenize(self, text: str) -> list[int]:
        """Raises UnicodeEncodeError for lone surrogates, which are no text."""
        return list(text.encode())

    def detokenize(self, ids: Sequence[int]) -> str:
        """Bytes that are not UTF-8 become U+FFFD: a model's output, or a cut prompt, may end inside a character."""
        pieces = bytearray()
        for token in self._checked(ids):
            pieces += END_OF_TEXT.encode() if token == self.eod else bytes([token])
        return pieces.decode(errors="replace")

    @property
    def vocab(self) -> dict[str, int]:
        return {f"<0x{byte:02X}>": byte for byte in range(NUM_BYTES)} | self.special_tokens

    @property
    def special_tokens(self) -> dict[str, int]:
        return {END_OF_TEXT: self.eod}
