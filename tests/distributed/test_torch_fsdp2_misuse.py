"""TorchFullyShardedDataParallel behaves like plain data parallelism after errors and after external parameter changes.

test_torch_fsdp2 covers correct use.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from megatron import torch_range
from megatron.core.distributed.torch_fsdp2_state import check_torch
from megatron.core.group_collectives import RemoteRankError
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.training.arguments import parse_args, validate_args
from megatron.training.command_line.errors import CommandLineError
from tests.distributed.fsdp2_runs import FSDP2, WORDS, Loss, Net, Run, loss_of_words, train_losses, wrap_net
from tests.harness import run_on_ranks

KEPT = replace(FSDP2, reshard_after_forward=False)


def _words(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, WORDS, (4, 5), generator=torch.Generator().manual_seed(seed + dist.get_rank()))


def _backward(wrapped: Any, seed: int = 0) -> None:
    loss_of_words(wrapped, torch.Generator().manual_seed(seed + dist.get_rank())).backward()


@torch.no_grad()
def _evaluate(wrapped: Any) -> torch.Tensor:
    return wrapped(_words())


def _adam(wrapped: Any) -> Any:
    return get_megatron_optimizer(OptimizerConfig(lr=0.1, clip_grad=0.0), [wrapped])


class _BrokenError(Exception):
    """An error in a user's code."""


def _raise(*unused: Any) -> None:
    raise _BrokenError


def _grads(wrapped: Any) -> list[torch.Tensor]:
    return [buffer.grad_data.clone() for buffer in wrapped.all_buffers]


def _after_errors() -> None:
    wrapped = wrap_net(Net())
    # A reset also works before any step.
    wrapped.reset_iteration()
    wrapped.zero_grad_buffer()
    _backward(wrapped, 1)
    wrapped.finish_grad_sync()
    expected = _grads(wrapped)

    def left_out() -> None:
        with wrapped.no_sync():
            _backward(wrapped)

    def broken() -> None:
        hook = wrapped.module.layers[1].register_full_backward_hook(_raise)
        with pytest.raises(_BrokenError):
            _backward(wrapped)
        hook.remove()

    def broken_early() -> None:
        with wrapped.accumulate():
            broken()

    for leave in (left_out, broken, broken_early):
        for begin in (wrapped.reset_iteration, wrapped.zero_grad_buffer):
            wrapped.zero_grad_buffer()
            leave()
            if leave is not left_out:
                wrapped.reset_iteration()
            begin()
            _backward(wrapped, 1)
            wrapped.finish_grad_sync()
            assert all(map(torch.equal, _grads(wrapped), expected))


def test_gradients_of_an_iteration_that_broke_off_are_forgotten() -> None:
    run_on_ranks(_after_errors, 2)


def _after_evaluation(config: Any) -> None:
    wrapped, other = wrap_net(Net(), config), wrap_net(Net(), config)
    _evaluate(wrapped)
    for params in (wrapped.module.parameters(), wrapped.parameters()):
        assert all(isinstance(param, DTensor) for param in params)
    # Also between forward and backward.
    loss = loss_of_words(wrapped, torch.Generator().manual_seed(0))
    assert not all(isinstance(param, DTensor) for param in wrapped.module.parameters())
    assert list(map(id, wrapped.parameters())) == list(map(id, other_order(wrapped)))
    gathered = wrapped.module.table.weight
    assert isinstance(wrapped.owned_shard(gathered), DTensor)
    with pytest.raises(ValueError, match=r"owned_shard was given a parameter of shape \(3,\) that is not wrapped"):
        wrapped.owned_shard(nn.Parameter(torch.zeros(3)))
    loss.backward()
    wrapped.reset_iteration()
    for each in (wrapped, other):
        with torch.no_grad():
            for param in each.parameters():
                param.mul_(0.5)
        if each is wrapped:
            _evaluate(wrapped)
    assert torch.equal(_evaluate(wrapped), _evaluate(other))


def other_order(wrapped: Any) -> list[nn.Parameter]:
    """Returns the modules' parameters between passes, which are the shards."""
    wrapped.start_param_sync()
    return list(wrapped.module.parameters())


@pytest.mark.parametrize("config", [FSDP2, KEPT], ids=["freed", "kept"])
def test_parameters_after_a_forward_are_the_shards(config: Any) -> None:
    run_on_ranks(_after_evaluation, 2, config)


