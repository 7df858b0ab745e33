"""The kernel that copies the live rows of a group's tensors into their pages and back; plan has chosen the pages.

[Note: work of a copy]
A page is cut into chunks of BLOCK words of 16 bytes. The chunks of all tensors, page after page, are dealt to the
programs in turn, so that one launch serves a whole group whatever the mix of sizes, and a program without a chunk
leaves at once. The host knows only the largest possible number of rows; the kernel reads from `held` how many are live.

[Note: words]
Widths and addresses decide how many bytes at a time a tensor can be copied: the largest power of 2 up to 16 that
divides its address and, where rows lie apart, width and pitch. Rows without gaps are one run of bytes: their width does
not matter, and bytes after the last whole word go one by one. Pages start at multiples of 16. The kernel chooses for
each tensor, from numbers that all its threads share: that costs a branch, but no second compilation.

[Note: few programs]
A copy beside a matrix product takes streaming multiprocessors away from it and slows it down by more than the copy is
worth, while a fraction of them already uses all of the memory's bandwidth. Hence num_programs. A program of the largest
block uses all registers of a multiprocessor and has up to 64 KiB of loads under way. 0 stands for MAX_WARPS warps on
each multiprocessor, in one such program or several smaller ones, for copies that nothing runs beside.
"""
# mypy: allow-untyped-defs

import functools
from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl

from megatron.core.transformer.moe.paged_stash.page_layout import ALIGNMENT, INTS_PER_TENSOR
from megatron.core.transformer.moe.paged_stash.triton_numbers import SHIFTED, count_for, shifted, shifted_tensors
from megatron.core.triton_compile import CompileCase, compile_case

MIN_BLOCK, MAX_BLOCK = 128, 4096  # words of 16 bytes
WORDS_PER_WARP = 256  # 8 a thread: enough loads under way to hide the memory's latency
MIN_WARPS, MAX_WARPS = 4, 16
ONE_RUN = tl.constexpr(2**60)  # width of rows without gaps: longer than any tensor


