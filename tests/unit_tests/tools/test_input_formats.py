"""The same documents in any file format yield the same bytes, with any number of workers and partitions."""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from megatron.tools import preprocess_data, train_tokenizer

TEXTS = [
    {"text": f"document {number}: " + "gr\u00fc\u00dfe \U0001f600\n " * (number % 37), "meta": f"m{number % 9}"}
    for number in range(300)
] + [{"text": " ", "meta": "empty"}, {"text": "last", "meta": ""}, {"text": "x" * 100_000, "meta": "long"}]
CALL = {"name": "f", "arguments": {"city": "Ulm"}}
CHATS = [
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a" * number}]}
    for number in range(1, 40)
] + [
    {
        "messages": [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": None, "calls": [CALL]},
            {"role": "tool", "content": "rain", "name": "f"},
            {"role": "assistant", "content": "It rains."},
        ],
        "tools": [{"name": "f"}],
        "system": "be kind",
    },
    {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "weight": 0},
            {"role": "user", "content": "c"},
            {"role": "assistant", "content": "d"},
        ],
    },
]
# A table has the columns of its first row.
OPTIONAL = {"tools": None, "system": None}
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.keys() | list }}{{ m.role }}"
    "{% generation %}{{ m.content }}{% if m.calls %}{{ m.calls | tojson }}{% endif %}{% endgeneration %}{% endfor %}"
)
BYTES = ("--tokenizer-type", "ByteLevelTokenizer", "--append-eod")


