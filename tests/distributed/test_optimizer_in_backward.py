"""Updates in backward of a wrapped module are bit-identical to the step after backward (TRAPS B28 to B30).

Covers clip policies (ANCHORS, finding 6), interrupted iterations and the states that hooks see.
test_in_backward_training covers the training program.
"""

import copy
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core import parallel_state
from megatron.core.dist_checkpointing import model_logical_pieces
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.consistency import NonFiniteGradientError
from megatron.core.group_collectives import RemoteRankError
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from tests.counts import long_count, slow, soak_only
from tests.distributed.odd_modules import ReadDetached
from tests.distributed.optimizer_runs import PRECISE
from tests.harness import run_on_ranks
from tests.unit_tests.core.optimizer.reference import microbatches, tiny_model

SHARDED = {"use_distributed_optimizer": True}
OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True}
MODES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp, overlapped": {"overlap_grad_reduce": True},
    "zero1": SHARDED,
    "zero1, overlapped": {**SHARDED, **OVERLAPPED},
    "zero1, gathers in step": {**SHARDED, **OVERLAPPED, "overlap_param_gather_with_optimizer_step": True},
    "zero2": {**SHARDED, "shard_gradients": True},
    "zero2, overlapped": {**SHARDED, **OVERLAPPED, "shard_gradients": True},
}
INSTANCES = {"zero1, instances": {**SHARDED, **OVERLAPPED, "num_distributed_optimizer_instances": 2}}
# One mode of each kind of wrapper.
PLAIN = ("ddp", "zero1", "zero2")
EXACT = {"clip_grad": 0.05, "optimizer_in_backward_clip": "exact"}
HALF = {"initial_loss_scale": 64.0, "hysteresis": 1, "loss_scale_window": 3}
STEPS = long_count(3, soak=10)  # the learning rate falls in the third step


class Run:
    """Trains a small model with a falling learning rate.

    settings: fields of OptimizerConfig; clip_grad is 0 by default.
    """

    def __init__(
        self,
        mode: str,
        *,
        in_backward: bool = True,
        dtype: torch.dtype = torch.float32,
        bucket_size: int = 37,
        model: nn.Module | None = None,
        **settings: Any,
    ) -> None:
        self.dtype = dtype
        flags = {**MODES, **INSTANCES}[mode]
        ddp_config = DistributedDataParallelConfig(
            **flags,
            bucket_size=bucket_size,
            grad_reduce_in_fp32=True,
            release_gradients=in_backward,
            check_for_nan_in_grad=settings.pop("check_for_nan_in_grad", False),
        )
        config = ModelParallelConfig(deterministic_mode=True)
        self.model = DistributedDataParallel(config, ddp_config, model or tiny_model(dtype))
        precision = {torch.bfloat16: {"bf16": True}, torch.float16: {"fp16": True}}.get(dtype, {})
        if "shard_gradients" in flags:
            settings = {"optimizer": "distributed_fused_adam", **settings}
        if not in_backward:
            settings.pop("optimizer_in_backward_clip", None)
        given = {"lr": 0.01, "clip_grad": 0.0, "deterministic_mode": True, "optimizer_in_backward": in_backward}
        given |= {"log_num_zeros_in_grad": True}
        config = OptimizerConfig(**{**given, **precision, **settings})
        self.optimizer: MegatronOptimizer = get_megatron_optimizer(config, [self.model])

    def backward(self, step: int, *, count: int = 1, factor: float = 1.0) -> float:
        """Runs all backward passes of a step and returns its loss. factor: scales this rank's inputs."""
        self.optimizer.zero_grad()
        total = 0.0
        batches = microbatches(10 * step + dist.get_rank(), count, dtype=self.dtype)
        for number, x in enumerate(batches, start=1):
            with nullcontext() if number == count else self.model.accumulate():
                loss = self.model(x * factor).float().square().mean() / count
                self.optimizer.scale_loss(loss).backward()
            total += loss.item()
        return total

    def step(self, step: int, *, count: int = 1, factor: float = 1.0) -> list[Any]:
        """Runs a step and returns what it reports. factor: scales this rank's inputs."""
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 * 0.5 ** (step // 2)
        loss = self.backward(step, count=count, factor=factor)
        finalize_model_grads([self.model])
        report = self.optimizer.step()
        return [loss, *report, float(self.optimizer.get_loss_scale()), self.optimizer.params_norm()]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns all parameters, as modules see them, and this rank's optimizer states."""
        self.model.start_param_sync(force_sync=True)
        boxes = self.optimizer.sharded_state(model_logical_pieces(self.model))
        states = {f"{box.key} {box.global_offset}": box.data.clone() for box in boxes}
        return {name: p.detach().clone() for name, p in self.model.module.named_parameters()} | states


def assert_same(run: Run, other: Run, what: object) -> None:
    """Asserts that parameters are equal, and optimizer states too where both runs have the same boxes."""
    # Compared by key, since the order depends on the buckets.
    ours, theirs = run.tensors(), other.tensors()
    if ours.keys() == theirs.keys():
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items()), what
    else:
        weights = dict(run.model.module.named_parameters()).keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in weights), what


