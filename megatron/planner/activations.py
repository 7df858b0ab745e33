"""Measures the bytes that a microbatch saves for backward, by kind of module, in a forward pass on meta tensors.

The model runs on the meta device (without_memory of megatron/core/device), and autograd hooks report saved tensors.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode

from megatron.core.device import default_device
from megatron.core.device.torch_internals import storage_id
from megatron.core.pipeline_parallel.schedule import Action, ActionKind
from megatron.core.transformer.activation_offload import BlockView
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.planner.recorders import RunningModules
from megatron.planner.work import Unit, kind_of_module

_DROPOUT = signature(F.dropout)
# Signature of WorkRecorder.note.
Note = Callable[..., None]


@dataclass(frozen=True)
class SavedSizes:
    """Bytes that a microbatch saves for backward: on the device by kind of module, and in host memory."""

    by_kind: Counter[str]
    on_host: int = 0


class SavedBytes:
    """Counts the memory of the tensors that autograd saves for backward while `counting` is active.

    A storage shared by several tensors counts once. Memory freed before `by_kind` is called does not count.
    """

    def __init__(
        self, model: nn.Module, *, persistent: Iterable[Tensor], kind_of: Callable[[str], str] | None = None
    ) -> None:
        """Finds the model's offloaded blocks. Recording starts in `counting`.

        persistent: tensors that are not counted, such as parameters, any shape and dtype. kind_of: maps the name of the
        running module ("" outside all modules) to a kind; defaults to kind_of_module.
        """
        self._running, self._kind_of = RunningModules([model]), kind_of or kind_of_module
        self._persistent = {storage_id(tensor.untyped_storage()) for tensor in persistent}
        self._saved: list[tuple[str, ref[Tensor | BlockView]]] = []
        blocks = [part for part in model.modules() if isinstance(part, TransformerBlock)]
        self._offloaders = [one for block in blocks if (one := block.arrangement.offloader) is not None]

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Records each tensor saved inside the block, with the module that is running."""
        with self._running.followed(), ExitStack() as entered:
            for offloader in self._offloaders:
                entered.enter_context(offloader.telling(self._note))
            entered.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept))
            yield

    def by_kind(self) -> Counter[str]:
        """Returns the bytes of saved tensors that are still alive on the device, by kind of module."""
        found: Counter[str] = Counter()
        seen = set(self._persistent)
        for kind, saved in self._saved:
            kept = saved()
            storage = kept.untyped_storage() if isinstance(kept, Tensor) else None if kept is None else kept.storage
            if storage is not None and storage_id(storage) not in seen:
                seen.add(storage_id(storage))
                found[kind] += storage.nbytes()
        return found

    def on_host(self) -> int:
        """Returns the bytes of the host buffers that hold offloaded tensors."""
        return sum(offloader.buffers.lent_bytes for offloader in self._offloaders)

    def _pack(self, tensor: Tensor) -> Tensor:
        # A new tensor that only the graph refers to, so that it is freed with the graph.
        kept = tensor.detach()
        self._note(kept)
        return kept

    def _note(self, kept: Tensor | BlockView) -> None:
        self._saved.append((self._kind_of(self._running.name), ref(kept)))


def peak_bytes(actions: Sequence[Action], by_chunk: Sequence[Counter[str]]) -> Counter[str]:
    """Returns the bytes saved for backward at the peak of a stage's schedule, by kind.

    by_chunk: bytes that one microbatch of each model chunk saves, by kind.
    """
    alive: dict[int, int] = defaultdict(int)
    peak: Counter[str] = Counter()
    sizes = [sum(kinds.values()) for kinds in by_chunk]
    for action in actions:
        alive[action.chunk] += 1 if action.kind is ActionKind.FORWARD else -1
        if sum(sizes[chunk] * number for chunk, number in alive.items()) > sum(peak.values()):
            peak = Counter()
            for chunk, number in alive.items():
                peak.update({kind: size * number for kind, size in by_chunk[chunk].items()})
    return peak


