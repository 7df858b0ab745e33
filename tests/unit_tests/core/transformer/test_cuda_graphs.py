"""Modules run from CUDA graphs are bit-identical to eager execution, and slots are returned. Graphs are simulated."""

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.graphs.tape import TapeGraphs
from megatron.core.transformer.cuda_graphs import CudaGraphManager
from megatron.core.transformer.module import run

Call = Callable[..., Any]


class Part(nn.Module):
    """A module with many kinds of outputs: with saved tensors, without gradient, a parameter, an argument, a number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.linear, self.bias = nn.Linear(6, 6), nn.Parameter(torch.randn(6))
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, tables: dict[str, Tensor], scale: float = 1.0) -> tuple[Any, ...]:
        hidden = torch.dropout(self.linear(x).tanh(), 0.5, True) * tables["cos"] * scale
        return hidden, {"best": hidden.argmax(-1)}, self.bias, x, scale, hidden.square().sum(-1)


class Steps:
    """Runs steps of one module, eagerly or from graphs, after a warm-up step."""

    def __init__(self, part: nn.Module) -> None:
        self.step: Call = run
        self.manager = CudaGraphManager(lambda **unused: [self.step()], device=TapeGraphs())
        self.graphed = self.manager.graphed("mlp of layer 1", part)
        self(lambda: None)

    def __call__(self, step: Call) -> Any:
        self.step = step
        return self.manager(data_iterator=None)[0]


def microbatch(part: nn.Module, through: Call, seed: int, needs_grad: bool = True) -> tuple[Tensor, Tensor]:
    """Returns the input, and a loss that uses every output."""
    torch.manual_seed(seed)
    x, tables = torch.randn(4, 6, requires_grad=needs_grad), {"cos": torch.randn(6)}
    hidden, best, bias, same, scale, norm = through(part, x, tables, scale=0.5)
    assert same is x and bias is part.bias and scale == 0.5 and not best["best"].requires_grad
    return x, (hidden * best["best"].unsqueeze(-1) + bias).sum() + norm.sum()


def in_turn(part: nn.Module, through: Call) -> list[Tensor | None]:
    found = [microbatch(part, through, seed, needs_grad=seed > 7) for seed in (7, 8, 9)]
    for _, loss in found:
        loss.backward()
    return [x.grad for x, _ in found]


def one_by_one(part: nn.Module, through: Call) -> list[Tensor | None]:
    grads = []
    for seed in (7, 8, 9):
        x, loss = microbatch(part, through, seed)
        loss.backward()
        grads.append(x.grad)
    return grads


def last_first(part: nn.Module, through: Call) -> list[Tensor | None]:
    found = [microbatch(part, through, seed) for seed in (7, 8, 9)]
    for _, loss in reversed(found):
        loss.backward()
    return [x.grad for x, _ in found]


def without_backward(part: nn.Module, through: Call) -> list[Tensor | None]:
    for seed in (7, 8, 9):
        microbatch(part, through, seed)
    return one_by_one(part, through)


# Passes of a step, and the number of slots: the largest number of calls in flight with the same signature.
PASSES = [(one_by_one, 1), (in_turn, 3), (last_first, 3), (without_backward, 1)]


def assert_equal(first: list[Tensor | None], second: list[Tensor | None]) -> None:
    for one, other in zip(first, second, strict=True):
        assert one is other is None or (one is not None and other is not None and torch.equal(one, other))


@pytest.mark.parametrize(("passes", "num_slots"), PASSES)
def test_gradients_of_replays_add_up_as_those_of_eager_passes(passes: Call, num_slots: int) -> None:
    part, eager = Part(), Part()
    steps = Steps(part)
    for _ in range(3):
        own, expected = steps(lambda: passes(part, steps.graphed)), passes(eager, run)
        assert_equal([*own, *(p.grad for p in part.parameters())], [*expected, *(p.grad for p in eager.parameters())])
        assert (steps.graphed.num_slots, steps.manager.num_graphs) == (num_slots, 2 * num_slots)
    assert part.unused.grad is None


def test_calls_that_no_graph_can_stand_for_run_eagerly() -> None:
    part = Part()
    steps = Steps(part)
    x, tables = torch.randn(4, 6), {"cos": torch.randn(6)}

    def calls() -> None:
        with torch.no_grad():
            steps.graphed(part, x, tables)
        steps.graphed(lambda scale: x, object())
        for rows in range(1, 7):
            steps.graphed(part, x[:1].repeat(rows, 1), tables)
        part.requires_grad_(False)
        steps.graphed(part, x, tables)

    steps(calls)
    assert steps.graphed.num_slots == 4
    steps.graphed(part, x, tables)  # outside a step
    assert steps.graphed.num_slots == 4 and copy.deepcopy(steps.graphed) is run


def test_a_part_that_cannot_be_captured_leaves_no_trace_but_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * float(grad.sum())

    part, eager = Part(), Part()
    steps = Steps(part)

    def reads(x: Tensor, tables: dict[str, Tensor], scale: float) -> Any:
        hidden, *rest = part(x, tables, scale)
        return Reads.apply(hidden), *rest

    def through(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return steps.graphed(reads, *args, **kwargs)

    def eagerly(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        hidden, *rest = eager(*args, **kwargs)
        return Reads.apply(hidden), *rest

    with caplog.at_level(logging.WARNING):
        own, expected = steps(lambda: in_turn(part, through)), in_turn(eager, eagerly)
    assert_equal([*own, *(p.grad for p in part.parameters())], [*expected, *(p.grad for p in eager.parameters())])
    assert len(caplog.records) == 1 and "mlp of layer 1 could not be captured" in caplog.text
    assert list(steps.manager.failures) == ["mlp of layer 1"] and steps.manager.num_graphs == 0


def test_a_second_backward_is_refused_and_new_graphs_follow_a_new_fingerprint() -> None:
    part, given = Part(), [1]
    steps = Steps(part)
    vars(steps.manager)["_fingerprint"] = lambda: given[0]
    steps(lambda: None)

    def twice() -> None:
        _, loss = microbatch(part, steps.graphed, 3)
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()

    counts = []
    for value in (1, 1, 2, 2):
        given[0] = value
        steps(twice if value == 1 else lambda: one_by_one(part, steps.graphed))
        counts.append(steps.manager.num_graphs)
    assert counts == [2, 2, 0, 2]


class Chain:
    """A sequence of layers, each of which is a graphed module that saves its output. through: how to run each layer."""

    def __init__(self, num_parts: int, graphs: TapeGraphs | None = None) -> None:
        torch.manual_seed(3)
        self.parts = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(num_parts)]
        self.manager = CudaGraphManager(lambda **keywords: [keywords["step"]()], device=graphs or TapeGraphs())
        self.through: list[Call] = [
            self.manager.graphed(f"mlp of layer {place}", part) for place, part in enumerate(self.parts, 1)
        ]
        self.manager(data_iterator=None, step=lambda: None)

    def eager(self) -> "Chain":
        """Returns a copy that runs without graphs."""
        other = Chain(0)
        other.parts, other.through = copy.deepcopy(self.parts), [run] * len(self.parts)
        return other

    def __call__(self, x: Tensor, places: Sequence[int] | None = None) -> Tensor:
        for place in range(len(self.parts)) if places is None else places:
            x = self.through[place](self.parts[place], x)
        return x

    def step(self, passes: Callable[["Chain"], Any]) -> list[Tensor | None]:
        """Runs passes as one step, and returns their results and the parameters' gradients."""
        found = self.manager(data_iterator=None, step=lambda: passes(self), forward_step_func=lambda: None)[0]
        return [*found, *(param.grad for part in self.parts for param in part.parameters())]


