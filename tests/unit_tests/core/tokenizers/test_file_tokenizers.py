"""SentencePiece, tiktoken and GPT-2 tokenizers agree with their libraries, and report errors in files."""

import base64
import json
import pickle
import sys
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Tokenizer

from megatron.core.tokenizers import TokenizerConfig, build_tokenizer
from megatron.core.tokenizers.optional_tokenizers import PATTERN
from megatron.core.tokenizers.tokenizer import BaseTokenizer
from tests.unit_tests.core.tokenizers.vocabularies import ranks, write_gpt2, write_sentencepiece, write_tiktoken

SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
TEXTS = st.text(max_size=60) | st.sampled_from(["hello the world", " The lazy  dog\n\n2026", "HELLO's \u4e16\u754c"])


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("vocabularies")
    vocab, merges = write_gpt2(folder)
    return {
        "model": write_sentencepiece(folder / "s.model"),
        "json": write_tiktoken(folder / "t.json"),
        "tiktoken": write_tiktoken(folder / "t.tiktoken"),
        "vocab": vocab,
        "merges": merges,
    }


def build(kind: str, path: Path, merges: Path | None = None, **fields: int) -> BaseTokenizer:
    if merges is not None:
        return build_tokenizer(TokenizerConfig(tokenizer_type=kind, vocab_file=str(path), merge_file=str(merges)))
    return build_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model=str(path), **fields))


@pytest.fixture(scope="module")
def pieces(files: dict[str, Path]) -> dict[str, BaseTokenizer]:
    """Returns the SentencePiece tokenizers by name."""
    return {kind: build(kind, files["model"]) for kind in SENTENCEPIECE}


@pytest.fixture(scope="module")
def sentencepiece_library(files: dict[str, Path]) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(files["model"]))


@pytest.mark.slow
@given(text=TEXTS)
def test_sentencepiece_ids_are_the_librarys(pieces: dict[str, BaseTokenizer], sentencepiece_library, text: str) -> None:
    library = sentencepiece_library
    for kind, tokenizer in pieces.items():
        before = [library.bos_id()] if kind == "Llama2Tokenizer" else []
        assert tokenizer.encode(text) == before + library.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == library.decode(library.encode(text))


@pytest.fixture(scope="module")
def tik(files: dict[str, Path]) -> dict[str, BaseTokenizer]:
    """Returns the tiktoken tokenizers by the format of their file."""
    return {form: build("TikTokenizer", files[form]) for form in ("json", "tiktoken")}


@pytest.fixture(scope="module")
def tiktoken_library() -> tiktoken.Encoding:
    plain = {token: rank for rank, token in enumerate(ranks())}
    return tiktoken.Encoding("plain", pat_str=PATTERN, mergeable_ranks=plain, special_tokens={})


@given(text=TEXTS)
def test_tiktoken_ids_are_the_librarys_behind_1000_special_ones(
    tik: dict[str, BaseTokenizer], tiktoken_library: tiktoken.Encoding, text: str
) -> None:
    for tokenizer in tik.values():
        assert tokenizer.encode(text) == [1000 + token for token in tiktoken_library.encode_ordinary(text)]
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", ["", "hello", " The  dog\n"])
def test_tiktoken_reads_a_million_blanks(tik: dict[str, BaseTokenizer], text: str) -> None:
    blanks = " " * 1_000_000 + text  # the library panics on it
    assert tik["tiktoken"].decode(tik["tiktoken"].encode(blanks)) == blanks


# transformers encodes the name of the special token as its id, GPT2BPETokenizer as text.
@given(text=TEXTS.filter(lambda text: "<|endoftext|>" not in text))
def test_gpt2_ids_are_those_of_transformers(files: dict[str, Path], text: str) -> None:
    tokenizer = build("GPT2BPETokenizer", files["vocab"], files["merges"])
    words = [line for line in files["merges"].read_text().splitlines() if line[:1] != "#"]
    reference = GPT2Tokenizer(
        vocab=json.loads(files["vocab"].read_text()), merges=[tuple(line.split(" ")) for line in words]
    )
    assert tokenizer.encode(text) == reference.encode(text) and tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.tokenize_batch([text, "a"]) == [tokenizer.encode(text), tokenizer.encode("a")]


