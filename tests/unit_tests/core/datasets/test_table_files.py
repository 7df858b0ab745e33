"""Table rows and lines of compressed files are read as documents, like lines of a .jsonl file; damage is reported."""

import itertools
import json
import lzma
import sys
import tracemalloc
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from megatron.core.datasets.table_files import BATCH_BYTES, Columns
from megatron.core.datasets.text_files import check_tables, decode_document, find_text_files, read_raw_documents
from megatron.tools.partitions import cut, documents

TEXT = Columns(("text",))
CHATS = Columns(("messages",), hold_chats=True, flag="--chat-key")


def write_parquet(path: Path, table: pa.Table, **options) -> Path:
    pq.write_table(table, path, **options)
    return path


def write_arrow(path: Path, table: pa.Table) -> Path:
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    return path


def read(path: Path, columns: Columns = TEXT) -> tuple[list[str], list[str]]:
    """Returns the texts and the messages about invalid documents."""
    found = [decode_document(raw, json_key=columns.keys[0]) for raw in read_raw_documents(path, columns)]
    return [text for text, _ in found], [str(line) for _, bad in found for line in bad]


def records(path: Path, columns: Columns) -> list[dict]:
    return [json.loads(raw.data) for raw in read_raw_documents(path, columns)]


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
)
def test_every_type_of_text_is_read_and_nulls_are_named_with_their_row(tmp_path: Path, kind: pa.DataType) -> None:
    values = ["a", None, "gr\u00fc\u00dfe", "", None]
    column = pa.array(values) if pa.types.is_dictionary(kind) else pa.array(values, kind)
    column = column.dictionary_encode() if pa.types.is_dictionary(kind) else column
    table = pa.table({"id": range(5), "text": column})
    for path in (
        write_parquet(tmp_path / "a.parquet", table, row_group_size=2),
        write_arrow(tmp_path / "a.arrow", table),
    ):
        texts, bad = read(path)
        assert texts == ["a", "", "gr\u00fc\u00dfe", "", ""]
        assert bad == [f"{path}: row {row}: key 'text' is null: must be text" for row in (2, 5)]


def test_a_column_of_nulls_alone_has_no_text(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", pa.table({"text": pa.nulls(2)}))
    assert read(path) == (["", ""], [f"{path}: row {row}: key 'text' is null: must be text" for row in (1, 2)])


def test_wrong_bytes_cost_one_row(tmp_path: Path) -> None:
    column = pa.array([b"one", b"two\xff", b"three"]).view(pa.string())
    path = write_parquet(tmp_path / "a.parquet", pa.table({"text": column}))
    assert read(path) == (["one", "", "three"], [f"{path}: row 2: not UTF-8: byte 0xff at column 4"])


def test_both_formats_of_arrow_files_are_read(tmp_path: Path) -> None:
    table = pa.table({"text": [f"t{number}" for number in range(10)]})
    stream = write_arrow(tmp_path / "stream.arrow", table)
    with pa.ipc.new_file(tmp_path / "file.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    assert read(stream) == read(tmp_path / "file.arrow") == (table["text"].to_pylist(), [])


def test_chats_of_a_table_have_the_keys_of_their_lines(tmp_path: Path) -> None:
    chats = [
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": None, "calls": [{"name": "f"}]},
            ]
        },
        {"messages": [{"role": "tool", "content": "r", "name": "f"}], "tools": [{"name": "f", "strict": True}]},
        {"messages": []},
    ]
    path = write_parquet(tmp_path / "a.parquet", pa.Table.from_pylist([{"tools": None, **chat} for chat in chats]))
    assert records(path, CHATS) == [{"tools": None, **chat} for chat in chats]
    as_json = datasets.Features({"messages": datasets.List(datasets.Json())})
    saved = datasets.Dataset.from_list([{"messages": chat["messages"]} for chat in chats], features=as_json)
    saved.save_to_disk(tmp_path / "saved")
    (file,) = find_text_files([str(tmp_path / "saved")])
    assert records(file, CHATS) == [{"messages": chat["messages"]} for chat in chats]


