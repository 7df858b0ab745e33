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

from megatron.core.group_collectives import all_gather_rows, arriving
from megatron.core.process_groups_config import ALONE, group_rank, group_size
from megatron.core.transformer.attention_tiles import Stretch, stretches
from megatron.core.transformer.context_parallel import chunks_of_rank, join_sequence, split_sequence

# Messages of one kind overtake those of the other: gloo tells them apart by tag.
_BLOCK_TAG, _GRADIENT_TAG = 0, 1


@dataclass(frozen=True)
class KeysAndValues:
    """key: [K, B, G, D]; value: [K, B, G, E], where E may be D; or the gradients of both; one float dtype."""

    key: Tensor
    value: Tensor

    def zeros(self, dtype: torch.dtype) -> "KeysAndValues":
        """Returns zeros of the same shapes, [K, B, G, D] and [K, B, G, E], in `dtype`."""
        return KeysAndValues(torch.zeros_like(self.key, dtype=dtype), torch.zeros_like(self.value, dtype=dtype))


@dataclass(frozen=True)
class Block:
    """Keys and values, and which tokens of the whole sequences they are."""

    places: list[Stretch]
    pair: KeysAndValues


class GradientReturn(ABC):
    """Brings gradients of blocks, computed in the order of KeyValueExchange.blocks, to the rank that owns the block."""

    @abstractmethod
    def share(self, block: Block, dtype: torch.dtype) -> KeysAndValues:
        """Zeros for this rank's share in a block's gradient, which `hand_on` takes; dtype: fp32 or fp64."""

    @abstractmethod
    def hand_on(self) -> None:
        """Sends the last share on its way; it may not be changed any more."""

    @abstractmethod
    def own(self) -> KeysAndValues:
        """The gradient of this rank's own block, over all ranks, in the shares' dtype."""


class KeyValueExchange(ABC):
    """One kind of exchange over `group` for sequences of seq_length tokens. Every rank must use it alike."""

    def __init__(self, group: dist.ProcessGroup, seq_length: int) -> None:
        self.group, self.seq_length = group, seq_length
        self.size, self.rank = group_size(group), group_rank(group)

    @abstractmethod
    def held_by(self, rank: int) -> list[Stretch]:
        """Returns the tokens that a rank holds of every sequence."""

    @abstractmethod
    def blocks(self, own: KeysAndValues) -> Iterator[Block]:
        """Yields the keys and values of all ranks, block by block; own: of this rank's S / size tokens. Collective."""

    @abstractmethod
    def gradients(self) -> GradientReturn:
        """Returns what brings the gradients of one pass's blocks to their owners. Collective."""


class ExchangeOfChunks(KeyValueExchange):
    """Base class of the exchanges between ranks that hold two chunks of every sequence each."""

    def held_by(self, rank: int) -> list[Stretch]:
        return stretches(chunks_of_rank(self.seq_length, size=self.size, rank=rank))


class Ring(ExchangeOfChunks):
    """Blocks pass from rank to rank; each holds two at a time. Gradients follow their block round the ring.

    The order of sums is that of the ring, whatever arrives when.
    """

    def blocks(self, own: KeysAndValues) -> Iterator[Block]:
        message = _message(own)
        for step in range(self.size):
            is_last = step == self.size - 1
            shift = None if is_last else start_shift(message, self.group, tag=_BLOCK_TAG)
            # The caller works on this block while the next is on its way.
            yield Block(self.held_by((self.rank - step) % self.size), _inside(message, like=own))
            if shift is not None:
                message = shift.wait()

    def gradients(self) -> GradientReturn:
        return _RingReturn(self.group)


class Gather(ExchangeOfChunks):
    """One block, of all ranks: one collective forward, and the sum of its gradients scattered backward."""

    def blocks(self, own: KeysAndValues) -> Iterator[Block]:
        yield Block([Stretch(0, 0, self.seq_length)], self._gathered(own))

    def gradients(self) -> GradientReturn:
        return _ScatteredReturn(self.group)

    # Not in the generator, which would hold the parts besides the whole as long as the caller works.
    def _gathered(self, own: KeysAndValues) -> KeysAndValues:
        messages = all_gather_rows(_message(own), self.group).wait().chunk(self.size)
        parts = [_inside(message, like=own) for message in messages]
        return KeysAndValues(
            join_sequence([part.key for part in parts], 0), join_sequence([part.value for part in parts], 0)
        )


