"""GPT-2's byte-level BPE from a vocabulary and a merges file, merged by the tokenizers library."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megatron.core.tokenizers.library_tokenizer import LibraryTokenizer

END_OF_TEXT = "<|endoftext|>"


class GPT2BPETokenizer(LibraryTokenizer):
    """The ids of vocab.json; <|endoftext|> ends a document, and stays text where it stands in text."""

    bos: int | None = None
    pad: int | None = None

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        super().__init__(_read(Path(vocab_file), Path(merge_file)), name=f"GPT2BPETokenizer {vocab_file}")
        if END_OF_TEXT not in self._vocab:
            raise ValueError(f"{vocab_file} has no {END_OF_TEXT}, which ends documents")
        missing = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(self._vocab))
        if missing:
            # The library would leave such bytes out of the tokens without a word.
            raise ValueError(f"{vocab_file} lacks {len(missing)} of the 256 byte tokens, {missing[0]!r} for one")
        self.eod = self._vocab[END_OF_TEXT]

    @property
    def special_tokens(self) -> dict[str, int]:
        return {END_OF_TEXT: self.eod}


def _read(vocab_file: Path, merge_file: Path) -> Tokenizer:
    for path, flag, usual in ((vocab_file, "--vocab-file", "vocab.json"), (merge_file, "--merge-file", "merges.txt")):
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist: {flag} must name a {usual}")
    # BPE.from_file raises a bare Exception, which nobody may catch here.
    try:
        vocab = {str(token): int(number) for token, number in json.loads(vocab_file.read_bytes()).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{vocab_file} is no vocab.json, an object of token and id: {error}") from error
    merges = _read_merges(merge_file, vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _read_merges(path: Path, vocab: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        words = line.split(" ")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        if len(words) != 2 or not {*words, "".join(words)} <= vocab.keys():
            raise ValueError(f"{path}:{number}: {line!r} must be two tokens that make a third one of the vocabulary")
        merges.append((words[0], words[1]))
    return merges
