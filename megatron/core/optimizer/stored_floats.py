"""StoredFloats: storage of optimizer state, possibly in fewer bits than updates compute in.

The storage forms are the classes Plain, Rounded, ScaledHalf and WithRemainder. Each is read and written as fp32 or
fp64, and has a multiple of BLOCK elements. Two functions choose the form of Adam's moments: zeros_beside in this file,
from a dtype, for MegatronOptimizer, and _storage in adam.py, from a StateForm, for DistributedFusedAdam. Masters are
built by the functions *_masters in this file, of which masters_for chooses one, and by _main_of in adam.py.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from megatron.core.device import host_bytes
from megatron.core.distributed.layout import ALIGNMENT
from megatron.core.optimizer.optimizer_config import OptimizerConfig

# Number of elements that share a scale. Equals the granularity at which parameters are split over ranks, so that no
# split changes a scale.
BLOCK = ALIGNMENT
# The frexp exponent of a block's largest number after scaling. With 16, numbers near 2^16 would overflow fp16.
TOP_EXPONENT = 15
LOWEST_EXPONENT = -100
# Elements converted per iteration: four such tensors fit into a core's cache. On a GPU pieces are larger, so that a
# kernel runs longer than its launch takes.
PIECE = 1 << 16
_GPU_PIECE = 1 << 23


class StoredFloats(Protocol):
    """N stored numbers, read and written in ranges that start and end at multiples of BLOCK."""

    @property
    def num_bytes(self) -> int: ...
    @property
    def numel(self) -> int: ...
    @property
    def memory(self) -> list[torch.Tensor]:
        """The tensors that store the numbers, without the parameters: any shape and dtype."""
        ...

    def read(self, start: int, end: int) -> torch.Tensor:
        """Returns the numbers in [start, end): [end - start], fp32 or fp64.

        The result is a view if the numbers are stored in this dtype, else a copy.
        """
        ...

    def write(self, start: int, values: torch.Tensor) -> None:
        """Overwrites the numbers from `start` on. values: [n], fp32 or fp64, may be the tensor returned by `read`."""
        ...


class _OneTensor:
    """Base class of forms with one number per element of a tensor, [N]."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.tensor.nbytes

    @property
    def memory(self) -> list[torch.Tensor]:
        """The tensor: [N], any float dtype."""
        return [self.tensor]

    @property
    def numel(self) -> int:
        """Number of elements, N."""
        return self.tensor.numel()


class Plain(_OneTensor):
    """Numbers stored without conversion. tensor: [N], fp32 or fp64."""

    def read(self, start: int, end: int) -> torch.Tensor:
        """Returns a view of the numbers in [start, end): [end - start], the tensor's dtype."""
        return self.tensor[start:end]

    def write(self, start: int, values: torch.Tensor) -> None:
        """Overwrites the numbers from `start` on. values: [n], the tensor's dtype.

        Copies nothing if `values` is the view that `read` returned.
        """
        own = self.tensor[start : start + values.numel()]
        # `read` returned a view, so the values may already be in place.
        if own.data_ptr() != values.data_ptr():
            own.copy_(values)


class Rounded(_OneTensor):
    """Numbers rounded to a dtype that is narrower than the compute dtype. tensor: [N], any float dtype.

    wide: the dtype returned by `read`, fp32 or fp64. bf16 has the exponent range of fp32; fp16 rounds numbers below
    3e-8 to zero.
    """

    def __init__(self, tensor: torch.Tensor, wide: torch.dtype = torch.float32) -> None:
        super().__init__(tensor)
        self._wide = wide

    def read(self, start: int, end: int) -> torch.Tensor:
        """Returns a copy of the numbers in [start, end): [end - start], fp32 or fp64."""
        return self.tensor[start:end].to(self._wide)

    def write(self, start: int, values: torch.Tensor) -> None:
        """Rounds values to the tensor's dtype and stores them from `start` on. values: [n], fp32 or fp64."""
        self.tensor[start : start + values.numel()].copy_(values)


