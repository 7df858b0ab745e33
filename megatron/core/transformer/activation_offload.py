"""Activations that wait for backward in host memory: which, what moves them there and back, and standing buffers.

One layer ahead of backward, chosen parts' saved tensors come back. The settings are in offload_config.py.
"""

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.core.device import CopyStream, host_bytes
from megatron.core.transformer.offload_config import EXPERT_MODULES, OFFLOAD_MODULES, OffloadConfig

WHOLE_LAYER = "layer"
_DENSE = torch.contiguous_format
_SMALLEST = 4096


def plan_offload(config: OffloadConfig, has_experts: Sequence[bool]) -> list[frozenset[str]]:
    """The parts of each layer, in order, whose tensors go to the host; WHOLE_LAYER stands for all of them.

    The last layer keeps its tensors: its backward comes next, so that there would be no time to move them. Of the
    other layers' parts the first are chosen, whose tensors wait longest.
    """
    num_layers = len(has_experts)
    if config.cpu_offloading_num_layers:
        whole = config.cpu_offloading_num_layers
        return [frozenset({WHOLE_LAYER} if index < whole else ()) for index in range(num_layers)]
    parts = [
        (index, name)
        for index in range(num_layers - 1)
        for name in OFFLOAD_MODULES
        if name in config.offload_modules and (has_experts[index] or name not in EXPERT_MODULES)
    ]
    chosen = parts[: math.ceil(config.activation_offload_fraction * len(parts))]
    return [frozenset(name for layer, name in chosen if layer == index) for index in range(num_layers)]


