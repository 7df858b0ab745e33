"""Training agrees with a plain PyTorch model in one process on 1, 2 and 3 data-parallel ranks; 20 steps in `make soak`.

The reference computes in fp64 from the same token groups: one group is a microbatch of one rank. Tolerances are those
of docs/numerics.md, except where a comment states a reason.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pretrain_gpt
from megatron.training import get_args
from tests.counts import long_count, slow, soak_only
from tests.distributed.plain_gpt import PlainShape, Weights, plain_losses
from tests.distributed.tiny_runs import Batch, Recording, record_run
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.harness import run_on_ranks

STEPS = long_count(5, soak=20)
GRAD_TOLERANCE = {torch.float32: 5e-5, torch.float64: 1e-10}
ADAMW_TOLERANCE = 1e-4  # relative to the update of a tensor; measured: 1.4e-5, for gradients near epsilon
NEGLIGIBLE = 1e-6  # tensors with a smaller share of the whole gradient's norm are not compared
SHAPES = {
    "dense": PlainShape(num_layers=2, num_heads=4, num_groups=4, vocab_size=127),
    "moe": PlainShape(
        num_layers=2, num_heads=4, num_groups=2, vocab_size=127, topk=2, aux_loss_coeff=0.01, z_loss_coeff=0.001
    ),
}
# A large initial deviation, so that every part of the model affects the loss; a vocabulary with padding rows; 12
# samples, which 1, 2 and 3 ranks can share; and a number of microbatches that is not a power of two.
FLAGS: Flags = {
    "init-method-std": 0.1,
    "seq-length": 16,
    "global-batch-size": 12,
    "train-iters": STEPS,
    "lr-decay-style": "linear",
    "optimizer": "sgd",
    "weight-decay": 0.1,
}


@dataclass
class PlainStep:
    """One step of the reference. losses: losses as logged, without coefficients."""

    losses: dict[str, float]
    grads: Weights
    grad_norm: float


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "ranks"),
    # The cases of `make soak` compute the same sums over other numbers of ranks.
    [
        ("moe", 2),
        slow("dense", 3),
        *(soak_only(*case) for case in (("dense", 1), ("dense", 2), ("moe", 1), ("moe", 3))),
    ],
)
def test_fp32_training_agrees_with_plain_pytorch(base: str, ranks: int) -> None:
    recordings = _train(base, ranks, {"clip-grad": 0.5})
    steps, final = _plain_training(recordings, base, clip_grad=0.5)
    assert any(step.grad_norm > 0.5 for step in steps), "no gradient was clipped"
    _assert_same_training(recordings[0], steps)
    _assert_same_update(recordings[0], final, tolerance=GRAD_TOLERANCE[torch.float32])


@pytest.mark.slow
@pytest.mark.parametrize("base", ["moe", "dense"])
def test_fp64_training_agrees_with_plain_pytorch(base: str) -> None:
    # No clipping, since the norm that it divides by is fp32 by contract. With three microbatches, the factor 1/3 is
    # inexact in fp32.
    recordings = _train(base, 2, {"clip-grad": 0}, forward_step=fp64_forward_step, model_provider=fp64_model)
    steps, final = _plain_training(recordings, base, clip_grad=0)
    _assert_same_training(recordings[0], steps)
    _assert_same_update(recordings[0], final, tolerance=GRAD_TOLERANCE[torch.float64])


@pytest.mark.slow
@pytest.mark.parametrize("base", ["moe", "dense"])
def test_masked_tokens_weigh_nothing_and_microbatches_the_same(base: str) -> None:
    recordings = _train(base, 2, {"clip-grad": 0}, forward_step=masking_forward_step)
    counts = {int(batch["loss_mask"].sum()) for step in recordings[1].batches for batch in step}
    assert 0 in counts and len(counts) > 3, "all masks are equal"
    steps, final = _plain_training(recordings, base, clip_grad=0)
    # The logged losses are not compared, since they average over the tokens of all microbatches.
    _assert_same_gradients(recordings[0], steps)
    _assert_same_update(recordings[0], final, tolerance=GRAD_TOLERANCE[torch.float32])


# The update does not depend on the kind of parameter; test_fp32_training_agrees_with_plain_pytorch covers experts.
@pytest.mark.slow
@pytest.mark.parametrize("base", [slow("dense"), soak_only("moe")])
def test_adamw_agrees_with_torch(base: str) -> None:
    """Compares parameters with torch.optim.AdamW.

    AdamW amplifies noise in tiny gradients, so epsilon is above the noise of fp32 gradients: 1e-9 to 1e-8 where the
    true gradient is zero, as for the attention key bias, whose error is 1e-2 with an epsilon of 1e-8.
    """
    flags = {"optimizer": "adam", "adam-eps": 1e-5, "adam-beta2": 0.95, "lr": 0.01, "clip-grad": 0.5}
    recordings = _train(base, 3, flags)
    steps, final = _plain_training(recordings, base, clip_grad=0.5, make_optimizer=_adamw, dtype=torch.float32)
    assert any(step.grad_norm > 0.5 for step in steps), "no gradient was clipped"
    _assert_same_update(recordings[0], final, tolerance=ADAMW_TOLERANCE)
    for report, plain in zip(recordings[0].reports, steps):
        assert report.losses["lm loss"] == pytest.approx(plain.losses["lm loss"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("base", ["moe", "dense"])
def test_the_size_of_microbatches_does_not_matter_without_router_losses(base: str) -> None:
    without: Flags = {"clip-grad": 0, "moe-aux-loss-coeff": None, "moe-z-loss-coeff": None}
    sizes: list[Flags] = [{**without, "micro-batch-size": size} for size in (1, 2, 4)]
    # 12 samples split over 3 ranks, 4 on each. Grouped by size, then by rank.
    by_size = list(zip(*run_on_ranks(_record_all, 3, [_argv(base, flags) for flags in sizes])))
    shape = replace(SHAPES[base], aux_loss_coeff=0.0, z_loss_coeff=0.0)
    # One group of all samples, whose mean loss equals that of any groups of equal size.
    batches = [batch for recording in by_size[0] for batch in recording.batches[0]]
    whole = [{name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}]
    weights = {name: w.double().requires_grad_() for name, w in by_size[0][0].initial.items()}
    plain = _plain_step(weights, whole, shape)
    for recordings in by_size:
        errors = _relative_errors(recordings[0].grads[0], plain)
        assert max(errors.values()) <= GRAD_TOLERANCE[torch.float32], errors


def fp64_model(pre_process: bool = True, post_process: bool = True) -> nn.Module:
    """Builds the model of the flags in fp64, for which there is no flag."""
    get_args().params_dtype = torch.float64
    return pretrain_gpt.model_provider(pre_process, post_process)


def fp64_forward_step(data_iterator: Iterator[Batch], model: nn.Module) -> tuple[Tensor, Any]:
    """Runs the forward step of pretrain_gpt, but keeps the loss in fp64."""
    batch = next(data_iterator)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, lambda losses: (losses.mean(), {"lm loss": losses.detach().mean()})


def masking_forward_step(data_iterator: Iterator[Batch], model: nn.Module) -> tuple[Tensor, Any]:
    """Runs pretrain_gpt's forward step with masks that differ by sample; some microbatches are fully masked."""
    return pretrain_gpt.forward_step(map(_mask, data_iterator), model)


