"""Triton kernels for the operators in rope.py, and their launchers, which have the operators' names.

Each program processes tiles of rows, where a row is a head of a token. Tables, norms and their gradients are computed
in the dtype of the tables, fp32 or fp64. See [Note: rounding of rotated heads] in rope.py.

[Note: sums over rows]
Gradients of the norms' weights are sums over all heads and tokens. Each program adds the tiles of its rows in order and
stores one partial sum. A second launch adds the partial sums in order. The number of programs depends only on shapes,
never on the GPU, so the sums have the same digits in each run and on each GPU of an architecture.
"""
# mypy: allow-untyped-defs

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from megatron.core.device.triton_compile import CompileCase, Residency, compile_case
from megatron.core.device.triton_launch import MAX_PREPARED, PreparedLaunch, next_power_of_2
from megatron.core.transformer.norms import narrower

# Channels that a program processes per iteration, 16 per thread.
_TILE = 2048
_WARPS = {"num_warps": 4}
# Maximum number of programs of rotate_grads_kernel with norms, each of which stores a partial sum. An H200 runs about
# as many at a time, 4 on each of 132 processors.
_GRAD_PROGRAMS = 512
# Partial sums, and their columns, that a program of sum_partials_kernel adds per iteration.
_SUM = {"PARTS": 256, "COLUMNS": 16}
_COUNTS = ["num_tokens", "batch", "groups", "queries", "gates"]
_STRIDES = ("seq_stride", "batch_stride", "group_stride", "head_stride")
_GRAD_STRIDES = tuple(
    f"{kind}_{dim}_stride" for kind in ("query", "key", "value", "gate") for dim in ("seq", "batch", "head")
)
_NO_STRIDES: tuple[int, ...] = (0, 0, 0, 0)  # of tensors that are None


@triton.jit
def _load_pairs(rows, is_row, first, half, IS_INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr):
    """Loads the two channels of each pair of each row: two tiles [ROWS, HALF]."""
    if IS_INTERLEAVED:
        # Contiguous memory, so that loads are wide.
        column = tl.arange(0, 2 * HALF)
        inside = is_row[:, None] & (column < 2 * half)[None, :]
        both = tl.load(rows[:, None] + first + column[None, :], mask=inside, other=0)
        a, b = tl.split(tl.reshape(both, (ROWS, HALF, 2)))
    else:
        column = tl.arange(0, HALF)
        inside = is_row[:, None] & (column < half)[None, :]
        place = rows[:, None] + first + column[None, :]
        a = tl.load(place, mask=inside, other=0)
        b = tl.load(place + half, mask=inside, other=0)
    return a, b


@triton.jit
def _store_pairs(rows, is_row, first, half, a, b, IS_INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr):
    kind = rows.dtype.element_ty
    if IS_INTERLEAVED:
        column = tl.arange(0, 2 * HALF)
        inside = is_row[:, None] & (column < 2 * half)[None, :]
        both = tl.reshape(tl.join(a.to(kind), b.to(kind)), (ROWS, 2 * HALF))
        tl.store(rows[:, None] + first + column[None, :], both, mask=inside)
    else:
        column = tl.arange(0, HALF)
        inside = is_row[:, None] & (column < half)[None, :]
        place = rows[:, None] + first + column[None, :]
        tl.store(place, a.to(kind), mask=inside)
        tl.store(place + half, b.to(kind), mask=inside)


@triton.jit
def _load_scale(weight, column, size, dtype: tl.constexpr, IS_ZERO_CENTERED: tl.constexpr):
    scale = tl.load(weight + column, mask=size, other=0).to(dtype)
    if IS_ZERO_CENTERED:
        scale += 1
    return scale[None, :]


@triton.jit
def _load_angles(cos, sin, position, is_row, half, HALF: tl.constexpr, IS_INVERSE: tl.constexpr):
    column = tl.arange(0, HALF)
    place = position[:, None] * half + column[None, :]
    inside = is_row[:, None] & (column < half)[None, :]
    c, s = tl.load(cos + place, mask=inside, other=0), tl.load(sin + place, mask=inside, other=0)
    if IS_INVERSE:
        s = -s
    return c, s


