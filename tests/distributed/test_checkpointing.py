"""Tests saving and resuming on several data-parallel ranks: random states, other numbers of ranks, errors on all."""

import random

import pytest
import torch
import torch.distributed as dist

from megatron.core.device import seed_all
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.checkpointing import check_save_folder, load_run, save_run
from megatron.training.command_line.config_builder import run_config_of
from megatron.training.config import CheckpointConfig
from tests.harness import launch_on_ranks, run_on_ranks
from tests.unit_tests.training.small_run import SmallRun


def groups():
    return ProcessGroupCollection(dp=dist.group.WORLD, dp_cp=dist.group.WORLD)


def call(function, run, folder, *leading):
    config = CheckpointConfig(save=str(folder), load=str(folder))
    objects = [run.model], run.optimizer, run.scheduler
    common = {
        "train_state": run.state,
        "run_config": run_config_of(run.args),
        "config": config,
        "pg_collection": groups(),
    }
    return function(*leading, *objects, **common)


def draws():
    return [random.random(), torch.rand(()).item()]


def save_on_ranks(folder):
    run = SmallRun(group=dist.group.WORLD)
    seed_all(50 + dist.get_rank())
    run.train(3)
    call(save_run, run, folder, run.state.iteration)
    return draws(), run.model.state_dict()


def load_on_ranks(folder):
    run = SmallRun(group=dist.group.WORLD)
    assert call(load_run, run, folder) == 3
    return draws(), run.model.state_dict()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Returns the folder that three ranks saved to, with their draws and states."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_on_ranks(save_on_ranks, 3, folder)


@pytest.mark.parametrize("readers", [1, 3, 4])
def test_each_rank_gets_its_generators_back_and_other_numbers_of_ranks_fresh_ones(checkpoint, readers):
    folder, saved = checkpoint
    outcomes = launch_on_ranks(load_on_ranks, readers, folder)
    loaded = [outcome.value for outcome in outcomes]
    drawn = [tuple(own) for own, _ in loaded]
    assert len(set(drawn)) == readers
    assert ([list(own) for own in drawn] == [own for own, _ in saved]) == (readers == 3)
    notices = [outcome.stdout.count("continues with fresh seeds") for outcome in outcomes]
    assert notices == [int(readers != 3)] + [0] * (readers - 1)
    for _, weights in loaded:
        assert all(torch.equal(value, saved[0][1][name]) for name, value in weights.items())


def check_and_load_errors(folder, unwritable):
    texts = []
    run = SmallRun(hidden_size=64)
    for attempt in (lambda: check_save_folder(unwritable), lambda: call(load_run, run, folder)):
        try:
            attempt()
        except (ValueError, RuntimeError) as error:
            texts.append(str(error))
    return texts


def test_every_rank_learns_of_an_unwritable_folder_and_of_another_model(checkpoint, tmp_path):
    (tmp_path / "file").write_text("")
    for texts in run_on_ranks(check_and_load_errors, 2, checkpoint[0], str(tmp_path / "file")):
        assert len(texts) == 2
        assert "cannot be written" in texts[0] and "--hidden-size is 64 here, 8 in the checkpoint" in texts[1]