class ScaledHalf(_OneTensor):
    """fp16 numbers with one power-of-two scale per block, which preserves the precision of small numbers.

    Squares of gradients are far below the range of fp16. tensor: [N], fp16. exponents: [N / 64], int8; the numbers of
    block b are stored multiplied by 2^exponents[b].
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        # One byte for 64 numbers.
        self.exponents = torch.zeros(tensor.numel() // BLOCK, dtype=torch.int8, device=tensor.device)

    @property
    def num_bytes(self) -> int:
        """Size of the tensor and the scales in bytes."""
        return super().num_bytes + self.exponents.nbytes

    @property
    def memory(self) -> list[torch.Tensor]:
        """The tensor and the scales: [N], fp16, and [N / 64], int8."""
        return [self.tensor, self.exponents]

    def read(self, start: int, end: int) -> torch.Tensor:
        """Returns a copy of the numbers in [start, end): [end - start], fp32."""
        factors = _power_of_two(-self.exponents[start // BLOCK : end // BLOCK].int())
        return (self.tensor[start:end].float().view(-1, BLOCK) * factors.unsqueeze(1)).view(-1)

    def write(self, start: int, values: torch.Tensor) -> None:
        """Overwrites the numbers from `start` on, with a new exponent for each block. values: [n], fp32."""
        blocks = values.view(-1, BLOCK)
        # frexp: the block's largest absolute number is in [2^(e - 1), 2^e).
        highest = torch.frexp(blocks.abs().amax(dim=1)).exponent.clamp_(min=LOWEST_EXPONENT)
        exponents = TOP_EXPONENT - highest
        self.exponents[start // BLOCK :][: len(exponents)].copy_(exponents)
        self.tensor[start : start + values.numel()].copy_((blocks * _power_of_two(exponents).unsqueeze(1)).view(-1))


class WithRemainder:
    """fp32 numbers whose upper halves are the bf16 parameters, and whose lower halves are stored here.

    model: [N], bf16, the parameters themselves, which `write` changes. upper, lower: [N], int16. Parameters are rounded
    to nearest, with ties away from zero. With torch's rounding of ties to even, which goes up or down, a signed lower
    half could not encode both cases.
    """

    def __init__(self, model: torch.Tensor) -> None:
        self.upper = model.view(torch.int16)
        self.lower = torch.zeros_like(self.upper)

    @property
    def num_bytes(self) -> int:
        """Number of bytes in addition to the parameters."""
        return self.lower.nbytes

    @property
    def memory(self) -> list[torch.Tensor]:
        """The lower halves: [N], int16."""
        return [self.lower]

    @property
    def numel(self) -> int:
        """Number of elements, N."""
        return self.lower.numel()

    def read(self, start: int, end: int) -> torch.Tensor:
        """Returns a copy of the numbers in [start, end), bit-identical to the written values: [end - start], fp32."""
        # The lower half is signed. It subtracts the amount that rounding added to the upper half.
        return (self.upper[start:end].int() << 16).add_(self.lower[start:end]).view(torch.float32)

    def write(self, start: int, values: torch.Tensor) -> None:
        """Overwrites the numbers from `start` on, which changes the parameters. values: [n], fp32."""
        bits = values.view(torch.int32)
        lower = bits.to(torch.int16)
        self.lower[start : start + values.numel()].copy_(lower)
        self.upper[start : start + values.numel()].copy_((bits - lower) >> 16)

    def forget(self) -> None:
        """Clears the lower halves, so that the numbers equal the parameters."""
        self.lower.zero_()


def piece_elements(stored: StoredFloats) -> int:
    """Returns the number of elements converted per iteration."""
    return PIECE if stored.read(0, 0).device.type == "cpu" else _GPU_PIECE


def pieces(stored: StoredFloats, *, start: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields the numbers in [start, end) in pieces, each with its start: [n], fp32 or fp64.

    Pieces that are copies have a bounded size.
    """
    step = end - start if isinstance(stored, Plain) else piece_elements(stored)
    for first in range(start, end, max(step, 1)):
        yield first, stored.read(first, min(first + step, end))


def masters_for(config: OptimizerConfig) -> Callable[[torch.Tensor], StoredFloats]:
    """Returns the function that builds masters in the configured form from parameters, [N], fp32 or 16-bit."""
    if not config.use_precision_aware_optimizer:
        return full_masters
    if config.main_params_dtype == torch.float16:
        return half_masters
    return remainder_masters if config.keeps_remainders else full_masters


def full_masters(model: torch.Tensor) -> StoredFloats:
    """Builds masters as fp32 copies of 16-bit parameters, [N]; wider parameters serve as masters themselves."""
    # Without the copy, updates below the last digit of a 16-bit weight would be lost.
    return Plain(model if model.dtype.itemsize >= 4 else model.float())


def host_masters(model: torch.Tensor) -> StoredFloats:
    """Builds fp32 or fp64 masters of parameters, [N], in pinned host memory; on a CPU, same as full_masters."""
    if model.device.type == "cpu":
        return full_masters(model)
    wide = torch.promote_types(model.dtype, torch.float32)
    memory = host_bytes(model.numel() * wide.itemsize, model.device)
    return Plain(memory.view(wide).copy_(model))


def half_masters(model: torch.Tensor) -> StoredFloats:
    """Builds masters of 16-bit parameters, [N], as scaled fp16; wider parameters serve as masters themselves."""
    if model.dtype.itemsize >= 4:
        return Plain(model)
    masters = ScaledHalf(torch.empty_like(model, dtype=torch.float16))
    step = piece_elements(masters)
    for start in range(0, masters.numel, step):
        masters.write(start, model[start : start + step].float())
    return masters


def remainder_masters(model: torch.Tensor) -> StoredFloats:
    """Builds fp32 masters of bf16 parameters, [N], stored as remainders; for other dtypes, same as full_masters."""
    return WithRemainder(model) if model.dtype == torch.bfloat16 else full_masters(model)


def zeros_beside(main: StoredFloats, dtype: torch.dtype) -> StoredFloats:
    """Allocates a zero moment for masters, stored as bf16, as scaled fp16, or in the dtype in which `main` is read.

    Used by MegatronOptimizer. For DistributedFusedAdam, a StateForm selects the storage form (adam.py).
    """
    like = main.read(0, 0)
    if dtype == torch.bfloat16:
        return Rounded(like.new_zeros(main.numel, dtype=dtype))
    if dtype == torch.float16:
        return ScaledHalf(like.new_zeros(main.numel, dtype=dtype))
    return Plain(like.new_zeros(main.numel))


def _power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Builds 2^e from its bit pattern, because pow may round: [B], int32, from -126 to 127 -> [B], fp32."""
    return ((exponents + 127) << 23).view(torch.float32)