def inputs(seed: int) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(4, 6, requires_grad=True)


def one_forward_one_backward(chain: Chain) -> list[Tensor | None]:
    """Runs 1F1B as on the first stage of a pipeline, with two microbatches in flight."""
    given = [inputs(seed) for seed in range(5)]
    losses = [chain(given[0]).sum()]
    for place in range(1, 5):
        losses.append(chain(given[place]).square().sum())
        losses[place - 1].backward()
    losses[-1].backward()
    return [x.grad for x in given]


def branches(chain: Chain) -> list[Tensor | None]:
    x = inputs(1)
    hidden = chain(x, [0])
    sum(chain(hidden, [place]).exp().sum() for place in (1, 2)).backward()
    return [x.grad]


def a_part_twice(chain: Chain) -> list[Tensor | None]:
    x = inputs(2)
    chain(x, [0, 1, 1, 2]).sum().backward()
    return [x.grad]


def another_order(chain: Chain) -> list[Tensor | None]:
    given = [inputs(seed) for seed in range(3)]
    for x, places in zip(given, ([0, 1, 2], [2, 0, 1], [1, 2])):
        chain(x, places).sum().backward()
    return [x.grad for x in given]


# Passes of a step, and the number of memory pools: one per microbatch in flight. Some passes need another, because
# they run modules in an order that a single pool does not support.
ORDERS = [(one_forward_one_backward, 2), (branches, 1), (a_part_twice, 2), (another_order, 2)]


