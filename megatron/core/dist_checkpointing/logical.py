"""Logical pieces: how a parameter maps to windows of the tensors that a canonical checkpoint stores.

Knows nothing of files, ranks or optimizers; a module with inner structure describes itself through `logical_pieces`.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch

from megatron.core.dense_memory import dense_strides
from megatron.core.dist_checkpointing.boxes import Box, whole

WRAPPER_PREFIX = "module."


@dataclasses.dataclass(frozen=True)
class LogicalPiece:
    """A strided window of a parameter's memory, and the box of the stored tensor that it fills.

    shape, stride, storage_offset (elements from the tensor's first): the window, as for torch.as_strided.
    key, global_shape, global_offset: the stored tensor and where the window's first element lies in it; the box
    has the window's shape. The same piece applies to a parameter, its fp32 master and its optimizer moments.
    """

    key: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]

    def __post_init__(self) -> None:
        lengths = {len(self.shape), len(self.stride), len(self.global_shape), len(self.global_offset)}
        if len(lengths) != 1:
            raise ValueError(
                f"logical piece {self.key}: shape, stride and global box differ in their dimensions: {self}"
            )
        # Checked here and not at save: the mistake is the module's, and its name is in the key.
        if not Box(self.global_offset, self.shape).is_inside(whole(self.global_shape)):
            raise ValueError(f"logical piece {self.key}: the box leaves its stored tensor: {self}")

    def view_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The window as a view of `tensor`: contiguous, of the parameter's shape, any dtype -> [*shape], same dtype.

        A tensor of another layout only where the piece is the whole of it, and knows its strides: see memory_piece.
        """
        if not (tensor.is_contiguous() or tensor.stride() == self.stride):
            raise ValueError(f"logical piece {self.key}: needs a contiguous tensor, not strides {tensor.stride()}")
        # as_strided would check against the whole storage only, in which neighbours of a flat buffer live too.
        reach = self.storage_offset + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        if math.prod(self.shape) > 0 and reach >= tensor.numel():
            raise ValueError(f"logical piece {self.key}: reaches element {reach} of a tensor of {tensor.numel()}")
        # torch counts from the storage's start, a piece from the tensor's: parameters are windows of flat buffers.
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.storage_offset)


@runtime_checkable
class HasLogicalPieces(Protocol):
    """A module whose parameters have inner structure (gate over up, grouped q/k/v, stacked experts, padding)."""

    def logical_pieces(self, prefix: str) -> dict[str, list[LogicalPiece]]:
        """Pieces of those of the module's parameters that are not stored as they are.

        prefix: the module's full name with a trailing dot, empty at the root; keys start with it. The returned
        names are relative to the module and may reach into submodules ("linear_fc1.weight"). A parameter that
        is left out is stored as it is, or as a submodule says; where both speak, the outer module wins.
        """
        ...


def canonical_name(name: str) -> str:
    """A parameter's name without the prefixes of DDP-like wrappers: "module.module.x.weight" -> "x.weight"."""
    # Wrappers nest: precision inside data parallelism.
    while name.startswith(WRAPPER_PREFIX):
        name = name.removeprefix(WRAPPER_PREFIX)
    return name


def identity_piece(key: str, shape: tuple[int, ...]) -> LogicalPiece:
    """The piece of a tensor that is stored whole and as it is."""
    # The contiguous strides of torch, sizes of one included: nothing may depend on how the tensor was made.
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return LogicalPiece(key, tuple(shape), stride, 0, tuple(shape), (0,) * len(shape))


def memory_piece(key: str, tensor: torch.Tensor) -> LogicalPiece:
    """The piece of a tensor, any shape, dense layout and dtype, that is stored whole, in its logical order."""
    piece = identity_piece(key, tuple(tensor.shape))
    return piece if tensor.is_contiguous() else dataclasses.replace(piece, stride=dense_strides(tensor))


def model_logical_pieces(model: torch.nn.Module) -> dict[str, list[LogicalPiece]]:
    """The pieces of every parameter of `model`, by its name without wrapper prefixes, in named_parameters order.

    A parameter used under two names (tied embeddings) appears once, under its first name. Raises ValueError if a
    module describes a parameter that it does not have.
    """
    described = _described_pieces(model)
    pieces = {}
    for name, parameter in model.named_parameters():
        name = canonical_name(name)
        pieces[name] = described.pop(name, []) or [memory_piece(name, parameter)]
    # A module may describe a tied parameter under its second name, or a buffer; anything else is a mistake.
    others = {canonical_name(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    others.update(canonical_name(name) for name, _ in model.named_buffers(remove_duplicate=False))
    # A misspelt name would store the parameter as it is, silently, in a layout that no other model can read.
    unknown = sorted(described.keys() - others)
    if unknown:
        raise ValueError(f"logical_pieces names parameters that the model does not have: {', '.join(unknown)}")
    return pieces


def _described_pieces(model: torch.nn.Module) -> dict[str, list[LogicalPiece]]:
    described: dict[str, list[LogicalPiece]] = {}
    for prefix, module in _structured_modules(model):
        for local_name, pieces in module.logical_pieces(prefix).items():
            # named_modules yields parents first, so the outer description is already there.
            described.setdefault(prefix + local_name, pieces)
    return described


def _structured_modules(model: torch.nn.Module) -> Iterator[tuple[str, HasLogicalPieces]]:
    for name, module in model.named_modules():
        if isinstance(module, HasLogicalPieces):
            yield canonical_name(name + ".") if name else "", module
