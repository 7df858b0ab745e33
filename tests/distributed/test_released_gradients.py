"""Gradients released during backward, in DDP, ZeRO-1 and ZeRO-2: memory, bit-identical values, and late gradients."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.live_bytes import PeakBytes
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    GraphedReductions,
    finalize_model_grads,
)
from megatron.core.distributed.bucket_storage import BucketLifetimeGrads
from megatron.core.distributed.grad_hooks import ReadyBucket
from megatron.core.group_collectives import RemoteRankError
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.training.data_parallel import join_schedule
from tests.distributed.hook_runs import SHARDED, Counted, Kept, backward, in_each_mode, once, trained, wrap
from tests.distributed.odd_modules import Parts, ReadDetached
from tests.harness import run_on_ranks
from tests.unit_tests.core.optimizer.reference import microbatches, tiny_model

# Modes of the ordinary wrapper; each is compared with the mode that releases its gradients.
KINDS: list[dict[str, Any]] = [{}, SHARDED, {**SHARDED, "shard_gradients": True}]
WIDTH, DEPTH = 64, 12
BUCKET = 4 * WIDTH * WIDTH


def _of_each_kind(body: Callable[[dict[str, Any]], None]) -> None:
    for kind in KINDS:
        body(kind)


def released(kind: dict[str, Any], size: int = 37) -> dict[str, Any]:
    """Returns the same mode with release of gradients."""
    return {**kind, "release_gradients": True, "bucket_size": size}


def _measure(kind: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)])
    model = wrap(module, released(kind, WIDTH * WIDTH))
    found = [bucket.grads for group in model.bucket_groups for bucket in group.buckets]
    storages = [grads for grads in found if isinstance(grads, BucketLifetimeGrads)]
    assert len(storages) == DEPTH
    most: list[int] = []
    # In buckets: data received from other ranks by one collective.
    received = 2 * (dist.get_world_size() - 1) / dist.get_world_size()

    def count(bucket: ReadyBucket) -> None:
        # Buckets in this hook, in flight, and being filled.
        most.append(1 + sum(grads.num_bytes for grads in storages) // BUCKET)
        # Two buckets, autograd's copy and the received data of one. A thread of gloo may release those of an earlier
        # bucket later.
        memory.settled((3.2 + 0.6 * received) * BUCKET)

    model.register_bucket_ready_hook(count)
    x, held = torch.ones(1, WIDTH), 0

    def pass_back() -> None:
        nonlocal held
        model(x).sum().backward()
        held = memory.settled((1.1 + 2.5 * received) * BUCKET)
        finalize_model_grads([model])

    for _ in range(2):
        model.zero_grad_buffer()
        with PeakBytes() as memory:
            peak = memory.peak_of(pass_back)
            left = memory.settled(0.1 * BUCKET)
    assert len(most) == 2 * DEPTH and max(most) == 2, (kind, most)
    # Two buckets, their received data, which gloo releases late, and autograd's copy of the last gradient.
    assert peak <= (3.3 + 2.5 * received) * BUCKET, (kind, peak / BUCKET)
    assert held <= (1.1 + 2.5 * received) * BUCKET and left <= 0.1 * BUCKET, (kind, held, left)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_gradients_take_two_buckets_at_most_and_nothing_between_steps(ranks: int) -> None:
    run_on_ranks(_of_each_kind, ranks, _measure)


def _keep() -> None:
    for kind in KINDS:
        module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)])
        model = wrap(module, released(kind, WIDTH * WIDTH))
        kept = Kept(model)
        model.zero_grad_buffer()
        with PeakBytes() as memory:
            model(torch.ones(1, WIDTH)).sum().backward()
            finalize_model_grads([model])
            shares = dist.get_world_size() if kind else 1
            most = DEPTH * BUCKET / shares + 0.1 * BUCKET
            assert DEPTH * BUCKET / shares <= memory.settled(most) <= most, kind
            model.zero_grad_buffer()
            assert memory.settled(0.1 * BUCKET) <= 0.1 * BUCKET and not kept.grads


def test_what_an_optimizer_keeps_is_its_share_alone() -> None:
    run_on_ranks(_keep, 2)


def _train(model: DistributedDataParallel, *, reduces_each: bool) -> list[dict[str, torch.Tensor]]:
    """Returns the gradients of three steps, of 1, 3 and 2 microbatches."""
    kept, seen = Kept(model), []
    counted = Counted()
    model.register_bucket_ready_hook(counted.on_bucket)
    for step, count in enumerate((1, 3, 2)):
        model.zero_grad_buffer()
        for number, x in enumerate(microbatches(10 * step + dist.get_rank(), count)):
            is_last = number == count - 1
            earlier = model.accumulate if reduces_each else model.no_sync
            with nullcontext() if is_last else earlier():
                model(x).square().mean().backward()
            assert is_last or not counted.seen
        finalize_model_grads([model])
        assert set(counted.take().values()) == {1}
        seen.append(_by_name(model, kept))
    return seen


def _add_up(kind: dict[str, Any]) -> None:
    for reduces_each in (False, True):
        expected = _train(wrap(tiny_model(), kind), reduces_each=reduces_each)
        for size in (1, 37, 10**6):
            ours = _train(wrap(tiny_model(), released(kind, size)), reduces_each=reduces_each)
            for theirs, found in zip(expected, ours, strict=True):
                assert all(torch.equal(found[name], grad) for name, grad in theirs.items()), (kind, size)
                assert all(grad.any() for grad in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_b7_microbatches_add_up_to_the_bits_of_an_ordinary_wrapper(ranks: int) -> None:
    run_on_ranks(_of_each_kind, ranks, _add_up)


def _backward_of(model: DistributedDataParallel, plan: Sequence[int], *, step: int) -> None:
    model.zero_grad_buffer()
    x = microbatches(step + dist.get_rank())[0].requires_grad_()
    model(x, plan).square().mean().backward()


def _come_late() -> None:
    for kind in KINDS:
        plain, model = wrap(Parts(), kind), wrap(Parts(), released(kind, 1))
        expected, ours = Kept(plain), Kept(model)
        early: list[int] = []
        # Steps 0 and 2 use a layer more often than ever before. In step 0 no count is known yet; step 2 is an error,
        # which teaches step 3 the new count.
        for step, (plan, is_lost) in enumerate(
            [([0, -1, -1, 1], False), ([0, -1, -1, 1], False), ([0, -1, -1, -1, 1], True), ([0, -1, -1, -1, 1], False)]
        ):
            ours.grads.clear()
            if is_lost:
                with pytest.raises(
                    RuntimeError, match=r"gradient of layers\.4\.(weight|bias) after its bucket had been released"
                ):
                    _backward_of(model, plan, step=step)
                model.reset_iteration()
                continue
            _backward_of(model, plan, step=step)
            early.append(len(ours.grads))
            finalize_model_grads([model])
            _backward_of(plain, plan, step=step)
            finalize_model_grads([plain])
            ours_by_name, theirs_by_name = _by_name(model, ours), _by_name(plain, expected)
            assert ours_by_name.keys() == theirs_by_name.keys()
            for name, grad in theirs_by_name.items():
                torch.testing.assert_close(ours_by_name[name], grad, rtol=1e-6, atol=1e-8)
        # The second step releases all gradients in backward except the last. The last step releases only those that
        # precede the first gradient of the repeated layer.
        assert early[0] == 0 and early[1] == 9 and early[2] <= 2, (kind, early)


def _by_name(model: DistributedDataParallel, kept: Kept) -> dict[str, torch.Tensor]:
    """Returns whole gradients by name, assembled from all ranks' shards."""
    found = {name: torch.zeros(param.numel()) for name, param in trained(model).items()}
    for (number, index), grad in kept.grads.items():
        owned = model.all_buffers[number].owned_spans()[index]
        for slot in model.all_buffers[number].buckets[index].slots:
            part = slot.span.intersection(owned)
            start, here = part.start - slot.span.start, part.start - owned.start
            found[slot.name][start : start + part.numel] += grad[here : here + part.numel]
    if model.ddp_config.use_distributed_optimizer:
        for whole in found.values():
            dist.all_reduce(whole)
    return found


