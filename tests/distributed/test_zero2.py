"""Sharded gradients (ZeRO-2) of any wrapped module against ZeRO-1: bit-identical results, errors and memory."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.live_bytes import PeakBytes
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    GraphedReductions,
    NonFiniteGradientError,
    finalize_model_grads,
)
from megatron.core.group_collectives import RemoteRankError
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import DistributedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.state_memory import state_bytes_of
from tests.counts import long_count, soak_only
from tests.distributed.odd_modules import Parts
from tests.distributed.optimizer_runs import OVERLAPS, PRECISE, Run
from tests.harness import run_on_ranks
from tests.unit_tests.core.optimizer.reference import microbatches, tiny_model

STEPS = long_count(2, soak=5)
CASES: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.float32, {}),
    (torch.bfloat16, {}),
    (torch.bfloat16, {"grad_reduce_in_fp32": False}),
    (torch.bfloat16, PRECISE),
]
MODES = [
    {"zero1": True, "zero2": True, "bucket_size": size, "overlap": overlap}
    for size in (1, 37, None)
    for overlap in OVERLAPS
]
# Covers every overlap and every bucket size once; `make soak` runs all pairs.
SOME = MODES if long_count(0, soak=1) else [MODES[2], MODES[4], MODES[7], MODES[9]]


def assert_same(run: Any, reference: Any, what: Any) -> None:
    """Asserts that reports and weights are bit-identical."""
    assert repr(run[0]) == repr(reference[0]), what
    different = [name for name, weight in reference[1].items() if not torch.equal(run[1][name], weight)]
    assert not different, (what, different)


def _compare_with_zero1(cases: Sequence[tuple[torch.dtype, dict[str, Any]]]) -> None:
    for dtype, settings in cases:
        seen = []
        for mode in [{"zero1": True}, *SOME]:
            run = Run(tiny_model(dtype), **mode, **settings)
            seen.append(([run.step(step) for step in range(STEPS)], run.weights()))
        assert len({norm for _, _, norm, *_ in seen[0][0]}) == STEPS
        for mode, found in zip(SOME, seen[1:]):
            assert_same(found, seen[0], (dtype, settings, mode))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "count"), [(1, 1), (3, 4), soak_only(4, 2)])
def test_b25_one_microbatch_has_the_bits_of_zero1_at_any_overlap_and_bucket_size(ranks: int, count: int) -> None:
    run_on_ranks(_compare_with_zero1, ranks, CASES[:count])


def _two_instances() -> None:
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=2)
    OVERLAPS.update({name: {**flags, "num_distributed_optimizer_instances": 2} for name, flags in OVERLAPS.items()})
    _compare_with_zero1(CASES[: long_count(1, soak=2)])


@pytest.mark.slow
def test_two_instances_of_two_ranks_have_the_bits_of_zero1() -> None:
    run_on_ranks(_two_instances, 4)


def _train(run: Run, plans: Sequence[Sequence[bool]]) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Trains one step per plan and returns reports and weights. A plan says which of its microbatches are reduced."""
    reports = []
    for step, plan in enumerate(plans):
        run.optimizer.zero_grad()
        inputs = microbatches(10 * step + dist.get_rank(), len(plan), dtype=run.dtype)
        for x, is_reduced in zip(inputs, plan):
            with nullcontext() if is_reduced else run.model.no_sync():
                run.optimizer.scale_loss(run.model(x).float().square().mean() / len(plan)).backward()
        finalize_model_grads([run.model])
        reports.append((run.optimizer.step(), run.optimizer.params_norm()))
    return reports, run.weights()


def _several_microbatches() -> None:
    each, last = [[True] * count for count in (1, 3, 2)], [[False] * (count - 1) + [True] for count in (1, 3, 2)]
    for dtype in (torch.float32, torch.bfloat16):
        reference = _train(Run(tiny_model(dtype), zero1=True), last)
        reduced_each = None
        for mode in SOME:
            assert_same(_train(Run(tiny_model(dtype), **mode), last), reference, mode)
            found = _train(Run(tiny_model(dtype), **mode), each)
            reduced_each = reduced_each or found
            assert_same(found, reduced_each, mode)
        for ((_, norm, _), size), ((_, expected, _), expected_size) in zip(reduced_each[0], reference[0]):
            assert (norm, size) == pytest.approx(
                (expected, expected_size), rel=1e-5 if dtype == torch.float32 else 0.01
            )


@pytest.mark.slow
def test_microbatches_add_up_alike_at_any_bucket_size_and_in_no_sync_have_the_bits_of_zero1() -> None:
    run_on_ranks(_several_microbatches, 3)


def _overflow_on_one_rank() -> None:
    settings = {"initial_loss_scale": 64.0, "hysteresis": 1, "log_num_zeros_in_grad": True}
    for mode in (MODES[4], MODES[7]):
        runs = [Run(tiny_model(torch.float16), **kind, **settings) for kind in ({"zero1": True}, mode)]
        for step, factor in enumerate((1.0, torch.inf, 1e5, 1.0)):
            factors = factor if dist.get_rank() == 1 else 1.0
            plain, ours = (run.step(step, factors) for run in runs)
            assert repr(plain) == repr(ours), (mode, step)
            assert ours[1] == (factor == 1.0)
        assert runs[1].optimizer.get_loss_scale() == 16.0
        assert_same(([], runs[1].weights()), ([], runs[0].weights()), mode)


