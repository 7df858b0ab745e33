"""A flat buffer of parameters whose gradients have memory only on their way, and the pool of that memory.

The way itself is transient_grads.py's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

import torch
from torch import nn

from megatron.core.dense_memory import shaped_view
from megatron.core.dist_checkpointing.logical import canonical_name
from megatron.core.distributed.flat_buffer import BufferKind, BufferSettings, _ParamAndGradBuffer
from megatron.core.distributed.layout import ParamSlot, Span, locate

# As many as are under way at a time, with one that fills; more are there where nothing is reduced during backward.
_MOST_SPARE = 3


class GradMemory(Enum):
    """Whether a bucket's gradients accumulate in persistent memory, for kernels that write to it."""

    TRANSIENT = "transient"
    STANDING = "standing"


class ParamMemory(Enum):
    """Whether parameters become views of a flat tensor, or stay in their own memory and are copied to from messages."""

    FLAT = "flat"
    OWN = "own"


class SumMemory(Enum):
    """Whether the sums persist, or have memory only until hooks and an optimizer in backward have read them."""

    STANDING = "standing"
    RELEASED = "released"


@dataclass(frozen=True)
class MemoryPolicy:
    """Memory of a buffer that persists. comm_dtype: all-gather dtype; None means the parameters' dtype."""

    grads: GradMemory = GradMemory.TRANSIENT
    params: ParamMemory = ParamMemory.FLAT
    sums: SumMemory = SumMemory.STANDING
    comm_dtype: torch.dtype | None = None


class TransientBuffer(_ParamAndGradBuffer):
    """Parameters of one kind whose gradients have no persistent memory.

    shard_grads: [owned elements], their sums, on the meta device where these are released.

    Parameters lie in the order of their own memory, whatever their layout; see dense_memory.py. param_data without flat
    parameters, and grad_data without persistent gradients, are only sizes and dtypes, on the meta device.
    """

    def __init__(
        self,
        kind: BufferKind,
        named_params: Sequence[tuple[str, nn.Parameter]],
        *,
        settings: BufferSettings,
        memory: MemoryPolicy,
    ) -> None:
        self.memory = memory
        super().__init__(kind, named_params, settings=settings)
        self._owned = self.owned_spans()
        # Of each bucket's sums among all of them.
        self._sum_starts = [0, *accumulate(span.numel for span in self._owned)]
        device = torch.device("meta") if memory.sums is SumMemory.RELEASED else named_params[0][1].device
        self.shard_grads = torch.zeros(sum(span.numel for span in self._owned), dtype=kind.grad_dtype, device=device)
        self.messages = MessageMemory(
            kind.grad_dtype,
            named_params[0][1].device,
            # Else what is given away may be a part of a message.
            is_kept=memory.sums is not SumMemory.RELEASED,
        )

    @property
    def persistent_params(self) -> list[torch.Tensor]:
        """The persistent parameter memory, [N] each, their dtype: none where parameters keep their own memory."""
        return [self.param_data] if self.memory.params is ParamMemory.FLAT else []

    @property
    def persistent_grads(self) -> list[torch.Tensor]:
        """The persistent gradient memory, [N] each, their dtype.

        It holds the sums, unless these are released, and the memory that kernels accumulate into, where there is one.
        """
        sums = [self.shard_grads] if self.memory.sums is SumMemory.STANDING else []
        return [*sums, self.grad_data] if self.memory.grads is GradMemory.STANDING else sums

    @property
    def is_staged(self) -> bool:
        """Whether gathered parameters are copied from a message to their places."""
        return self.memory.params is ParamMemory.OWN or self.comm_dtype != self.kind.param_dtype

    @property
    def comm_dtype(self) -> torch.dtype:
        """The all-gather dtype of parameters."""
        return self.memory.comm_dtype or self.kind.param_dtype

    def shard_grad(self, bucket: int) -> torch.Tensor:
        """The sums of this rank's shard of a bucket, a view: [shard elements], the gradients' dtype."""
        return self.shard_grads[self._sum_starts[bucket] : self._sum_starts[bucket + 1]]

    def grad_of(self, span: Span) -> torch.Tensor:
        """The sums of elements of one owned span, a view: [span.numel], the gradients' dtype."""
        bucket, part = locate(span, self._owned)
        return self.shard_grad(bucket)[part]

    def owned_grads(self, slot: ParamSlot) -> list[torch.Tensor]:
        """Returns this rank's parts of a parameter's gradient, summed over backward passes: [N] each, their dtype."""
        parts = [slot.span.intersection(owned) for owned in self._owned]
        return [self.grad_of(part) for part in parts if part.numel]

    def zero_grads(self) -> None:
        """Forgets gradients that nobody has taken; the groups' `reset` forgets the others."""
        for slot in self.slots:
            slot.param.grad = None

    def scale_grads(self, factor: float | torch.Tensor) -> None:
        """Multiplies the sums; factor: a number or a tensor [], any float dtype."""
        if self.memory.sums is SumMemory.RELEASED:
            raise RuntimeError(
                "scale_gradients with DistributedDataParallelConfig.release_gradients: hooks and optimizer have had "
                f"the gradient of {self.slots[0].name} by then; scale the loss"
            )
        self.shard_grads.mul_(factor)

    def _new_flats(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        of_params = device if self.memory.params is ParamMemory.FLAT else torch.device("meta")
        of_grads = device if self.memory.grads is GradMemory.STANDING else torch.device("meta")
        return (
            torch.zeros(self.layout.numel, dtype=self.kind.param_dtype, device=of_params),
            torch.zeros(self.layout.numel, dtype=self.kind.grad_dtype, device=of_grads),
        )

    def _move_in(self, name: str, param: nn.Parameter, *, span: Span) -> ParamSlot:
        if self.memory.params is ParamMemory.FLAT:
            place = shaped_view(self.param_data[span.start : span.end], param)
            place.copy_(param.detach())
            param.data = place
        grad = shaped_view(self.grad_data[span.start : span.end], param)
        return ParamSlot(canonical_name(name), param, span, grad, grad)


class MessageMemory:
    """A pool of communication buffers of one dtype and device.

    On a CPU, memory of this size returns to the system when it is freed, and allocating it again zeroes its pages one
    by one, which costs a tenth of a step. An accelerator's allocator caches it, stream by stream.

    is_kept: all of it is returned by `give_back`; a few buffers are then kept, also between steps.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, *, is_kept: bool) -> None:
        self._dtype, self._device = dtype, device
        self._is_kept = is_kept and device.type == "cpu"
        # From the smallest on.
        self._spare: list[torch.Tensor] = []
        # By the address of what was handed out, a part of it.
        self._in_use: dict[int, torch.Tensor] = {}

    def take(self, numel: int) -> torch.Tensor:
        """Uninitialised memory: [numel], its dtype."""
        place = next((place for place, spare in enumerate(self._spare) if spare.numel() >= numel), None)
        if place is None:
            # What is too small for one message is so for its bucket's next.
            del self._spare[:1]
            whole = torch.empty(numel, dtype=self._dtype, device=self._device)
        else:
            whole = self._spare.pop(place)
        if self._is_kept:
            self._in_use[whole.data_ptr()] = whole
        return whole[:numel]

    def give_back(self, message: torch.Tensor) -> None:
        """Returns a buffer of `take` to the pool, [n], its dtype. Ignores tensors it did not allocate."""
        whole = self._in_use.pop(message.data_ptr(), None)
        if whole is not None:
            self._spare = sorted([*self._spare, whole], key=torch.Tensor.numel)[-_MOST_SPARE:]