@pytest.mark.slow
def test_b6_a_gradient_that_comes_behind_its_bucket_is_waited_for_or_refused_by_name() -> None:
    run_on_ranks(_come_late, 2)


def _needed_after_hooks() -> None:
    for kind in KINDS:
        for way in ("param", "bucket", "post-backward"):
            model = wrap(ReadDetached(), released(kind, 1))
            weight = trained(model)["layers.3.weight"]
            written = model.owned_shard(weight)
            if way == "param":
                model.register_post_accumulate_grad_hook(weight, lambda owned: owned.sub_(owned.grad))
            elif way == "bucket":
                model.register_bucket_ready_hook(lambda bucket: bucket.shard.sub_(bucket.grad))
            else:
                model.register_post_backward_hook(weight, lambda _, written=written: written.mul_(0.5))
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                backward(model, 0)


def test_a_weight_that_backward_needs_after_a_hook_wrote_to_it_is_refused() -> None:
    run_on_ranks(_needed_after_hooks, 1)


def _second_backward() -> None:
    for kind in KINDS:
        model, counted = wrap(tiny_model(), released(kind)), Counted()
        model.register_bucket_ready_hook(counted.on_bucket)
        backward(model, 0)
        model.zero_grad_buffer()
        model(microbatches(1)[0]).sum().backward()
        with pytest.raises(
            RuntimeError, match=r"gradient of 4\.\w+ after its bucket had been released .* in accumulate\(\)"
        ):
            model(microbatches(2)[0]).sum().backward()
        model.reset_iteration()
        counted.take()
        backward(model, 3)
        names = [name for name, _ in model.module.named_parameters()]
        assert counted.take() == {key: 1 for key in once(names) if key[0] == "bucket"}, kind
        with pytest.raises(RuntimeError, match="scale_gradients was called with .*release_gradients"):
            model.scale_gradients(0.5)


