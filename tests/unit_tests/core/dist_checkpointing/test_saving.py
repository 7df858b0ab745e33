"""Background saves in one process store the state at their start, and a failed save changes nothing."""

import os
import threading

import pytest
import torch

from megatron.core.dist_checkpointing import (
    CheckpointError,
    ShardedObject,
    ShardedTensor,
    StagingMemory,
    begin_save,
    disk,
    load_items,
    save_items,
    saving,
    storage,
    verify,
)
from tests.save_threads import join_save_threads


def values(number):
    weight = torch.arange(600, dtype=torch.float32).view(20, 30) + number
    return [
        ShardedTensor.whole("weight", weight),
        # A view into a larger tensor, with a different dtype.
        ShardedTensor.whole("moment", (weight + 1).bfloat16()[1::2, 3:7]),
        ShardedTensor.whole("step", torch.tensor(number)),
        ShardedTensor.whole("flags", torch.tensor([True, False, True])),
        ShardedObject("rng", [number]),
    ]


def assert_holds(folder, number):
    wanted, expected = values(-1), values(number)
    assert load_items(wanted, folder) == {"number": number}
    for item, other in zip(wanted, expected, strict=True):
        same = torch.equal(item.data, other.data) if isinstance(item, ShardedTensor) else item.data == other.data
        assert same, item.key


def change(state):
    for item in state:
        if isinstance(item, ShardedTensor):
            item.data.zero_()
        else:
            item.data.append("changed")


@pytest.fixture
def held_back(monkeypatch):
    """Returns an event that writes of data files wait for."""
    may_write, write = threading.Event(), saving.write_pieces

    def wait_and_write(path, contents, helper):
        assert may_write.wait(60)
        return write(path, contents, helper=helper)

    monkeypatch.setattr(saving, "write_pieces", wait_and_write)
    yield may_write
    may_write.set()


def test_what_changes_after_the_begin_is_stored_as_it_was(tmp_path, held_back):
    committed = []
    state, common = values(3), {"number": 3}
    pending = begin_save(
        state, tmp_path / "c", common=common, staging=StagingMemory(), on_commit=lambda: committed.append(True)
    )
    change(state)
    common["number"] = 4
    assert not pending.is_done() and not pending.ranks_are_done() and not (tmp_path / "c").exists()
    held_back.set()
    pending.finish()
    assert pending.is_done() and committed == [True] and os.listdir(tmp_path) == ["c"]
    assert_holds(tmp_path / "c", 3)
    pending.finish()


@pytest.mark.parametrize("beside_training", [False, True])
def test_what_takes_the_name_while_a_save_runs_is_not_touched(tmp_path, held_back, beside_training):
    pending = begin_save(values(1), tmp_path / "c", common={}, staging=StagingMemory() if beside_training else None)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "notes").write_text("a day of work")
    held_back.set()
    with pytest.raises(CheckpointError, match="c contains something other than a checkpoint of this format"):
        pending.finish()
    assert (tmp_path / "c" / "notes").read_text() == "a day of work"
    assert os.listdir(tmp_path) == ["c"]


def test_a_save_is_complete_without_a_call_that_waits_for_it(tmp_path):
    pending = begin_save(values(3), tmp_path / "c", common={"number": 3}, staging=StagingMemory())
    join_save_threads()
    assert pending.ranks_are_done() and os.listdir(tmp_path) == ["c"]
    assert_holds(tmp_path / "c", 3)


def test_staging_memory_is_used_again(tmp_path):
    staging, addresses = StagingMemory(), set()
    for number in (1, 2, 3):
        begin_save(values(number), tmp_path / "c", common={"number": number}, staging=staging).finish()
        assert_holds(tmp_path / "c", number)
        addresses.add(staging.copy([values(number)[0].data])[0].data_ptr())
    assert len(addresses) == 1


def test_both_ways_of_saving_write_the_same_files(tmp_path):
    # Pieces of two sizes. A blocking save computes the checksums of the large ones on a second thread.
    sizes = [storage._SHARED_BYTES // 4 * (1 + index % 2) for index in range(12)]
    state = values(3) + [ShardedTensor.whole(f"{index}", torch.rand(size)) for index, size in enumerate(sizes)]
    save_items(state, tmp_path / "a", common={"number": 3})
    begin_save(state, tmp_path / "b", common={"number": 3}, staging=StagingMemory()).finish()
    verify(tmp_path / "a")
    names = sorted(os.listdir(tmp_path / "a"))
    assert names == sorted(os.listdir(tmp_path / "b"))
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names)


class RefusingOs:
    """The os module, except that its n-th modifying call fails as on a full disk."""

    CHANGES = ("open", "write", "fsync", "mkdir", "rename", "replace", "unlink")

    def __init__(self, number):
        self.left = number

    def __getattr__(self, name):
        original = getattr(os, name)
        if name not in self.CHANGES:
            return original

        def call(*args, **kwargs):
            self.left -= 1
            if self.left == 0:
                raise OSError(28, "No space left on device")
            return original(*args, **kwargs)

        return call


@pytest.mark.slow
@pytest.mark.parametrize("in_background", [False, True])
def test_a_disk_that_is_full_at_any_moment_is_one_error_and_leaves_the_earlier_checkpoint(
    tmp_path, monkeypatch, in_background
):
    save_items(values(1), tmp_path / "c", common={"number": 1})
    staging, refused = StagingMemory() if in_background else None, 0
    for number in range(1, 100):
        refusing = RefusingOs(number)
        monkeypatch.setattr(disk, "os", refusing)
        monkeypatch.setattr(storage, "_SHARED_BYTES", 1)
        try:
            begin_save(values(2), tmp_path / "c", common={"number": 2}, staging=staging).finish()
        except CheckpointError as error:
            refused += 1
            assert "No space left" in str(error) and "cannot save checkpoint" in str(error)
        monkeypatch.undo()
        if refusing.left > 0:
            break
        # After the rename, only the deletion of the old checkpoint can fail; the new one exists.
        holds_new = load_items(values(-1), tmp_path / "c")["number"] == 2
        assert_holds(tmp_path / "c", 2 if holds_new else 1)
        save_items(values(1), tmp_path / "c", common={"number": 1})
        assert os.listdir(tmp_path) == ["c"]
    assert refused > 15


def test_what_json_cannot_hold_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="o: Object of type set"):
        begin_save([ShardedObject("o", {1, 2})], tmp_path / "c", common={}, staging=StagingMemory())
    assert os.listdir(tmp_path) == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("step", ["write_pieces", "write_manifest"])
def test_a_save_whose_thread_ends_by_any_error_is_not_reported_saved(tmp_path, monkeypatch, step):
    def fail(*_, **__):
        raise MemoryError("no room for a piece")

    monkeypatch.setattr(saving, step, fail)
    pending = begin_save(values(3), tmp_path / "c", common={"number": 3}, staging=StagingMemory())
    with pytest.raises(MemoryError, match="no room for a piece"):
        pending.finish()
    assert not (tmp_path / "c").exists()
