"""Initial weights by logical name: the same seed gives the same model on any device, layout and expert implementation.

The distributions are the layers' own (their init_methods); the names are those of canonical checkpoints.
"""

import hashlib
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy
import torch
from torch import Tensor, nn

from megatron.core.dist_checkpointing.logical import LogicalPiece, canonical_name, model_logical_pieces
from megatron.core.model_parallel_config import InitMethod
from megatron.core.transformer.transformer_config import NormalInit, TransformerConfig

# Numbers drawn from one generator: a block of rows of the stored tensor, so that a rank draws little beyond its own.
_BLOCK_ELEMENTS = 1 << 17


@runtime_checkable
class HasInitMethods(Protocol):
    """A module with parameters that start at random."""

    def init_methods(self) -> dict[str, InitMethod]:
        """How they start, by the parameter's name in the module."""
        ...


@contextmanager
def deferred_initialization(config: TransformerConfig) -> Iterator[None]:
    """Modules built inside leave their random parameters unset: `initialize_parameters` is to follow."""
    wanted, config.perform_initialization = config.perform_initialization, False
    try:
        yield
    finally:
        config.perform_initialization = wanted


def initialize_parameters(model: nn.Module, *, seed: int) -> None:
    """Sets every parameter that starts at random, in place, from `seed` and its logical name.

    A normal distribution is drawn per stored tensor. Any other init method is the user's own and fills the
    parameter as this rank holds it, seeded by the stored tensor's name and by where in it that is.
    """
    methods = _methods_by_name(model)
    pieces = model_logical_pieces(model)
    # Listed first, drawn after: a model of many small tensors keeps all threads busy too.
    blocks = []
    for name, parameter in model.named_parameters():
        method = methods.get(canonical_name(name))
        if isinstance(method, NormalInit):
            for piece in pieces[canonical_name(name)]:
                blocks += list(_blocks(piece.view_of(parameter.data), piece, draw=_Draw(seed, method.std)))
        elif method is not None:
            _call_seeded(method, parameter, seed=_hash_words(seed, _place(pieces[canonical_name(name)][0]))[0])
    # numpy draws outside the interpreter lock, so threads help; the result does not depend on their number.
    with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as threads:
        for _ in threads.map(_Block.fill, blocks):
            pass


def _place(piece: LogicalPiece) -> str:
    # Not by the parameter's own name: the copy of a tied weight has another than its owner. The first rank's piece,
    # which is the only one of a layer that is not split, has the key alone.
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
    std: float


@dataclass(frozen=True)
class _Block:
    """Rows [first, first + len) of a stored tensor, the part of them that `view` holds, and the numbers to draw."""

    view: Tensor
    piece: LogicalPiece
    draw: _Draw
    index: int
    first: int
    num_rows: int

    def fill(self) -> None:
        row_shape = self.piece.global_shape[1:]
        generator = numpy.random.Generator(
            numpy.random.Philox(key=_hash_words(self.draw.seed, f"{self.piece.key}[{self.index}]"))
        )
        # fp32 for every parameter dtype, so that a bf16 model starts as the rounded fp32 one.
        numbers = numpy.empty((self.num_rows, *row_shape), dtype=numpy.float32)
        generator.standard_normal(dtype=numpy.float32, out=numbers)
        numbers *= numpy.float32(self.draw.std)
        # Of the drawn rows those that this piece holds, and of those the columns that it holds.
        start, own = self.piece.global_offset[0], self.view.shape[0]
        low, high = max(start, self.first), min(start + own, self.first + self.num_rows)
        window = (slice(low - self.first, high - self.first),) + tuple(
            slice(offset, offset + size)
            for offset, size in zip(self.piece.global_offset[1:], self.piece.shape[1:], strict=True)
        )
        self.view[low - start : high - start].copy_(torch.from_numpy(numbers[window]))


def _blocks(view: Tensor, piece: LogicalPiece, *, draw: _Draw) -> Iterator[_Block]:
    """The blocks that hold a piece; their borders depend on the stored tensor's shape alone."""
    step = max(1, _BLOCK_ELEMENTS // math.prod(piece.global_shape[1:]))
    start, stop = piece.global_offset[0], piece.global_offset[0] + piece.shape[0]
    for index in range(start // step, -(-stop // step)):
        first = index * step
        yield _Block(view, piece, draw, index, first, min(step, piece.global_shape[0] - first))


def _call_seeded(method: InitMethod, parameter: nn.Parameter, *, seed: int) -> None:
    # On the CPU, so that the values do not depend on the device.
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        values = torch.empty(parameter.shape, dtype=parameter.dtype)
        torch.random.default_generator.manual_seed(seed % 2**63)
        method(values)
        parameter.copy_(values)


def _hash_words(seed: int, name: str) -> list[int]:
    # Not hash(): that differs from process to process.
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest()
    return [int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")]
