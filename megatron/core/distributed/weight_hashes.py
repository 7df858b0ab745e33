"""Replicas compared while training runs: a hash of each tensor on its device, and one small exchange per group.

A comparison once, at the start, by name and with what requires grad, is replica_checks.py's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.device import default_device
from megatron.core.dist_checkpointing import buffer_sharded_tensors, canonical_name
from megatron.core.group_collectives import gather_objects
from megatron.core.process_groups_config import ProcessGroupCollection, group_size
from megatron.core.tensor_parallel.param_attributes import param_facts
from megatron.core.utils import unwrap_model

_ROW = 1024
_NAMES_SHOWN = 3
_ODD, _EVEN = 0x9E3779B97F4A7C15 - (1 << 64), 0x2545F4914F6CDD1E  # any numbers of which the first is odd
_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightMismatchError(RuntimeError):
    """Parameters or buffers that must be equal on several ranks are not; raised on every rank."""


@dataclass(frozen=True)
class _Replicas:
    """What this rank and all others of `group` have, in the same order."""

    group: dist.ProcessGroup | None
    names: list[str]
    tensors: list[Tensor]

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, named: Sequence[tuple[str, Tensor]]) -> "_Replicas":
        """named: tensors of any shape and dtype."""
        return cls(group, [name for name, _ in named], [tensor for _, tensor in named])


def check_weight_hashes_sync(chunks: Sequence[nn.Module], groups: ProcessGroupCollection, *, iteration: int) -> None:
    """Raises WeightMismatchError on every rank, naming tensors and ranks, unless all replicas are bit-identical.

    Data-parallel replicas, those of experts among their own ranks, what tensor-parallel ranks have whole, and what the
    first and the last stage both have: parameters, and the buffers that checkpoints hold, as the biases of routers.
    chunks: of this stage, with parameters gathered. Collective over all ranks. NOTE: reads the device once, where
    there is no difference.
    """
    compared = [one for one in _replicas(chunks, groups) if one.tensors and group_size(one.group) > 1]
    hashes = [torch.stack([weight_hash(tensor) for tensor in one.tensors]) for one in compared]
    is_different = torch.zeros((), dtype=torch.int64, device=default_device())
    for one, own in zip(compared, hashes):
        # The highest, and by its complement the lowest: equal where all are.
        extremes = torch.cat([own, ~own])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=one.group)
        highest, negated_lowest = extremes.chunk(2)
        is_different |= (highest != ~negated_lowest).any()
    if dist.is_initialized():
        dist.all_reduce(is_different, op=dist.ReduceOp.MAX)
    if bool(is_different):
        _raise_differences_sync(compared, hashes, iteration=iteration)


def weight_hash(param: Tensor) -> Tensor:
    """[], int64, on the device of `param`, any shape and dtype. Two that differ in one element differ for certain.

    Of its bits: NaN equals itself, and 0.0 is not -0.0.
    """
    words = param.detach().contiguous().view(-1).view(_INTEGER_OF_SIZE[param.element_size()])
    whole = words.numel() // _ROW * _ROW
    # Sums of rows and of columns, so that nothing of the parameter's size is kept. An element counts the factor of its
    # column, which is odd, plus that of its row, which is even: no difference times an odd number is 0 modulo 2**64.
    table, rest = words[:whole].view(-1, _ROW), words[whole:]
    columns = torch.arange(1, _ROW + 1, device=words.device) * 2 + 1
    rows = torch.arange(1, table.shape[0] + 2, device=words.device) * _EVEN
    total = (table.sum(dim=0, dtype=torch.int64) * (columns * _ODD)).sum()
    total += (table.sum(dim=1, dtype=torch.int64) * rows[:-1]).sum()
    return total + (rest.to(torch.int64) * (columns[: rest.numel()] * _ODD + rows[-1])).sum()


def _replicas(chunks: Sequence[nn.Module], groups: ProcessGroupCollection) -> list[_Replicas]:
    named = [
        (canonical_name(name), param, param_facts(param))
        for chunk in unwrap_model(list(chunks))
        for name, param in chunk.named_parameters()
    ]
    # A checkpoint holds one of each for all ranks.
    buffers = [(held.key, held.data) for chunk in unwrap_model(list(chunks)) for held in buffer_sharded_tensors(chunk)]
    kinds = []
    for is_expert, data_group, tensor_group, also in (
        (False, groups.dp_cp, groups.tp, buffers),
        (True, groups.expt_dp, groups.expt_tp, []),
    ):
        own = [(name, param, facts) for name, param, facts in named if facts.is_expert is is_expert]
        whole = [(name, param) for name, param, facts in own if not facts.tensor_model_parallel]
        kinds.append(_Replicas.of(data_group, [*((name, param) for name, param, _ in own), *also]))
        kinds.append(_Replicas.of(tensor_group, [*whole, *also]))
    kinds.append(_Replicas.of(groups.embd, [(name, param) for name, param, facts in named if facts.shared_embedding]))
    return kinds


def _raise_differences_sync(compared: list[_Replicas], hashes: list[Tensor], *, iteration: int) -> None:
    """Raises on all ranks what any of them found. NOTE: reads every hash, which only an error does."""
    lines: list[str] = []
    for one, own in zip(compared, hashes):
        assert one.group is not None
        ranks = dist.get_process_group_ranks(one.group)
        told = gather_objects((one.names, own.tolist()), one.group)
        # In the words of the first: a tied output layer has another name than the embedding that owns it.
        lines += _differences(told[0][0], dict(zip(ranks, (hashes_of_rank for _, hashes_of_rank in told))))
    found = dict.fromkeys(line for lines_of_rank in gather_objects(lines, dist.group.WORLD) for line in lines_of_rank)
    shown = list(found)[:_NAMES_SHOWN]
    more = f" and {len(found) - len(shown)} more" if len(found) > len(shown) else ""
    raise WeightMismatchError(
        f"replicas differ after iteration {iteration}: {'; '.join(shown)}{more}. A device or its memory may be faulty; "
        "go on from an earlier checkpoint"
    )


def _differences(names: list[str], by_rank: dict[int, list[int]]) -> list[str]:
    """A line for each name whose hashes differ: the ranks with other ones than most; by_rank: in the order of names."""
    lines = []
    for index, name in enumerate(names):
        ranks_with: dict[int, list[int]] = {}
        for rank, hashes in by_rank.items():
            ranks_with.setdefault(hashes[index], []).append(rank)
        if len(ranks_with) > 1:
            # Of equally many, the first ranks count as right.
            usual, *others = sorted(ranks_with.values(), key=len, reverse=True)
            odd = sorted(rank for ranks in others for rank in ranks)
            lines.append(f"{name} of rank {', '.join(map(str, odd))} is not that of rank {', '.join(map(str, usual))}")
    return lines
