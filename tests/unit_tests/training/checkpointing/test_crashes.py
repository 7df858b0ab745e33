"""Kills at every write of a save, and damage to every piece. A complete checkpoint can always be loaded.

It is the last one that was reported as saved, or a later one.
"""

import os
import signal
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing import ShardedTensor, StagingMemory, begin_save, disk, load_items
from megatron.core.dist_checkpointing.manifest import read_manifest
from megatron.training.checkpointing.folder import (
    clean_save_folder,
    find_checkpoint,
    iteration_folder,
    prune,
    write_tracker,
)
from tests.counts import long_count
from tests.harness import run_on_ranks
from tests.killing_os import KillingOs
from tests.unit_tests.training.small_run import SmallRun


def save_iteration(folder, iteration, *, staging=None):
    """Saves like a training run, with tensors that are shared by several ranks."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    rows = ShardedTensor.at("rows", torch.full((2, 30), float(iteration)), (2 * size, 30), (2 * rank, 0))
    if rank == 0:
        clean_save_folder(str(folder))

    def make_latest():
        write_tracker(str(folder), iteration)
        prune(str(folder), latest=iteration, interval=100)

    state = [rows, ShardedTensor.whole("copy", torch.tensor(iteration))]
    begin_save(
        state,
        iteration_folder(folder, iteration),
        common={"iteration": iteration},
        staging=staging,
        on_commit=make_latest,
    ).finish()


def loaded_iteration(folder):
    """Loads all tensors, and returns the iteration that a run would continue from."""
    found = find_checkpoint(str(folder))
    copy = torch.tensor(-1)
    assert load_items(ShardedTensor.whole("copy", copy), found.path) == {"iteration": found.iteration}
    rows = load_rows(found.path)
    assert copy == found.iteration and (rows == found.iteration).all()
    return found.iteration


def load_rows(path):
    for num_rows in (2, 4):
        rows = torch.full((num_rows, 30), -1.0)
        try:
            load_items(ShardedTensor.whole("rows", rows), path)
        except ValueError:
            continue
        return rows
    raise AssertionError("rows of unknown size")


def end_child(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def save_and_die(folder, iteration, *, number, in_background):
    """Kills a forked process at its n-th write. Returns whether it had reported a save and ended normally."""
    said = folder.with_name("said")
    said.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        killing = disk.os = KillingOs(number)
        # Deletions of folders do not go through that module.
        sys.addaudithook(lambda event, _: killing.count() if event in ("os.remove", "os.rmdir") else None)
        save_iteration(folder, iteration, staging=StagingMemory() if in_background else None)
        said.write_text(str(iteration))
        os._exit(0)
    ended_well = end_child(child) == 0
    return said.exists(), ended_well


def die_at_every_write(folder, in_background):
    folder.mkdir()
    save_iteration(folder, 1)
    saved, kills = 1, 0
    for number in range(1, 1000):
        said, ended_well = save_and_die(folder, saved + 1, number=number, in_background=in_background)
        found = loaded_iteration(folder)
        assert found in ((saved + 1,) if said else (saved, saved + 1)), (number, found, saved)
        saved = found
        if ended_well:
            # Leftovers of the kills have been removed.
            assert sorted(os.listdir(folder)) == [f"iter_{saved:07d}", "latest_checkpointed_iteration.txt"]
            return kills
        kills += 1
    raise AssertionError("the save never finished")


@pytest.mark.slow
@pytest.mark.parametrize("in_background", [False, True], ids=["waiting", "beside training"])
def test_a_kill_at_any_write_loses_nothing_that_was_said_to_be_saved(tmp_path, in_background):
    # In a separate process, because a fork of pytest would inherit locks held by its threads.
    assert run_on_ranks(die_at_every_write, 1, tmp_path / "saved", in_background, backend=None)[0] > 40


def child_rank(folder, *, rank, iteration, kill_at, store):
    child = os.fork()
    if child:
        return child
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2, timeout=timedelta(seconds=20)
        )
        if kill_at is not None:
            disk.os = KillingOs(kill_at)
        save_iteration(folder, iteration, staging=StagingMemory())
        os._exit(0)
    finally:
        # Ignores torch's errors about the killed rank.
        os._exit(1)


def die_on_one_of_two(folder, stride):
    folder.mkdir()
    saved, kills = 0, [0, 0]
    for victim in (1, 0):
        for number in range(1, 1000, stride if victim == 0 else 1):
            store = folder.with_name(f"store-{victim}-{number}")
            kill_at = [number if rank == victim else None for rank in range(2)]
            children = [
                child_rank(folder, rank=rank, iteration=saved + 1, kill_at=kill_at[rank], store=store)
                for rank in range(2)
            ]
            codes = [end_child(child) for child in children]
            found = find_checkpoint(str(folder))
            if found is not None:
                assert loaded_iteration(folder) in ((saved + 1,) if codes == [0, 0] else (saved, saved + 1))
                saved = found.iteration
            if codes == [0, 0]:
                assert found is not None and saved
                break
            assert -signal.SIGKILL in codes, codes
            kills[victim] += 1
    return kills


@pytest.mark.slow
def test_a_kill_of_one_of_two_ranks_at_any_write_loses_nothing(tmp_path):
    kills = run_on_ranks(die_on_one_of_two, 1, tmp_path / "saved", long_count(9, soak=1), backend=None, timeout=300)[0]
    assert kills[0] >= 3 and kills[1] >= 8


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 16
    path.write_bytes(content)


def test_a_flipped_bit_in_any_tensor_names_it_and_the_checkpoint_before_is_taken(tmp_path, capsys):
    run = SmallRun().train(1)
    run.save(tmp_path)
    expected = run.snapshot()
    folder = run.train(2).save(tmp_path)
    pieces = [(name, piece) for name, entry in read_manifest(folder).items() for piece in entry.pieces]
    assert len(pieces) > 10
    for index, (name, piece) in enumerate(pieces):
        whole = (folder / name).read_bytes()
        # At the start, the end, and a random byte in between, which need not begin an element.
        flip(
            folder / name, (piece.start, piece.end - 1, piece.start + piece.num_bytes * index // len(pieces))[index % 3]
        )
        fresh = SmallRun()
        assert fresh.load(tmp_path) == 1
        assert f"{name} is corrupt: {piece}: loading iteration 1 instead" in capsys.readouterr().out
        (folder / name).write_bytes(whole)
    snapshot = fresh.snapshot()
    assert all(torch.equal(snapshot[key], value) for key, value in expected.items() if key != "draws")
    assert SmallRun().load(tmp_path) == 3


@pytest.mark.parametrize("damage", ["truncated", "flipped", "removed"])
def test_any_damaged_file_is_named_and_the_checkpoint_before_is_taken(tmp_path, capsys, damage):
    run = SmallRun().train(1)
    run.save(tmp_path)
    folder = run.train(2).save(tmp_path)
    names = sorted(os.listdir(folder))
    assert len(names) == 4
    for name in names:
        whole = (folder / name).read_bytes()
        if damage == "truncated":
            (folder / name).write_bytes(whole[:-1])
        elif damage == "flipped":
            flip(folder / name, len(whole) // 2)
        else:
            (folder / name).unlink()
        assert SmallRun().load(tmp_path) == 1
        said = capsys.readouterr().out
        assert name in said and ": loading iteration 1 instead, the newest complete checkpoint" in said
        with pytest.raises(ValueError, match=name):
            SmallRun().load(tmp_path, ckpt_step=3)
        (folder / name).write_bytes(whole)
