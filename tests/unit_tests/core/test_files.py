"""A replaced file has either its complete new content or its old one, and no temporary file remains."""

from pathlib import Path

import pytest

from megatron.core.files import replaced_file


def test_a_file_is_replaced_at_the_end_and_only_without_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for content in (b"first", b"second"):
        before = path.read_bytes() if path.exists() else None
        with replaced_file(path) as file:
            file.write(content)
            assert (path.read_bytes() if path.exists() else None) == before
        assert path.read_bytes() == content
    with pytest.raises(RuntimeError), replaced_file(path) as file:
        file.write(b"half of the th")
        raise RuntimeError
    assert path.read_bytes() == b"second" and list(tmp_path.iterdir()) == [path]


def test_two_writers_of_one_file_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with replaced_file(path) as one, replaced_file(path) as other:
        one.write(b"one")
        other.write(b"other")
    assert path.read_bytes() == b"one" and list(tmp_path.iterdir()) == [path]


def test_a_missing_folder_raises_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="a.partial-"), replaced_file(tmp_path / "none" / "a"):
        pass
