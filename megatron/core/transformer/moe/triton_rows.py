"""Triton kernels for the operators in static_rows.py, and their launchers, which have the operators' names.

Kernels are not specialized on row counts, so a different count causes no compilation. static_rows.py defines slots,
parts, rows and padding.

[Note: order of slots]
Slots are ordered by expert as by a stable sort, in two launches. In the first launch, each program counts the experts
of a run of slots, and all rows are marked as padding. In the second launch, each program adds up the counts of all
programs, assigns rows to the slots of its run, and overwrites the marks of these rows. In a single launch, programs
would have to wait for the counts of others, which can deadlock unless all of them are resident. Rows depend only on
sums of integers and never on the order of atomic operations, so they are the same in each run.

[Note: bytes in flight] A load takes about 0.7 us, so 132 multiprocessors reach the 4.3 TB/s of an H200 only if each has
23 KB of loads in flight all the time. Programs of row kernels are therefore small enough for many of them to be
resident, and issue independent loads before they use the first. benchmarks/compiled_kernels.py multiplies both.
"""
# mypy: allow-untyped-defs

import functools
from collections.abc import Iterator, Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.device.triton_compile import CompileCase, Residency, compile_case
from megatron.core.device.triton_launch import MAX_PREPARED, PreparedLaunch, next_power_of_2
from megatron.core.device.triton_pages import find_rows, row_layout

# Elements that a program sums for each choice: 16 bytes for each thread of 4 warps in half precision. See [Note: bytes
# in flight].
_TILE = 1024
# Columns that a program copies per iteration, and rows of a tile, of which narrow rows would need fewer programs than
# there are multiprocessors.
_COPIED_COLUMNS, _MOST_ROWS = 2048, 128
# Choices whose rows the compiler may load before it adds the first of them: of rows whose width 16 divides, which are
# loaded 16 bytes at a time, and of others. With the other number, some of both spill registers.
_WIDE_LOADS, _NARROW_LOADS = 4, 8
_WARPS = {"num_warps": 4}

# Slots that a program orders per iteration. It compares all pairs of them.
_SLOTS = 64
# Slots per program. Once the maximum number of programs is reached, programs get more slots, because each program reads
# the counts of all others.
_SLOTS_OF_PROGRAM, _MOST_PROGRAMS = 512, 256


@triton.jit
def _keys(experts, slot, end, first_expert, num_experts):
    # num_experts for slots without a row.
    expert = tl.load(experts + slot, mask=slot < end, other=-1) - first_expert
    is_here = (slot < end) & (expert >= 0) & (expert < num_experts)
    return tl.where(is_here, expert, num_experts).to(tl.int32)


