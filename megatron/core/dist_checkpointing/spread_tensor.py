"""SpreadTensor: a tensor of which each rank has some boxes, as torch.distributed.checkpoint and pickles take it.

What the elements are and where they are kept is their owner's matter; our own checkpoints are in serialization.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megatron.core.dist_checkpointing.boxes import Box, whole

# Shape, dtype, and the elements of each box by its offset.
_Parts = tuple[tuple[int, ...], torch.dtype, list[tuple[tuple[int, ...], torch.Tensor]]]


@dataclass(frozen=True)
class HeldBox:
    """A box of a tensor and how to get its elements: [*box shape], the tensor's dtype, a view or a copy."""

    box: Box
    read: Callable[[], torch.Tensor]

    def __deepcopy__(self, memo: dict[int, Any]) -> "HeldBox":
        # What keeps the elements has others as well. For torch's stager, which copies what a tensor's attributes have.
        return _box_of(self.box.offset, _copy_on_host(self.read()))


class SpreadTensor(torch.Tensor):
    """The size of a tensor, any floating dtype, and those of its elements that this rank has, in disjoint boxes.

    torch.distributed.checkpoint saves it box by box, whatever the owner reads at that moment, and loads it into memory
    beside the owner's, on the host: a load that fails half way has changed nothing, and who called it hands the tensor
    to the owner. Replicas have equal boxes, of which one is written. A pickle or deep copy has the elements themselves.
    It has to be a torch.Tensor, since the planner looks for boxes in no other class; nothing can be computed with it.
    """

    # By their offsets: disjoint boxes that are not empty have different first elements.
    _held: dict[tuple[int, ...], HeldBox]
    # What was loaded; None while the elements are the owner's.
    _loaded: dict[tuple[int, ...], torch.Tensor] | None

    @staticmethod
    def __new__(cls, shape: Sequence[int], held: Sequence[HeldBox] = (), *, dtype: torch.dtype) -> "SpreadTensor":
        tensor = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=torch.device("cpu"))
        assert isinstance(tensor, SpreadTensor)
        for one in held:
            assert one.box.volume and one.box.is_inside(whole(tuple(shape))), (
                f"{one.box} is empty or leaves {list(shape)}"
            )
        tensor._held, tensor._loaded = {one.box.offset: one for one in held}, None
        return tensor

    # torch.Tensor's refuses our arguments.
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @property
    def boxes(self) -> list[Box]:
        """This rank's: disjoint, none of them empty."""
        return [one.box for one in self._held.values()]

    def read(self, box: Box) -> torch.Tensor:
        """The elements of one of `boxes`: [*box shape], the tensor's dtype, perhaps a view."""
        return self._held[box.offset].read() if self._loaded is None else self._loaded[box.offset]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        # Asked for when a load is planned, and only then.
        if self._loaded is None:
            # With what was there: should the load fail, it is what is handed back.
            self._loaded = {box.offset: _copy_on_host(self.read(box)) for box in self.boxes}
        return self._chunks()

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.read(self._held[tuple(index.offset or ())].box)

    def _chunks(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape)) for box in self.boxes]

    def __deepcopy__(self, memo: dict[int, Any]) -> "SpreadTensor":
        copy = _with_elements(self._parts())
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _with_elements, (self._parts(),)

    def _parts(self) -> _Parts:
        # Clones: a pickled view takes the memory around it along.
        elements = [(box.offset, self.read(box).detach().clone()) for box in self.boxes]
        return tuple(self.shape), self.dtype, elements

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SpreadTensor({list(self.shape)}, {self.dtype}, here: {[tuple(box) for box in self.boxes]})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuses, as one rank's boxes are no tensor; of any shape and dtype."""
        # The stager of async_save begins so and goes on with the attributes.
        if func is torch.ops.aten.new_empty.default:
            return SpreadTensor(args[1], dtype=args[0].dtype)
        raise RuntimeError(f"{func} of a SpreadTensor: this rank has some boxes of it, to save and load them, no more")


def _copy_on_host(values: torch.Tensor) -> torch.Tensor:
    return values.detach().to("cpu", copy=True)


def _with_elements(parts: _Parts) -> SpreadTensor:
    shape, dtype, elements = parts
    return SpreadTensor(shape, [_box_of(offset, values) for offset, values in elements], dtype=dtype)


def _box_of(offset: tuple[int, ...], values: torch.Tensor) -> HeldBox:
    return HeldBox(Box(tuple(offset), tuple(values.shape)), partial(_same, values))


def _same(values: torch.Tensor) -> torch.Tensor:
    return values


# So that torch.load reads what torch.save wrote of it as it reads other tensors: it makes tensors, nothing else.
torch.serialization.add_safe_globals([_with_elements])
