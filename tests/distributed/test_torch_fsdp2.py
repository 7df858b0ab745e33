"""TorchFullyShardedDataParallel on one module: gradients, loading, errors, hooks and parameters kept gathered.

See TRAPS B27 (ANCHORS, finding 6) and TRAPS B36 (ANCHORS, finding 7). test_torch_fsdp2_training covers the training
program.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.distributed import (
    NonFiniteGradientError,
    TorchFullyShardedDataParallel,
    TorchFullyShardedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.distributed.torch_fsdp2_shards import find_units, repeated_layers
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.param_attributes import mark_expert, mark_partial_gradient, param_facts
from megatron.core.transformer.module import convert_module_to_dtype_except_fp32_marked, mark_keep_in_fp32
from tests.counts import soak_only
from tests.distributed.fsdp2_runs import (
    DETERMINISTIC,
    FSDP2,
    STEPS,
    Counted,
    Loss,
    Net,
    loss_of_words,
    train_losses,
    wrap_net,
)
from tests.harness import run_on_ranks


def _modes(bf16: bool, net: dict[str, bool]) -> list[list[Loss]]:
    configs = [
        None,
        FSDP2,
        replace(FSDP2, reshard_after_forward=False),
        replace(FSDP2, cpu_offload=True),
        replace(FSDP2, forward_prefetch=2, backward_prefetch=2),
    ]

    def build() -> Net:
        made = Net(**net)
        return made.bfloat16() if bf16 else made

    return [train_losses(wrap_net(build(), config), bf16=bf16) for config in configs]


NETS: list[dict[str, bool]] = [{}, {"tied": True}, {"recompute": True}]
# Covers each model, and each number of ranks except four, which adds only ranks.
ALWAYS = [(1, NETS[0]), (2, NETS[1]), (3, NETS[2])]


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, net",
    [case if case in ALWAYS else soak_only(*case) for case in product(range(1, 5), NETS)],
    ids=str,
)
def test_training_has_the_bits_of_ddp(ranks: int, net: dict[str, bool]) -> None:
    for reference, *others in run_on_ranks(_modes, ranks, ranks % 2 == 0, net):
        assert len(set(reference)) == STEPS
        assert all(losses == reference for losses in others)


def _accumulate() -> None:
    for is_reduced in (True, False):
        kept = wrap_net(Net())
        # A user may set this on torch's module directly.
        kept.module.set_reshard_after_backward(False)
        plain = train_losses(wrap_net(Net()), microbatches=2, is_reduced=is_reduced)
        assert train_losses(kept, microbatches=2, is_reduced=is_reduced) == plain


@pytest.mark.slow
def test_b36_parameters_kept_over_microbatches_are_never_those_of_before_an_update() -> None:
    run_on_ranks(_accumulate, 2)


def _foreign_steps(kept: bool, make: Callable[..., torch.optim.Optimizer], options: dict[str, Any]) -> list[float]:
    wrapped = wrap_net(Net())
    wrapped.module.set_reshard_after_backward(not kept)
    optimizer = make(wrapped.parameters(), lr=0.1, **options)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(STEPS):
        # Calls neither finish_grad_sync nor note_update, like an optimizer that does not know the wrapper.
        optimizer.zero_grad()
        loss = loss_of_words(wrapped, generator)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class ByHand:
    """An optimizer that does not derive from a torch class."""

    def __init__(self, params: Any, lr: float) -> None:
        self.params, self.lr = list(params), lr

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for param in self.params:
            if param.grad is not None:
                param.sub_(param.grad, alpha=self.lr)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make, options",
    [(torch.optim.AdamW, {}), (torch.optim.AdamW, {"fused": True}), (ByHand, {})],
    ids=["foreach", "fused", "by hand"],
)
def test_b36_kept_parameters_follow_the_step_of_a_foreign_optimizer(make: Any, options: dict[str, Any]) -> None:
    plain = run_on_ranks(_foreign_steps, 2, False, make, options)
    assert run_on_ranks(_foreign_steps, 2, True, make, options) == plain
    assert len(set(plain[0])) == STEPS


def _loads(assign: bool) -> tuple[bool, bool, list[Loss]]:
    wrapped, other = wrap_net(Net()), wrap_net(Net())
    params = list(wrapped.parameters())
    generator = torch.Generator().manual_seed(3)
    # The root's parameters stay gathered.
    before = loss_of_words(wrapped, generator)
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(2)
    wrapped.load_state_dict({name: value.clone() for name, value in other.state_dict().items()}, assign=assign)
    same = all(a is b for a, b in zip(params, wrapped.parameters(), strict=True))
    generator.manual_seed(3)
    after = loss_of_words(wrapped, generator)
    generator.manual_seed(3)
    is_new = torch.equal(after, loss_of_words(other, generator)) and not torch.equal(before, after)
    return same, is_new, train_losses(wrapped)


@pytest.mark.slow
def test_loaded_values_go_to_where_the_shards_lie_with_assign_too() -> None:
    for (same, is_new, losses), (_, _, plain) in zip(run_on_ranks(_loads, 2, True), run_on_ranks(_loads, 2, False)):
        assert same and is_new
        assert losses == plain


def _hooks() -> None:
    counted = Counted()
    wrapped = counted.watch(Net(), wrap_net)
    names = [name for name, _ in wrapped.module.named_parameters()]
    once = Counter(product(("param", "bucket", "after"), names))
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(3):
        if step == 1:
            wrapped.load_state_dict({n: v.clone() for n, v in wrapped.state_dict().items()}, assign=True)
        wrapped.zero_grad_buffer()
        for earlier in (wrapped.no_sync, wrapped.accumulate):
            with earlier():
                loss_of_words(wrapped, generator).backward()
        assert not counted.seen
        loss_of_words(wrapped, generator).backward()
        finalize_model_grads([wrapped])
        seen = counted.take()
        assert Counter(seen) == once
        # Hooks run from the last layer to the first, then for the root's parameters.
        units = list(dict.fromkeys(name.split(".")[1] for _, name in seen if "layers" in name))
        assert units == ["2", "1", "0"] and seen[-1][0] == "after"


@pytest.mark.parametrize("ranks", [2, soak_only(3)])
def test_b27_hooks_of_all_kinds_run_once_a_step_and_survive_assigned_state(ranks: int) -> None:
    run_on_ranks(_hooks, ranks)


def _converted() -> None:
    plain, wrapped = wrap_net(Net().double()), wrap_net(Net())
    counted, params = Counted(), dict(wrapped.module.named_parameters())
    for name, param in params.items():
        wrapped.register_post_accumulate_grad_hook(param, counted.on_param(name))
    for param in params.values():
        mark_partial_gradient(param)
    stale = get_megatron_optimizer(OptimizerConfig(lr=0.01), [wrapped])
    generator = torch.Generator().manual_seed(dist.get_rank())
    loss_of_words(wrapped, generator).backward()
    wrapped.reset_iteration()
    wrapped.to(torch.float64)
    assert all(a is b for a, b in zip(params.values(), wrapped.module.parameters(), strict=True))
    assert all(param_facts(param).sequence_parallel for param in params.values())
    assert train_losses(wrapped) == train_losses(plain)
    assert Counter(counted.seen) == Counter({("param", name): STEPS for name in params})
    with pytest.raises(ValueError, match=r"was moved or replaced after the optimizer was built"):
        stale.step()


def test_b27_converted_shards_keep_hooks_and_marks_and_an_optimizer_of_before_is_told() -> None:
    run_on_ranks(_converted, 2)


class Scaled(nn.Module):
    """A unit of its own whose parameter and buffer stay fp32 in a bf16 model."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = mark_keep_in_fp32(nn.Parameter(torch.full((4,), 1 + 2**-12)))
        self.register_buffer("count", mark_keep_in_fp32(torch.full((), 257.0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [*, 4], bf16. Returns the same shape, fp32."""
        return x * self.scale


def _scaled_net(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    return convert_module_to_dtype_except_fp32_marked(nn.Sequential(nn.Linear(4, 4), Scaled()), dtype)


def _gradients_after(cast: Callable[[nn.Module], nn.Module]) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    wrapped = cast(wrap_net(_scaled_net(torch.bfloat16)))
    wrapped.zero_grad_buffer()
    wrapped(torch.full((2, 4), 1 + dist.get_rank(), dtype=torch.bfloat16)).square().sum().backward()
    wrapped.finish_grad_sync()
    buffers = [(name, value, value) for name, value in wrapped.named_buffers()]
    full = [(name, p.full_tensor(), p.grad.full_tensor()) for name, p in wrapped.named_parameters()]
    return [*full, *buffers]


CASTS: list[Callable[[nn.Module], nn.Module]] = [
    lambda wrapped: wrapped,
    lambda wrapped: wrapped.bfloat16(),
    lambda wrapped: wrapped.to(torch.bfloat16).to("cpu"),
    lambda wrapped: wrapped.float().bfloat16(),
    lambda wrapped: nn.Sequential(wrapped).bfloat16()[0],
]


def _casts_of_wrapped_models() -> None:
    # The gradients of the scale, in fp64 from rounded inputs and outputs of the linear layer.
    linear, scaled = _scaled_net(torch.bfloat16)
    inputs = [torch.full((2, 4), 1 + rank, dtype=torch.bfloat16) for rank in range(dist.get_world_size())]
    hidden = [linear(x).detach().double() for x in inputs]
    expected = sum((2 * h * h * (1 + 2**-12)).sum(0) for h in hidden) / len(hidden)
    for cast in CASTS:
        found = {name.removeprefix("module."): (value, grad) for name, value, grad in _gradients_after(cast)}
        assert all(value.dtype == torch.float32 for value, _ in found.values())
        assert torch.equal(found["1.scale"][0], scaled.scale) and found["1.count"][0] == 257
        assert torch.equal(found["0.weight"][0], linear.weight.float())
        torch.testing.assert_close(found["1.scale"][1].double(), expected, rtol=1e-6, atol=0)
    for dtype, cast_to, message in (
        (torch.bfloat16, torch.float16, "0.weight is cast to torch.float16 after .* computes in torch.bfloat16"),
        (torch.float32, torch.bfloat16, "0.weight would be torch.bfloat16, 1.scale would be torch.float32"),
    ):
        wrapped = wrap_net(_scaled_net(dtype))
        with pytest.raises(ValueError, match=f"{message}.*: cast the module before"):
            wrapped.to(cast_to)
        assert {param.dtype for param in wrapped.parameters()} == {torch.float32}


def test_casts_of_a_wrapped_16_bit_model_leave_its_shards_and_marked_tensors_in_fp32() -> None:
    run_on_ranks(_casts_of_wrapped_models, 2)


def _stepped(in_hooks: bool) -> list[float]:
    wrapped = wrap_net(Net())
    optimizers = {p: torch.optim.AdamW([wrapped.owned_shard(p)], lr=0.05) for p in wrapped.parameters()}
    schedules = {p: torch.optim.lr_scheduler.StepLR(o, 2) for p, o in optimizers.items()}

    def step(owned: nn.Parameter) -> None:
        optimizers[owned].step()
        schedules[owned].step()
        optimizers[owned].zero_grad()

    if in_hooks:
        for param in optimizers:
            wrapped.register_post_accumulate_grad_hook(param, step)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    # One step more than the schedule takes to lower the rate.
    for _ in range(STEPS):
        wrapped.zero_grad_buffer()
        loss = loss_of_words(wrapped, generator)
        loss.backward()
        wrapped.finish_grad_sync()
        for param in () if in_hooks else optimizers:
            step(param)
        losses.append(loss.item())
    return losses


def _stepped_both_ways() -> tuple[list[float], list[float]]:
    return _stepped(False), _stepped(True)


@pytest.mark.slow
def test_optimizers_that_step_in_hooks_train_as_those_that_step_after() -> None:
    for after, in_hooks in run_on_ranks(_stepped_both_ways, 3):
        assert in_hooks == after and len(set(after)) == STEPS


def _mixed_units() -> list[tuple[str, str, bool]]:
    net = Net()
    net.layers[1][2].double()
    net.layers[2][2].requires_grad_(False)
    for param in net.layers[2].parameters():
        mark_expert(param)
    return [
        (u.name, str(u.kind.dtype), u.kind.is_expert) for u in find_units(net, repeated_layers(net), experts_apart=True)
    ]


def test_units_are_layers_and_what_is_of_another_kind_inside_them() -> None:
    assert _mixed_units() == [
        ("layers.0", "torch.float32", False),
        ("layers.1.2", "torch.float64", False),
        ("layers.1", "torch.float32", False),
        ("layers.2", "torch.float32", True),
        ("", "torch.float32", False),
    ]


def test_a_list_whose_members_are_units_is_none_though_all_of_them_are_of_another_kind() -> None:
    net = Net()
    net.layers.double()
    units = find_units(net, repeated_layers(net), experts_apart=True)
    assert [unit.name for unit in units] == ["layers.0", "layers.1", "layers.2", ""]


def test_members_of_lists_that_nobody_calls_are_no_layers() -> None:
    inner = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    net = nn.ModuleDict({"a": nn.ModuleList([nn.ParameterList([torch.ones(2)]), inner, nn.Linear(2, 2)])})
    units = find_units(net, repeated_layers(net), experts_apart=True)
    assert [unit.name for unit in units] == ["a.1.0", "a.1.1", "a.2", ""]


def test_a_weight_that_two_units_share_is_refused_by_both_names() -> None:
    net = Net()
    net.layers[2][0].weight = net.layers[0][0].weight
    with pytest.raises(ValueError, match=r"parameter layers\.2\.0\.weight is shared with layers\.0\.0\.weight"):
        find_units(net, repeated_layers(net), experts_apart=False)


def _chosen_units() -> None:
    plain, net = train_losses(wrap_net(Net())), Net()
    small = [f"layers.{layer}.{place}" for layer in range(3) for place in (0, 2)]
    for module, wanted, is_one, names in (
        (Net(), [nn.Sequential], False, ["layers.0", "layers.1", "layers.2", ""]),
        (Net(), [nn.Embedding, nn.Linear], False, ["table", *small, "out", "unused", ""]),
        (net, [net.layers[1]], False, ["layers.1", ""]),
        (Net(), None, True, [""]),
    ):
        wrapped = TorchFullyShardedDataParallel(DETERMINISTIC, FSDP2, module, wanted, is_one)
        assert [unit.name for unit in wrapped.units] == names
        assert train_losses(wrapped) == plain, names


@pytest.mark.slow
def test_units_are_the_classes_or_modules_that_are_given_and_change_no_bit() -> None:
    run_on_ranks(_chosen_units, 2)


class _Marked:
    """A base class that `_Odd` lists first."""


class _Odd(_Marked, nn.Linear):
    """A module whose first base class is not an nn.Module."""


def _refusals() -> list[str]:
    texts = []
    scalar = Net()
    scalar.extra = nn.Parameter(torch.ones(()))
    stage = ProcessGroupCollection(pp=dist.group.WORLD)
    nan = wrap_net(Net(), replace(FSDP2, check_for_nan_in_grad=True))
    with torch.no_grad():
        nan.module.table.weight._local_tensor.fill_(float("nan"))
    (nan(torch.zeros(2, 2, dtype=torch.int64)).sum() * 1.0).backward()
    half_way = wrap_net(Net())
    with half_way.no_sync():
        half_way(torch.zeros(2, 2, dtype=torch.int64)).sum().backward()
    tries: list[Callable[[], Any]] = [
        lambda: wrap_net(scalar),
        lambda: TorchFullyShardedDataParallel(DETERMINISTIC, FSDP2, nn.Sequential(_Odd(2, 2)), [_Odd]),
        lambda: TorchFullyShardedDataParallel(DETERMINISTIC, FSDP2, Net(), pg_collection=stage),
        lambda: TorchFullyShardedDataParallel(DETERMINISTIC, FSDP2, Net(), [nn.Conv1d]),
        lambda: TorchFullyShardedDataParallelConfig(overlap_grad_reduce=True),
        lambda: TorchFullyShardedDataParallelConfig(data_parallel_sharding_strategy="optim"),
        nan.finish_grad_sync,
        half_way.finish_grad_sync,
    ]
    for attempt in tries:
        with pytest.raises((ValueError, RuntimeError, NonFiniteGradientError)) as error:
            attempt()
        texts.append(str(error.value))
    return texts


def test_what_cannot_work_is_refused_on_all_ranks_in_words() -> None:
    patterns = [
        "parameter extra has shape ()",
        "0 is a _Odd, whose first base class derives from _Marked",
        "pipeline_model_parallel_size is 2 with use_torch_fsdp2",
        "sub_modules_to_wrap is Conv1d: the module contains none",
        "overlap_grad_reduce is True with use_torch_fsdp2",
        "leave out --use-torch-fsdp2 and give --use-distributed-optimizer",
        "gradient is not finite on rank 0: ",
        "the last backward was in no_sync",
    ]
    for texts in run_on_ranks(_refusals, 2):
        for text, pattern in zip(texts, patterns, strict=True):
            assert pattern in text


def _states() -> tuple[list[int], int, int]:
    wrapped = wrap_net(Net())
    shards = [param._local_tensor for param in wrapped.parameters() if isinstance(param, DTensor)]
    flat = wrapped.all_buffers[0]
    return [shard.numel() for shard in shards], flat.param_data.numel(), sum(p.numel() for p in Net().parameters())


def test_ranks_hold_a_share_of_parameters_and_gradients() -> None:
    by_rank = run_on_ranks(_states, 3)
    total = by_rank[0][2]
    assert sum(sum(sizes) for sizes, _, _ in by_rank) == total
    # 17 parameters, each padded by at most 64 elements.
    assert all(held <= total / 3 + 64 * len(sizes) for sizes, held, _ in by_rank)