@pytest.mark.slow
def test_b22_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    run_on_ranks(_overflow_on_one_rank, 3)


def _plans(step: int, rank: int) -> list[int]:
    # No rank uses layer 1, rank 1 does not use layer 2, the order differs by rank, and rank 0 skips step 3 entirely.
    if step == 3 and rank == 0:
        return []
    plan = [0, 3, 4, *([2] if rank != 1 else [])]
    return plan[rank:] + plan[:rank] if step % 2 else plan


def _use_parts() -> None:
    seen = []
    for mode in [{"zero1": True}, *SOME]:
        run = Run(Parts(), **mode)
        reports = []
        for step in range(5):
            run.optimizer.zero_grad()
            x = microbatches(step + 10 * dist.get_rank())[0].requires_grad_()
            run.model(x, _plans(step, dist.get_rank())).square().mean().backward()
            finalize_model_grads([run.model])
            reports.append(run.optimizer.step())
        seen.append((reports, run.weights()))
        assert_same(seen[-1], seen[0], mode)


@pytest.mark.slow
def test_parameters_that_some_ranks_do_not_use_count_as_zeros() -> None:
    run_on_ranks(_use_parts, 3)


def _come_late() -> None:
    seen, num_late = [], 0
    for mode in [{"zero1": True}, MODES[3], MODES[5]]:
        run, reports = Run(Parts(), **mode), []
        for step in range(4):
            run.optimizer.zero_grad()
            for number in range(2):
                # One rank uses the last layer more often than ever before, so that its bucket is launched too early.
                plan = [0, 1, *[-1] * (3 if (number + step) % 2 and step % 3 == dist.get_rank() else 1), 2, 3]
                x = microbatches(10 * step + number + dist.get_rank())[0].requires_grad_()
                # ZeRO-1 reduces once per step.
                with nullcontext() if number or "zero2" in mode else run.model.no_sync():
                    run.model(x, plan).square().mean().backward()
            num_late += "zero2" in mode and any(group.is_late for group in run.model.bucket_groups)
            finalize_model_grads([run.model])
            reports.append(run.optimizer.step()[1])
        seen.append((reports, run.weights()))
        assert reports == pytest.approx(seen[0][0], rel=1e-5), mode
        for name, weight in seen[0][1].items():
            torch.testing.assert_close(seen[-1][1][name], weight, rtol=1e-4, atol=1e-6)
    assert num_late or dist.get_rank() > 0


@pytest.mark.slow
def test_gradients_that_come_behind_the_launch_of_their_bucket_are_not_lost() -> None:
    run_on_ranks(_come_late, 3)


def _survive_an_error_on_all_ranks() -> None:
    for mode in (MODES[3], MODES[4]):
        run, plain = (Run(tiny_model(), **mode) for _ in range(2))
        for broken_at in (0, 1, 2):
            run.optimizer.zero_grad()
            for _ in range(broken_at):
                run.model(microbatches(7)[0]).sum().backward()
            run.model.reset_iteration()
            assert run.step(broken_at) == plain.step(broken_at), mode
        # On rank 1 only, in the step's only backward or before it.
        for is_in_backward in (False, True):
            told = _break_on_rank_1(run, is_in_backward=is_in_backward)
            assert (told is None) == (dist.get_rank() == 1)
            assert run.step(5) == plain.step(5), (mode, is_in_backward)


def _break_on_rank_1(run: Run, *, is_in_backward: bool) -> str | None:
    def fail(*unused: Any) -> None:
        raise KeyError

    run.optimizer.zero_grad()
    hook = None
    try:
        loss = run.model(microbatches(5)[0]).sum()
        if dist.get_rank() == 1:
            hook = run.model.module[2].weight.register_hook(fail)
            if not is_in_backward:
                fail()
        loss.backward()
        finalize_model_grads([run.model])
        raise AssertionError("rank 1 has broken the iteration off")
    except KeyError:
        run.model.reset_iteration()
        return None
    except RemoteRankError as error:
        run.model.reset_iteration()
        return str(error)
    finally:
        if hook is not None:
            hook.remove()


@pytest.mark.slow
def test_b32_an_iteration_that_was_broken_off_leaves_no_trace() -> None:
    run_on_ranks(_survive_an_error_on_all_ranks, 3)


def _find_nan() -> None:
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, shard_gradients=True, check_for_nan_in_grad=True, overlap_grad_reduce=True
    )
    model = DistributedDataParallel(ModelParallelConfig(), config, tiny_model())
    model.zero_grad_buffer()
    for number in range(3):
        x = microbatches(number)[0] * (torch.nan if number == 1 and dist.get_rank() == 1 else 1.0)
        model(x).sum().backward()
    with pytest.raises(NonFiniteGradientError, match=r"rank 1.*4\.weight"):
        model.finish_grad_sync()
    model.reset_iteration()
    model(microbatches(0)[0]).sum().backward()
    model.finish_grad_sync()


