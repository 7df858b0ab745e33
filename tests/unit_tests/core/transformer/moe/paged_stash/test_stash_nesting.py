"""A stash combined with other users of autograd's saved-tensor hooks, and with forward passes that have no backward."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from megatron.core.transformer.moe.paged_stash import Counter, PagedStash, paged_stash_reset
from tests.unit_tests.core.transformer.moe.paged_stash.expert_models import (
    HIDDEN,
    LIVE,
    C,
    Experts,
    MarkedExperts,
    Model,
    assert_same,
    gradients,
    inputs,
    is_empty_sync,
    loss_of,
    make_stash,
)


def planned_pages(stash: PagedStash) -> int:
    return stash.pool.occupancy_sync().counters[Counter.PLANNED_PAGES]


def _save_products(_context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    saved = operator in (torch.ops.aten._grouped_mm.default, torch.ops.aten.mul.Tensor)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = partial(create_selective_checkpoint_contexts, _save_products)


@pytest.mark.parametrize(
    "around",
    [
        partial(checkpoint, use_reentrant=True),
        partial(checkpoint, use_reentrant=False),
        partial(checkpoint, use_reentrant=False, context_fn=SELECTIVE),
    ],
)
def test_inside_a_checkpoint_nothing_is_stashed(around: Callable[..., Tensor]) -> None:
    stash = make_stash()
    model = Model(stash.context, around=around)
    for _ in range(2):
        assert_same(gradients(model), gradients(Model(None)))
        assert planned_pages(stash) == 0 and is_empty_sync(stash)
        stash.reset()


class CheckpointedExperts(Experts):
    """Experts whose forward is recomputed in backward. They save only x and probs."""

    use_reentrant = False

    def forward(self, x: Tensor, probs: Tensor, _group: Any = None) -> Tensor:
        return checkpoint(super().forward, x, probs, use_reentrant=self.use_reentrant)


class ReentrantExperts(CheckpointedExperts):
    use_reentrant = True


class DroppingExperts(Experts):
    """Experts with dropout. Recomputation must draw the same random numbers, whatever was drawn in between."""

    def forward(self, x: Tensor, probs: Tensor, _group: Any = None) -> Tensor:
        def dropped(x: Tensor) -> Tensor:
            return nn.functional.dropout(x, 0.3).tanh()

        return super().forward(checkpoint(dropped, x, use_reentrant=False), probs)


@pytest.mark.parametrize("kind", [CheckpointedExperts, ReentrantExperts, DroppingExperts])
def test_a_checkpoint_inside_runs_again_on_what_the_stash_gives_back(kind: type[Experts]) -> None:
    stash = make_stash()
    expected = gradients(Model(None, kind=kind))
    assert_same(gradients(Model(stash.context, kind=kind)), expected)
    if kind is not DroppingExperts:
        assert_same(gradients(Model(None)), expected)
    assert planned_pages(stash) > 0 and is_empty_sync(stash)


def test_hooks_around_see_what_the_stash_leaves_and_hooks_inside_win() -> None:
    expected, stash, seen = gradients(Model(None)), make_stash(), []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tuple(tensor.shape))
        return tensor.detach().clone()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        assert_same(gradients(Model(stash.context)), expected)
    assert planned_pages(stash) > 0 and is_empty_sync(stash)
    assert any(len(shape) == 3 for shape in seen) and (C, HIDDEN) not in seen

    class HookedExperts(Experts):
        def forward(self, x: Tensor, probs: Tensor, _group: Any = None) -> Tensor:
            with save_on_cpu():
                y = super().forward(x, probs)
            return y * 1.0 * probs[:, None].detach()

    stash.reset()
    assert_same(gradients(Model(stash.context, kind=HookedExperts)), gradients(Model(None, kind=HookedExperts)))
    assert is_empty_sync(stash)


@pytest.mark.parametrize("kind", [Experts, MarkedExperts])
@pytest.mark.parametrize("frozen", ["weights", "input", "first"])
def test_frozen_experts_and_inputs_without_grad(kind: type[Experts], frozen: str) -> None:
    def run(stash: PagedStash | None) -> list[Tensor]:
        model = Model(stash and stash.context, kind=kind)
        names = {"weights": "weight", "input": "", "first": "weight1"}[frozen]
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not names or names not in name)
        hidden, probs = inputs()
        hidden.requires_grad_(frozen != "input")
        probs.requires_grad_(frozen == "weights")
        loss_of(model(hidden, probs)).backward()
        return [one.grad for one in (hidden, probs, *model.parameters()) if one.grad is not None]

    stash = make_stash(85, 40 if kind is MarkedExperts else 400)  # with 125 pages some groups drop tensors
    expected = run(None)
    for _ in range(2):
        assert_same(run(stash), expected)
        assert planned_pages(stash) > 0 and is_empty_sync(stash)
        stash.reset()


@pytest.mark.slow
def test_a_second_backward_through_one_graph_gives_the_same() -> None:
    stash = make_stash(90, 30)
    expected = gradients(Model(None, kind=MarkedExperts))[2:]
    model = Model(stash.context, kind=MarkedExperts)
    loss = loss_of(model(*inputs()))
    for _ in range(2):
        loss.backward(retain_graph=True)
        assert_same([one.grad for one in model.parameters()], expected)
        model.zero_grad()
        stash.reset()  # restored tensors remain valid
    del loss
    gc.collect()
    assert is_empty_sync(stash)


def test_second_derivatives_pass_through_stashed_tensors() -> None:
    def run(stash: PagedStash | None) -> Tensor:
        x = torch.linspace(-1, 1, C * HIDDEN).reshape(C, HIDDEN).requires_grad_()
        context = Model(stash and stash.context).layers[0].context
        with context("one", C, max_rows=C):
            y = (x * x).exp().sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    assert torch.equal(run(make_stash()), run(None))


def test_runs_without_backward_between_leave_pages_and_order_alone() -> None:
    stash = make_stash()
    model, expected = Model(stash.context), gradients(Model(None))
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
        hidden, probs = inputs()
        with mode():
            model(hidden.detach(), probs.detach())
        output = model(hidden, probs)
        held = planned_pages(stash)
        with mode():
            model(hidden.detach(), probs.detach())
        assert planned_pages(stash) == held
        loss_of(output).backward()
        assert_same([one.grad for one in (hidden, probs, *model.parameters())], expected)
        model.zero_grad()
        assert not stash.order.departed or stash.order.events == ()
        stash.reset()
    assert [str(event) for event in stash.order.events] == ["F 0.0", "F 1.0", "F 2.0", "B 2.0", "B 1.0", "B 0.0"]


def test_inference_mode_and_default_devices_leave_a_pool_of_use() -> None:
    with torch.inference_mode(), torch.device("meta"):
        stash = make_stash(85, 400)
    model, tensors = Model(stash.context), inputs()
    with torch.device("meta"):
        loss_of(model(*tensors)).backward()
    assert_same([one.grad for one in (*tensors, *model.parameters())], gradients(Model(None)))
    assert planned_pages(stash) > 85 and is_empty_sync(stash)


def test_two_stashes_in_one_graph_are_apart() -> None:
    first, second = make_stash(), make_stash()
    nested = Model(first.context)
    nested.layers[1].context = second.context
    assert_same(gradients(nested), gradients(Model(None)))
    assert planned_pages(first) == 2 * planned_pages(second) > 0
    assert is_empty_sync(first) and is_empty_sync(second)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_weight_with_as_many_rows_as_the_buffers_is_left_alone(is_known: bool) -> None:
    weight = nn.Parameter(torch.randn(C, C), requires_grad=is_known)  # backward needs all of it, not only the live rows

    def run(stash: PagedStash | None) -> list[Tensor]:
        used = weight.double().float()  # no longer a Parameter, and if frozen not part of a graph
        x = torch.randn(C, C, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with Model(stash and stash.context).layers[0].context("one", LIVE, max_rows=C) as group:
            if group is not None and not is_known:
                group.keep(used)
            y = (x[:, :] * 1.0).exp() @ used.t()
        y[:LIVE].sum().backward()
        return [x.grad[:LIVE]]

    stash = make_stash()
    assert_same(run(stash), run(None))
    assert planned_pages(stash) > 0


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_layer_with_the_context_inside_gives_the_same(backend: str) -> None:
    class Exponentials(Experts):
        def forward(self, x: Tensor, probs: Tensor, group: Any = None) -> Tensor:
            return x.exp() * probs[:, None]

    def compiled(layer: nn.Module, *tensors: Tensor) -> Tensor:
        result: Tensor = torch.compile(layer, backend=backend)(*tensors)
        return result

    stash = make_stash()
    expected = gradients(Model(None, kind=Exponentials))
    for _ in range(2):
        assert_same(gradients(Model(stash.context, kind=Exponentials, around=compiled)), expected)
        assert planned_pages(stash) > 0
        stash.reset()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_compiled_function_serves_several_contexts(backend: str) -> None:
    weights = [torch.randn(HIDDEN, HIDDEN) for _ in range(3)]
    x = inputs()[0]
    stash = make_stash()

    def layer(number: int, rows: Tensor) -> Tensor:
        with stash.context(f"layer {number}", LIVE, max_rows=C):
            return (rows @ weights[number]).sigmoid()

    def run(layer: Callable[[int, Tensor], Tensor]) -> list[Tensor]:
        rows: Tensor = x
        for number in range(3):  # a different number makes the compiler treat it as symbolic
            rows = layer(number, rows)
        (grad,) = torch.autograd.grad(rows[:LIVE].square().sum(), x)
        assert planned_pages(stash) > 0 and not stash.is_void_sync()
        stash.reset()
        return [grad[:LIVE]]

    expected = run(layer)
    compiled = torch.compile(layer, backend=backend)
    for _ in range(2):
        assert_same(run(compiled), expected)


def test_a_disabled_step_stashes_nothing() -> None:
    stash = make_stash()
    for enabled in (False, True):
        paged_stash_reset(enabled, manager=stash)
        assert_same(gradients(Model(stash.context)), gradients(Model(None)))
        assert (planned_pages(stash) > 0) == enabled
