"""Background saves on several ranks: one commit for all, and an error of one rank raises on every rank."""

import os
import threading

import pytest
import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing import (
    CheckpointError,
    ReplicaWriters,
    ShardedTensor,
    StagingMemory,
    begin_save,
    disk,
    load_items,
    saving,
    storage,
)
from tests.harness import run_on_ranks
from tests.save_threads import join_save_threads


def state_of(number):
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = torch.full((4, 50), float(number + rank))
    copy = torch.full((600,), float(number))
    return [ShardedTensor.at("rows", rows, (4 * size, 50), (4 * rank, 0)), ShardedTensor.whole("copy", copy)]


def assert_holds(folder, number):
    wanted = state_of(-9)
    load_items(wanted, folder)
    assert all(torch.equal(item.data, other.data) for item, other in zip(wanted, state_of(number), strict=True))


def save_in_background(folder):
    rank, staging, log = dist.get_rank(), StagingMemory(), []
    slow_rank, write = threading.Event(), saving.write_pieces

    def wait_and_write(path, contents, helper):
        assert rank != 1 or slow_rank.wait(60)
        return write(path, contents, helper=helper)

    saving.write_pieces = wait_and_write
    state = state_of(1)
    pending = begin_save(state, folder, common={}, staging=staging, on_commit=lambda: log.append("committed"))
    for item in state:
        item.data.zero_()
    if rank == 2:
        join_save_threads()
        # This rank has written its share, but the checkpoint is incomplete until the other ranks finish.
        assert pending.is_done()
    assert not pending.ranks_are_done() and not folder.exists()
    dist.barrier()
    slow_rank.set()
    join_save_threads()
    # No rank has called a function since, so the commit does not wait for a training step.
    dist.barrier()
    assert folder.exists() and pending.ranks_are_done()
    pending.finish()
    assert log == ["committed"] * (rank == 0)
    assert_holds(folder, 1)
    # The next save fails on one rank, and the other ranks detect it without waiting for that rank.
    if rank == 1:
        refuse = OSError(28, "No space left on device")
        saving.write_pieces = lambda path, contents, helper: (_ for _ in ()).throw(refuse)
    pending = begin_save(state_of(2), folder, common={}, staging=staging)
    with pytest.raises(CheckpointError, match=r"cannot save checkpoint .*c: rank 1: \[Errno 28\] No space left"):
        pending.finish()
    assert_holds(folder, 1)
    saving.write_pieces = write
    begin_save(state_of(3), folder, common={}, staging=staging).finish()
    assert_holds(folder, 3)
    if rank == 0:
        disk.make_folder = lambda path: (_ for _ in ()).throw(OSError(30, "Read-only file system"))
    with pytest.raises(CheckpointError, match="rank 0: .*Read-only file system"):
        begin_save(state_of(4), folder, common={}, staging=staging)
    assert_holds(folder, 3)


def test_the_commit_needs_all_ranks_and_no_step_and_one_ranks_error_is_everybodys(tmp_path):
    run_on_ranks(save_in_background, 3, tmp_path / "c")
    assert os.listdir(tmp_path) == ["c"]


def save_by_first(folder):
    begin_save(state_of(1), folder, common={}, replicas=ReplicaWriters.FIRST).finish()
    assert_holds(folder, 1)


def test_replicas_can_be_written_by_the_first_rank_that_holds_them(tmp_path):
    run_on_ranks(save_by_first, 2, tmp_path / "c")
    sizes = [(tmp_path / "c" / name).stat().st_size for name in ("__0_0.distcp", "__1_0.distcp")]
    assert sizes[0] - sizes[1] > 600 * 4


def load_together(folder):
    rank, size = dist.get_rank(), dist.get_world_size()
    begin_save(state_of(1), folder, common={}).finish()
    num_bytes, read = [], storage.PieceReader.read

    def count(reader, piece, window, *, dtype, target):
        num_bytes.append(target.nbytes)
        read(reader, piece, window, dtype=dtype, target=target)

    storage.PieceReader.read = count
    # A replicated tensor, the rank's rows of a sharded tensor, and a strided copy.
    wanted = state_of(-9)
    wanted[1].data = torch.zeros(600, 2)[:, 0]
    wanted += [ShardedTensor.at("rows", torch.zeros(2, 50), (4 * size, 50), (1, 0))]
    load_items(wanted, folder, replicas=dist.group.WORLD)
    assert (wanted[0].data == 1 + rank).all() and (wanted[1].data == 1).all() and (wanted[2].data == 1).all()
    return sum(num_bytes)


def test_what_all_ranks_want_is_read_by_one_of_them(tmp_path):
    own, copy, two_rows = 4 * 50 * 4, 600 * 4, 2 * 50 * 4
    assert sorted(run_on_ranks(load_together, 3, tmp_path / "c")) == sorted([own + copy, own + two_rows, own])