class ActivationOffloader:
    """One for all layers of a model chunk.

    1. A part runs inside `saving`: each tensor that autograd saves becomes a SavedTensor of its memory, a _Block.
    2. When the part ends, blocks that go to the host are copied there and let go of on the device.
    3. Backward asks for the first tensor of a layer: the layer's blocks are fetched (they mostly are there already),
       then those of the layer before it, while this one computes.
    4. When autograd drops the last SavedTensor of a block, its memory is free, on the host too. So a step that stops
       half way leaves nothing behind.
    """

    def __init__(self, owner: nn.Module, device: torch.device, *, min_elements: int) -> None:
        """owner: its parameters and buffers stay on the device, as do tensors of fewer elements than min_elements."""
        self.buffers = HostBuffers(device)
        self.bytes_out = self.bytes_in = self._largest = 0
        self._owner, self._device, self._min_elements = owner, device, min_elements
        self._copies = CopyStream(device)
        self._pass = _Pass(frozenset())
        self._told: Callable[[SavedTensor], None] | None = None

    @contextmanager
    def telling(self, told: "Callable[[SavedTensor], None]") -> Iterator[None]:
        """Inside, told hears of each tensor that autograd gives into this one's care, which end as autograd lets go."""
        self._told = told
        try:
            yield
        finally:
            self._told = None

    def begin_pass(self) -> None:
        """Call before the first layer of each forward pass."""
        owned = [*self._owner.parameters(), *self._owner.buffers()]
        # By the storage itself: in a plan no memory has an address.
        self._pass = _Pass(frozenset(tensor.untyped_storage()._cdata for tensor in owned))

    @contextmanager
    def saving(self, layer: int, *, moves: bool) -> Iterator[None]:
        """Around one part's forward. layer: index of its layer. moves: whether its tensors go to the host."""
        if not torch.is_grad_enabled():
            yield
            return
        current = self._pass
        saved: list[tuple[SavedTensor, Tensor]] = []

        def pack(tensor: Tensor) -> Any:
            return self._pack(tensor, current, layer=layer, saved=saved)

        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
                yield
            if moves:
                # Not in pack: one block may come in several tensors, and may still be written to.
                self._move_out(saved)
        finally:
            # Autograd keeps `pack`, and with it this list, as long as what was saved.
            saved.clear()

    def _pack(self, tensor: Tensor, current: "_Pass", *, layer: int, saved: list[tuple["SavedTensor", Tensor]]) -> Any:
        storage = tensor.untyped_storage()
        if type(tensor) is not Tensor or storage._cdata in current.owned or tensor.device != self._device:
            return tensor
        block = current.blocks.get(storage._cdata)
        if block is None or block.version != tensor._version:
            block = _Block(storage, tensor._version)
            current.blocks[storage._cdata] = block
        current.layers.setdefault(layer, weakref.WeakSet()).add(block)
        block.num_saved += 1
        handle = SavedTensor(block, current, layer=layer, dtype=tensor.dtype, view=_view_of(tensor))
        saved.append((handle, tensor.detach()))
        if self._told is not None:
            self._told(handle)
        return handle

    def _move_out(self, saved: list[tuple["SavedTensor", Tensor]]) -> None:
        users: dict[_Block, list[tuple[SavedTensor, Tensor]]] = {}
        for one, tensor in saved:
            if tensor._version != one.block.version:
                raise RuntimeError(
                    f"a tensor of shape {list(tensor.shape)} that backward needs was changed in place by the part of "
                    "the layer that saved it: it cannot be offloaded"
                )
            users.setdefault(one.block, []).append((one, tensor))
        for block, readers in users.items():
            self._largest = max(self._largest, *(tensor.numel() for _, tensor in readers))
            views = {one.view: tensor for one, tensor in readers if tensor.numel() >= self._min_elements}
            num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in views.values())
            if block.storage is None or num_bytes == 0:
                continue
            if block.storage.nbytes() <= 2 * num_bytes:
                self._copy_out(block, block.storage)
            elif block.num_saved == len(readers):
                # Little of a large memory is read: moving that little lets go of all of it.
                self._copy_out_views([one for one, _ in readers if one.view in views], views)

    def _copy_out_views(self, readers: list["SavedTensor"], views: dict[Any, Tensor]) -> None:
        own: dict[Any, Tensor] = {view: tensor.clone(memory_format=_DENSE) for view, tensor in views.items()}
        blocks = {view: _Block(tensor.untyped_storage(), tensor._version) for view, tensor in own.items()}
        for one in readers:
            one.block, one.view = blocks[one.view], _view_of(own[one.view])
            one.current.layers[one.layer].add(one.block)
        for view, block in blocks.items():
            self._copy_out(block, own[view].untyped_storage())

    def _copy_out(self, block: "_Block", storage: torch.UntypedStorage) -> None:
        num_bytes = storage.nbytes()
        buffer = self.buffers.lend(num_bytes)
        self._copies.copy(buffer[:num_bytes], _bytes_of(storage, self._device))
        self.bytes_out += num_bytes
        # Also where no backward ever comes: then autograd drops what it saved.
        block.give_back = weakref.finalize(block, self.buffers.give_back, buffer)
        block.give_back.atexit = False
        block.host, block.storage = buffer[:num_bytes], None

    @torch.no_grad()
    def _unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if saved.current.reached is None or saved.layer < saved.current.reached:
            self._reach(saved.current, saved.layer)
        block = saved.block
        self._copy_in(block)  # where backward comes out of turn
        self._copies.main_waits_for(block.arrived)
        offset, size, stride = saved.view
        empty = torch.empty(0, dtype=saved.dtype, device=self._device)
        return empty.set_(block.storage, offset, size, stride)

    def _reach(self, current: "_Pass", layer: int) -> None:
        """Backward has come to this layer: its blocks now, and those of the layer that backward comes to next."""
        if self.bytes_out == 0:
            raise ValueError(
                f"min_offloaded_tensor_size is {self._min_elements} elements and the largest tensor that the offloaded "
                f"parts save has {self._largest}: lower it, or do not offload"
                if self._largest
                else "nothing can be offloaded: the parts that offload_modules or cpu_offloading_num_layers chose save "
                "no activations, as frozen layers do; choose other parts, or do not offload"
            )
        current.reached = layer
        earlier = max((one for one in current.layers if one < layer), default=layer)
        # One layer ahead: more would hold more layers on the device, which is what offloading avoids.
        for blocks in (current.layers[layer], current.layers[earlier]):
            for block in list(blocks):
                self._copy_in(block)

    def _copy_in(self, block: "_Block") -> None:
        if block.host is None:
            return
        target = torch.empty(block.host.numel(), dtype=torch.uint8, device=self._device)
        block.arrived = self._copies.copy(target, block.host)
        self.bytes_in += target.numel()
        block.storage, block.host = target.untyped_storage(), None
        assert block.give_back is not None
        block.give_back()


