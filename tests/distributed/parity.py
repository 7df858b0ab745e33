"""Runs of the training program in fp64 under any layout, with gradients assembled by logical name. Holds no tests.

The run of a layout and the run of one process route the same token groups if their global and micro-batch sizes are
equal.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pretrain_gpt
from megatron.core.logical_tensors import canonical_name, model_logical_pieces
from megatron.training import get_args
from megatron.training.callbacks import StepReport
from megatron.training.checkpointing.run_state import ModelWeights
from megatron.training.run import TrainingRun
from megatron.training.training import run_step
from tests.counts import long_count
from tests.distributed.tiny_runs import Batch, comparable, gather_parameters, started_run
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.harness import run_on_ranks

# The second step's gradients verify the first update; the final weights verify the state left by both.
STEPS = long_count(2, soak=5)
TOLERANCE = 1e-10  # relative to a tensor's norm, in fp64
ROUNDED = 1.2e-7  # for norms, which are rounded to fp32
NEGLIGIBLE = 1e-6  # share of the whole gradient's norm below which a tensor's error is ignored

# Sizes large enough to be split: 8 heads, 4 groups, and a padded vocabulary whose last rows are padding.
FLAGS: Flags = {
    "num-attention-heads": 8,
    "init-method-std": 0.1,
    "seq-length": 16,
    "global-batch-size": 8,
    "micro-batch-size": 2,
    "make-vocab-size-divisible-by": 16,
    "vocab-size": 101,
    "train-iters": STEPS,
    "lr": 0.1,
    "lr-warmup-iters": 0,
    "lr-decay-style": "linear",
    "optimizer": "sgd",
    "weight-decay": 0.1,
    "clip-grad": 0,
    "log-num-zeros-in-grad": True,
    "log-params-norm": True,
}

# (data iterator, model) -> (losses, loss function), like fp64_forward_step.
ForwardStep = Callable[[Any, Any], tuple[Tensor, Any]]


@dataclass(frozen=True)
class Box:
    """A rectangular part of a logical tensor, stored by one rank."""

    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: Tensor


@dataclass
class RankRun:
    """One rank's record of a run. grads: gradients before clipping, by step. final: final weights."""

    reports: list[StepReport]
    grads: list[list[Box]]
    final: list[Box]


@dataclass
class WholeRun:
    """A run's reports, the same on every rank, and its gradients and final weights by logical name."""

    reports: list[StepReport]
    grads: list[dict[str, Tensor]]
    final: dict[str, Tensor]


def layout(tp: int = 1, cp: int = 1, pp: int = 1, *, vpp: int = 1, ep: int = 1, etp: int = 1, **more: object) -> Flags:
    """Returns the flags of these parallel sizes, with sequence parallelism if tp > 1 unless `more` overrides it."""
    sizes: Flags = {"tensor-model-parallel-size": tp, "context-parallel-size": cp, "pipeline-model-parallel-size": pp}
    if vpp > 1:
        sizes["num-virtual-stages-per-pipeline-rank"] = vpp
    if ep * etp > 1 or tp > 1:
        sizes |= {"expert-model-parallel-size": ep, "expert-tensor-parallel-size": etp}
    return {**sizes, "sequence-parallel": tp > 1, **{name.replace("_", "-"): value for name, value in more.items()}}


def run_layout(base: str, ranks: int, flags: Flags, *, forward_step: ForwardStep | None = None) -> WholeRun:
    """Trains the model of a base of bases.yaml with `flags`, which include the layout, on `ranks` processes.

    forward_step: a module-level function that replaces fp64_forward_step.
    """
    return run_layouts(base, ranks, [flags], forward_step=forward_step)[0]


