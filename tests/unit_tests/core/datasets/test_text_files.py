"""Documents of text files are read completely and unchanged, and invalid lines are reported."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.datasets.table_files import Columns
from megatron.core.datasets.text_files import (
    LONGEST_TEXT,
    SHORTEST_TEXT,
    decode_document,
    find_text_files,
    read_raw_documents,
)

TEXT = Columns(("text",))
LINES = st.lists(
    st.sampled_from(["", " ", "a", "e\u0301\U0001f600" * 3, "x" * 5000, "\u00e9" * 70000, "\r"]), max_size=30
)


@given(lines=LINES, newline=st.sampled_from(["\n", "\r\n"]), ends=st.booleans(), mark=st.booleans())
def test_documents_of_a_text_file_are_the_file(tmp_path_factory, lines, newline, ends, mark) -> None:
    text = newline.join(lines) + newline * ends
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(text.encode("utf-8-sig" if mark else "utf-8"))
    documents = list(read_raw_documents(path, TEXT))
    decoded = [decode_document(document, json_key="text") for document in documents]
    assert "".join(text for text, _ in decoded) == text and not any(bad for _, bad in decoded)
    assert all(SHORTEST_TEXT <= len(document.data) < 2 * LONGEST_TEXT + 3 for document in documents[:-1])
    for before, document in zip(documents, documents[1:]):
        assert document.line == before.line + before.data.count(b"\n")


def test_a_wrong_byte_costs_one_line_of_a_text_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\ntwo \xff\nthree\n")
    text, bad = decode_document(next(read_raw_documents(path, TEXT)), json_key="text")
    assert text == "one\nthree\n"
    assert [str(line) for line in bad] == [f"{path}:2: not UTF-8: byte 0xff at column 5"]


@pytest.mark.parametrize(
    "line, reason",
    [
        (b'{"text": "a\xe9"}', "not UTF-8: byte 0xe9 at column 12"),
        (b'{"text": "a"', "not JSON: Expecting ',' delimiter at column 13"),
        (b"[1]", "a JSON list: must be an object with key 'text'"),
        (b'{"body": "a"}', "no key 'text'; found 'body'"),
        (b'{"text": 1}', "key 'text' is int: must be text"),
        (b'{"text": "\\ud800"}', "unpaired surrogate at character 0 of 'text'"),
        (b"[" * 100_000, "JSON is nested too deeply"),
        (b'{"text": ' + b"1" * 5000 + b"}", "Exceeds the limit"),
    ],
)
def test_a_bad_json_line_is_named_with_its_reason(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line + b'\n{"text": "last"}')
    results = [decode_document(document, json_key="text") for document in read_raw_documents(path, TEXT)]
    assert [text for text, _ in results] == ["good", "", "last"]
    (bad,) = results[1][1]
    assert str(bad).startswith(f"{path}:3: {reason}")


def test_files_of_folders_come_sorted_and_others_are_refused(tmp_path: Path) -> None:
    for name in ("b.txt", "a/c.jsonl", "a/b.json", "a/readme.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}))
    names = [
        path.relative_to(tmp_path).as_posix() for path in find_text_files([str(tmp_path), str(tmp_path / "b.txt")])
    ]
    assert names == ["a/b.json", "a/c.jsonl", "b.txt", "b.txt"]
    # Markdown is text if it is named, or if a folder has no other text.
    assert find_text_files([str(tmp_path / "a" / "*.md")]) == [tmp_path / "a" / "readme.md"]
    for name in ("pages/one.md", "pages/more/two.md", "pages/picture.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [path.name for path in find_text_files([str(tmp_path / "pages")])] == ["two.md", "one.md"]
    with pytest.raises(ValueError, match=r"picture.png must end in .jsonl, .json, .txt, .md"):
        find_text_files([str(tmp_path / "pages" / "picture.png")])
    with pytest.raises(FileNotFoundError, match="none.txt does not exist"):
        find_text_files([str(tmp_path / "none.txt")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty contains no file that ends in"):
        find_text_files([str(tmp_path / "empty")])
