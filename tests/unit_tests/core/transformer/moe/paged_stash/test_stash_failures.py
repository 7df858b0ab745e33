"""After an exception anywhere the pool is intact, all pages are returned, and the next step is unaffected."""

import gc
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.core.transformer.moe.paged_stash import (
    PagedStash,
    PoolLayout,
    Priority,
    TensorSpec,
    group_memory,
)
from tests.counts import long_count, soak_only
from tests.unit_tests.core.transformer.moe.paged_stash.expert_models import (
    HIDDEN,
    LIVE,
    C,
    MarkedExperts,
    Model,
    assert_same,
    gradients,
    inputs,
    is_empty_sync,
    loss_of,
    make_stash,
)

PACKAGE = "megatron.core.transformer.moe.paged_stash."
PLACES = (
    *(f"{PACKAGE}page_pool.PagePool.{verb}" for verb in ("open_group", "plan", "stash", "restore", "release")),
    f"{PACKAGE}page_pool.RestoredMemory.take",
    f"{PACKAGE}saved_tensors.StashGroup.pack",
    f"{PACKAGE}saved_tensors.StashGroup.blocks",
    f"{MarkedExperts.__module__}.MarkedExperts.forward",
)


# The two kinds of cleanup alternate over places and calls, and the value 1 swaps them.
@pytest.mark.slow
@pytest.mark.parametrize("resets_at", [0, soak_only(1)])
@pytest.mark.parametrize("place", PLACES)
def test_an_exception_leaves_a_pool_that_is_whole(place: str, resets_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the exception, either the step is reset or its graph is dropped, alternating between calls and places."""
    expected = gradients(Model(None, kind=MarkedExperts, num_layers=2))
    path, _, name = place.rpartition(".")
    owner = pkgutil.resolve_name(path)
    for call in range(1, long_count(3, soak=10)):
        stash = make_stash(60, 20)
        model = Model(stash.context, kind=MarkedExperts, num_layers=2)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(owner, name, failing(vars(owner)[name], call))
            gradients(model)
            raise KeyboardInterrupt  # if there were fewer calls
        stash.pool.check_integrity_sync()
        if (call + PLACES.index(place)) % 2 == resets_at:
            stash.reset()
        gc.collect()
        assert is_empty_sync(stash)
        stash.reset()
        model.zero_grad()
        for _ in range(2):
            assert_same(gradients(model), expected)
            assert is_empty_sync(stash) and not stash.is_void_sync()
            stash.reset()


def failing(function: Callable[..., Any], call: int) -> Callable[..., Any]:
    """Wraps the function to raise in its n-th call: before it runs if n is odd, after it if n is even."""
    count = 0

    def wrapped(*args: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        if count == call and call % 2:
            raise KeyboardInterrupt
        result = function(*args, **named)
        if count == call:
            raise KeyboardInterrupt
        return result

    return wrapped


@pytest.mark.parametrize("fault", ["injected", "must write to `out`"])
def test_an_exception_while_dropped_tensors_are_computed_again_can_be_followed_by_another_try(fault: str) -> None:
    class Failing(MarkedExperts):
        fails = True

        def forward(self, x: Tensor, probs: Tensor, group: Any = None) -> Tensor:
            y = x.exp()
            if group is not None:
                group.mark(y, priority=Priority.ACT, recompute=self.again, sources=(x,))
            return y * y * probs[:, None]

        def again(self, out: Tensor, needed: Tensor, x: Tensor) -> Tensor | None:
            if self.fails:
                if fault != "injected":
                    return x.exp()
                raise RuntimeError("injected")
            out[:LIVE].copy_(torch.where(needed > 0, x[:LIVE].exp(), out[:LIVE]))
            return None

    stash = make_stash(24)
    model = Model(stash.context, kind=Failing, num_layers=1)
    hidden, probs = inputs()
    loss = loss_of(model(hidden, probs))
    with pytest.raises((RuntimeError, TypeError), match=fault):
        loss.backward()
    model.layers[0].experts.fails = False
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()  # torch released its nodes' saved tensors before the exception
    del loss
    gc.collect()
    assert is_empty_sync(stash)
    assert_same(gradients(model), gradients(Model(None, kind=Failing, num_layers=1)))


def test_backward_after_reset_says_what_happened_and_touches_nothing() -> None:
    stash = make_stash()
    model = Model(stash.context)
    stale = loss_of(model(*inputs()))
    stash.reset()
    fresh = loss_of(model(*inputs()))
    with pytest.raises(RuntimeError, match=r"'2'.*reset\(\)"):
        stale.backward()
    del stale
    gc.collect()
    model.zero_grad()
    fresh.backward()
    assert_same([one.grad for one in model.parameters()], gradients(Model(None))[2:])
    assert is_empty_sync(stash)


@contextmanager
def context_of(stash: PagedStash, num_rows: Any = LIVE, max_rows: int = C) -> Iterator[tuple[Any, Tensor]]:
    x = torch.randn(C, HIDDEN, requires_grad=True) * 1.0
    with stash.context("one", num_rows, max_rows=max_rows) as group:
        yield group, x


def _change(_group: Any, x: Tensor) -> Tensor:
    y = x.exp()
    z = y * y
    y.add_(1)
    return z


MISTAKES: list[tuple[Callable[[Any, Tensor], Any], type[Exception], str]] = [
    (_change, RuntimeError, r"modified by an inplace operation.*\[48, 16\]"),
    (lambda group, x: x.unfold(1, 2, 1)[3:].exp() ** 2, ValueError, r"max_rows is 48.*45"),
    (lambda group, x: x.to("meta").exp() ** 2, ValueError, r"rows only on \['meta'\], but the pool is on cpu"),
    (lambda group, x: group.mark(x, tokens_per_row=0), ValueError, r"tokens_per_row \(0\)"),
    (lambda group, x: group.mark(x[:20], tokens_per_row=32), ValueError, "not in token order"),
    (lambda group, x: group.mark(x, priority=Priority.ACT), ValueError, "require both"),
    (lambda group, x: group.mark(x, sources=(x,)), ValueError, "accepts neither"),
]


@pytest.mark.parametrize(("body", "error", "message"), MISTAKES)
def test_mistakes_inside_a_context_are_named(body: Callable[..., Any], error: type[Exception], message: str) -> None:
    stash, kept = make_stash(), None
    with pytest.raises(error, match=message), context_of(stash) as (group, x):
        kept = body(group, x)
    assert is_empty_sync(stash)
    if kept is not None:
        with pytest.raises(RuntimeError, match="raised an exception"):
            kept.sum().backward()


def test_what_a_context_saved_is_freed_after_an_exception_though_its_graph_lives_on() -> None:
    saved: list[StorageWeakRef] = []
    with pytest.raises(KeyboardInterrupt), context_of(make_stash()) as (_, x):
        rows, others = x.sin(), torch.ones(5, requires_grad=True).sin()
        loss = (rows * rows).sum() + (others * others).sum()
        saved += [StorageWeakRef(tensor.untyped_storage()) for tensor in (rows, others)]
        del rows, others
        raise KeyboardInterrupt
    assert [one.expired() for one in saved] == [True, True]
    with pytest.raises(RuntimeError, match="raised an exception"):
        loss.backward()


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("is_marked", [False, True])
def test_a_tensor_changed_in_place_after_its_context_raises_unless_its_copy_is_done(
    joins: bool, is_marked: bool
) -> None:
    stash = make_stash()
    leaf = torch.randn(C, HIDDEN, requires_grad=True)
    for name in ("one", "two"):
        with stash.context(name, LIVE, max_rows=C) as group:
            y = leaf.sigmoid()
            if is_marked:
                group.mark(y)
        expected = y.detach() * (1 - y.detach())
        if joins:
            stash.join()
        y.mul_(2)  # as the next user of a shared buffer overwrites it
    if joins:
        y.sum().backward()
        assert leaf.grad is not None and torch.equal(leaf.grad[:LIVE], 2 * expected[:LIVE])
    else:
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*\[48, 16\]"):
            y.sum().backward()
    del y
    gc.collect()
    assert is_empty_sync(stash)


def test_a_write_to_what_a_copy_still_reads_is_seen_before_the_main_stream_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    note_changes = group_memory.Reading.note_changes

    def noted(reading: group_memory.Reading) -> None:
        assert reading.copied == "copied" and reading.sources, "memory is kept until the copy is waited for"
        calls.append("checked")
        note_changes(reading)

    # Simulates GPU events: the main stream must wait for the end of the copy before anyone may write.
    monkeypatch.setattr(group_memory.SideStream, "behind_main", lambda *_: nullcontext())
    monkeypatch.setattr(group_memory.SideStream, "record", lambda _: "copied")
    monkeypatch.setattr(group_memory, "main_waits_for", lambda event, device: calls.append(str(event)))
    monkeypatch.setattr(group_memory.Reading, "note_changes", noted)
    stash = make_stash()
    buffer, x = torch.empty(C, HIDDEN), torch.randn(C, HIDDEN, requires_grad=True)
    for name in ("one", "two"):
        stash.join()
        with torch.no_grad():
            buffer.copy_(x)  # a dispatch buffer shared by layers
        assert ("checked" in calls) == (name == "two") and calls[-1] == "copied"
        with stash.context(name, LIVE, max_rows=C) as group:
            group.rows(buffer)
            y = x * buffer
    assert y.requires_grad


@pytest.mark.parametrize("priorities", [(Priority.ACT, Priority.ACT), (Priority.GATE_UP, Priority.ACT)])
def test_tensors_cannot_be_computed_from_each_other_in_a_circle(priorities: tuple[Priority, Priority]) -> None:
    with pytest.raises(ValueError, match="a source must be more important"), context_of(make_stash()) as (group, x):
        first, second = x.exp(), x.sin()
        result = first * second
        group.mark(first, priority=priorities[0], recompute=lambda *_: None, sources=(second,))
        group.mark(second, priority=priorities[1], recompute=lambda *_: None, sources=(first,))
        assert result.requires_grad


@pytest.mark.parametrize(("num_rows", "max_rows"), [(C + 1, C), (-1, C), (True, C), (torch.ones(2), C), (1, -1)])
def test_wrong_counts_are_named(num_rows: Any, max_rows: int) -> None:
    with pytest.raises(ValueError, match="num_rows|max_rows"), context_of(make_stash(), num_rows, max_rows):
        pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PoolLayout(24, 1), r"page_bytes \(24\)"),
        (lambda: PoolLayout(16, 2.0), r"device_pages \(2.0\) must be an integer"),
        (lambda: PoolLayout(16, True), r"device_pages \(True\)"),
        (lambda: PoolLayout(16, 1, -1), r"host_pages \(-1\)"),
        (lambda: PoolLayout(16, 0), "needs at least one page"),
        (lambda: TensorSpec(8, 4, 1), r"pitch_bytes \(4\) must be at least row_bytes \(8\)"),
        (lambda: make_stash(prefetch_groups=-1), r"prefetch_groups \(-1\)"),
        (lambda: make_stash(reserved_share=float("nan")), r"reserved_share \(nan\)"),
        (lambda: make_stash(reserved_share="1"), r"reserved_share \('1'\) must be a number"),
        (lambda: make_stash(events=[1]), r"events: got a int \(1\), must be StashEvent"),
        (lambda: make_stash(specs={"layer": [1]}), r"specs: got a int \(1\), must be TensorSpec"),
        (lambda: PagedStash(PoolLayout(16, 1)), r"pool: got a PoolLayout .* must be PagePool"),
        (
            lambda: make_stash().context("one", 1, max_rows=2, takes="all").__enter__(),
            r"takes \('all'\) must be one of",
        ),
    ],
)
def test_wrong_sizes_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("count", [C + 5, -1])
def test_a_wrong_count_on_the_device_discards_every_step(count: int) -> None:
    stash = make_stash()
    for _ in range(3):  # once the order is known, the group's backward directly follows, so it receives no pages
        with context_of(stash, torch.tensor(count)) as (_, x):
            y = x.exp()
        y.sum().backward()
        assert stash.void == 1 and stash.is_void_sync() and is_empty_sync(stash)
        stash.reset()
        assert not stash.is_void_sync()


def test_a_wrong_count_of_a_captured_part_discards_the_step() -> None:
    stash = make_stash()
    with (
        stash.capturing(stash.new_part()),
        stash.context("one", torch.tensor(C + 1), max_rows=C, backward_is_next=True),
    ):
        y = inputs()[0].exp()
    y.sum().backward()
    assert stash.is_void_sync()
