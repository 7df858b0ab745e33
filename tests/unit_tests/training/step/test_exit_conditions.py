"""Tests of the warning about saves that take longer than torchrun's grace period."""

import math

import pytest
from torch.distributed.launcher.api import LaunchConfig

from megatron.training.config import TrainingConfig
from megatron.training.step.exit_conditions import ExitConditions, shutdown_seconds


@pytest.fixture
def under_torchrun(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    return monkeypatch


def test_a_save_that_outlasts_torchruns_patience_is_told_once(under_torchrun, capsys) -> None:
    exits = ExitConditions(TrainingConfig(exit_signal_handler=True))
    for save_seconds in (None, 27.0, 41.2, 50.0):
        exits.warn_of_slow_save(step_seconds=3.0, save_seconds=save_seconds)
    assert capsys.readouterr().out == (
        "WARNING: a save took 41.2 s and a step 3.0 s, but torchrun kills the ranks 30 s after SIGTERM "
        "(--exit-signal-handler): set TORCH_ELASTIC_SHUTDOWN_TIMEOUT above 45\n"
    )


@pytest.mark.parametrize("handler", [True, False])
def test_nothing_is_told_where_there_is_time_or_no_handler(handler: bool, under_torchrun, capsys) -> None:
    if handler:
        under_torchrun.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "110")
    ExitConditions(TrainingConfig(exit_signal_handler=handler)).warn_of_slow_save(step_seconds=3.0, save_seconds=41.2)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("value", [None, "7"])
def test_torchrun_reads_the_same_variable_and_has_the_same_default(value: str | None, under_torchrun) -> None:
    if value is not None:
        under_torchrun.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", value)
    assert shutdown_seconds() == LaunchConfig(1, 1, 1).shutdown_timeout
    under_torchrun.delenv("TORCHELASTIC_RUN_ID")
    assert shutdown_seconds() == math.inf