@pytest.mark.parametrize(("passes", "num_pools"), ORDERS)
def test_parts_of_one_microbatch_share_a_pool_and_others_do_not(passes: Call, num_pools: int) -> None:
    chain = Chain(3)
    eager = chain.eager()
    for _ in range(3):
        assert_equal(chain.step(passes), eager.step(passes))
        assert chain.manager.num_pools == num_pools


def test_parts_that_share_a_parameter_get_the_sum_of_its_gradients() -> None:
    chain = Chain(2)
    chain.parts[0][0].weight = chain.parts[1][0].weight
    manager = CudaGraphManager(lambda **keywords: [keywords["step"]()], device=TapeGraphs())
    chain.through = [manager.graphed(f"mlp of layer {place}", part) for place, part in enumerate(chain.parts, 1)]
    manager(data_iterator=None, step=lambda: None)
    eager, chain.manager = chain.eager(), manager
    for _ in range(3):
        assert_equal(chain.step(one_forward_one_backward), eager.step(one_forward_one_backward))


def test_a_tape_shows_that_microbatches_in_flight_may_not_share_a_pool() -> None:
    class OnePool(TapeGraphs):
        def new_pool(self) -> Any:
            return vars(self)["_own_pool"]

    chain = Chain(3, OnePool())
    chain.step(one_forward_one_backward)
    assert any(grad is not None and grad.isnan().any() for grad in chain.step(one_forward_one_backward))


def test_a_forward_step_is_a_microbatch_also_where_it_calls_other_parts() -> None:
    chain = Chain(2)
    eager = chain.eager()

    def passes(some: Chain) -> list[Tensor | None]:
        # Uses the forward_step that the schedule receives, as training does.
        given = [inputs(seed) for seed in range(2)]
        losses = [forward_step(some, x, [place]) for place, x in enumerate(given)]
        for loss in losses:
            loss.backward()
        return [x.grad for x in given]

    forward_step: Call = lambda some, x, places: some(x, places).sum()  # noqa: E731

    def in_schedule(some: Chain) -> list[Tensor | None]:
        def schedule(**keywords: Any) -> list[Any]:
            nonlocal forward_step
            forward_step = keywords["forward_step_func"]
            return [passes(some)]

        vars(some.manager)["_run"] = schedule
        found = some.manager(data_iterator=None, forward_step_func=lambda one, x, places: one(x, places).sum())
        return [*found[0], *(param.grad for part in some.parts for param in part.parameters())]

    for _ in range(2):
        assert_equal(in_schedule(chain), in_schedule(eager))
    assert chain.manager.num_pools == 2


def test_a_backward_in_the_order_of_forward_is_refused() -> None:
    chain = Chain(2)

    def passes(some: Chain) -> list[Tensor | None]:
        losses = [some(inputs(1), [place]).sum() for place in (0, 1)]
        losses[0].backward()
        with pytest.raises(RuntimeError, match="layer 2 ran after the backward of mlp of layer 1.*reverse order"):
            losses[1].backward()
        return []

    chain.step(passes)


def test_at_least_one_step_warms_up() -> None:
    with pytest.raises(ValueError, match="cuda_graph_warmup_steps is 0"):
        CudaGraphManager(lambda **_: [], 0, device=TapeGraphs())