@triton.jit
def _copy_items(
    table, address, pages_at, row_bytes, pitch, live, span, first, items, step,
    BYTES: tl.constexpr, BLOCK: tl.constexpr, TO_PAGES: tl.constexpr,
):  # fmt: skip
    """One program's chunks of one tensor. pages_at: addresses of both tiers, page_bytes, pages of the device tier."""
    device_at, host_at, page_bytes, device_pages = pages_at
    word = tl.int64 if BYTES >= 8 else (tl.int32 if BYTES == 4 else (tl.int16 if BYTES == 2 else tl.int8))
    PER_WORD: tl.constexpr = 2 if BYTES == 16 else 1
    ELEMENT: tl.constexpr = BYTES // PER_WORD
    CHUNK: tl.constexpr = BLOCK * 16
    lanes = tl.arange(0, BLOCK)
    parts = tl.arange(0, PER_WORD)[None, :]
    chunks = (page_bytes + CHUNK - 1) // CHUNK
    words_per_row = span // BYTES
    for item in range(first, items, step):
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
            # How many rows a lane is beyond `row`. Of wide rows at most one ends within a block; the numbers of narrow
            # ones fit 32 bits, in which division is many times cheaper.
            if words_per_row >= BLOCK:
                beyond = (place >= words_per_row).to(tl.int32)
            else:
                beyond = place.to(tl.int32) // words_per_row.to(tl.int32)
            place = (place + beyond * ((pitch - span) // BYTES)) * PER_WORD
            in_rows = (address + row * pitch).to(tl.pointer_type(word)) + (place[:, None] + parts)
            in_pages = (page_at + done).to(tl.pointer_type(word)) + (lanes[:, None] * PER_WORD + parts)
            # Without these promises the compiler loads 8 bytes at a time.
            in_rows = tl.multiple_of(in_rows, (ELEMENT, BYTES))
            in_pages = tl.multiple_of(in_pages, (ELEMENT, BYTES))
            mask = (lanes < (size - done) // BYTES)[:, None]
            if TO_PAGES:
                tl.store(in_pages, tl.load(in_rows, mask=mask), mask=mask)
            else:
                tl.store(in_rows, tl.load(in_pages, mask=mask), mask=mask)
        rest = size % BYTES
        if rest > 0:  # Only at the end of rows without gaps, where a byte's position gives its address.
            lane = tl.arange(0, 16)
            in_rows = (address + start + size - rest).to(tl.pointer_type(tl.int8)) + lane
            in_pages = (page_at + size - rest).to(tl.pointer_type(tl.int8)) + lane
            if TO_PAGES:
                tl.store(in_pages, tl.load(in_rows, mask=lane < rest), mask=lane < rest)
            else:
                tl.store(in_rows, tl.load(in_pages, mask=lane < rest), mask=lane < rest)


@triton.jit(noinline=True)
def _copy_tensor(
    table, page_bytes, device_pages, device_at, host_at, address, row_bytes, pitch, max_rows, table_start, rows, first,
    items, BLOCK: tl.constexpr, TO_PAGES: tl.constexpr,
):  # fmt: skip
    """One program's chunks of one tensor. Not inlined, so that all tensors of a group run the same instructions.

    Numbers up to table_start come shifted, as the kernel's arguments do: the caller then keeps few in registers.
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
        _copy_items(table, address, pages_at, row_bytes, pitch, live, span, first, items, step, 16, BLOCK, TO_PAGES)
    elif word == 8:
        _copy_items(table, address, pages_at, row_bytes, pitch, live, span, first, items, step, 8, BLOCK, TO_PAGES)
    elif word == 4:
        _copy_items(table, address, pages_at, row_bytes, pitch, live, span, first, items, step, 4, BLOCK, TO_PAGES)
    elif word == 2:
        _copy_items(table, address, pages_at, row_bytes, pitch, live, span, first, items, step, 2, BLOCK, TO_PAGES)
    else:
        _copy_items(table, address, pages_at, row_bytes, pitch, live, span, first, items, step, 1, BLOCK, TO_PAGES)


@triton.jit(do_not_specialize_on_alignment=["table", "held"])
def copy_kernel(table, held, pool, tensors, addresses, BLOCK: tl.constexpr, TO_PAGES: tl.constexpr):
    """pool: page_bytes, then pages and addresses of both tiers; tensors: encode_tensors; addresses: one for each."""
    page_bytes = (pool[0] - SHIFTED) >> 1
    step = tl.num_programs(0).to(tl.int64)
    turn = tl.program_id(0).to(tl.int64)
    chunks = (page_bytes + BLOCK * 16 - 1) // (BLOCK * 16)
    for i in tl.static_range(len(addresses)):
        slot = (tensors[7 * i + 6] - SHIFTED) >> 1
        items = chunks * tl.load(held + slot * 3, mask=slot >= 0, other=0)
        if turn < items:
            _copy_tensor(
                table, pool[0], pool[1], pool[3], pool[4], addresses[i], tensors[7 * i], tensors[7 * i + 1],
                tensors[7 * i + 2], tensors[7 * i + 5], tl.load(held + slot * 3 + 1), turn, items, BLOCK, TO_PAGES,
            )  # fmt: skip
        # The next tensor's first chunk goes to the program whose turn it is.
        turn -= items % step
        turn = tl.where(turn < 0, turn + step, turn)


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
) -> None:
    """paged_stash::stash in one launch. sources: at most 16, [bytes], uint8; others as in kernels.py."""
    pages = (device_pages, host_pages)
    _launch(
        table, held, to_pages=True, pages=pages, moved=sources, numbers=(layout, tensors), num_programs=num_programs
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
) -> None:
    """paged_stash::restore in one launch. targets: at most 16, [bytes], uint8; others as in kernels.py."""
    pages = (device_pages, host_pages)
    _launch(
        table, held, to_pages=False, pages=pages, moved=targets, numbers=(layout, tensors), num_programs=num_programs
    )


def _launch(
    table: torch.Tensor,
    held: torch.Tensor,
    *,
    to_pages: bool,
    pages: tuple[torch.Tensor, torch.Tensor],
    moved: Sequence[torch.Tensor],
    numbers: tuple[Sequence[int], Sequence[int]],
    num_programs: int,
) -> None:
    if not moved:
        return
    layout, tensors = numbers
    tiers = [tier.data_ptr() for tier in pages]
    assert not any(tier % ALIGNMENT for tier in tiers), "pages start at multiples of 16 bytes"
    addresses = [tensor.data_ptr() for tensor in moved]
    addresses += [0] * (count_for(len(moved)) - len(moved))
    block = block_words(layout[0])
    useful = num_programs or _num_processors(table.device) * MAX_WARPS // _num_warps(block)
    programs = min(useful, _max_items(tensors, layout[0], block=block))
    copy_kernel[(max(programs, 1),)](
        table,
        held,
        shifted([*layout, *tiers]),
        shifted_tensors(tensors),
        shifted(addresses),
        BLOCK=block,
        TO_PAGES=to_pages,
        num_warps=_num_warps(block),
    )


def block_words(page_bytes: int) -> int:
    """Words of 16 bytes that a program moves at a time: a page, within limits; the same for all groups of a pool."""
    return min(max(triton.next_power_of_2(page_bytes // 16), MIN_BLOCK), MAX_BLOCK)


def _num_warps(block: int) -> int:
    return min(max(block // WORDS_PER_WARP, MIN_WARPS), MAX_WARPS)


def _max_items(tensors: Sequence[int], page_bytes: int, *, block: int) -> int:
    """Chunks of the group if all rows are live: more programs would have nothing to do."""
    records = (tensors[start : start + INTS_PER_TENSOR] for start in range(0, len(tensors), INTS_PER_TENSOR))
    pages = sum(-(-record[0] * record[2] // page_bytes) for record in records)
    return pages * -(-page_bytes // (16 * block))


@functools.cache
def _num_processors(device: torch.device) -> int:
    """Streaming multiprocessors; 1 where kernels are interpreted."""
    if device.type == "cpu":
        return 1
    return torch.get_device_module(device).get_device_properties(device).multi_processor_count


def compile_cases() -> Iterator[CompileCase]:
    """Both directions, for large and for small pages."""
    count = 4
    numbers = {"pool": ("i64",) * 5, "tensors": ("i64",) * INTS_PER_TENSOR * count, "addresses": ("i64",) * count}
    for block in (MIN_BLOCK, MAX_BLOCK):
        for name, to_pages in (("stash", True), ("restore", False)):
            constants = {"BLOCK": block, "TO_PAGES": to_pages}
            warps = {"num_warps": _num_warps(block)}
            state = {"table": "*i64", "held": "*i64"}
            yield compile_case(
                copy_kernel, f"{name}, blocks of {block}", options=warps, **state, **numbers, **constants
            )