def _assigned(of_part: bool) -> None:
    net = Net()
    net.out.weight.requires_grad_(False)
    net.layers[0][0].bias.requires_grad_(False)
    wrapped, seen = wrap_net(net), []
    params = list(wrapped.parameters())
    wrapped.register_post_accumulate_grad_hook(wrapped.module.layers[0][0].weight, seen.append)
    for target in (wrapped.module.layers[0], wrapped.module.out) if of_part else (wrapped,):
        target.load_state_dict({name: value.clone() + 1 for name, value in target.state_dict().items()}, assign=True)
    assert all(a is b for a, b in zip(params, wrapped.parameters(), strict=True))
    held = {one.range.name: one for one in wrapped.shard_weights()}
    plain = dict(Net().named_parameters())
    for name in ("out.weight", "layers.0.0.bias", "layers.0.0.weight"):
        part = plain[name].detach().view(-1)[held[name].range.start :][: held[name].values.numel()]
        assert torch.equal(held[name].values, part + 1)
    optimizer = _adam(wrapped)
    optimizer.zero_grad()
    _backward(wrapped)
    wrapped.finish_grad_sync()
    optimizer.step()
    assert len(seen) == 1 and seen[0] is wrapped.module.layers[0][0].weight
    with pytest.raises(ValueError, match=r"given .*table\.weight as a plain tensor of shape \(11, 6\)"):
        wrapped.load_state_dict(Net().state_dict(), assign=of_part)


@pytest.mark.parametrize("of_part", [False, True])
def test_assigned_state_is_taken_over_also_of_frozen_parameters_and_of_parts(of_part: bool) -> None:
    run_on_ranks(_assigned, 2, of_part)


def _written() -> None:
    for config in (FSDP2, KEPT):
        net = Net()
        net.out.weight.requires_grad_(False)
        wrapped = wrap_net(net, config)
        shards = dict(wrapped.module.named_parameters())
        # Stays gathered after the forward, since no backward follows.
        assert wrapped(_words()).abs().sum() > 0
        with torch.no_grad():
            shards["out.weight"].zero_()
        assert wrapped(_words()).abs().sum() == 0
        wrapped.module.layers[0](torch.ones(2, 6))
        with torch.no_grad():
            shards["layers.0.2.weight"].zero_()
            shards["layers.0.2.bias"].zero_()
        assert wrapped.module.layers[0](torch.ones(2, 6)).abs().sum() == 0
        wrapped = wrap_net(Net(), config)
        shards = dict(wrapped.module.named_parameters())
        _evaluate(wrapped)
        shards["out.weight"].to_local().data.mul_(0)
        assert _evaluate(wrapped).abs().sum() == 0


def test_b36_writes_to_frozen_shards_and_before_a_part_is_called_are_seen() -> None:
    run_on_ranks(_written, 2)


def _freeze(net: Any) -> None:
    net.out.weight.requires_grad_(False)


def _unfreeze(net: Any) -> None:
    net.table.weight.requires_grad_(True)


def _replace(net: Any) -> None:
    net.out.weight = nn.Parameter(torch.zeros(2, 2))


def _other_data(net: Any) -> None:
    net.out.weight.data = net.out.weight.data.clone()


def _add(net: Any) -> None:
    net.extra = nn.Parameter(torch.zeros(2))


def _remove(net: Any) -> None:
    del net.unused


CHANGES = {
    "out.weight was frozen": _freeze,
    "table.weight was unfrozen": _unfreeze,
    "out.weight was replaced": _replace,
    "out.weight was moved or assigned other data": _other_data,
    "extra was added": _add,
    "unused.weight was removed": _remove,
}


def _changed(change: Callable[[Any], None]) -> str:
    net = Net()
    net.table.weight.requires_grad_(False)
    wrapped = wrap_net(net)
    _backward(wrapped)
    wrapped.finish_grad_sync()
    wrapped.zero_grad_buffer()
    # On one rank only; the other ranks must not wait for it.
    if dist.get_rank() == 0:
        change(net)
    with pytest.raises(ValueError if dist.get_rank() == 0 else RemoteRankError) as error:
        wrapped.finish_grad_sync()
    return str(error.value)


@pytest.mark.parametrize("words", CHANGES)
def test_what_was_changed_after_wrapping_is_named_on_all_ranks(words: str) -> None:
    for text in run_on_ranks(_changed, 2, CHANGES[words]):
        assert f"parameter {words} after the module was wrapped" in text