def lines_of(records: list[dict]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def compressed(suffix: str, compress: Callable[[bytes], bytes]) -> Callable[[Path, list[dict]], list[str]]:
    def write(folder: Path, records: list[dict]) -> list[str]:
        path = folder / f"a.jsonl{suffix}"
        path.write_bytes(compress(lines_of(records[:150])) + compress(lines_of(records[150:])))
        return [str(path)]

    return write


def parquet(folder: Path, records: list[dict]) -> list[str]:
    """Writes two Parquet files with several row groups, and returns their pattern."""
    table = pa.Table.from_pylist([{"id": number, **OPTIONAL, **record} for number, record in enumerate(records)])
    for number, part in enumerate((table.slice(0, 100), table.slice(100))):
        pq.write_table(part, folder / f"part-{number}.parquet", row_group_size=30, compression="zstd")
    return [str(folder / "part-*.parquet")]


def arrow(folder: Path, records: list[dict]) -> list[str]:
    table = pa.Table.from_pylist([{**OPTIONAL, **record} for record in records])
    with pa.ipc.new_file(folder / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=50)
    return [str(folder / "a.arrow")]


def saved_dataset(folder: Path, records: list[dict]) -> list[str]:
    rows = datasets.Dataset.from_list([{**OPTIONAL, **record} for record in records])
    rows.save_to_disk(folder / "saved", num_shards=3)
    return [str(folder / "saved")]


def hub(folder: Path, records: list[dict]) -> list[str]:
    """Creates a folder with the layout of a Hub dataset, which the library `datasets` reads into its cache."""
    (folder / "repo").mkdir()
    (folder / "repo" / "train.jsonl").write_bytes(lines_of(records))
    (folder / "repo" / "test.jsonl").write_bytes(lines_of(records[:1]))
    return [f"hf:{folder / 'repo'}"]


def several(folder: Path, records: list[dict]) -> list[str]:
    """Writes one file of each format, and returns them in command-line order."""
    parts = [records[begin : begin + 70] for begin in range(0, len(records), 70)]
    (folder / "z.jsonl").write_bytes(lines_of(parts[0]))
    pq.write_table(pa.Table.from_pylist(parts[1]), folder / "b.parquet") if len(parts) > 1 else None
    (folder / "a.jsonl.zst").write_bytes(zstandard.compress(lines_of([one for part in parts[2:] for one in part])))
    return [str(path) for path in (folder / "z.jsonl", folder / "b.parquet", folder / "a.jsonl.zst") if path.exists()]


FORMATS = {
    "gz": compressed(".gz", gzip.compress),
    "bz2": compressed(".bz2", bz2.compress),
    "xz": compressed(".xz", lzma.compress),
    "zst": compressed(".zst", zstandard.compress),
    "parquet": parquet,
    "arrow": arrow,
    "saved": saved_dataset,
    "hub": hub,
    "several": several,
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch) -> None:
    """Stores the cache of `datasets` in the test's folder, and disables network access."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def run(folder: Path, inputs: list[str], *words: object) -> dict[str, bytes]:
    folder.mkdir()
    assert preprocess_data.main(["--input", *inputs, *map(str, words), *BYTES, "--output-prefix", f"{folder}/out"]) == 0
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("name", FORMATS)
def test_texts_become_the_bytes_that_they_become_from_lines(tmp_path: Path, name: str, capsys) -> None:
    (tmp_path / "lines.jsonl").write_bytes(lines_of(TEXTS))
    words = ["--json-keys", "text", "meta"]
    expected = run(tmp_path / "expected", [str(tmp_path / "lines.jsonl")], *words, "--workers", 1)
    assert len(expected) == 4 and "2 empty documents skipped" in capsys.readouterr().out
    (tmp_path / "in").mkdir()
    inputs = FORMATS[name](tmp_path / "in", TEXTS)
    for workers, partitions in ((1, 1), (2, 4)):
        options = ("--workers", workers, "--partitions", partitions)
        assert run(tmp_path / f"out{workers}", inputs, *words, *options) == expected
    out, err = capsys.readouterr()
    assert out.count("301 documents, 2 empty documents skipped, ") == 2 and "skipped" not in err


@pytest.mark.parametrize("name", FORMATS)
def test_chats_become_the_bytes_that_they_become_from_lines(tmp_path: Path, name: str) -> None:
    (tmp_path / "lines.jsonl").write_bytes(lines_of(CHATS))
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    words = ["--chat-key", "messages", "--chat-template", tmp_path / "t.jinja", "--pack-length", 128, "--workers", 1]
    expected = run(tmp_path / "expected", [str(tmp_path / "lines.jsonl")], *words)
    (tmp_path / "in").mkdir()
    assert run(tmp_path / "out", FORMATS[name](tmp_path / "in", CHATS), *words) == expected


@pytest.mark.parametrize("name", FORMATS)
def test_a_tokenizer_is_the_one_trained_on_lines(tmp_path: Path, name: str) -> None:
    texts = TEXTS[:-1]  # the library takes half a minute for a long word
    (tmp_path / "lines.jsonl").write_bytes(lines_of(texts))
    (tmp_path / "in").mkdir()
    inputs = {"expected": [str(tmp_path / "lines.jsonl")], "found": FORMATS[name](tmp_path / "in", texts)}
    for output, files in inputs.items():
        words = ["--vocab-size", "300", "--output", str(tmp_path / f"{output}.json")]
        assert train_tokenizer.main(["--input", *files, *words]) == 0
    assert (tmp_path / "found.json").read_bytes() == (tmp_path / "expected.json").read_bytes()


def test_bad_rows_are_skipped_named_and_counted(tmp_path: Path, capsys) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["good", None, " ", "end"]}), file)
    run(tmp_path / "out", [str(file)], "--workers", 2)
    out, err = capsys.readouterr()
    assert "2 documents, 1 empty documents skipped" in out
    assert err == f"skipped {file}: row 2: key 'text' is null: must be text\nskipped 1 bad lines in total\n"
    assert train_tokenizer.main(["--input", str(file), "--output", str(tmp_path / "t.json")]) == 0
    assert f"skipped {file}: row 2: key 'text' is null" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, message",
    [
        ("a.parquet", "a.parquet has no column 'text'; its columns: 'body'. Choose with --json-keys"),
        ("cut.parquet", "cut.parquet is damaged or not in Parquet format: "),
        ("cut.jsonl.zst", "cut.jsonl.zst is truncated or not a zstd file: the last frame is incomplete"),
        (
            "a.csv",
            "a.csv must end in .jsonl, .json, .txt, .md (optionally followed by .gz, .bz2, .xz, .zst), .parquet, "
            ".arrow",
        ),
        ("a.parquet.gz", "a.parquet.gz must end in .jsonl"),
        ("*.avro", "*.avro matches no file"),
    ],
)
def test_input_that_cannot_be_read_is_one_line_and_nothing_is_written(tmp_path: Path, capsys, name, message) -> None:
    pq.write_table(pa.table({"body": ["a"]}), tmp_path / "a.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    (tmp_path / "cut.jsonl.zst").write_bytes(zstandard.compress(b'{"text": "a"}\n')[:-2])
    for other in ("a.csv", "a.parquet.gz"):
        (tmp_path / other).write_text("text\na\n")
    before = sorted(tmp_path.iterdir())
    words = ["--input", str(tmp_path / name), *BYTES, "--output-prefix", str(tmp_path / "out")]
    assert preprocess_data.main(words) == 1
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1 and sorted(tmp_path.iterdir()) == before
    assert train_tokenizer.main([*words[:2], "--output", str(tmp_path / "t.json")]) == 1
    assert message.replace("--json-keys", "--json-key") in capsys.readouterr().err
