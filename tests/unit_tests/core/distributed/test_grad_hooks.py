"""Which hooks fire for a bucket and in which order, and how a bucket is restricted to some parameters."""

import pytest
import torch
from torch import nn

from megatron.core.distributed.grad_hooks import ReadyBucket, RunState, _HookRegistry
from megatron.core.distributed.layout import ParamRange, Span


def parameters(count: int = 4) -> dict[str, nn.Parameter]:
    """Creates parameters of 64 elements, by name."""
    return {f"p{number}": nn.Parameter(torch.full((64,), float(number))) for number in range(count)}


def bucket_of(params: dict[str, nn.Parameter], *names: str) -> ReadyBucket:
    """Builds a bucket of the named parameters. Gradients are 10x the parameters, and each parameter has a run."""
    slices = [ParamRange(name, params[name], Span(64 * place, 64), 0) for place, name in enumerate(names)]
    shard = torch.cat([params[name].detach() for name in names])

    def states() -> list[RunState]:
        return [
            RunState(one.span, {"lr": one.name}, one.view_of(shard), {"m": one.view_of(shard) * 2}) for one in slices
        ]

    return ReadyBucket(" ".join(names), slices, shard, shard * 10, states)


def hooks_of(params: dict[str, nn.Parameter]) -> _HookRegistry:
    """Returns an empty hook registry for the parameters."""
    hooks = _HookRegistry({param: name for name, param in params.items()})
    hooks.begin()
    return hooks


def fire(hooks: _HookRegistry, bucket: ReadyBucket) -> list[ReadyBucket]:
    """Fires the hooks of a bucket as a wrapper that owns the whole bucket does."""
    for one in bucket.slices:
        hooks.fire_param(one.name, one.param)
    return hooks.fire_bucket(bucket)


def test_hooks_fire_by_kind_then_in_the_order_of_registration() -> None:
    params, seen = parameters(3), list[str]()
    hooks = hooks_of(params)
    assert hooks.is_empty
    hooks.register_post_backward_hook([params["p1"], params["p0"]], lambda found: seen.append(f"both {len(found)}"))
    hooks.register_post_backward_hook([params["p2"]], lambda found: seen.append("last"))
    hooks.register_bucket_ready_hook(lambda bucket: seen.append(f"bucket {bucket.name}"))
    removed = hooks.register_bucket_ready_hook(lambda bucket: seen.append("never"))
    hooks.register_bucket_ready_hook(lambda bucket: seen.append("again"))
    for name in ("p1", "p0", "p1"):
        hooks.register_post_accumulate_grad_hook(params[name], lambda p: seen.append(str(int(p[0]))))
    removed.remove()
    assert not hooks.is_empty and not hooks.has_param_hooks("p2")
    for _ in range(2):
        hooks.begin()
        first, second = bucket_of(params, "p2", "p1"), bucket_of(params, "p0")
        # The post-backward hook of p1 and p0 still waits for p0. Hooks of the first bucket fire first.
        assert fire(hooks, first) == []
        assert fire(hooks, second) == [first, second]
        assert seen == ["1", "1", "bucket p2 p1", "again", "last", "0", "bucket p0", "again", "both 2"]
        seen.clear()


def test_a_part_of_a_bucket_is_a_stretch_of_views_with_the_states_of_it() -> None:
    params = parameters(4)
    bucket = bucket_of(params, "p3", "p2", "p1", "p0")
    assert bucket.restricted(["p0", "p1", "p2", "p3"]) == [bucket]
    first, second = bucket.restricted(["p0", "p2", "p3"])
    assert first.params == [params["p3"], params["p2"]] and second.params == [params["p0"]]
    assert second.slices[0].span == Span(0, 64)
    second.grad.fill_(7.0)
    assert torch.equal(bucket.grad[192:], second.grad) and bucket.grad[191] == 10.0
    assert [state.settings["lr"] for state in first.states] == ["p3", "p2"]
    assert [state.span for state in first.states] == [Span(0, 64), Span(64, 64)]
    assert torch.equal(first.states[1].moments["m"], torch.full((64,), 4.0))
    # A rank may own no element of a parameter, or of any parameter.
    empty = [ParamRange(name, params[name], Span(0, 0), 0) for name in ("p1", "p0")]
    nothing = ReadyBucket("nothing", empty, torch.empty(0), torch.empty(0))
    (part,) = nothing.restricted(["p0"])
    assert part.params == [params["p0"]] and part.grad.shape == (0,) and part.states == []


def test_the_states_of_a_part_begin_where_the_part_does() -> None:
    flat = torch.arange(256.0)
    state = RunState(Span(64, 128), {}, flat[64:192], {"m": flat[64:192]})
    found = state.within(Span(128, 128))
    assert found is not None
    assert found.span == Span(0, 64) and torch.equal(found.master, flat[128:192])
    assert torch.equal(found.moments["m"], flat[128:192]) and state.within(Span(192, 64)) is None


def test_a_gradient_that_is_kept_gets_memory_of_its_own_where_it_is_a_part() -> None:
    whole = torch.arange(8.0)
    part = ReadyBucket("a", [], whole[4:], whole[4:])
    kept = part.keep()
    assert kept is part.grad and kept.data_ptr() != whole[4:].data_ptr() and torch.equal(kept, whole[4:])
    assert part.keep() is kept
    own = ReadyBucket("b", [], whole, whole)
    assert own.keep() is whole


def test_b27_hooks_of_parameters_are_taken_over_and_given_back_with_their_handles() -> None:
    params, seen = parameters(2), list[str]()
    handles = [p.register_post_accumulate_grad_hook(lambda p: seen.append(str(int(p[0])))) for p in params.values()]
    hooks = hooks_of(params)
    hooks.adopt()
    for param in params.values():
        param.sum().backward()
    assert seen == [] and hooks.has_param_hooks("p0")
    handles[0].remove()
    added = hooks.register_post_accumulate_grad_hook(params["p1"], lambda p: seen.append("added"))
    fire(hooks, bucket_of(params, "p0", "p1"))
    assert seen == ["1", "added"]
    # Different parameters with the same names.
    others = parameters(2)
    hooks.follow({param: name for name, param in others.items()})
    hooks.give_back()
    assert hooks.is_empty and not params["p1"]._post_accumulate_grad_hooks
    added.remove()
    others["p1"].sum().backward()
    others["p0"].sum().backward()
    assert seen == ["1", "added", "1"]


def test_an_iteration_that_broke_off_leaves_nothing_waiting() -> None:
    params, seen = parameters(2), list[int]()
    hooks = hooks_of(params)
    hooks.register_post_backward_hook(params.values(), lambda found: seen.append(len(found)))
    assert hooks.fire_bucket(bucket_of(params, "p0")) == []
    hooks.begin()
    second = bucket_of(params, "p1")
    assert hooks.fire_bucket(second) == [] and seen == []
    first = bucket_of(params, "p0")
    assert hooks.fire_bucket(first) == [second, first] and seen == [2]


def test_parameters_that_have_no_gradients_here_are_refused() -> None:
    params = parameters(1)
    hooks = hooks_of(params)
    for call in (hooks.register_post_accumulate_grad_hook, hooks.register_post_backward_hook):
        with pytest.raises(ValueError, match=r"a parameter that this wrapper does not reduce \(shape \(3,\)\)"):
            call(nn.Parameter(torch.ones(3)), print)
    with pytest.raises(ValueError, match="no params: pass at least one"):
        hooks.register_post_backward_hook([], print)
