"""Grouped GEMMs of block-scaled rows in Triton: rows times weights, and gradients of the weights.

The launchers have the names and arguments of the operators in operators.py, on CUDA tensors. format.py describes the
operands.

Shapes: max_rows rows of the buffers, sorted by expert; inner: width of the rows, over which a product sums; outer:
width of the result. Rows beyond the live ones are not read. Rows of a product, and those of its result, may be in pages
(triton_pages.py). Forward and recomputation run the same compiled kernel, so both are bit-identical. In forward the
number of rows is passed as the flag `needed`.

[Note: arithmetic] A product has one of three kinds of arithmetic:
  PROMOTED     tensor cores multiply 8-bit values. Each partial sum of one block of terms is multiplied with both scales
               and added in fp32. For sm_90, whose sums of 8-bit products have only about 14 bits.
  NATIVE       tensor cores of sm_100 also apply the scales, of blocks of 32. Other GPUs would emulate it in bf16.
  DEQUANTIZED  values are decoded to bf16 in registers, and multiplied as bf16. For all GPUs; saves memory, not time.
All kinds give NaN for rows, or all rows of an expert, of which a block has scale byte 255.

[Note: accuracy] Operands are exact, so only sums and the result are rounded. Let S be the sum of the terms' magnitudes
and K their number. Before the rounding of the result, sums in fp32 have an error of at most 2 K 2**-24 S, with any
order of terms: on CPUs, in the interpreter, and with DEQUANTIZED, apart from elements that bf16 rounds ([Note: exact]
in reference.py). Tensor cores of sm_90 and sm_100 may sum 8-bit products with less. If each of the 32 products of an
instruction and their sum are cut at 2**-13 of the largest of them, a block of 128 terms, which needs 4 instructions,
has an error of at most 132 * 2**-13 S, or 1.6%. PROMOTED adds the blocks in fp32. NATIVE leaves all sums to the
hardware. No GPU has confirmed these figures here. PROMOTED multiplies both scales first: products of two scales beyond
the range of fp32 become 0 or infinite.

[Note: order of weights] Tensor cores of sm_90 read 8-bit operands only with adjacent terms. Rows and packed columns
have them, and so have transposed weights. The weights of a forward have adjacent columns, so on sm_90 each tile of
weights passes through registers, where the compiler transposes it.
"""
# mypy: allow-untyped-defs

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.block_scaled.format import BlockFormat
from megatron.core.block_scaled.triton_quantize import check_float, decoded, scale_of
from megatron.core.device.triton_compile import CompileCase, Residency, compile_case
from megatron.core.device.triton_launch import MAX_PREPARED, PreparedLaunch, check_adjacent_columns, next_power_of_2
from megatron.core.device.triton_pages import find_tile, row_layout
from megatron.core.device.triton_tiles import ends_of_experts, near_tile


class Arithmetic(IntEnum):
    """How a product multiplies block-scaled operands. See [Note: arithmetic]."""

    DEQUANTIZED = 0
    PROMOTED = 1
    NATIVE = 2


_PROMOTED = tl.constexpr(int(Arithmetic.PROMOTED))
_NATIVE = tl.constexpr(int(Arithmetic.NATIVE))
# Compiler options among the entries of a tile.
_OPTIONS = ("num_warps", "num_stages")