@triton.jit
def _rotate_rows(
    source, weight, out, cos, sin, first_row, num_rows, heads, heads_of_group, batch,
    width: tl.constexpr, half: tl.constexpr, first: tl.constexpr, rest: tl.constexpr,
    seq_stride, batch_stride, group_stride, head_stride, eps: tl.constexpr,
    IS_ZERO_CENTERED: tl.constexpr, IS_INTERLEAVED: tl.constexpr, IS_INVERSE: tl.constexpr, ROWS: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Normalizes (unless weight is None) and rotates the rows of a tile. source: the first head of the first group."""
    dtype: tl.constexpr = cos.dtype.element_ty
    row = first_row + tl.arange(0, ROWS)
    is_row = row < num_rows
    token, head = row // heads, row % heads
    position = (token // batch).to(tl.int64)
    place = position * seq_stride + (token % batch).to(tl.int64) * batch_stride
    place += (head // heads_of_group).to(tl.int64) * group_stride + (head % heads_of_group) * head_stride
    rows, results = source + place, out + row.to(tl.int64) * width
    a, b = _load_pairs(rows, is_row, first, half, IS_INTERLEAVED, ROWS, HALF)
    a, b = a.to(dtype), b.to(dtype)
    if REST > 0:
        column = tl.arange(0, REST)
        inside = is_row[:, None] & (column < width - 2 * half)[None, :]
        others = tl.load(rows[:, None] + rest + column[None, :], mask=inside, other=0).to(dtype)
    if weight is not None:
        square = tl.sum(a * a + b * b, axis=1)
        if REST > 0:
            square += tl.sum(others * others, axis=1)
        inverse_rms = tl.rsqrt(square / width + eps)[:, None]
        pair = tl.arange(0, HALF)
        step: tl.constexpr = 2 if IS_INTERLEAVED else 1
        second = 1 if IS_INTERLEAVED else half
        at = weight + first + pair * step
        a *= inverse_rms * _load_scale(at, 0, pair < half, dtype, IS_ZERO_CENTERED)
        b *= inverse_rms * _load_scale(at, second, pair < half, dtype, IS_ZERO_CENTERED)
        if REST > 0:
            at = weight + rest + column
            others *= inverse_rms * _load_scale(at, 0, column < width - 2 * half, dtype, IS_ZERO_CENTERED)
    c, s = _load_angles(cos, sin, position, is_row, half, HALF, IS_INVERSE)
    _store_pairs(results, is_row, first, half, a * c - b * s, b * c + a * s, IS_INTERLEAVED, ROWS, HALF)
    if REST > 0:
        tl.store(results[:, None] + rest + column[None, :], others.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=[*_COUNTS, "query_tiles"])
def rotate_kernel(
    x, query_weight, key_weight, cos, sin, query, key, num_tokens, batch, groups, queries, gates, query_tiles,
    seq_stride, batch_stride, group_stride, head_stride,
    width: tl.constexpr, half: tl.constexpr, first: tl.constexpr, rest: tl.constexpr, eps: tl.constexpr,
    IS_ZERO_CENTERED: tl.constexpr, IS_INTERLEAVED: tl.constexpr, IS_INVERSE: tl.constexpr, ROWS: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Normalizes (unless the weights are None) and rotates a tile of queries or, from program query_tiles, of keys.

    x: groups of queries, gates, a key and a value, of any strides but with adjacent channels; without keys if key is
    None. cos, sin: [S, half]. query, key: contiguous results. first: the first rotated channel; rest: the first other
    one. batch: number of consecutive tokens with the same position. Widths are constants, from which the compiler
    derives the alignment of addresses.
    """
    tile = tl.program_id(0)
    if tile < query_tiles:
        _rotate_rows(
            x, query_weight, query, cos, sin, tile * ROWS, num_tokens * groups * queries, groups * queries,
            queries, batch, width, half, first, rest, seq_stride, batch_stride, group_stride, head_stride, eps,
            IS_ZERO_CENTERED, IS_INTERLEAVED, IS_INVERSE, ROWS, HALF, REST,
        )  # fmt: skip
    elif key is not None:
        _rotate_rows(
            x + (queries + gates) * head_stride, key_weight, key, cos, sin, (tile - query_tiles) * ROWS,
            num_tokens * groups, groups, 1, batch, width, half, first, rest,
            seq_stride, batch_stride, group_stride, head_stride, eps,
            IS_ZERO_CENTERED, IS_INTERLEAVED, IS_INVERSE, ROWS, HALF, REST,
        )  # fmt: skip


@triton.jit
def _grads_of_rows(
    grad, x, weight, partial, out, cos, sin, program, programs, num_tokens, batch, groups, heads_of_group, parts,
    width: tl.constexpr, half: tl.constexpr,
    grad_seq_stride, grad_batch_stride, grad_head_stride, seq_stride, batch_stride, group_stride, head_stride,
    eps: tl.constexpr, IS_ZERO_CENTERED: tl.constexpr, IS_INTERLEAVED: tl.constexpr, ROWS: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of every `programs`-th tile of rows, and adds up this program's gradient of the weight.

    x, out: the first head of the first group. out: contiguous, groups of `parts` heads. partial: [width], or None.
    """
    dtype: tl.constexpr = cos.dtype.element_ty
    heads = groups * heads_of_group
    num_rows = num_tokens * heads
    pair, column = tl.arange(0, HALF), tl.arange(0, REST if REST > 0 else 1)
    if weight is not None:
        step: tl.constexpr = 2 if IS_INTERLEAVED else 1
        second = 1 if IS_INTERLEAVED else half
        scale_a = _load_scale(weight + pair * step, 0, pair < half, dtype, IS_ZERO_CENTERED)
        scale_b = _load_scale(weight + pair * step, second, pair < half, dtype, IS_ZERO_CENTERED)
        sum_a, sum_b = tl.zeros((ROWS, HALF), dtype), tl.zeros((ROWS, HALF), dtype)
        if REST > 0:
            is_other = column < width - 2 * half
            scale_others = _load_scale(weight + 2 * half + column, 0, is_other, dtype, IS_ZERO_CENTERED)
            sum_others = tl.zeros((ROWS, REST), dtype)
    for tile in range(program, tl.cdiv(num_rows, ROWS), programs):
        row = tile * ROWS + tl.arange(0, ROWS)
        is_row = row < num_rows
        token, head = row // heads, row % heads
        group, member = head // heads_of_group, head % heads_of_group
        position, sample = (token // batch).to(tl.int64), (token % batch).to(tl.int64)
        given = grad + position * grad_seq_stride + sample * grad_batch_stride + head.to(tl.int64) * grad_head_stride
        results = out + ((token * groups + group) * parts + member).to(tl.int64) * width
        a, b = _load_pairs(given, is_row, 0, half, IS_INTERLEAVED, ROWS, HALF)
        c, s = _load_angles(cos, sin, position, is_row, half, HALF, True)
        grad_a, grad_b = a.to(dtype) * c - b.to(dtype) * s, b.to(dtype) * c + a.to(dtype) * s
        if REST > 0:
            inside = is_row[:, None] & (column < width - 2 * half)[None, :]
            grad_others = tl.load(given[:, None] + 2 * half + column[None, :], mask=inside, other=0).to(dtype)
        if weight is not None:
            rows = x + position * seq_stride + sample * batch_stride
            rows += group.to(tl.int64) * group_stride + member * head_stride
            a, b = _load_pairs(rows, is_row, 0, half, IS_INTERLEAVED, ROWS, HALF)
            x_a, x_b = a.to(dtype), b.to(dtype)
            square = tl.sum(x_a * x_a + x_b * x_b, axis=1)
            if REST > 0:
                others = tl.load(rows[:, None] + 2 * half + column[None, :], mask=inside, other=0).to(dtype)
                square += tl.sum(others * others, axis=1)
            inverse_rms = tl.rsqrt(square / width + eps)[:, None]
            # With n = r x: d x = r * (w g - n * mean(w g n)).
            x_a *= inverse_rms
            x_b *= inverse_rms
            sum_a += grad_a * x_a
            sum_b += grad_b * x_b
            grad_a *= scale_a
            grad_b *= scale_b
            pull = tl.sum(grad_a * x_a + grad_b * x_b, axis=1)
            if REST > 0:
                others *= inverse_rms
                sum_others += grad_others * others
                grad_others *= scale_others
                pull += tl.sum(grad_others * others, axis=1)
            pull = (pull / width)[:, None]
            grad_a = (grad_a - x_a * pull) * inverse_rms
            grad_b = (grad_b - x_b * pull) * inverse_rms
            if REST > 0:
                grad_others = (grad_others - others * pull) * inverse_rms
        _store_pairs(results, is_row, 0, half, grad_a, grad_b, IS_INTERLEAVED, ROWS, HALF)
        if REST > 0:
            place = results[:, None] + 2 * half + column[None, :]
            tl.store(place, grad_others.to(out.dtype.element_ty), mask=inside)
    if weight is not None:
        tl.store(partial + pair * step, tl.sum(sum_a, axis=0), mask=pair < half)
        tl.store(partial + pair * step + second, tl.sum(sum_b, axis=0), mask=pair < half)
        if REST > 0:
            tl.store(partial + 2 * half + column, tl.sum(sum_others, axis=0), mask=is_other)


@triton.jit
def _copy_rows(
    grad, out, program, programs, num_tokens, batch, groups, heads_of_group, parts, width: tl.constexpr, seq_stride,
    batch_stride, head_stride,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Copies every `programs`-th tile of rows. out: the first head of the first group, contiguous."""
    heads = groups * heads_of_group
    num_rows = num_tokens * heads
    column = tl.arange(0, WIDTH)
    for tile in range(program, tl.cdiv(num_rows, ROWS), programs):
        row = tile * ROWS + tl.arange(0, ROWS)
        token, head = row // heads, row % heads
        group, member = (head // heads_of_group).to(tl.int64), head % heads_of_group
        given = grad + (token // batch).to(tl.int64) * seq_stride + (token % batch).to(tl.int64) * batch_stride
        given += head.to(tl.int64) * head_stride
        results = out + ((token.to(tl.int64) * groups + group) * parts + member) * width
        inside = (row < num_rows)[:, None] & (column < width)[None, :]
        values = tl.load(given[:, None] + column[None, :], mask=inside, other=0)
        tl.store(results[:, None] + column[None, :], values.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=[*_COUNTS, "query_programs", "key_programs", "value_programs"])
def rotate_grads_kernel(
    grad_query, grad_key, grad_value, grad_gate, x, query_weight, key_weight, cos, sin, out, partials,
    num_tokens, batch, groups, queries, gates, query_programs, key_programs, value_programs,
    query_seq_stride, query_batch_stride, query_head_stride, key_seq_stride, key_batch_stride, key_head_stride,
    value_seq_stride, value_batch_stride, value_head_stride, gate_seq_stride, gate_batch_stride,
    gate_head_stride, seq_stride, batch_stride, group_stride, head_stride,
    width: tl.constexpr, half: tl.constexpr, eps: tl.constexpr,
    IS_ZERO_CENTERED: tl.constexpr, IS_INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr,
    REST: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Computes the gradient of the qkv projection's output, and a partial sum of a weight's gradient per program.

    The first query_programs programs process queries, the next key_programs keys, the next value_programs values, and
    the others gates, which may be None. The last four strides are those of x, which is None without weights. Channels
    are adjacent everywhere. out: [num_tokens, G, queries + gates + 2, width]; partials: [query_programs + key_programs,
    width]. See [Note: sums over rows].
    """
    program = tl.program_id(0)
    parts = queries + gates + 2
    of_keys = query_programs + key_programs
    of_values = of_keys + value_programs
    key_part = queries + gates
    key_x, partial = x, partials
    if query_weight is not None:
        key_x = x + key_part * head_stride
        partial = partials + program * width
    if program < query_programs:
        _grads_of_rows(
            grad_query, x, query_weight, partial, out, cos, sin, program, query_programs,
            num_tokens, batch, groups, queries, parts, width, half,
            query_seq_stride, query_batch_stride, query_head_stride,
            seq_stride, batch_stride, group_stride, head_stride, eps,
            IS_ZERO_CENTERED, IS_INTERLEAVED, ROWS, HALF, REST,
        )  # fmt: skip
    elif program < of_keys:
        _grads_of_rows(
            grad_key, key_x, key_weight, partial, out + key_part * width, cos, sin,
            program - query_programs, key_programs, num_tokens, batch, groups, 1, parts, width, half,
            key_seq_stride, key_batch_stride, key_head_stride,
            seq_stride, batch_stride, group_stride, head_stride, eps,
            IS_ZERO_CENTERED, IS_INTERLEAVED, ROWS, HALF, REST,
        )  # fmt: skip
    elif program < of_values:
        _copy_rows(
            grad_value, out + (key_part + 1) * width, program - of_keys, value_programs,
            num_tokens, batch, groups, 1, parts, width,
            value_seq_stride, value_batch_stride, value_head_stride, ROWS, WIDTH,
        )  # fmt: skip
    elif grad_gate is not None:
        _copy_rows(
            grad_gate, out + queries * width, program - of_values, tl.num_programs(0) - of_values,
            num_tokens, batch, groups, gates, parts, width,
            gate_seq_stride, gate_batch_stride, gate_head_stride, ROWS, WIDTH,
        )  # fmt: skip


@triton.jit(do_not_specialize=["query_programs", "key_programs"])
def sum_partials_kernel(
    partials, sums, query_programs, key_programs, width, PARTS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Adds the partial sums of queries into sums[0] and those of keys into sums[1]. See [Note: sums over rows]."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    is_key = tl.program_id(1)
    start = is_key * query_programs
    end = query_programs + is_key * key_programs
    total = tl.zeros((PARTS, COLUMNS), dtype=partials.dtype.element_ty)
    for first in range(start, end, PARTS):
        part = first + tl.arange(0, PARTS)
        place = part[:, None] * width + column[None, :]
        total += tl.load(partials + place, mask=(part < end)[:, None] & inside[None, :], other=0)
    tl.store(sums + is_key * width + column, tl.sum(total, axis=0).to(sums.dtype.element_ty), mask=inside)


def rotate_qkv(
    mixed_qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    *,
    gates: int,
    eps: float,
    zero_centered: bool,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """Normalizes (if there are weights) and rotates the queries and keys of the qkv projection's output.

    mixed_qkv: [S, B, G, q + gates + 2, D], any float dtype and strides; cos, sin: [S, D_rot / 2], fp32 or fp64,
    contiguous; query_weight, key_weight: [D], any float dtype, or None. Returns query [S, B, G * q, D] and key
    [S, B, G, D], contiguous, in the narrower dtype of mixed_qkv and the weights.
    """
    mixed_qkv, strides = _adjacent(mixed_qkv)
    seq, batch, groups, parts, width = mixed_qkv.shape
    queries, num_tokens = parts - gates - 2, seq * batch
    dtype = mixed_qkv.dtype if query_weight is None else narrower(mixed_qkv.dtype, query_weight.dtype)
    query = mixed_qkv.new_empty((seq, batch, groups * queries, width), dtype=dtype)
    key = mixed_qkv.new_empty((seq, batch, groups, width), dtype=dtype)
    if num_tokens:
        launch, tile_rows = _rotation(width, cos.shape[1], 0, strides, eps, zero_centered, interleaved, False)
        query_tiles = -(-num_tokens * groups * queries // tile_rows)
        programs = query_tiles + -(-num_tokens * groups // tile_rows)
        tensors = (mixed_qkv, query_weight, key_weight, cos, sin, query, key)
        launch(programs, tensors, (num_tokens, batch, groups, queries, gates, query_tiles))
    return query, key


def rotate(t: Tensor, cos: Tensor, sin: Tensor, *, first: int, interleaved: bool, inverse: bool) -> Tensor:
    """Rotates each head of t, or rotates it back; t: [S, B, N, D], any float dtype and strides.

    cos, sin: [S, D_rot / 2], fp32 or fp64, contiguous. first: index of the first rotated channel, 0 or D - D_rot.
    Returns a contiguous tensor of t's shape and dtype.
    """
    t, (seq_stride, batch_stride, *of_heads) = _adjacent(t)
    seq, batch, heads, width = t.shape
    out = t.new_empty(t.shape)
    num_tokens = seq * batch
    if num_tokens:
        # One group of all heads.
        strides = (seq_stride, batch_stride, 0, *of_heads)
        launch, tile_rows = _rotation(width, cos.shape[1], first, strides, 0.0, False, interleaved, inverse)
        tiles = -(-num_tokens * heads // tile_rows)
        launch(tiles, (t, None, None, cos, sin, out, None), (num_tokens, batch, 1, heads, 0, tiles))
    return out


@functools.lru_cache(MAX_PREPARED)
def _rotation(
    width: int, half: int, first: int, strides: tuple[int, ...], eps: float, *flags: bool
) -> tuple[PreparedLaunch, int]:
    """Returns a launch of rotate_kernel, and the rows of a tile. strides: of sequence, batch, group, head, channel."""
    tile, (zero_centered, interleaved, inverse) = _tile(width, half), flags
    sizes = {"width": width, "half": half, "first": first, "rest": 0 if first else 2 * half}
    of_dims = dict(zip(_STRIDES, strides[:4], strict=True))
    constants = {"IS_ZERO_CENTERED": zero_centered, "IS_INTERLEAVED": interleaved, "IS_INVERSE": inverse}
    fixed = {**of_dims, **sizes, "eps": eps, **constants, **tile}
    return PreparedLaunch(rotate_kernel, fixed, options=_WARPS), tile["ROWS"]


def rotate_qkv_grads(
    grad_query: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
    grad_gate: Tensor | None,
    mixed_qkv: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    *,
    eps: float,
    zero_centered: bool,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """Computes the gradients of the qkv projection's output and of the norms' weights.

    grad_query: [S, B, G * q, D]; grad_key, grad_value: [S, B, G, D]; grad_gate: [S, B, G, gates, D] or None;
    mixed_qkv: the input of rotate_qkv, or None without norms; all of any float dtype and strides. cos, sin: as in
    rotate_qkv. Returns grad_mixed_qkv [S, B, G, q + gates + 2, D], contiguous, in grad_value's dtype, and grad_weights:
    [2, D], of query_weight and key_weight in their dtype, or [0] without norms.
    """
    seq, batch, groups, width = grad_key.shape
    queries, gates = grad_query.shape[2] // groups, 0 if grad_gate is None else grad_gate.shape[3]
    (grad_query, of_query), (grad_key, of_key) = _adjacent(grad_query), _adjacent(grad_key)
    grad_value, of_value = _adjacent(grad_value)
    of_gate, of_x, num_tokens = _NO_STRIDES, _NO_STRIDES, seq * batch
    if grad_gate is not None:
        grad_gate, of_gate = _adjacent(grad_gate.flatten(2, 3))
    if mixed_qkv is not None:
        mixed_qkv, of_x = _adjacent(mixed_qkv)
    out = grad_value.new_empty((seq, batch, groups, queries + gates + 2, width))
    launch, tile_rows = _gradient(
        width, cos.shape[1], of_query, of_key, of_value, of_gate, of_x, eps, zero_centered, interleaved
    )
    rows = num_tokens * groups
    # One program for each tile, unless it stores partial sums.
    of_group = -(-rows // tile_rows)
    programs = (-(-rows * queries // tile_rows), of_group, of_group, -(-rows * gates // tile_rows))
    partials = None
    if query_weight is None:
        grad_weights = out.new_empty(0)
    else:
        programs = _programs(programs)
        grad_weights = query_weight.new_empty((2, width))
        partials = cos.new_empty((programs[0] + programs[1], width))
    of_queries, of_keys, of_values, of_gates = programs
    if num_tokens:
        launch(
            of_queries + of_keys + of_values + of_gates,
            (grad_query, grad_key, grad_value, grad_gate, mixed_qkv, query_weight, key_weight, cos, sin, out, partials),
            (num_tokens, batch, groups, queries, gates, of_queries, of_keys, of_values),
        )
    if partials is not None:
        add, columns = _sum(width)
        add(columns, (partials, grad_weights), (of_queries, of_keys), columns=2)
    return out, grad_weights


@functools.lru_cache(MAX_PREPARED)
def _gradient(
    width: int,
    half: int,
    of_query: tuple[int, ...],
    of_key: tuple[int, ...],
    of_value: tuple[int, ...],
    of_gate: tuple[int, ...],
    of_x: tuple[int, ...],
    eps: float,
    *flags: bool,
) -> tuple[PreparedLaunch, int]:
    """Returns a launch of rotate_grads_kernel, and the rows of a tile. of_...: strides of the gradients and of x."""
    tile, (zero_centered, interleaved) = _tile(width, half), flags
    of_grads = dict(zip(_GRAD_STRIDES, (*of_query[:3], *of_key[:3], *of_value[:3], *of_gate[:3]), strict=True))
    strides = {**of_grads, **dict(zip(_STRIDES, of_x[:4], strict=True))}
    constants = {"IS_ZERO_CENTERED": zero_centered, "IS_INTERLEAVED": interleaved, "WIDTH": next_power_of_2(width)}
    fixed = {**strides, "width": width, "half": half, "eps": eps, **constants, **tile}
    return PreparedLaunch(rotate_grads_kernel, fixed, options=_WARPS), tile["ROWS"]


@functools.cache
def _sum(width: int) -> tuple[PreparedLaunch, int]:
    """Returns a launch of sum_partials_kernel, and the number of its tiles of columns."""
    launch = PreparedLaunch(sum_partials_kernel, {"width": width, **_SUM}, options=_WARPS)
    return launch, -(-width // _SUM["COLUMNS"])


def residencies(num_warps: int) -> Mapping[str, Residency]:
    """Maps each kernel's name to the residency that its launcher assumes."""
    assert num_warps == _WARPS["num_warps"]
    return dict.fromkeys(("rotate_kernel", "rotate_grads_kernel", "sum_partials_kernel"), Residency())


def compile_cases() -> Iterator[CompileCase]:
    """Yields compile cases: whole heads in bf16 with and without norms, and interleaved parts of heads in fp32."""
    for name, width, half, norms, gates, interleaved in (
        ("bf16", 128, 64, True, False, False),
        ("bf16", 128, 64, False, False, False),
        ("fp32", 13, 3, True, True, True),
    ):
        data, size = f"*{name}:16", "i32:16" if width % 16 == 0 else "i32"
        words = f"{name}, {half} pairs of {width} channels{', norms' if norms else ''}"
        weights = dict.fromkeys(("query_weight", "key_weight"), data if norms else None)
        table = dict.fromkeys(("cos", "sin"), "*fp32:16")
        counts = dict.fromkeys(_COUNTS, "i32")
        sizes: dict[str, Any] = {"width": width, "half": half, "eps": 1e-6}
        strides = dict.fromkeys(_STRIDES, size)
        flags = {"IS_ZERO_CENTERED": False, "IS_INTERLEAVED": interleaved}
        shared = {**weights, **table, **counts, **sizes, **strides, **flags, **_tile(width, half)}
        yield compile_case(
            rotate_kernel,
            f"rotate_qkv, {words}",
            options=_WARPS,
            **dict.fromkeys(("x", "query", "key"), data),
            query_tiles="i32",
            first=0,
            rest=2 * half,
            IS_INVERSE=False,
            **shared,
        )
        yield compile_case(
            rotate_grads_kernel,
            f"rotate_qkv_grads, {words}",
            options=_WARPS,
            **dict.fromkeys(("grad_query", "grad_key", "grad_value", "out"), data),
            grad_gate=data if gates else None,
            x=data if norms else None,
            partials="*fp32:16" if norms else None,
            **dict.fromkeys((f"{kind}_programs" for kind in ("query", "key", "value")), "i32"),
            **dict.fromkeys(_GRAD_STRIDES, size),
            WIDTH=next_power_of_2(width),
            **shared,
        )
    yield compile_case(
        sum_partials_kernel,
        "rotate_qkv_grads' sums, bf16",
        options=_WARPS,
        partials="*fp32:16",
        sums="*bf16:16",
        query_programs="i32",
        key_programs="i32",
        width="i32:16",
        **_SUM,
    )


def _adjacent(t: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Returns t, or a copy if its channels are not adjacent, and the strides."""
    strides = t.stride()
    if strides[-1] == 1:
        return t, strides
    t = t.contiguous()
    return t, t.stride()


def _tile(width: int, half: int) -> dict[str, int]:
    """Returns the tile of a program: rows, and the powers of two that hold channel pairs and the other channels."""
    pairs, others = next_power_of_2(half), next_power_of_2(width - 2 * half) if width > 2 * half else 0
    # At most 32 rows, because wide layouts of narrow heads need more registers than a thread has.
    rows = max(1, min(32, _TILE // (2 * pairs + others)))
    return {"ROWS": 1 << (rows.bit_length() - 1), "HALF": pairs, "REST": others}


@functools.lru_cache(MAX_PREPARED)
def _programs(tiles: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Distributes _GRAD_PROGRAMS over kinds of heads in proportion to their tiles, with at least one per kind."""
    share = min(1.0, _GRAD_PROGRAMS / max(1, sum(tiles)))
    queries, keys, values, gates = (min(number, max(1, int(number * share))) for number in tiles)
    return queries, keys, values, gates
