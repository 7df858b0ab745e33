"""Writes small vocabularies of every kind. Contains no tests."""

import base64
import io
import json
from pathlib import Path

import sentencepiece
from tokenizers import pre_tokenizers
from tokenizers.implementations import ByteLevelBPETokenizer

TEXT = ["hello world, hello hello", "the quick brown fox jumps over the lazy dog 2026", "gr\u00fc\u00dfe aus K\u00f6ln"]


def write_sentencepiece(path: Path, **settings: object) -> Path:
    """Trains a byte-fallback BPE of about 300 pieces, with ids 0, 1, 2 for <unk>, <s>, </s> and without padding."""
    model = io.BytesIO()
    wanted = {"vocab_size": 320, "model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT * 20),
        model_writer=model,
        **{**wanted, "hard_vocab_limit": False, "minloglevel": 2, **settings},
    )
    path.write_bytes(model.getvalue())
    return path


def ranks() -> list[bytes]:
    """Returns 256 bytes and some words, in order of their ranks."""
    words = [b"th", b"he", b"the", b" the", b"ell", b"ello", b"hello", b" w", b"or", b" wor", b"20", b"HE"]
    return [bytes([byte]) for byte in range(256)] + words


def write_tiktoken(path: Path) -> Path:
    """Writes Megatron's JSON list if the name ends in .json, else OpenAI's lines."""
    pairs = [(rank, base64.b64encode(token).decode()) for rank, token in enumerate(ranks())]
    if path.suffix == ".json":
        path.write_text(json.dumps([{"rank": rank, "token_bytes": text, "token_str": ""} for rank, text in pairs]))
    else:
        path.write_text("".join(f"{text} {rank}\n" for rank, text in pairs))
    return path


def write_gpt2(folder: Path) -> tuple[Path, Path]:
    """Writes vocab.json and merges.txt of a byte-level BPE with <|endoftext|>."""
    library = ByteLevelBPETokenizer()
    library.train_from_iterator(TEXT * 3, vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    folder.mkdir(exist_ok=True)
    library.save_model(str(folder))
    vocab = json.loads((folder / "vocab.json").read_text())
    assert set(pre_tokenizers.ByteLevel.alphabet()) <= vocab.keys()
    return folder / "vocab.json", folder / "merges.txt"