def test_messages_may_be_maps_and_dates_in_them_are_named(tmp_path: Path) -> None:
    chat = [[("role", "user"), ("content", "q")]]
    maps = pa.table({"messages": pa.array([chat], pa.list_(pa.map_(pa.string(), pa.string())))})
    assert records(write_parquet(tmp_path / "m.parquet", maps), CHATS) == [{"messages": [dict(chat[0])]}]
    dates = pa.table({"messages": [[{"role": "user", "content": pa.scalar(0, pa.date32()).as_py()}]]})
    path = write_parquet(tmp_path / "d.parquet", dates)
    assert read(path, CHATS)[1] == [f"{path}: row 1: Object of type date is not JSON serializable"]


@pytest.mark.parametrize(
    "table, columns, message",
    [
        ({"body": ["a"], "id": [1]}, TEXT, "no column 'text'; its columns: 'body', 'id'. Choose with --json-keys"),
        ({"body": ["a"], "id": [1]}, CHATS, "no column 'messages'; its columns: 'body', 'id'. Choose with --chat-key"),
        ({"text": [1], "body": ["a"]}, TEXT, "column 'text' is int64: must be text; columns of text: 'body'"),
        ({"text": [b"a"]}, TEXT, "column 'text' is binary: must be text; columns of text: none"),
    ],
)
def test_a_column_that_cannot_be_used_is_named_with_those_that_can(tmp_path: Path, table, columns, message) -> None:
    for path in (
        write_parquet(tmp_path / "a.parquet", pa.table(table)),
        write_arrow(tmp_path / "a.arrow", pa.table(table)),
    ):
        with pytest.raises(ValueError) as error:
            check_tables([path], columns)
        assert str(error.value).startswith(str(path)) and message in str(error.value)
        with pytest.raises(ValueError, match="Choose with"):
            list(read_raw_documents(path, columns))


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    with pytest.raises(ValueError, match="a.parquet has several columns 'text'"):
        check_tables([write_parquet(tmp_path / "a.parquet", table)], TEXT)


@pytest.mark.parametrize("size", [0, 3, 100, -1])
@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_table_that_is_cut_short_is_named(tmp_path: Path, suffix: str, size: int) -> None:
    table = pa.table({"text": [f"document {number}" * 9 for number in range(99)]})
    path = (write_parquet if suffix == ".parquet" else write_arrow)(tmp_path / f"a{suffix}", table)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=rf"^{path} is (damaged or not in \w+ format|truncated): "):
        list(read_raw_documents(path, TEXT))


def test_an_arrow_stream_that_ends_between_batches_is_named(tmp_path: Path) -> None:
    path = write_arrow(tmp_path / "a.arrow", pa.table({"text": ["a"] * 9}))
    path.write_bytes(path.read_bytes()[:-8])
    found = read_raw_documents(path, TEXT)
    assert len(list(itertools.islice(found, 9))) == 9
    with pytest.raises(ValueError, match="a.arrow is truncated: the end mark of the Arrow stream is missing"):
        next(found)


def test_damage_within_a_parquet_file_is_named_with_its_row_group(tmp_path: Path) -> None:
    table = pa.table({"text": ["x" * 50 + str(number) for number in range(40)]})
    options = {"row_group_size": 10, "use_dictionary": False, "compression": "none", "write_page_checksum": True}
    path = write_parquet(tmp_path / "a.parquet", table, **options)
    data = path.read_bytes()
    place = data.index(b"x" * 50 + b"25")
    path.write_bytes(data[:place] + b"y" + data[place + 1 :])
    found = read_raw_documents(path, TEXT)
    assert len(list(itertools.islice(found, 20))) == 20
    with pytest.raises(
        ValueError, match=r"a.parquet: row group 2 \(rows from 21\) is damaged or not in Parquet format: .*CRC"
    ):
        next(found)