class AsFusedKernels(TorchFunctionMode):
    """Makes torch's attention, dropout and RMSNorm save the same tensors as their fused kernels.

    On the meta device, torch uses unfused variants, which save all scores and every intermediate result.
    note: called for each attention and RMSNorm kernel.
    """

    def __init__(self, note: Note | None = None) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replaces attention, dropout, RMSNorm and backward, and calls all other functions unchanged."""
        if func is F.scaled_dot_product_attention:
            return _FusedAttention.apply(*args[:3], self._note, _unmasked_share(args, kwargs or {}))
        if func is F.rms_norm:
            weight = args[2] if len(args) > 2 else (kwargs or {}).get("weight")
            return _FusedNorm.apply(args[0], weight, self._note)
        if func is F.dropout:
            given = {"p": 0.5, "training": True, **_DROPOUT.bind(*args, **(kwargs or {})).arguments}
            if given["training"] and 0 < given["p"] < 1:
                # Fused dropout saves a mask of one byte per element. The unfused mask has the dtype of the input.
                return torch.native_dropout(given["input"], given["p"], True)[0]
        if func is Tensor.backward or func is torch.autograd.backward:
            outputs, grads = ([args[0]], [None]) if func is Tensor.backward else args
            # Torch disables a mode inside its own handler, but recomputed forwards need it too.
            with self, default_device():
                return _run_backward(outputs, grads)
        return func(*args, **(kwargs or {}))


class _FusedAttention(torch.autograd.Function):
    """Saves tensors of the same shapes as fused attention: query, key, value, output, one number per query and head."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, note: Note | None, share: float) -> Tensor:
        # A token's heads are adjacent in memory, as the next layer expects them.
        batch, heads, length, _ = query.shape
        output = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        ctx.note = note
        # Two matrix multiplications: the scores, and the weighted sum of values. A causal mask halves both.
        ctx.flops = 2.0 * share * batch * heads * length * key.shape[2] * (query.shape[3] + value.shape[3])
        if note is not None:
            num_bytes = sum(one.nbytes for one in (query, key, value, output))
            note(Unit.ATTENTION, query, flops=ctx.flops, num_bytes=num_bytes)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Returns empty gradients of query, key and value."""
        query, key, value, output, _ = ctx.saved_tensors
        if ctx.note is not None:
            # Five matrix multiplications instead of two: the recomputed scores, and both gradients of each of the two.
            num_bytes = 2 * sum(one.nbytes for one in (query, key, value, output))
            ctx.note(Unit.ATTENTION, query, flops=2.5 * ctx.flops, num_bytes=num_bytes)
        return *(torch.empty_like(tensor) for tensor in (query, key, value)), None, None


def _unmasked_share(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Returns the share of scores that is not masked: 0.5 for causal scaled_dot_product_attention, otherwise 1."""
    return 0.5 if (args[5] if len(args) > 5 else kwargs.get("is_causal", False)) else 1.0


class _FusedNorm(torch.autograd.Function):
    """Saves tensors of the same shapes as a fused RMSNorm: the input, the weight, and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, note: Note | None) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        ctx.note = note
        if note is not None:
            note(Unit.MEMORY, x, flops=0.0, num_bytes=2 * x.nbytes)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Returns empty gradients of the input and the weight."""
        x, weight, _ = ctx.saved_tensors
        if ctx.note is not None:
            ctx.note(Unit.MEMORY, x, flops=0.0, num_bytes=3 * x.nbytes)
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


def _run_backward(outputs: Sequence[Any], grads: Sequence[Tensor | None]) -> None:
    """Runs torch.autograd.backward without dispatching to function modes, which would recurse."""
    given = [torch.ones_like(out) if grad is None else grad for out, grad in zip(outputs, grads, strict=True)]
    _engine_run_backward(tuple(outputs), tuple(given), False, False, (), allow_unreachable=True, accumulate_grad=True)