def test_a_second_backward_outside_accumulate_is_refused() -> None:
    run_on_ranks(_second_backward, 2)


def _fail_on_one_rank(mode: dict[str, Any]) -> None:
    if not mode.get("release_gradients"):
        return
    model, counted = wrap(tiny_model(), mode), Counted()
    params, fails = trained(model), [False]

    def fail(owned: nn.Parameter) -> None:
        if fails[0] and dist.get_rank() == 1:
            raise KeyError

    model.register_post_accumulate_grad_hook(params["4.weight"], fail)
    model.register_post_backward_hook(params.values(), counted.after)
    for fails[0] in (False, True, False):
        if fails[0]:
            with pytest.raises(KeyError if dist.get_rank() == 1 else RemoteRankError):
                backward(model, 0)
            model.reset_iteration()
            assert not counted.take()
        else:
            backward(model, 1)
            assert sum(counted.take().values()) == len(params)


def test_b32_an_error_in_a_hook_of_one_rank_is_told_to_the_others() -> None:
    run_on_ranks(in_each_mode, 2, _fail_on_one_rank)


class Backwards(nn.Sequential):
    """Calls its layers from last to first, so that gradients of the first backward come in an unexpected order."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in reversed(list(self)):
            hidden = layer(hidden)
        return hidden


def _fail_in_the_first_backward() -> None:
    for kind in KINDS:
        torch.manual_seed(0)
        # Buckets of different sizes, all of which are launched at the last gradient.
        model = wrap(Backwards(*(nn.Linear(7, 7, bias=bool(number % 2)) for number in range(6))), released(kind, 40))
        failures = [KeyError()] if dist.get_rank() == 1 else []

        def fail(owned: nn.Parameter, failures: list[Exception] = failures) -> None:
            if failures:
                raise failures.pop()

        model.register_post_accumulate_grad_hook(trained(model)["2.weight"], fail)
        with pytest.raises(KeyError if failures else RemoteRankError):
            model(torch.ones(2, 7)).sum().backward()
            finalize_model_grads([model])
        model.reset_iteration()
        for _ in range(2):
            model.zero_grad_buffer()
            model(torch.ones(2, 7)).sum().backward()
            finalize_model_grads([model])


def test_b32_an_error_in_a_hook_of_the_first_backward_leaves_no_bucket_unsent() -> None:
    run_on_ranks(_fail_in_the_first_backward, 2)


def _leave_parts_unused() -> None:
    for kind in KINDS:
        model, counted = wrap(Parts(), released(kind, 1)), Counted()
        params = trained(model)
        for name, param in params.items():
            model.register_post_accumulate_grad_hook(param, counted.on_param(name))
        for step in range(4):
            # In one step, rank 0 produces no gradient.
            plan = [] if step == 2 and dist.get_rank() == 0 else [dist.get_rank(), 3]
            _backward_of(model, plan, step=step)
            finalize_model_grads([model])
            assert counted.take() == {("param", name): 1 for name in params}, (kind, step)


@pytest.mark.slow
def test_b4_parameters_that_some_ranks_do_not_use_are_given_out_on_all() -> None:
    run_on_ranks(_leave_parts_unused, 3)


def test_settings_that_contradict_it_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="ddp_debug and release_gradients are both set"):
        DistributedDataParallelConfig(release_gradients=True, ddp_debug=True)
    with pytest.raises(ValueError, match=r"fp32_local_accumulation is \['all'\] and release_gradients is set"):
        DistributedDataParallelConfig(release_gradients=True, param_name_patterns_for_fp32_local_accumulation=["all"])
    settings = DistributedDataParallelConfig(release_gradients=True)
    module = nn.Linear(4, 4)
    model = DistributedDataParallel(ModelParallelConfig(), settings, module)
    with pytest.raises(ValueError, match="release_gradients: no rank stores whole gradients"):
        model.named_main_grads()
    with pytest.raises(ValueError, match="register_grad_ready was called with .*release_gradients"):
        model.register_grad_ready(module.weight)
    with pytest.raises(ValueError, match="release_gradients is set: .*must be False for chunks in a graph"):
        GraphedReductions([model])
    crossed = nn.Linear(3, 4)
    crossed.weight.data = crossed.weight.data.t().contiguous().t()
    with pytest.raises(ValueError, match=r"must be contiguous with .*release_gradients"):
        DistributedDataParallel(ModelParallelConfig(), settings, crossed)


def test_the_schedule_defers_all_but_the_last_backward() -> None:
    model = DistributedDataParallel(
        ModelParallelConfig(), DistributedDataParallelConfig(release_gradients=True), nn.Linear(4, 4)
    )
    join_schedule([model], align_grad_reduce=True)
    assert model.config.no_sync_func == [model.accumulate]
