"""Offloads activations to host memory after forward and prefetches them one layer ahead of backward.

This file contains the plan of offloaded parts, the offloader and its persistent host buffers. The settings are in
offload_config.py.
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
from megatron.core.device.torch_internals import storage_id
from megatron.core.transformer.offload_config import EXPERT_MODULES, OFFLOAD_MODULES, OffloadConfig

WHOLE_LAYER = "layer"
_DENSE = torch.contiguous_format
_MIN_BUFFER_BYTES = 4096


def plan_offload(config: OffloadConfig, has_experts: Sequence[bool]) -> list[frozenset[str]]:
    """Returns the set of parts to offload for each layer. WHOLE_LAYER stands for all parts of a layer.

    The last layer is never offloaded, because its backward follows immediately. If only a fraction of the parts is
    offloaded, these are the earliest parts, because their activations live longest.
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
    """Offloads the activations of all layers of a model chunk.

    1. A part runs inside `saving`. Each tensor that autograd saves becomes a BlockView, a view of a _Block of memory.
    2. At the end of the part, the blocks to offload are copied to the host and their device memory is released.
    3. When backward first unpacks a tensor of a layer, the blocks of the layer are fetched unless they are already on
       the device. The blocks of the previous layer are fetched next, which overlaps with the backward of this layer.
    4. When autograd drops the last BlockView of a block, the memory of the block is released, including its host
       buffer. An interrupted step therefore leaks no memory.
    """

    def __init__(self, owner: nn.Module, device: torch.device, *, min_elements: int) -> None:
        """Creates an offloader without host buffers, which are allocated on demand.

        owner: module whose parameters and buffers must not be offloaded. min_elements: smaller tensors are not
        offloaded.
        """
        self.buffers = HostBuffers(device)
        self.bytes_out = self.bytes_in = self._largest = 0
        self._owner, self._device, self._min_elements = owner, device, min_elements
        self._copies = CopyStream(device)
        self._pass = _Pass(frozenset())
        self._told: Callable[[BlockView], None] | None = None

    @contextmanager
    def telling(self, told: "Callable[[BlockView], None]") -> Iterator[None]:
        """Calls `told` with each BlockView created within the context. Autograd owns the BlockView."""
        self._told = told
        try:
            yield
        finally:
            self._told = None

    def begin_pass(self) -> None:
        """Starts a forward pass. Must be called before the first layer runs."""
        owned = [*self._owner.parameters(), *self._owner.buffers()]
        # Identified by the storage object, because storages on the meta device have no address.
        self._pass = _Pass(frozenset(storage_id(tensor.untyped_storage()) for tensor in owned))

    @contextmanager
    def saving(self, layer: int, *, moves: bool) -> Iterator[None]:
        """Context for the forward of one part, which manages the tensors that autograd saves.

        layer: index of the layer that contains the part. moves: whether to offload the saved tensors.
        """
        if not torch.is_grad_enabled():
            yield
            return
        current = self._pass
        saved: list[tuple[BlockView, Tensor]] = []

        def pack(tensor: Tensor) -> Any:
            return self._pack(tensor, current, layer=layer, saved=saved)

        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
                yield
            if moves:
                # Not in pack, because a block may be saved as several tensors, and may still be modified.
                self._move_out(saved)
        finally:
            # Autograd keeps `pack`, which references this list, as long as the saved tensors.
            saved.clear()

    def _pack(self, tensor: Tensor, current: "_Pass", *, layer: int, saved: list[tuple["BlockView", Tensor]]) -> Any:
        storage = tensor.untyped_storage()
        if type(tensor) is not Tensor or storage_id(storage) in current.owned or tensor.device != self._device:
            return tensor
        block = current.blocks.get(storage_id(storage))
        if block is None or block.version != tensor._version:
            block = _Block(storage, tensor._version)
            current.blocks[storage_id(storage)] = block
        current.layers.setdefault(layer, weakref.WeakSet()).add(block)
        block.num_saved += 1
        handle = BlockView(block, current, layer=layer, dtype=tensor.dtype, view=_view_of(tensor))
        saved.append((handle, tensor.detach()))
        if self._told is not None:
            self._told(handle)
        return handle

    def _move_out(self, saved: list[tuple["BlockView", Tensor]]) -> None:
        users: dict[_Block, list[tuple[BlockView, Tensor]]] = {}
        for one, tensor in saved:
            if tensor._version != one.block.version:
                raise RuntimeError(
                    f"a tensor of shape {list(tensor.shape)} that backward needs was changed in place by the part "
                    "of the layer that saved it, so it cannot be offloaded"
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
                # Backward reads only a small part of this memory. Offloading just the views releases all of it.
                self._copy_out_views([one for one, _ in readers if one.view in views], views)

    def _copy_out_views(self, readers: list["BlockView"], views: dict[Any, Tensor]) -> None:
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
        # Returns the buffer to the pool when autograd drops the saved tensors, even without a backward.
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
        self._copy_in(block)  # only if backward runs in an unexpected order
        self._copies.main_waits_for(block.arrived)
        offset, size, stride = saved.view
        empty = torch.empty(0, dtype=saved.dtype, device=self._device)
        return empty.set_(block.storage, offset, size, stride)

    def _reach(self, current: "_Pass", layer: int) -> None:
        """Fetches the blocks of the layer that backward has reached, and then of the next layer in backward."""
        if self.bytes_out == 0:
            raise ValueError(
                (
                    f"min_offloaded_tensor_size is {self._min_elements} elements, but the largest tensor saved by the "
                    f"offloaded parts has {self._largest}: lower it, or disable offloading"
                )
                if self._largest
                else (
                    "nothing to offload: the parts selected by offload_modules or cpu_offloading_num_layers save "
                    "no activations, for example because their layers are frozen; select other parts, or disable "
                    "offloading"
                )
            )
        current.reached = layer
        earlier = max((one for one in current.layers if one < layer), default=layer)
        # Fetching further ahead would keep more layers on the device.
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
    """A Run or RunAndRelease that passes its saved tensors to the offloader.

    inner: the wrapped runner. moves: whether to offload the tensors.
    """

    offloader: ActivationOffloader
    inner: Callable[..., Any]
    layer: int
    moves: bool

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.offloader.saving(self.layer, moves=self.moves):
            return self.inner(function, *args, **kwargs)


class _Block:
    """A memory block that holds saved tensors, either on the device (`storage`) or on the host (`host`)."""

    def __init__(self, storage: torch.UntypedStorage, version: int) -> None:
        self.storage: torch.UntypedStorage | None = storage
        self.version, self.num_saved = version, 0
        self.host: Tensor | None = None
        self.arrived: Any = None
        self.give_back: weakref.finalize[Any, Any] | None = None
        # Keeps the address reserved. A new storage at the same address would be mistaken for this one.
        self._address_kept = StorageWeakRef(storage)


@dataclass
class _Pass:
    """State of one microbatch's forward and backward.

    owned: storages of parameters and buffers. reached: index of the layer that backward has reached; None before
    backward. blocks: live blocks, by the identity of their storage. layers: live blocks of each layer, by its index.
    """

    owned: frozenset[int]
    reached: int | None = None
    blocks: "weakref.WeakValueDictionary[int, _Block]" = field(default_factory=weakref.WeakValueDictionary)
    layers: "dict[int, weakref.WeakSet[_Block]]" = field(default_factory=dict)


class BlockView:
    """View of a block that autograd saves in place of a tensor. view: offset, size and stride, in elements."""

    __slots__ = ("block", "current", "layer", "dtype", "view", "__weakref__")

    def __init__(self, block: _Block, current: _Pass, *, layer: int, dtype: torch.dtype, view: tuple[Any, ...]) -> None:
        self.block, self.current, self.layer, self.dtype, self.view = block, current, layer, dtype, view

    @property
    def storage(self) -> torch.UntypedStorage | None:
        """Device memory of the tensor; None while it is on the host."""
        return self.block.storage


def _view_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tensor.size(), tensor.stride()


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


class HostBuffers:
    """Pool of persistent pinned host buffers in a few sizes. Buffers are reused because pinning memory is slow.

    free_bytes + lent_bytes is the total size of all allocated buffers.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[int, list[Tensor]] = {}
        self.free_bytes = self.lent_bytes = 0

    def lend(self, num_bytes: int) -> Tensor:
        """Lends an uninitialized buffer of at least num_bytes bytes: [N], uint8, on the CPU."""
        size = buffer_size(num_bytes)
        free = self._free.setdefault(size, [])
        self.lent_bytes += size
        if not free:
            return host_bytes(size, self._device)
        self.free_bytes -= size
        return free.pop()

    def give_back(self, buffer: Tensor) -> None:
        """Returns a lent buffer, [N], uint8, to the pool. Pending copies from it may finish; no new one may start."""
        # All copies use one stream, so the next copy into the buffer runs after pending copies.
        self._free[buffer.numel()].append(buffer)
        self.free_bytes += buffer.numel()
        self.lent_bytes -= buffer.numel()

    def check_integrity(self) -> None:
        """Raises AssertionError if the byte counts and the free lists disagree, or if a buffer is listed twice."""
        buffers = [buffer for free in self._free.values() for buffer in free]
        assert sum(buffer.numel() for buffer in buffers) == self.free_bytes and self.lent_bytes >= 0
        assert len({buffer.data_ptr() for buffer in buffers}) == len(buffers), "a buffer was given back twice"


def buffer_size(num_bytes: int) -> int:
    """Rounds num_bytes up to one of four sizes per power of two, so that similar sizes share buffers."""
    step = max(_MIN_BUFFER_BYTES, 1 << max(0, (num_bytes - 1).bit_length() - 3))
    return -(-num_bytes // step) * step