def test_parquet_files_are_cut_between_row_groups(tmp_path: Path) -> None:
    table = pa.table({"text": [f"{number} " * 20 for number in range(100)]})
    files = [
        write_parquet(tmp_path / f"{name}.parquet", table, row_group_size=size) for name, size in (("a", 7), ("b", 60))
    ]
    whole = list(documents(cut(files, 1)[0], TEXT))
    for count in (2, 3, 9):
        parts = [list(documents(pieces, TEXT)) for pieces in cut(files, count)]
        assert list(itertools.chain(*parts)) == whole and sum(map(bool, parts)) == min(
            count, 5 if count == 9 else count
        )
    assert [raw.line for raw in whole] == [*range(1, 101)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".jsonl.zst", ".jsonl.xz", ".txt.zst"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, suffix: str, monkeypatch) -> None:
    path = tmp_path / f"a{suffix}"
    texts = [f"{number:06d}" * 170 for number in range(32_000)]  # 32 MiB
    if suffix == ".parquet":
        write_parquet(path, pa.table({"text": texts, "other": texts}), use_dictionary=False)
    elif suffix == ".arrow":
        with pa.ipc.new_stream(path, pa.schema({"text": pa.string()})) as writer:
            writer.write_table(pa.table({"text": texts}))
    else:
        lines = "".join((json.dumps({"text": text}) if "json" in suffix else text) + "\n" for text in texts).encode()
        path.write_bytes(lzma.compress(lines, preset=0) if suffix.endswith("xz") else zstandard.compress(lines))
        del lines
    num_bytes = sum(map(len, texts))
    del texts
    pool = pa.proxy_memory_pool(pa.default_memory_pool())
    default = pa.default_memory_pool()
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        size = sum(len(raw.data) for raw in read_raw_documents(path, TEXT))
        peak = tracemalloc.get_traced_memory()[1] + pool.max_memory()
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(default)
    assert size >= num_bytes and peak < 6 * BATCH_BYTES < num_bytes


def test_frames_of_a_zstd_file_are_one_text(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "x" * 1000 + str(number)}).encode() + b"\n" for number in range(300)]
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
    long_window = zstandard.ZstdCompressionParameters.from_level(3, window_log=28, enable_ldm=True)
    frames = [
        zstandard.compress(b"".join(lines[:100])),
        skippable,
        zstandard.compress(b""),
        zstandard.ZstdCompressor(compression_params=long_window).compress(b"".join(lines[100:])),
    ]
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(b"".join(frames))
    assert [raw.data for raw in read_raw_documents(path, TEXT)] == lines
    for end in (1, 5, 400):
        path.write_bytes(b"".join(frames)[:-end])
        with pytest.raises(
            ValueError, match="a.jsonl.zst is truncated or not a zstd file: the last frame is incomplete"
        ):
            list(read_raw_documents(path, TEXT))
    path.write_bytes(frames[0][:-30] + b"damage" + frames[0][-24:])
    with pytest.raises(ValueError, match="a.jsonl.zst is truncated or not a zstd file: "):
        list(read_raw_documents(path, TEXT))
    path.write_bytes(b"")
    assert list(read_raw_documents(path, TEXT)) == []


@pytest.mark.parametrize("suffix, kind", [(".gz", "gzip"), (".bz2", "bzip2"), (".xz", "xz"), (".zst", "zstd")])
def test_what_is_not_compressed_is_named(tmp_path: Path, suffix: str, kind: str) -> None:
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(b"no compressed file, " * 9)
    with pytest.raises(ValueError, match=f"^{path} is truncated or not a {kind} file: "):
        list(read_raw_documents(path, TEXT))


@pytest.mark.parametrize(
    "name, package",
    [("a.parquet", "pyarrow"), ("a.arrow", "pyarrow"), ("a.jsonl.zst", "zstandard"), ("hf:x", "datasets")],
)
def test_a_missing_package_is_named_with_the_extra_that_has_it(tmp_path: Path, monkeypatch, name, package) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "a.parquet").write_bytes(b"")
    (tmp_path / name).write_bytes(b"") if ":" not in name else None
    with pytest.raises(
        ValueError, match=rf"{name} requires the package {package}: pip install 'megatron-stash\[data\]'"
    ):
        for path in find_text_files([name if ":" in name else str(tmp_path / name)]):
            list(read_raw_documents(path, TEXT))


