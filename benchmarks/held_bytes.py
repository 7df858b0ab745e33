"""Counts, operator by operator, the bytes that a process's expert layers save for backward during training steps.

Counts real memory, not formulas: live storages allocated in forward, allocated pages of a pool, and buffers to which
rows were restored. The caller decides which steps run.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.paged_stash.page_layout import Held, split_tensors

# By address of the storage: a weak reference and the size in bytes.
_Storages = dict[int, tuple[StorageWeakRef, int]]


class Kind(enum.Enum):
    """Kinds of memory allocated in a layer's forward."""

    ROWS = "rows of experts: x, gate_up and their results"
    WIRE = "other floating-point values of dispatch and combine: rows to send, received rows, rows to sum"
    INDEX = "one number for each row, or fewer: orders of rows, counts, routing weights"


@dataclass(frozen=True)
class HeldBytes:
    """Bytes at one moment.

    rows, wire, index: live storages of that Kind. pages: all allocated pages. restored: buffers of restored rows.
    scratch: one set of the pool's scratch, as large as the largest group. live: bytes of the rows in pages. tensors:
    number of tensors stored in pages.
    """

    rows: int = 0
    wire: int = 0
    index: int = 0
    pages: int = 0
    restored: int = 0
    scratch: int = 0
    live: int = 0
    tensors: int = 0

    @property
    def activations(self) -> int:
        """Bytes of the experts' activations in any kind of memory."""
        return self.pages + self.outside

    @property
    def outside(self) -> int:
        """Bytes of the experts' activations in whole buffers."""
        return self.rows + self.restored + self.scratch


@dataclass
class Peaks:
    """Peaks over the steps inside an ExpertBytes.

    held: when activations were largest, between forwards of expert layers, so that only tensors saved for backward
    count. wire: peak of that kind, including forwards. working_set: whole buffers of the largest group with rows in
    pages. excess_pages: maximum of the pages in use minus the pages that live bytes fill, minus one for each tensor
    (at most 0 by the memory law). page_bytes, high_water: page size and peak pages of the pool; 0 without a pool.
    """

    held: HeldBytes = HeldBytes()
    wire: int = 0
    working_set: int = 0
    excess_pages: int = 0
    page_bytes: int = 0
    high_water: int = 0


