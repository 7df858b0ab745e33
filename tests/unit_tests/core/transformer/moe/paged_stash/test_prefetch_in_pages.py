"""Rows on the host of experts that compute in pages are prefetched into a second set of scratch pages, and all results
have the bits of experts with whole buffers, also if a step departs from its order.
"""

import copy
import gc
import itertools
import random
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.device.streams import SideStream
from megatron.core.tensor_parallel.weight_grads import GradOwner, WeightGrad, set_grad_owner
from megatron.core.transformer.moe.paged_stash import PagedStash, group_memory
from tests.unit_tests.core.transformer.moe.paged_stash.test_rows_in_pages import (
    POOLS,
    equal_with,
    known_order,
    make_stash,
    run,
)
from tests.unit_tests.core.transformer.moe.test_expert_function import Case, normal

ON_HOST = (0, 199)
FOUR = "F0 F1 F2 F3 B3 B2 B1 B0"


def made_cases(count: int, **options: Any) -> list[Case]:
    """Returns cases with different rows, so that rows of another group in the scratch are noticed."""
    cases = [Case(**options) for _ in range(count)]
    for number, case in enumerate(cases):
        case.x.data.mul_(number + 1)
    return cases


class Steps:
    """A step of cases in a stash with two sets of scratch pages, and a log of its backwards and copies from the host.

    The log distinguishes copies that backward waits for, which have no limit of programs, from those ahead of it.
    """

    def __init__(self, order: str, *, pages: tuple[int, int] = ON_HOST, scratch_sets: int = 2, **options: Any) -> None:
        self.stash = known_order(order, pages=pages, scratch_sets=scratch_sets, num_programs=7, **options)
        self.cases, self.log = made_cases(5), list[str]()
        self.outputs: dict[int, Tensor] = {}
        self.expected = [case.live_grads(run(case, None, "")) for case in self.cases]
        self.names: dict[Any, int] = {}
        self._restore = self.stash.pool.restore
        self.stash.pool.restore = self._noted_restore  # type: ignore[method-assign]

    def _noted_restore(self, group: Any, targets: Sequence[Tensor], **options: Any) -> None:
        self.log.append(f"{'ahead' if options['num_programs'] else 'copy'} {self.names[group]}")
        self._restore(group, targets, **options)

    def do(self, order: str) -> None:
        """Runs forwards and backwards, and asserts that results are right."""
        for word in order.split():
            number = int(word[1:])
            case = self.cases[number]
            if word[0] == "F":
                self.outputs[number] = output = run(case, self.stash, f"layer {number}")
                node: Any = output.grad_fn
                pages = node.saved._stashed._group.pages
                self.names |= {} if pages is None else {pages.group: number}
            else:
                self.log.append(word)
                assert all(map(torch.equal, case.live_grads(self.outputs.pop(number)), self.expected[number])), word

    def postpone(self, number: int, late: list[WeightGrad]) -> tuple[Tensor, Tensor]:
        """Lets a weight gradient be computed later. Returns the memory that it is written to, and the expected one."""
        weight = self.cases[number].fcs[0].weight
        assert isinstance(weight, nn.Parameter)
        main_grad = torch.zeros_like(weight)
        names = [name for name, one in self.cases[number].named.items() if one.requires_grad]
        expected = self.expected[number][names.index("weight1")]
        set_grad_owner(weight, GradOwner(main_grad, late.append))
        return main_grad, expected

    def backward(self, number: int) -> None:
        """Runs a backward whose gradients are not compared."""
        self.log.append(f"B{number}")
        output = self.outputs.pop(number)
        output.backward(normal(*output.shape, dtype=output.dtype))

    def end(self) -> None:
        held = self.stash.pool.occupancy_sync()
        assert held.device_held == held.host_held == 0
        assert all(map(self.stash.pool.scratch.is_free, range(self.stash.pool.scratch_sets)))


@pytest.mark.parametrize("order, log", [
    # The last group computes in the scratch alone.
    ("F0 F1 F2 B2 B1 B0", "B2 ahead 1 B1 ahead 0 B0"),
    ("F0 F1 F2 B0 B1 B2", "B0 copy 0 ahead 1 B1 ahead 2 B2"),
    # A forward between two backwards needs the scratch.
    ("F0 F1 B1 F2 B0 B2", "B1 B0 copy 0 ahead 2 B2"),
    ("F0 F1 B0 F2 B2 B1", "B0 copy 0 B2 ahead 1 B1"),
])  # fmt: skip
def test_rows_of_the_next_backward_are_copied_during_this_one(order: str, log: str) -> None:
    steps = Steps(order)
    for _ in range(2):
        steps.log.clear()
        steps.do(order)
        assert " ".join(steps.log) == log
        steps.end()
        steps.stash.reset()


@pytest.mark.parametrize("order, options", [
    ("F4 B4", {}),
    ("F0 F1 B0 B1", {"scratch_sets": 1}),
    # Nothing is on the host.
    ("F0 F1 B0 B1", {"pages": (99, 0)}),
])  # fmt: skip
def test_nothing_is_prefetched_in_an_unknown_order_or_into_a_single_set(order: str, options: dict[str, Any]) -> None:
    steps = Steps(order, **options)
    steps.do("F0 F1 B0 B1")
    has_host_pages = "pages" not in options
    assert steps.log == (["B0", "copy 0", "B1", "copy 1"] if has_host_pages else ["B0", "B1"])
    steps.end()


