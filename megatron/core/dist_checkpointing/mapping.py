"""State that a checkpoint stores: boxes of logical tensors (ShardedTensor) and small objects (ShardedObject).

Items do not depend on ranks. planner.py assigns them to ranks, and storage.py and folder.py write the files.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron.core.logical_tensors import Box, LogicalPiece, canonical_name, model_logical_pieces, views_of_range, whole
from megatron.core.utils import divide

# Number of a copy among equal copies. The copy whose numbers are all 0 is the main replica.
ReplicaId = int | tuple[int, ...]


@dataclasses.dataclass
class ShardedTensor:
    """Part of a logical tensor that this rank stores. A rank may store several parts of one key.

    The fields are the same as in Megatron-Core. key: name in the checkpoint, without rank, padding or bucket. data:
    [*local_shape], `dtype`, any strides; a save reads it and a load fills it in place, or allocates it if it is None.
    global_shape, global_offset: shape of the whole tensor, and index of the part's first element; both begin with
    `prepend_axis_num` axes that `data` lacks. axis_fragmentations: number of equal parts along each axis, or None.
    replica_id: number of this copy; only the main replica is written. allow_shape_mismatch: whether a load may read
    only the elements that the stored tensor contains. flattened_range: range of the flattened part that `data`, [N],
    contains; None means the whole part. allow_cast: whether a load may convert from a different floating-point dtype.
    """

    key: str
    data: torch.Tensor = dataclasses.field(repr=False)
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None = None
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None
    allow_cast: bool = dataclasses.field(default=False, kw_only=True)

    @classmethod
    def at(
        cls,
        key: str,
        data: torch.Tensor,
        global_shape: Sequence[int],
        global_offset: Sequence[int],
        *,
        allow_cast: bool = False,
    ) -> "ShardedTensor":
        """Builds the item for a box of a tensor. data: [*box shape], any shape, dtype and strides."""
        local_shape = tuple(data.shape)
        return cls(key, data, data.dtype, local_shape, tuple(global_shape), tuple(global_offset), allow_cast=allow_cast)

    @classmethod
    def whole(cls, key: str, data: torch.Tensor, *, allow_cast: bool = False) -> "ShardedTensor":
        """Builds the item for a tensor that this rank stores entirely. data: any shape, dtype and strides."""
        return cls.at(key, data, data.shape, (0,) * data.ndim, allow_cast=allow_cast)

    def with_data(self, key: str, data: torch.Tensor) -> "ShardedTensor":
        """Builds the item for the same box under a different key. data: [*local_shape], any dtype."""
        return dataclasses.replace(self, key=key, data=data, dtype=data.dtype)

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: torch.Tensor,
        *rank_offsets: tuple[int, int, int],
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        flattened_range: None = None,
        **init_kwargs: Any,
    ) -> "ShardedTensor":
        """Builds the item for one of several equal parts of a tensor. data: any shape and dtype.

        rank_offsets: (global axis, index of this part, number of parts) for each axis that is divided. init_kwargs:
        additional fields. Raises ValueError if an axis or an index is out of range.
        """
        if flattened_range is not None:
            raise ValueError(f"{key}: flattened_range is {flattened_range}: pass it to the constructor instead")
        local_shape = tuple(data.shape)
        shape = [1] * prepend_axis_num + list(local_shape)
        offset, fragments = [0] * len(shape), [1] * len(shape)
        for axis, number, count in rank_offsets:
            if not 0 <= axis < len(shape) or not 0 <= number < count or fragments[axis] != 1:
                raise ValueError(
                    f"{key}: rank offset {(axis, number, count)} is invalid: must be an axis below {len(shape)}, "
                    "given once, and the index of a part below the number of parts"
                )
            offset[axis], fragments[axis] = number * shape[axis], count
            shape[axis] *= count
        return cls(
            key,
            data,
            data.dtype,
            local_shape,
            tuple(shape),
            tuple(offset),
            tuple(fragments),
            replica_id=replica_id,
            prepend_axis_num=prepend_axis_num,
            **init_kwargs,
        )

    def __post_init__(self) -> None:
        # Otherwise, an out-of-bounds box would be written, and would be noticed only as elements missing elsewhere.
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Raises ValueError, naming the key, if the fields contradict each other or the data."""
        if self.data is not None and self.data.dtype != self.dtype:
            raise ValueError(f"{self._describe()}: the data is {self.data.dtype}, but the field dtype is {self.dtype}")
        if self.data is not None and tuple(self.data.shape) != self._data_shape:
            raise ValueError(f"{self._describe()}: the data has shape {list(self.data.shape)}")
        ndim = self.prepend_axis_num + len(self.local_shape)
        if not ndim == len(self.global_shape) == len(self.global_offset):
            raise ValueError(f"{self._describe()}: must have one offset and one global size for each dimension")
        if not self.box.is_inside(whole(tuple(self.global_shape))):
            raise ValueError(f"{self._describe()}: the box exceeds the global tensor")

    @property
    def _data_shape(self) -> tuple[int, ...]:
        if self.flattened_range is None:
            return tuple(self.local_shape)
        start, stop, _ = self.flattened_range.indices(math.prod(self.local_shape))
        return (stop - start,)

    @property
    def box(self) -> Box:
        """Window of the logical tensor that the part fills."""
        return Box(tuple(self.global_offset), (1,) * self.prepend_axis_num + tuple(self.local_shape))

    @property
    def stored_key(self) -> str:
        """Name in the checkpoint."""
        return self.key

    @property
    def is_main_replica(self) -> bool:
        """Whether a save writes this copy."""
        return _is_main(self.replica_id)

    def init_data(self, device: torch.device | str, init_fn: Callable[..., torch.Tensor] = torch.empty) -> None:
        """Allocates `data` on `device`: [*local_shape] or a flat range, `dtype`. Does nothing if data exists."""
        if self.data is None:
            self.data = init_fn(self._data_shape, dtype=self.dtype, device=device)

    def narrow(self, dim: int, start: int, length: int) -> list["ShardedTensor"]:
        """Returns the part `start` to `start + length` of `data` along `dim`, as if every rank narrowed its part.

        The list contains one item: a view of the data, in a whole tensor that is smaller along that axis. Raises
        ValueError for a flat range.
        """
        if self.flattened_range is not None:
            raise ValueError(f"{self._describe()}: a flat range cannot be narrowed along an axis")
        axis, size = self.prepend_axis_num + dim, self.local_shape[dim]

        def scaled(values: Sequence[int]) -> tuple[int, ...]:
            return tuple(divide(n * length, size) if i == axis else n for i, n in enumerate(values))

        narrowed = dataclasses.replace(
            self,
            data=None if self.data is None else self.data.narrow(dim, start, length),
            local_shape=tuple(length if i == dim else n for i, n in enumerate(self.local_shape)),
            global_shape=scaled(self.global_shape),
            global_offset=scaled(self.global_offset),
        )
        return [narrowed]

    def boxes(self) -> list["ShardedTensor"]:
        """Splits the part into boxes whose data are views: one box, or at most 2d - 1 boxes for a flat range."""
        shape = self.box.shape
        if self.flattened_range is None:
            views = [(tuple(self.global_offset), self.data.detach()[(None,) * self.prepend_axis_num + (...,)])]
        else:
            strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
            piece = LogicalPiece(self.key, shape, strides, 0, tuple(self.global_shape), tuple(self.global_offset))
            start = self.flattened_range.indices(math.prod(shape))[0]
            views = list(views_of_range(piece, self.data.detach(), start=start))
        return [
            ShardedTensor.at(self.key, view, self.global_shape, offset, allow_cast=self.allow_cast)
            for offset, view in views
        ]

    def _describe(self) -> str:
        return f"{self.key}: {list(self.box.shape)} at {tuple(self.global_offset)} of {tuple(self.global_shape)}"


