"""Tests checkpoints of several ranks: loads by other ranks and boxes, and errors that every rank reports."""

import os
import random
import resource
import signal

import pytest
import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing import CheckpointError, ShardedTensor, load_common, load_items, save_items, saving
from megatron.core.dist_checkpointing.errors import one_error_everywhere
from tests.counts import long_count, soak_only
from tests.harness import launch_on_ranks, run_on_ranks
from tests.unit_tests.core.dist_checkpointing.cuts import random_tensors, strided_copy

SEEDS = range(long_count(3, soak=20))


def save_random(folder):
    for seed in SEEDS:
        chance = random.Random(seed)
        boxes = random_tensors(chance).cut(chance, dist.get_world_size())
        save_items(boxes[dist.get_rank()], folder / str(seed), common={"seed": seed, "ranks": dist.get_world_size()})


def load_random(folder, saved_by):
    for seed in SEEDS:
        chance = random.Random(seed)
        tensors = random_tensors(chance)
        boxes = tensors.cut(random.Random(seed + 99), dist.get_world_size())[dist.get_rank()]
        wanted = [strided_copy(random, box) for box in boxes]
        assert load_items(wanted, folder / str(seed)) == {"seed": seed, "ranks": saved_by}
        for box, loaded in zip(boxes, wanted, strict=True):
            assert torch.equal(box.data, loaded.data), (seed, box.key)


@pytest.mark.parametrize("writers, readers", [(3, 1), (2, 4), soak_only(1, 3), soak_only(4, 2)])
def test_any_number_of_ranks_loads_what_any_other_number_saved(tmp_path, writers, readers):
    run_on_ranks(save_random, writers, tmp_path)
    run_on_ranks(load_random, readers, tmp_path, writers)


def save_in_subgroups(folder):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = dist.get_rank() // 2
    half = torch.full((1, 2), dist.get_rank())
    box = ShardedTensor.at("x", half, (2, 2), (dist.get_rank() % 2, 0))
    save_items(box, folder / str(mine), common={}, process_group=groups[mine])
    half.zero_()
    load_items(box, folder / str(mine), process_group=groups[mine])
    return half[0, 0].item()


def test_groups_save_independently(tmp_path):
    assert run_on_ranks(save_in_subgroups, 4, tmp_path) == [0, 1, 2, 3]


def fail_on_one_rank(error):
    try:
        with one_error_everywhere("cannot save", None):
            if dist.get_rank() == 1:
                raise error
    except Exception as caught:
        return type(caught).__name__, str(caught)
    return None


@pytest.mark.parametrize(
    ("error", "own", "others"),
    [
        (RuntimeError("no memory"), ("RuntimeError", "no memory"), ("RemoteRankError", "rank 1: no memory")),
        (ValueError("wrong"), ("ValueError", "wrong"), ("RemoteRankError", "rank 1: wrong")),
        (
            OSError("full"),
            ("CheckpointError", "cannot save: rank 1: full"),
            ("CheckpointError", "cannot save: rank 1: full"),
        ),
    ],
    ids=["RuntimeError", "ValueError", "OSError"],
)
def test_an_error_of_one_rank_ends_the_others_too(error, own, others):
    assert run_on_ranks(fail_on_one_rank, 3, error, timeout=20) == [others, own, others]


def rows(value):
    rank, size = dist.get_rank(), dist.get_world_size()
    return [
        ShardedTensor.at("rows", torch.full((50, 20), float(value)), (50 * size, 20), (50 * rank, 0)),
        ShardedTensor.whole("copy", torch.full((30,), float(value))),
    ]


def expect_error(expected, call):
    """Returns the error message that every rank must raise from `call`."""
    try:
        call()
    except expected as error:
        dist.barrier()
        return str(error)
    raise AssertionError("no error")


def save_with_full_disk_on_last_rank(folder):
    save_items(rows(1), folder, common={})
    last = dist.get_rank() == dist.get_world_size() - 1
    if last:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    return expect_error(CheckpointError, lambda: save_items(rows(2), folder, common={}))


def load_ones(folder):
    wanted = rows(0)
    load_items(wanted, folder)
    assert all((item.data == 1).all() for item in wanted)


def test_a_full_disk_on_one_rank_is_the_same_error_on_all_and_keeps_the_previous(tmp_path):
    errors = run_on_ranks(save_with_full_disk_on_last_rank, 3, tmp_path / "c")
    assert len(set(errors)) == 1 and "rank 2: [Errno 27] File too large" in errors[0]
    assert os.listdir(tmp_path) == ["c"]
    run_on_ranks(load_ones, 3, tmp_path / "c")


def save_then_load_damaged(folder):
    save_items(rows(1), folder, common={})
    errors = []
    names = [entry.name for entry in sorted(folder.iterdir())] if dist.get_rank() == 0 else []
    shared = [names]
    dist.broadcast_object_list(shared, src=0)
    for name in shared[0]:
        content = (folder / name).read_bytes()
        dist.barrier()
        if dist.get_rank() == 0:
            (folder / name).write_bytes(content[:-7])
        dist.barrier()
        wanted = rows(0)
        text = expect_error((ValueError, RuntimeError), lambda wanted=wanted: load_items(wanted, folder))
        assert all((item.data == 0).all() for item in wanted)
        errors.append(name in text)
        if dist.get_rank() == 0:
            (folder / name).write_bytes(content)
    dist.barrier()
    load_ones(folder)
    return errors


def test_a_truncated_file_is_named_on_every_rank(tmp_path):
    errors = run_on_ranks(save_then_load_damaged, 3, tmp_path / "c")
    assert errors == [[True] * 6] * 3  # three data files, metadata, common values, manifest


def load_other_model_on_one_rank(folder):
    save_items(rows(1), folder, common={})
    wanted = rows(0)
    if dist.get_rank() == 1:
        wanted.append(ShardedTensor.whole("lm_head", torch.zeros(3)))
    text = expect_error((ValueError, RuntimeError), lambda: load_items(wanted, folder))
    assert all((item.data == 0).all() for item in wanted)
    return text


def test_a_key_missing_for_one_rank_is_told_to_all(tmp_path):
    for text in run_on_ranks(load_other_model_on_one_rank, 3, tmp_path / "c"):
        assert "checkpoint is from a different model: lm_head is not in it" in text


def save_where_no_folder_can_be(folder):
    return expect_error(CheckpointError, lambda: save_items(rows(1), folder, common={}))


def test_an_unwritable_folder_is_told_to_all(tmp_path):
    (tmp_path / "file").write_text("")
    for text in run_on_ranks(save_where_no_folder_can_be, 3, tmp_path / "file" / "c"):
        assert "file is a file: not overwritten" in text


def save_and_kill_rank_1(folder):
    save_items(rows(1), folder, common={})
    if dist.get_rank() == 1:
        saving.write_pieces = lambda path, contents, helper: os.kill(os.getpid(), signal.SIGKILL)
    save_items(rows(2), folder, common={})


def test_killing_a_rank_during_the_save_keeps_the_previous_checkpoint(tmp_path):
    outcomes = launch_on_ranks(save_and_kill_rank_1, 3, tmp_path / "c", grace=5)
    assert all(outcome.exit_code != 0 for outcome in outcomes)
    run_on_ranks(load_ones, 3, tmp_path / "c")
    run_on_ranks(save_again, 2, tmp_path / "c")
    assert os.listdir(tmp_path) == ["c"]
    assert load_common(tmp_path / "c") == {"again": True}


def save_again(folder):
    save_items(rows(3), folder, common={"again": True})
