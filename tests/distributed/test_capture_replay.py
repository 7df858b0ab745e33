"""Tests check_capture.py --replay: replayed steps are bitwise equal to eager ones, or the first difference is named."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron.core.dist_checkpointing import model_logical_pieces
from megatron.core.transformer.mlp import MLP
from megatron.tools.capture_configurations import CONFIGURATIONS, DENSE, words_of
from megatron.tools.capture_replay import state_of
from megatron.tools.check_capture import main
from tests.distributed.tiny_runs import started_run, train_steps
from tests.functional_tests.case import command_line, read_bases
from tests.harness import launch_on_ranks, run_on_ranks
from tests.padded_corpus import write_packed


def _own_lines(stdout: str) -> list[str]:
    """Returns the lines of the program itself; lines of the run that it builds are indented."""
    return [line for line in stdout.splitlines() if not line.startswith("  ")]


@pytest.mark.slow
def test_a_stash_over_ranks_is_replayed_with_the_same_bits() -> None:
    argv = ["--replay", "2", *CONFIGURATIONS["stash over ranks, ZeRO-1"].argv]
    ends = launch_on_ranks(main, 2, argv, backend=None)
    assert [end.exit_code for end in ends] == [0, 0], ends[0].stderr
    assert ends[0].stdout.splitlines()[-1] == "REPLAYED: 2 steps on a tape are bitwise equal to the eager ones"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stash, as gpt-oss", "stash, as DeepSeek-V3"])
def test_a_model_with_all_that_published_ones_have_is_replayed_with_the_same_bits(name: str) -> None:
    (end,) = launch_on_ranks(main, 1, ["--replay", "2", *CONFIGURATIONS[name].argv], backend=None)
    assert end.exit_code == 0, end.stderr
    assert end.stdout.splitlines()[-1] == "REPLAYED: 2 steps on a tape are bitwise equal to the eager ones"


def replay_with_a_counter(argv: list[str]) -> None:
    forward = MLP.forward

    def counts(mlp: MLP, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        # Counts the calls of each layer separately, so that every run begins with the same count.
        vars(mlp)["calls"] = vars(mlp).get("calls", 0) + 1
        output, bias = forward(mlp, hidden)
        return output * (1 + 1 / vars(mlp)["calls"]), bias

    with patch.object(MLP, "forward", counts):
        main(argv)


def replay_with_a_counter_in_a_buffer(argv: list[str]) -> None:
    forward = MLP.forward

    def counts(mlp: MLP, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        vars(mlp)["calls"] = vars(mlp).get("calls", 0) + 1
        mlp.seen.fill_(vars(mlp)["calls"])
        return forward(mlp, *args, **kwargs)

    build = MLP.__init__

    def build_with_buffer(mlp: MLP, *args: Any, **kwargs: Any) -> None:
        build(mlp, *args, **kwargs)
        mlp.register_buffer("seen", torch.zeros(1), persistent=False)

    with patch.object(MLP, "forward", counts), patch.object(MLP, "__init__", build_with_buffer):
        main(argv)


@pytest.mark.slow
def test_a_counter_of_the_host_in_a_buffer_is_found() -> None:
    argv = ["--replay", "2", *words_of(DENSE)]
    (end,) = launch_on_ranks(replay_with_a_counter_in_a_buffer, 1, argv, backend=None)
    verdict, replayed, line = _own_lines(end.stdout)[-3:]
    assert (end.exit_code, verdict.partition(":")[0]) == (1, "CAPTURABLE")
    assert replayed.startswith("DIFFERENT") and line.startswith("1. rank 0: after step ")
    assert "seen differs with and without graphs" in line


def names_that_change_with_the_optimizers_state() -> list[str]:
    with started_run(command_line({**read_bases()["dense"], "micro-batch-size": 1})) as run:
        train_steps(run, 1)
        before = state_of(run)
        assert run.optimizer is not None
        pieces = {name: piece for chunk in run.model for name, piece in model_logical_pieces(chunk).items()}
        for box in run.optimizer.sharded_state(pieces):
            if "exp_avg" in box.key:
                box.data.add_(1)
        return [name for name, value in state_of(run).items() if value != before[name]]


@pytest.mark.slow
def test_the_optimizers_tensors_are_compared() -> None:
    (names,) = run_on_ranks(names_that_change_with_the_optimizers_state, 1)
    assert names and all(name.startswith("the optimizer's ") and "exp_avg" in name for name in names)


def test_a_counter_of_the_host_that_the_lint_cannot_see_is_found() -> None:
    (end,) = launch_on_ranks(replay_with_a_counter, 1, ["--replay", "2", *words_of(DENSE)], backend=None)
    verdict, replayed, line = _own_lines(end.stdout)[-3:]
    assert (end.exit_code, verdict.partition(":")[0]) == (1, "CAPTURABLE")
    # The third step is captured and still computes correct results.
    assert replayed.startswith("DIFFERENT") and line.startswith("1. rank 0: step 4: losses is ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "graphs"),
    [
        ("router with losses and a bias", ["--cuda-graph-impl", "local", "--cuda-graph-modules", "moe_router"]),
        ("stash with dropout, losses and a bias", []),
        ("experts that drop over capacity", []),
    ],
)
def test_padding_masks_are_inputs_of_graphs(tmp_path: Path, name: str, graphs: list[str]) -> None:
    """Steps differ in their padding, so a graph that kept the mask of its capture would replay other bits."""
    words = [word for word in CONFIGURATIONS[name].argv if word != "--mock-data"]
    length, eod = (int(words[words.index(flag) + 1]) for flag in ("--seq-length", "--vocab-size"))
    chats = [[2 + number % 5, 3 + number % 4] for number in range(40)]
    prefix = write_packed(tmp_path / "a", chats, length=length, eod=eod - 1, fill=eod - 1)
    argv = ["--replay", "2", *words, "--data-path", prefix, "--split", "100,0,0", *graphs]
    (end,) = launch_on_ranks(main, 1, argv, backend=None)
    assert end.exit_code == 0, end.stderr
    assert end.stdout.splitlines()[-1] == "REPLAYED: 2 steps on a tape are bitwise equal to the eager ones"
