"""Weight initialization by logical name, so that a seed gives the same model on any device, layout and implementation.

Layers define the distributions (init_methods). The logical names are the names in canonical checkpoints.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy
import torch
from torch import Tensor, nn

from megatron.core.dist_checkpointing.mapping import ShardedTensor, range_tensors
from megatron.core.logical_tensors import LogicalPiece, canonical_name, model_logical_pieces
from megatron.core.model_parallel_config import ConstantInit, InitMethod, XavierUniformInit
from megatron.core.transformer.transformer_config import NormalInit, TransformerConfig

# Elements per block. Each block of rows of a stored tensor has a separate generator, so that a rank draws few numbers
# that it does not use.
_BLOCK_ELEMENTS = 1 << 17


@runtime_checkable
class HasInitMethods(Protocol):
    """A module that defines the initialization of its parameters."""

    def init_methods(self) -> dict[str, InitMethod]:
        """Returns init methods by parameter name. A parameter without an entry must not be on the meta device."""
        ...


@contextmanager
def deferred_initialization(config: TransformerConfig) -> Iterator[None]:
    """Skips random initialization of modules built in the block. Call `initialize_parameters` afterwards."""
    wanted, config.perform_initialization = config.perform_initialization, False
    try:
        yield
    finally:
        config.perform_initialization = wanted


def initialize_parameters(model: nn.Module, *, seed: int) -> None:
    """Initializes random parameters in place from `seed` and their logical names, except on the meta device."""
    values = InitialValues(model, seed=seed)
    named = [(canonical_name(name), param) for name, param in model.named_parameters() if not param.is_meta]
    # Layers have already set constant values.
    values.fill((name, 0, param.data.view(-1)) for name, param in named if values.is_random(name))


class InitialValues:
    """Computes initial values of a model's parameters on request, from `seed` and the logical names.

    Normal and Xavier distributions are drawn for the whole stored tensor in blocks of rows, and a rank draws only the
    blocks that it requests. Any other init method is user-defined. It fills this rank's parameter, in `dtype` (None
    means the dtype of the destination), seeded by the name of the stored tensor and the offset in it.
    """

    def __init__(self, model: nn.Module, *, seed: int, dtype: torch.dtype | None = None) -> None:
        self._methods, self._pieces = _methods_by_name(model), model_logical_pieces(model)
        self._shapes = {canonical_name(name): param.shape for name, param in model.named_parameters()}
        self._seed, self._dtype = seed, dtype

    def covers(self, name: str) -> bool:
        """Returns whether a module defines an init method for this parameter."""
        return name in self._methods

    def is_random(self, name: str) -> bool:
        """Returns whether the init method of the parameter is not a constant."""
        return self.covers(name) and not isinstance(self._methods[name], ConstantInit)

    def fill(self, ranges: Iterable[tuple[str, int, Tensor]]) -> None:
        """Fills ranges of parameters with their initial values.

        ranges: (name, index of the first element in the flattened parameter, destination: [n], any float dtype).
        Normal and Xavier distributions skip elements that are not in checkpoints, such as padding rows.
        """
        # Blocks of all tensors are collected first, so that many small tensors also keep all threads busy.
        blocks: list[_Block] = []
        for name, start, flat in ranges:
            method = self._methods[name]
            if isinstance(method, ConstantInit):
                method(flat)
            elif isinstance(method, NormalInit | XavierUniformInit):
                for box in range_tensors(self._pieces[name], flat, start=start):
                    blocks += _blocks(box, draw=_Draw(self._seed, method))
            elif flat.numel():
                flat.copy_(self._filled_by(method, name, dtype=flat.dtype).view(-1)[start : start + flat.numel()])
        # numpy releases the GIL while drawing, so threads help. The result does not depend on their number.
        with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as threads:
            for _ in threads.map(_Block.fill, blocks):
                pass

    def _filled_by(self, method: InitMethod, name: str, *, dtype: torch.dtype) -> Tensor:
        # On the CPU, so that the values are the same on every device.
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            values = torch.empty(self._shapes[name], dtype=self._dtype or dtype, device="cpu")
            torch.random.default_generator.manual_seed(
                _hash_words(self._seed, _place(self._pieces[name][0]))[0] % 2**63
            )
            method(values)
        return values


def _place(piece: LogicalPiece) -> str:
    # Not the name of the parameter, because the copy of a tied weight has a different name than the original. The
    # piece at offset 0 has the bare key, like the only piece of a layer that is not split.
    return f"{piece.key}@{piece.global_offset}" if any(piece.global_offset) else piece.key


def _methods_by_name(model: nn.Module) -> dict[str, InitMethod]:
    methods = {}
    for prefix, module in model.named_modules():
        if isinstance(module, HasInitMethods):
            for name, method in module.init_methods().items():
                methods[canonical_name(f"{prefix}.{name}" if prefix else name)] = method
    return methods


@dataclass(frozen=True)
class _Draw:
    seed: int
    method: NormalInit | XavierUniformInit


@dataclass(frozen=True)
class _Block:
    """A block of rows, [first, first + num_rows), of a stored tensor: its distribution, and the box that it fills."""

    box: ShardedTensor
    draw: _Draw
    index: int
    first: int
    num_rows: int

    def fill(self) -> None:
        row_shape = self.box.global_shape[1:]
        generator = numpy.random.Generator(
            numpy.random.Philox(key=_hash_words(self.draw.seed, f"{self.box.key}[{self.index}]"))
        )
        # fp32 for every parameter dtype, so that a bf16 model starts as the rounded fp32 model.
        numbers = numpy.empty((self.num_rows, *row_shape), dtype=numpy.float32)
        method = self.draw.method
        if isinstance(method, XavierUniformInit):
            generator.random(dtype=numpy.float32, out=numbers)
            numbers -= numpy.float32(0.5)
            numbers *= numpy.float32(2 * method.bound(self.box.global_shape))
        else:
            generator.standard_normal(dtype=numpy.float32, out=numbers)
            numbers *= numpy.float32(method.std)
        # Selects the rows and columns of the box from the drawn rows.
        start, own = self.box.global_offset[0], self.box.data.shape[0]
        low, high = max(start, self.first), min(start + own, self.first + self.num_rows)
        window = (slice(low - self.first, high - self.first),) + tuple(
            slice(offset, offset + size)
            for offset, size in zip(self.box.global_offset[1:], self.box.data.shape[1:], strict=True)
        )
        self.box.data[low - start : high - start].copy_(torch.from_numpy(numbers[window]))


def _blocks(box: ShardedTensor, *, draw: _Draw) -> Iterator[_Block]:
    """Yields the blocks that overlap a box. Block boundaries depend only on the shape of the stored tensor."""
    step = max(1, _BLOCK_ELEMENTS // math.prod(box.global_shape[1:]))
    start, stop = box.global_offset[0], box.global_offset[0] + box.data.shape[0]
    for index in range(start // step, -(-stop // step)):
        first = index * step
        yield _Block(box, draw, index, first, min(step, box.global_shape[0] - first))


def _hash_words(seed: int, name: str) -> list[int]:
    # Not hash(), which differs between processes.
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest()
    return [int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")]
