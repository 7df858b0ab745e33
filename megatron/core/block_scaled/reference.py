"""Arithmetic of block-scaled rows in torch, on the bits of fp32. Defines the bytes that kernels must write.

Runs on the CPU, with operators on whole tensors. The casts of torch to float8_e4m3fn and float8_e8m0fnu are not used to
quantize: they saturate infinities, and scales would be rounded to nearest.

Shapes: C rows, W elements in a row, e experts, H x O weights of an expert.

[Note: scales] The scale of a block is the smallest power of two s with amax / s <= 448, the largest e4m3 number, but at
least 2**-127. With the bits of amax in fp32 as an integer:
  byte = 255                                              if amax is infinite or NaN
  byte = max(((bits + 0x1FFFFF) >> 23) - 8, 0)            otherwise
448 is 1.75 * 2**8. The addition carries into the exponent if the mantissa is above 1.75, and amax then needs the next
power of two. A block of zeros has byte 0, finite blocks have at most 247.

[Note: values] An element x becomes x / s, rounded to the nearest e4m3 number, to the even one of two, with e4m3's
subnormals. x / s is exact in fp32, or so small that it becomes zero. The sign remains, also that of zeros.

[Note: exact] A decoded element is exact in fp32. It is exact in bf16 for scales of at least 2**-124. Only blocks with
elements below 2**-116 have smaller scales, and their elements are rounded to bf16's subnormals. Elements of a block
with byte 255 decode to NaN, and so does the value 0x7F under any scale. Elements of at least 1.9375 * 2**127 round to
2**128, which decodes to infinity. Quantizing finite decoded rows again gives rows that decode to the same numbers.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron.core.block_scaled.format import BlockFormat

# Elements that are processed together, so that temporaries stay in the cache.
_ELEMENTS = 1 << 17
_INFINITY, _NAN_CODE, _NAN_BYTE = 0x7F800000, 0x7F, 255


def quantize_rows(x: Tensor, form: BlockFormat, *, out: Tensor) -> None:
    """Writes the packed rows of x. x: [C, W], bf16 or fp32; out: [C, row_bytes(W)], uint8."""
    rows, width = x.shape
    for chunk in _chunks(rows, width):
        blocks = _in_blocks(x[chunk].float(), form.block)
        _write(blocks, _scale_bytes(_magnitudes(blocks).amax(2)), width, out=out[chunk])


def dequantize_rows(packed: Tensor, form: BlockFormat, *, out: Tensor) -> None:
    """Writes the decoded elements. packed: [C, row_bytes(W)], uint8; out: [C, W], bf16 or fp32. See [Note: exact]."""
    _dequantize_blocks(packed, form, width=out.shape[1], start=0, out=out)


def quantize_columns(packed: Tensor, form: BlockFormat, *, rows: int, capacity: int, out: Tensor) -> None:
    """Writes packed columns of the first `rows` rows. See [Note: packed columns] in format.py.

    packed: at least the first rows of [C, row_bytes(W)], uint8; capacity: C; out: [W, row_bytes(C)], uint8. Rows beyond
    the first `rows` are not read: they are zeros in a block with other rows. Blocks without any of the first rows
    remain unchanged.
    """
    width = out.shape[0]
    # Whole blocks of columns, whose scales are adjacent in `packed`.
    step = max(1, _ELEMENTS // form.block // form.block) * form.block
    for start in range(0, rows, form.block):
        end = min(start + form.block, rows)
        first_values, scale_at = out[:, start : min(start + form.block, capacity)], capacity + start // form.block
        for column in range(0, width, step):
            columns = slice(column, min(column + step, width))
            values = form.values(packed[start:end], width)[:, columns].float()
            scales = _scales(form.scales(packed[start:end], width)[:, column // form.block :][:, : step // form.block])
            decoded = _in_blocks(values, form.block).mul_(scales[..., None]).flatten(1)[:, : values.shape[1]]
            block = decoded.new_zeros(values.shape[1], first_values.shape[1])
            block[:, : end - start] = decoded.t()
            found = _scale_bytes(_magnitudes(block).amax(1))
            first_values[columns] = _codes(block, found[:, None])
            out[columns, scale_at] = found.to(torch.uint8)
    if rows > 0:
        out[:, capacity + form.num_scales(capacity) :] = 0


def quantize_squares(weight: Tensor, form: BlockFormat, *, out: Tensor) -> None:
    """Writes packed weights. See [Note: square blocks] in format.py.

    weight: [e, H, O], bf16 or fp32, any strides; out: [e, H, row_bytes(O)], uint8.
    """
    _, rows, width = weight.shape
    for expert, packed in zip(weight, out, strict=True):
        for start in range(0, rows, form.block):
            square = slice(start, min(start + form.block, rows))
            blocks = _in_blocks(expert[square].float(), form.block)
            found = _scale_bytes(_magnitudes(blocks).amax(2).amax(0))
            _write(blocks, found.expand(blocks.shape[0], -1), width, out=packed[square])


def scaled_product(
    x: Tensor,
    weight: Tensor,
    form: BlockFormat,
    *,
    ends: list[int],
    width: int,
    is_transposed: bool,
    out: Tensor,
) -> None:
    """Multiplies decoded rows with the decoded weights of their expert, in fp32, with one rounding to out's dtype.

    x: [C, row_bytes(H)], uint8; weight: [e, H, row_bytes(O)], uint8; out: [C, O], bf16 or fp32. is_transposed: whether
    to multiply with the transposed weights instead: x: [C, row_bytes(O)]; out: [C, H]. ends: end of each expert's rows.
    width: O. Weights of experts without rows are not read. Operands of each expert are decoded into new memory, so that
    the bits of a product depend on nothing but the expert's rows and weights.
    """
    inner = width if is_transposed else weight.shape[1]
    for expert, start, end in _ranges(ends):
        if end > start:
            left = _decoded(x[start:end], form, width=inner)
            right = _decoded(weight[expert], form, width=width)
            out[start:end] = left @ (right.t() if is_transposed else right)


def scaled_weight_grad(
    x: Tensor,
    grad: Tensor,
    form: BlockFormat,
    *,
    ends: list[int],
    rows: int,
    out: Tensor,
    scale: float = 1.0,
    is_added: bool = False,
) -> None:
    """Computes scale * x^T grad of each expert's rows from packed columns, and writes or adds it to `out`.

    x: [H, row_bytes(C)], uint8; grad: [O, row_bytes(C)], uint8; out: [e, H, O], bf16 or fp32. rows: C. ends: end of
    each expert's rows, multiples of the block, or C. Sums are in fp32, with one rounding to out's dtype. is_added:
    whether to add to `out`. Experts without rows have a gradient of 0. Columns beyond the live rows are not read.
    Raises ValueError if an expert begins or ends within a block.
    """
    for expert, start, end in _ranges(ends):
        if end == start:
            if not is_added:
                out[expert].zero_()
            continue
        if start % form.block or (end % form.block and end != rows):
            raise ValueError(
                f"offsets: rows {start} to {end} of expert {expert} must begin and end at multiples of {form.block}, "
                "the block"
            )
        left, right = (_decoded(one, form, width=rows, start=start, end=end) for one in (x, grad))
        product = left @ right.t()
        if scale != 1.0:
            product *= scale
        if is_added:
            product += out[expert]
        out[expert].copy_(product)


def _ranges(ends: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yields each expert with start and end of its rows, which are equal if it has none."""
    start = 0
    for expert, end in enumerate(ends):
        yield expert, start, max(start, end)
        start = max(start, end)