@dataclasses.dataclass
class ShardedObject:
    """Small JSON value (numbers, strings, lists, dicts) stored under a key. A load replaces `data`.

    global_shape, global_offset: position in a grid of objects with the same key; by default, the object is the only
    one. Ranks with the same position must provide the same value, because only one copy is stored.
    """

    key: str
    data: Any
    global_shape: tuple[int, ...] = (1,)
    global_offset: tuple[int, ...] = (0,)
    replica_id: ReplicaId = 0

    def __post_init__(self) -> None:
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Raises ValueError, naming the key, if the position is not in the grid."""
        shape, offset = tuple(self.global_shape), tuple(self.global_offset)
        if len(shape) != len(offset) or any(not 0 <= o < n for o, n in zip(offset, shape)):
            raise ValueError(f"{self.key}: global_offset is {offset}: must be a position in a grid of shape {shape}")

    @property
    def unique_key(self) -> str:
        """Key with the position in the grid, for example key/shard_1.0_2.4."""
        return f"{self.key}/shard_{_dotted(self.global_offset)}_{_dotted(self.global_shape)}"

    @property
    def stored_key(self) -> str:
        """Name in the checkpoint: `key` for a single object, or `unique_key` for one of several."""
        return self.key if tuple(self.global_shape) == (1,) else self.unique_key

    @property
    def is_main_replica(self) -> bool:
        """Whether a save writes this copy."""
        return _is_main(self.replica_id)


def _is_main(replica_id: ReplicaId) -> bool:
    return not any(replica_id) if isinstance(replica_id, tuple) else replica_id == 0


def _dotted(numbers: Sequence[int]) -> str:
    return ".".join(map(str, numbers))


# Argument of `save_items` and `load_items`: items in any nesting of lists and dicts. The keys of the dicts are ignored.
ShardedState = ShardedTensor | ShardedObject | Sequence["ShardedState"] | Mapping[str, "ShardedState"]


def flatten(state: ShardedState) -> Iterator[ShardedTensor | ShardedObject]:
    """Yields the items of a nested state in order. Raises ValueError for anything that is not an item."""
    if isinstance(state, (ShardedTensor, ShardedObject)):
        yield state
    elif isinstance(state, (Mapping, Sequence)) and not isinstance(state, str):
        for part in state.values() if isinstance(state, Mapping) else state:
            yield from flatten(part)
    else:
        raise ValueError(f"checkpoint state contains a {type(state).__name__}: must be ShardedTensor or ShardedObject")


def sharded_tensors(
    pieces: list[LogicalPiece], tensor: torch.Tensor, *, prefix: str = "", allow_cast: bool = False
) -> list[ShardedTensor]:
    """Builds one ShardedTensor for each piece of `tensor`, as views, so that a load fills `tensor`.

    tensor: [*parameter's shape], contiguous, any dtype. prefix: prepended to each key ("optimizer.exp_avg.").
    """
    return [
        ShardedTensor.at(
            prefix + piece.key, piece.view_of(tensor), piece.global_shape, piece.global_offset, allow_cast=allow_cast
        )
        for piece in pieces
    ]


def range_tensors(
    pieces: Sequence[LogicalPiece], flat: torch.Tensor, *, start: int, prefix: str = "", allow_cast: bool = False
) -> list[ShardedTensor]:
    """Builds ShardedTensors for a flat range of a parameter, at most 2d - 1 for each piece.

    pieces: all pieces of the parameter. flat: [N], any dtype, contiguous, begins at the parameter's element `start`.
    The boxes are views, so a load fills `flat`. Padding elements, which belong to no piece, and empty boxes are
    skipped. prefix: prepended to each key.
    """
    return [
        ShardedTensor.at(prefix + piece.key, view, piece.global_shape, offset, allow_cast=allow_cast)
        for piece in pieces
        for offset, view in views_of_range(piece, flat, start=start)
    ]


def model_sharded_tensors(model: torch.nn.Module, *, allow_cast: bool = False) -> list[ShardedTensor]:
    """Builds ShardedTensors for all parameters and persistent buffers of `model`: views, any shape and dtype."""
    pieces = model_logical_pieces(model)
    tensors = []
    # Detached, because `load` writes through these views and autograd must not record it.
    for name, parameter in model.named_parameters():
        tensors += sharded_tensors(pieces[canonical_name(name)], parameter.detach(), allow_cast=allow_cast)
    return tensors + buffer_sharded_tensors(model, allow_cast=allow_cast)


class BoxesOfTensor(list[ShardedTensor]):
    """List of the boxes of one tensor. A loaded state dict contains the tensor in place of the list.

    tensor: the tensor of which the boxes are views.
    """

    def __init__(self, boxes: Iterable[ShardedTensor], *, tensor: torch.Tensor) -> None:
        super().__init__(boxes)
        self.tensor = tensor


def module_sharded_state(module: torch.nn.Module, *, prefix: str = "") -> dict[str, ShardedTensor | BoxesOfTensor]:
    """Builds the sharded state of a module by name: views, any shape and dtype.

    A parameter with several boxes is represented by a BoxesOfTensor. prefix: the module's full name with a trailing
    dot, prepended to the names and to the keys in the checkpoint.
    """
    pieces = model_logical_pieces(module)
    state: dict[str, ShardedTensor | BoxesOfTensor] = {}
    for name, parameter in module.named_parameters():
        tensor = parameter.detach()
        boxes = sharded_tensors(pieces[canonical_name(name)], tensor, prefix=prefix)
        is_one = len(boxes) == 1 and boxes[0].local_shape == tensor.shape
        state[prefix + canonical_name(name)] = boxes[0] if is_one else BoxesOfTensor(boxes, tensor=tensor)
    for box in buffer_sharded_tensors(module):
        state[prefix + box.key] = dataclasses.replace(box, key=prefix + box.key)
    return state


def buffer_sharded_tensors(model: torch.nn.Module, *, allow_cast: bool = False) -> list[ShardedTensor]:
    """Builds one ShardedTensor for each persistent buffer of `model`: any shape and dtype."""
    tensors = []
    # state_dict omits non-persistent buffers, and lists a tied parameter under each of its names.
    seen = {canonical_name(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, value in model.state_dict().items():
        # Modules may add extra state of any type to state_dict; only tensors are stored.
        if canonical_name(name) not in seen and isinstance(value, torch.Tensor):
            tensors.append(ShardedTensor.whole(canonical_name(name), value, allow_cast=allow_cast))
    return tensors
