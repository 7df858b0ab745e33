"""Tests recovery from bad steps, on all ranks, and detection of replicas that diverge.

A step is bad if its loss or a gradient is not finite, or if its loss spikes. It is skipped, or training rewinds to a
checkpoint.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pretrain_gpt
from megatron.core.distributed.consistency import WeightMismatchError, weight_hash
from megatron.core.utils import unwrap_model
from megatron.training import recovery
from megatron.training.callbacks import Callback, CallbackList, StepReport
from megatron.training.checkpointing.folder import complete_iterations
from megatron.training.recovery import NON_FINITE, is_spike
from megatron.training.run import TrainingRun
from megatron.training.training import train
from tests.counts import slow
from tests.distributed.tiny_runs import OVERLAPPED_SMALL_BUCKETS, gather_parameters, started_run
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.harness import run_on_ranks

RANKS, STEPS, BAD_STEP, BATCH = 2, 5, 4, 4
NAME = "decoder.layers.0.self_attention.linear_proj.weight"
FLAGS: Flags = {
    **read_bases()["moe"],
    "micro-batch-size": 1,
    "global-batch-size": BATCH,
    "train-iters": STEPS,
    "eval-iters": 0,
    "eval-interval": None,
    "save-interval": 2,
}
SPREAD: dict[str, Flags] = {
    "zero1": OVERLAPPED_SMALL_BUCKETS,
    "zero2": {"optimizer": "distributed_fused_adam", "ddp-bucket-size": 1001},
    "fsdp2": {"use-torch-fsdp2": True, "untie-embeddings-and-output-weights": True},
    "in backward": {**OVERLAPPED_SMALL_BUCKETS, "optimizer-in-backward": True, "optimizer-in-backward-clip": "exact"},
    "pipeline": {"pipeline-model-parallel-size": 2},
    "experts": {"expert-model-parallel-size": 2, "overlap-grad-reduce": True},
    "experts in 8 bits": {
        "expert-model-parallel-size": 2,
        "moe-expert-rank-capacity-factor": 2,
        "bf16": True,
        "fp8-format": "e4m3",
        "fp8-recipe": "mxfp8",
    },
}
# These are compared with a run that never reads the bad batch. In the other modes, a run that skips the step is
# compared with a run that rewinds to a checkpoint.
KNOWN_BATCHES = ("zero1", "pipeline")


class _Losses(Callback):
    """Records losses by iteration; a repeated step replaces its earlier loss."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.skipped: list[int] = []

    def on_step_end(self, report: StepReport) -> None:
        self.losses[report.iteration] = report.losses["lm loss"]
        if report.skipped:
            self.skipped.append(report.iteration)


class _Poison:
    """Wraps pretrain_gpt's forward step so that some calls on the last rank are bad, but not when they are repeated."""

    def __init__(self, bad_calls: dict[int, str]) -> None:
        """bad_calls: kind of fault ("loss", "spike" or "gradient") by number of the call, from 1."""
        self._bad_calls, self._num_calls = bad_calls, 0

    def __call__(self, data_iterator: Iterator[Any] | None, model: nn.Module) -> tuple[Tensor, Any]:
        losses, loss_func = pretrain_gpt.forward_step(data_iterator, model)
        self._num_calls += 1
        if dist.get_rank() == RANKS - 1:
            what = self._bad_calls.get(self._num_calls)
            if what == "loss":
                losses = losses * float("nan")
            if what == "spike":
                losses = losses * 50.0
            if what == "gradient":
                losses.register_hook(lambda grad: grad * float("inf"))
        return losses, loss_func


def _train(flags: Flags, folder: Path, *, poison: str | None, leaves_out: bool = False) -> _Losses:
    """Trains to the end and returns the losses. leaves_out: the bad step's batch is skipped from the start."""
    ranks_of_data = RANKS // flags.get("pipeline-model-parallel-size", 1)
    num_microbatches = BATCH // ranks_of_data
    step = _Poison({} if poison is None else {(BAD_STEP - 1) * num_microbatches + 2: poison})
    seen = _Losses()
    with started_run(command_line({**FLAGS, **flags, "save": folder}), forward_step=step) as run:
        run.callbacks = CallbackList((seen,))
        if leaves_out:
            run.recovery.skipped_positions.add((BAD_STEP - 1) * BATCH)
        train(run)
    return seen


