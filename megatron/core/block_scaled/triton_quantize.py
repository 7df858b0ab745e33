"""Quantization and decoding of block-scaled rows in Triton.

The launchers have the names and arguments of the operators in operators.py, on CUDA tensors. format.py describes the
rows, reference.py the arithmetic, which the kernels repeat on the bits of fp32. They contain no conversion from or to
an 8-bit float: GPUs before sm_89 have none, and the interpreter's rounds subnormals differently. Therefore all GPUs and
the interpreter write the bytes of the reference.

Shapes: max_rows rows of the buffers, of which the first num_rows are live; width elements in a row. Loads of rows
beyond the live ones are masked, so that their content is never read. Some operands may be in pages (triton_pages.py).
"""
# mypy: allow-untyped-defs

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.activations import ACTIVATIONS, Curve
from megatron.core.block_scaled.format import BLOCKS, BlockFormat
from megatron.core.device.triton_compile import CompileCase, Residency, compile_case
from megatron.core.device.triton_launch import (
    MAX_PREPARED,
    PreparedLaunch,
    check_adjacent_columns,
    next_power_of_2,
)
from megatron.core.device.triton_pages import find_rows, find_tile, row_layout
from megatron.core.device.triton_tiles import live_rows
from megatron.core.fusions.triton_activations import load_act

# Elements of a tile: 16 for each thread of 4 warps.
_ELEMENTS = 2048
# Most columns of a tile: those of one warp with 16 elements for each thread.
_COLUMNS = 512
# Columns of a tile that is quantized by columns.
_STRIPE = 32
_WARPS = {"num_warps": 4}
# Programs per processor that a grid is limited to, and those of them that are resident.
_PROGRAMS, _COLUMN_PROGRAMS = Residency(at_least=2, at_most_launched=8), Residency(at_least=2, at_most_launched=4)


