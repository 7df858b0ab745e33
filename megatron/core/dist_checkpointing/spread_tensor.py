"""SpreadTensor: a tensor whose boxes are distributed over ranks, in a form that torch.distributed.checkpoint accepts.

The owner of a SpreadTensor stores the elements. This framework's checkpoint format is in serialization.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megatron.core.logical_tensors import Box, whole

# Shape, dtype, and (offset, elements) of each box.
_Parts = tuple[tuple[int, ...], torch.dtype, list[tuple[tuple[int, ...], torch.Tensor]]]


@dataclass(frozen=True)
class HeldBox:
    """Box of a tensor. read: returns its elements, [*box shape], the tensor's dtype, as a view or a copy."""

    box: Box
    read: Callable[[], torch.Tensor]

    def __deepcopy__(self, memo: dict[int, Any]) -> "HeldBox":
        # torch's stager deep-copies a tensor's attributes. Copy only the elements, not the owner that `read` refers to.
        return _box_of(self.box.offset, _copy_on_host(self.read()))


class SpreadTensor(torch.Tensor):
    """Placeholder for a tensor of any floating dtype, of which this rank stores disjoint boxes.

    torch.distributed.checkpoint saves it box by box, and reads the elements from the owner at that moment. A load fills
    separate host memory, so that a load that fails midway changes nothing. The caller passes the filled tensor to the
    owner. Replicas store equal boxes, of which only one is written. A pickle or deep copy contains the elements. The
    class derives from torch.Tensor because the planner ignores other classes. It supports no computation.
    """

    # Keyed by offset, which is unique for disjoint non-empty boxes.
    _held: dict[tuple[int, ...], HeldBox]
    # Loaded elements by offset; None before a load, when the owner has the elements.
    _loaded: dict[tuple[int, ...], torch.Tensor] | None

    @staticmethod
    def __new__(cls, shape: Sequence[int], held: Sequence[HeldBox] = (), *, dtype: torch.dtype) -> "SpreadTensor":
        tensor = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=torch.device("cpu"))
        assert isinstance(tensor, SpreadTensor)
        for one in held:
            assert one.box.volume and one.box.is_inside(whole(tuple(shape))), (
                f"{one.box} is empty or exceeds {list(shape)}"
            )
        tensor._held, tensor._loaded = {one.box.offset: one for one in held}, None
        return tensor

    # torch.Tensor.__init__ rejects these arguments.
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @property
    def boxes(self) -> list[Box]:
        """Boxes of this rank, which are disjoint and not empty."""
        return [one.box for one in self._held.values()]

    def read(self, box: Box) -> torch.Tensor:
        """Returns the elements of one of `boxes`: [*box shape], the tensor's dtype, possibly a view."""
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
        # The planner calls this only when it plans a load.
        if self._loaded is None:
            # Starts from the current values, which remain if the load fails.
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
        # Clones, because pickling a view also stores the memory around it.
        elements = [(box.offset, self.read(box).detach().clone()) for box in self.boxes]
        return tuple(self.shape), self.dtype, elements

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SpreadTensor({list(self.shape)}, {self.dtype}, here: {[tuple(box) for box in self.boxes]})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Rejects computation, because this rank stores only some boxes. Raises RuntimeError."""
        # The stager of async_save first calls new_empty, then copies the attributes.
        if func is torch.ops.aten.new_empty.default:
            return SpreadTensor(args[1], dtype=args[0].dtype)
        raise RuntimeError(f"{func} is not supported by SpreadTensor, which only saves and loads this rank's boxes")


def _copy_on_host(values: torch.Tensor) -> torch.Tensor:
    return values.detach().to("cpu", copy=True)


def _with_elements(parts: _Parts) -> SpreadTensor:
    shape, dtype, elements = parts
    return SpreadTensor(shape, [_box_of(offset, values) for offset, values in elements], dtype=dtype)


def _box_of(offset: tuple[int, ...], values: torch.Tensor) -> HeldBox:
    return HeldBox(Box(tuple(offset), tuple(values.shape)), partial(_same, values))


def _same(values: torch.Tensor) -> torch.Tensor:
    return values


# Allows torch.load(weights_only=True) to read pickled SpreadTensors. The function only constructs tensors.
torch.serialization.add_safe_globals([_with_elements])