def _decoded(packed: Tensor, form: BlockFormat, *, width: int, start: int = 0, end: int | None = None) -> Tensor:
    """Returns elements `start` to `end` of packed rows of `width` elements, fp32, in new memory."""
    count = (width if end is None else end) - start
    decoded = torch.empty(packed.shape[0], count, dtype=torch.float32, device=packed.device)
    _dequantize_blocks(packed, form, width=width, start=start, out=decoded)
    return decoded


def _dequantize_blocks(packed: Tensor, form: BlockFormat, *, width: int, start: int, out: Tensor) -> None:
    """Writes as many elements as fit `out`, beginning with `start`, a multiple of the block, of rows of `width`."""
    rows, count = out.shape
    first, num_blocks = start // form.block, form.num_scales(count)
    for chunk in _chunks(rows, count):
        values = form.values(packed[chunk], width)[:, start : start + count].float()
        scales = _scales(form.scales(packed[chunk], width)[:, first : first + num_blocks])
        blocks = _in_blocks(values, form.block).mul_(scales[..., None])
        out[chunk] = blocks.flatten(1)[:, :count]


def _chunks(rows: int, width: int) -> list[slice]:
    step = max(1, _ELEMENTS // max(1, width))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _in_blocks(x: Tensor, block: int) -> Tensor:
    """Returns [rows, blocks, block] from x, [rows, W], fp32; the last block is filled up with zeros."""
    missing = -x.shape[1] % block
    if missing:
        x = torch.nn.functional.pad(x, (0, missing))
    return x.unflatten(1, (-1, block))


def _write(blocks: Tensor, scale_bytes: Tensor, width: int, *, out: Tensor) -> None:
    """Writes packed rows. blocks: [rows, blocks, block], fp32; scale_bytes: [rows, blocks], int32; out: uint8."""
    end = width + scale_bytes.shape[1]
    out[:, :width] = _codes(blocks, scale_bytes[..., None]).flatten(1)[:, :width]
    out[:, width:end] = scale_bytes
    out[:, end:] = 0


def _magnitudes(x: Tensor) -> Tensor:
    """Returns the bits of |x| as int32, in the order of |x|; NaN is the largest. x: fp32."""
    return x.view(torch.int32) & 0x7FFFFFFF


def _scale_bytes(amax: Tensor) -> Tensor:
    """Returns the bytes of scales, int32. amax: bits of fp32, int32. See [Note: scales]."""
    # NaN would exceed int32.
    finite = amax.clamp(max=_INFINITY)
    found = ((finite + 0x1FFFFF) >> 23).sub_(8).clamp_(min=0)
    return found.masked_fill_(amax >= _INFINITY, _NAN_BYTE)


def _scales(scale_bytes: Tensor) -> Tensor:
    """Returns scales, fp32. scale_bytes: uint8."""
    exponents = scale_bytes.int()
    bits = (exponents << 23).masked_fill_(exponents == 0, 0x00400000).masked_fill_(exponents == _NAN_BYTE, 0x7FC00000)
    return bits.view(torch.float32)


def _codes(x: Tensor, scale_bytes: Tensor) -> Tensor:
    """Returns e4m3 codes, uint8. x: fp32; scale_bytes: int32, x's shape after broadcasting. See [Note: values]."""
    # 2**(127 - byte), which is a normal number for each byte of a finite block.
    inverse = ((254 - scale_bytes) << 23).view(torch.float32)
    scaled = x * inverse
    bits = scaled.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    sign = (bits >> 24).bitwise_and_(0x80)
    # Normal numbers: half of the last bit that remains is added, less one unit if that bit is even.
    normal = ((magnitude >> 20) & 1).add_(magnitude).add_(0x7FFFF).bitwise_right_shift_(20).sub_((127 - 7) << 3)
    # Subnormal ones: next to 2**14, fp32 has steps of 2**-9, like e4m3's subnormals.
    small = scaled.abs_().add_(2.0**14).view(torch.int32).sub_(0x46800000)
    codes = torch.where(magnitude < 0x3C800000, small, normal).bitwise_or_(sign)
    return codes.masked_fill_(scale_bytes == _NAN_BYTE, _NAN_CODE).to(torch.uint8)
