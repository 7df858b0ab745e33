"""Checks that deterministic runs are bit-identical when repeated, and when stopped and resumed after any step.

A different number of ranks continues with the same samples. The cases use three ranks, so that sums depend on their
order, and text of several epochs with dropout.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder, get_bin_path, get_idx_path
from megatron.training.training import run_step
from tests.counts import long_count, soak_only
from tests.distributed.tiny_runs import OVERLAPPED_SMALL_BUCKETS, comparable, record_run, started_run, state_of
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.harness import run_on_ranks

STEPS = long_count(6, soak=8)
SAMPLES_PER_EPOCH = long_count(13, soak=21)
FLAGS: Flags = {
    "mock-data": None,
    "seq-length": 16,
    "split": "1,0,0",
    "eval-iters": 0,
    "micro-batch-size": 1,
    "global-batch-size": 6,
    "train-iters": STEPS,
    "init-method-std": 0.1,
}
DROPOUT: Flags = {"hidden-dropout": 0.1, "attention-dropout": 0.1}
# fp16: the first steps overflow, some later steps succeed, and the scale grows until the next overflow. fp16_unscaled:
# with the default scale of 2**32 all steps overflow, so that the saved optimizer has never stepped.
PRECISIONS: dict[str, Flags] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "fp16": {
        "fp16": True,
        "initial-loss-scale": long_count(2**19, soak=2**20),
        "hysteresis": 1,
        "loss-scale-window": long_count(1, soak=2),
    },
    "fp16_unscaled": {"fp16": True},
}
# Each rank has only the state of its shards; parameters are gathered while the next step, or a save, begins.
IN_STEP: Flags = {**OVERLAPPED_SMALL_BUCKETS, "overlap-param-gather-with-optimizer-step": True}
EVERY = tuple(range(STEPS + 1))
# Steps after which a run is resumed. fp16 resumes after every step: its steps are cheap and of several kinds, and the
# optimizer has not stepped yet after the first two. `make soak` runs every step of all combinations; each model,
# precision and mode is in a case here.
CASES = [
    ("dense", "fp16", {}, EVERY),
    ("moe", "fp32", {}, (STEPS - 1,)),
    ("moe", "bf16", IN_STEP, (2,)),
]
FURTHER = [(base, precision, {}) for base in ("dense", "moe") for precision in PRECISIONS]
FURTHER += [("moe", "bf16", IN_STEP), ("moe", "fp32", IN_STEP), ("dense", "fp16", IN_STEP)]
FURTHER += [("moe", "bf16", {**IN_STEP, "optimizer": "distributed_fused_adam"})]
CASES += [soak_only(*case, EVERY) for case in FURTHER]
STEPS_EACH = long_count(2, soak=3)  # of one number of ranks, before a different number continues
Steps = list[dict[str, Any]]
State = dict[str, str]


@pytest.mark.parametrize(("base", "precision", "mode", "after"), CASES)
@pytest.mark.slow
def test_b12_resume_after_every_step_continues_bit_for_bit(
    base: str, precision: str, mode: Flags, after: tuple[int, ...], tmp_path: Path
) -> None:
    argv = _argv(base, tmp_path, {**DROPOUT, **PRECISIONS[precision], **mode})
    by_rank = run_on_ranks(_stop_everywhere, 3, argv, str(tmp_path / "saved"), after)
    for rank, (whole, again, resumed) in enumerate(by_rank):
        steps, state = whole
        assert again == whole, f"rank {rank}: a second run, which saved after each step, differs from the first"
        for start, (rest, final) in zip(after, resumed, strict=True):
            assert rest == steps[start:], f"rank {rank}, resumed after step {start}"
            assert final == state, f"rank {rank}, resumed after step {start}: {_differences(final, state)}"
        _assert_meaningful(steps, precision)
    if not mode:
        _assert_ranks_differ_in_dropout_alone([whole for whole, _, _ in by_rank])


@pytest.mark.soak
def test_two_runs_are_equal_bit_for_bit(tmp_path: Path) -> None:
    """Runs in separate processes; test_b12_resume_after_every_step_continues_bit_for_bit covers a single process."""
    argv = _argv("moe", tmp_path, DROPOUT)
    first, second = (run_on_ranks(_train, 3, argv) for _ in range(2))
    assert first == second


# Experts are added to the parts of "dense", so "moe" covers it.
@pytest.mark.parametrize("base", [soak_only("dense"), "moe"])
@pytest.mark.slow
def test_another_number_of_ranks_goes_on_with_the_same_samples(base: str, tmp_path: Path) -> None:
    # Microbatches of one sample give the router's losses the same token groups on any number of ranks.
    argv = _argv(base, tmp_path, {"train-iters": 3 * STEPS_EACH})
    saved = ["--save", str(tmp_path / "saved"), "--load", str(tmp_path / "saved")]
    whole = run_on_ranks(_record, 1, argv, 3 * STEPS_EACH)[0]
    parts = [run_on_ranks(_record, ranks, [*argv, *saved], STEPS_EACH) for ranks in (1, 2, 3)]
    for number, (loss, norm, samples) in enumerate(zip(*whole)):
        per_rank, step = parts[number // STEPS_EACH], number % STEPS_EACH
        assert sorted(sum((rank[2][step] for rank in per_rank), [])) == sorted(samples), f"step {number}"
        assert per_rank[0][0][step] == pytest.approx(loss, rel=1e-6), f"loss of step {number}"
        assert per_rank[0][1][step] == pytest.approx(norm, rel=1e-6), f"norm of step {number}"


def _argv(base: str, folder: Path, flags: Flags) -> list[str]:
    data = str(folder / "text")
    generator = np.random.default_rng(7)
    with IndexedDatasetBuilder(get_bin_path(data), dtype=DType.optimal_dtype(127)) as builder:
        lengths = [3, 40, 1, 97, 60, 16 * SAMPLES_PER_EPOCH + 1 - 201]
        builder.add_concatenated(generator.integers(0, 127, sum(lengths)), lengths)
        builder.finalize(get_idx_path(data))
    return command_line({**read_bases()[base], **FLAGS, "data-path": data, **flags})


# Functions that run on the ranks.


def _train(argv: list[str], steps: int = STEPS) -> tuple[Steps, State]:
    with started_run(argv) as run:
        return [comparable(run_step(run)[0]) for _ in range(steps)], state_of(run)


def _stop_everywhere(argv: list[str], folder: str, after: tuple[int, ...]) -> tuple[Any, Any, list[Any]]:
    """Returns a full run, a run that saves before and after each step, and the runs resumed from steps `after`."""
    whole = _train(argv)
    with started_run([*argv, "--save", folder]) as run:
        run.save_checkpoint()
        steps = []
        for _ in range(STEPS):
            steps.append(comparable(run_step(run)[0]))
            run.save_checkpoint()
        again = steps, state_of(run)
    resumed = [_train([*argv, "--load", folder, "--ckpt-step", str(k)], STEPS - k) for k in after]
    return whole, again, resumed


def _record(argv: list[str], steps: int) -> tuple[list[float], list[float | None], list[list[tuple[int, ...]]]]:
    """Records losses, gradient norms and samples of this rank by step; saves a checkpoint under --save at the end."""
    recording = record_run(argv, steps, save=True)
    samples = [[tuple(row.tolist()) for b in step for row in b["tokens"]] for step in recording.batches]
    return [r.losses["lm loss"] for r in recording.reports], [r.grad_norm for r in recording.reports], samples


# Functions that run in the parent process.


def _differences(state: State, other: State) -> list[str]:
    return [name for name in sorted(state.keys() | other.keys()) if state.get(name) != other.get(name)]


def _assert_ranks_differ_in_dropout_alone(ranks: list[tuple[Steps, State]]) -> None:
    assert all(steps == ranks[0][0] for steps, _ in ranks)
    different = set(_differences(ranks[0][1], ranks[1][1]))
    assert different and all(name.startswith("rng.") for name in different)


def _assert_meaningful(steps: Steps, precision: str) -> None:
    """Checks that the run repeats its data, and that fp16 skips the first steps and some or all later steps."""
    assert steps[-1]["consumed_samples"] > 2 * SAMPLES_PER_EPOCH
    skipped = [step["skipped"] for step in steps]
    if precision == "fp16_unscaled":
        assert all(skipped)
    elif precision == "fp16":
        assert skipped[:2] == [True, True] and any(skipped[skipped.index(False) :]), skipped
        assert skipped.count(False) >= 3, skipped
    else:
        assert not any(skipped)