def _compare(modes: list[str], dtype: torch.dtype, count: int, settings: dict[str, Any], *, steps: int = STEPS) -> None:
    for mode in modes:
        runs = [Run(mode, in_backward=chosen, dtype=dtype, **settings) for chosen in (False, True)]
        for step in range(steps):
            reports = [run.step(step, count=count) for run in runs]
            assert reports[0] == reports[1], (mode, step)
            assert reports[0][1], "no step may be skipped"
        assert_same(*runs, mode)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, soak_only(2), soak_only(4)])
@pytest.mark.parametrize("clip", [{}, slow(EXACT)], ids=["clip off", "exact"])
def test_steps_in_backward_are_the_steps_after_it(ranks: int, clip: dict[str, Any]) -> None:
    # The test of several microbatches covers clipping in all modes.
    every = ranks == 3 and (not clip or long_count(0, soak=1))
    run_on_ranks(_compare, ranks, list(MODES if every else PLAIN), torch.float32, 1, clip)


KINDS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "bf16": (torch.bfloat16, {}),
    "bf16, exact": (torch.bfloat16, EXACT),
    "bf16, precise": (torch.bfloat16, PRECISE),
    "fp32, sgd, exact": (torch.float32, {**EXACT, "optimizer": "sgd"}),
    "fp16, exact": (torch.float16, {**EXACT, **HALF}),
    "exact, nothing to clip": (torch.float32, {"optimizer_in_backward_clip": "exact"}),
}
# Every mode runs several microbatches; `make soak` runs all modes of every kind.
USUAL_MODES = {
    "bf16": ["ddp, overlapped", "zero2, overlapped"],
    "bf16, exact": ["zero1", "zero2"],
    "bf16, precise": ["ddp", "zero1, overlapped"],
    "fp32, sgd, exact": ["ddp", "zero1"],
    "fp16, exact": ["zero1, overlapped", "zero2"],
    "exact, nothing to clip": ["zero1, gathers in step"],
}


def _compare_kinds() -> None:
    for kind, (dtype, settings) in KINDS.items():
        # ZeRO-2 of pretrain_gpt.py supports only Adam.
        every = [mode for mode in MODES if "zero2" not in mode or "optimizer" not in settings]
        modes = every if long_count(0, soak=1) else USUAL_MODES[kind]
        # With fp16, the loss scale grows after the third step.
        _compare(modes, dtype, 3, settings, steps=long_count(3, soak=STEPS))


@pytest.mark.slow
def test_b29_several_microbatches_make_one_step_in_every_precision() -> None:
    run_on_ranks(_compare_kinds, 3)


def _overflow() -> None:
    for mode in PLAIN:
        runs = [Run(mode, in_backward=chosen, dtype=torch.float16, **EXACT, **HALF) for chosen in (False, True)]
        for step in range(4):
            factor = 1e5 if step in (0, 2) and dist.get_rank() == 1 else 1.0
            reports = [run.step(step, count=2, factor=factor) for run in runs]
            assert repr(reports[0]) == repr(reports[1]), (mode, step)
            assert reports[1][1] == (step not in (0, 2))
        assert runs[0].optimizer.common_state() == runs[1].optimizer.common_state()
        assert_same(*runs, mode)


@pytest.mark.slow
def test_an_overflow_is_skipped_where_gradients_are_held() -> None:
    run_on_ranks(_overflow, 3)