@pytest.mark.parametrize("pool", ["all on the device", "on the host", "on both", "few on both"])
@pytest.mark.parametrize("has_more", [False, True], ids=["", "biases and adapters"])
@pytest.mark.parametrize("order", ["F0 F1 F2 B2 B1 B0", "F0 F1 B1 F2 B0 B2"])
def test_experts_with_a_prefetch_have_the_bits_of_whole_buffers(pool: str, has_more: bool, order: str) -> None:
    stash = known_order(order, pages=POOLS[pool], scratch_sets=2, reserved_share=0.0)
    cases = made_cases(3, has_more=has_more, dtype=torch.float32)
    for _ in range(2):
        equal_with(stash, cases, order=order)
        assert not stash.is_void_sync()
        stash.reset()


@pytest.mark.parametrize("expected, order, log", [
    # The backward of another group needs the set of the prefetched one.
    (FOUR, "F0 F1 F2 F3 B3 B0 B2 B1", "B3 ahead 2 B0 copy 0 B2 copy 2 B1 copy 1"),
    # A forward needs it, in the scratch alone, and its rows are then moved out for a backward.
    ("F0 F1 F2 B2 B1 B0 F3 F4 B4 B3", "F0 F1 F2 B2 F4 B1 B0 B4", "B2 ahead 1 B1 copy 1 B0 copy 0 B4"),
    # Nothing needs it until its backward.
    (FOUR, "F0 F1 F2 F3 B3 B1 B2 B0", "B3 ahead 2 B1 copy 1 B2 B0 copy 0"),
    # The backward of a group in the scratch alone is not the next one.
    (FOUR, "F0 F1 F2 F3 B1 B2 B3 B0", "B1 copy 1 B2 copy 2 B3 B0 copy 0"),
])  # fmt: skip
def test_a_step_that_departs_from_its_order_copies_overwritten_rows_again(expected: str, order: str, log: str) -> None:
    steps = Steps(expected)
    steps.do(order)
    assert " ".join(steps.log) == log
    steps.end()


@pytest.mark.parametrize("seed", range(12))
def test_random_departures(seed: int) -> None:
    def drawn() -> list[str]:
        words, waiting, later = list[str](), list[int](), list(range(5))
        while waiting or later:
            if later and (not waiting or chance.random() < 0.5):
                waiting.append(later.pop(0))
                words.append(f"F{waiting[-1]}")
            else:
                words.append(f"B{waiting.pop(chance.choice([-1, -1, 0]))}")
        return words

    chance = random.Random(seed)
    steps = Steps(" ".join(expected := drawn()), pages=chance.choice([ON_HOST, (7, 99), (12, 24)]), reserved_share=0.0)
    steps.do(" ".join(expected))
    assert not steps.stash.is_void_sync()
    steps.stash.reset()
    place = chance.randrange(len(expected))
    actual = expected[:place] + [word for word in drawn() if word not in expected[:place]]
    done = set[str]()
    for word in actual:  # in an order in which no backward precedes its forward
        if word[0] == "B" and f"F{word[1:]}" not in done:
            steps.do(f"F{word[1:]}")
            done.add(f"F{word[1:]}")
        if word not in done:
            steps.do(word)
            done.add(word)
    steps.end()


