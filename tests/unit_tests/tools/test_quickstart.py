"""Tests of what `make train` decides and prints: shares of documents, the source of tokens, the plan, the prompt."""

import json
from pathlib import Path

import pytest

from megatron.core.datasets.utils import split_documents
from megatron.tools import preprocess_data, train_tokenizer
from megatron.tools.quickstart import (
    Workspace,
    check_source,
    held_out_passage,
    indented,
    make_workspace,
    plan_words,
    split_of,
)


@pytest.mark.parametrize("num_documents", [3, 5, 30, 1172, 100_000])
def test_every_part_gets_documents(num_documents: int) -> None:
    parts = [len(part or ()) for part in split_documents(split_of(num_documents), num_documents)]
    assert sum(parts) == num_documents and min(parts) >= 1
    assert parts[0] >= num_documents * 0.6 or num_documents == 3


@pytest.mark.parametrize("num_documents", [0, 1, 2])
def test_too_few_documents_are_refused_by_number(num_documents: int) -> None:
    with pytest.raises(SystemExit, match=f"DATA has {num_documents} documents"):
        split_of(num_documents)


def test_another_text_replaces_tokens_but_never_a_trained_run(tmp_path: Path) -> None:
    folder, text = tmp_path / "run", tmp_path / "text.txt"
    folder.mkdir()
    text.write_text("one")
    workspace = Workspace(folder, (text,))
    check_source(workspace)
    tokens = folder / "tokens_text_document.idx"
    for content, kept in (("one", True), ("another", False)):
        tokens.touch()
        text.write_text(content)
        check_source(workspace)
        assert tokens.exists() == kept
    workspace.checkpoints.mkdir()
    text.write_text("yet another")
    with pytest.raises(SystemExit, match="was made from"):
        check_source(workspace)


@pytest.mark.parametrize("separator", [" ", "\n"])
def test_the_prompt_is_a_passage_of_a_test_document(tmp_path: Path, separator: str) -> None:
    texts = [
        f"Document {number} tells of {name}.{separator}" * 60 for number, name in enumerate(("rivers", "hills", "seas"))
    ]
    source = tmp_path / "text.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    workspace = Workspace(tmp_path, (source,))
    files = ["--input", str(source), "--output"]
    assert train_tokenizer.main([*files, str(workspace.tokenizer), "--vocab-size", "300"]) == 0
    flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(workspace.tokenizer), "--append-eod"]
    assert preprocess_data.main(["--input", str(source), "--output-prefix", str(tmp_path / "tokens"), *flags]) == 0
    found = held_out_passage(workspace, split=split_of(3))
    assert found in texts[2] and 20 < len(found) < len(texts[2]) / 2
    # A whole line begins the passage if there are lines.
    assert separator == " " or found.startswith("Document 2 tells of seas.\n")


def test_generated_lines_are_marked() -> None:
    assert indented("one\ntwo\nthree\nfour\n", prompt="one\ntwo\n") == "    one\n    two\n  | three\n  | four"
    assert indented("one two three\nfour", prompt="one two") == "    one two\n  |  three\n  | four"


def test_the_line_of_the_plan_is_for_this_machine() -> None:
    stages = [{"peak": 2**30}, {"peak": 3 * 2**29}]
    plan = {"stages": stages, "world_size": 2, "step": {"seconds": 0.4321}}
    cpu = {"name": "cpu", "memory_gib": 23.54}
    assert plan_words({**plan, "device": cpu}) == (
        "each of 2 processes needs 1.50 GiB of the machine's 23.5, about 0.43 s per step"
    )
    gpu = {"name": "H100", "memory_gib": 79.6}
    assert plan_words({**plan, "device": gpu}) == (
        "each of 2 processes needs 1.50 GiB of H100's 79.6, about 0.43 s per step"
    )


def test_data_may_be_whatever_the_preprocessor_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.jsonl"):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / name).write_text("{}")
    workspace = make_workspace("texts")
    assert workspace.folder == tmp_path / "runs" / "texts" and not workspace.is_own
    assert [text.name for text in workspace.texts] == ["a.txt", "b.jsonl"]
    assert [text.name for text in make_workspace("texts/*.txt").texts] == ["a.txt"]
    assert make_workspace(None).is_own
    with pytest.raises(SystemExit, match="error: DATA is none.txt: .*none.txt"):
        make_workspace("none.txt")