@triton.jit(do_not_specialize=["max_rows"], do_not_specialize_on_alignment=["num_rows"])
def quantize_kernel(
    x,
    num_rows,
    out,
    max_rows,
    width,
    x_pitch,
    out_pitch,
    BLOCK: tl.constexpr,
    PADDING: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Writes packed rows. PADDING: bytes at the end of a row."""
    live = live_rows(num_rows, max_rows)
    column_tiles = tl.cdiv(width, COLUMNS)
    for tile in tl.range(tl.program_id(0), tl.cdiv(live, ROWS) * column_tiles, tl.num_programs(0)):
        rows = ((tile // column_tiles) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        first = (tile % column_tiles) * COLUMNS
        columns = first + tl.arange(0, COLUMNS)
        read = (rows < live)[:, None] & (columns[None, :] < width)
        values = tl.load(x + rows[:, None] * x_pitch + columns[None, :], mask=read, other=0).to(tl.float32)
        _store_rows(values, out + rows * out_pitch, rows < live, first, width, BLOCK, PADDING)


@triton.jit(do_not_specialize=["max_rows"], do_not_specialize_on_alignment=["num_rows", "gate_up_table"])
def act_quantize_kernel(
    gate_up,
    scale,
    num_rows,
    out,
    gate_up_table,
    max_rows,
    width,
    gate_up_pitch,
    out_pitch,
    clamp,
    offset,
    CURVE: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDING: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATE_UP_PAGE: tl.constexpr,
):
    """Writes packed rows of act, which is rounded to gate_up's dtype first, as if it had been stored in between.

    GATE_UP_PAGE: see [Note: lookups] in triton_pages.py.
    """
    live = live_rows(num_rows, max_rows)
    column_tiles = tl.cdiv(width, COLUMNS)
    for tile in tl.range(tl.program_id(0), tl.cdiv(live, ROWS) * column_tiles, tl.num_programs(0)):
        rows = ((tile // column_tiles) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        first = (tile % column_tiles) * COLUMNS
        columns = first + tl.arange(0, COLUMNS)
        read = (rows < live)[:, None] & (columns[None, :] < width)
        gate_up_rows = find_rows(gate_up_table, rows, rows < live, GATE_UP_PAGE).to(tl.int64)
        gate_at = gate_up + gate_up_rows[:, None] * gate_up_pitch + columns[None, :]
        act = load_act(gate_at, gate_at + width, read, clamp, offset, CURVE, IS_GATED)
        if scale is not None:
            act *= tl.load(scale + rows, mask=rows < live, other=0).to(tl.float32)[:, None]
        values = act.to(gate_up.dtype.element_ty).to(tl.float32)
        # Columns beyond the last one belong to the gate's neighbour in memory, which was not read.
        values = tl.where(read, values, 0.0)
        _store_rows(values, out + rows * out_pitch, rows < live, first, width, BLOCK, PADDING)


@triton.jit(do_not_specialize=["max_rows"], do_not_specialize_on_alignment=["num_rows"])
def dequantize_kernel(
    packed,
    num_rows,
    out,
    max_rows,
    width,
    packed_pitch,
    out_pitch,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Writes decoded rows in out's dtype."""
    live = live_rows(num_rows, max_rows)
    column_tiles = tl.cdiv(width, COLUMNS)
    for tile in tl.range(tl.program_id(0), tl.cdiv(live, ROWS) * column_tiles, tl.num_programs(0)):
        rows = ((tile // column_tiles) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        first = (tile % column_tiles) * COLUMNS
        columns = first + tl.arange(0, COLUMNS)
        read = (rows < live)[:, None] & (columns[None, :] < width)
        row_at = packed + rows[:, None] * packed_pitch
        codes = tl.load(row_at + columns[None, :], mask=read, other=0)
        blocks = first // BLOCK + tl.arange(0, COLUMNS // BLOCK)
        is_scale = (rows < live)[:, None] & (blocks[None, :] < tl.cdiv(width, BLOCK))
        scales = tl.load(row_at + width + blocks[None, :], mask=is_scale, other=0)
        values = decoded(tl.reshape(codes, [ROWS, COLUMNS // BLOCK, BLOCK]), scales[:, :, None])
        values = tl.reshape(values, [ROWS, COLUMNS])
        tl.store(out + rows[:, None] * out_pitch + columns[None, :], values.to(out.dtype.element_ty), mask=read)


@triton.jit(do_not_specialize_on_alignment=["num_rows", "packed_table"])
def quantize_columns_kernel(
    packed,
    num_rows,
    out,
    packed_table,
    capacity,
    width,
    packed_pitch,
    out_pitch,
    padding,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PACKED_PAGE: tl.constexpr,
):
    """Writes packed columns. A tile has one block of rows. capacity: C; padding: bytes at the end of a packed column.

    Stores are wide only if 16 divides C, which therefore is a size, unlike max_rows of the other kernels. PACKED_PAGE:
    see [Note: lookups] in triton_pages.py.
    """
    live = live_rows(num_rows, capacity)
    column_tiles = tl.cdiv(width, COLUMNS)
    for tile in tl.range(tl.program_id(0), tl.cdiv(live, BLOCK) * column_tiles, tl.num_programs(0)):
        block = tile // column_tiles
        rows = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
        columns = (tile % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
        is_column = columns < width
        read_rows = rows
        if PACKED_PAGE > 0:
            first = block * BLOCK
            block_rows = first + tl.arange(0, BLOCK)
            IS_WHOLE: tl.constexpr = PACKED_PAGE % BLOCK == 0
            read_rows = find_tile(packed_table, first, block_rows, live, PACKED_PAGE, IS_WHOLE).to(tl.int64)
        row_at = packed + read_rows * packed_pitch
        read = (rows < live)[:, None] & is_column[None, :]
        codes = tl.load(row_at[:, None] + columns[None, :], mask=read, other=0)
        # A stripe of columns lies within one block of a row.
        first_block = (tile % column_tiles) * COLUMNS // BLOCK
        scales = tl.load(row_at + width + first_block, mask=rows < live, other=0)
        values = decoded(codes, scales[:, None])
        found = scale_byte(tl.max(_magnitude(values), 0))
        out_at = out + columns.to(tl.int64) * out_pitch
        is_out = (rows < capacity)[:, None] & is_column[None, :]
        tl.store(out_at[None, :] + rows[:, None], _encoded(values, found[None, :]), mask=is_out)
        tl.store(out_at + capacity + block, found.to(tl.uint8), mask=is_column)
        if block == 0:
            _clear(out_at + capacity + tl.cdiv(capacity, BLOCK), is_column, padding)


@triton.jit
def quantize_squares_kernel(
    weight,
    out,
    num_rows,
    width,
    weight_expert,
    weight_row,
    weight_column,
    out_expert,
    out_pitch,
    BLOCK: tl.constexpr,
    PADDING: tl.constexpr,
):
    """Writes packed weights. A program has one square, of expert program_id(1)."""
    column_tiles = tl.cdiv(width, BLOCK)
    tile, expert = tl.program_id(0), tl.program_id(1).to(tl.int64)
    block = tile % column_tiles
    rows = ((tile // column_tiles) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    columns = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    read = (rows < num_rows)[:, None] & (columns < width)[None, :]
    weight_at = weight + expert * weight_expert + rows[:, None] * weight_row + columns[None, :] * weight_column
    values = tl.load(weight_at, mask=read, other=0).to(tl.float32)
    found = scale_byte(tl.max(tl.max(_magnitude(values), 1), 0))
    out_at = out + expert * out_expert + rows * out_pitch
    tl.store(out_at[:, None] + columns[None, :], _encoded(values, found), mask=read)
    tl.store(
        out_at + width + block, tl.full([BLOCK], 0, tl.int32).to(tl.uint8) + found.to(tl.uint8), mask=rows < num_rows
    )
    if PADDING > 0:
        if block == 0:
            _clear(out_at + width + column_tiles, rows < num_rows, PADDING)


@triton.jit
def _store_rows(values, out_at, is_live, first, width, BLOCK: tl.constexpr, PADDING: tl.constexpr):
    """Quantizes a tile and stores it. values: [ROWS, COLUMNS], fp32, 0 beyond the width. out_at: addresses of rows."""
    ROWS: tl.constexpr = values.shape[0]
    COLUMNS: tl.constexpr = values.shape[1]
    blocks = tl.reshape(values, [ROWS, COLUMNS // BLOCK, BLOCK])
    found = scale_byte(tl.max(_magnitude(blocks), 2))
    codes = tl.reshape(_encoded(blocks, found[:, :, None]), [ROWS, COLUMNS])
    columns = first + tl.arange(0, COLUMNS)
    tl.store(out_at[:, None] + columns[None, :], codes, mask=is_live[:, None] & (columns < width)[None, :])
    block = first // BLOCK + tl.arange(0, COLUMNS // BLOCK)
    num_scales = tl.cdiv(width, BLOCK)
    is_scale = is_live[:, None] & (block < num_scales)[None, :]
    tl.store(out_at[:, None] + width + block[None, :], found.to(tl.uint8), mask=is_scale)
    if PADDING > 0:
        if first == 0:
            _clear(out_at + width + num_scales, is_live, PADDING)


@triton.jit
def _clear(at, is_row, padding):
    """Stores padding < 16 zero bytes at each address."""
    byte = tl.arange(0, 16)
    mask = is_row[:, None] & (byte < padding)[None, :]
    tl.store(at[:, None] + byte[None, :], tl.zeros([at.shape[0], 16], tl.uint8), mask=mask)


@triton.jit
def _magnitude(x):
    """Returns the bits of |x|, int32, whose order is that of |x|; NaN is the largest. x: fp32."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_byte(amax):
    """Returns the bytes of scales, int32. amax: bits, int32. See [Note: scales] in reference.py."""
    finite = tl.minimum(amax, 0x7F800000)
    found = tl.maximum(((finite + 0x1FFFFF) >> 23) - 8, 0)
    return tl.where(amax >= 0x7F800000, 255, found)


@triton.jit
def _encoded(x, scale_bytes):
    """Returns e4m3 codes, uint8. x: fp32; scale_bytes: int32. See [Note: values] in reference.py."""
    inverse = ((254 - scale_bytes) << 23).to(tl.float32, bitcast=True)
    scaled = x * inverse
    bits = scaled.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + ((magnitude >> 20) & 1) + 0x7FFFF) >> 20) - 960
    small = (tl.abs(scaled) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    codes = tl.where(magnitude < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)
    return tl.where(scale_bytes == 255, 0x7F, codes).to(tl.uint8)


@triton.jit
def decoded(codes, scale_bytes):
    """Returns elements in fp32. codes, scale_bytes: uint8. See [Note: exact] in reference.py."""
    code = codes.to(tl.int32)
    # The bits of an e4m3 number in the fields of fp32 are 2**120 times too small, also for subnormals.
    value = (((code & 0x7F) << 20) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    value = tl.where((code & 0x7F) == 0x7F, float("nan"), value)
    return value * scale_of(scale_bytes)


@triton.jit
def scale_of(scale_bytes):
    """Returns scales in fp32, NaN for byte 255. scale_bytes: uint8."""
    byte = scale_bytes.to(tl.int32)
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


def quantize(x: Tensor, *, block: int, num_rows: Tensor | None, out: Tensor) -> None:
    """Writes the packed rows of the first num_rows rows of x, or of all.

    x: [C, W], bf16 or fp32; out: [C, row_bytes(W)], uint8; num_rows: [1], int64, or None.
    """
    launch, tile_rows, column_tiles = _quantize(x.dtype, x.shape[1], x.stride(), out.stride(), block)
    launch(-(-x.shape[0] // tile_rows) * column_tiles, (x, num_rows, out), (x.shape[0],))


def gated_activation_quantize(
    gate_up: Tensor,
    scale: Tensor | None,
    *,
    block: int,
    num_rows: Tensor | None,
    out: Tensor,
    activation: str,
    clamp: float | None = None,
    offset: float = 0.0,
    gate_up_table: Tensor | None = None,
    gate_up_sizes: Sequence[int] = (),
) -> None:
    """Writes the packed rows of act of the first num_rows rows, or of all.

    gate_up: [C, 2F] or [C, F], bf16 or fp32, may be in pages; scale: [C], float dtype, or None; out: [C, row_bytes(F)],
    uint8; num_rows: [1], int64, or None. Raises ValueError for a table and sizes that do not fit the operands.
    """
    layout = row_layout("gate_up", gate_up, (gate_up_table, gate_up_sizes), num_rows=out.shape[0])
    ffn = layout.width // (2 if ACTIVATIONS[activation].is_gated else 1)
    form = (activation, clamp, offset)
    launch, tile_rows, column_tiles = _quantize(
        gate_up.dtype, ffn, layout.strides, out.stride(), block, *form, layout.page
    )
    tensors = (gate_up, scale, num_rows, out, gate_up_table)
    launch(-(-layout.num_rows // tile_rows) * column_tiles, tensors, (layout.num_rows,))


def dequantize(packed: Tensor, *, block: int, num_rows: Tensor | None, out: Tensor) -> None:
    """Writes the decoded elements of the first num_rows rows, or of all.

    packed: [C, row_bytes(W)], uint8; out: [C, W], bf16 or fp32; num_rows: [1], int64, or None.
    """
    launch, tile_rows, column_tiles = _dequantize(out.dtype, out.shape[1], packed.stride(), out.stride(), block)
    launch(-(-out.shape[0] // tile_rows) * column_tiles, (packed, num_rows, out), (out.shape[0],))


def quantize_columns(
    packed: Tensor,
    *,
    block: int,
    num_rows: Tensor | None,
    out: Tensor,
    packed_table: Tensor | None = None,
    packed_sizes: Sequence[int] = (),
) -> None:
    """Writes packed columns of the first num_rows rows, or of all.

    packed: [C, row_bytes(W)], uint8, may be in pages; out: [W, row_bytes(C)], uint8; num_rows: [1], int64, or None.
    Raises ValueError for a table and sizes that do not fit the operands.
    """
    form, width = BlockFormat(block), out.shape[0]
    layout = row_layout("packed", packed, (packed_table, packed_sizes), width=form.row_bytes(width))
    launch, column_tiles = _quantize_columns((layout.num_rows, width), layout.strides, out.stride(), block, layout.page)
    launch(form.num_scales(layout.num_rows) * column_tiles, (packed, num_rows, out, packed_table))


def quantize_squares(weight: Tensor, *, block: int, out: Tensor) -> None:
    """Writes packed weights. weight: [e, H, O], bf16 or fp32, any strides; out: [e, H, row_bytes(O)], uint8."""
    experts, rows, width = weight.shape
    launch = _quantize_squares(weight.dtype, (rows, width), (*weight.stride(), *out.stride()), block)
    squares = BlockFormat(block).num_scales(rows) * BlockFormat(block).num_scales(width)
    launch(squares, (weight, out), columns=experts)


@functools.lru_cache(MAX_PREPARED)
def _quantize(
    dtype: torch.dtype,
    width: int,
    x_strides: tuple[int, ...],
    out_strides: tuple[int, ...],
    block: int,
    *activation: Any,
) -> tuple[PreparedLaunch, int, int]:
    """Returns a launch of quantize_kernel, or of act_quantize_kernel, the rows of a tile, and the tiles of a row.

    activation: name, clamp and offset of an activation, and the rows of a page of gate_up, or 0; nothing for
    quantize_kernel.
    """
    check_float(dtype)
    check_adjacent_columns(width, x_strides[1], out_strides[1])
    form, tile = BlockFormat(block), _tile(width, block)
    padding = form.row_bytes(width) - width - form.num_scales(width)
    sizes = {"width": width, "out_pitch": out_strides[0], "BLOCK": block, "PADDING": padding, **tile}
    per_processor = _PROGRAMS.at_most_launched
    if activation:
        name, clamp, offset, page = activation
        known = ACTIVATIONS[name]
        # None instead of 0, so that the common kernels have no instruction for it.
        more = {"clamp": clamp, "offset": offset or None, "CURVE": int(known.curve), "IS_GATED": known.is_gated}
        more["GATE_UP_PAGE"] = page
        fixed = {**sizes, "gate_up_pitch": x_strides[0], **more}
        launch = PreparedLaunch(act_quantize_kernel, fixed, options=_WARPS, per_processor=per_processor)
    else:
        fixed = {**sizes, "x_pitch": x_strides[0]}
        launch = PreparedLaunch(quantize_kernel, fixed, options=_WARPS, per_processor=per_processor)
    return launch, tile["ROWS"], -(-width // tile["COLUMNS"])


@functools.lru_cache(MAX_PREPARED)
def _dequantize(
    dtype: torch.dtype, width: int, packed_strides: tuple[int, ...], out_strides: tuple[int, ...], block: int
) -> tuple[PreparedLaunch, int, int]:
    """Returns a launch of dequantize_kernel, the rows of a tile, and the number of tiles in a row."""
    check_float(dtype)
    check_adjacent_columns(width, packed_strides[1], out_strides[1])
    tile = _tile(width, block)
    sizes = {"width": width, "packed_pitch": packed_strides[0], "out_pitch": out_strides[0]}
    fixed = {**sizes, "BLOCK": block, **tile}
    launch = PreparedLaunch(dequantize_kernel, fixed, options=_WARPS, per_processor=_PROGRAMS.at_most_launched)
    return launch, tile["ROWS"], -(-width // tile["COLUMNS"])


@functools.lru_cache(MAX_PREPARED)
def _quantize_columns(
    shape: tuple[int, int], packed_strides: tuple[int, ...], out_strides: tuple[int, ...], block: int, page: int
) -> tuple[PreparedLaunch, int]:
    """Returns a launch of quantize_columns_kernel, and the number of stripes of columns.

    shape: [C, W]; page: rows of a page of the packed rows, 0 without pages.
    """
    check_adjacent_columns(2, packed_strides[1], out_strides[1])
    (rows, width), form = shape, BlockFormat(block)
    sizes = {"capacity": rows, "width": width, "padding": form.row_bytes(rows) - rows - form.num_scales(rows)}
    pitches = {"packed_pitch": packed_strides[0], "out_pitch": out_strides[0]}
    fixed = {**sizes, **pitches, "BLOCK": block, "COLUMNS": _STRIPE, "PACKED_PAGE": page}
    per_processor = _COLUMN_PROGRAMS.at_most_launched
    launch = PreparedLaunch(quantize_columns_kernel, fixed, options=_WARPS, per_processor=per_processor)
    return launch, -(-width // _STRIPE)


@functools.lru_cache(MAX_PREPARED)
def _quantize_squares(
    dtype: torch.dtype, shape: tuple[int, int], strides: tuple[int, ...], block: int
) -> PreparedLaunch:
    """Returns a launch of quantize_squares_kernel. shape: [H, O]; strides: weight, out."""
    check_float(dtype)
    (rows, width), form = shape, BlockFormat(block)
    check_adjacent_columns(2, strides[5])
    names = ("weight_expert", "weight_row", "weight_column", "out_expert", "out_pitch")
    padding = form.row_bytes(width) - width - form.num_scales(width)
    fixed = {"num_rows": rows, "width": width, **dict(zip(names, strides)), "BLOCK": block, "PADDING": padding}
    return PreparedLaunch(quantize_squares_kernel, fixed, options={"num_warps": 8 if block == 128 else 1})


def _tile(width: int, block: int) -> dict[str, int]:
    """Returns the tile of a kernel on rows. Its columns divide the width if a power of two of at least a block does."""
    divisor = min(width & -width, _COLUMNS)
    columns = divisor if divisor >= block else min(_COLUMNS, max(block, next_power_of_2(width)))
    return {"ROWS": _ELEMENTS // columns, "COLUMNS": columns}


def check_float(dtype: torch.dtype) -> None:
    """Raises ValueError unless a dtype is bf16 or fp32. fp16 would overflow where e4m3 and its scales do not."""
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"{dtype} is not supported: only bf16 and fp32 can be quantized and decoded")


def residencies(num_warps: int) -> Mapping[str, Residency]:
    """Maps each kernel's name to the residency that its launcher assumes, for programs of num_warps warps."""
    of_rows = dict.fromkeys(("quantize_kernel", "act_quantize_kernel", "dequantize_kernel"), _PROGRAMS)
    return {**of_rows, "quantize_columns_kernel": _COLUMN_PROGRAMS, "quantize_squares_kernel": Residency()}


def compile_cases() -> Iterator[CompileCase]:
    """Yields compile cases of bf16 and fp32 and both blocks, with widths divisible by 16."""
    size = "i32:16"
    for block in BLOCKS:
        rows = {"num_rows": "*i64", "max_rows": "i32", "width": size, "BLOCK": block}
        tile = _tile(2048, block)
        for name in ("bf16", "fp32"):
            data, words = f"*{name}:16", f"{name}, blocks of {block}"
            packed = {"out": "*u8:16", "out_pitch": size, "PADDING": 0}
            yield compile_case(
                quantize_kernel, f"quantize, {words}", options=_WARPS, x=data, x_pitch=size, **rows, **packed, **tile
            )
            for page in (0, 96):
                yield compile_case(
                    act_quantize_kernel,
                    f"gated_activation_quantize, {words}{', in pages' if page else ''}",
                    options=_WARPS,
                    gate_up=data,
                    scale="*fp32:16",
                    gate_up_table="*i64" if page else None,
                    gate_up_pitch=size,
                    clamp=None,
                    offset=None,
                    CURVE=int(Curve.SILU),
                    IS_GATED=True,
                    GATE_UP_PAGE=page,
                    **rows,
                    **packed,
                    **tile,
                )
            pitches = {"packed_pitch": size, "out_pitch": size}
            yield compile_case(
                dequantize_kernel,
                f"dequantize, {words}",
                options=_WARPS,
                packed="*u8:16",
                out=data,
                **pitches,
                **rows,
                **tile,
            )
            yield compile_case(
                quantize_squares_kernel,
                f"quantize_squares, {words}",
                options={"num_warps": 8 if block == 128 else 1},
                weight=data,
                out="*u8:16",
                num_rows=size,
                width=size,
                weight_expert=size,
                weight_row=size,
                weight_column=1,
                out_expert=size,
                out_pitch=size,
                BLOCK=block,
                PADDING=0,
            )
        for page, words in ((0, ""), (128, ", in pages"), (16, ", in small pages")):
            yield compile_case(
                quantize_columns_kernel,
                f"quantize_columns, blocks of {block}{words}",
                options=_WARPS,
                packed="*u8:16",
                out="*u8:16",
                num_rows="*i64",
                packed_table="*i64" if page else None,
                capacity=size,
                width=size,
                packed_pitch=size,
                out_pitch=size,
                padding="i32",
                BLOCK=block,
                COLUMNS=_STRIPE,
                PACKED_PAGE=page,
            )
