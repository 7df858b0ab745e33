"""What a checkpoint is made of: boxes of global tensors, and small objects.

Neither knows its rank; planning and files live in planner.py and serialization.py.
"""

import dataclasses
from typing import Any

import torch

from megatron.core.dist_checkpointing.logical import LogicalPiece, box_is_inside


@dataclasses.dataclass(frozen=True)
class ShardedTensor:
    """A box of a global tensor that this rank holds; one rank may hold several boxes of one key.

    key: name in the checkpoint, without rank, padding or bucket. data: [*box shape], any dtype and strides; it is read
    by `save` and written in place by `load`. global_shape, global_offset: the whole tensor and the box's first
    element; by default `data` is the whole tensor.
    """

    key: str
    data: torch.Tensor
    global_shape: tuple[int, ...] | None = None
    global_offset: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        shape = tuple(self.data.shape)
        # The dataclass is frozen; this is the documented way to normalise a field of one.
        object.__setattr__(self, "global_shape", shape if self.global_shape is None else tuple(self.global_shape))
        object.__setattr__(
            self, "global_offset", (0,) * len(shape) if self.global_offset is None else tuple(self.global_offset)
        )
        if not len(shape) == len(self.box.offset) == len(self.box.global_shape):
            raise ValueError(f"{self.key}: box {self.box} needs as many offsets and global sizes as dimensions")
        if not box_is_inside(shape, self.box.offset, self.box.global_shape):
            raise ValueError(f"{self.key}: box {self.box} leaves the global tensor")

    @property
    def box(self) -> "Box":
        """Where `data` lies in the global tensor."""
        assert self.global_shape is not None and self.global_offset is not None
        return Box(tuple(self.data.shape), self.global_offset, self.global_shape)


@dataclasses.dataclass(frozen=True)
class Box:
    """Shape and offset of a window of a tensor of global_shape."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    global_shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{list(self.shape)} at {list(self.offset)} of {list(self.global_shape)}"


@dataclasses.dataclass
class ShardedObject:
    """A small JSON value (numbers, strings, lists, dicts) stored whole under a key; `load` replaces `data`.

    Every rank that holds the key must hold the same value; the lowest rank's is stored.
    """

    key: str
    data: Any


def sharded_tensors(pieces: list[LogicalPiece], tensor: torch.Tensor, *, prefix: str = "") -> list[ShardedTensor]:
    """One ShardedTensor per piece of `tensor`: contiguous, of the parameter's shape, any dtype.

    The boxes are views: loading them fills `tensor`. prefix goes before each key ("optimizer.exp_avg.").
    """
    return [
        ShardedTensor(prefix + piece.key, piece.view_of(tensor), piece.global_shape, piece.global_offset)
        for piece in pieces
    ]
