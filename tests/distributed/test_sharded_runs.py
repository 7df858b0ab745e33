"""TRAPS B10, B11, B14 and B39 through the training program, under the distributed optimizer with all its overlaps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pretrain_gpt
from megatron.core.group_collectives import RemoteRankError
from megatron.training.training import evaluate, run_step
from tests.counts import long_count, soak_only
from tests.distributed.layout_runs import FLAGS, MODES, OVERLAPPED, load_and_step, save_after_steps
from tests.distributed.parity import Box, boxes_of_state, put_together
from tests.distributed.tiny_runs import started_run, train_steps
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.harness import run_on_ranks

STEPS = long_count(2, soak=6)
NUMBERS_OF_RANKS = range(1, 1 + long_count(3, soak=4))
TINY: Flags = {**read_bases()["moe"], **FLAGS, "eval-iters": 1, "global-batch-size": long_count(6, soak=12)}
IN_STEP: Flags = {**OVERLAPPED, "overlap-param-gather-with-optimizer-step": True, "ddp-bucket-size": 1}
Reports = list[dict[str, Any]]


@pytest.mark.slow
def test_b10_evaluating_after_every_step_changes_nothing() -> None:
    modes = [{}, {}, {**OVERLAPPED, "ddp-bucket-size": 1001}, IN_STEP]
    argvs = [command_line({**TINY, "bf16": True, **mode}) for mode in modes]
    for (steps, _, state), (_, losses, _), *others in run_on_ranks(_evaluating_runs, 3, argvs):
        assert len(set(losses)) == STEPS
        for run in ((steps, losses, state), *others):
            assert run[:2] == (steps, losses)
            assert all(torch.equal(ours, weight) for ours, weight in zip(run[2], state, strict=True))


def _evaluating_runs(argvs: Sequence[Sequence[str]]) -> list[tuple[Reports, list[float], list[torch.Tensor]]]:
    """Returns the reports, evaluation losses and final weights of each run. The first run does not evaluate."""
    results = []
    for number, argv in enumerate(argvs):
        steps, losses = [], []
        with started_run(argv) as run:
            for _ in range(STEPS):
                steps += train_steps(run, 1)
                if number > 0:
                    losses.append(evaluate(run, run.valid_sets[0])["lm loss"])
            # The weights as a module reads them.
            results.append((steps, losses, [value.clone() for value in _tensors(run.model[0].state_dict())]))
    return results


def _tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    return [value for value in state.values() if isinstance(value, torch.Tensor)]


@pytest.mark.slow
# A bf16 checkpoint contains all the state of an fp32 one, and master weights in addition.
@pytest.mark.parametrize("precision", [{"bf16": True}, soak_only({})], ids=["bf16", "fp32"])
def test_b11_what_is_saved_is_the_state_of_the_step_whatever_happens_then(precision: Flags, tmp_path: Path) -> None:
    modes: list[Flags] = [{}, {**OVERLAPPED, "ddp-bucket-size": 1001}, IN_STEP]
    run_on_ranks(_save_and_spoil, 3, [command_line({**TINY, **precision, **mode}) for mode in modes], str(tmp_path))


def _save_and_spoil(argvs: Sequence[Sequence[str]], folder: str) -> None:
    with started_run(argvs[0]) as run:
        train_steps(run, 2)
        expected = boxes_of_state(run)
        rest = train_steps(run, 2)
    for number, argv in enumerate(argvs[1:]):
        with started_run([*argv, "--save", f"{folder}/{number}"]) as run:
            # Gathers are still in flight, since no module has read the weights after the steps.
            for _ in range(2):
                run_step(run)
            run.save_checkpoint()
            for chunk in run.model:
                for param in chunk.parameters():
                    param.data.fill_(torch.nan)
        with started_run([*argvs[0], "--load", f"{folder}/{number}"]) as run:
            for box, reference in zip(boxes_of_state(run), expected, strict=True):
                assert torch.equal(box.values, reference.values), (number, box.key)
            assert train_steps(run, 2) == rest


@pytest.mark.slow
def test_b14_any_number_of_ranks_goes_on_from_any_other_sharded_or_not(tmp_path: Path) -> None:
    # With one bucket per parameter, some ranks own only padding.
    argvs = [command_line({**TINY, "bf16": True, **mode}) for mode in (IN_STEP, MODES[2])]
    folders = [str(tmp_path / str(ranks)) for ranks in NUMBERS_OF_RANKS]
    # Two ranks save replicated state; every other combination loads into replicated state.
    saved = [_merged(run_on_ranks(save_after_steps, n, argvs[n == 2], folder)) for n, folder in enumerate(folders, 1)]
    seen: list[list[dict[str, Any]]] = [[] for _ in folders]
    for ranks in NUMBERS_OF_RANKS:
        modes = [argvs[(ranks + number) % 2] for number in range(len(folders))]
        for number, results in enumerate(zip(*run_on_ranks(load_and_step, ranks, modes, folders))):
            state = _merged([own for own, _ in results])
            assert state.keys() == saved[number].keys()
            different = [key for key, value in state.items() if not torch.equal(value, saved[number][key])]
            assert not different, f"{ranks} ranks, from {folders[number]}: {different}"
            seen[number].append(results[0][1])
    for first, *others in seen:
        for step in others:
            # Weights and samples are equal; gradients are rounded to bf16 at a scale that depends on the number of
            # microbatches.
            assert step["losses"] == pytest.approx(first["losses"], rel=1e-5)
            assert float(step["grad_norm"]) == pytest.approx(float(first["grad_norm"]), rel=2**-9)


def _merged(states: Sequence[Sequence[Box]]) -> dict[str, torch.Tensor]:
    return put_together([box for own in states for box in own])


def test_b39_ranks_that_start_from_different_weights_are_told_before_the_first_gather_hides_it() -> None:
    run_on_ranks(_different_weights, 3, command_line({**TINY, **OVERLAPPED}))


def _different_weights(argv: Sequence[str]) -> None:
    message = r"decoder\.final_layernorm\.weight differs between data-parallel rank 0 and ranks \[2\]"
    with pytest.raises((ValueError, RemoteRankError), match=message):
        with started_run(argv, model_provider=_model_of_this_rank):
            pass


def _model_of_this_rank(pre_process: bool = True, post_process: bool = True) -> nn.Module:
    model = pretrain_gpt.model_provider(pre_process, post_process)
    weight = dict(model.named_parameters())["decoder.final_layernorm.weight"]
    weight.data[0] += dist.get_rank() == 2
    return model