def _mask(batch: Batch) -> Batch:
    # In place, so that the recorded batch is masked too.
    batch["loss_mask"].mul_((batch["tokens"] % 3 > 0) & (batch["tokens"][:, :1] % 2 > 0))
    return batch


def _train(base: str, ranks: int, flags: Flags, **parts: Any) -> list[Recording]:
    return run_on_ranks(_record, ranks, _argv(base, flags), parts)


def _argv(base: str, flags: Flags) -> list[str]:
    return command_line({**read_bases()[base], "lr": 0.1, "lr-warmup-iters": 0, **FLAGS, **flags})


def _record(argv: Sequence[str], parts: dict[str, Any]) -> Recording:
    return record_run(argv, STEPS, **parts)


def _record_all(argvs: list[list[str]]) -> list[Recording]:
    return [record_run(argv, 1) for argv in argvs]


def _sgd(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=1.0, momentum=0.9)


def _adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-5)


def _plain_training(
    recordings: list[Recording],
    base: str,
    *,
    clip_grad: float,
    make_optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] = _sgd,
    dtype: torch.dtype = torch.float64,
) -> tuple[list[PlainStep], Weights]:
    """Repeats the training with a torch optimizer on one copy of the weights, in `dtype`."""
    weights = {name: w.to(dtype, copy=True).requires_grad_() for name, w in recordings[0].initial.items()}
    decays, others = ([w for w in weights.values() if (w.dim() > 1) == matrix] for matrix in (True, False))
    optimizer = make_optimizer([{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])
    steps = []
    for number, report in enumerate(recordings[0].reports):
        token_groups = [batch for recording in recordings for batch in recording.batches[number]]
        steps.append(_plain_step(weights, token_groups, SHAPES[base]))
        if clip_grad:
            nn.utils.clip_grad_norm_(weights.values(), clip_grad)
        for group in optimizer.param_groups:
            group["lr"] = report.learning_rate
        optimizer.step()
    return steps, {name: w.detach() for name, w in weights.items()}


def _plain_step(weights: Weights, token_groups: list[Batch], shape: PlainShape) -> PlainStep:
    for weight in weights.values():
        weight.grad = None
    lm, balancing, z = torch.zeros(3, dtype=torch.float64)
    for batch in token_groups:
        losses, routers = plain_losses(weights, batch["tokens"], batch["labels"], shape=shape)
        mask = batch["loss_mask"]
        lm = lm + (losses * mask).sum() / mask.sum().clamp(min=1)
        balancing, z = balancing + routers.load_balancing, z + routers.z
    total = lm + shape.aux_loss_coeff * balancing + shape.z_loss_coeff * z
    (total / len(token_groups)).backward()
    grads = {name: w.grad.clone() for name, w in weights.items() if w.grad is not None}
    values = {"lm loss": lm, "load_balancing_loss": balancing / shape.num_layers, "z_loss": z / shape.num_layers}
    return PlainStep(
        {name: value.item() / len(token_groups) for name, value in values.items()},
        grads,
        torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads.values()])).item(),
    )


