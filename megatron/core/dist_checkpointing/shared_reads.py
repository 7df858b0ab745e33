"""Reads that ranks share: what all ranks of a group want is read by one of them, and sent to the others.

Which elements lie where is planner.py's matter, files are storage.py's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from megatron.core.dist_checkpointing.boxes import Box
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.group_collectives import gather_objects
from megatron.core.process_groups_config import group_rank, group_size

# Key, box and dtype: what two ranks have to have in common, to be sent one's elements by the other.
_Want = tuple[str, Box, str]


@dataclass(frozen=True)
class SharedReads:
    """own: what this rank reads, for itself or for others. sent: reader and target, in the same order on all ranks."""

    own: list[ShardedTensor]
    sent: list[tuple[int, ShardedTensor]]


def share_reads(tensors: Sequence[ShardedTensor], group: dist.ProcessGroup | None) -> SharedReads:
    """Distributes reads: boxes that all ranks of `group` want are spread evenly over them. Collective over `group`.

    tensors: any shape and dtype.
    """
    if group_size(group) == 1:
        return SharedReads(list(tensors), [])
    by_want: dict[_Want, ShardedTensor] = {}
    for tensor in tensors:
        if tensor.box.volume and _can_be_sent(tensor, group):
            by_want.setdefault((tensor.key, tensor.box, str(tensor.data.dtype)), tensor)
    everywhere = set.intersection(*map(set, gather_objects(list(by_want), group)))
    # Large ones first: the small ones then even out what each rank reads.
    order = sorted(everywhere, key=lambda want: (-by_want[want].data.nbytes, want))
    sent, num_bytes = [], [0] * group_size(group)
    for want in order:
        reader = num_bytes.index(min(num_bytes))
        num_bytes[reader] += by_want[want].data.nbytes
        sent.append((reader, by_want[want]))
    elsewhere = {id(tensor) for reader, tensor in sent if reader != group_rank(group)}
    return SharedReads([tensor for tensor in tensors if id(tensor) not in elsewhere], sent)


def send_shared(reads: SharedReads, group: dist.ProcessGroup | None) -> None:
    """Fills what others have read. Collective over `group`, on all ranks after all have read theirs."""
    for reader, tensor in reads.sent:
        target = tensor.data.detach()
        message = target.contiguous()
        dist.broadcast(message, group=group, group_src=reader)
        if message is not target and reader != group_rank(group):
            target.copy_(message)


def _can_be_sent(tensor: ShardedTensor, group: dist.ProcessGroup | None) -> bool:
    # NCCL alone sends nothing that is on the host.
    return tensor.data.device.type != "cpu" or "cpu:" in dist.get_backend_config(group)
