"""python_corpus.py and train_tokenizer.py: text from any Python installation, and deterministic tokenizers."""

import ast
import json
from pathlib import Path

import pytest

from megatron.core.tokenizers.library_tokenizers import HuggingFaceTokenizer
from megatron.tools import python_corpus, train_tokenizer


def lines(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "new" / "python.jsonl"
    assert python_corpus.main(["--output", str(path), "--max-bytes", "3000000"]) == 0
    return path


@pytest.mark.slow
def test_the_corpus_has_the_size_asked_for_of_distinct_texts_of_every_kind(corpus: Path) -> None:
    documents = lines(corpus)
    texts = [document["text"] for document in documents]
    assert 2_500_000 < sum(len(text.encode()) for text in texts) <= 3_000_000
    assert len(set(texts)) == len(texts) and all(text.strip() for text in texts)
    sources = [document["source"] for document in documents]
    kinds = [source.split()[0] if " " in source else "module" for source in sources]
    assert {"topic", "builtin", "module"} == set(kinds)
    assert not [source for source in sources if "site-packages" in source]
    # Shuffled: each half contains roughly half of the topics.
    half = kinds[: len(kinds) // 2].count("topic") / kinds.count("topic")
    assert 0.3 < half < 0.7
    modules = [document for document in documents if document["source"].endswith(".py")]
    assert all(isinstance(ast.parse(document["text"]), ast.Module) for document in modules[:20])


def test_the_corpus_is_the_same_in_every_run(corpus: Path, tmp_path: Path) -> None:
    assert python_corpus.main(["--output", str(tmp_path / "again.jsonl"), "--max-bytes", "3000000"]) == 0
    assert (tmp_path / "again.jsonl").read_bytes() == corpus.read_bytes()


def test_a_corpus_too_small_for_a_document_is_refused(tmp_path: Path, capsys) -> None:
    assert python_corpus.main(["--output", str(tmp_path / "a.jsonl"), "--max-bytes", "10"]) == 1
    assert "--max-bytes is 10: the first document is longer" in capsys.readouterr().err
    assert not (tmp_path / "a.jsonl").exists()


def test_a_tokenizer_trained_twice_is_the_same_file_and_loads(corpus: Path, tmp_path: Path, capsys) -> None:
    small = tmp_path / "small.jsonl"
    small.write_text("\n".join(corpus.read_text(encoding="utf-8").splitlines()[:40]), encoding="utf-8")
    for output in ("a", "b/other.json"):
        words = ["--input", str(small), "--vocab-size", "1000", "--output", str(tmp_path / output)]
        assert train_tokenizer.main(words) == 0
    assert f"1,000 tokens: --tokenizer-model {tmp_path / 'b/other.json'}" in capsys.readouterr().out
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (tmp_path / "b" / "other.json").read_bytes()
    tokenizer = HuggingFaceTokenizer(str(tmp_path / "a"))
    text = max((document["text"] for document in lines(small)), key=len)
    assert (tokenizer.vocab_size, tokenizer.eod) == (1000, 0)
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    assert len(tokenizer.tokenize(text)) < 0.6 * len(text.encode())


@pytest.mark.parametrize("content", ["", "broken\n"])
def test_a_tokenizer_needs_text(tmp_path: Path, capsys, content: str) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    words = ["--input", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "t.json")]
    assert train_tokenizer.main(words) == 1
    err = capsys.readouterr().err
    assert "error: the input contains no text" in err and ("a.jsonl:1: not JSON" in err) == bool(content)
    assert not (tmp_path / "t.json").exists()


def test_a_vocabulary_smaller_than_the_bytes_is_refused(tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        train_tokenizer.main(["--input", "a", "--output", str(tmp_path), "--vocab-size", "256"])
    assert "--vocab-size is 256: must be at least 257" in capsys.readouterr().err
