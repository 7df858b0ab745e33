"""What a checkpoint is made of: boxes of global tensors, and small objects.

Neither knows its rank; planning lives in planner.py, files in storage.py and folder.py.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron.core.dist_checkpointing.boxes import Box, whole
from megatron.core.dist_checkpointing.logical import LogicalPiece, canonical_name, model_logical_pieces


@dataclasses.dataclass
class ShardedTensor:
    """A box of a global tensor that this rank holds; one rank may hold several boxes of one key.

    key: name in the checkpoint, without rank, padding or bucket. data: [*box shape], any dtype and strides; `save`
    reads it, `load` writes it in place. global_shape, global_offset: the whole tensor and the box's first element.
    allow_cast: `load` may convert from another floating-point dtype.
    """

    key: str
    data: torch.Tensor
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    allow_cast: bool = dataclasses.field(default=False, kw_only=True)

    @classmethod
    def whole(cls, key: str, data: torch.Tensor, *, allow_cast: bool = False) -> "ShardedTensor":
        """A tensor that this rank holds whole; data: any shape, dtype and strides."""
        shape = tuple(data.shape)
        return cls(key, data, shape, (0,) * len(shape), allow_cast=allow_cast)

    def __post_init__(self) -> None:
        # A box that leaves its tensor would be written and only be noticed as missing elements elsewhere.
        if not self.data.ndim == len(self.global_shape) == len(self.global_offset):
            raise ValueError(f"{self._describe()}: as many offsets and global sizes as dimensions are needed")
        if not self.box.is_inside(whole(self.global_shape)):
            raise ValueError(f"{self._describe()}: the box leaves the global tensor")

    @property
    def box(self) -> Box:
        """Where `data` lies in the global tensor."""
        return Box(self.global_offset, tuple(self.data.shape))

    def _describe(self) -> str:
        return f"{self.key}: {list(self.data.shape)} at {self.global_offset} of {self.global_shape}"


@dataclasses.dataclass
class ShardedObject:
    """A small JSON value (numbers, strings, lists, dicts) stored whole under a key; `load` replaces `data`.

    Every rank that holds the key must hold the same value: one of them is stored.
    """

    key: str
    data: Any


# What `save` and `load` take: items in any nesting of lists and dicts; the dicts' own keys mean nothing.
ShardedState = ShardedTensor | ShardedObject | Sequence["ShardedState"] | Mapping[str, "ShardedState"]


def flatten(state: ShardedState) -> Iterator[ShardedTensor | ShardedObject]:
    """The items of a nested state, in order."""
    if isinstance(state, (ShardedTensor, ShardedObject)):
        yield state
    elif isinstance(state, (Mapping, Sequence)) and not isinstance(state, str):
        for part in state.values() if isinstance(state, Mapping) else state:
            yield from flatten(part)
    else:
        raise ValueError(f"checkpoint state holds a {type(state).__name__}: must be ShardedTensor or ShardedObject")


def sharded_tensors(
    pieces: list[LogicalPiece], tensor: torch.Tensor, *, prefix: str = "", allow_cast: bool = False
) -> list[ShardedTensor]:
    """One ShardedTensor per piece of `tensor`: [*parameter's shape], contiguous, any dtype.

    The boxes are views: loading them fills `tensor`. prefix goes before each key ("optimizer.exp_avg.").
    """
    return [
        ShardedTensor(
            prefix + piece.key, piece.view_of(tensor), piece.global_shape, piece.global_offset, allow_cast=allow_cast
        )
        for piece in pieces
    ]


def model_sharded_tensors(model: torch.nn.Module, *, allow_cast: bool = False) -> list[ShardedTensor]:
    """Boxes of every parameter and persistent buffer of `model`: views, any shape and dtype, in named order."""
    pieces = model_logical_pieces(model)
    tensors = []
    # Detached: `load` writes through these views, which autograd must not see.
    for name, parameter in model.named_parameters():
        tensors += sharded_tensors(pieces[canonical_name(name)], parameter.detach(), allow_cast=allow_cast)
    return tensors + buffer_sharded_tensors(model, allow_cast=allow_cast)


def buffer_sharded_tensors(model: torch.nn.Module, *, allow_cast: bool = False) -> list[ShardedTensor]:
    """Every persistent buffer of `model`, whole: any shape and dtype, in named order."""
    tensors = []
    # state_dict leaves out buffers that are not persistent; tied names of one parameter are in it twice.
    seen = {canonical_name(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, value in model.state_dict().items():
        # Extra state that modules add to state_dict may be anything; what is no tensor is not ours to store.
        if canonical_name(name) not in seen and isinstance(value, torch.Tensor):
            tensors.append(ShardedTensor.whole(canonical_name(name), value, allow_cast=allow_cast))
    return tensors
