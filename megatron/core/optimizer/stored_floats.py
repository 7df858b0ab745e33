"""Forms in which an optimizer keeps its numbers, some in fewer bits than it computes with; all read as fp32 or fp64.

The meaning of the numbers is in adam.py; all forms have a multiple of BLOCK elements.
"""

from collections.abc import Iterator
from typing import Protocol

import torch

from megatron.core.device import host_bytes
from megatron.core.distributed.layout import ALIGNMENT

# Elements that share a scale. It is the grid on which ranks cut parameters, so that no cut changes a scale.
BLOCK = ALIGNMENT
# The largest number of a block comes to lie at half of fp16's range, the next power of two would leave it.
TOP_EXPONENT = 15
LOWEST_EXPONENT = -100
# Elements that are converted at a time: four tensors of that many numbers stay in the cache of a core. A GPU takes
# longer over so many than it takes to launch its kernels, which fewer would not.
PIECE = 1 << 16
_GPU_PIECE = 1 << 23


class StoredFloats(Protocol):
    """N numbers, to be read and written in any ranges that start and end on the grid of blocks."""

    @property
    def num_bytes(self) -> int: ...
    @property
    def numel(self) -> int: ...
    def read(self, start: int, end: int) -> torch.Tensor:
        """Returns numbers start to end: [end - start], fp32 or fp64, the storage itself if it is such, else a copy."""
        ...

    def write(self, start: int, values: torch.Tensor) -> None:
        """Stores values from `start` on, as `read` returned them or changed: [n], fp32 or fp64."""
        ...


class _OneTensor:
    """Base class of forms that keep one number in each element of a tensor, [N]."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return self.tensor.nbytes

    @property
    def numel(self) -> int:
        """N."""
        return self.tensor.numel()


class Plain(_OneTensor):
    """fp32 or fp64 as it is; tensor: [N]."""

    def read(self, start: int, end: int) -> torch.Tensor:
        """Returns the numbers from start to end: [end - start], the tensor's dtype, a view."""
        return self.tensor[start:end]

    def write(self, start: int, values: torch.Tensor) -> None:
        """Stores values from `start` on: [n], the tensor's dtype. Free if they are the view that `read` returned."""
        own = self.tensor[start : start + values.numel()]
        # What was read is the storage itself.
        if own.data_ptr() != values.data_ptr():
            own.copy_(values)


class Rounded(_OneTensor):
    """The nearest numbers of a narrower type than they are computed in; tensor: [N], any float dtype.

    wide: fp32 or fp64. Of 16 bits bf16 has the exponents of fp32, while fp16 loses what is below 6e-8.
    """

    def __init__(self, tensor: torch.Tensor, wide: torch.dtype = torch.float32) -> None:
        super().__init__(tensor)
        self._wide = wide

    def read(self, start: int, end: int) -> torch.Tensor:
        """Returns the numbers from start to end: [end - start], fp32 or fp64, a copy."""
        return self.tensor[start:end].to(self._wide)

    def write(self, start: int, values: torch.Tensor) -> None:
        """Stores values from `start` on, rounded to the tensor's dtype: [n], fp32 or fp64."""
        self.tensor[start : start + values.numel()].copy_(values)


