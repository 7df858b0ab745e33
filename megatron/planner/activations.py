"""Measures the bytes that a microbatch saves for backward, by kind of module, in a forward pass on meta tensors.

The model runs on the meta device (without_memory of megatron/core/device), and autograd hooks report saved tensors.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import signature
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode

from megatron.core.device import default_device
from megatron.core.device.torch_internals import storage_id
from megatron.core.pipeline_parallel.expansion import turn_order
from megatron.core.pipeline_parallel.schedule import ActionKind, Order, Pair, held_backwards
from megatron.core.transformer.activation_offload import BlockView
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.planner.recorders import PassBytes, RunningModules
from megatron.planner.work import END, EXPERTS, Unit, kind_of_module

_DROPOUT = signature(F.dropout)
# Signature of WorkRecorder.note.
Note = Callable[..., None]


@dataclass(frozen=True)
class SavedSizes:
    """Bytes saved for backward: on the device by kind of module, and in host memory."""

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


@dataclass(frozen=True)
class ChunkSaved:
    """Bytes that a microbatch saves for backward in one model chunk.

    by_part: bytes on the device by part of the chunk (see part_at) and kind of module, in the order of forward.
    expert_layers: number of layers with experts in each part; other parts have none. on_host: bytes in host memory.
    pace: number of layers with experts that a forward passes while the backward of this chunk passes one, if both take
    turns. It is 2 if backward may also repeat the forward of such layers, and else 1. held: bytes on the device, by
    kind, that a microbatch holds between its backward and its weight pass.
    """

    by_part: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    expert_layers: Mapping[str, int] = field(default_factory=dict)
    on_host: int = 0
    pace: int = 1
    held: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def held_total(self) -> int:
        """Bytes on the device between a backward and its weight pass."""
        return sum(self.held.values())

    @cached_property
    def by_kind(self) -> Counter[str]:
        """Bytes on the device, by kind of module."""
        found: Counter[str] = Counter()
        for kinds in self.by_part.values():
            found.update(kinds)
        return found

    @cached_property
    def total(self) -> int:
        """Bytes on the device."""
        return self.by_kind.total()

    @cached_property
    def reached(self) -> list[Counter[str]]:
        """Bytes saved once a forward has ended each layer with experts, and at its end, by kind.

        The layers of one part count as ending together, but after each other in turns.
        """
        found: list[Counter[str]] = []
        sums: Counter[str] = Counter()
        for part, kinds in self.by_part.items():
            sums = sums.copy()
            sums.update(kinds)
            found += [sums] * self.expert_layers.get(part, 0)
        return [*found, sums]

    @property
    def num_expert_layers(self) -> int:
        """Number of layers with experts."""
        return len(self.reached) - 1

    def saved_by_experts(self, num_layers: int) -> int:
        """Returns the bytes that the experts of the first num_layers layers with experts save."""
        return self.reached[num_layers - 1][EXPERTS] if num_layers > 0 else 0

    def without(self, kind: str) -> "ChunkSaved":
        """Returns the same bytes without one kind of module."""
        by_part = {
            part: {name: size for name, size in kinds.items() if name != kind} for part, kinds in self.by_part.items()
        }
        return replace(self, by_part=by_part, held={name: size for name, size in self.held.items() if name != kind})

    @property
    def in_host_memory(self) -> "ChunkSaved":
        """The bytes in host memory, all of which both passes of a pair may hold."""
        return ChunkSaved({END: {"host": self.on_host}}, {END: 1})


class Moment(NamedTuple):
    """Microbatches that a stage holds for backward at one time of a step.

    whole: number of microbatches of each chunk that are held as a whole. pair: chunks of a backward and of a forward
    that take turns at that time; None for a pass that runs alone. held: number of microbatches of each chunk between
    their backward and their weight pass; empty without weight passes.
    """

    whole: tuple[int, ...]
    pair: tuple[int, int] | None = None
    held: tuple[int, ...] = ()


def moments(order: Order, num_chunks: int) -> Iterator[Moment]:
    """Yields the moments of a step at which a stage holds the most.

    These are the end of each forward and of each backward with a later weight pass, and each pair.
    """
    alive, split = [0] * num_chunks, held_backwards(order)
    held = [0] * num_chunks if split else []
    for step in order:
        if isinstance(step, Pair):
            alive[step.backward.chunk] -= 1
            yield Moment(tuple(alive), (step.backward.chunk, step.forward.chunk), tuple(held))
            alive[step.forward.chunk] += 1
        elif step.kind is ActionKind.FORWARD:
            alive[step.chunk] += 1
            yield Moment(tuple(alive), held=tuple(held))
        elif step.kind is ActionKind.WEIGHT:
            held[step.chunk] -= 1
        else:
            alive[step.chunk] -= 1
            if step in split:
                held[step.chunk] += 1
                yield Moment(tuple(alive), held=tuple(held))


def held_in_pair(backward: ChunkSaved, forward: ChunkSaved) -> Counter[str]:
    """Returns an upper bound of the bytes that both passes of a pair hold at one time, by kind.

    While a forward runs its n-th layer with experts, the backward has passed n - 1 such layers, or fewer if it also
    repeats their forward. The bytes of a layer count as saved when the layer begins, and as freed when its backward has
    ended.
    """
    # By number of layers with experts that the backward has not passed.
    remaining = [Counter[str](), *backward.reached[:-1]]
    last = len(remaining) - 1
    both = [
        reached + remaining[max(0, last - number // backward.pace)] for number, reached in enumerate(forward.reached)
    ]
    return max(backward.by_kind, *both, key=Counter.total)


class TurnOfPair(NamedTuple):
    """Bytes of both passes of a pair during one turn.

    live: the most that they have allocated. of_experts: the part that experts keep for later turns, for which a stash
    has pages.
    """

    live: int
    of_experts: int


def turns_of_pair(
    backward: PassBytes, forward: PassBytes, *, saved: tuple[ChunkSaved, ChunkSaved]
) -> Iterator[TurnOfPair]:
    """Yields the bytes of each turn of a pair, in the order of execution.

    backward, forward: recorded bytes of the passes. saved: what their chunks save for backward, in the same order.
    """
    held, layers = [backward.before, forward.before], [0, 0]
    numbers = [_layers_begun(backward, saved[0]), _layers_begun(forward, saved[1])]
    turns = turn_order(
        [(0, *its) for its in zip(backward.turns, numbers[0], strict=True)],
        [(1, *its) for its in zip(forward.turns, numbers[1], strict=True)],
    )
    for which, turn, number in turns:
        layers[which] = number
        # The layers that the backward has not begun, and those that the forward has ended.
        num_kept = saved[0].num_expert_layers - layers[0], max(0, layers[1] - 1)
        of_experts = sum(chunk.saved_by_experts(number) for chunk, number in zip(saved, num_kept, strict=True))
        yield TurnOfPair(turn.peak + held[1 - which], of_experts)
        held[which] = turn.held


def _layers_begun(one: PassBytes, saved: ChunkSaved) -> list[int]:
    """Returns, for each turn of a pass, the number of layers with experts that have begun; at its end, one more."""
    per_layer = max(1, (len(one.turns) - 1) // max(1, saved.num_expert_layers))
    return [number // per_layer + 1 for number in range(len(one.turns))]


def rows_in_buffers(of_layer: int, *, one_group: int, paired: bool) -> int:
    """Returns the bytes of experts' rows that are outside of a stash's pages.

    One layer's rows are still in its buffers, not yet copied to pages, unless they are in the scratch. In a pair, the
    backward holds the restored rows of another layer. of_layer: bytes that the experts of one layer save.
    one_group: see PoolBytes.
    """
    return max(0, of_layer - one_group) * (2 if paired else 1)


def peak_bytes(order: Order, chunks: Sequence[ChunkSaved]) -> Counter[str]:
    """Returns the bytes saved for backward at the peak of a stage's schedule, by kind."""
    return fullest(moments(order, len(chunks)), chunks)


def fullest(found: Iterable[Moment], chunks: Sequence[ChunkSaved]) -> Counter[str]:
    """Returns the bytes saved for backward at the moment at which they are the most, by kind."""
    in_pairs: dict[tuple[int, int] | None, Counter[str]] = {None: Counter()}
    peak, most = Counter[str](), -1
    for moment in found:
        if moment.pair not in in_pairs:
            assert moment.pair is not None
            backward, forward = moment.pair
            in_pairs[moment.pair] = held_in_pair(chunks[backward], chunks[forward])
        size = sum(count * chunk.total for count, chunk in zip(moment.whole, chunks, strict=True))
        size += in_pairs[moment.pair].total()
        size += sum(count * chunk.held_total for count, chunk in zip(moment.held, chunks))
        if size > most:
            peak, most = in_pairs[moment.pair].copy(), size
            for count, chunk in zip(moment.whole, chunks, strict=True):
                peak.update({kind: one * count for kind, one in chunk.by_kind.items()})
            for count, chunk in zip(moment.held, chunks):
                peak.update({kind: one * count for kind, one in chunk.held.items()})
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
