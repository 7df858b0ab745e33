"""Gradients with and without a stash are bit-identical for all tiers, recompute levels and orders of groups."""

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from megatron.core.transformer.moe.paged_stash import Counter, PagePool, group_memory
from megatron.core.transformer.moe.paged_stash import stash as stash_file
from megatron.core.transformer.moe.paged_stash.stash_order import EventKind, StashEvent
from tests.counts import long_count
from tests.unit_tests.core.transformer.moe.paged_stash.expert_models import (
    FFN,
    HIDDEN,
    LIVE,
    PAGE_BYTES,
    C,
    Experts,
    Layer,
    MarkedExperts,
    Model,
    assert_same,
    gradients,
    inputs,
    is_empty_sync,
    loss_of,
    make_stash,
)


def pages_of(width: int, dtype: torch.dtype) -> int:
    return -(-LIVE * width * dtype.itemsize // PAGE_BYTES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tiers", ["device", "host", "both"])
@pytest.mark.parametrize("dropped", [(), ("act",), ("gate_up",), ("gate_up", "act")])
def test_gradients_are_the_same_for_every_mixture_of_tiers_and_recompute_levels(
    dtype: torch.dtype, tiers: str, dropped: tuple[str, ...]
) -> None:
    expected = gradients(Model(None, kind=MarkedExperts, num_layers=1, dtype=dtype), dtype)
    pages = {"gate_up": pages_of(2 * FFN, dtype), "act": pages_of(FFN, dtype)}
    total = sum(pages[name] for name in pages if name not in dropped) + pages_of(HIDDEN, dtype) + pages_of(1, dtype)
    on_device = {"device": total, "host": 0, "both": total - 3}[tiers]
    stash = make_stash(on_device, total - on_device, reserved_share=0)
    assert_same(gradients(Model(stash.context, kind=MarkedExperts, num_layers=1, dtype=dtype), dtype), expected)
    counters = stash.pool.occupancy_sync().counters
    assert counters[Counter.DROPPED_GATE_UP] == ("gate_up" in dropped)
    assert counters[Counter.DROPPED_ACT] == ("act" in dropped)
    assert counters[Counter.PLANNED_PAGES] == total, "a tensor that two operators save is stashed once"
    assert is_empty_sync(stash) and not stash.is_void_sync()


@pytest.mark.parametrize("kind", [Experts, MarkedExperts])
@pytest.mark.parametrize("prefetch_groups", [0, 1, 5])
@pytest.mark.parametrize("pages", [(500, 0), (33, 500)])
def test_steps_after_the_first_know_their_order(
    kind: type[Experts], prefetch_groups: int, pages: tuple[int, int]
) -> None:
    expected = gradients(Model(None, kind=kind))
    stash = make_stash(*pages, prefetch_groups=prefetch_groups, reserved_share=0)
    model = Model(stash.context, kind=kind)
    planned = []
    for _ in range(3):
        assert_same(gradients(model), expected)
        planned.append(stash.pool.occupancy_sync().counters[Counter.PLANNED_PAGES])
        assert is_empty_sync(stash) and not stash.is_void_sync()
        stash.reset()
    assert planned[0] * 2 == planned[1] * 3 == planned[2] * 3, "the last group's backward is next: it is not stashed"


@pytest.mark.parametrize("is_given", [False, True])
def test_a_pool_of_every_input_and_little_more_never_lacks_pages_for_inputs(is_given: bool) -> None:
    expected = gradients(Model(None, kind=MarkedExperts, num_layers=6))
    inputs_alone = -(-C * HIDDEN * 4 // PAGE_BYTES) + 1
    groups = [(str(number), 0) for number in range(6)]
    events = [StashEvent(EventKind.FORWARD, *group) for group in groups]
    events += [StashEvent(EventKind.BACKWARD, *group) for group in reversed(groups)]
    stash = make_stash(6 * inputs_alone + 20, events=events if is_given else None)
    model, dropped = Model(stash.context, kind=MarkedExperts, num_layers=6), []
    for _ in range(3):
        assert_same(gradients(model), expected)
        assert is_empty_sync(stash) and not stash.is_void_sync()
        dropped.append(stash.pool.occupancy_sync().counters[Counter.DROPPED_GATE_UP])
        stash.reset()
    assert dropped == [4 if is_given else 6, 4, 4], "a step with an unknown order stashes only x"


def test_a_step_that_is_reset_before_its_last_backward_teaches_no_order() -> None:
    stash, outputs = make_stash(), []
    for name in ("one", "two"):
        with stash.context(name, LIVE, max_rows=C):
            outputs.append(torch.randn(C, HIDDEN, requires_grad=True).exp())
    outputs[1].sum().backward()
    stash.reset()
    assert stash.order.events == ()


def test_forwards_that_two_threads_begin_at_once_are_groups_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    stash, both = make_stash(), threading.Barrier(2)
    next_forward = stash._next_forward

    def both_read(name: str) -> StashEvent:
        event = next_forward(name)
        # The barrier breaks if the other thread is blocked until this one continues.
        with suppress(threading.BrokenBarrierError):
            both.wait(0.5)
        return event

    def run(x: torch.Tensor) -> torch.Tensor:
        with stash.context("one", LIVE, max_rows=C):
            return x.exp()

    monkeypatch.setattr(stash, "_next_forward", both_read)
    leaves = [torch.randn(C, HIDDEN, requires_grad=True) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        outputs = list(threads.map(run, leaves))
    for leaf, output in zip(leaves, outputs):
        output.sum().backward()
        assert leaf.grad is not None and torch.equal(leaf.grad[:LIVE], output[:LIVE])
    assert is_empty_sync(stash)
    stash.reset()
    assert {(event.kind, event.group) for event in stash.order.events} == {
        (kind, ("one", instance)) for kind in (EventKind.FORWARD, EventKind.BACKWARD) for instance in range(2)
    }


@pytest.mark.parametrize("departs_with", [0, 1, 3, 5])
def test_after_a_departure_inputs_alone_get_pages(departs_with: int) -> None:
    stash = make_stash()
    gradients(Model(stash.context, kind=MarkedExperts, num_layers=6))
    stash.reset()
    model = Model(stash.context, kind=MarkedExperts, num_layers=6)
    layer = model.layers[departs_with]
    assert isinstance(layer, Layer)
    layer.name = "new"
    assert_same(gradients(model), gradients(Model(None, kind=MarkedExperts, num_layers=6)))
    assert stash.pool.occupancy_sync().counters[Counter.DROPPED_ACT] == 6 - departs_with


def test_the_main_stream_waits_for_releases_not_for_copies_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda self, group, *_, **__: launched.append(name)

    waited: list[list[str]] = []
    for name in ("restore", "release"):
        monkeypatch.setattr(PagePool, name, note(name))
    # An event is represented by the list of launches before it.
    monkeypatch.setattr(group_memory.SideStream, "behind_main", lambda *_: nullcontext())
    monkeypatch.setattr(group_memory.SideStream, "record", lambda stream: list(launched))
    monkeypatch.setattr(group_memory, "main_waits_for", lambda event, device: waited.append(event or []))
    monkeypatch.setattr(stash_file, "main_waits_for", lambda event, device: None)
    gradients(Model(make_stash().context))
    assert waited and launched.count("release") == 3
    assert all(event.count("restore") == event.count("release") for event in waited)


def test_graphs_of_a_part_wait_for_no_event_of_each_other_nor_anyone_for_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = ["none"]

    def wait(*events: object) -> AbstractContextManager[None]:
        assert all(event in (None, graph[0]) for event in events)
        return nullcontext()

    # An event is represented by the graph that recorded it.
    monkeypatch.setattr(group_memory.SideStream, "behind_main", lambda stream, *events: wait(*events))
    monkeypatch.setattr(group_memory.SideStream, "record", lambda stream: graph[0])
    monkeypatch.setattr(group_memory, "record_main", lambda device: graph[0])
    for module in (group_memory, stash_file):
        monkeypatch.setattr(module, "main_waits_for", lambda event, device: wait(event))
    stash = make_stash()
    part, rows = stash.new_part(), torch.randn(8, 16, requires_grad=True)
    for graph[0] in ("forward", "backward"):
        with stash.capturing(part):
            if graph[0] == "forward":
                with stash.context("layer 1", 5, max_rows=8):
                    output = (rows * 2).sin()
            else:
                (grad,) = torch.autograd.grad(output, rows, torch.ones(8, 16))
    graph[0] = "none"
    del output
    stash.join()
    assert part.group is not None and part.group.specs and not stash.order.departed
    assert torch.equal(grad[:5], 2 * (rows * 2).cos()[:5])
    stash.pool.check_integrity_sync()
    forward = stash.replaying(part)
    assert forward is not None
    stash.reset()
    with pytest.raises(RuntimeError, match="when reset"):
        stash.replaying_backward(forward)


def test_pages_of_a_graph_without_backward_come_back_when_it_is_dropped() -> None:
    stash = make_stash()
    y = Model(stash.context)(*inputs())
    assert not is_empty_sync(stash)
    del y
    gc.collect()
    assert is_empty_sync(stash)


@pytest.mark.parametrize("seed", [1, 2])
def test_neither_the_order_of_pages_nor_a_second_run_changes_anything(seed: int) -> None:
    expected = gradients(Model(None, kind=MarkedExperts))
    for _ in range(2):
        stash = make_stash(120, 300)
        order = torch.randperm(300, generator=torch.Generator().manual_seed(seed))
        stash.pool.ring.copy_(torch.cat([order[order < 120], 120 + order]))
        for _ in range(2):
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                assert_same(gradients(Model(stash.context, kind=MarkedExperts)), expected)
            launched = [event.name for event in seen.events() if event.name.startswith("paged_stash::")]
            stashed = launched.count("paged_stash::plan")
            assert all(launched.count(f"paged_stash::{verb}") == stashed for verb in ("stash", "restore", "release"))
            assert stashed == (2 if stash.order.events else 3), "each pending group takes one launch of each kernel"
            stash.reset()


@pytest.mark.parametrize(("pages", "saves"), [(60, True), (600, False)])
def test_a_footprint_says_whether_the_stash_saves(pages: int, saves: bool) -> None:
    stash = make_stash(pages)
    assert stash.footprint().saving == 0
    gradients(Model(stash.context, kind=MarkedExperts, num_layers=5))
    stash.reset()
    found = stash.footprint()
    group_bytes = C * 4 * (HIDDEN + 3 * FFN + 1)  # x, gate_up, act and weights of one group
    assert (found.static_bytes, found.working_set_bytes) == (5 * group_bytes, 2 * group_bytes)
    assert found.arena_bytes == pages * PAGE_BYTES and (found.saving > 0) == saves


@pytest.mark.slow
@settings(max_examples=long_count(3, soak=500), deadline=None)
@given(data=st.data())
def test_any_order_of_microbatches_gives_the_same_and_returns_all_pages(data: st.DataObject) -> None:
    stash = make_stash(data.draw(st.integers(150, 700)), 2000, prefetch_groups=data.draw(st.integers(0, 3)))
    model, plain = (Model(context, kind=MarkedExperts, num_layers=2) for context in (stash.context, None))
    for _ in range(3):
        num_microbatches, num_forwards = data.draw(st.integers(1, 4)), 0
        waiting: dict[int, torch.Tensor] = {}
        while num_forwards < num_microbatches or waiting:
            if num_forwards < num_microbatches and (not waiting or data.draw(st.booleans())):
                waiting[num_forwards] = loss_of(model(*inputs(seed=num_forwards)))
                num_forwards += 1
                continue
            number = data.draw(st.sampled_from(sorted(waiting)))
            loss = waiting.pop(number)
            if data.draw(st.integers(0, 4)):  # otherwise backward never runs
                loss.backward()
                loss_of(plain(*inputs(seed=number))).backward()
            del loss
            stash.pool.check_integrity_sync()
        gc.collect()
        assert is_empty_sync(stash)
        stash.reset()
        found, expected = ([one.grad for one in each.parameters() if one.grad is not None] for each in (model, plain))
        assert_same(found, expected)
