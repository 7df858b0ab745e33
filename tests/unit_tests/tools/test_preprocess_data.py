"""preprocess_data.py: the same bytes for any number of workers, and messages about invalid input."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.tokenizers.tokenizer import ByteLevelTokenizer
from megatron.tools import preprocess_data, token_chunks

TEXTS = [f"document {number}: " + "gr\u00fc\u00dfe \U0001f600 " * (number % 97) for number in range(4000)]
BYTE_LEVEL = ("--tokenizer-type", "ByteLevelTokenizer", "--append-eod")
HUGGING_FACE = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model")


def write_jsonl(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts))
    return path


def run(folder: Path, *words: object, prefix: str = "out") -> tuple[int, str]:
    prefix = str(folder / prefix)
    return preprocess_data.main([*map(str, words), "--output-prefix", prefix]), f"{prefix}_text_document"


@pytest.mark.slow
def test_documents_become_tokens_and_eod_in_order_with_any_number_of_workers(tmp_path: Path, capsys) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    outputs = []
    for workers in (1, 2, 3):
        status, prefix = run(tmp_path, "--input", file, *BYTE_LEVEL, "--workers", workers, prefix=f"w{workers}")
        assert status == 0
        outputs.append([Path(prefix + suffix).read_bytes() for suffix in (".bin", ".idx")])
    assert outputs[0] == outputs[1] == outputs[2]
    dataset = IndexedDataset(prefix)
    assert dataset[0].dtype == np.uint16
    assert [sequence.tolist() for sequence in dataset[:]] == [[*text.encode(), 256] for text in TEXTS]
    assert dataset.document_indices.tolist() == list(range(len(TEXTS) + 1))
    out, err = capsys.readouterr()
    assert "4,000 documents, " in out and f"--data-path {prefix}" in out and err == ""


def test_bad_lines_are_skipped_named_and_counted(tmp_path: Path, capsys) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "good"}\n' + "{broken\n" * 25 + '{"text": " "}\n{"text": "end"}\n')
    status, prefix = run(tmp_path, "--input", file, *BYTE_LEVEL, "--workers", 2)
    out, err = capsys.readouterr()
    assert status == 0 and "2 documents, 1 empty documents skipped" in out
    assert len(err.splitlines()) == 11 and f"{file}:2: not JSON" in err and "skipped 25 bad lines in total" in err
    assert len(IndexedDataset(prefix)) == 2


@pytest.mark.parametrize("content", ["", "\n", '{"text": ""}\n', "nonsense\n" * 3])
def test_input_without_a_document_fails_and_keeps_the_old_files(tmp_path: Path, capsys, content: str) -> None:
    good = write_jsonl(tmp_path / "good.jsonl", ["old"])
    run(tmp_path, "--input", good, *BYTE_LEVEL)
    file = tmp_path / "a.jsonl"
    file.write_text(content)
    status, prefix = run(tmp_path, "--input", file, *BYTE_LEVEL)
    assert status == 1 and f"error: no document in {file}" in capsys.readouterr().err
    assert IndexedDataset(prefix)[0].tolist() == [*b"old", 256]
    assert not [name for name in os.listdir(tmp_path) if "partial" in name]


def test_text_files_and_folders_are_read_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "b.txt").write_text("second")
    write_jsonl(folder / "a.jsonl", ["first"], key="body")
    status, _ = run(tmp_path, "--input", folder, *BYTE_LEVEL, "--json-keys", "body")
    dataset = IndexedDataset(str(tmp_path / "out_body_document"))
    tokenizer = ByteLevelTokenizer()
    assert status == 0
    assert [tokenizer.detokenize(tokens) for tokens in dataset[:]] == ["first<|endoftext|>", "second<|endoftext|>"]


def test_ids_of_a_null_tokenizer_that_do_not_exist_are_bad_lines(tmp_path: Path, capsys) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", ["1 2", "70000", "3"])
    status, prefix = run(tmp_path, "--input", file, "--tokenizer-type", "NullTokenizer", "--vocab-size", 66000)
    assert status == 0 and "a.jsonl:2: '70000' is not a token" in capsys.readouterr().err
    assert [tokens.tolist() for tokens in IndexedDataset(prefix)[:]] == [[1, 2], [3]]
    assert IndexedDataset(prefix)[0].dtype == np.int32


@pytest.mark.parametrize(
    "words, message",
    [
        (("--input", "none.jsonl", *BYTE_LEVEL), "none.jsonl does not exist"),
        (("--input", "", *BYTE_LEVEL), "an input is empty"),
        (("--input", "cut.jsonl.gz", *BYTE_LEVEL), "cut.jsonl.gz is truncated or not a gzip file"),
        (("--input", "a.jsonl", "--tokenizer-type", "NullTokenizer"), "requires --vocab-size"),
        (
            ("--input", "a.jsonl", "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "x"),
            "x does not exist",
        ),
    ],
)
def test_wrong_flags_are_one_line_and_status_1(tmp_path: Path, capsys, monkeypatch, words, message) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", ["text"])
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "text"}')[:-9])
    assert run(tmp_path, *words)[0] == 1
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "cut.jsonl.gz"]


@pytest.mark.parametrize(
    "words, message",
    [
        (("--json-keys", "a", "a"), "names a key twice"),
        (("--json-keys", "a/b"), "the key 'a/b' is used in file names"),
        (("--partitions", "0"), "--partitions is 0"),
        (("--split-sentences",), "are for BERT"),
        (("--pack-length", "8"), "apply only to chats"),
        (("--chat-key", "a", "--json-keys", "b"), "--chat-key a contradicts --json-keys"),
        (("--workers", "0"), "--workers is 0"),
        (("--output-prefix", ""), "--output-prefix is empty"),
    ],
)
def test_flags_that_cannot_be_honoured_are_refused(tmp_path: Path, capsys, words, message) -> None:
    with pytest.raises(SystemExit):
        preprocess_data.main(["--input", "a.jsonl", "--output-prefix", str(tmp_path / "out"), *BYTE_LEVEL, *words])
    assert message in capsys.readouterr().err


def test_a_worker_that_is_killed_is_an_error_not_a_hang(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(token_chunks, "decode_texts", lambda *_, **__: os._exit(9))
    file = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    assert run(tmp_path, "--input", file, *BYTE_LEVEL, "--workers", 2)[0] == 1
    assert "a worker process was killed" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["a.jsonl"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_stopped_leaves_the_old_files_and_no_process(tmp_path: Path, number: int) -> None:
    old = write_jsonl(tmp_path / "old.jsonl", ["old"])
    prefix = run(tmp_path, "--input", old, *BYTE_LEVEL)[1]
    before = [Path(prefix + suffix).read_bytes() for suffix in (".bin", ".idx")]
    with write_jsonl(tmp_path / "big.jsonl", TEXTS).open("a") as big:
        big.write((tmp_path / "big.jsonl").read_text() * 10)  # takes seconds, so that the signal arrives during the run
    words = ["--input", str(tmp_path / "big.jsonl"), *BYTE_LEVEL, "--workers", "2", "--output-prefix", prefix[:-14]]
    command = [sys.executable, preprocess_data.__file__, *words]
    # Workers hold the other end of this pipe, so it closes when they exit.
    # A shell that runs tests in the background may ignore SIGINT, which child processes inherit.
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heeds)
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size for path in tmp_path.rglob("*.bin.partial-*")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    written = process.communicate(timeout=30)[1]
    killed = number == signal.SIGKILL
    assert (process.returncode, written) == ((-9, "") if killed else (130, "interrupted: nothing was written\n"))
    assert [Path(prefix + suffix).read_bytes() for suffix in (".bin", ".idx")] == before
    assert killed or not list(tmp_path.rglob("*.partial-*"))


@pytest.mark.slow
def test_it_runs_as_a_script_from_any_folder_and_prints_one_line(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:50])
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [
        sys.executable,
        preprocess_data.__file__,
        "--input",
        "a.jsonl",
        *BYTE_LEVEL,
        "--output-prefix",
        "new/out",
    ]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr, result.stdout.count("\n")) == (0, "", 1)
    assert len(IndexedDataset(str(tmp_path / "new" / "out_text_document"))) == 50
