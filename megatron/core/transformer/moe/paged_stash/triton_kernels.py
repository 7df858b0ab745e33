"""Kernels that give pages out and take them back, one program each, and the launchers of all four operators on a GPU.

The kernel that copies is in triton_copy.py. A launcher allocates nothing and reads nothing from the device, so that a
CUDA graph can hold it; it launches on the current device and stream.

[Note: two ends of a ring]
plan owns the heads, release the tails, and the two may run at the same time on two streams. What the release of one
group hands to the plan of another is ring entries, and then the tail past them:
  release: all threads write entries; barrier; the tail is exchanged, with release semantics on the GPU.
  plan: the tail is read with acquire semantics on the GPU; barrier; all threads read entries below it.
Barriers order the threads of a program, and release and acquire are cumulative over them: a plan that sees the tail
also sees the entries. A plan that does not see it yet takes free pages for held ones: it spills or drops earlier than
it must, but gives out no page twice.
The other direction needs no fence. release writes only entries that plan has given out: their pages are being released,
and plan, stash and restore of that group came before by stream order and events. What only one of the two touches, such
as the heads, is read and written plainly.
"""
# mypy: allow-untyped-defs

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl

from megatron.core.transformer.moe.paged_stash.page_layout import INTS_PER_TENSOR, Counter, Priority
from megatron.core.transformer.moe.paged_stash.triton_copy import restore, stash
from megatron.core.transformer.moe.paged_stash.triton_numbers import (
    COUNTS,
    SHIFTED,
    count_for,
    shifted,
    shifted_tensors,
)
from megatron.core.triton_compile import CompileCase, compile_case

__all__ = ["compile_cases", "plan", "release", "restore", "stash"]

LANES = 256  # pages that a program handles at a time
VOID = tl.constexpr(int(Counter.VOID))
BAD_COUNT = tl.constexpr(int(Counter.BAD_COUNT))
HIGH_WATER_DEVICE = tl.constexpr(int(Counter.HIGH_WATER_DEVICE))
HIGH_WATER_HOST = tl.constexpr(int(Counter.HIGH_WATER_HOST))
PLANNED_PAGES = tl.constexpr(int(Counter.PLANNED_PAGES))
SPILLED_PAGES = tl.constexpr(int(Counter.SPILLED_PAGES))
LIVE_BYTES = tl.constexpr(int(Counter.LIVE_BYTES))
DROPPED_GATE_UP = tl.constexpr(int(Counter.DROPPED_GATE_UP))
DROPPED_ACT = tl.constexpr(int(Counter.DROPPED_ACT))
NUM_COUNTERS = tl.constexpr(len(Counter))
INPUT = tl.constexpr(int(Priority.INPUT))
GATE_UP = tl.constexpr(int(Priority.GATE_UP))
ACT = tl.constexpr(int(Priority.ACT))


@triton.jit
def _room(tensors, COUNT: tl.constexpr):
    """The most live tokens that every tensor has rows for."""
    room = tl.full((), 2**62, tl.int64)
    for i in tl.static_range(COUNT):
        tokens = ((tensors[7 * i + 2] - SHIFTED) >> 1) * ((tensors[7 * i + 3] - SHIFTED) >> 1)
        room = tl.where(tensors[7 * i + 6] < SHIFTED, room, tl.minimum(room, tokens))
    return room


@triton.jit(noinline=True)
def _give(ring, table, head_device, head_host, device_pages, host_pages, need, on_device, LANES: tl.constexpr):
    """Writes a tensor's page ids: on_device from the device ring, the rest of `need` from the host ring."""
    device_at = head_device % tl.maximum(device_pages, 1)
    host_at = head_host % tl.maximum(host_pages, 1)
    for start in range(0, need, LANES):
        lane = start + tl.arange(0, LANES)
        spilled = lane >= on_device
        position = tl.where(spilled, host_at + lane - on_device, device_at + lane)
        size = tl.where(spilled, host_pages, device_pages)
        position = tl.where(position >= size, position - size, position) + tl.where(spilled, device_pages, 0)
        ids = tl.load(ring + position, mask=lane < need)
        tl.store(table + lane, ids, mask=lane < need)