def test_saved_datasets_are_found_in_folders(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": [f"t{number}" for number in range(10)]})
    rows.save_to_disk(tmp_path / "texts" / "saved", num_shards=3)
    (tmp_path / "texts" / "a.txt").write_text("a")
    write_parquet(tmp_path / "texts" / "b.parquet", pa.table({"text": ["b"]}))
    files = find_text_files([str(tmp_path / "texts")])
    assert [path.name for path in files] == [
        "a.txt",
        "b.parquet",
        *(f"data-0000{one}-of-00003.arrow" for one in range(3)),
    ]
    assert [text for path in files[2:] for text in read(path)[0]] == rows["text"][:]
    files[3].unlink()
    with pytest.raises(FileNotFoundError, match="data-00001-of-00003.arrow does not exist, but .*state.json lists it"):
        find_text_files([str(tmp_path / "texts" / "saved")])
    (files[3].parent / "state.json").write_text("{")
    with pytest.raises(ValueError, match="state.json is damaged"):
        find_text_files([str(files[3].parent)])
    (files[3].parent / "state.json").write_text("{}")
    with pytest.raises(ValueError, match="state.json lists no data files"):
        find_text_files([str(files[3].parent)])


def test_a_dataset_of_several_splits_asks_for_one(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": ["a"]})
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "d")
    with pytest.raises(ValueError, match=rf"several splits: must be one of {tmp_path}/d/train, {tmp_path}/d/test"):
        find_text_files([str(tmp_path / "d")])
    assert len(find_text_files([str(tmp_path / "d" / "train")])) == 1


@pytest.fixture
def hub(tmp_path: Path, monkeypatch) -> Path:
    """Creates a folder with the layout of a Hugging Face Hub dataset and two configurations. Uses no network."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    for config in ("en", "de"):
        for split in ("train", "test"):
            (tmp_path / "hub" / config).mkdir(parents=True, exist_ok=True)
            write_parquet(tmp_path / "hub" / config / f"{split}.parquet", pa.table({"text": [f"{config} {split}"]}))
    configs = "".join(f"- config_name: {one}\n  data_dir: {one}\n" for one in ("en", "de"))
    (tmp_path / "hub" / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    return tmp_path / "hub"


def test_a_dataset_of_the_hub_is_named_with_configuration_and_split(hub: Path) -> None:
    (file,) = find_text_files([f"hf:{hub}:de:test"])
    assert read(file) == (["de test"], []) and file.is_relative_to(hub.parent / "cache")
    (file,) = find_text_files([f"hf:{hub / 'en'}"])
    assert read(file) == (["en train"], [])


@pytest.mark.parametrize(
    "name, message",
    [
        ("hf:", "hf:: must be hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT"),
        ("hf:x:a:b:c", "must be hf:NAME"),
        ("hf:x:train[:10]", "must be hf:NAME"),
        ("hf:{hub}:train", "cannot be loaded by the library datasets: Config name is missing.*'en', 'de'"),
        ("hf:{hub}:en:dev", "cannot be loaded by the library datasets: Unknown split .dev.*train.*test"),
        ("hf:nobody/nothing", "hf:nobody/nothing cannot be loaded by the library datasets: "),
    ],
)
def test_a_dataset_that_cannot_be_loaded_is_named(hub: Path, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_text_files([name.format(hub=hub)])


def test_patterns_find_tables_in_order_and_an_empty_one_is_named(tmp_path: Path) -> None:
    for name in ("b/2.parquet", "a/1.parquet", "a/x.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    found = find_text_files([f"{tmp_path}/**/*.parquet", str(tmp_path / "a" / "x.txt")])
    assert [str(path.relative_to(tmp_path)) for path in found] == ["a/1.parquet", "b/2.parquet", "a/x.txt"]
    with pytest.raises(FileNotFoundError, match=r"\*.zst matches no file"):
        find_text_files([f"{tmp_path}/*.zst"])
