"""The four operators of a page pool on a GPU: kernels that allocate, copy and release pages, and their launchers.

cpu_kernels.py describes the operands and registers the launchers under the operators' names. A launcher allocates
nothing and reads nothing from the device, so that a CUDA graph can capture it. It launches on the current device and
stream.

[Note: numbers that kernels are not specialized on] Triton recompiles a kernel for each pattern of its integer
arguments: the value 1 becomes a constant, multiples of 16 are marked, values from 2**31 on are wider. do_not_specialize
turns that off for plain arguments, but not for members of a tuple, and a group's tensors are passed as tuples. Each
number v is therefore passed as 2 * v + SHIFTED, which is odd, never 1 and always an int64. One compiled kernel then
serves all sizes and addresses. Kernels recover v as (number - SHIFTED) >> 1. Compile-time constants are the number of
tensors, rounded up to one of COUNTS, the size of a copied block, which all groups of a pool share, and the direction of
a copy. In kernels, number 7 * i + f of `tensors` is field f of EncodedTensor for tensor i, and held + slot * 4 + c is
column c of Held.

[Note: two ends of a ring]
plan owns the heads, release the tails, and the two may run concurrently on two streams. A release passes ring entries
to a later plan, and then the tail past them:
  release: all threads write entries; barrier; the tail is exchanged, with release semantics on the GPU.
  plan: the tail is read with acquire semantics on the GPU; barrier; all threads read entries below it.
Barriers order the threads of a program, and release and acquire are cumulative over them: a plan that sees the tail
also sees the entries. A plan that does not see the tail yet treats free pages as allocated. It spills or drops earlier
than necessary, but allocates no page twice.
The other direction requires no fence. release writes only entries that plan has consumed: their pages are being
released, and stream order and events ensure that plan, stash and restore of the group precede it. Plain loads and
stores suffice for numbers that only one of the two kernels accesses, such as the heads.

[Note: work of a copy] A page is split into chunks of BLOCK words of 16 bytes. The chunks of all tensors, page after
page, are assigned to the programs round-robin, so one launch serves a whole group with any mix of sizes, and a program
without a chunk returns immediately. The host knows only the maximum number of rows; the kernel reads the number of live
rows from `held`.

[Note: words] Widths and addresses determine the word size of a tensor's copy: the largest power of 2 up to 16 that
divides its address and, for rows with gaps, width and pitch. Rows without gaps are one run of bytes, whose width does
not matter; the bytes after the last whole word are copied one by one. Pages start at multiples of 16. The kernel
chooses the word size for each tensor, from values that all its threads share, which costs a branch but no second
compilation.

[Note: copies during GEMMs]
A copy should run while experts compute. A program of copy_kernel is therefore small: 4 warps of MAX_REGISTERS, which
are 16% of the registers of a streaming multiprocessor (SM), with 8 KiB of loads in flight and no shared memory. On
sm_90 a program of a grouped GEMM (triton_grouped_gemm.py) leaves each quarter of an SM that many registers for a warp,
except in three of the hot shapes, which tests/unit_tests/core/test_compiled_kernels.py lists. num_programs is the
maximum number of programs of a launch: COPIES_PER_PROCESSOR for each SM of --moe-paged-stash-copy-sms. Without a limit,
the default, they fill every SM. On an H200 (docs/gpu_results.md) GEMMs are then delayed by 0.86 to 0.90 of the time
that the copies take alone, and by 0.89 to 1.5 with one program on each SM: a grouped GEMM has one program for each SM,
so it is as slow as the slowest program.

[Note: places] Tensors that are computed in pages are found by their places, one arena page for each page of live rows:
the page itself if it is on the device. Otherwise, for a dropped tensor and for pages on the host, it is the page at the
same position of the tensor's scratch, which starts at page scratch[i] of the arena. Kernels therefore read and write a
tensor in the same way wherever its pages are. Entries of tensors with scratch -1 remain unchanged.

[Note: tiers] Programs that copy host pages wait for PCIe, which a few programs saturate, and occupy their SMs
meanwhile. Each tier therefore has its own launch, with at most HOST_PROGRAMS programs for the host tier. Held records
how many pages are on the host.
"""
# mypy: allow-untyped-defs

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from megatron.core.device.triton_compile import CompileCase, Residency, compile_case
from megatron.core.device.triton_launch import MAX_PREPARED, PreparedLaunch, next_power_of_2
from megatron.core.transformer.moe.paged_stash.page_layout import (
    ALIGNMENT,
    COPIES_PER_PROCESSOR,
    INTS_PER_TENSOR,
    MAX_TENSORS,
    Counter,
    Priority,
)