class Reference:
    """Defines the policies: fp64 gradients averaged over all ranks, and torch's AdamW on each parameter.

    buckets: the names of each bucket's parameters.
    """

    def __init__(self, policy: str, clip: float, buckets: list[list[str]]) -> None:
        self.policy, self.clip, self.buckets = policy, clip, buckets
        self.model = tiny_model().double()
        decays = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": decays}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.01)
        self.previous: float | None = None

    def step(self, step: int, count: int) -> float:
        """Runs a step and returns the gradient norm before clipping."""
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 * 0.5 ** (step // 2)
        ranks = dist.get_world_size()
        self.optimizer.zero_grad()
        for rank in range(ranks):
            for x in microbatches(10 * step + rank, count):
                (self.model(x.double()).square().mean() / count / ranks).backward()
        grads = {name: p.grad for name, p in self.model.named_parameters()}
        norm = _norm(grads.values())
        if self.policy == "previous-norm":
            basis = norm if self.previous is None else self.previous
            coefficients = {name: min(1.0, self.clip / (basis + 1e-6)) for name in grads}
        else:
            norms = [_norm([grads[name] for name in names]) for names in self.buckets]
            coefficients = {
                name: min(1.0, self.clip / (norm + 1e-6)) for norm, names in zip(norms, self.buckets) for name in names
            }
        for name, grad in grads.items():
            grad.mul_(coefficients[name])
        self.previous = norm
        self.optimizer.step()
        return norm


def _norm(grads: Any) -> float:
    return math.sqrt(sum(grad.square().sum().item() for grad in grads))


def _compare_with_reference(policy: str) -> None:
    for mode, count in (("ddp", 2), ("zero1, overlapped", 1), ("zero1, overlapped", 2), ("zero2", 2)):
        run = Run(mode, clip_grad=0.05, optimizer_in_backward_clip=policy)
        buckets = [[slot.name for slot in one.slots] for buffer in run.model.all_buffers for one in buffer.buckets]
        assert len(buckets) > 2
        reference = Reference(policy, 0.05, buckets)
        for step in range(STEPS):
            _, updated, norm, *_ = run.step(step, count=count)
            assert updated and norm == pytest.approx(reference.step(step, count), rel=1e-5), (mode, step)
        run.model.start_param_sync(force_sync=True)
        for ours, theirs in zip(run.model.module.parameters(), reference.model.parameters(), strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)
        _assert_replicas_agree(run, (mode, policy))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["previous-norm", slow("per-bucket")])
def test_b28_policies_clip_as_they_are_defined_and_keep_replicas_equal(policy: str) -> None:
    run_on_ranks(_compare_with_reference, 3, policy)


def _train_and_compare_replicas(mode: str, policy: str) -> None:
    run = Run(mode, clip_grad=0.05, optimizer_in_backward_clip=policy)
    for step in range(2):
        run.step(step)
    run.model.start_param_sync(force_sync=True)
    _assert_replicas_agree(run, (mode, policy))


def _assert_replicas_agree(run: Run, what: object) -> None:
    for name, param in run.model.module.named_parameters():
        every = [torch.empty_like(param) for _ in range(dist.get_world_size())]
        dist.all_gather(every, param.detach())
        assert all(torch.equal(one, param) for one in every), (what, name)


def _break_off() -> None:
    for mode in PLAIN:
        run, expected = Run(mode, **EXACT), Run(mode, **EXACT)
        assert run.step(0) == expected.step(0)
        run.backward(1)
        if dist.get_rank() == 1:
            run.model.reset_iteration()
        else:
            with pytest.raises(RemoteRankError, match="rank 1 aborted the iteration"):
                finalize_model_grads([run.model])
            run.model.reset_iteration()
        assert run.step(1) == expected.step(1)
        assert_same(run, expected, mode)


@pytest.mark.slow
def test_an_iteration_that_breaks_off_leaves_no_trace_where_gradients_are_held() -> None:
    run_on_ranks(_break_off, 3)