@triton.jit(do_not_specialize_on_alignment=list(range(8)))
def plan_kernel(
    num_rows, reserve, heads, tails, ring, table, held, counters, layout, tensors,
    COUNT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One program. layout: PoolLayout.encode(); tensors: COUNT records of encode_tensors."""
    page_bytes = (layout[0] - SHIFTED) >> 1
    device_pages = (layout[1] - SHIFTED) >> 1
    host_pages = (layout[2] - SHIFTED) >> 1
    # Triton has no load with acquire semantics; adding 0 is one. See [Note: two ends of a ring].
    tail_device = tl.atomic_add(tails, 0, sem="acquire", scope="gpu")
    tail_host = tl.atomic_add(tails + 1, 0, sem="acquire", scope="gpu")
    head_device = tl.load(heads)
    head_host = tl.load(heads + 1)
    asked = tl.load(num_rows)
    room = _room(tensors, COUNT)
    bad = ((asked < 0) | (asked > room)).to(tl.int64)
    tokens = tl.minimum(tl.maximum(asked, 0), room)
    void, dropped_gate_up, dropped_act, pages, spilled, live = bad, bad * 0, bad * 0, bad * 0, bad * 0, bad * 0
    for i in tl.static_range(COUNT):
        row_bytes = (tensors[7 * i] - SHIFTED) >> 1
        tokens_per_row = (tensors[7 * i + 3] - SHIFTED) >> 1
        priority = (tensors[7 * i + 4] - SHIFTED) >> 1
        table_start = (tensors[7 * i + 5] - SHIFTED) >> 1
        slot = (tensors[7 * i + 6] - SHIFTED) >> 1
        if slot >= 0:
            rows = (tokens + tokens_per_row - 1) // tokens_per_row
            need = (rows * row_bytes + page_bytes - 1) // page_bytes
            free_device = tail_device - head_device
            free = free_device + tail_host - head_host
            dropped = ((need > 0) & (need + tl.load(reserve + priority) > free)).to(tl.int64)
            need = need * (1 - dropped)
            on_device = tl.minimum(need, free_device)
            _give(ring, table + table_start, head_device, head_host, device_pages, host_pages, need, on_device, LANES)
            tl.store(held + slot * 3, need)
            tl.store(held + slot * 3 + 1, rows)
            tl.store(held + slot * 3 + 2, dropped)
            head_device += on_device
            head_host += need - on_device
            pages += need
            spilled += need - on_device
            live += rows * row_bytes * (1 - dropped)
            void += dropped * (priority == INPUT)
            dropped_gate_up += dropped * (priority == GATE_UP)
            dropped_act += dropped * (priority == ACT)
    lane = tl.arange(0, 16)
    before = tl.load(counters + lane, mask=lane < NUM_COUNTERS, other=0)
    after = before + tl.where(lane == VOID, void, 0) + tl.where(lane == BAD_COUNT, bad, 0)
    after += tl.where(lane == PLANNED_PAGES, pages, 0) + tl.where(lane == SPILLED_PAGES, spilled, 0)
    after += tl.where(lane == LIVE_BYTES, live, 0)
    after += tl.where(lane == DROPPED_GATE_UP, dropped_gate_up, 0) + tl.where(lane == DROPPED_ACT, dropped_act, 0)
    used_device = device_pages - (tail_device - head_device)
    used_host = host_pages - (tail_host - head_host)
    after = tl.maximum(after, tl.where(lane == HIGH_WATER_DEVICE, used_device, before))
    after = tl.maximum(after, tl.where(lane == HIGH_WATER_HOST, used_host, before))
    tl.store(counters + lane, after, mask=lane < NUM_COUNTERS)
    # One thread stores what all have read: without the barrier a late warp could start from the new heads.
    tl.debug_barrier()
    tl.store(heads, head_device)
    tl.store(heads + 1, head_host)


@triton.jit(noinline=True)
def _take_back(ring, table, tail_device, tail_host, device_pages, host_pages, pages, LANES: tl.constexpr):
    """Writes a tensor's page ids behind the tails; returns how many are device pages, which come first."""
    found = tl.zeros((LANES,), tl.int32)
    for start in range(0, pages, LANES):
        lane = start + tl.arange(0, LANES)
        found += (tl.load(table + lane, mask=lane < pages, other=2**31) < device_pages).to(tl.int32)
    on_device = tl.sum(found, axis=0).to(tl.int64)
    device_at = tail_device % tl.maximum(device_pages, 1)
    host_at = tail_host % tl.maximum(host_pages, 1)
    for start in range(0, pages, LANES):
        lane = start + tl.arange(0, LANES)
        spilled = lane >= on_device
        position = tl.where(spilled, host_at + lane - on_device, device_at + lane)
        size = tl.where(spilled, host_pages, device_pages)
        position = tl.where(position >= size, position - size, position) + tl.where(spilled, device_pages, 0)
        ids = tl.load(table + lane, mask=lane < pages)
        tl.store(ring + position, ids, mask=lane < pages)
    return on_device


@triton.jit(do_not_specialize_on_alignment=list(range(4)))
def release_kernel(ring, tails, table, held, layout, tensors, COUNT: tl.constexpr, LANES: tl.constexpr):
    """One program. layout: PoolLayout.encode(); tensors: COUNT records of encode_tensors."""
    device_pages = (layout[1] - SHIFTED) >> 1
    host_pages = (layout[2] - SHIFTED) >> 1
    tail_device = tl.load(tails)
    tail_host = tl.load(tails + 1)
    for i in tl.static_range(COUNT):
        table_start = (tensors[7 * i + 5] - SHIFTED) >> 1
        slot = (tensors[7 * i + 6] - SHIFTED) >> 1
        pages = tl.load(held + slot * 3, mask=slot >= 0, other=0)
        if pages > 0:
            on_device = _take_back(
                ring, table + table_start, tail_device, tail_host, device_pages, host_pages, pages, LANES
            )
            tail_device += on_device
            tail_host += pages - on_device
    # Before the stores below, all threads must have read `held` and written their entries.
    tl.debug_barrier()
    for i in tl.static_range(COUNT):
        slot = (tensors[7 * i + 6] - SHIFTED) >> 1
        tl.store(held + slot * 3, 0, mask=slot >= 0)
    # See [Note: two ends of a ring].
    tl.atomic_xchg(tails, tail_device, sem="release", scope="gpu")
    tl.atomic_xchg(tails + 1, tail_host, sem="release", scope="gpu")


def plan(
    num_rows: torch.Tensor,
    reserve: torch.Tensor,
    *,
    heads: torch.Tensor,
    tails: torch.Tensor,
    ring: torch.Tensor,
    table: torch.Tensor,
    held: torch.Tensor,
    counters: torch.Tensor,
    layout: Sequence[int],
    tensors: Sequence[int],
) -> None:
    """paged_stash::plan in one launch. num_rows: [1], int64; reserve: [3], int64; others as in kernels.py."""
    count = count_for(len(tensors) // INTS_PER_TENSOR)
    state = (heads, tails, ring, table, held, counters)
    plan_kernel[(1,)](
        num_rows, reserve, *state, shifted(layout), shifted_tensors(tensors), COUNT=count, LANES=LANES, num_warps=4
    )


def release(
    ring: torch.Tensor,
    tails: torch.Tensor,
    *,
    table: torch.Tensor,
    held: torch.Tensor,
    layout: Sequence[int],
    tensors: Sequence[int],
) -> None:
    """paged_stash::release in one launch. ring: [pages], int32; tails: [2], int64; others as in kernels.py."""
    count = count_for(len(tensors) // INTS_PER_TENSOR)
    numbers = (shifted(layout), shifted_tensors(tensors))
    release_kernel[(1,)](ring, tails, table, held, *numbers, COUNT=count, LANES=LANES, num_warps=4)


def compile_cases() -> Iterator[CompileCase]:
    """With the fewest and with the most tensors."""
    state = {"ring": "*i32", "tails": "*i64", "table": "*i64", "held": "*i64"}
    plan_state = {"num_rows": "*i64", "reserve": "*i64", "heads": "*i64", "counters": "*i64", **state}
    warps = {"num_warps": 4}
    for count in (COUNTS[0], COUNTS[-1]):
        numbers = {
            "layout": ("i64",) * 3,
            "tensors": ("i64",) * INTS_PER_TENSOR * count,
            "COUNT": count,
            "LANES": LANES,
        }
        yield compile_case(plan_kernel, f"plan, {count} tensors", options=warps, **plan_state, **numbers)
        yield compile_case(release_kernel, f"release, {count} tensors", options=warps, **state, **numbers)
