"""Layout of block-scaled rows: e4m3 values and the scales of their blocks in one row of bytes. Contains no arithmetic.

[Note: packed rows] A packed row of W elements consists of row_bytes(W) bytes:
  W bytes             e4m3 values (sign, 4 bits of exponent, bias 7, 3 bits of mantissa; no infinity)
  ceil(W / block)     scales, one for each block of adjacent values: e8m0, i.e. byte b stands for 2**(b - 127)
  0 to 15 bytes       padding up to a multiple of 16 bytes, always zero
The last block of a row is shorter if the block does not divide W. An element is its value times the scale of its block.
Byte 255 stands for NaN: a block with an infinite or NaN element has this scale, and the value 0x7F, e4m3's NaN, for all
of its elements. Values, scales and padding have one storage, so that a row is moved as a whole.

[Note: square blocks] Packed weights are packed rows whose scales are equal within squares of block x block elements.
The scale of an element is then that of its block in both directions, so that products with the weights and with their
transpose read the same bytes. Scales are repeated in each row of a square, which costs 1 / block of the bytes and keeps
one layout for all tensors. Squares do not extend over several experts.

[Note: packed columns] A weight gradient sums over rows, so its operands need blocks along columns. Packed columns of
[C, W] elements are the packed rows of the transposed tensor: W rows of row_bytes(C) bytes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCKS = (32, 128)
# Bytes that the pitch of packed rows is a multiple of, so that kernels access 16 bytes at a time.
_PITCH = 16


@dataclass(frozen=True)
class SquareBlocks:
    """A stack of matrices that are quantized in square blocks. height, width: of one matrix. See [Note: square blocks].

    form: format of the blocks.
    """

    form: "BlockFormat"
    height: int
    width: int


@dataclass(frozen=True)
class BlockFormat:
    """Format of block-scaled rows. See [Note: packed rows].

    block: number of elements with a common scale: 128 for Hopper, 32 (MXFP8) for Blackwell. Raises ValueError for
    other numbers.
    """

    block: int

    def __post_init__(self) -> None:
        if type(self.block) is not int or self.block not in BLOCKS:
            raise ValueError(f"block ({self.block!r}) must be 32 (Blackwell) or 128 (Hopper)")

    def num_scales(self, width: int) -> int:
        """Returns the number of scales of a row of `width` elements."""
        return -(-width // self.block)

    def row_bytes(self, width: int) -> int:
        """Returns the number of bytes of a packed row of `width` elements, a multiple of 16."""
        return -(-(width + self.num_scales(width)) // _PITCH) * _PITCH

    def empty_rows(self, *shape: int, device: torch.device | None = None) -> Tensor:
        """Allocates packed rows. shape: that of the elements, [*, W]. Returns [*, row_bytes(W)], uint8, on `device`."""
        return torch.empty(*shape[:-1], self.row_bytes(shape[-1]), dtype=torch.uint8, device=device)

    def values(self, packed: Tensor, width: int) -> Tensor:
        """Returns a view of the values, [*, W], float8_e4m3fn. packed: [*, row_bytes(W)], uint8."""
        self.check("packed", packed, width)
        return packed.narrow(-1, 0, width).view(torch.float8_e4m3fn)

    def scales(self, packed: Tensor, width: int) -> Tensor:
        """Returns a view of the scales, [*, ceil(W / block)], uint8. packed: [*, row_bytes(W)], uint8."""
        self.check("packed", packed, width)
        return packed.narrow(-1, width, self.num_scales(width))

    def check(self, name: str, packed: Tensor, width: int) -> None:
        """Raises ValueError unless `packed` is packed rows, [*, row_bytes(W)], uint8, with adjacent bytes in a row.

        name: the tensor's name in the message.
        """
        required = self.row_bytes(width)
        if packed.dtype is not torch.uint8:
            raise ValueError(f"{name} has dtype {packed.dtype}: packed rows must be uint8")
        if packed.dim() < 2 or packed.shape[-1] != required:
            raise ValueError(
                f"{name} has shape {list(packed.shape)}: packed rows of {width} elements in blocks of {self.block} "
                f"must have {required} bytes"
            )
        if packed.stride(-1) != 1:
            raise ValueError(f"{name} has bytes {packed.stride(-1)} apart: the bytes of a packed row must be adjacent")