@triton.jit(do_not_specialize=["first_expert", "num_experts", "num_slots", "num_rows"])
def count_kernel(
    experts,
    counts,
    slot_of_row,
    token_of_row,
    num_slots,
    num_rows,
    first_expert,
    num_experts,
    BINS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Counts the slots of each expert, separately in each program's run of slots, and marks all rows as padding."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    total = tl.zeros((BINS,), dtype=tl.int32)
    run = tl.cdiv(num_slots, programs)
    end = tl.minimum((program + 1) * run, num_slots)
    for first in range(program * run, end, SLOTS):
        total += tl.histogram(_keys(experts, first + tl.arange(0, SLOTS), end, first_expert, num_experts), BINS)
    tl.store(counts + program * BINS + tl.arange(0, BINS), total)
    none = tl.full((SLOTS,), -1, dtype=tl.int32)
    for first in range(program * SLOTS, num_rows, programs * SLOTS):
        row = first + tl.arange(0, SLOTS)
        tl.store(slot_of_row + row, none, mask=row < num_rows)
        tl.store(token_of_row + row, none, mask=row < num_rows)


@triton.jit(
    do_not_specialize=[
        *("first_expert", "num_experts", "num_slots", "choices", "experts_per_part", "rows_per_part", "alignment")
    ]
)
def order_kernel(
    experts,
    counts,
    slot_of_row,
    token_of_row,
    row_of_slot,
    wanted,
    kept,
    rows_needed,
    num_rows,
    num_slots,
    rows_per_part,
    first_expert,
    num_experts,
    choices,
    experts_per_part,
    alignment,
    BINS: tl.constexpr,
    SLOTS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Assigns a row to each slot. Every program computes the first rows of all experts from the counts."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    bins = tl.arange(0, BINS)
    total = tl.zeros((BINS,), dtype=tl.int32)
    before = tl.zeros((BINS,), dtype=tl.int32)
    for first in range(0, programs, PROGRAMS):
        other = first + tl.arange(0, PROGRAMS)
        place = other[:, None] * BINS + bins[None, :]
        found = tl.load(counts + place, mask=(other < programs)[:, None] & (bins < num_experts)[None, :], other=0)
        total += tl.sum(found, axis=0)
        before += tl.sum(tl.where((other < program)[:, None], found, 0), axis=0)
    aligned = tl.cdiv(total, alignment) * alignment
    starts = tl.cumsum(aligned, axis=0) - aligned
    starts -= tl.gather(starts, tl.minimum(bins // experts_per_part * experts_per_part, BINS - 1), 0)
    following = starts + before

    run = tl.cdiv(num_slots, programs)
    end = tl.minimum((program + 1) * run, num_slots)
    offset = tl.arange(0, SLOTS)
    for first in range(program * run, end, SLOTS):
        slot = first + offset
        expert = _keys(experts, slot, end, first_expert, num_experts)
        is_before = (expert[:, None] == expert[None, :]) & (offset[:, None] > offset[None, :])
        place = tl.gather(following, expert, 0) + tl.sum(is_before.to(tl.int32), axis=1)
        row = expert // experts_per_part * rows_per_part + place
        is_kept = (expert < num_experts) & (place < rows_per_part)
        tl.store(row_of_slot + slot, tl.where(is_kept, row, -1), mask=slot < end)
        tl.store(slot_of_row + row, slot, mask=is_kept)
        tl.store(token_of_row + row, slot // choices, mask=is_kept)
        following += tl.histogram(expert, BINS)

    if program == 0:
        is_expert = bins < num_experts
        ends = tl.where(is_expert, starts + aligned, 0)
        of_expert = tl.where(is_expert, tl.minimum(ends, rows_per_part) - tl.minimum(starts, rows_per_part), 0)
        tl.store(wanted + bins, total.to(tl.int64), mask=is_expert)
        tl.store(kept + bins, of_expert.to(tl.int64), mask=is_expert)
        tl.store(rows_needed, tl.max(ends, axis=0).to(tl.int64))
        tl.store(num_rows, tl.sum(of_expert, axis=0).to(tl.int64))


@triton.jit(do_not_specialize=["num_experts", "rows_per_rank"])
def experts_kernel(rows_per_group, experts, rows_per_rank, num_experts, BINS: tl.constexpr, ROWS: tl.constexpr):
    """Finds the expert of each row of a rank: the number of experts whose rows end before it."""
    rank, bins = tl.program_id(1), tl.arange(0, BINS)
    is_expert = bins < num_experts
    counts = tl.load(rows_per_group + rank * num_experts + bins, mask=is_expert, other=0)
    ends = tl.cumsum(counts, axis=0)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_past = (row[:, None] >= ends[None, :]) & is_expert[None, :]
    tl.store(experts + rank * rows_per_rank + row, tl.sum(is_past.to(tl.int32), axis=1), mask=row < rows_per_rank)


@triton.jit(do_not_specialize=["capacity"], do_not_specialize_on_alignment=["num_rows", "out_table"])
def gather_kernel(
    x,
    source_of_row,
    num_rows,
    out,
    out_table,
    capacity,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OUT_PAGE: tl.constexpr,
):
    """Copies the source of each live row, at most `capacity`. OUT_PAGE: see [Note: lookups] in triton_pages.py."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_live = row < tl.minimum(tl.load(num_rows), capacity)
    source = tl.load(source_of_row + row, mask=is_live, other=-1)
    is_there = source >= 0
    start = source.to(tl.int64) * width
    out_row = find_rows(out_table, row, is_live, OUT_PAGE)
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = (column < width)[None, :]
        values = tl.load(x + start[:, None] + column[None, :], mask=is_there[:, None] & inside, other=0)
        place = out_row.to(tl.int64)[:, None] * width + column[None, :]
        tl.store(out + place, values, mask=is_live[:, None] & inside)


@triton.jit(do_not_specialize=["num_tokens"])
def sum_kernel(
    rows,
    row_of_slot,
    out,
    num_tokens,
    width,
    CHOICES: tl.constexpr,
    LOADS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Adds the rows of each token's slots in the order of its choices. The loads of LOADS choices are independent."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_token = token < num_tokens
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (column < width)[None, :]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, CHOICES, LOADS):
        for choice in tl.static_range(LOADS):
            slot = token * CHOICES + first + choice
            exists = is_token & (first + choice < CHOICES)
            row = tl.load(row_of_slot + slot, mask=exists, other=-1).to(tl.int64)
            mask = (row >= 0)[:, None] & inside
            total += tl.load(rows + row[:, None] * width + column[None, :], mask=mask, other=0).to(tl.float32)
    place = token.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=is_token[:, None] & inside)


def order_slots(
    expert_indices: Tensor,
    *,
    first_expert: int,
    num_experts: int,
    num_parts: int,
    rows_per_part: int,
    alignment: int,
) -> tuple[Tensor, ...]:
    """Assigns a buffer row to each slot, sorted by expert. See [Note: order of slots].

    One kernel counts the slots of each expert, and a second one assigns the rows.

    expert_indices: [T, K], int64 or int32. Returns slot_of_row, token_of_row: [num_parts * rows_per_part], int32;
    row_of_slot: [T, K], int32; wanted, kept: [num_experts], int64; rows_needed, num_rows: [1], int64.
    """
    experts, num_slots = expert_indices.contiguous(), expert_indices.numel()
    programs = max(1, min(-(-num_slots // _SLOTS_OF_PROGRAM), _MOST_PROGRAMS))
    rows, choices = num_parts * rows_per_part, expert_indices.shape[1]
    count, order, bins = _orders(first_expert, num_experts, num_parts, choices, alignment)
    slot_of_row, token_of_row = [experts.new_empty(rows, dtype=torch.int32) for _ in range(2)]
    row_of_slot = torch.empty_like(experts, dtype=torch.int32)
    counts = experts.new_empty(programs, bins, dtype=torch.int32)
    wanted, kept, rows_needed, num_rows = [
        experts.new_empty(size, dtype=torch.int64) for size in (num_experts, num_experts, 1, 1)
    ]
    count(programs, (experts, counts, slot_of_row, token_of_row), (num_slots, rows))
    results = (slot_of_row, token_of_row, row_of_slot, wanted, kept, rows_needed, num_rows)
    order(programs, (experts, counts, *results), (num_slots, rows_per_part))
    return results


@functools.lru_cache(MAX_PREPARED)
def _orders(
    first_expert: int, num_experts: int, num_parts: int, choices: int, alignment: int
) -> tuple[PreparedLaunch, PreparedLaunch, int]:
    """Returns launches of count_kernel and order_kernel, and the number of bins in which they count experts."""
    bins = next_power_of_2(num_experts + 1)
    sizes = {"first_expert": first_expert, "num_experts": num_experts, "BINS": bins, "SLOTS": _SLOTS}
    of_parts = {"choices": max(1, choices), "experts_per_part": num_experts // num_parts, "alignment": alignment}
    count = PreparedLaunch(count_kernel, sizes, options=_WARPS)
    order_sizes = {**sizes, **of_parts, "PROGRAMS": _programs_at_once(bins)}
    return count, PreparedLaunch(order_kernel, order_sizes, options=_WARPS), bins


def experts_of_rows(rows_per_group: Tensor, *, rows_per_rank: int) -> Tensor:
    """Finds the local expert of each row received from other ranks, or e for a padding row.

    rows_per_group: [ranks, e], int64. Returns [ranks * rows_per_rank, 1], int32.
    """
    ranks, num_experts = rows_per_group.shape
    experts = rows_per_group.new_empty(ranks * rows_per_rank, 1, dtype=torch.int32)
    if experts.numel():
        search, tile_rows = _search(num_experts)
        programs = -(-rows_per_rank // tile_rows)
        search(programs, (rows_per_group.contiguous(), experts), (rows_per_rank,), columns=ranks)
    return experts


@functools.cache
def _search(num_experts: int) -> tuple[PreparedLaunch, int]:
    """Returns a launch of experts_kernel, and the rows of a tile."""
    sizes = _sizes_of_search(num_experts)
    launch = PreparedLaunch(experts_kernel, {"num_experts": num_experts, **sizes}, options=_WARPS)
    return launch, sizes["ROWS"]


def gather_rows(
    x: Tensor,
    source_of_row: Tensor,
    *,
    num_rows: Tensor,
    out: Tensor,
    out_table: Tensor | None = None,
    out_sizes: Sequence[int] = (),
) -> None:
    """Writes out[r] = x[source_of_row[r]], or zeros if the source is -1, for live rows only.

    x: [T, W], any dtype; source_of_row: [C], int32; num_rows: [1], int64; out: [C, W], x's dtype, may be in pages.
    Raises ValueError for a table and sizes that do not fit the operands.
    """
    if out_table is not None or out_sizes:
        layout = row_layout("out", out, (out_table, out_sizes), num_rows=source_of_row.shape[0], width=x.shape[1])
        if out.dtype != x.dtype:
            raise ValueError(f"out ({out.dtype}) must have x's dtype, {x.dtype}")
        capacity, page = layout.num_rows, layout.page
    else:
        capacity, page = out.shape[0], 0
    if out.numel():
        gather, tile_rows = _gather(x.shape[1], page)
        gather(-(-capacity // tile_rows), (x, source_of_row, num_rows, out, out_table), (capacity,))


@functools.cache
def _gather(width: int, page: int) -> tuple[PreparedLaunch, int]:
    """Returns a launch of gather_kernel, and the rows of a tile. page: rows of a page of the result, 0 without."""
    tile = _tile(width, most_columns=_COPIED_COLUMNS)
    return PreparedLaunch(gather_kernel, {"width": width, **tile, "OUT_PAGE": page}, options=_WARPS), tile["ROWS"]


def sum_rows(rows: Tensor, row_of_slot: Tensor) -> Tensor:
    """Sums rows[row_of_slot[t, k]] over k in fp32, skipping entries of -1.

    rows: [C, W], fp32, bf16 or fp16; row_of_slot: [T, K], int32. Returns [T, W], same dtype. Raises ValueError for
    other dtypes.
    """
    (num_tokens, choices), width = row_of_slot.shape, rows.shape[1]
    add, tile_rows, column_tiles = _sum(rows.dtype, choices, width)
    out = rows.new_empty(num_tokens, width)
    if out.numel():
        add(-(-num_tokens // tile_rows), (rows, row_of_slot, out), (num_tokens,), columns=column_tiles)
    return out


@functools.cache
def _sum(dtype: torch.dtype, choices: int, width: int) -> tuple[PreparedLaunch, int, int]:
    """Returns a launch of sum_kernel, the rows of a tile, and the number of tiles in a row."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{dtype} is not supported: only fp32, bf16 and fp16 have kernels")
    tile = _tile(width)
    launch = PreparedLaunch(sum_kernel, {"width": width, **_loads(choices, width), **tile}, options=_WARPS)
    return launch, tile["ROWS"], -(-width // tile["COLUMNS"])


def residencies(num_warps: int) -> Mapping[str, Residency]:
    """Maps each kernel's name to the residency that its launcher assumes, which is always the default."""
    assert num_warps == _WARPS["num_warps"]
    names = ("count_kernel", "order_kernel", "experts_kernel", "gather_kernel", "sum_kernel")
    return dict.fromkeys(names, Residency())


def compile_cases() -> Iterator[CompileCase]:
    """Yields compile cases: orders of few and of many experts, wide rows in bf16, and fp32 rows of one element.

    Wide rows are gathered into contiguous memory and into pages, and so are packed rows, which are bytes
    (megatron/core/block_scaled/format.py).
    """
    for num_experts in (8, 256):
        yield from _order_cases(num_experts)
    for name, elements in (("bf16", 4096), ("fp32", 1), ("u8", 4224)):
        data, width = f"*{name}:16", 1 if elements == 1 else "i32:16"
        for page in (0, 96) if elements > 1 else (0,):
            yield compile_case(
                gather_kernel,
                f"gather_rows, {name}, width {width}{', into pages' if page else ''}",
                options=_WARPS,
                x=data,
                source_of_row="*i32:16",
                num_rows="*i64",
                out=data,
                out_table="*i64" if page else None,
                capacity="i32",
                width=width,
                OUT_PAGE=page,
                **_tile(elements, most_columns=_COPIED_COLUMNS),
            )
        if name == "u8":
            continue
        yield compile_case(
            sum_kernel,
            f"sum_rows, {name}, width {width}",
            options=_WARPS,
            rows=data,
            row_of_slot="*i32:16",
            out=data,
            num_tokens="i32",
            width=width,
            **_loads(8, elements),
            **_tile(elements),
        )


def _order_cases(num_experts: int) -> Iterator[CompileCase]:
    bins, words = next_power_of_2(num_experts + 1), f"{num_experts} experts"
    maps = dict.fromkeys(("counts", "slot_of_row", "token_of_row"), "*i32:16")
    numbers = dict.fromkeys(("first_expert", "num_experts", "num_slots"), "i32")
    of_parts = dict.fromkeys(("choices", "experts_per_part", "rows_per_part", "alignment"), "i32")
    totals = dict.fromkeys(("wanted", "kept", "rows_needed", "num_rows"), "*i64:16")
    sizes = {"BINS": bins, "SLOTS": _SLOTS}
    yield compile_case(
        count_kernel,
        f"order_slots' counts, {words}",
        options=_WARPS,
        experts="*i64:16",
        num_rows="i32",
        **maps,
        **numbers,
        **sizes,
    )
    yield compile_case(
        order_kernel,
        f"order_slots, {words}",
        options=_WARPS,
        experts="*i64:16",
        row_of_slot="*i32:16",
        PROGRAMS=_programs_at_once(bins),
        **maps,
        **totals,
        **numbers,
        **of_parts,
        **sizes,
    )
    yield compile_case(
        experts_kernel,
        f"experts_of_rows, {words}",
        options=_WARPS,
        rows_per_group="*i64:16",
        experts="*i32:16",
        num_experts="i32",
        rows_per_rank="i32",
        **_sizes_of_search(num_experts),
    )


def _programs_at_once(bins: int) -> int:
    """Returns the number of programs whose counts are summed per iteration, at most 16 numbers per thread."""
    return max(1, min(2 * _TILE // bins, 64))


def _sizes_of_search(num_experts: int) -> dict[str, int]:
    bins = next_power_of_2(num_experts)
    return {"BINS": bins, "ROWS": max(8, min(2 * _TILE // bins, 256))}


def _tile(width: int, *, most_columns: int = _TILE) -> dict[str, int]:
    columns = min(most_columns, next_power_of_2(width))
    return {"ROWS": max(1, min(_TILE // columns, _MOST_ROWS)), "COLUMNS": columns}


def _loads(choices: int, width: int) -> dict[str, int]:
    return {"CHOICES": choices, "LOADS": max(1, min(choices, _NARROW_LOADS if width % 16 else _WIDE_LOADS))}