@pytest.mark.slow
def test_special_ids_sizes_and_vocabularies(files: dict[str, Path]) -> None:
    pieces = build("SentencePieceTokenizer", files["model"])
    tik = build("TikTokenizer", files["json"])
    gpt2 = build("GPT2BPETokenizer", files["vocab"], files["merges"])
    assert [(one.bos, one.eod, one.eos, one.pad) for one in (pieces, tik)] == [(1, 2, 2, None), (1, 2, 2, 4)]
    assert (gpt2.eod, gpt2.bos, gpt2.decode([gpt2.eod])) == (0, None, "<|endoftext|>")
    assert tik.vocab_size == 1000 + len(ranks()) and tik.decode([2, 999, 1256]) == "</s><SPECIAL_999>th"
    padded = files["model"].with_name("padded.model")
    assert build("Llama2Tokenizer", write_sentencepiece(padded, pad_id=3)).pad == 3
    for tokenizer in (pieces, tik, gpt2):
        assert set(tokenizer.vocab.values()) == set(range(tokenizer.vocab_size))
        assert all(tokenizer.vocab[text] == token for token, text in tokenizer.inv_vocab.items())
        assert pickle.loads(pickle.dumps(tokenizer)).encode("hello </s>") == tokenizer.encode("hello </s>")
        assert tokenizer.eod not in tokenizer.encode("hello </s> <|endoftext|>")


def test_sentencepiece_models_may_have_a_special_piece_at_0(tmp_path: Path) -> None:
    # As in T5.
    path = write_sentencepiece(tmp_path / "t5.model", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    tokenizer = build("SentencePieceTokenizer", path)
    assert (tokenizer.bos, tokenizer.eod, tokenizer.pad) == (None, 1, 0)


def test_a_smaller_vocab_size_leaves_out_the_last_ranks(files: dict[str, Path]) -> None:
    tokenizer = build("TikTokenizer", files["json"], vocab_size=1258)
    assert tokenizer.encode("the wor") == [1256, 1101, *(1000 + byte for byte in b" wor")]
    for wrong in (1255, 1269):
        with pytest.raises(ValueError, match=f"--vocab-size is {wrong}: TikTokenizer .* supports 1256 to 1268"):
            build("TikTokenizer", files["json"], vocab_size=wrong)


def _lines(*pairs: tuple[int, bytes]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in pairs)


@pytest.mark.parametrize(
    "kind, content, message",
    [
        ("SentencePieceTokenizer", b"", "it is empty"),
        ("Llama2Tokenizer", b"{}", "is not a SentencePiece model"),
        ("SentencePieceTokenizer", {"eos_id": -1}, "has no </s>"),
        ("Llama2Tokenizer", {"bos_id": -1}, "has no <s>"),
        ("SentencePieceTokenizer", None, "must be a SentencePiece .model file"),
        ("TikTokenizer", None, "must be a .json or .tiktoken vocabulary"),
        ("TikTokenizer", b"[{}]", "is not a tiktoken vocabulary"),
        ("TikTokenizer", b"a b c", "is not a tiktoken vocabulary"),
        ("TikTokenizer", b"not*base64 0", "is not a tiktoken vocabulary"),
        ("TikTokenizer", _lines((0, b"a"), (2, b"b")), "ranks must be 0 to 1"),
        ("TikTokenizer", _lines((0, b"a"), (1, b"b")), "the first 256 ranks must be the single bytes"),
    ],
)
def test_unusable_files_are_named(tmp_path: Path, kind: str, content: object, message: str) -> None:
    path = tmp_path / "file"
    if isinstance(content, dict):
        write_sentencepiece(path, **content)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=f"{path}.*{message}"):
        build(kind, path)


@pytest.mark.parametrize(
    "vocab, merges, message",
    [
        (None, "", "--vocab-file must be"),
        ("[]", "", "is not a vocab.json"),
        ("{}", "", "has no <.endoftext.>"),
        ('{"<|endoftext|>": 0, "a": 1}', "", "lacks 255 of the 256 byte tokens"),
        ('{"a": 0}', "#version: 0.2\na b\n", "merges.txt:2: 'a b' must be two tokens"),
    ],
)
def test_unusable_gpt2_files_are_named(tmp_path: Path, vocab: str | None, merges: str, message: str) -> None:
    (tmp_path / "merges.txt").write_text(merges)
    if vocab is not None:
        (tmp_path / "vocab.json").write_text(vocab)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        build("GPT2BPETokenizer", tmp_path / "vocab.json", tmp_path / "merges.txt")


@pytest.mark.parametrize("kind, package", [("Llama2Tokenizer", "sentencepiece"), ("TikTokenizer", "tiktoken")])
def test_a_missing_package_is_an_error_that_says_how_to_get_it(files, monkeypatch, kind: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf"{kind} requires the package {package}: pip install .*\[tokenizers\]"):
        build(kind, files["model" if package == "sentencepiece" else "json"])