def _message(pair: KeysAndValues) -> Tensor:
    """Both in one piece of memory, [elements]: their widths may differ."""
    return torch.cat((pair.key.flatten(), pair.value.flatten()))


def _inside(message: Tensor, *, like: KeysAndValues) -> KeysAndValues:
    """Views of what _message gave for tensors of these shapes."""
    border = like.key.numel()
    return KeysAndValues(message[:border].view(like.key.shape), message[border:].view(like.value.shape))


class Alone(KeyValueExchange):
    """One rank that holds the whole sequences: its own keys and values are the only block, and nothing travels."""

    def __init__(self, seq_length: int) -> None:
        super().__init__(ALONE, seq_length)

    def held_by(self, rank: int) -> list[Stretch]:
        """The whole sequence."""
        return [Stretch(0, 0, self.seq_length)]

    def blocks(self, own: KeysAndValues) -> Iterator[Block]:
        yield Block(self.held_by(0), own)

    def gradients(self) -> GradientReturn:
        return _Kept()


@dataclass(frozen=True)
class Shift:
    """A tensor on its way to the next rank, and what comes from the previous one."""

    requests: list[dist.Work]
    received: Tensor
    # Held until `wait`: memory that is freed earlier may be overwritten before it is sent.
    sent: Tensor

    def wait(self) -> Tensor:
        """Waits and returns the received tensor: any shape and dtype, those of the sent one."""
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
        self._message: Tensor | None = None
        self._like: KeysAndValues | None = None

    def share(self, block: Block, dtype: torch.dtype) -> KeysAndValues:
        self._like = block.pair
        num_elements = block.pair.key.numel() + block.pair.value.numel()
        self._message = block.pair.key.new_zeros(num_elements, dtype=dtype)
        return _inside(self._message, like=self._like)

    def hand_on(self) -> None:
        assert self._message is not None, "no share was made"
        if self._arriving is not None:
            self._message += self._arriving.wait()
        self._arriving = start_shift(self._message, self._group, tag=_GRADIENT_TAG)
        self._message = None

    def own(self) -> KeysAndValues:
        assert self._arriving is not None and self._like is not None, "no share was handed on"
        return _inside(self._arriving.wait(), like=self._like)


class _Kept(GradientReturn):
    """The gradient of the one block there is."""

    def __init__(self) -> None:
        self._share: KeysAndValues | None = None

    def share(self, block: Block, dtype: torch.dtype) -> KeysAndValues:
        self._share = block.pair.zeros(dtype)
        return self._share

    def hand_on(self) -> None:
        assert self._share is not None, "no share was made"

    def own(self) -> KeysAndValues:
        assert self._share is not None, "no share was made"
        return self._share


class _ScatteredReturn(GradientReturn):
    """A reduce-scatter whose sums are in rank order: all-to-all, then a local sum."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._share: KeysAndValues | None = None
        self._part: KeysAndValues | None = None
        self._received: Tensor | None = None

    def share(self, block: Block, dtype: torch.dtype) -> KeysAndValues:
        self._share = block.pair.zeros(dtype)
        return self._share

    def hand_on(self) -> None:
        assert self._share is not None, "no share was made"
        parts = [self._part_of(self._share, rank) for rank in range(group_size(self._group))]
        self._share, self._part = None, parts[0]
        sent = torch.stack([_message(part) for part in parts])
        self._received = arriving(sent.shape, self._group, dtype=sent.dtype, device=sent.device)
        dist.all_to_all_single(self._received, sent, group=self._group)

    def own(self) -> KeysAndValues:
        assert self._received is not None and self._part is not None, "no share was handed on"
        first, *others = self._received
        for share in others:
            first += share
        return _inside(first, like=self._part)

    def _part_of(self, pair: KeysAndValues, rank: int) -> KeysAndValues:
        size = group_size(self._group)
        key, value = (split_sequence(tensor, 0, size=size, rank=rank) for tensor in (pair.key, pair.value))
        return KeysAndValues(key, value)
