"""Hooks on reduced gradients in DDP, ZeRO-1 and ZeRO-2: number of calls, order, and the gradients that they see.

Hooks survive wrapping the module and loading with assign=True (TRAPS B27: ANCHORS, finding 6).
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.grad_hooks import ReadyBucket
from megatron.core.group_collectives import RemoteRankError
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel.param_attributes import gradient_of, mark_expert, mark_partial_gradient
from tests.counts import long_count, soak_only
from tests.distributed.hook_runs import MODES, SHARDED, Counted, Kept, backward, in_each_mode, once, trained, wrap
from tests.harness import run_on_ranks
from tests.unit_tests.core.optimizer.reference import microbatches, tiny_model


def _survive(mode: dict[str, Any]) -> None:
    counted, module = Counted(), tiny_model()
    first, *others = module.named_parameters()
    first[1].register_post_accumulate_grad_hook(counted.on_param(first[0]))
    model = wrap(module, mode)
    for name, param in others:
        model.register_post_accumulate_grad_hook(param, counted.on_param(name))
    names = [name for name, _ in (first, *others)]

    def watch() -> None:
        model.register_bucket_ready_hook(counted.on_bucket)
        model.register_post_backward_hook(model.module.parameters(), counted.after)

    watch()
    for step in range(2):
        backward(model, step)
        assert counted.take() == once(names), (mode, step)
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()}, assign=True)
    backward(model, 2)
    assert counted.take() == once(names), mode
    module = model.release().to(torch.bfloat16)
    model = wrap(module, mode)
    watch()
    backward(model, 3)
    assert counted.take() == once(names), mode
    # Hooks do not run while synchronization is off.
    model.zero_grad_buffer()
    with model.no_sync():
        model(microbatches(0, dtype=torch.bfloat16)[0]).sum().backward()
    assert not counted.take()
    model.finish_grad_sync()
    assert counted.take() == once(names), mode
    # After release(), autograd calls the parameters' hooks directly.
    model.release()(microbatches(0, dtype=torch.bfloat16)[0]).sum().backward()
    assert counted.take() == Counter({("param", name): 1 for name in names})


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, soak_only(3)])
def test_b27_every_hook_fires_once_a_step_whatever_was_done_to_parameters(ranks: int) -> None:
    run_on_ranks(in_each_mode, ranks, _survive)


def _see_gradients(mode: dict[str, Any], dtype: torch.dtype) -> None:
    plain = wrap(tiny_model(dtype), {})
    backward(plain, 1)
    expected = {name: grad.flatten() for name, grad in plain.named_main_grads()}
    model, seen = wrap(tiny_model(dtype), mode), Counter[str]()

    def look(bucket: ReadyBucket) -> None:
        for one in bucket.slices:
            part = expected[one.name][one.start : one.start + one.span.numel]
            assert torch.equal(one.view_of(bucket.grad), part), (mode, one.name)
            weight = one.param.detach().flatten()[one.start : one.start + one.span.numel]
            assert torch.equal(one.view_of(bucket.shard), weight)
            assert model.owned_shard(one.param).numel() == one.span.numel
            seen[one.name] += one.span.numel

    def look_at_part(found: list[ReadyBucket]) -> None:
        assert {one.name for bucket in found for one in bucket.slices} == {"0.bias", "4.weight"}
        for bucket in found:
            look(bucket)

    params, starts = trained(model), _starts(model)
    model.register_bucket_ready_hook(look)
    model.register_post_backward_hook([params["4.weight"], params["0.bias"]], look_at_part)
    for name, param in params.items():

        def compare(owned: nn.Parameter, name: str = name, param: nn.Parameter = param) -> None:
            assert owned is model.owned_shard(param) and owned.grad is not None
            assert owned.grad.dtype == dtype
            part = expected[name][starts[name] : starts[name] + owned.numel()]
            assert torch.equal(owned.grad.flatten(), part.to(dtype))

        model.register_post_accumulate_grad_hook(param, compare)
    backward(model, 1)
    held = torch.tensor([seen[name] for name in params])
    dist.all_reduce(held)
    times = 1 if mode.get("use_distributed_optimizer") else dist.get_world_size()
    sizes = {name: param.numel() * times for name, param in params.items()}
    assert held.tolist() == [sizes[name] * (2 if name in ("0.bias", "4.weight") else 1) for name in params], mode


def _see_gradients_of_each_dtype(mode: dict[str, Any]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        _see_gradients(mode, dtype)


def _starts(model: DistributedDataParallel) -> dict[str, int]:
    """Returns the start of this rank's part of each parameter, as a bucket hook sees it in one backward pass."""
    starts: dict[str, int] = {}
    handle = model.register_bucket_ready_hook(
        lambda bucket: starts.update({one.name: one.start for one in bucket.slices})
    )
    backward(model, 0)
    handle.remove()
    return starts


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, soak_only(2)])
def test_hooks_see_the_bits_of_an_ordinary_wrapper(ranks: int) -> None:
    run_on_ranks(in_each_mode, ranks, _see_gradients_of_each_dtype)