def test_a_gradient_that_is_not_finite_before_a_reduction_is_told_with_its_rank() -> None:
    run_on_ranks(_find_nan, 2)


WIDTH, DEPTH = 64, 16


def _measure(overlap: str, zero2: bool) -> tuple[int, int, int, float]:
    """Measures gradient memory of two steps, in bytes.

    Returns the size of all gradients, the persistent gradients, the peak in a step over its start, and the persistent
    gradients by the formula.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)])
    run = Run(model, zero1=True, zero2=zero2, bucket_size=WIDTH * WIDTH, overlap=overlap)
    x, peaks = torch.ones(1, WIDTH), []

    def pass_back() -> None:
        run.model(x).sum().backward()
        run.model.finish_grad_sync()

    for _ in range(2):
        run.optimizer.zero_grad()
        # At the start of the second step, memory of the first step's collectives may still be allocated.
        with PeakBytes() as memory:
            peaks.append(memory.peak_of(pass_back))
        run.optimizer.step()
    spans = [span for buffer in run.model.all_buffers for span in buffer.owned_spans()]
    grads = [buffer.grad_of(bucket) for buffer in run.model.all_buffers for bucket in range(len(buffer.owned_spans()))]
    assert len(grads) == len(spans)
    held = sum({grad.untyped_storage().data_ptr(): grad.untyped_storage().nbytes() for grad in grads}.values())
    return (
        sum(4 * param.numel() for param in model.parameters()),
        held,
        max(peaks),
        state_bytes_of([run.model], run.optimizer.config).gradients,
    )


def _measure_each() -> list[tuple[int, int, int, float]]:
    return [_measure("grads", True), _measure("none", True), _measure("grads", False)]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, soak_only(4)])
def test_a_rank_holds_its_share_of_gradients_and_the_buckets_under_way(ranks: int) -> None:
    for overlapped, at_end, zero1 in run_on_ranks(_measure_each, ranks):
        whole, held, peak, planned = overlapped
        assert held == planned == whole / ranks
        # The bucket being filled, two in flight with their received data, and autograd's gradient.
        assert peak <= 8 * whole / DEPTH
        # Without overlap, all gradients of a backward are alive at its end.
        assert at_end[2] >= whole
        whole, held, _, planned = zero1
        assert held == planned == whole


def test_what_has_no_place_with_sharded_gradients_is_refused_by_name() -> None:
    sharded = {"use_distributed_optimizer": True, "shard_gradients": True}
    with pytest.raises(ValueError, match="shard_gradients is set: requires use_distributed_optimizer"):
        DistributedDataParallelConfig(shard_gradients=True)
    with pytest.raises(ValueError, match="ddp_debug and shard_gradients are both set"):
        DistributedDataParallelConfig(**sharded, ddp_debug=True)
    with pytest.raises(ValueError, match=r"fp32_local_accumulation is \['all'\] and shard_gradients"):
        DistributedDataParallelConfig(**sharded, param_name_patterns_for_fp32_local_accumulation=["all"])
    module = nn.Linear(4, 4)
    model = DistributedDataParallel(ModelParallelConfig(), DistributedDataParallelConfig(**sharded), module)
    for optimizer in ("adam", "sgd", "muon"):
        with pytest.raises(
            ValueError, match=rf"optimizer is {optimizer} and .*shard_gradients .*\[True\]: must be False"
        ):
            get_megatron_optimizer(OptimizerConfig(optimizer=optimizer, lr=0.1), [model])
    assert isinstance(
        get_megatron_optimizer(OptimizerConfig(optimizer="distributed_fused_adam", lr=0.1), [model]),
        DistributedOptimizer,
    )
    with pytest.raises(ValueError, match="no rank stores whole gradients"):
        model.named_main_grads()
    with pytest.raises(ValueError, match="register_grad_ready was called with .*shard_gradients"):
        model.register_grad_ready(module.weight)
    with pytest.raises(ValueError, match="shard_gradients is set: .*must be False for chunks in a graph"):
        GraphedReductions([model])
    with pytest.raises(ValueError, match="weight is in another DistributedDataParallel"):
        DistributedDataParallel(ModelParallelConfig(), DistributedDataParallelConfig(), module)
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="scale_gradients was called while gradients of bias are being reduced"):
        model.scale_gradients(2.0)
    model.release()
    plain = DistributedDataParallel(ModelParallelConfig(), DistributedDataParallelConfig(), module)
    with pytest.raises(ValueError, match=r"distributed_fused_adam and .*\[False\]: must be True"):
        get_megatron_optimizer(OptimizerConfig(optimizer="distributed_fused_adam", lr=0.1), [plain])
    crossed = nn.Linear(3, 4)
    crossed.weight.data = crossed.weight.data.t().contiguous().t()
    with pytest.raises(ValueError, match=r"weight has shape \(4, 3\) and strides \(1, 4\): must be contiguous"):
        DistributedDataParallel(ModelParallelConfig(), DistributedDataParallelConfig(**sharded), crossed)