def _no_zero() -> None:
    wrapped = wrap_net(Net())
    _backward(wrapped)
    wrapped.finish_grad_sync()
    with pytest.raises(RuntimeError, match="was produced after finish_grad_sync: call zero_grad_buffer"):
        _backward(wrapped)
    wrapped.zero_grad_buffer()
    _backward(wrapped)
    wrapped.finish_grad_sync()


def test_a_backward_after_the_end_of_an_iteration_is_refused() -> None:
    run_on_ranks(_no_zero, 2)


def _step_alone() -> None:
    wrapped = wrap_net(Net())
    optimizer = _adam(wrapped)
    optimizer.zero_grad()
    assert optimizer.step()[0]
    with pytest.raises(RuntimeError, match="was produced after finish_grad_sync: call zero_grad_buffer"):
        _backward(wrapped)
    # No reductions are left to agree on.
    wrapped.finish_grad_sync()
    optimizer.zero_grad()
    _backward(wrapped)
    wrapped.finish_grad_sync()
    assert optimizer.step()[0]


def test_a_step_without_gradients_ends_the_iteration() -> None:
    run_on_ranks(_step_alone, 2)


def _replaced_gradients() -> None:
    wrapped, seen = wrap_net(Net()), []

    def put_zeros(owned: nn.Parameter) -> None:
        owned.grad = owned.grad * 0

    def put_ones(bucket: Any) -> None:
        seen.append(bucket.grad.abs().sum().item())
        bucket.grad.fill_(1)

    for param in wrapped.parameters():
        wrapped.register_post_accumulate_grad_hook(param, put_zeros)
    wrapped.register_bucket_ready_hook(put_ones)
    wrapped.zero_grad_buffer()
    _backward(wrapped)
    wrapped.finish_grad_sync()
    assert len(seen) == 4 and not any(seen)
    assert all((param.grad.to_local() == 1).all() for param in wrapped.parameters())


def test_a_gradient_that_a_hook_replaces_is_what_later_hooks_see() -> None:
    run_on_ranks(_replaced_gradients, 2)


def _nested() -> None:
    wrapped = wrap_net(Net())
    wrapped.zero_grad_buffer()
    with wrapped.no_sync():
        with wrapped.no_sync():
            _backward(wrapped)
        with wrapped.accumulate():
            _backward(wrapped)
        assert not any(flat.any() for flat in _grads(wrapped))
    _backward(wrapped)
    wrapped.finish_grad_sync()
    three = _grads(wrapped)
    wrapped.zero_grad_buffer()
    _backward(wrapped)
    wrapped.finish_grad_sync()
    for summed, once in zip(three, _grads(wrapped), strict=True):
        torch.testing.assert_close(summed, once * 3)


def test_no_sync_inside_no_sync_does_not_end_it() -> None:
    run_on_ranks(_nested, 2)