def _drop_after_updates(mode: str) -> None:
    run, expected = Run(mode), Run(mode)
    assert run.step(0) == expected.step(0)
    saved = {name: tensor.clone() for name, tensor in run.tensors().items()}
    run.backward(1)
    finalize_model_grads([run.model])
    # A script that skips step(): the error must persist, since parameters already are those of the next step.
    words = "updated in backward, but the step of that iteration never ended.*load a checkpoint.*clip exact"
    with pytest.raises(RuntimeError, match=words):
        run.optimizer.sharded_state(model_logical_pieces(run.model))
    run.optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=words):
        run.step(1)
    run.model.reset_iteration()
    _restore(run, saved)
    for step in range(1, 3):
        assert run.step(step) == expected.step(step)
    assert_same(run, expected, mode)


def _restore(run: Run, saved: dict[str, torch.Tensor]) -> None:
    """Restores parameters and optimizer state, as loading a checkpoint does."""
    run.model.start_param_sync(force_sync=True)
    with torch.no_grad():
        for name, param in run.model.module.named_parameters():
            param.copy_(saved[name])
    with run.optimizer.loading(model_logical_pieces(run.model)) as boxes:
        for box in boxes:
            box.data.copy_(saved[f"{box.key} {box.global_offset}"])
    run.optimizer.load_state_dict(run.optimizer.common_state())


@pytest.mark.parametrize("mode", PLAIN)
def test_parameters_of_two_steps_are_refused_until_a_checkpoint_is_loaded(mode: str) -> None:
    run_on_ranks(_drop_after_updates, 2, mode)


def _needed_after_update() -> None:
    for mode in PLAIN:
        torch.manual_seed(0)
        module = ReadDetached()
        runs = [Run(mode, in_backward=chosen, model=copy.deepcopy(module), **EXACT) for chosen in (False, True)]
        for step in range(2):
            assert runs[0].step(step) == runs[1].step(step)
        broken = Run(mode, model=module, bucket_size=1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            broken.step(0)
        # Otherwise the iteration would count as unfinished while the next ones run.
        broken.model.reset_iteration()


def test_a_weight_that_backward_needs_after_its_update_is_refused() -> None:
    run_on_ranks(_needed_after_update, 2)


def _not_finite(checked: bool) -> None:
    for mode in PLAIN:
        run = Run(mode, check_for_nan_in_grad=checked)
        run.step(0)
        factor = math.nan if dist.get_rank() == 1 else 1.0
        error, words = (NonFiniteGradientError, "rank 1") if checked else (RuntimeError, "norm of all gradients is nan")
        with pytest.raises(error, match=words):
            run.step(1, factor=factor)
        run.model.reset_iteration()
        with pytest.raises(RuntimeError, match="load a checkpoint"):
            run.step(2)
        run.model.reset_iteration()


@pytest.mark.parametrize("checked", [True, False])
def test_a_gradient_that_is_not_finite_ends_the_run_on_all_ranks(checked: bool) -> None:
    run_on_ranks(_not_finite, 3, checked)


def _not_finite_but_held() -> None:
    for mode in PLAIN:
        runs = [Run(mode, in_backward=chosen, **EXACT) for chosen in (False, True)]
        for step in range(3):
            factor = math.inf if step == 1 and dist.get_rank() == 1 else 1.0
            reports = [run.step(step, factor=factor) for run in runs]
            assert repr(reports[0]) == repr(reports[1]) and reports[1][1] == (step != 1)
        assert_same(*runs, mode)


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_is_skipped_where_gradients_are_held() -> None:
    run_on_ranks(_not_finite_but_held, 3)


def _step_without_gradients() -> None:
    for mode in PLAIN:
        run = Run(mode)
        run.optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=r"optimizer.step\(\) was called before"):
            run.optimizer.step()
        run.step(0)
        with pytest.raises(RuntimeError, match=r"call zero_grad, backward and finalize_model_grads before each step"):
            run.optimizer.step()


def test_a_step_without_a_backward_is_refused() -> None:
    run_on_ranks(_step_without_gradients, 2)


def _evaluate_between() -> None:
    for mode in MODES:
        runs = [Run(mode, in_backward=chosen) for chosen in (False, True)]
        for step in range(2):
            assert runs[0].step(step) == runs[1].step(step)
            with torch.no_grad():
                outputs = [run.model.eval()(torch.ones(2, 5)) for run in runs]
            assert torch.equal(*outputs), (mode, step)
            for run in runs:
                run.model.train()


@pytest.mark.slow
def test_an_evaluation_between_steps_sees_the_updated_parameters() -> None:
    run_on_ranks(_evaluate_between, 2)