SHIFTED = tl.constexpr(2**40 + 1)
COUNTS = (2, 4, 8, MAX_TENSORS)
# Record of an absent tensor, marked by slot -1.
_ABSENT = (1, 1, 0, 1, 0, 0, -1)


def count_for(num_tensors: int) -> int:
    """Rounds a number of tensors up to a compiled count. Raises ValueError if it exceeds the largest count."""
    if num_tensors > COUNTS[-1]:
        raise ValueError(f"got {num_tensors} tensors: one launch supports at most {COUNTS[-1]}")
    return next(count for count in COUNTS if count >= num_tensors)


def shifted(numbers: Sequence[int]) -> tuple[int, ...]:
    """Encodes numbers for kernels. See [Note: numbers that kernels are not specialized on]."""
    shift = SHIFTED.value
    return tuple([2 * number + shift for number in numbers])


@functools.lru_cache(MAX_PREPARED)
def shifted_tensors(tensors: tuple[int, ...]) -> tuple[int, ...]:
    """Pads the integers of encode_tensors with absent tensors and encodes them for kernels."""
    num_tensors = len(tensors) // INTS_PER_TENSOR
    return shifted([*tensors, *_ABSENT * (count_for(num_tensors) - num_tensors)])


LANES = 256  # pages that plan and release process per iteration
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


