"""Checkpoints in one process without a process group: exact, verified, and atomic when the process is killed."""

import os
import pickle
import resource
import signal
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import load as dcp_load

from megatron.core.dist_checkpointing import (
    CheckpointError,
    ShardedObject,
    ShardedTensor,
    list_tensors,
    load_common,
    load_items,
    save_items,
)
from megatron.core.dist_checkpointing.storage import read_metadata
from tests.harness import run_on_ranks


def state_of(value):
    return {
        "weight": ShardedTensor.whole("weight", torch.full((40, 30), float(value))),
        "rest": [ShardedTensor.whole("step", torch.tensor(value)), ShardedObject("rng", {"python": [value, None]})],
    }


def load_value(folder):
    """Returns the value that the checkpoint was created from, after checking that it is complete."""
    state = state_of(-1)
    common = load_items(state, folder)
    value = int(state["rest"][0].data)
    assert (state["weight"].data == value).all() and state["rest"][1].data == {"python": [value, None]}
    assert common == {"iteration": value}
    return value


def save_value(folder, value):
    save_items(state_of(value), folder, common={"iteration": value})


def test_round_trip_and_listing_print_and_warn_nothing(tmp_path, capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_value(tmp_path / "c", 3)
        assert load_value(tmp_path / "c") == 3
    assert list_tensors(tmp_path / "c") == {"weight": ((40, 30), torch.float32), "step": ((), torch.int64)}
    assert load_common(tmp_path / "c") == {"iteration": 3}
    assert capfd.readouterr() == ("", "")


def test_equal_states_give_equal_files(tmp_path):
    for name in "ab":
        save_value(tmp_path / name, 3)
    assert (tmp_path / "a" / "manifest.json").read_bytes() == (tmp_path / "b" / "manifest.json").read_bytes()


def test_a_second_save_replaces_the_first(tmp_path):
    save_value(tmp_path / "c", 1)
    save_value(tmp_path / "c", 2)
    assert load_value(tmp_path / "c") == 2
    assert os.listdir(tmp_path) == ["c"]


def test_parameters_that_require_grad_load_in_place(tmp_path):
    save_items(ShardedTensor.whole("w", torch.nn.Parameter(torch.ones(2, 3))), tmp_path / "c", common={})
    target = torch.nn.Parameter(torch.zeros(2, 3))
    load_items(ShardedTensor.whole("w", target), tmp_path / "c")
    assert (target == 1).all() and target.requires_grad and target.grad_fn is None


def test_a_float_dtype_is_converted_only_where_asked(tmp_path):
    save_items(ShardedTensor.whole("w", torch.tensor([1.5, 2.5])), tmp_path / "c", common={})
    target = torch.zeros(2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"w is torch.float32 in it, but torch.bfloat16 is requested"):
        load_items(ShardedTensor.whole("w", target), tmp_path / "c")
    load_items(ShardedTensor.whole("w", target, allow_cast=True), tmp_path / "c")
    assert target.tolist() == [1.5, 2.5]
    with pytest.raises(ValueError, match=r"torch.int64 is requested"):
        load_items(ShardedTensor.whole("w", torch.zeros(2, dtype=torch.int64), allow_cast=True), tmp_path / "c")


@pytest.mark.parametrize(
    "other, message",
    [
        (ShardedTensor.whole("other", torch.ones(2)), "other is not in it"),
        (
            ShardedTensor.whole("step", torch.ones(2, dtype=torch.int64)),
            r"step has shape \[\] in it, but \[2\] is requested",
        ),
        (ShardedTensor.whole("rng", torch.ones(2)), "rng is an object on one side"),
        (ShardedObject("step", None), "step is an object on one side"),
        ([ShardedTensor.whole(f"x{i}", torch.ones(2)) for i in range(9)], "x3 is not in it; and 5 more"),
    ],
)
def test_another_model_is_named_and_nothing_is_loaded(tmp_path, other, message):
    save_value(tmp_path / "c", 3)
    state = state_of(-1)
    with pytest.raises(ValueError, match=f"checkpoint is from a different model: .*{message}"):
        load_items([state, other], tmp_path / "c")
    assert (state["weight"].data == -1).all() and state["rest"][1].data["python"][0] == -1


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "common.json", "manifest.json"])
@pytest.mark.parametrize("damage", [truncate, flip_a_bit, os.remove])
def test_damage_to_any_file_is_named_and_nothing_is_loaded(tmp_path, name, damage):
    save_value(tmp_path / "c", 3)
    damage(tmp_path / "c" / name)
    state = state_of(-1)
    with pytest.raises(ValueError, match=rf"{name} (is|does)|no {name}"):
        load_items(state, tmp_path / "c")
    assert (state["weight"].data == -1).all()