class ScaledHalf(_OneTensor):
    """fp16 with a power of two a block, so that small numbers keep their digits: squares of gradients are far below
    what fp16 can say. tensor: [N], fp16; exponents: [N / 64], int8, of what the numbers were multiplied by.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        # A byte for 64 numbers.
        self.exponents = torch.zeros(tensor.numel() // BLOCK, dtype=torch.int8, device=tensor.device)

    @property
    def num_bytes(self) -> int:
        """Memory of it, with the scales."""
        return super().num_bytes + self.exponents.nbytes

    def read(self, start: int, end: int) -> torch.Tensor:
        """Returns the numbers from start to end: [end - start], fp32, a copy."""
        factors = _power_of_two(-self.exponents[start // BLOCK : end // BLOCK].int())
        return (self.tensor[start:end].float().view(-1, BLOCK) * factors.unsqueeze(1)).view(-1)

    def write(self, start: int, values: torch.Tensor) -> None:
        """Stores values from `start` on, with a new exponent for each block: [n], fp32."""
        blocks = values.view(-1, BLOCK)
        # The highest is in [2^(e - 1), 2^e).
        highest = torch.frexp(blocks.abs().amax(dim=1)).exponent.clamp_(min=LOWEST_EXPONENT)
        exponents = TOP_EXPONENT - highest
        self.exponents[start // BLOCK :][: len(exponents)].copy_(exponents)
        self.tensor[start : start + values.numel()].copy_((blocks * _power_of_two(exponents).unsqueeze(1)).view(-1))


class WithRemainder:
    """fp32 of which bf16 parameters have the upper half, and this the lower: nothing is stored twice.

    model: [N], bf16, the parameters themselves: `write` changes them. upper, lower: [N], int16. Rounded to nearest,
    halves away from zero: where they fall to the even neighbour, as of torch, the lower half could not tell from which
    side it came.
    """

    def __init__(self, model: torch.Tensor) -> None:
        self.upper = model.view(torch.int16)
        self.lower = torch.zeros_like(self.upper)

    @property
    def num_bytes(self) -> int:
        """Memory of it besides the parameters'."""
        return self.lower.nbytes

    @property
    def numel(self) -> int:
        """N."""
        return self.lower.numel()

    def read(self, start: int, end: int) -> torch.Tensor:
        """Returns the numbers from start to end: [end - start], fp32, a copy, each bit as it was written."""
        # The lower half is signed: it takes back what rounding added to the upper one.
        return (self.upper[start:end].int() << 16).add_(self.lower[start:end]).view(torch.float32)

    def write(self, start: int, values: torch.Tensor) -> None:
        """Stores values from `start` on, and so changes the parameters: [n], fp32."""
        bits = values.view(torch.int32)
        lower = bits.to(torch.int16)
        self.lower[start : start + values.numel()].copy_(lower)
        self.upper[start : start + values.numel()].copy_((bits - lower) >> 16)

    def forget(self) -> None:
        """Makes the numbers what the parameters are."""
        self.lower.zero_()


def piece_elements(stored: StoredFloats) -> int:
    """Returns how many of the numbers are converted at a time."""
    return PIECE if stored.read(0, 0).device.type == "cpu" else _GPU_PIECE


def pieces(stored: StoredFloats, *, start: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Ranges of what is stored, each with its start: [n], fp32 or fp64; copies are of bounded size."""
    step = end - start if isinstance(stored, Plain) else piece_elements(stored)
    for first in range(start, end, max(step, 1)):
        yield first, stored.read(first, min(first + step, end))


def full_masters(model: torch.Tensor) -> StoredFloats:
    """16-bit parameters, [N], as fp32; wider ones as they are."""
    # 16-bit weights lose updates below their last digit; the copy keeps them.
    return Plain(model if model.dtype.itemsize >= 4 else model.float())


def host_masters(model: torch.Tensor) -> StoredFloats:
    """Parameters, [N], as fp32 (fp64) in the host's memory, pinned; the parameters themselves where they are there."""
    if model.device.type == "cpu":
        return full_masters(model)
    wide = torch.promote_types(model.dtype, torch.float32)
    memory = host_bytes(model.numel() * wide.itemsize, model.device)
    return Plain(memory.view(wide).copy_(model))


def half_masters(model: torch.Tensor) -> StoredFloats:
    """16-bit parameters, [N], as scaled fp16; wider ones as they are."""
    if model.dtype.itemsize >= 4:
        return Plain(model)
    masters = ScaledHalf(torch.empty_like(model, dtype=torch.float16))
    step = piece_elements(masters)
    for start in range(0, masters.numel, step):
        masters.write(start, model[start : start + step].float())
    return masters


def remainder_masters(model: torch.Tensor) -> StoredFloats:
    """bf16 parameters, [N], with the half of fp32 that they lack; others as by full_masters."""
    return WithRemainder(model) if model.dtype == torch.bfloat16 else full_masters(model)


def zeros_beside(main: StoredFloats, dtype: torch.dtype) -> StoredFloats:
    """Returns zeros for a moment of `main`, kept in `dtype`: bf16, scaled fp16, or as wide as `main` is read.

    MegatronOptimizer's moments; DistributedFusedAdam builds its own by StateForm. The Triton kernel writes both too.
    """
    like = main.read(0, 0)
    if dtype == torch.bfloat16:
        return Rounded(like.new_zeros(main.numel, dtype=dtype))
    if dtype == torch.float16:
        return ScaledHalf(like.new_zeros(main.numel, dtype=dtype))
    return Plain(like.new_zeros(main.numel))


def _power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """2^e by its bits, since pow may round: [B], int32, -126 to 127 -> [B], fp32."""
    return ((exponents + 127) << 23).view(torch.float32)