@triton.jit(do_not_specialize=["max_rows"], do_not_specialize_on_alignment=["needed", "x_table", "out_table"])
def scaled_gemm_kernel(
    x,
    x_scales,
    weight,
    weight_scales,
    offsets,
    needed,
    out,
    x_table,
    out_table,
    max_rows,
    num_experts,
    inner,
    outer,
    x_pitch,
    weight_expert,
    weight_pitch,
    out_pitch,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TERMS: tl.constexpr,
    BLOCK: tl.constexpr,
    ARITHMETIC: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    X_PAGE: tl.constexpr,
    OUT_PAGE: tl.constexpr,
):
    """Computes tiles [ROWS, COLUMNS] of the GEMM. Rows of `out` that belong to no expert remain unchanged.

    x, weight: values, as 8-bit floats or, for DEQUANTIZED, as bytes; x_scales, weight_scales: bytes. IS_TRANSPOSED:
    whether terms are adjacent in the weights. IS_EVEN: whether loads are unmasked. X_PAGE, OUT_PAGE: see
    [Note: lookups] in triton_pages.py.
    """
    if tl.load(needed) == 0:
        return
    group = tl.arange(0, GROUPS)
    ends = ends_of_experts(offsets + group, max_rows, group < num_experts)
    starts = ends_of_experts(offsets + group - 1, max_rows, (group > 0) & (group < num_experts))
    column_tiles = tl.cdiv(outer, COLUMNS)
    tiles = tl.cdiv(tl.maximum(ends - starts, 0), ROWS) * column_tiles
    tile_ends = tl.cumsum(tiles, 0)
    # See [Note: registers] in triton_grouped_gemm.py.
    for tile in tl.range(tl.program_id(0), tl.sum(tiles, 0), tl.num_programs(0), disable_licm=True):
        expert = tl.sum((tile_ends <= tile).to(tl.int32), 0)
        chosen = group == expert
        start = tl.sum(tl.where(chosen, starts, 0), 0)
        end = tl.sum(tl.where(chosen, ends, 0), 0)
        local = tile - tl.sum(tl.where(chosen, tile_ends - tiles, 0), 0)
        row_tile, column_tile = near_tile(local, tl.cdiv(end - start, ROWS), column_tiles)
        first_row = start + row_tile * ROWS
        row = tl.arange(0, ROWS)
        columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        # Rows and columns beyond the last one are replaced with valid ones, whose sums are not stored.
        if X_PAGE > 0:
            read_rows = first_row + tl.minimum(row, end - 1 - first_row)
            first_at = 0
            row_at = find_tile(x_table, first_row, read_rows, end, X_PAGE).to(tl.int64) * x_pitch
        else:
            first_at = first_row.to(tl.int64) * x_pitch
            row_at = tl.minimum(row, end - 1 - first_row) * x_pitch
        read_columns = columns % outer
        expert_at = expert.to(tl.int64) * weight_expert
        # Scales are equal in all rows and columns of a square.
        scale_columns = column_tile if COLUMNS == BLOCK else read_columns // BLOCK
        if IS_TRANSPOSED:
            column_at = read_columns * weight_pitch
            scale_at = scale_columns * (BLOCK * weight_pitch)
            term_step, block_step = 1, 1
        else:
            column_at = read_columns
            scale_at = scale_columns
            term_step, block_step = weight_pitch, BLOCK * weight_pitch
        sums = _sum_of_terms(
            x + first_at + row_at,
            x_scales + first_at + row_at,
            weight + expert_at + column_at,
            weight_scales + expert_at + scale_at,
            inner,
            term_step,
            block_step,
            TERMS,
            BLOCK,
            ARITHMETIC,
            IS_EVEN,
            COLUMNS == BLOCK,
        )
        rows = first_row + row
        out_rows = find_tile(out_table, first_row, rows, end, OUT_PAGE)
        out_at = out + out_rows[:, None].to(tl.int64) * out_pitch + columns[None, :]
        is_out = (rows < end)[:, None] & (columns[None, :] < outer)
        tl.store(out_at, sums.to(out.dtype.element_ty), mask=is_out)