def _leave_out_in_all_modes(folder: str, spread: str, poison: str) -> None:
    flags, root = SPREAD[spread], Path(folder)
    back = _train({**flags, "non-finite-policy": "rewind"}, root / "rewind", poison=poison)
    assert len(back.losses) == STEPS and not back.skipped
    if spread in KNOWN_BATCHES:
        expected = _train(flags, root / "expected", poison=None, leaves_out=True)
        assert back.losses == expected.losses

    skipped = _train({**flags, "non-finite-policy": "skip"}, root / "skip", poison=poison)
    assert skipped.skipped == [BAD_STEP]
    for step in range(1, BAD_STEP):
        assert skipped.losses[step] == back.losses[step]
    # A step whose batch was skipped still counts as an iteration.
    for step in range(BAD_STEP + 1, STEPS + 1):
        assert skipped.losses[step] == back.losses[step - 1]


@pytest.mark.slow
@pytest.mark.parametrize("spread", [spread if spread == "zero1" else slow(spread) for spread in SPREAD])
def test_a_bad_step_is_skipped_or_gone_back_from_as_if_its_batch_were_not_there(
    spread: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    poison = "loss" if spread in ("fsdp2", "pipeline", "in backward") else "gradient"
    run_on_ranks(_leave_out_in_all_modes, RANKS, str(tmp_path), spread, poison)
    printed = capsys.readouterr().out
    bad = r"rank 1: microbatch 1 \(lm loss is nan\)" if poison == "loss" else r"not finite on .*rank 1: "
    if spread in ("zero1", "experts"):
        # Where gradients accumulate until the end, one small parameter's gradient is checked after every microbatch.
        bad += r"decoder\.layers\.0\.input_layernorm\.weight \(since microbatch 1, counted from 0, of 2\)"
    assert re.search(rf"iteration {BAD_STEP} is skipped: .*{bad}", printed), printed
    words = rf"{bad}.*: rewinding from iteration {BAD_STEP - 1} to 2, skipping the data of that step \(rewind 1 of"
    assert re.search(words, printed), printed


def _go_back_from_a_spike(folder: str) -> None:
    flags: Flags = {"train-iters": 9, "lr": 1e-4, "min-lr": 1e-4}
    flags |= {"loss-spike-rewind": 3, "save-interval": 4, "non-finite-policy": "rewind"}
    seen: list[tuple[int, int]] = []

    class Positions(Callback):
        def on_step_end(self, report: StepReport) -> None:
            seen.append((report.iteration, report.consumed_samples))

    # Two microbatches per step. After the first rewind the second step is bad too, and rewinds to the same checkpoint.
    step = _Poison({6 * 2 + 1: "spike", 8 * 2 + 1: "loss"})
    with (
        started_run(command_line({**FLAGS, **flags, "save": folder}), forward_step=step) as run,
        patch.object(recovery, "_MIN_LOSSES", 5),
    ):
        run.callbacks = CallbackList((Positions(),))
        train(run)
        assert run.recovery.num_rewinds == 2 and len(run.state.recent_losses) == 9
    # Steps 5 and 6 are repeated with the batches after step 7's, and once more without the batch of the second rewind.
    assert seen[4:9] == [(5, 20), (6, 24), (5, 32), (5, 32), (6, 40)] and seen[-1] == (9, 52)


@pytest.mark.slow
def test_a_loss_spike_goes_back_and_leaves_out_the_data_since(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_on_ranks(_go_back_from_a_spike, RANKS, str(tmp_path))
    printed = capsys.readouterr().out
    words = r"lm loss [\d.]+ at iteration 7 is more than --loss-spike-rewind 3 times the median of the last 6 steps"
    assert re.search(words + r".*: rewinding from iteration 7 to 4, skipping the data since then", printed), printed


def test_a_spike_is_told_by_the_median_of_twenty_losses_at_least() -> None:
    recent = [1.0] * 18 + [100.0]
    assert not is_spike(3.1, recent, factor=3)
    assert is_spike(3.1, [*recent, 1.0], factor=3) and not is_spike(3.0, [*recent, 1.0], factor=3)


def _end_after_too_many(folder: str) -> None:
    flags = {**FLAGS, "non-finite-policy": "rewind", "max-rewinds": 2, "save": folder}

    def forward_step(data_iterator: Iterator[Any] | None, model: nn.Module) -> tuple[Tensor, Any]:
        losses, loss_func = pretrain_gpt.forward_step(data_iterator, model)
        return (losses * float("nan") if run.state.iteration >= 3 else losses), loss_func

    with started_run(command_line(flags), forward_step=forward_step) as run:
        run.callbacks = CallbackList()
        with pytest.raises(NON_FINITE, match=r"already rewound 2 times \(--max-rewinds\)"):
            train(run)


@pytest.mark.slow
def test_a_run_that_stays_bad_ends(tmp_path: Path) -> None:
    run_on_ranks(_end_after_too_many, RANKS, str(tmp_path))


class _Flip(Callback):
    """Flips a bit of a weight on one rank after step 4."""

    def __init__(self, run: TrainingRun, name: str, *, rank: int) -> None:
        self._run, self._name, self._rank = run, name, rank

    def on_step_end(self, report: StepReport) -> None:
        # After the last update is gathered, and on all ranks, since waiting for the gather is collective.
        gather_parameters(self._run)
        if report.iteration == 4 and dist.get_rank() == self._rank:
            model = unwrap_model(self._run.model)[0]
            held = {**dict(model.named_parameters()), **dict(model.named_buffers())}[self._name]
            held.data.view(-1).view(torch.int32)[2] ^= 1


def _change_a_tensor(cases: Sequence[tuple[str, int, Flags]], named: str) -> None:
    flags = {
        **FLAGS,
        **OVERLAPPED_SMALL_BUCKETS,
        "check-weight-hash-across-dp-replicas-interval": 2,
        "save-interval": None,
    }
    for name, changed, other in cases:
        with started_run(command_line({**flags, **other})) as run:
            run.callbacks = CallbackList((_Flip(run, name, rank=changed),))
            with pytest.raises(
                WeightMismatchError, match=rf"after iteration 4: {named or name} on rank 1 differs from rank 0"
            ):
                train(run)


@pytest.mark.slow
def test_a_bit_that_flips_in_a_replica_is_named_with_its_rank_and_not_saved(tmp_path: Path) -> None:
    # At the check interval, and at the save interval, because weights are always compared before a save.
    before_saves: Flags = {"check-weight-hash-across-dp-replicas-interval": 100, "save-interval": 2, "save": tmp_path}
    with_bias: Flags = {"moe-router-enable-expert-bias": True, "moe-router-score-function": "sigmoid"}
    router = "decoder.layers.1.mlp.router"
    cases = [(NAME, 1, {}), (f"{router}.weight", 0, before_saves), (f"{router}.expert_bias", 0, with_bias)]
    run_on_ranks(_change_a_tensor, RANKS, cases, "")
    assert complete_iterations(tmp_path) == [2]


@pytest.mark.slow
def test_a_bit_that_flips_in_one_of_two_stages_tied_weights_is_named() -> None:
    stages: Flags = {"pipeline-model-parallel-size": 2, "untie-embeddings-and-output-weights": None}
    table = "embedding.word_embeddings.weight"
    run_on_ranks(_change_a_tensor, RANKS, [(table, 0, stages), ("output_layer.weight", 1, stages)], table)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
@pytest.mark.parametrize("shape", [(0,), (3,), (1024,), (5, 1000)])
def test_a_hash_changes_with_each_bit_and_with_the_order_of_elements(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    param = torch.randn(shape).mul(100).to(dtype)
    before = int(weight_hash(param))
    assert before == int(weight_hash(param.clone()))
    words = param.view(-1).view(torch.uint8)
    for place in range(0, words.numel(), max(1, words.numel() // 50)):
        words[place] ^= 1 << (place % 8)
        assert int(weight_hash(param)) != before
        words[place] ^= 1 << (place % 8)
    if param.numel() > 3:
        assert int(weight_hash(param.view(-1).flip(0))) != before
