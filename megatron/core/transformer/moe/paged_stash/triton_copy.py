"""Kernel that copies the live rows of a group's tensors into their pages and back; which pages is not decided here.

[Note: work of a copy]
A page is cut into chunks of BLOCK words of 16 bytes. The chunks of all tensors, page after page, are dealt to the
programs in turn, so that one launch serves a whole group whatever the mix of sizes, and a program without a chunk
leaves at once. The host knows only the most rows there can be; how many live the kernel reads from `held`.

[Note: words]
Widths and addresses decide with how many bytes at a time a tensor can be copied: the largest power of 2 up to 16 that
divides its address and, where rows lie apart, width and pitch. Rows without gaps are one run of bytes: their width does
not matter, and what is left of the last word goes byte by byte. Pages start at multiples of 16. The choice is made per
tensor in the kernel, from numbers that all its threads share: it costs a branch and no second compilation.

[Note: few programs]
A copy beside a matrix product takes streaming multiprocessors from it and slows it by more than the copy is worth,
while a fraction of them moves as many bytes as the memory gives. Hence num_programs. A program of the largest block has
a multiprocessor's registers and up to 64 KiB of loads under way; 0 stands for MAX_WARPS warps on each multiprocessor,
one such program or several smaller, for copies that nothing runs beside.
"""
# mypy: allow-untyped-defs

import functools
from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl

from megatron.core.transformer.moe.paged_stash.page_layout import ALIGNMENT, INTS_PER_TENSOR
from megatron.core.transformer.moe.paged_stash.triton_compile import CompileCase, compile_case
from megatron.core.transformer.moe.paged_stash.triton_numbers import SHIFTED, count_for, hidden, hidden_tensors

MIN_BLOCK, MAX_BLOCK = 128, 4096  # words of 16 bytes
WORDS_PER_WARP = 256  # 8 a thread: loads under way, which cover the memory's latency
MIN_WARPS, MAX_WARPS = 4, 16
ONE_RUN = tl.constexpr(2**60)  # width of rows without gaps: longer than any tensor


@triton.jit
def _copy_items(
    table, address, pages_at, row_bytes, pitch, live, span, first, items, step,
    BYTES: tl.constexpr, BLOCK: tl.constexpr, TO_PAGES: tl.constexpr,
):  # fmt: skip
    """One program's chunks of one tensor. pages_at: addresses of the tiers, page size, size of the device tier."""
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
            # Rows that a lane is beyond `row`. Wide rows end once in a block at most; the others are short enough for
            # 32 bits, in which division is many times cheaper.
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
        if rest > 0:  # Only at the end of rows without gaps: position and address go together.
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
    """Not inlined: each of a group's tensors runs the same instructions. Numbers up to table_start come as arguments of
    the kernel do, so that the caller has few to keep in registers.
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
    """pool: page_bytes, pages of both tiers, addresses of both; tensors: encode_tensors; addresses: theirs."""
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
    """The operator in one launch: sources, [bytes] uint8 each, at most 16; others as in kernels.py."""
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
    """The operator in one launch: targets, [bytes] uint8 each, at most 16; others as in kernels.py."""
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
        hidden([*layout, *tiers]),
        hidden_tensors(tensors),
        hidden(addresses),
        BLOCK=block,
        TO_PAGES=to_pages,
        num_warps=_num_warps(block),
    )


def block_words(page_bytes: int) -> int:
    """Words of 16 bytes that a program moves at a time: a page's, within limits; the same for all groups of a pool."""
    return min(max(triton.next_power_of_2(page_bytes // 16), MIN_BLOCK), MAX_BLOCK)


def _num_warps(block: int) -> int:
    return min(max(block // WORDS_PER_WARP, MIN_WARPS), MAX_WARPS)


def _max_items(tensors: Sequence[int], page_bytes: int, *, block: int) -> int:
    """Chunks of the group if every row lives: more programs have nothing to do."""
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
