"""Saves of a run are reported once complete, at most one is pending, and a failed one does not end training."""

import os

import pytest
import torch

from megatron.core.dist_checkpointing import CheckpointError, ShardedTensor, begin_save, disk, load_common
from megatron.training.checkpointing.saving import RunSaves
from tests.save_threads import join_save_threads


class Run:
    """Counts steps and saves the count."""

    def __init__(self, folder, *, in_background):
        self.folder, self.iteration, self.said = folder, 0, []
        self.in_background = in_background
        self.saves = RunSaves(in_background=in_background, on_save=self.said.append)

    def begin(self, staging):
        state = [ShardedTensor.whole("count", torch.tensor([self.iteration]))]
        folder = self.folder / f"iter_{self.iteration:07d}"
        return begin_save(state, folder, common={"iteration": self.iteration}, staging=staging)

    def step(self):
        self.iteration += 1
        self.saves.save(self.iteration, self.begin)


@pytest.fixture(params=[False, True], ids=["waiting", "beside training"])
def run(request, tmp_path):
    return Run(tmp_path, in_background=request.param)


class FullDisk:
    """The os module, except that writes fail as on a full disk."""

    def __getattr__(self, name):
        return getattr(os, name)

    def write(self, descriptor, content):
        raise OSError(28, "No space left on device")


def test_a_save_is_said_to_be_done_when_it_is_complete(run, tmp_path, capsys):
    for _ in range(3):
        run.step()
    run.saves.finish()
    assert run.said == [1, 2, 3] and run.saves.latest == 3
    assert run.saves.seconds is not None and run.saves.seconds > 0
    assert [load_common(tmp_path / name) for name in sorted(os.listdir(tmp_path))] == [
        {"iteration": iteration} for iteration in (1, 2, 3)
    ]
    assert capsys.readouterr().out.count("scheduled an async checkpoint save at iteration") == 3 * run.in_background


def test_a_step_that_follows_says_it_without_waiting(tmp_path):
    run = Run(tmp_path, in_background=True)
    run.saves.poll()
    run.step()
    join_save_threads()
    run.saves.poll()
    assert run.said == [1] and (tmp_path / "iter_0000001").is_dir()


def test_a_save_that_fails_is_a_warning_and_the_next_one_tries_again(run, tmp_path, monkeypatch, capsys):
    run.step()
    run.saves.finish()
    monkeypatch.setattr(disk, "os", FullDisk())
    run.step()
    run.saves.finish()
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WARNING")]
    assert len(warnings) == 1 and "iter_0000002: rank 0: [Errno 28] No space left on device" in warnings[0]
    assert os.listdir(tmp_path) == ["iter_0000001"] and run.saves.latest == 1
    monkeypatch.undo()
    run.step()
    run.saves.finish()
    assert run.said == [1, 3] and sorted(os.listdir(tmp_path)) == ["iter_0000001", "iter_0000003"]


def test_a_folder_that_cannot_be_made_is_a_warning_too(run, monkeypatch, capsys):
    monkeypatch.setattr(disk, "make_folder", lambda path: disk.os.mkdir("/proc/nothing"))
    run.step()
    run.saves.finish()
    assert "WARNING: cannot save checkpoint" in capsys.readouterr().out and run.said == []


def test_a_folder_of_something_else_is_a_warning_until_it_is_gone_and_fails_the_last_save(run, tmp_path, capsys):
    foreign = tmp_path / "iter_0000001" / "thesis.tex"
    foreign.parent.mkdir()
    foreign.write_text("years of work")
    run.step()
    run.saves.finish()
    assert "iter_0000001 contains something other than a checkpoint of this format: not" in capsys.readouterr().out
    assert run.said == [] and foreign.read_text() == "years of work"
    with pytest.raises(CheckpointError, match="not overwritten"):
        run.saves.save_last(run.iteration, run.begin)
    run.step()
    run.saves.finish()
    assert run.said == [2]


def test_the_save_that_a_run_leaves_behind_must_not_fail(run, monkeypatch, capsys):
    monkeypatch.setattr(disk, "os", FullDisk())
    run.step()
    with pytest.raises(CheckpointError, match="No space left on device"):
        run.saves.save_last(run.iteration, run.begin)
    assert run.said == [] and "WARNING" in capsys.readouterr().out


def test_a_run_that_an_error_ends_leaves_what_it_was_writing(tmp_path):
    run = Run(tmp_path, in_background=True)
    run.saves.abandon()
    run.step()
    run.saves.abandon()
    assert load_common(tmp_path / "iter_0000001") == {"iteration": 1} and run.said == []