@triton.jit(do_not_specialize=["max_rows"])
def scaled_weight_grad_kernel(
    x,
    x_scales,
    grad,
    grad_scales,
    offsets,
    out,
    max_rows,
    scale,
    inner,
    outer,
    x_pitch,
    grad_pitch,
    out_expert,
    out_row,
    out_column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TERMS: tl.constexpr,
    BLOCK: tl.constexpr,
    ARITHMETIC: tl.constexpr,
    IS_ADDED: tl.constexpr,
):
    """Computes the gradients of all experts' weights from packed columns. Each program sums one tile over an expert.

    The rows of each expert begin and end at multiples of BLOCK and of TERMS. scale: factor of the sum, or None.
    IS_ADDED: whether to add to the value in `out`, in fp32, with one rounding.
    """
    row_tiles, column_tiles = tl.cdiv(inner, ROWS), tl.cdiv(outer, COLUMNS)
    expert = tl.program_id(0) // (row_tiles * column_tiles)
    row_tile, column_tile = near_tile(tl.program_id(0) % (row_tiles * column_tiles), row_tiles, column_tiles)
    start = ends_of_experts(offsets + expert - 1, max_rows, expert > 0)
    end = ends_of_experts(offsets + expert, max_rows, expert >= 0)
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    first_block = start // BLOCK
    # The compiler sees that the first terms are aligned.
    x_at = (rows % inner).to(tl.int64) * x_pitch
    grad_at = (columns % outer).to(tl.int64) * grad_pitch
    sums = _sum_of_terms(
        x + x_at + first_block * BLOCK,
        x_scales + x_at + first_block,
        grad + grad_at + first_block * BLOCK,
        grad_scales + grad_at + first_block,
        end - start,
        1,
        1,
        TERMS,
        BLOCK,
        ARITHMETIC,
        True,
        False,
    )
    out_at = out + expert.to(tl.int64) * out_expert
    out_at += rows[:, None].to(tl.int64) * out_row + columns[None, :].to(tl.int64) * out_column
    is_out = (rows < inner)[:, None] & (columns < outer)[None, :]
    if scale is not None:
        sums *= scale
    if IS_ADDED:
        sums += tl.load(out_at, mask=is_out, other=0).to(tl.float32)
    tl.store(out_at, sums.to(out.dtype.element_ty), mask=is_out)


