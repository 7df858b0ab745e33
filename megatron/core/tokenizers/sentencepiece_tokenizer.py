"""SentencePiece models through their own library, under the three names that Megatron has for them."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core.tokenizers.base_tokenizer import PIP_EXTRA, BaseTokenizer


class SentencePieceTokenizer(BaseTokenizer):
    """The ids of a .model file; a document ends with its </s>. Text that looks like </s> stays text."""

    def __init__(self, path: str, *, kind: str = "SentencePieceTokenizer") -> None:
        self.name = f"{kind} {path}"
        self._model = _read(path, kind=kind)
        self.vocab_size = self._model.get_piece_size()
        # The library says -1 for a piece that the model does not have.
        bos, eos, pad = (
            None if token < 0 else token for token in (self._model.bos_id(), self._model.eos_id(), self._model.pad_id())
        )
        if eos is None:
            raise ValueError(f"{path} has no </s>: train the model with an eos piece, it ends documents")
        self.eod, self.bos, self.pad = eos, bos, pad

    def tokenize(self, text: str) -> list[int]:
        return self.tokenize_piece(text)

    def tokenize_piece(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(text)
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """Control pieces such as <s> and </s> have no text."""
        text: str = self._model.decode(self._checked(ids))
        return text

    @property
    def vocab(self) -> dict[str, int]:
        return {self._model.id_to_piece(token): token for token in range(self.vocab_size)}

    @functools.cached_property
    def special_tokens(self) -> dict[str, int]:
        """The model's control pieces: all pieces are asked, once."""
        return {
            self._model.id_to_piece(token): token for token in range(self.vocab_size) if self._model.is_control(token)
        }


class Llama2Tokenizer(SentencePieceTokenizer):
    """As SentencePieceTokenizer, with <s> before every document."""

    def __init__(self, path: str) -> None:
        super().__init__(path, kind="Llama2Tokenizer")
        if self.bos is None:
            raise ValueError(f"{path} has no <s>, which Llama2Tokenizer begins documents with")

    def tokenize(self, text: str) -> list[int]:
        assert self.bos is not None, "the constructor checks it"
        return [self.bos, *self.tokenize_piece(text)]


def _read(path: str, *, kind: str) -> Any:
    try:
        import sentencepiece
    except ImportError as error:
        raise ValueError(f"--tokenizer-type {kind} needs the package sentencepiece: {PIP_EXTRA}") from error
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} does not exist: --tokenizer-model must name a SentencePiece .model file")
    data = Path(path).read_bytes()
    if not data:
        raise ValueError(f"{path} is no SentencePiece model: it is empty")
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=data)
    except RuntimeError as error:
        raise ValueError(f"{path} is no SentencePiece model") from error