@pytest.mark.parametrize("following", ["B2", "B0", "a dropped graph", "a replay"])
def test_the_main_stream_waits_for_a_prefetch_before_its_rows_are_read_or_overwritten(
    following: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Events of streams that a CPU does not have.
    events = map(str, itertools.count())
    monkeypatch.setattr(SideStream, "record", lambda stream: f"event {next(events)}")
    steps = Steps(FOUR)
    monkeypatch.setattr(group_memory, "main_waits_for", lambda event, device: steps.log.append(str(event)))
    steps.do("F0 F1 F2 F3 B3")
    node: Any = steps.outputs[2].grad_fn
    copied, pool = node.saved._stashed._group.pages.arrived, steps.stash.pool
    released = pool.release
    pool.release = lambda group: [steps.log.append("release"), released(group)]  # type: ignore
    assert copied is not None and copied not in steps.log
    steps.log.clear()
    if following == "a dropped graph":
        del node, steps.outputs[2]
        gc.collect()
        assert steps.log.index(copied) < steps.log.index("release")
    elif following == "a replay":
        steps.stash.join()
        assert copied in steps.log and pool.scratch.is_free(1)
    else:
        del node
        steps.do(following)
        later = {"B2": "release", "B0": "copy 0"}[following]
        assert steps.log.index(copied) < steps.log.index(later)
    del steps.outputs, pool.release


def test_a_graph_that_is_dropped_releases_its_prefetched_rows() -> None:
    steps = Steps(FOUR)
    steps.do("F0 F1 F2 F3 B3")
    assert steps.log[-1] == "ahead 2"
    held = steps.stash.pool.occupancy_sync().host_held
    del steps.outputs[2]
    gc.collect()
    assert steps.stash.pool.occupancy_sync().host_held < held
    assert all(steps.stash.pool.scratch.is_free(number) for number in range(2))
    steps.do("B1 B0")
    steps.end()


@pytest.mark.parametrize("late_number", [3, 2], ids=["in the scratch alone", "on the host"])
def test_nothing_is_prefetched_over_rows_that_late_weight_gradients_read(late_number: int) -> None:
    steps, late = Steps(FOUR), list[WeightGrad]()
    main_grad, expected = steps.postpone(late_number, late)
    steps.do("F0 F1 F2 F3")
    for number in range(3, late_number - 1, -1):
        steps.backward(number)
    following = late_number - 1
    steps.backward(following)
    assert f"ahead {following - 1}" not in steps.log and (late_number == 2 or "ahead 2" in steps.log)
    late[0].add_to(main_grad, scale=1.0, is_zero=True)
    assert torch.equal(main_grad, expected)
    steps.do(" ".join(f"B{number}" for number in range(following - 1, -1, -1)))
    steps.end()


def test_a_backward_that_fails_leaves_the_prefetched_rows_usable() -> None:
    steps = Steps(FOUR)
    weight = steps.cases[3].fcs[0].weight
    assert isinstance(weight, nn.Parameter)

    def fails(grad: WeightGrad) -> None:
        raise ZeroDivisionError

    set_grad_owner(weight, GradOwner(torch.zeros_like(weight), fails))
    for ends_step in (True, False):
        steps.do("F0 F1 F2 F3")
        with pytest.raises(ZeroDivisionError):
            steps.backward(3)
        assert steps.log[-1] == "ahead 2"
        if ends_step:
            steps.stash.reset()
            steps.outputs.clear()
    steps.do("B2 B1 B0")
    steps.end()


def test_a_copy_that_fails_is_repeated() -> None:
    steps = Steps(FOUR)
    steps.do("F0 F1 F2 F3")
    restore = steps.stash.pool.restore

    def interrupted(group: Any, *arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    steps.stash.pool.restore = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        steps.backward(3)
    steps.stash.pool.arena.fill_(0xFF)
    steps.stash.pool.restore = restore  # type: ignore[method-assign]
    steps.do("B2 B1 B0")
    steps.end()


def test_rows_survive_a_replay_that_computes_in_the_scratch() -> None:
    steps = Steps(FOUR)
    steps.do("F0 F1 F2 F3")
    for word in ("B3", "B2", "B1", "B0"):
        # Called before a replay.
        steps.stash.join()
        steps.stash.pool.arena.fill_(0xFF)
        steps.do(word)
    assert " ".join(steps.log) == "B3 ahead 2 B2 copy 2 ahead 1 B1 copy 1 ahead 0 B0 copy 0"
    steps.end()


def in_thread(work: Callable[[], None]) -> None:
    errors = list[BaseException]()

    def run_it() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run_it)
    thread.start()
    thread.join()
    assert not errors


@pytest.mark.parametrize("order, elsewhere", [
    (FOUR, "B3 B0 B2 B1"),
    ("F0 F1 F2 B2 B1 B0 F3 F4 B4 B3", "B2"),
    ("F0 F1 B1 B0", "B0"),
])  # fmt: skip
def test_a_thread_of_autograd_may_overwrite_rows_that_wait_in_the_scratch(order: str, elsewhere: str) -> None:
    steps = Steps(order)
    first_backward = order.index("B")
    steps.do(order[:first_backward])

    in_thread(partial(steps.do, elsewhere))
    if "F4" in order:
        steps.do("F4")
    steps.do(" ".join(f"B{number}" for number in sorted(steps.outputs)))
    steps.end()


def test_rows_of_a_backward_in_another_thread_are_moved_before_late_weight_gradients() -> None:
    steps, late = Steps("F3 B3 F4 F2 B2 B4"), list[WeightGrad]()
    main_grad, expected = steps.postpone(3, late)
    steps.do("F3")
    in_thread(partial(steps.backward, 3))
    steps.do("F4 F2 B2")
    late[0].add_to(main_grad, scale=1.0, is_zero=True)
    assert torch.equal(main_grad, expected)
    steps.do("B4")
    steps.end()


def test_captured_parts_prefetch_nothing() -> None:
    steps = Steps("F0 F1 F2 B2 B1 B0")
    stash: PagedStash = steps.stash
    steps.do("F0 F1 F2")
    with stash.capturing(stash.new_part()):
        steps.backward(2)
    assert steps.log == ["B2"]


def test_copies_of_a_pool_have_as_many_sets() -> None:
    pool = make_stash(scratch_sets=2).pool
    assert pool.num_bytes["scratch"] == 2 * pool.scratch_pages * pool.layout.page_bytes
    for other in (copy.deepcopy(pool), copy.deepcopy(make_stash(scratch_sets=2)).pool):
        assert other.scratch_sets == 2 and other.num_bytes["scratch"] == pool.num_bytes["scratch"]