def _assert_same_training(recording: Recording, steps: list[PlainStep]) -> None:
    """Asserts equal losses, gradients and gradient norm at every step."""
    _assert_same_gradients(recording, steps)
    for number, (report, plain) in enumerate(zip(recording.reports, steps)):
        # Logged losses are means in fp32, also for an fp64 model.
        for name, loss in report.losses.items():
            assert loss == pytest.approx(plain.losses[name], rel=1e-6), f"{name} of step {number}"


def _assert_same_gradients(recording: Recording, steps: list[PlainStep]) -> None:
    tolerance = GRAD_TOLERANCE[next(iter(recording.initial.values())).dtype]
    assert len(recording.grads) == len(recording.reports) == len(steps) == STEPS
    for number, (report, grads, plain) in enumerate(zip(recording.reports, recording.grads, steps)):
        errors = _relative_errors(grads, plain)
        assert max(errors.values()) <= tolerance, f"step {number}: {errors}"
        # The norm is rounded to fp32.
        assert report.grad_norm == pytest.approx(plain.grad_norm, rel=max(tolerance, 1e-7)), f"step {number}"


def _relative_errors(grads: Weights, plain: PlainStep) -> dict[str, float]:
    """Returns each tensor's error relative to its reference norm, without tensors of negligible gradient."""
    assert grads.keys() == plain.grads.keys()
    norms = {name: torch.linalg.vector_norm(grad).item() for name, grad in plain.grads.items()}
    differences = {name: torch.linalg.vector_norm(grads[name] - grad).item() for name, grad in plain.grads.items()}
    return {name: differences[name] / norm for name, norm in norms.items() if norm > NEGLIGIBLE * plain.grad_norm}


def _assert_same_update(recording: Recording, final: Weights, *, tolerance: float) -> None:
    """Asserts equal updates of each tensor, relative to their norm, plus one rounding of the weights per step."""
    for name, expected in final.items():
        update = torch.linalg.vector_norm(expected - recording.initial[name]).item()
        error = torch.linalg.vector_norm(recording.final[name] - expected).item()
        rounding = torch.finfo(recording.final[name].dtype).eps / 2 * STEPS * torch.linalg.vector_norm(expected).item()
        assert error <= tolerance * update + rounding, f"{name}: {error:.1e}, update {update:.1e}"