def run_layouts(
    base: str,
    ranks: int,
    layouts: Sequence[Flags],
    *,
    dtype: torch.dtype = torch.float64,
    forward_step: ForwardStep | None = None,
) -> list[WholeRun]:
    """Trains several sets of flags one after the other in the same processes, in fp64 or fp32. See run_layout."""
    argvs = [command_line({**read_bases()[base], **FLAGS, **flags}) for flags in layouts]
    timeout = 60 + 60 * len(argvs)
    by_rank: list[list[RankRun]] = run_on_ranks(_train_all, ranks, argvs, dtype, forward_step, timeout=timeout)
    return [_whole(runs) for runs in zip(*by_rank)]


def _whole(runs: Sequence[RankRun]) -> WholeRun:
    """Merges the records of all ranks; asserts that their reports are equal and match the merged gradients."""
    reports = [[comparable(report) for report in run.reports] for run in runs]
    for rank, of_rank in enumerate(reports):
        assert of_rank == reports[0], f"rank {rank} reports different numbers than rank 0"
    whole = WholeRun(
        runs[0].reports,
        [put_together([box for run in runs for box in run.grads[step]]) for step in range(STEPS)],
        put_together([box for run in runs for box in run.final]),
    )
    for report, grads in zip(whole.reports, whole.grads, strict=True):
        assert report.grad_norm == pytest.approx(_norm_of(grads), rel=ROUNDED)
        assert report.num_zeros == sum(int((grad == 0).sum()) for grad in grads.values())
    assert whole.reports[-1].params_norm == pytest.approx(_norm_of(whole.final), rel=ROUNDED)
    return whole


def assert_same_run(run: WholeRun, reference: WholeRun, *, tolerance: float = TOLERANCE) -> None:
    """Asserts that losses, gradient norms, every gradient and the final weights agree within `tolerance`."""
    for step, (report, expected) in enumerate(zip(run.reports, reference.reports, strict=True)):
        # Losses are means of fp64 numbers.
        assert report.losses == pytest.approx(expected.losses, rel=tolerance, abs=0), f"step {step}"
        assert report.grad_norm == pytest.approx(expected.grad_norm, rel=max(ROUNDED, tolerance)), f"step {step}"
        errors = relative_errors(run.grads[step], reference.grads[step])
        wrong = {name: error for name, error in errors.items() if not error <= tolerance}
        assert not wrong, f"gradients of step {step}: {wrong}"
    assert max(relative_errors(run.final, reference.final).values()) <= tolerance


def assert_layouts_agree(
    base: str,
    model: Flags,
    ranks: int,
    layouts: Sequence[Flags],
    *,
    reference: WholeRun,
    dtype: torch.dtype = torch.float64,
    tolerance: float = TOLERANCE,
) -> None:
    """Trains the model in each layout, all in the same processes, and compares each run with the reference."""
    runs = run_layouts(base, ranks, [{**model, **sizes} for sizes in layouts], dtype=dtype)
    for sizes, run in zip(layouts, runs, strict=True):
        try:
            assert_same_run(run, reference, tolerance=tolerance)
        except AssertionError as error:
            error.add_note(f"layout: {sizes}")
            raise


def relative_errors(tensors: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, float]:
    """Returns each tensor's error relative to its reference's norm, omitting tensors of negligible norm."""
    assert tensors.keys() == reference.keys(), tensors.keys() ^ reference.keys()
    norms, whole = {name: _norm_of({name: value}) for name, value in reference.items()}, _norm_of(reference)
    return {
        name: torch.linalg.vector_norm(tensors[name] - reference[name]).item() / norm
        for name, norm in norms.items()
        if norm > NEGLIGIBLE * whole
    }


def _norm_of(tensors: dict[str, Tensor]) -> float:
    return math.hypot(*(torch.linalg.vector_norm(tensor).item() for tensor in tensors.values()))


