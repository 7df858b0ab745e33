"""Stored weights and optimizer state do not depend on ranks or stages, and resumed runs are bit-identical."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.training.training import run_step
from tests.counts import soak_only
from tests.distributed.parity import Box, boxes_of_state, boxes_of_weights, put_together
from tests.distributed.tiny_runs import comparable, started_run
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.harness import run_on_ranks

# With four ranks, two hold only vocabulary padding.
FLAGS: Flags = {"vocab-size": 60, "padded-vocab-size": 128, "make-vocab-size-divisible-by": 1, "bf16": True}
STEPS = 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "axis"),
    # Query groups are split in the same way as heads; test_checkpoints_of_layouts.py covers them.
    [("dense", "tensor"), ("dense", "pipeline"), soak_only("llama", "tensor")],
)
def test_a_checkpoint_of_any_number_of_ranks_loads_on_any_other(base: str, axis: str, tmp_path: Path) -> None:
    flags: Flags = {**FLAGS, "num-attention-heads": 8, "num-query-groups": 4}
    if base == "dense":
        del flags["num-query-groups"]
    if axis == "pipeline":
        flags |= {"num-layers": 4}
    states = []
    # Written by two ranks, read and rewritten by one, read and rewritten by four, and read by two.
    for step, size in enumerate((2, 1, 4, 2)):
        # The first two stages have two chunks each.
        chunks: Flags = {"num-virtual-stages-per-pipeline-rank": 2} if axis == "pipeline" and step == 0 else {}
        layout: Flags = {f"{axis}-model-parallel-size": size, **chunks}
        argv = _argv(base, {**flags, **layout}, load=tmp_path / f"{step - 1}" if step else None)
        states.append(_merged(run_on_ranks(_state_of, size, [*argv, "--save", str(tmp_path / f"{step}")], step == 0)))
    trained, initial = states[0][1], states[0][0]
    for _, state in states[1:]:
        assert state.keys() == trained.keys()
        assert [name for name in state if not torch.equal(state[name], trained[name])] == []
    assert not torch.equal(initial["decoder.final_layernorm.weight"], trained["decoder.final_layernorm.weight"])
    # Initial weights must depend only on the seed.
    for before, _ in states[1:]:
        assert [name for name in initial if not torch.equal(before[name], initial[name])] == []


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True])
def test_a_run_with_dropout_resumes_bit_for_bit(sequence: bool, tmp_path: Path) -> None:
    flags: Flags = {"hidden-dropout": 0.2, "attention-dropout": 0.2, "sequence-parallel": sequence}
    argv = [*_argv("dense", {**flags, "tensor-model-parallel-size": 2}), "--save", str(tmp_path)]
    for whole, again in run_on_ranks(_stop_and_resume, 2, argv):
        assert whole == again


def _argv(base: str, flags: Flags, *, load: Path | None = None) -> list[str]:
    return command_line({**read_bases()[base], **flags, "load": None if load is None else str(load)})


def _state_of(argv: Sequence[str], train: bool) -> tuple[list[Box], list[Box]]:
    """Trains and saves, or loads and saves again; returns initial weights, and final weights and optimizer state."""
    at_load = argv.index("--load") if "--load" in argv else len(argv)
    with started_run([*argv[:at_load], *argv[at_load + 2 :]]) as run:
        initial = boxes_of_weights(run)
        if train:
            for _ in range(STEPS):
                run_step(run)
            run.save_checkpoint()
            return initial, boxes_of_state(run)
    with started_run(argv) as run:
        run.save_checkpoint()
        return initial, boxes_of_state(run)


def _merged(states: list[tuple[list[Box], list[Box]]]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    before, after = zip(*states)
    return put_together([box for own in before for box in own]), put_together([box for own in after for box in own])


def _stop_and_resume(argv: Sequence[str]) -> tuple[list[Any], list[Any]]:
    with started_run(argv) as run:
        run_step(run)
        run.save_checkpoint()
        whole = [comparable(run_step(run)[0]) for _ in range(STEPS - 1)]
    with started_run([*argv, "--load", argv[-1]]) as run:
        return whole, [comparable(run_step(run)[0]) for _ in range(STEPS - 1)]