def test_metadata_may_name_no_other_code(tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(os.system))
    with pytest.raises(ValueError, match="corrupt: it refers to posix.system"):
        read_metadata(tmp_path)


def test_missing_and_incomplete_folders_are_told_apart(tmp_path):
    with pytest.raises(ValueError, match="c does not exist"):
        load_common(tmp_path / "c")
    (tmp_path / "c.incomplete-0123456789ab").mkdir()
    with pytest.raises(ValueError, match="c was never completed"):
        load_common(tmp_path / "c")
    (tmp_path / "d").mkdir()
    with pytest.raises(ValueError, match="d is not a complete checkpoint"):
        load_common(tmp_path / "d")


def test_a_folder_or_file_of_something_else_is_not_touched(tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("more work")
    for name in ("c", "file", "file/c"):
        with pytest.raises(CheckpointError, match="not overwritten"):
            save_value(tmp_path / name, 1)
    assert (tmp_path / "c" / "thesis.tex").read_text() == "years of work"
    assert sorted(os.listdir(tmp_path)) == ["c", "file"]


@pytest.mark.parametrize("limit", [0, 300, 3000])
def test_a_full_disk_is_one_error_and_keeps_the_previous_checkpoint(tmp_path, limit):
    save_value(tmp_path / "c", 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        with pytest.raises((CheckpointError, OSError), match="File too large"):
            save_value(tmp_path / "c", 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert load_value(tmp_path / "c") == 1
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize("bad", [ShardedObject("o", {1, 2}), "a string"])
def test_what_json_cannot_hold_is_refused(tmp_path, bad):
    with pytest.raises((CheckpointError, ValueError), match="not JSON serializable|must be ShardedTensor"):
        save_items([state_of(1), bad], tmp_path / "c", common={})
    with pytest.raises(ValueError, match="common.json: Object of type complex"):
        save_items(state_of(1), tmp_path / "c", common={"z": 1j})
    assert os.listdir(tmp_path) == []


def save_and_die_at_event(folder, number):
    """Replaces the checkpoint in a forked process, which kills itself at its n-th access to the folder's files."""
    child = os.fork()
    if child == 0:
        seen = 0

        def count(event, args):
            nonlocal seen
            if event.split(".")[0] in ("open", "os", "shutil") and any(str(folder) in str(arg) for arg in args):
                seen += 1
                if seen == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        save_value(folder, 2)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def die_at_every_event(folder):
    for number in range(1, 1000):
        save_value(folder, 1)
        finished = save_and_die_at_event(folder, number)
        assert load_value(folder) in ((2,) if finished else (1, 2))
        if finished:
            return number
    raise AssertionError("the save never finished")


@pytest.mark.slow
def test_a_kill_at_any_file_access_leaves_a_whole_checkpoint_and_the_next_save_cleans_up(tmp_path):
    # In a separate process, because a fork of pytest would inherit locks held by its threads.
    assert run_on_ranks(die_at_every_event, 1, tmp_path / "c", backend=None)[0] > 15
    assert os.listdir(tmp_path) == ["c"]


def test_a_checkpoint_of_the_first_format_loads_in_other_boxes():
    values = torch.arange(48, dtype=torch.float32).view(8, 6)
    weight = torch.zeros(4, 6)
    moment = torch.zeros(8, 6, dtype=torch.bfloat16)
    rest = [ShardedTensor.whole("step", torch.tensor(0)), ShardedObject("rng", None)]
    flags = ShardedTensor.whole("flags", torch.zeros(3, dtype=torch.bool))
    wanted = [
        ShardedTensor.at("decoder.layers.0.weight", weight, (8, 6), (2, 0)),
        ShardedTensor.whole("optimizer.exp_avg.decoder.layers.0.weight", moment),
    ]
    # Written by two processes in format version 1, whose manifest contains no pieces.
    assert load_items([wanted, rest, flags], Path(__file__).parent / "format_1") == {"iteration": 7}
    assert torch.equal(weight, values[2:6]) and torch.equal(moment, values.bfloat16())
    assert rest[0].data == 7 and rest[1].data == {"python": [3, None]} and flags.data.tolist() == [True, False, True]


def test_torch_reads_what_is_stored_here(tmp_path):
    save_value(tmp_path / "c", 3)
    wanted = {"weight": torch.zeros(40, 30), "step": torch.tensor(0)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp_load(wanted, checkpoint_id=tmp_path / "c", no_dist=True)
    assert (wanted["weight"] == 3).all() and wanted["step"] == 3