def put_together(boxes: Sequence[Box]) -> dict[str, Tensor]:
    """Assembles whole tensors by key; asserts that boxes stored on several ranks are equal."""
    whole: dict[str, Tensor] = {}
    for box in boxes:
        place = tuple(slice(start, start + size) for start, size in zip(box.offset, box.values.shape))
        target = whole.setdefault(box.key, torch.full(box.shape, torch.nan, dtype=box.values.dtype))[place]
        known = ~target.isnan()
        torch.testing.assert_close(target[known], box.values[known], rtol=1e-12, atol=1e-14, msg=box.key)
        target.copy_(box.values)
    missing = [key for key, value in whole.items() if value.isnan().any()]
    assert not missing, f"no rank stores some elements of {missing}"
    return whole


# Functions that run in a rank's process.


def _train_all(argvs: Sequence[Sequence[str]], dtype: torch.dtype, forward_step: ForwardStep | None) -> list[RankRun]:
    return [_train(argv, dtype, forward_step) for argv in argvs]


def _train(argv: Sequence[str], dtype: torch.dtype, forward_step: ForwardStep | None) -> RankRun:
    in_fp64: dict[str, Any] = {"forward_step": forward_step or fp64_forward_step, "model_provider": fp64_model}
    with started_run(argv, **(in_fp64 if dtype == torch.float64 else {})) as run:
        grads: list[list[Box]] = []
        record_gradients(run, grads)
        reports = [run.measured(run_step(run)[0]) for _ in range(STEPS)]
        return RankRun(reports, grads, boxes_of_weights(run))


def boxes_of_weights(run: TrainingRun) -> list[Box]:
    """Copies this rank's parameters into boxes."""
    return boxes_of(run.model, (item for chunk in run.model for item in chunk.named_parameters()))


def boxes_of_state(run: TrainingRun) -> list[Box]:
    """Copies this rank's part of a checkpoint's tensors: weights, buffers and optimizer state."""
    assert run.optimizer is not None
    gather_parameters(run)
    pieces = {name: held for chunk in run.model for name, held in model_logical_pieces(chunk).items()}
    tensors = ModelWeights(run.model).tensors + run.optimizer.sharded_state(pieces)
    return [Box(t.key, t.global_shape, t.global_offset, t.data.detach().clone()) for t in tensors]


def fp64_model(pre_process: bool = True, post_process: bool = True, **options: Any) -> nn.Module:
    """Builds the model of the flags in fp64, which no flag selects."""
    get_args().params_dtype = torch.float64
    return pretrain_gpt.model_provider(pre_process, post_process, **options)


def fp64_forward_step(data_iterator: Iterator[Batch], model: Callable[..., Tensor]) -> tuple[Tensor, Any]:
    """Runs pretrain_gpt.forward_step, but computes the loss in fp64."""
    losses, loss_func = pretrain_gpt.forward_step(data_iterator, model)
    mask = loss_func.args[0]

    def in_fp64(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total, count = (output.view(-1) * mask.view(-1)).sum(), mask.sum()
        return total, count, {"lm loss": torch.stack([total.detach(), count.to(total.dtype)])}

    return losses, in_fp64


def record_gradients(run: TrainingRun, grads: list[list[Box]]) -> None:
    """Makes each optimizer step first append the boxes of the reduced gradients to `grads`."""
    optimizer = run.optimizer
    assert optimizer is not None
    step = optimizer.step

    def recorded_step() -> Any:
        named = [item for chunk in run.model for item in chunk.named_main_grads()]  # type: ignore[operator]
        grads.append(boxes_of(run.model, named))
        return step()

    vars(optimizer)["step"] = recorded_step


def boxes_of(model: Sequence[nn.Module], named: Iterable[tuple[str, Tensor]]) -> list[Box]:
    """Copies tensors named like the model's parameters, such as gradients, into boxes."""
    pieces = {name: held for chunk in model for name, held in model_logical_pieces(chunk).items()}
    return [
        Box(piece.key, piece.global_shape, piece.global_offset, piece.view_of(tensor.detach()).clone())
        for name, tensor in named
        for piece in pieces[canonical_name(name)]
    ]
