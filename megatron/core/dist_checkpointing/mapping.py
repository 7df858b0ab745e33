"""State that a checkpoint stores: boxes of logical tensors (ShardedTensor) and small objects (ShardedObject).

Items do not depend on ranks. planner.py assigns them to ranks, and storage.py and folder.py write the files.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron.core.logical_tensors import Box, LogicalPiece, canonical_name, model_logical_pieces, views_of_range, whole


@dataclasses.dataclass
class ShardedTensor:
    """A box of a logical tensor that this rank holds; one rank may hold several boxes of one key.

    key: name in the checkpoint, without rank, padding or bucket. data: [*box shape], any dtype and strides; `save`
    reads it and `load` fills it in place. global_shape, global_offset: shape of the whole tensor and index of the box's
    first element. allow_cast: whether `load` may convert from another floating-point dtype.
    """

    key: str
    data: torch.Tensor
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    allow_cast: bool = dataclasses.field(default=False, kw_only=True)

    @classmethod
    def whole(cls, key: str, data: torch.Tensor, *, allow_cast: bool = False) -> "ShardedTensor":
        """Builds the item of a tensor that this rank holds entirely; data: any shape, dtype and strides."""
        shape = tuple(data.shape)
        return cls(key, data, shape, (0,) * len(shape), allow_cast=allow_cast)

    def __post_init__(self) -> None:
        # An out-of-bounds box would otherwise be written, and surface only as elements missing elsewhere.
        if not self.data.ndim == len(self.global_shape) == len(self.global_offset):
            raise ValueError(f"{self._describe()}: needs one offset and one global size for each dimension")
        if not self.box.is_inside(whole(self.global_shape)):
            raise ValueError(f"{self._describe()}: the box exceeds the global tensor")

    @property
    def box(self) -> Box:
        """The window of the logical tensor that `data` fills."""
        return Box(self.global_offset, tuple(self.data.shape))

    def _describe(self) -> str:
        return f"{self.key}: {list(self.data.shape)} at {self.global_offset} of {self.global_shape}"


@dataclasses.dataclass
class ShardedObject:
    """A small JSON value (numbers, strings, lists, dicts) stored under a key; `load` replaces `data`.

    Every rank that holds the key must hold the same value, because only one copy is stored.
    """

    key: str
    data: Any


# Argument of `save` and `load`: items in any nesting of lists and dicts. Keys of the dicts have no meaning.
ShardedState = ShardedTensor | ShardedObject | Sequence["ShardedState"] | Mapping[str, "ShardedState"]


def flatten(state: ShardedState) -> Iterator[ShardedTensor | ShardedObject]:
    """Yields the items of a nested state in order."""
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
    """Builds one ShardedTensor for each piece of `tensor`: [*parameter's shape], contiguous, any dtype.

    The boxes are views, so loading them fills `tensor`. prefix is prepended to each key ("optimizer.exp_avg.").
    """
    return [
        ShardedTensor(
            prefix + piece.key, piece.view_of(tensor), piece.global_shape, piece.global_offset, allow_cast=allow_cast
        )
        for piece in pieces
    ]


def range_tensors(
    pieces: Sequence[LogicalPiece], flat: torch.Tensor, *, start: int, prefix: str = "", allow_cast: bool = False
) -> list[ShardedTensor]:
    """Builds the boxes of a flat range of a parameter, at most 2d - 1 for each piece.

    pieces: all pieces of the parameter. flat: [N], any dtype, contiguous, begins at the parameter's element `start`.
    The boxes are views, so loading them fills `flat`. Padding elements, which belong to no piece, are skipped, and so
    are empty boxes. prefix is prepended to each key.
    """
    return [
        ShardedTensor(prefix + piece.key, view, piece.global_shape, offset, allow_cast=allow_cast)
        for piece in pieces
        for offset, view in views_of_range(piece, flat, start=start)
    ]


def model_sharded_tensors(model: torch.nn.Module, *, allow_cast: bool = False) -> list[ShardedTensor]:
    """Builds the boxes of all parameters and persistent buffers: views, any shape and dtype, in named order."""
    pieces = model_logical_pieces(model)
    tensors = []
    # Detached, because `load` writes through these views and autograd must not record it.
    for name, parameter in model.named_parameters():
        tensors += sharded_tensors(pieces[canonical_name(name)], parameter.detach(), allow_cast=allow_cast)
    return tensors + buffer_sharded_tensors(model, allow_cast=allow_cast)


def module_sharded_state(
    module: torch.nn.Module, *, prefix: str = ""
) -> dict[str, ShardedTensor | list[ShardedTensor]]:
    """Builds the boxes of a part of a model by name: views, any shape and dtype; a list where a parameter has several.

    prefix: the module's full name with a trailing dot, prepended to the names and to the keys in the checkpoint.
    """
    pieces = model_logical_pieces(module)
    state: dict[str, ShardedTensor | list[ShardedTensor]] = {}
    for name, parameter in module.named_parameters():
        boxes = sharded_tensors(pieces[canonical_name(name)], parameter.detach(), prefix=prefix)
        state[prefix + canonical_name(name)] = boxes[0] if len(boxes) == 1 else boxes
    for box in buffer_sharded_tensors(module):
        state[prefix + box.key] = dataclasses.replace(box, key=prefix + box.key)
    return state


def buffer_sharded_tensors(model: torch.nn.Module, *, allow_cast: bool = False) -> list[ShardedTensor]:
    """Builds one whole box for each persistent buffer of `model`: any shape and dtype, in named order."""
    tensors = []
    # state_dict omits non-persistent buffers, and lists a tied parameter under each of its names.
    seen = {canonical_name(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, value in model.state_dict().items():
        # Modules may add extra state of any type to state_dict; only tensors are stored.
        if canonical_name(name) not in seen and isinstance(value, torch.Tensor):
            tensors.append(ShardedTensor.whole(canonical_name(name), value, allow_cast=allow_cast))
    return tensors
