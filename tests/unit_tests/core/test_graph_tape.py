"""The tape simulates the effect of a CUDA graph on a program; other tests rely on it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.graphs.safety import CaptureError, assert_capturable
from megatron.core.graphs.tape import Tape, TapeGraphs


def _on_tape(program: Callable[[], Tensor]) -> tuple[Tape, Tensor]:
    with TapeGraphs().capturing() as tape:
        result = program()
    return tape, result


def test_a_replay_computes_with_the_values_of_the_moment() -> None:
    x, total = torch.ones(3), torch.zeros(3)
    tape, result = _on_tape(lambda: total.add_(x * 2).exp())
    for step in range(1, 4):
        x.fill_(step)
        tape.replay()
    assert torch.equal(total, torch.full((3,), 12.0)) and torch.equal(result, total.exp())


def test_a_capture_leaves_memory_and_random_numbers_as_they_were() -> None:
    x, state = torch.zeros(4), torch.get_rng_state()
    tape, _ = _on_tape(lambda: x.add_(torch.rand(4)).mul_(2))
    assert not x.any() and torch.equal(torch.get_rng_state(), state)
    tape.replay()
    drawn = x.clone()
    torch.set_rng_state(state)
    assert torch.equal(drawn, torch.rand(4) * 2)


def test_what_a_capture_made_is_garbage_until_a_replay() -> None:
    tape, result = _on_tape(lambda: torch.ones(3) + 1)
    assert result.isnan().all()
    tape.replay()
    assert torch.equal(result, torch.full((3,), 2.0))


def test_a_replay_spoils_what_later_captures_of_its_pool_made_and_no_other_memory() -> None:
    graphs, x = TapeGraphs(), torch.ones(3)
    pools = [graphs.new_pool(), graphs.new_pool()]
    captured = []
    for pool in (pools[0], pools[0], pools[1]):
        with graphs.capturing(pool) as tape:
            captured.append((tape, x * 2))
    (first, early), (second, late), (other, apart) = captured
    for tape in (first, second, other):
        tape.replay()
    assert [made.isnan().any().item() for made in (early, late, apart)] == [False, False, False]
    second.replay()
    assert torch.equal(early, x * 2)
    first.replay()
    assert late.isnan().all() and torch.equal(early, x * 2) and torch.equal(apart, x * 2)
    del captured[1], second, late
    first.replay()


def test_a_number_of_the_host_stays_what_it_was() -> None:
    x, factor = torch.ones(2), 3.0
    tape, result = _on_tape(lambda: x * factor)
    factor = 5.0
    tape.replay()
    assert torch.equal(result, x * 3)


def test_what_only_tells_a_layout_is_on_no_tape() -> None:
    x = torch.ones(2)
    tape, result = _on_tape(lambda: torch.full_like(torch.empty_like(x, device="meta"), 2.0, device="cpu") * x)
    x.fill_(3.0)
    tape.replay()
    assert torch.equal(result, torch.full((2,), 6.0))


def test_backward_is_part_of_it_and_views_stay_views() -> None:
    weight, x = torch.randn(3, 3, requires_grad=True), torch.randn(5, 3)

    def program() -> Tensor:
        weight.grad = None
        loss = (x @ weight).t().contiguous()[1].square().sum()
        loss.backward()
        return loss.detach()

    tape, loss = _on_tape(program)
    x.normal_()
    tape.replay()
    grad = weight.grad
    assert grad is not None
    found = loss.clone(), grad.clone()
    assert torch.equal(found[0], program()) and weight.grad is not None and torch.equal(found[1], weight.grad)


class Twice(Tensor):
    """A tensor without memory: additions go to a different tensor, twice, and factors are read on the host."""

    @staticmethod
    def __new__(cls, other: Tensor) -> "Twice":
        made = torch.Tensor._make_wrapper_subclass(cls, other.shape, dtype=other.dtype)
        assert isinstance(made, Twice)
        made.other = other
        return made

    other: Tensor

    # torch's own __init__ rejects our arguments.
    def __init__(self, other: Tensor) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        if func is torch.ops.aten.mul_.Tensor:
            return args[0].other.mul_(args[1].sum().item())
        return args[0].other.add_(2 * args[1])


def test_what_a_tensor_of_another_class_does_is_on_the_tape_and_seen_by_the_lint() -> None:
    total, more = torch.zeros(3), torch.ones(3)
    stand_in = Twice(total)
    tape, _ = _on_tape(lambda: stand_in.add_(more))
    assert not total.any()
    more.fill_(5)
    tape.replay()
    assert torch.equal(total, torch.full((3,), 10.0))
    with assert_capturable():
        stand_in.add_(more)
    with pytest.raises(CaptureError, match="item"), assert_capturable():
        stand_in.mul_(more)


@pytest.mark.parametrize(
    "read", [Tensor.item, torch.nonzero, lambda x: x[x > 0], lambda x: x.tolist(), lambda x: x.numpy()]
)
def test_reads_of_the_device_are_refused(read: Callable[[Tensor], object]) -> None:
    with pytest.raises(RuntimeError, match="a graph cannot contain it"):
        _on_tape(lambda: torch.full((1,), float(read(torch.ones(1)) is None)))