def _exchange(settings: dict[str, Any]) -> None:
    """Compares a normal run with one that alternates updates in backward and after it, resuming at each change."""
    # Modes whose buckets, and so states, are split identically with and without updates in backward.
    for mode in ("ddp, overlapped", "zero1, overlapped", "zero2"):
        expected = Run(mode, in_backward=False, **settings)
        reports = [expected.step(step) for step in range(3)]
        before = None
        for step, chosen in enumerate((True, False, True)):
            run = Run(mode, in_backward=chosen, **settings)
            if before is not None:
                saved = before.optimizer.sharded_state(model_logical_pieces(before.model))
                keys = {box.key for box in run.optimizer.sharded_state(model_logical_pieces(run.model))}
                assert keys == {box.key for box in saved}
                _restore(run, before.tensors())
                run.optimizer.load_state_dict(before.optimizer.common_state())
            assert run.step(step) == reports[step]
            before = run
        assert_same(before, expected, mode)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [slow({}), EXACT], ids=["clip off", "exact"])
def test_b30_states_are_those_of_the_step_after_backward_both_ways(settings: dict[str, Any]) -> None:
    run_on_ranks(_exchange, 3, settings)


def _train_instances() -> None:
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=2)
    (mode,) = INSTANCES
    _compare([mode], torch.bfloat16, 2, EXACT, steps=long_count(3, soak=5))
    _compare([mode], torch.float32, 1, {}, steps=long_count(2, soak=5))
    for policy in ("previous-norm", "per-bucket"):
        _train_and_compare_replicas(mode, policy)


@pytest.mark.slow
def test_instances_of_an_optimizer_update_in_backward_as_after_it_and_stay_the_same() -> None:
    run_on_ranks(_train_instances, 4)


def _continue_with_norm() -> None:
    settings = {"clip_grad": 0.05, "optimizer_in_backward_clip": "previous-norm"}
    for mode in PLAIN:
        first = Run(mode, **settings)
        first.step(0)
        second = Run(mode, **settings)
        _restore(second, first.tensors())
        second.optimizer.load_state_dict(first.optimizer.common_state())
        for step in range(1, 3):
            assert first.step(step) == second.step(step)
        assert_same(first, second, mode)


def test_the_previous_norm_is_part_of_the_state() -> None:
    run_on_ranks(_continue_with_norm, 2)


def _hooks_see_states() -> None:
    for mode in PLAIN:
        run = Run(mode, dtype=torch.bfloat16)
        seen: dict[str, list[Any]] = {}
        rates = list[float]()

        def look(bucket: Any, seen: dict[str, list[Any]] = seen, rates: list[float] = rates) -> None:
            for state in bucket.states:
                part = slice(state.span.start, state.span.end)
                assert torch.equal(state.master.bfloat16(), bucket.shard[part])
                assert bucket.grad[part].shape == state.moments["exp_avg"].shape == state.moments["exp_avg_sq"].shape
                assert state.settings["lr"] == rates[-1] and {"weight_decay", "betas"} <= set(state.settings)
            # Counts elements of parameters, without the padding between them.
            shared = (one.span.intersection(state.span).numel for state in bucket.states for one in bucket.slices)
            seen.setdefault(bucket.name, []).append(sum(shared))

        run.model.register_bucket_ready_hook(look)
        for step, rate in enumerate((0.01, 0.01, 0.005)):
            rates.append(rate)
            run.step(step, count=2)
        assert len(seen) > 2 and all(len(sizes) == 3 for sizes in seen.values())
        assert sum(sizes[0] for sizes in seen.values()) == sum(
            run.model.owned_shard(param).numel() for param in run.model.module.parameters()
        )


def test_hooks_see_masters_moments_and_rates_of_their_bucket() -> None:
    run_on_ranks(_hooks_see_states, 2)


def _hooks_change_gradients() -> None:
    for mode in PLAIN:
        runs = [Run(mode, in_backward=chosen) for chosen in (False, True)]
        for run in runs:
            run.model.register_bucket_ready_hook(lambda bucket: bucket.grad.mul_(0.5))
        for step in range(3):
            assert runs[0].step(step) == runs[1].step(step)
        assert_same(*runs, mode)


def test_the_update_takes_what_hooks_have_made_of_gradients() -> None:
    run_on_ranks(_hooks_change_gradients, 2)
