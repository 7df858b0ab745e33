"""PagedRows: rows that are stored in pages of an arena, as operands of operators that read and write them there.

A kernel for GPUs finds each page of a tile by its position in the table. The CPU versions of operators compute on a
view of the arena if the pages are adjacent in memory. Otherwise they read the rows into new memory, and write them
back. Both give the same bits, because a view and new memory have the same strides and alignment.

In the functions below, an operand is rows without pages, [C, W], or the arena of rows in pages with their table and
sizes, [n], of any float dtype.
"""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

# The CPU's vector loops depend on the alignment of their operands, and another loop may round differently.
_ALIGNMENT = 64


@final
class PagedRows:
    """Up to max_rows rows of `width` elements without gaps, of which page i is page table[i] of the arena.

    arena: [pages * page_bytes / itemsize], any dtype, which is the rows' dtype. table: [n], int64, same device.
    page_bytes: a multiple of 16; kernels for GPUs also require a whole number of rows in a page. sizes: the integers
    that operators expect beside arena and table. shape: that of the same rows without pages. arena and table are
    replaced if the stash moves the rows, so read them before each use.
    """

    # Attributes instead of properties, because each layer reads them several times.
    __slots__ = ("arena", "table", "page_bytes", "max_rows", "width", "sizes", "shape", "dtype", "device")

    def __init__(self, arena: Tensor, table: Tensor, page_bytes: int, max_rows: int, width: int) -> None:
        self.arena, self.table = arena, table
        self.page_bytes, self.max_rows, self.width = page_bytes, max_rows, width
        self.sizes, self.shape = [page_bytes, max_rows, width], torch.Size((max_rows, width))
        self.dtype, self.device = arena.dtype, arena.device

    def move_out(self) -> None:
        """Copies the pages to memory of their own, which replaces arena and table."""
        elements = self.page_bytes // self.arena.itemsize
        self.arena = self.arena.view(-1, elements).index_select(0, self.table).view(-1)
        self.table = torch.arange(self.table.shape[0], device=self.device)

    def copied(self) -> "PagedRows":
        """Returns the same rows in memory of their own."""
        copied = PagedRows(self.arena, self.table, self.page_bytes, self.max_rows, self.width)
        copied.move_out()
        return copied


Rows = Tensor | PagedRows


def memory_of(rows: Rows) -> Tensor:
    """Returns the tensor that operators receive for rows: [C, W], any dtype, or the arena, [n], same dtype."""
    return rows.arena if type(rows) is PagedRows else rows


def operand(name: str, rows: Rows) -> tuple[Tensor, dict[str, Any]]:
    """Returns what an operator receives for an operand, [C, W], any dtype: its memory, and arguments for pages."""
    if type(rows) is PagedRows:
        return rows.arena, {f"{name}_table": rows.table, f"{name}_sizes": rows.sizes}
    return rows, {}


def paging_schema(name: str) -> str:
    """Returns the schema of the further arguments of `operand`."""
    return f"Tensor? {name}_table=None, int[] {name}_sizes=[]"


def num_rows_of(memory: Tensor, sizes: Sequence[int]) -> int:
    """Returns C of an operand: [C, W], any dtype, or an arena with sizes."""
    return sizes[1] if sizes else memory.shape[0]


# --- For the CPU versions of operators. NOTE: tables are in CPU memory, so the host waits for no device. ---


def read_sync(memory: Tensor, table: Tensor | None, sizes: Sequence[int], *, num_rows: int) -> Tensor:
    """Returns the first num_rows rows of an operand for reading: [num_rows, W], its dtype.

    An operand without pages is returned as it is.
    """
    if table is None:
        return memory
    rows = _view_sync(memory, table, sizes, num_rows=num_rows)
    if rows is None:
        elements, pages = _pages_of(memory, sizes, num_rows=num_rows)
        rows = memory.view(-1, elements).index_select(0, table[:pages])
        rows = rows.view(-1)[: num_rows * sizes[2]].view(num_rows, sizes[2])
    return rows


def write_sync(memory: Tensor, table: Tensor | None, sizes: Sequence[int], *, num_rows: int) -> tuple[Tensor, bool]:
    """Returns memory for the first num_rows rows of an operand, and whether `store_sync` must follow.

    The memory is [num_rows, W], the operand's dtype. An operand without pages is returned as it is.
    """
    if table is None:
        return memory, False
    rows = _view_sync(memory, table, sizes, num_rows=num_rows)
    return (memory.new_empty(num_rows, sizes[2]), True) if rows is None else (rows, False)


def store_sync(rows: Tensor, memory: Tensor, table: Tensor, sizes: Sequence[int]) -> None:
    """Copies rows, [R, W], into the pages of an operand of the same dtype."""
    elements, pages = _pages_of(memory, sizes, num_rows=len(rows))
    flat, arena = rows.reshape(-1), memory.view(-1, elements)
    whole = flat.numel() // elements
    arena.index_copy_(0, table[:whole], flat[: whole * elements].view(whole, elements))
    if whole < pages:
        rest = flat[whole * elements :]
        arena[int(table[whole])][: rest.numel()] = rest


def _pages_of(memory: Tensor, sizes: Sequence[int], *, num_rows: int) -> tuple[int, int]:
    """Returns the number of elements in a page, and the number of pages that the rows occupy."""
    elements = sizes[0] // memory.itemsize
    return elements, -(-num_rows * sizes[2] // elements)


def _view_sync(memory: Tensor, table: Tensor, sizes: Sequence[int], *, num_rows: int) -> Tensor | None:
    """Returns a view of the rows, or None if their pages are not adjacent in memory."""
    elements, pages = _pages_of(memory, sizes, num_rows=num_rows)
    numbers = table[:pages].tolist()
    first = numbers[0] if numbers else 0
    if numbers != list(range(first, first + pages)):
        return None
    rows = memory[first * elements :][: num_rows * sizes[2]].view(num_rows, sizes[2])
    return None if rows.data_ptr() % _ALIGNMENT else rows