@triton.jit
def _sum_of_terms(
    left_at,
    left_scale_at,
    right_at,
    right_scale_at,
    num_terms,
    right_step,
    right_block_step,
    TERMS: tl.constexpr,
    BLOCK: tl.constexpr,
    ARITHMETIC: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_SQUARE: tl.constexpr,
):
    """Returns the sums over all terms, fp32. left_at, right_at: addresses of the first terms of rows and of columns.

    right_step, right_block_step: distances of terms and of blocks of terms on the right; they are adjacent on the left.
    IS_SQUARE: whether all columns have the same scales, so that right_scale_at is one address.
    """
    ROWS: tl.constexpr = left_at.shape[0]
    COLUMNS: tl.constexpr = right_at.shape[0]
    PARTS: tl.constexpr = BLOCK // TERMS if BLOCK > TERMS else 1
    term = tl.arange(0, TERMS)
    left_at = left_at[:, None] + term[None, :]
    right_at = right_at[None, :] + term[:, None] * right_step
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for number in tl.range(0, tl.cdiv(num_terms, TERMS)):
        if IS_EVEN:
            left, right = tl.load(left_at), tl.load(right_at)
        else:
            # Beyond the last term are bytes of scales.
            rest = num_terms - number * TERMS
            left = tl.load(left_at, mask=(term < rest)[None, :], other=0.0)
            right = tl.load(right_at, mask=(term < rest)[:, None], other=0.0)
        left_at += TERMS
        right_at += TERMS * right_step
        if ARITHMETIC == _NATIVE:
            blocks = number * (TERMS // BLOCK) + tl.arange(0, TERMS // BLOCK)
            left_scales = left_scale_at[:, None] + blocks[None, :]
            right_scales = right_scale_at[:, None] + blocks[None, :] * right_block_step
            # Each tile has a first term, so with masked terms it must have one block.
            tl.static_assert(IS_EVEN or TERMS == BLOCK)
            left_scale, right_scale = tl.load(left_scales), tl.load(right_scales)
            sums = tl.dot_scaled(left, left_scale, "e4m3", right, right_scale, "e4m3", sums)
        else:
            block = number // PARTS
            left_scale = tl.load(left_scale_at + block)
            right_scale = tl.load(right_scale_at + block * right_block_step)
            if ARITHMETIC == _PROMOTED:
                part = tl.dot(left, right)
                if IS_SQUARE:
                    sums += part * (scale_of(left_scale) * scale_of(right_scale))[:, None]
                else:
                    sums += part * (scale_of(left_scale)[:, None] * scale_of(right_scale)[None, :])
            else:
                left = decoded(left, left_scale[:, None]).to(tl.bfloat16)
                right = decoded(right, right_scale if IS_SQUARE else right_scale[None, :]).to(tl.bfloat16)
                sums = tl.dot(left, right, sums)
    return sums


def scaled_product(
    x: Tensor,
    weight: Tensor,
    *,
    block: int,
    offsets: Tensor,
    width: int,
    is_transposed: bool,
    out: Tensor,
    needed: Tensor | None = None,
    x_table: Tensor | None = None,
    x_sizes: Sequence[int] = (),
    out_table: Tensor | None = None,
    out_sizes: Sequence[int] = (),
    arithmetic: Arithmetic | None = None,
) -> None:
    """Multiplies the rows of expert i by its decoded weights, or by the transposed ones, unless `needed` is 0.

    x: [C, row_bytes(H)], uint8; weight: [e, H, row_bytes(O)], uint8; offsets: [e], int32; out: [C, O], bf16 or fp32.
    With is_transposed, x has O columns and out has H. width: O. x and out may be in pages. needed: [1], int64; None
    means always. arithmetic: for tests; None chooses by the GPU. Raises ValueError for tables and sizes that do not fit
    the operands.
    """
    if arithmetic is None:
        arithmetic = arithmetic_of(x.device, block)
    experts, height = weight.shape[:2]
    inner, outer, columns = (width, height, width) if is_transposed else (height, width, width)
    x_pages, out_pages = (x_table, x_sizes), (out_table, out_sizes)
    max_rows, x_strides, out_strides, pages = out.shape[0], x.stride(), out.stride(), (0, 0)
    # Viewed as int32, low word first, because the last offset is int32.
    words = offsets[-1:] if needed is None else needed.view(torch.int32)
    if x_table is not None or out_table is not None or x_sizes or out_sizes:
        of_x = row_layout("x", x, x_pages, width=BlockFormat(block).row_bytes(inner))
        of_out = row_layout("out", out, out_pages, num_rows=of_x.num_rows, width=outer)
        max_rows, x_strides, out_strides, pages = of_x.num_rows, of_x.strides, of_out.strides, (of_x.page, of_out.page)
    launch, tile_rows, column_tiles = _product(
        (experts, height, width),
        (x_strides, weight.stride(), out_strides),
        out.dtype,
        block,
        is_transposed,
        arithmetic,
        pages,
    )
    operands = (*_parts(x, inner, arithmetic), *_parts(weight, columns, arithmetic))
    tensors = (*operands, offsets, words, out, x_table, out_table)
    launch((-(-max_rows // tile_rows) + experts) * column_tiles, tensors, (max_rows,))


def scaled_weight_grad(
    x: Tensor,
    grad: Tensor,
    *,
    block: int,
    offsets: Tensor,
    rows: int,
    out: Tensor,
    scale: float = 1.0,
    is_added: bool = False,
    arithmetic: Arithmetic | None = None,
) -> None:
    """Computes scale * x^T grad of each expert from packed columns, and writes or adds it to `out`.

    x: [H, row_bytes(C)], uint8; grad: [O, row_bytes(C)], uint8; offsets: [e], int32, multiples of the block; out: [e,
    H, O], bf16 or fp32. rows: C. Experts without rows have a gradient of 0. Values are rounded once, to out's dtype.
    is_added: whether to add to `out`. arithmetic: as in scaled_product.
    """
    if arithmetic is None:
        arithmetic = arithmetic_of(x.device, block)
    launch, programs = _weight_grad(
        tuple(out.shape), (x.stride(), grad.stride(), out.stride()), out.dtype, block, arithmetic, scale, is_added
    )
    launch(programs, (*_parts(x, rows, arithmetic), *_parts(grad, rows, arithmetic), offsets, out), (rows,))


@functools.lru_cache(MAX_PREPARED)
def arithmetic_of(device: torch.device, block: int) -> Arithmetic:
    """Returns the arithmetic that launchers choose on a device. See [Note: arithmetic]."""
    if device.type != "cuda":
        return Arithmetic.DEQUANTIZED
    major, _ = torch.cuda.get_device_capability(device)
    if block == 32:
        return Arithmetic.NATIVE if major == 10 else Arithmetic.DEQUANTIZED
    return Arithmetic.PROMOTED if major >= 9 else Arithmetic.DEQUANTIZED


def _parts(packed: Tensor, width: int, arithmetic: Arithmetic) -> tuple[Tensor, Tensor]:
    """Returns views that begin at the values and at the scales of packed rows, or of an arena."""
    values = packed if arithmetic is Arithmetic.DEQUANTIZED else packed.view(torch.float8_e4m3fn)
    return values, packed[..., width:]


@functools.lru_cache(MAX_PREPARED)
def _product(
    shape: tuple[int, int, int],
    strides: tuple[tuple[int, ...], ...],
    out_dtype: torch.dtype,
    block: int,
    is_transposed: bool,
    arithmetic: Arithmetic,
    pages: tuple[int, int],
) -> tuple[PreparedLaunch, int, int]:
    """Returns a launch of scaled_gemm_kernel, the rows of a tile, and the number of tiles in a row.

    shape: [e, H, O]; strides: x, weight, out; pages: rows of a page of x and of out, 0 without pages.
    """
    check_float(out_dtype)
    x_strides, weight_strides, out_strides = strides
    check_adjacent_columns(2, x_strides[1], weight_strides[2], out_strides[1])
    experts, inner, outer = shape
    if is_transposed:
        inner, outer = outer, inner
    # 128 is a multiple of TERMS of all tiles.
    is_even = inner % 128 == 0 and outer % 16 == 0
    tile = _product_tile(block, arithmetic, is_even=is_even)
    options = {key: tile.pop(key) for key in _OPTIONS}
    pitches = {
        "x_pitch": x_strides[0],
        "weight_expert": weight_strides[0],
        "weight_pitch": weight_strides[1],
        "out_pitch": out_strides[0],
    }
    constants = {
        "GROUPS": next_power_of_2(max(experts, 1)),
        "BLOCK": block,
        "ARITHMETIC": int(arithmetic),
        "IS_TRANSPOSED": is_transposed,
        "IS_EVEN": is_even,
        "X_PAGE": pages[0],
        "OUT_PAGE": pages[1],
    }
    fixed = {"num_experts": experts, "inner": inner, "outer": outer, **pitches, **tile, **constants}
    launch = PreparedLaunch(scaled_gemm_kernel, fixed, options=options, per_processor=1)
    return launch, tile["ROWS"], -(-outer // tile["COLUMNS"]) if experts else 0


@functools.lru_cache(MAX_PREPARED)
def _weight_grad(
    shape: tuple[int, int, int],
    strides: tuple[tuple[int, ...], ...],
    out_dtype: torch.dtype,
    block: int,
    arithmetic: Arithmetic,
    scale: float,
    is_added: bool,
) -> tuple[PreparedLaunch, int]:
    """Returns a launch of scaled_weight_grad_kernel, and its programs. shape: [e, H, O]; strides: x, grad, out."""
    check_float(out_dtype)
    (experts, inner, outer), (x_strides, grad_strides, out_strides) = shape, strides
    check_adjacent_columns(2, x_strides[1], grad_strides[1])
    tile = _weight_grad_tile(block, arithmetic, is_added=is_added)
    options = {key: tile.pop(key) for key in _OPTIONS}
    names = ("out_expert", "out_row", "out_column")
    pitches = {"x_pitch": x_strides[0], "grad_pitch": grad_strides[0], **dict(zip(names, out_strides))}
    sizes = {"scale": None if scale == 1.0 else scale, "inner": inner, "outer": outer, **pitches}
    fixed = {**sizes, **tile, "BLOCK": block, "ARITHMETIC": int(arithmetic), "IS_ADDED": is_added}
    programs = experts * -(-inner // tile["ROWS"]) * -(-outer // tile["COLUMNS"])
    return PreparedLaunch(scaled_weight_grad_kernel, fixed, options=options), programs


def _product_tile(block: int, arithmetic: Arithmetic, *, is_even: bool = True) -> dict[str, int]:
    """Returns the tile sizes, warps and stages of a product. Larger tiles would spill registers.

    is_even: whether the widths allow unmasked loads of 16 bytes.
    """
    if arithmetic is Arithmetic.NATIVE:
        columns, terms = (256, 128) if is_even else (128, 32)
        return {"ROWS": 128, "COLUMNS": columns, "TERMS": terms, "num_warps": 8, "num_stages": 3}
    terms = block if arithmetic is Arithmetic.PROMOTED else min(block, 64)
    return {"ROWS": 128 if is_even else 64, "COLUMNS": 128, "TERMS": terms, "num_warps": 8, "num_stages": 3}


def _weight_grad_tile(block: int, arithmetic: Arithmetic, *, is_added: bool = False) -> dict[str, int]:
    """Returns the tile sizes, warps and stages of a weight gradient. TERMS divides the alignment of experts.

    is_added: whether the result is added to `out`, whose values occupy registers too.
    """
    terms = min(block, 32 if is_added else 64) if arithmetic is Arithmetic.DEQUANTIZED else block
    # NATIVE needs 128 rows: with 64, Triton emulates it in bf16.
    rows = 64 if arithmetic is Arithmetic.PROMOTED else 128
    return {"ROWS": rows, "COLUMNS": 128, "TERMS": terms, "num_warps": 8, "num_stages": 3}


def residencies(num_warps: int) -> Mapping[str, Residency]:
    """Maps each kernel's name to the residency that its launcher assumes, for programs of num_warps warps."""
    return {"scaled_gemm_kernel": Residency(), "scaled_weight_grad_kernel": Residency()}


def compile_cases() -> Iterator[CompileCase]:
    """Yields compile cases of all kinds of arithmetic, of forward, of transposed weights and of weight gradients.

    Products are without pages, and in pages of a tile or smaller.
    """
    kinds = (
        (Arithmetic.DEQUANTIZED, 128, 80),
        (Arithmetic.DEQUANTIZED, 32, 80),
        (Arithmetic.PROMOTED, 128, 90),
        (Arithmetic.NATIVE, 32, 100),
    )
    size, scales = "i32:16", "*u8:16"
    for arithmetic, block, first in kinds:
        data = "*u8:16" if arithmetic is Arithmetic.DEQUANTIZED else "*fp8e4nv:16"
        shared = {"x": data, "x_scales": scales, "offsets": "*i32:16", "max_rows": "i32"}
        sizes = {"inner": size, "outer": size, "x_pitch": size}
        constants = {"BLOCK": block, "ARITHMETIC": int(arithmetic)}
        words = f"{arithmetic.name.lower()}, blocks of {block}"
        pages = ((0, ""), (128, ", in pages"), (16, ", in small pages"))
        for is_transposed, (page, places) in itertools.product((False, True), pages):
            tile = _product_tile(block, arithmetic)
            options = {key: tile.pop(key) for key in _OPTIONS}
            case = compile_case(
                scaled_gemm_kernel,
                f"scaled_product, {words}{', transposed' if is_transposed else ''}{places}",
                options=options,
                weight=data,
                weight_scales=scales,
                needed="*i32",
                out="*bf16:16",
                x_table="*i64" if page else None,
                out_table="*i64" if page else None,
                num_experts="i32",
                weight_expert=size,
                weight_pitch=size,
                out_pitch=size,
                GROUPS=32,
                IS_TRANSPOSED=is_transposed,
                IS_EVEN=True,
                X_PAGE=page,
                OUT_PAGE=page,
                **shared,
                **sizes,
                **constants,
                **tile,
            )
            yield replace(case, first_architecture=first)
        for is_added in (False, True):
            tile = _weight_grad_tile(block, arithmetic, is_added=is_added)
            options = {key: tile.pop(key) for key in _OPTIONS}
            case = compile_case(
                scaled_weight_grad_kernel,
                f"scaled_weight_grad, {words}{', added to fp32' if is_added else ''}",
                options=options,
                grad=data,
                grad_scales=scales,
                out="*fp32:16" if is_added else "*bf16:16",
                scale="fp32" if is_added else None,
                grad_pitch=size,
                out_expert=size,
                out_row=size,
                out_column=1,
                IS_ADDED=is_added,
                **shared,
                **sizes,
                **constants,
                **tile,
            )
            yield replace(case, first_architecture=first)