def _double_in_a_hook(**mode: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns main_grad and the buffer's gradient for a weight of ones whose bucket hook doubles the gradient."""
    layer = nn.Linear(64, 2, bias=False, dtype=torch.bfloat16)
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=False, param_name_patterns_for_fp32_local_accumulation=["weight"], **mode
    )
    model = DistributedDataParallel(ModelParallelConfig(deterministic_mode=True), settings, layer)
    model.register_bucket_ready_hook(lambda bucket: bucket.grad.mul_(2.0))
    model.zero_grad_buffer()
    model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
    finalize_model_grads([model])
    (buffer,) = model.buffers
    start, end = buffer.owned_spans()[0].start, buffer.owned_spans()[0].end
    main_grad = gradient_of(layer.weight)
    assert main_grad is not None and main_grad.dtype == torch.float32
    return main_grad.flatten()[start:end], buffer.grad_data[start:end]


@pytest.mark.parametrize("mode", [{}, SHARDED])
def test_a_change_by_a_hook_reaches_gradients_in_fp32_and_the_bf16_buffer(mode: dict[str, Any]) -> None:
    for wide, narrow in run_on_ranks(partial(_double_in_a_hook, **mode), 2):
        assert wide.eq(2.0).all() and narrow.eq(2.0).all()


