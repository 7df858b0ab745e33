"""Weights & Biases receives the same points as TensorBoard, through the package wandb in offline mode."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.training.arguments import parse_args
from megatron.training.callbacks import RunStart
from megatron.training.callbacks.tensorboard import TensorBoardLog
from megatron.training.callbacks.wandb_log import WandbLog
from megatron.training.command_line.config_builder import config_from_args, run_config_of
from megatron.training.command_line.published import get_wandb_writer, publish_run
from megatron.training.config import LoggingConfig
from tests.unit_tests.training.callbacks.wandb_files import read_wandb
from tests.unit_tests.training.small_reports import EVALUATION, STEP

FLAGS = "--wandb-project p --wandb-exp-name n --tensorboard-log-interval 2 --log-validation-ppl-to-tensorboard"


def arguments(folder: Path, flags: str = FLAGS) -> argparse.Namespace:
    return parse_args(argv=[*flags.split(), "--wandb-save-dir", str(folder)])


def log_of(args: argparse.Namespace) -> WandbLog:
    return WandbLog(run_config_of(args))


def test_points_are_tensorboards(tmp_path: Path) -> None:
    args = arguments(tmp_path, f"{FLAGS} --wandb-entity team --hidden-size 96")
    logs = log_of(args), TensorBoardLog(str(tmp_path / "tb"), config_from_args(LoggingConfig, args))
    for log in logs:
        log.on_train_start(RunStart(iteration=0, train_iters=9))
        for iteration in (1, 2, 3, 4):
            log.on_step_end(replace(STEP, iteration=iteration, losses={"lm loss": 1 / iteration}, num_zeros=iteration))
        log.on_evaluation_end(replace(EVALUATION, set_name="books", losses={"lm loss": 1.5, "accuracy": 0.5}))
        log.on_run_end()
    (run,) = read_wandb(tmp_path)
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    expected: dict[int, dict[str, float]] = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            expected.setdefault(event.step, {})[tag] = event.value
    assert run.points.keys() == expected.keys() == {2, 4}
    for step, values in expected.items():
        assert run.points[step] == pytest.approx(values)
    assert {"lm loss validation-books", "lm loss validation-books ppl"} <= expected[4].keys()
    assert (run.project, run.name, run.entity, run.exit_code) == ("p", "n", "team", 0)
    assert run.config["hidden_size"] == 96 and run.config["wandb_project"] == "p"


def test_a_start_from_a_checkpoint_continues_the_run_and_one_at_step_0_begins_another(tmp_path: Path) -> None:
    for iteration in (0, 4, 0, 4):
        log = log_of(arguments(tmp_path))
        log.on_train_start(RunStart(iteration=iteration, train_iters=9))
        log.on_step_end(replace(STEP, iteration=iteration + 2))
        log.on_run_end()
    first, continued, second, last = read_wandb(tmp_path)
    assert first.run_id == continued.run_id != second.run_id == last.run_id
    assert [list(run.points) for run in (first, continued)] == [[2], [6]]


def test_a_run_id_of_the_environment_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    log = log_of(arguments(tmp_path))
    log.on_train_start(RunStart(iteration=0, train_iters=9))
    log.on_run_end()
    assert [run.run_id for run in read_wandb(tmp_path)] == ["mine"]


def test_scripts_log_through_the_writer_and_an_error_marks_the_run_as_failed(tmp_path: Path) -> None:
    log = log_of(arguments(tmp_path))
    log.on_train_start(RunStart(iteration=0, train_iters=9))
    log.on_step_end(replace(STEP, iteration=2))
    publish_run(arguments(tmp_path))
    get_wandb_writer().log({"own": 7.0}, 2)
    # Steps that are repeated after a rewind leave the points unchanged.
    log.on_step_end(replace(STEP, iteration=4))
    log.on_step_end(replace(STEP, iteration=2, grad_norm=9.0))
    with pytest.raises(OSError, match="disk"):
        try:
            raise OSError("disk")
        finally:
            log.on_run_end()
    assert get_wandb_writer() is None
    publish_run(None)
    (run,) = read_wandb(tmp_path)
    assert run.exit_code == 1 and list(run.points) == [2, 4]
    assert run.points[2]["own"] == 7.0 and run.points[2]["grad-norm"] == STEP.grad_norm


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        ValueError, match=r"--wandb-project is p: the package wandb is missing; .*megatron-stash\[wandb\]"
    ):
        log_of(arguments(tmp_path))


def test_a_service_that_refuses_is_an_error_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise wandb.errors.UsageError("no API key")

    log = log_of(arguments(tmp_path))
    monkeypatch.setattr(log.writer, "init", refuse)
    with pytest.raises(
        ValueError, match="--wandb-project is p, but .* cannot start: no API key. Set WANDB_MODE=offline"
    ):
        log.on_train_start(RunStart(iteration=0, train_iters=9))
