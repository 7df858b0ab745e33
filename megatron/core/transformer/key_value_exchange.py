"""How the ranks of a context-parallel group see each other's keys and values, and get the gradients of their own back.

Round a ring, block by block while the last one is worked on; or gathered at once. What is computed of a block is
context_parallel_attention.py's.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.group_collectives import all_gather_rows
from megatron.core.process_groups_config import group_rank, group_size
from megatron.core.transformer.attention_tiles import Stretch, stretches
from megatron.core.transformer.context_parallel import chunks_of_rank, join_sequence, split_sequence

# Messages of one kind overtake those of the other: gloo tells them apart by tag.
_BLOCK_TAG, _GRADIENT_TAG = 0, 1


@dataclass(frozen=True)
class Block:
    """Keys and values, [2, K, B, G, D], any float dtype, and which tokens of the whole sequences they are."""

    places: list[Stretch]
    tensor: Tensor


class GradientReturn(ABC):
    """Brings gradients of blocks, computed in the order of KeyValueExchange.blocks, to the rank that owns the block."""

    @abstractmethod
    def hand_on(self, grad: Tensor) -> None:
        """Takes this rank's share in a block's gradient, [2, K, B, G, D], fp32 or fp64; may change it."""

    @abstractmethod
    def own(self) -> Tensor:
        """The gradient of this rank's own block, over all ranks: [2, K, B, G, D], the shares' dtype."""


class KeyValueExchange(ABC):
    """One kind of exchange over `group` for sequences of seq_length tokens. Every rank must use it alike."""

    def __init__(self, group: dist.ProcessGroup, seq_length: int) -> None:
        self.group, self.seq_length = group, seq_length
        self.size, self.rank = group_size(group), group_rank(group)

    def held_by(self, rank: int) -> list[Stretch]:
        """What a rank holds of every sequence."""
        return stretches(chunks_of_rank(self.seq_length, size=self.size, rank=rank))

    @abstractmethod
    def blocks(self, own: Tensor) -> Iterator[Block]:
        """All keys and values; own: [2, S / size, B, G, D], any float dtype, contiguous. Collective."""

    @abstractmethod
    def gradients(self) -> GradientReturn:
        """For the blocks of one pass. Collective."""


class Ring(KeyValueExchange):
    """Blocks pass from rank to rank; each holds two at a time. Gradients follow their block round the ring.

    The order of sums is that of the ring, whatever arrives when.
    """

    def blocks(self, own: Tensor) -> Iterator[Block]:
        """As KeyValueExchange has it: [2, K, B, G, D], any float dtype."""
        tensor = own
        for step in range(self.size):
            is_last = step == self.size - 1
            shift = None if is_last else start_shift(tensor, self.group, tag=_BLOCK_TAG)
            # The caller works on this block while the next is on its way.
            yield Block(self.held_by((self.rank - step) % self.size), tensor)
            if shift is not None:
                tensor = shift.wait()

    def gradients(self) -> GradientReturn:
        """See KeyValueExchange."""
        return _RingReturn(self.group)


class Gather(KeyValueExchange):
    """One block, of all ranks: one collective forward, and the sum of its gradients scattered backward."""

    def blocks(self, own: Tensor) -> Iterator[Block]:
        """As KeyValueExchange has it: [2, S, B, G, D], any float dtype."""
        yield Block([Stretch(0, 0, self.seq_length)], self._gathered(own))

    def gradients(self) -> GradientReturn:
        """See KeyValueExchange."""
        return _ScatteredReturn(self.group)

    # Not in the generator, which would hold the parts besides the whole as long as the caller works.
    def _gathered(self, own: Tensor) -> Tensor:
        parts = all_gather_rows(own, self.group).wait()
        return join_sequence(parts.chunk(self.size), 1)


@dataclass(frozen=True)
class Shift:
    """A tensor on its way to the next rank, and what comes from the previous one."""

    requests: list[dist.Work]
    received: Tensor
    # Held until `wait`: memory that is freed earlier may be overwritten before it is sent.
    sent: Tensor

    def wait(self) -> Tensor:
        """What arrived: any shape and dtype, those of what was sent."""
        for request in self.requests:
            request.wait()
        return self.received


def start_shift(tensor: Tensor, group: dist.ProcessGroup, *, tag: int) -> Shift:
    """Sends `tensor`, any shape and dtype, contiguous, to the next rank; it must not change until `wait`."""
    size, rank = group_size(group), group_rank(group)
    received = torch.empty_like(tensor)
    requests = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % size, tag=tag),
            dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size, tag=tag),
        ]
    )
    return Shift(requests, received, tensor)


class _RingReturn(GradientReturn):
    """A block's gradient starts at its owner, gains every rank's share, and comes home after a whole round."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._arriving: Shift | None = None

    def hand_on(self, grad: Tensor) -> None:
        if self._arriving is not None:
            grad += self._arriving.wait()
        self._arriving = start_shift(grad, self._group, tag=_GRADIENT_TAG)

    def own(self) -> Tensor:
        assert self._arriving is not None, "no block was handed on"
        return self._arriving.wait()


class _ScatteredReturn(GradientReturn):
    """A reduce-scatter whose sums are in rank order: all-to-all, then a local sum."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._received: Tensor | None = None

    def hand_on(self, grad: Tensor) -> None:
        size = group_size(self._group)
        sent = torch.stack([split_sequence(grad, 1, size=size, rank=rank) for rank in range(size)])
        self._received = torch.empty_like(sent)
        dist.all_to_all_single(self._received, sent, group=self._group)

    def own(self) -> Tensor:
        assert self._received is not None, "no block was handed on"
        first, *others = self._received
        for share in others:
            first += share
        return first
