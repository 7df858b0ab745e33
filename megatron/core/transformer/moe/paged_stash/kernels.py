"""The four operators of a page pool, `paged_stash::plan`, `stash`, `restore` and `release`, and what they take.
What they do is in cpu_kernels.py and triton_kernels.py, the memory they work on in page_pool.py.

A pool keeps these tensors for good; operators change them in place and return nothing. A tier is a kind of memory: 0
is the device's, 1 pinned host memory (ordinary memory in pools on the CPU). Page i lies at byte i * page_bytes of
device_pages [D * page_bytes] if i < D, else at byte (i - D) * page_bytes of host_pages [Hn * page_bytes], both uint8.

    heads, tails  [2], int64                   pages taken and given back since the reset, by tier: free = tail - head
    ring          [D + Hn], int32              free page ids in order, each tier's ring after the other's
    table         [entries], int64             page ids that tensors hold, in the dtype that torch indexes with
    held          [slots, 3], int64            a row for each tensor; columns as in Held
    counters      [len(Counter)], int64
    num_rows      [1], int64                   live tokens of the group
    reserve       [3], int64                   pages that must stay free once a tensor of that priority has its own
    layout        PoolLayout.encode()
    tensors       encode_tensors(), in order of priority, at most 16
    num_programs  most programs that a GPU kernel may occupy, 0 for as many as are useful; without effect on the CPU
"""

import importlib
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from megatron.core.transformer.moe.paged_stash.cpu_kernels import plan_sync, release_sync, restore_sync, stash_sync

MAX_TENSORS = 16  # in one call: kernels unroll their loop over tensors

SCHEMAS = {
    "plan": (
        "(Tensor num_rows, Tensor reserve, *, Tensor(a!) heads, Tensor tails, Tensor ring, Tensor(b!) table,"
        " Tensor(c!) held, Tensor(d!) counters, int[] layout, int[] tensors) -> ()"
    ),
    "stash": (
        "(Tensor[] sources, Tensor(a!) device_pages, *, Tensor(b!) host_pages, Tensor table, Tensor held,"
        " int[] layout, int[] tensors, int num_programs) -> ()"
    ),
    "restore": (
        "(Tensor device_pages, Tensor host_pages, *, Tensor table, Tensor held, Tensor(a!)[] targets,"
        " int[] layout, int[] tensors, int num_programs) -> ()"
    ),
    "release": (
        "(Tensor(a!) ring, Tensor(b!) tails, *, Tensor table, Tensor(c!) held, int[] layout, int[] tensors) -> ()"
    ),
}


def _fake(*_arguments: object, **_by_name: object) -> None:
    """Nothing to infer: no operator returns anything."""


def _launchers() -> ModuleType:
    """triton_kernels.py, imported at the first use on a GPU: Triton is not installed everywhere."""
    return importlib.import_module("megatron.core.transformer.moe.paged_stash.triton_kernels")


def _plan_cuda(num_rows: Tensor, reserve: Tensor, **rest: object) -> None:
    _launchers().plan(num_rows, reserve, **rest)


def _stash_cuda(sources: list[Tensor], device_pages: Tensor, **rest: object) -> None:
    _launchers().stash(sources, device_pages, **rest)


def _restore_cuda(device_pages: Tensor, host_pages: Tensor, **rest: object) -> None:
    _launchers().restore(device_pages, host_pages, **rest)


def _release_cuda(ring: Tensor, tails: Tensor, **rest: object) -> None:
    _launchers().release(ring, tails, **rest)


CUDA: dict[str, Callable[..., None]] = {
    "plan": _plan_cuda,
    "stash": _stash_cuda,
    "restore": _restore_cuda,
    "release": _release_cuda,
}
CPU: dict[str, Callable[..., None]] = {
    "plan": plan_sync,
    "stash": stash_sync,
    "restore": restore_sync,
    "release": release_sync,
}
for _name, _schema in SCHEMAS.items():
    torch.library.define(f"paged_stash::{_name}", _schema)
    torch.library.register_fake(f"paged_stash::{_name}")(_fake)
    torch.library.impl(f"paged_stash::{_name}", "cpu")(CPU[_name])
    torch.library.impl(f"paged_stash::{_name}", "cuda")(CUDA[_name])