class InHooks:
    """Steps each parameter in its hook, with torch's AdamW and a learning rate schedule."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.model, self.num_steps = model, 0
        for param in trained(model).values():
            optimizer = torch.optim.AdamW([model.owned_shard(param)], lr=0.05, weight_decay=0.1, foreach=False)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
            model.register_post_accumulate_grad_hook(param, self._stepped(optimizer, schedule))

    def _stepped(self, optimizer: torch.optim.Optimizer, schedule: Any) -> Callable[[nn.Parameter], None]:
        def step(owned: nn.Parameter) -> None:
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            self.num_steps += 1

        return step


def weights(model: DistributedDataParallel) -> dict[str, torch.Tensor]:
    """Copies the parameters as modules see them, after waiting for their gathers."""
    model.wait_params(model.module.parameters())
    return {name: param.detach().clone() for name, param in model.module.named_parameters()}


STEPS_IN_HOOKS = long_count(4, soak=10)  # the schedule halves the rate after every second


def _step_in_hooks() -> None:
    plain = wrap(tiny_model(), {})
    params = [nn.Parameter(param.detach().flatten().clone()) for param in trained(plain).values()]
    normal = torch.optim.AdamW(params, lr=0.05, weight_decay=0.1, foreach=False)
    schedule = torch.optim.lr_scheduler.StepLR(normal, step_size=2, gamma=0.5)
    models = [wrap(tiny_model(), mode) for mode in MODES]
    runs = [InHooks(model) for model in models]
    for step in range(STEPS_IN_HOOKS):
        backward(plain, step)
        grads = dict(plain.named_main_grads())
        for param, name in zip(params, trained(plain)):
            param.grad = grads[name].flatten()
        normal.step()
        schedule.step()
        for param, wrapped in zip(params, trained(plain).values()):
            wrapped.data.copy_(param.detach().view(wrapped.shape))
        for mode, model in zip(MODES, models):
            backward(model, step)
            if mode.get("use_distributed_optimizer"):
                model.mark_params_stale()
                model.start_param_sync(force_sync=True)
            for name, weight in weights(plain).items():
                torch.testing.assert_close(weights(model)[name], weight, rtol=0, atol=0, msg=f"{mode} {name} {step}")
    assert all(run.num_steps == STEPS_IN_HOOKS * len(params) for run in runs)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, soak_only(2), soak_only(4)])
def test_b29_adamw_and_its_schedule_in_hooks_are_normal_training(ranks: int) -> None:
    run_on_ranks(_step_in_hooks, ranks)


class Odd(nn.Module):
    """A model with a frozen weight, an unused weight, a weight shared by two layers, and an expert's weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.frozen, self.unused, self.first, self.second, self.expert = (nn.Linear(4, 4, bias=False) for _ in range(5))
        self.frozen.weight.requires_grad_(False)
        self.second.weight = self.first.weight
        mark_expert(self.expert.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x and the returned tensor: [N, 4], fp32."""
        return self.expert(self.second(torch.tanh(self.first(self.frozen(x)))))


def _meet_odd_ones(mode: dict[str, Any]) -> None:
    model, counted, zeros = wrap(Odd(), mode), Counted(), []
    params = trained(model)
    assert list(params) == ["unused.weight", "first.weight", "expert.weight"]
    for name, param in params.items():
        model.register_post_accumulate_grad_hook(param, counted.on_param(name))
    model.register_bucket_ready_hook(counted.on_bucket)
    model.register_post_backward_hook(params.values(), counted.after)
    model.register_post_accumulate_grad_hook(
        params["unused.weight"], lambda owned: zeros.append(bool(owned.grad.any()))
    )
    for _ in range(2):
        model.zero_grad_buffer()
        model(torch.ones(2, 4)).sum().backward()
        model.finish_grad_sync()
        assert counted.take() == once(params), mode
    assert zeros == [False, False]
    with pytest.raises(ValueError, match=r"does not reduce \(shape \(4, 4\)\)"):
        model.register_post_accumulate_grad_hook(model.module.frozen.weight, print)
    with pytest.raises(ValueError, match="owned_shard was given a parameter .* not wrapped"):
        model.owned_shard(model.module.frozen.weight)


def test_b4_unused_frozen_tied_and_experts_parameters_have_their_hooks() -> None:
    run_on_ranks(in_each_mode, 2, _meet_odd_ones, {"expert_model_parallel_size": 2})


def _change_gradients(mode: dict[str, Any]) -> None:
    def halve(owned: nn.Parameter, *, by_data: bool) -> None:
        assert owned.grad is not None
        # Torch's version counter does not record writes to `.data`.
        (owned.grad.data if by_data else owned.grad).mul_(0.5)

    def double(bucket: ReadyBucket) -> None:
        bucket.grad.mul_(2.0)
        (state,) = bucket.states
        assert torch.equal(state.master, bucket.shard) and state.settings == {"lr": 0.5}

    for dtype, doubles in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        plain, model = (wrap(tiny_model(dtype), mode) for _ in range(2))
        expected, ours = Kept(plain), Kept(model)
        for param in trained(model).values():
            model.register_post_accumulate_grad_hook(param, partial(halve, by_data=not doubles))
        if doubles:
            model.register_bucket_ready_hook(double)
        for each in (plain, model):
            backward(each, 0)
        assert expected.grads.keys() == ours.grads.keys()
        for place, grad in expected.grads.items():
            # Values that the hook leaves in the 16-bit gradient are passed on with that rounding.
            wanted = grad.to(dtype).to(torch.float32) * (1.0 if doubles else 0.5)
            assert torch.equal(ours.grads[place], wanted), (mode, dtype)
        model.zero_grad_buffer()
        assert not ours.grads and ours.num_begun == 2
        model.set_consumer(None)


@pytest.mark.slow
def test_what_a_hook_does_to_a_gradient_is_what_an_optimizer_sees() -> None:
    run_on_ranks(in_each_mode, 2, _change_gradients)


def _fail_in_a_hook(mode: dict[str, Any]) -> None:
    plain, model = (wrap(tiny_model(), mode) for _ in range(2))
    counted, fails, seen = Counted(), [True], list[torch.Tensor]()
    for each in (model, plain):
        each.register_bucket_ready_hook(lambda bucket: seen.append(bucket.grad.clone()))

    def fail(owned: nn.Parameter) -> None:
        if fails[0]:
            raise KeyError("in a hook")

    params = trained(model)
    model.register_post_accumulate_grad_hook(params["0.weight"], fail)
    model.register_post_backward_hook(params.values(), counted.after)
    for step in range(2):
        fails[0] = True
        # Other ranks may learn of the error before their own hooks run.
        with pytest.raises((KeyError, RemoteRankError)):
            backward(model, step)
        if "release_gradients" not in mode:
            # Otherwise an optimizer would step gradients that only some hooks have seen.
            with pytest.raises(RuntimeError, match="interrupted the hooks on reduced gradients"):
                model.finish_grad_sync()
        model.reset_iteration()
        assert not counted.take()
        fails[0] = False
        seen.clear()
        backward(model, step)
        backward(plain, step)
        ours, theirs = seen[: len(seen) // 2], seen[len(seen) // 2 :]
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), mode
        assert counted.take() == Counter({("backward", name): 1 for name in params})


@pytest.mark.slow
def test_b32_an_error_in_a_hook_leaves_no_trace_after_reset_iteration() -> None:
    run_on_ranks(in_each_mode, 2, _fail_in_a_hook)


def _wait_for_tokens(mode: dict[str, Any]) -> None:
    seen: list[torch.Tensor] = []
    model = wrap(tiny_model(), mode, calculate_per_token_loss=True)
    model.register_bucket_ready_hook(lambda bucket: seen.append(bucket.grad.clone()))
    model.zero_grad_buffer()
    model(microbatches(0)[0]).square().sum().backward()
    model.finish_grad_sync()
    assert not seen
    model.reset_iteration()
    model(microbatches(0)[0]).square().sum().backward()
    finalize_model_grads([model], torch.tensor(8 + dist.get_rank()))
    flats = [buffer.grad_of(bucket) for buffer in model.all_buffers for bucket in range(len(buffer.owned_spans()))]
    found = torch.cat(sorted(seen, key=lambda flat: flat.sum().item()))
    assert torch.equal(found, torch.cat(sorted(flats, key=lambda flat: flat.sum().item()))), mode
    assert found.any()


def test_hooks_see_what_is_divided_by_the_tokens() -> None:
    run_on_ranks(in_each_mode, 2, _wait_for_tokens)


def _wait_for_tensor_parallel_ranks(mode: dict[str, Any]) -> None:
    rank = parallel_state.get_tensor_model_parallel_rank()
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    mark_partial_gradient(module[0].weight)
    model, seen = wrap(module, mode), dict[str, float]()
    for name, param in trained(model).items():

        def note(owned: nn.Parameter, name: str = name) -> None:
            assert owned.grad is not None
            seen[name] = float(owned.grad.sum())

        model.register_post_accumulate_grad_hook(param, note)
    model.zero_grad_buffer()
    sums = [param.sum() * (rank + 1) for param in module.parameters()]
    (sums[0] + sums[1]).backward()
    finalize_model_grads([model])
    numel = {name: model.owned_shard(param).numel() for name, param in trained(model).items()}
    assert seen == {"0.weight": 3.0 * numel["0.weight"], "1.weight": (rank + 1.0) * numel["1.weight"]}, mode


def test_hooks_see_the_sum_over_tensor_parallel_ranks() -> None:
    run_on_ranks(in_each_mode, 4, _wait_for_tensor_parallel_ranks, {"tensor_model_parallel_size": 2})