class ExpertBytes(TorchDispatchMode):
    """Attributes operators' results to the expert layer whose forward runs, and counts them while they are alive.

    Must surround whole steps. Bytes grow in forwards of expert layers and when rows are restored, and can shrink at any
    time, so they are counted after these two events. keeps_restored: as given to the pool, see PagePool.
    """

    def __init__(self, layers: Iterable[MoELayer], *, keeps_restored: bool) -> None:
        super().__init__()
        self.peaks = Peaks()
        self._keeps_restored = keeps_restored
        self._scopes: list[Kind | None] = []  # kind of the current forward; None for other parts of a layer
        self._made: dict[Kind, _Storages] = {kind: {} for kind in Kind}
        self._returned: _Storages = {}
        self._in_pages: dict[tuple[int, int], tuple[int, int]] = {}  # record -> pages, live bytes
        self._scratch = 0
        for layer in layers:
            self._watch(layer)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if self._scopes and self._scopes[-1] is not None:
            inputs = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)]
            known = {_address(leaf) for leaf in inputs}
            results = func(*args, **named)
            # A view allocates nothing, and neither does an in-place write.
            known.update(map(_address, inputs))
            for leaf in tree_leaves(results):
                if isinstance(leaf, Tensor) and leaf.device.type != "meta" and _address(leaf) not in known:
                    self._attribute(leaf, self._scopes[-1])
        else:
            results = func(*args, **named)
        if func.namespace == "paged_stash":
            self._follow_pages_sync(func._opname, args, kwargs=named)
        return results

    def _watch(self, layer: MoELayer) -> None:
        layer.register_forward_pre_hook(lambda *_: self._scopes.append(Kind.WIRE))
        layer.experts.register_forward_pre_hook(self._enter_experts, with_kwargs=True)
        layer.experts.register_forward_hook(self._leave_experts, with_kwargs=True)
        for other in (layer.router, layer.shared_experts):
            if other is not None:
                other.register_forward_pre_hook(lambda *_: self._scopes.append(None))
                other.register_forward_hook(lambda *_: self._leave())
        layer.register_forward_hook(lambda layer, args, output: self._leave_layer(output))

    def _enter_experts(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Counts the x and weights that a dispatcher created as rows of the experts.

        With an order they are the received tokens, which the experts copy into rows.
        """
        self._scopes.append(Kind.ROWS)
        for leaf in args if kwargs.get("order") is None else ():
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self._made[Kind.WIRE].pop(_address(leaf), None)
                self._attribute(leaf, Kind.ROWS)

    def _leave_experts(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Ends a forward. With an order its result are the sums of rows, which combine sends."""
        self._leave()
        for leaf in tree_leaves(output) if kwargs.get("order") is not None else ():
            if isinstance(leaf, Tensor):
                self._made[Kind.ROWS].pop(_address(leaf), None)
                self._attribute(leaf, Kind.WIRE)

    def _leave(self) -> None:
        self._scopes.pop()

    def _leave_layer(self, output: Any) -> None:
        """Ends a layer's forward. Does not count its output, which is the next layer's input."""
        self._leave()
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self._made[Kind.WIRE].pop(_address(leaf), None)
        self._count()

    def _attribute(self, tensor: Tensor, kind: Kind) -> None:
        has_rows = tensor.is_floating_point() and tensor.dim() > 1 and tensor.shape[-1] > 1
        kind = kind if has_rows else Kind.INDEX
        storage = tensor.untyped_storage()
        self._made[kind][storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        if kind is Kind.WIRE:
            self.peaks.wire = max(self.peaks.wire, _alive(self._made[kind]))

    def _follow_pages_sync(self, name: str, args: tuple[Any, ...], *, kwargs: dict[str, Any]) -> None:
        """Tracks the owners of pages from the records written by the pool's operators. NOTE: reads the device."""
        peaks = self.peaks
        # Rows on the host of a group that computes in pages are restored into the scratch, which is counted already.
        if name == "restore" and not kwargs.get("host_only", False):
            for target in kwargs["targets"]:
                storage = target.untyped_storage()
                self._returned[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            self._count()
        elif name == "stash":
            peaks.working_set = max(peaks.working_set, sum(source.nbytes for source in args[0]))
        elif name in ("plan", "release"):
            if kwargs.get("places") is not None:
                in_buffers = sum(one.row_bytes * one.max_rows for one in split_tensors(kwargs["tensors"]))
                peaks.working_set = max(peaks.working_set, in_buffers)
                self._scratch = max(self._scratch, in_buffers)
            held, page_bytes = kwargs["held"], kwargs["layout"][0]
            for one in split_tensors(kwargs["tensors"]):
                pages, rows = held[one.slot, Held.PAGES].item(), held[one.slot, Held.ROWS].item()
                self._in_pages.pop((held.data_ptr(), one.slot), None)
                if name == "plan" and pages:
                    self._in_pages[held.data_ptr(), one.slot] = pages, rows * one.row_bytes
            pages, live = (sum(column) for column in zip((0, 0), *self._in_pages.values()))
            peaks.page_bytes, peaks.high_water = page_bytes, max(peaks.high_water, pages)
            peaks.excess_pages = max(peaks.excess_pages, pages - live // page_bytes - len(self._in_pages))

    def _count(self) -> None:
        if self._scopes:
            return
        now = HeldBytes(
            rows=_alive(self._made[Kind.ROWS]),
            wire=_alive(self._made[Kind.WIRE]),
            index=_alive(self._made[Kind.INDEX]),
            pages=sum(pages for pages, _ in self._in_pages.values()) * self.peaks.page_bytes,
            restored=(_in_use if self._keeps_restored else _alive)(self._returned),
            scratch=self._scratch,
            live=sum(live for _, live in self._in_pages.values()),
            tensors=len(self._in_pages),
        )
        if now.activations > self.peaks.held.activations:
            self.peaks.held = now


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _alive(storages: _Storages) -> int:
    """Returns the bytes of live storages and removes expired ones."""
    for address in [address for address, (reference, _) in storages.items() if reference.expired()]:
        del storages[address]
    return sum(num_bytes for _, num_bytes in storages.values())


def _in_use(storages: _Storages) -> int:
    """Returns the bytes of kept buffers that are referenced elsewhere, because the pool itself keeps them alive."""
    _alive(storages)
    total = 0
    for reference, num_bytes in storages.values():
        storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
        # One reference belongs to the buffer, and one to the object created here.
        total += num_bytes if torch._C._storage_Use_Count(storage._cdata) > 2 else 0
    return total
