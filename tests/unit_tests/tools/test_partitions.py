"""Partitioned preprocessing writes the same bytes however the input is split and wherever a run is killed."""

import gzip
import itertools
import json
import multiprocessing
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.datasets.indexed_dataset import IndexedDataset, loss_mask_prefix
from megatron.core.datasets.table_files import Columns
from megatron.core.datasets.text_files import BadLine
from megatron.tools import preprocess_data
from megatron.tools.partitions import cut, documents
from tests.counts import long_count

TEXT = Columns(("text",))
TEMPLATE = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"


def write_lines(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


def run(folder: Path, *words: object, name: str = "out") -> dict[str, bytes]:
    """Runs the tool, and returns the bytes of all files that it wrote, by name without the prefix `name`."""
    fixed = ["--tokenizer-type", "ByteLevelTokenizer", "--append-eod", "--workers", "1"]
    assert preprocess_data.main([*map(str, words), *fixed, "--output-prefix", str(folder / name)]) == 0
    return {path.name.removeprefix(name): path.read_bytes() for path in sorted(folder.glob(f"{name}_*"))}


@given(
    lines=st.lists(st.sampled_from(["", " ", '{"a": 1}', "x" * 40, "\r"]), max_size=12),
    sizes=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    count=st.integers(1, 9),
    ends=st.booleans(),
)
def test_each_document_is_in_one_partition_and_knows_its_line(tmp_path_factory, lines, sizes, count, ends) -> None:
    folder = tmp_path_factory.mktemp("cut")
    files = [folder / f"{number}.jsonl" for number in range(len(sizes))]
    for path, size in zip(files, sizes):
        path.write_bytes(("\n".join(lines[size:]) + "\n" * ends).encode())
    whole = list(documents(cut(files, 1)[0], TEXT))
    parts = [list(documents(pieces, TEXT)) for pieces in cut(files, count)]
    assert len(parts) == count
    found = list(itertools.chain.from_iterable(parts))
    assert [(raw.path, raw.data) for raw in found] == [(raw.path, raw.data) for raw in whole]
    named = [str(BadLine(raw.path, raw.line, "", raw.begin)) for raw in found]
    assert named == [f"{raw.path}:{raw.line}: " for raw in whole]


def test_any_number_of_partitions_gives_the_same_bytes_for_every_key(tmp_path: Path, capsys) -> None:
    lines = [json.dumps({"text": f"t{number}" * (number % 50), "meta": "m" * 9}) for number in range(300)]
    write_lines(tmp_path / "a.jsonl", [*lines[:150], "broken", *lines[150:]])
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write("\n".join(lines))
    outputs, printed = [], []
    for number, count in enumerate((1, 2, 7, 40)):
        words = ["--input", tmp_path / "[ab].json*", "--json-keys", "text", "meta", "--partitions", count]
        outputs.append(run(tmp_path, *words, name=f"n{number}"))
        printed.append(capsys.readouterr().err)
    assert set(outputs[0]) == {f"_{key}_document.{end}" for key in ("text", "meta") for end in ("bin", "idx")}
    assert all(one == outputs[0] for one in outputs)
    assert set(printed) == {
        f"skipped {tmp_path}/a.jsonl:151: not JSON: Expecting value at column 1\n" + "skipped 1 bad lines in total\n"
    }
    pairs = [IndexedDataset(str(tmp_path / f"n0_{key}_document")) for key in ("text", "meta")]
    # Every 50th text is empty, so its line is in neither pair.
    assert [len(pair) for pair in pairs] == [588, 588] and bytes(pairs[1][0].astype("u1")[:-1]) == b"m" * 9


def _dies(words: list[str], step: int) -> None:
    """Runs the tool, and exits like kill -9 before its `step`-th rename or sync to disk."""
    calls = itertools.count(1)

    def counted(call):
        return lambda *args, **kwargs: os._exit(9) if next(calls) == step else call(*args, **kwargs)

    os.replace, os.fsync, os.unlink = counted(os.replace), counted(os.fsync), counted(os.unlink)
    os._exit(preprocess_data.main(words))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "first"), [("texts", 1), ("packed", 2)])
def test_a_run_killed_anywhere_continues_to_the_same_bytes(tmp_path: Path, kind: str, first: int, capsys) -> None:
    def chat(text: str) -> str:
        return json.dumps({"text": text, "chat": [{"role": "assistant", "content": text}]})

    old = write_lines(tmp_path / "old.jsonl", [chat("old")])
    new = write_lines(tmp_path / "new.jsonl", [chat(f"new {number}") for number in range(9)])
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    words: list[object] = ["--chat-key", "chat", "--chat-template", tmp_path / "t.jinja"] if kind == "packed" else []
    words += ["--pack-length", 16] if words else []
    expected = {name: run(tmp_path, "--input", file, *words, name=name) for name, file in (("o", old), ("n", new))}
    prefix = tmp_path / f"out_{'text' if kind == 'texts' else 'chat'}_document"
    words = ["--partitions", 3, *words]
    fixed = ["--tokenizer-type", "ByteLevelTokenizer", "--append-eod", "--workers", "1"]
    argv = [*map(str, ["--input", new, *words, *fixed, "--output-prefix", tmp_path / "out"])]
    before = expected["o"]
    assert run(tmp_path, "--input", old, *words) == before
    for step in itertools.count(first, long_count(3, soak=1)):
        for name, content in before.items():
            (tmp_path / f"out{name}").write_bytes(content)
        process = multiprocessing.get_context("fork").Process(target=_dies, args=(argv, step))
        process.start()
        process.join()
        if process.exitcode == 0:
            break
        # A training run would now find the complete old data, the complete new data, or no data that opens.
        if IndexedDataset.exists(str(prefix)):
            found = {path.name[3:]: path.read_bytes() for path in tmp_path.glob("out_*") if path.is_file()}
            assert found in (before, expected["n"])
        assert run(tmp_path, "--input", new, *words) == expected["n"]
        assert not list(tmp_path.glob("*.partitions"))
    assert step > 20 and "continuing: 2 of 3 partitions are done" in capsys.readouterr().err


def test_other_settings_start_anew_and_old_masks_go(tmp_path: Path, capsys) -> None:
    file = write_lines(tmp_path / "a.jsonl", [json.dumps({"text": f"{number}"}) for number in range(9)])
    words = ["--input", str(file), "--tokenizer-type", "ByteLevelTokenizer", "--partitions", "3", "--workers", "1"]
    process = multiprocessing.get_context("fork").Process(
        target=_dies, args=([*words, "--output-prefix", str(tmp_path / "out")], 12)
    )
    process.start()
    process.join()
    assert process.exitcode == 9 and (tmp_path / "out_text.partitions").is_dir()
    for end in (".bin", ".idx"):
        Path(loss_mask_prefix(str(tmp_path / "out_text_document")) + end).write_bytes(b"old")
    found = run(tmp_path, "--input", file, "--partitions", 3)
    assert found == run(tmp_path, "--input", file, name="b") and "continuing" not in capsys.readouterr().err