class _OnlyFirst(nn.Module):
    """bf16 layers below an fp32 head; one layer never runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.bfloat16) for _ in range(2))
        self.out = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layers[0](x).float())


def _unused_in_no_sync() -> None:
    wrapped = wrap_net(_OnlyFirst())
    for _ in range(2):
        wrapped.zero_grad_buffer()
        with wrapped.no_sync():
            wrapped(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        wrapped(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        wrapped.finish_grad_sync()
        grads = {name: param.grad._local_tensor.abs().sum().item() for name, param in wrapped.module.named_parameters()}
        assert [name for name, total in grads.items() if not total] == ["layers.1.weight", "layers.1.bias"]


def test_a_unit_that_never_ran_has_zeros_also_after_no_sync() -> None:
    run_on_ranks(_unused_in_no_sync, 2)


def _one_rank_fails(where: str) -> list[Loss]:
    wrapped = wrap_net(Net())
    optimizer, fails = _adam(wrapped), dist.get_rank() == 1
    hook = wrapped.register_bucket_ready_hook(_raise) if fails and where == "hook" else None
    optimizer.zero_grad()
    _backward(wrapped)
    with pytest.raises(_BrokenError if fails else RemoteRankError):
        if fails and where == "end":
            _raise()
        wrapped.finish_grad_sync()
        optimizer.step()
    if hook is not None:
        # Otherwise it would step gradients that only some hooks have seen.
        for go_on in (wrapped.finish_grad_sync, optimizer.step):
            with pytest.raises(RuntimeError, match="interrupted the hooks on reduced gradients"):
                go_on()
        hook.remove()
    wrapped.reset_iteration()
    return train_losses(wrapped)


def _fails_and_not(where: str) -> tuple[list[Loss], list[Loss]]:
    return _one_rank_fails(where), train_losses(wrap_net(Net()))


@pytest.mark.parametrize("where", ["end", "hook"])
def test_where_one_rank_fails_the_others_are_told(where: str) -> None:
    for after, plain in run_on_ranks(_fails_and_not, 2, where):
        assert after == plain


def _refusals() -> None:
    empty = Net()
    empty.extra = nn.Parameter(torch.zeros(0, 3))
    with pytest.raises(ValueError, match=r"parameter extra has shape \(0, 3\), without elements"):
        wrap_net(empty)
    # A list or dict of parameters has no forward, so nothing would gather it.
    for collection in (nn.ParameterList([torch.ones(4)]), nn.ParameterDict({"gain": torch.ones(4)})):
        mixed = Net()
        mixed.lists = nn.ModuleDict({"a": nn.ModuleList([collection.to(torch.bfloat16)])})
        with pytest.raises(ValueError, match=r"bfloat16 among others that are float32.* a separate module"):
            wrap_net(mixed)
    twice = wrap_net(Net()).module
    for config in (FSDP2, None):
        with pytest.raises(ValueError, match=r"table\.weight is a DTensor: .* already sharded"):
            wrap_net(twice, config)
    config = OptimizerConfig(lr=0.1, bf16=True, use_precision_aware_optimizer=True, main_params_dtype="fp16")
    with pytest.raises(ValueError, match=r"main_params_dtype is fp16 with use_torch_fsdp2"):
        get_megatron_optimizer(config, [wrap_net(Net().bfloat16())])


def test_what_would_go_wrong_later_is_refused_in_words() -> None:
    run_on_ranks(_refusals, 2)


@pytest.mark.parametrize(
    "flags",
    [["--fine-grained-activation-offloading", "--offload-modules", "moe_act"], ["--cpu-offloading-num-layers", "1"]],
)
def test_offloaded_activations_are_refused_by_both_flags(flags: list[str]) -> None:
    argv = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --micro-batch-size 1 --train-iters 1 --lr 0.1"
    argv += " --position-embedding-type rope --seq-length 8 --mock-data --use-torch-fsdp2"
    with pytest.raises(CommandLineError, match=f"{flags[0]}.* and --use-torch-fsdp2 is given"):
        validate_args(parse_args(argv=[*argv.split(), *flags]))


def _on_older_torch() -> tuple[list[Loss], list[Loss]]:
    plain = train_losses(wrap_net(Net()))
    newer = ("reset_iter_state", "set_reduce_scatter_unused_params")
    for name in newer:
        delattr(FSDPModule, name)
    wrapped = wrap_net(Net())
    _backward(wrapped)
    hook = wrapped.module.layers[1].register_full_backward_hook(_raise)
    with pytest.raises(_BrokenError):
        _backward(wrapped)
    hook.remove()
    wrapped.reset_iteration()
    runs = [Run(Net(), in_backward=chosen) for chosen in (False, True)]
    assert runs[0].step(count=2) == runs[1].step(count=2)
    return plain, train_losses(wrapped)


def _on_too_old_torch() -> None:
    check_torch()
    delattr(FSDPModule, "set_custom_reduce_scatter")
    with pytest.raises(
        ValueError, match=f"no set_custom_reduce_scatter: use_torch_fsdp2 requires torch {torch_range()}"
    ):
        wrap_net(Net())


def test_a_torch_without_what_is_needed_is_refused_by_version() -> None:
    run_on_ranks(_on_too_old_torch, 1)


def test_without_what_torch_2_13_has_new_training_is_the_same() -> None:
    for plain, older in run_on_ranks(_on_older_torch, 2):
        assert older == plain


def _scaled() -> None:
    found = []
    for factor in (1.0, 0.5):
        wrapped = wrap_net(Net())
        wrapped.zero_grad_buffer()
        _backward(wrapped)
        wrapped.finish_grad_sync()
        wrapped.scale_gradients(factor)
        found.append(_grads(wrapped))
    for whole, half in zip(*found, strict=True):
        torch.testing.assert_close(half, whole * 0.5, rtol=0, atol=0)
    assert any(grad.any() for grad in found[0])


def test_reduced_gradients_are_scaled() -> None:
    run_on_ranks(_scaled, 2)