@dataclass(frozen=True, eq=False)
class Offloaded:
    """A Run or RunAndRelease whose saved tensors are in the offloader's care."""

    offloader: ActivationOffloader
    inner: Callable[..., Any]
    layer: int
    moves: bool

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.offloader.saving(self.layer, moves=self.moves):
            return self.inner(function, *args, **kwargs)


class _Block:
    """The memory of saved tensors: on the device (`storage`) or on the host (`host`), never neither."""

    def __init__(self, storage: torch.UntypedStorage, version: int) -> None:
        self.storage: torch.UntypedStorage | None = storage
        self.version, self.num_saved = version, 0
        self.host: Tensor | None = None
        self.arrived: Any = None
        self.give_back: weakref.finalize[Any, Any] | None = None
        # Without it another tensor's storage could come to stand at this one's address and be taken for it.
        self._address_kept = StorageWeakRef(storage)


@dataclass
class _Pass:
    """One microbatch's forward and backward. owned: storages of what is no activation.

    reached: the layer that backward has come to, None before. blocks: by address, those that autograd still holds.
    """

    owned: frozenset[int]
    reached: int | None = None
    blocks: "weakref.WeakValueDictionary[int, _Block]" = field(default_factory=weakref.WeakValueDictionary)
    layers: "dict[int, weakref.WeakSet[_Block]]" = field(default_factory=dict)


class SavedTensor:
    """What autograd holds instead of a tensor. view: offset, size, stride, in elements."""

    __slots__ = ("block", "current", "layer", "dtype", "view", "__weakref__")

    def __init__(self, block: _Block, current: _Pass, *, layer: int, dtype: torch.dtype, view: tuple[Any, ...]) -> None:
        self.block, self.current, self.layer, self.dtype, self.view = block, current, layer, dtype, view

    @property
    def storage(self) -> torch.UntypedStorage | None:
        """Its memory on the device; None while that is on the host."""
        return self.block.storage


def _view_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tensor.size(), tensor.stride()


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


class HostBuffers:
    """Buffers of a few sizes: each is made once and lent again and again, since pinning memory is slow.

    `free` + `lent` are all buffers ever made, as bytes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[int, list[Tensor]] = {}
        self.free_bytes = self.lent_bytes = 0

    def lend(self, num_bytes: int) -> Tensor:
        """A buffer of at least num_bytes: [N], uint8, on the CPU, with anything in it."""
        size = buffer_size(num_bytes)
        free = self._free.setdefault(size, [])
        self.lent_bytes += size
        if not free:
            return host_bytes(size, self._device)
        self.free_bytes -= size
        return free.pop()

    def give_back(self, buffer: Tensor) -> None:
        """Takes a lent buffer, [N], uint8, of which nobody will ask another copy; copies under way may finish."""
        # All copies go through one stream: whoever gets the buffer next writes after they are done.
        self._free[buffer.numel()].append(buffer)
        self.free_bytes += buffer.numel()
        self.lent_bytes -= buffer.numel()

    def check_integrity(self) -> None:
        """Fails if the counts and the lists disagree, or a buffer is free twice."""
        buffers = [buffer for free in self._free.values() for buffer in free]
        assert sum(buffer.numel() for buffer in buffers) == self.free_bytes and self.lent_bytes >= 0
        assert len({buffer.data_ptr() for buffer in buffers}) == len(buffers), "a buffer was given back twice"


def buffer_size(num_bytes: int) -> int:
    """num_bytes rounded up to one of four sizes per power of two: tensors of similar sizes share buffers."""
    step = max(_SMALLEST, 1 << max(0, (num_bytes - 1).bit_length() - 3))
    return -(-num_bytes // step) * step