@triton.jit(do_not_specialize_on_alignment=list(range(9)))
def plan_kernel(
    num_rows, reserve, heads, tails, ring, table, held, counters, places, layout, tensors, scratch,
    COUNT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Allocates pages, in one program. layout: PoolLayout.numbers; tensors: COUNT records of encode_tensors.

    places, scratch: see [Note: places]; both are None without tensors that are computed in pages.
    """
    page_bytes = (layout[0] - SHIFTED) >> 1
    device_pages = (layout[1] - SHIFTED) >> 1
    host_pages = (layout[2] - SHIFTED) >> 1
    # Triton has no load with acquire semantics, so this adds 0. See [Note: two ends of a ring].
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
            tl.store(held + slot * 4, need)
            tl.store(held + slot * 4 + 1, rows)
            tl.store(held + slot * 4 + 2, dropped)
            tl.store(held + slot * 4 + 3, need - on_device)
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
    # One thread stores the heads that all threads have read. Without the barrier, a late warp could read the new
    # values, and places would be read from a table that other threads have not written yet.
    tl.debug_barrier()
    tl.store(heads, head_device)
    tl.store(heads + 1, head_host)
    if places is not None:
        for i in tl.static_range(COUNT):
            _place(
                table, held, places, tensors[7 * i], tensors[7 * i + 2], tensors[7 * i + 5], tensors[7 * i + 6],
                scratch[i], page_bytes, LANES,
            )  # fmt: skip


@triton.jit
def _room(tensors, COUNT: tl.constexpr):
    """Returns the largest number of live tokens that fit in each tensor."""
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


@triton.jit(noinline=True)
def _place(table, held, places, row_bytes, max_rows, table_start, slot, scratch, page_bytes, LANES: tl.constexpr):
    """Writes the places of a tensor from its record. Arguments except page_bytes are shifted like the kernel's.

    All entries are written, so that even rows that were not counted are in the scratch.
    """
    slot = (slot - SHIFTED) >> 1
    scratch = (scratch - SHIFTED) >> 1
    if (slot >= 0) & (scratch >= 0):
        table_start = (table_start - SHIFTED) >> 1
        on_device = tl.load(held + slot * 4) - tl.load(held + slot * 4 + 3)
        most = ((max_rows - SHIFTED) >> 1) * ((row_bytes - SHIFTED) >> 1)
        pages = (most + page_bytes - 1) // page_bytes
        for start in range(0, pages, LANES):
            lane = start + tl.arange(0, LANES)
            ids = tl.load(table + table_start + lane, mask=lane < on_device, other=0)
            tl.store(places + table_start + lane, tl.where(lane < on_device, ids, scratch + lane), mask=lane < pages)


MIN_BLOCK, MAX_BLOCK = 128, 512  # words of 16 bytes
WORDS_PER_WARP = 128  # 4 loads of 16 bytes for each thread
MAX_REGISTERS = 80  # per thread
HOST_PROGRAMS = 32
ONE_RUN = tl.constexpr(2**60)  # width that represents rows without gaps, longer than any tensor


@triton.jit(do_not_specialize_on_alignment=["table", "held"])
def copy_kernel(table, held, pool, tensors, addresses, BLOCK: tl.constexpr, TO_PAGES: tl.constexpr):
    """Copies live rows into the pages of one tier or back.

    pool: page_bytes, pages and addresses of both tiers, and the tier; tensors: encode_tensors; addresses: one per
    tensor.
    """
    page_bytes = (pool[0] - SHIFTED) >> 1
    is_host = pool[5] > SHIFTED
    step = tl.num_programs(0).to(tl.int64)
    turn = tl.program_id(0).to(tl.int64)
    chunks = (page_bytes + BLOCK * 16 - 1) // (BLOCK * 16)
    for i in tl.static_range(len(addresses)):
        slot = (tensors[7 * i + 6] - SHIFTED) >> 1
        # Pages on the device come first.
        on_host = tl.load(held + slot * 4 + 3, mask=slot >= 0, other=0)
        on_device = tl.load(held + slot * 4, mask=slot >= 0, other=0) - on_host
        start = chunks * tl.where(is_host, on_device, 0)
        items = chunks * tl.where(is_host, on_host, on_device)
        if turn < items:
            _copy_tensor(
                table, pool[0], pool[1], pool[3], pool[4], addresses[i], tensors[7 * i], tensors[7 * i + 1],
                tensors[7 * i + 2], tensors[7 * i + 5], tl.load(held + slot * 4 + 1), start + turn, start + items,
                BLOCK, TO_PAGES,
            )  # fmt: skip
        # The next tensor's first chunk goes to the program that is next in the rotation.
        turn -= items % step
        turn = tl.where(turn < 0, turn + step, turn)


@triton.jit(noinline=True)
def _copy_tensor(
    table, page_bytes, device_pages, device_at, host_at, address, row_bytes, pitch, max_rows, table_start, rows, first,
    end, BLOCK: tl.constexpr, TO_PAGES: tl.constexpr,
):  # fmt: skip
    """Copies one program's chunks of one tensor. It is not inlined, so that all tensors of a group share instructions.

    Arguments up to table_start are shifted like the kernel's, which keeps the caller's register use low.
    """
    step = tl.num_programs(0).to(tl.int64)
    address = (address - SHIFTED) >> 1
    row_bytes = (row_bytes - SHIFTED) >> 1
    pitch = (pitch - SHIFTED) >> 1
    max_rows = (max_rows - SHIFTED) >> 1
    table += (table_start - SHIFTED) >> 1
    device_pages = (device_pages - SHIFTED) >> 1
    pages_at = ((device_at - SHIFTED) >> 1, (host_at - SHIFTED) >> 1, (page_bytes - SHIFTED) >> 1, device_pages)
    one_run = (pitch == row_bytes) | (max_rows <= 1)
    span = tl.where(one_run, ONE_RUN, row_bytes)
    bits = address | tl.where(one_run, 16, row_bytes | pitch) | 16
    word = bits & -bits
    live = rows * row_bytes
    if word == 16:
        _copy_items(table, address, pages_at, row_bytes, pitch, live, span, first, end, step, 16, BLOCK, TO_PAGES)
    elif word == 8:
        _copy_items(table, address, pages_at, row_bytes, pitch, live, span, first, end, step, 8, BLOCK, TO_PAGES)
    elif word == 4:
        _copy_items(table, address, pages_at, row_bytes, pitch, live, span, first, end, step, 4, BLOCK, TO_PAGES)
    elif word == 2:
        _copy_items(table, address, pages_at, row_bytes, pitch, live, span, first, end, step, 2, BLOCK, TO_PAGES)
    else:
        _copy_items(table, address, pages_at, row_bytes, pitch, live, span, first, end, step, 1, BLOCK, TO_PAGES)


@triton.jit
def _copy_items(
    table, address, pages_at, row_bytes, pitch, live, span, first, end, step,
    BYTES: tl.constexpr, BLOCK: tl.constexpr, TO_PAGES: tl.constexpr,
):  # fmt: skip
    """Copies one program's chunks of one tensor, in words of BYTES bytes.

    pages_at: addresses of both tiers, page_bytes, pages of the device tier.
    """
    device_at, host_at, page_bytes, device_pages = pages_at
    word = tl.int64 if BYTES >= 8 else (tl.int32 if BYTES == 4 else (tl.int16 if BYTES == 2 else tl.int8))
    PER_WORD: tl.constexpr = 2 if BYTES == 16 else 1
    ELEMENT: tl.constexpr = BYTES // PER_WORD
    CHUNK: tl.constexpr = BLOCK * 16
    lanes = tl.arange(0, BLOCK)
    parts = tl.arange(0, PER_WORD)[None, :]
    chunks = (page_bytes + CHUNK - 1) // CHUNK
    words_per_row = span // BYTES
    for item in range(first, end, step):
        page = item // chunks
        id = tl.load(table + page).to(tl.int64)
        tier_at = tl.where(id < device_pages, device_at, host_at - device_pages * page_bytes)
        in_page = (item - page * chunks) * CHUNK
        start = page * page_bytes + in_page
        size = tl.minimum(tl.minimum(page_bytes - in_page, CHUNK), live - start)
        page_at = tier_at + id * page_bytes + in_page
        for done in range(0, size, BLOCK * BYTES):
            row = (start + done) // BYTES // words_per_row
            place = (start + done) // BYTES - row * words_per_row + lanes
            # Rows between `row` and a lane's own. At most one wide row ends within a block. The numbers of narrow rows
            # fit 32 bits, in which division is many times cheaper.
            if words_per_row >= BLOCK:
                beyond = (place >= words_per_row).to(tl.int32)
            else:
                beyond = place.to(tl.int32) // words_per_row.to(tl.int32)
            place = (place + beyond * ((pitch - span) // BYTES)) * PER_WORD
            in_rows = (address + row * pitch).to(tl.pointer_type(word)) + (place[:, None] + parts)
            in_pages = (page_at + done).to(tl.pointer_type(word)) + (lanes[:, None] * PER_WORD + parts)
            # Without these hints the compiler loads 8 bytes at a time.
            in_rows = tl.multiple_of(in_rows, (ELEMENT, BYTES))
            in_pages = tl.multiple_of(in_pages, (ELEMENT, BYTES))
            mask = (lanes < (size - done) // BYTES)[:, None]
            if TO_PAGES:
                tl.store(in_pages, tl.load(in_rows, mask=mask), mask=mask)
            else:
                tl.store(in_rows, tl.load(in_pages, mask=mask), mask=mask)
        rest = size % BYTES
        if rest > 0:  # Only at the end of rows without gaps.
            lane = tl.arange(0, 16)
            in_rows = (address + start + size - rest).to(tl.pointer_type(tl.int8)) + lane
            in_pages = (page_at + size - rest).to(tl.pointer_type(tl.int8)) + lane
            if TO_PAGES:
                tl.store(in_pages, tl.load(in_rows, mask=lane < rest), mask=lane < rest)
            else:
                tl.store(in_rows, tl.load(in_pages, mask=lane < rest), mask=lane < rest)


@triton.jit(do_not_specialize_on_alignment=list(range(4)))
def release_kernel(ring, tails, table, held, layout, tensors, COUNT: tl.constexpr, LANES: tl.constexpr):
    """Returns pages to the rings, in one program. layout, tensors: as in plan_kernel."""
    device_pages = (layout[1] - SHIFTED) >> 1
    host_pages = (layout[2] - SHIFTED) >> 1
    tail_device = tl.load(tails)
    tail_host = tl.load(tails + 1)
    for i in tl.static_range(COUNT):
        table_start = (tensors[7 * i + 5] - SHIFTED) >> 1
        slot = (tensors[7 * i + 6] - SHIFTED) >> 1
        pages = tl.load(held + slot * 4, mask=slot >= 0, other=0)
        on_device = pages - tl.load(held + slot * 4 + 3, mask=slot >= 0, other=0)
        if pages > 0:
            _take_back(
                ring, table + table_start, tail_device, tail_host, device_pages, host_pages, pages, on_device, LANES
            )
            tail_device += on_device
            tail_host += pages - on_device
    # Before the stores below, all threads must have read `held` and written their entries.
    tl.debug_barrier()
    for i in tl.static_range(COUNT):
        slot = (tensors[7 * i + 6] - SHIFTED) >> 1
        tl.store(held + slot * 4, 0, mask=slot >= 0)
        tl.store(held + slot * 4 + 3, 0, mask=slot >= 0)
    # See [Note: two ends of a ring].
    tl.atomic_xchg(tails, tail_device, sem="release", scope="gpu")
    tl.atomic_xchg(tails + 1, tail_host, sem="release", scope="gpu")


@triton.jit(noinline=True)
def _take_back(
    ring, table, tail_device, tail_host, device_pages, host_pages, pages, on_device, LANES: tl.constexpr
):  # fmt: skip
    """Appends a tensor's page ids at the tails, the first on_device of them to the device ring."""
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
    places: torch.Tensor | None = None,
    scratch: Sequence[int] = (),
) -> None:
    """Launches paged_stash::plan. num_rows: [1], int64; reserve: [3], int64. See [Note: operands] in cpu_kernels.py.

    places: [entries], int64, parallel to the table, or None; scratch: one number per tensor. See [Note: places]. Raises
    ValueError for places and scratch that do not fit the table and the tensors.
    """
    if places is None and not scratch:
        launch, numbers = _plan(tuple(layout), tuple(tensors), ())
    else:
        _check_places(places, table, len(tensors) // INTS_PER_TENSOR, scratch)
        launch, numbers = _plan(tuple(layout), tuple(tensors), tuple(scratch))
    launch(1, (num_rows, reserve, heads, tails, ring, table, held, counters, places), numbers)


def _check_places(places: torch.Tensor | None, table: torch.Tensor, num_tensors: int, scratch: Sequence[int]) -> None:
    """Raises ValueError unless plan can write places. See [Note: places]."""
    if places is None or not scratch or len(scratch) != num_tensors or min(scratch, default=0) < -1:
        raise ValueError(
            f"scratch ({list(scratch)}) must have one number for each of the {num_tensors} tensors, a page or -1, and "
            f"places ({'None' if places is None else 'a tensor'}) must be given with it"
        )
    is_parallel = places.shape == table.shape and places.device == table.device
    if places.dtype != torch.int64 or not is_parallel or not places.is_contiguous():
        raise ValueError(
            f"places ({list(places.shape)}, {places.dtype}, {places.device}) must be contiguous int64 and parallel to "
            f"the table ({list(table.shape)}, {table.device})"
        )


def stash(
    sources: Sequence[torch.Tensor],
    device_pages: torch.Tensor,
    *,
    host_pages: torch.Tensor,
    table: torch.Tensor,
    held: torch.Tensor,
    layout: Sequence[int],
    tensors: Sequence[int],
    num_programs: int,
    host_only: bool = False,
) -> None:
    """Launches paged_stash::stash. sources: at most 16, [bytes], uint8. See [Note: operands] in cpu_kernels.py.

    host_only: whether to copy only the pages on the host, because the other rows were computed in their pages.
    """
    _launch(
        table,
        held,
        to_pages=True,
        pages=(device_pages, host_pages),
        moved=sources,
        numbers=(layout, tensors),
        num_programs=num_programs,
        host_only=host_only,
    )


def restore(
    device_pages: torch.Tensor,
    host_pages: torch.Tensor,
    *,
    table: torch.Tensor,
    held: torch.Tensor,
    targets: Sequence[torch.Tensor],
    layout: Sequence[int],
    tensors: Sequence[int],
    num_programs: int,
    host_only: bool = False,
) -> None:
    """Launches paged_stash::restore. targets: at most 16, [bytes], uint8. See [Note: operands] in cpu_kernels.py.

    host_only: as in stash.
    """
    _launch(
        table,
        held,
        to_pages=False,
        pages=(device_pages, host_pages),
        moved=targets,
        numbers=(layout, tensors),
        num_programs=num_programs,
        host_only=host_only,
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
    """Launches paged_stash::release. ring: [pages], int32; tails: [2], int64. See [Note: operands], cpu_kernels.py."""
    launch, numbers = _release(tuple(layout), tuple(tensors))
    launch(1, (ring, tails, table, held), numbers)


# Two functions, because a kernel as a key of a cache would be hashed by Python code in each call.


@functools.lru_cache(MAX_PREPARED)
def _plan(
    layout: tuple[int, ...], tensors: tuple[int, ...], scratch: tuple[int, ...]
) -> tuple[PreparedLaunch, tuple[tuple[int, ...], ...]]:
    """Returns a launch of plan_kernel, and its encoded numbers. scratch: () unless it writes places."""
    count = count_for(len(tensors) // INTS_PER_TENSOR)
    numbers: tuple[tuple[int, ...], ...] = (shifted(layout), shifted_tensors(tensors))
    if scratch:
        numbers += (shifted([*scratch, *[-1] * (count - len(scratch))]),)
    return _of_count(plan_kernel, count, bool(scratch)), numbers


@functools.lru_cache(MAX_PREPARED)
def _release(
    layout: tuple[int, ...], tensors: tuple[int, ...]
) -> tuple[PreparedLaunch, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Returns a launch of release_kernel, and its encoded numbers."""
    count = count_for(len(tensors) // INTS_PER_TENSOR)
    return _of_count(release_kernel, count, False), (shifted(layout), shifted_tensors(tensors))


@functools.cache
def _of_count(kernel: Any, count: int, has_places: bool) -> PreparedLaunch:
    """Returns the launch of plan_kernel or release_kernel that all groups of up to `count` tensors share.

    has_places: whether plan writes places.
    """
    absent = {"scratch": None} if kernel is plan_kernel and not has_places else {}
    return PreparedLaunch(kernel, {**absent, "COUNT": count, "LANES": LANES}, options={"num_warps": 4})


def _launch(
    table: torch.Tensor,
    held: torch.Tensor,
    *,
    to_pages: bool,
    pages: tuple[torch.Tensor, torch.Tensor],
    moved: Sequence[torch.Tensor],
    numbers: tuple[Sequence[int], Sequence[int]],
    num_programs: int,
    host_only: bool,
) -> None:
    if not moved:
        return
    layout, tensors = tuple(numbers[0]), tuple(numbers[1])
    tiers = [tier.data_ptr() for tier in pages]
    assert not (tiers[0] | tiers[1]) % ALIGNMENT, "pages start at multiples of 16 bytes"
    addresses = [tensor.data_ptr() for tensor in moved]
    addresses += [0] * (count_for(len(moved)) - len(moved))
    launch, useful = _copy(layout[0], tensors, to_pages)
    if num_programs:
        useful = min(useful, num_programs)
    records, memory = shifted_tensors(tensors), shifted(addresses)
    # See [Note: tiers].
    if not host_only:
        launch(useful, (table, held), (shifted((*layout, *tiers, 0)), records, memory))
    if layout[2]:
        launch(min(useful, HOST_PROGRAMS), (table, held), (shifted((*layout, *tiers, 1)), records, memory))


@functools.lru_cache(MAX_PREPARED)
def _copy(page_bytes: int, tensors: tuple[int, ...], to_pages: bool) -> tuple[PreparedLaunch, int]:
    """Returns a launch of copy_kernel, and the number of programs beyond which more would be idle, at least 1."""
    block = block_words(page_bytes)
    return _of_block(block, to_pages), max(_max_items(tensors, page_bytes, block=block), 1)


@functools.cache
def _of_block(block: int, to_pages: bool) -> PreparedLaunch:
    """Returns the launch of copy_kernel that all groups of a pool share."""
    fixed = {"BLOCK": block, "TO_PAGES": to_pages}
    options = {"num_warps": block // WORDS_PER_WARP, "maxnreg": MAX_REGISTERS}
    return PreparedLaunch(copy_kernel, fixed, options=options, per_processor=COPIES_PER_PROCESSOR)


def block_words(page_bytes: int) -> int:
    """Returns the number of 16-byte words that a program copies per iteration: a page, within limits."""
    return min(max(next_power_of_2(page_bytes // 16), MIN_BLOCK), MAX_BLOCK)


def _max_items(tensors: Sequence[int], page_bytes: int, *, block: int) -> int:
    """Returns the number of chunks of the group if all rows are live. More programs would be idle."""
    records = (tensors[start : start + INTS_PER_TENSOR] for start in range(0, len(tensors), INTS_PER_TENSOR))
    pages = sum(-(-record[0] * record[2] // page_bytes) for record in records)
    return pages * -(-page_bytes // (16 * block))


def residencies(num_warps: int) -> Mapping[str, Residency]:
    """Maps each kernel's name to the residency that its launcher assumes. plan and release run as one program."""
    copies = Residency(at_least=COPIES_PER_PROCESSOR, at_most_launched=COPIES_PER_PROCESSOR, runs_beside=True)
    return {"plan_kernel": Residency(), "copy_kernel": copies, "release_kernel": Residency()}


def compile_cases() -> Iterator[CompileCase]:
    """Yields compile cases: plan and release with the minimum and maximum numbers of tensors, and both copies."""
    state = {"ring": "*i32", "tails": "*i64", "table": "*i64", "held": "*i64"}
    plan_state = {"num_rows": "*i64", "reserve": "*i64", "heads": "*i64", "counters": "*i64", **state}
    for count in (COUNTS[0], COUNTS[-1]):
        numbers = {
            "layout": ("i64",) * 3,
            "tensors": ("i64",) * INTS_PER_TENSOR * count,
            "COUNT": count,
            "LANES": LANES,
        }
        warps = {"num_warps": 4}
        for has_places, words in ((False, ""), (True, ", with places")):
            more = {"places": "*i64" if has_places else None, "scratch": ("i64",) * count if has_places else None}
            yield compile_case(
                plan_kernel, f"plan, {count} tensors{words}", options=warps, **plan_state, **numbers, **more
            )
        yield compile_case(release_kernel, f"release, {count} tensors", options=warps, **state, **numbers)
    count = 4
    moved = {"pool": ("i64",) * 6, "tensors": ("i64",) * INTS_PER_TENSOR * count, "addresses": ("i64",) * count}
    for block in (MIN_BLOCK, MAX_BLOCK):
        for name, to_pages in (("stash", True), ("restore", False)):
            constants = {"BLOCK": block, "TO_PAGES": to_pages}
            warps = {"num_warps": block // WORDS_PER_WARP, "maxnreg": MAX_REGISTERS}
            records = {"table": "*i64", "held": "*i64"}
            yield compile_case(
                copy_kernel, f"{name}, blocks of {block}", options=warps, **records, **moved, **constants
            )
