"""Files next to the target folder of a save: which ones the save removes, and which it leaves unchanged."""

import os

import pytest

from megatron.core.dist_checkpointing import folder as folders
from megatron.core.dist_checkpointing import manifest

ID = "0123456789ab"


def make(path, *, whole):
    path.mkdir()
    (path / ("manifest.json" if whole else "__0_0.distcp")).write_text("{}")


def test_a_replacement_that_was_killed_is_read_from_aside_and_put_back_by_the_next_save(tmp_path):
    aside = tmp_path / f"c.replaced-{ID}"
    make(aside, whole=True)
    assert folders.find_checkpoint(tmp_path / "c") == aside
    folders.begin(tmp_path / "c.incomplete-ffffffffffff", tmp_path / "c")
    assert sorted(os.listdir(tmp_path)) == ["c", "c.incomplete-ffffffffffff"]


@pytest.mark.parametrize("name", ["c.incomplete-notes", "cc.incomplete-" + ID, "d.incomplete-" + ID, "c.replaced-old"])
def test_clean_up_takes_only_names_that_a_save_of_this_target_gives(tmp_path, name):
    for entry in (name, f"c.incomplete-{ID}"):
        make(tmp_path / entry, whole=False)
    folders.remove_incomplete(tmp_path, name="c")
    assert os.listdir(tmp_path) == [name]


def test_a_checkpoint_aside_is_kept_as_long_as_it_is_the_only_one(tmp_path):
    make(tmp_path / f"c.replaced-{ID}", whole=True)
    folders.remove_incomplete(tmp_path, name="c")
    assert os.listdir(tmp_path) == [f"c.replaced-{ID}"]
    make(tmp_path / "c", whole=True)
    folders.remove_incomplete(tmp_path, name="c")
    assert os.listdir(tmp_path) == ["c"]


def test_small_files_are_replaced_whole(tmp_path):
    for text in ("100", "release"):
        folders.replace_text(tmp_path / "latest", text)
        assert (tmp_path / "latest").read_text() == text
    assert os.listdir(tmp_path) == ["latest"]


def test_a_manifest_of_a_later_format_is_refused_by_number(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "FORMAT_VERSION", 3)
    manifest.write_manifest(tmp_path, {})
    monkeypatch.undo()
    with pytest.raises(ValueError, match="format version 3: must be 1 to 2"):
        manifest.read_manifest(tmp_path)
