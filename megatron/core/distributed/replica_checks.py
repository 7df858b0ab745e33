"""Checks that compare data-parallel replicas: equal weights at the start, finite gradients at each step.

Repairs nothing; every rank raises the same error. A group of None is this rank alone.
"""

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.agreement import all_ranks_agree
from megatron.core.dist_checkpointing.logical import canonical_name
from megatron.core.process_groups_config import ProcessGroupCollection, group_size
from megatron.core.tensor_parallel.param_attributes import param_facts

_NAMES_SHOWN = 3


class NonFiniteGradientError(RuntimeError):
    """A gradient was NaN or infinite before it was reduced; raised on every rank of the group."""


def check_grads(named_grads: Iterable[tuple[str, torch.Tensor]], group: dist.ProcessGroup | None) -> None:
    """Raises NonFiniteGradientError, naming ranks and parameters, if any rank's gradient is not finite. Collective.

    named_grads: this rank's gradients before reduction, any shapes, floating point. Costs one sum over them, one
    all-reduce of a number and a read of the device behind each; names are exchanged only when something is wrong.
    """
    grads = list(named_grads)
    # A list of what this rank suspects; others may have found something else.
    suspects = [named for named, finite in zip(grads, _finite_sums_sync(grads)) if not finite]
    if _any_rank_sync(bool(suspects), group, device=grads[0][1].device if grads else torch.device("cpu")):
        _raise_named(_describe_sync(suspects), group)


def check_weights_agree(
    model: nn.Module, group: dist.ProcessGroup | None, *, expert_group: dist.ProcessGroup | None = None
) -> None:
    """Raises ValueError on all ranks, naming parameter and ranks, unless replicas are bit-identical. Collective.

    group, expert_group: the ranks that hold the same dense and the same expert parameters. Ranks of a group without a
    difference raise RemoteRankError. Costs a checksum of all parameters and an exchange of a number each: for the
    start of a run.
    """
    dense: dict[str, int] = {}
    experts: dict[str, int] = {}
    for name, param in model.named_parameters():
        # Of bytes: bit-identical is what replicas are, and NaN equals itself.
        (experts if param_facts(param).is_expert else dense)[canonical_name(name)] = _crc32_sync(param)
    differences = [_first_difference(dense, group), _first_difference(experts, expert_group)]
    with all_ranks_agree():
        for difference in differences:
            if difference is not None:
                raise ValueError(difference)


def _first_difference(checksums: dict[str, int], group: dist.ProcessGroup | None) -> str | None:
    per_rank = _gather(checksums, group)
    if all(other == per_rank[0] for other in per_rank):
        return None
    name = next(n for n in [*per_rank[0], *checksums] if any(r.get(n) != per_rank[0].get(n) for r in per_rank))
    ranks = [rank for rank, other in enumerate(per_rank) if other.get(name) != per_rank[0].get(name)]
    return (
        f"parameter {name} differs between data-parallel rank 0 and ranks {ranks}: "
        "all replicas must start from the same seed or checkpoint"
    )


def check_layouts_agree(
    module: nn.Module, groups: ProcessGroupCollection, *, settings: Any, stage_group: dist.ProcessGroup | None
) -> None:
    """Raises ValueError unless replicas have the same parameters and settings; ranks of `stage_group` without a
    difference raise RemoteRankError. Collective. settings: how buffers are made of the parameters.
    """
    dense, experts = {"": repr(settings)}, {"": repr(settings)}
    for name, param in module.named_parameters():
        described = (
            f"{name} {list(param.shape)} {param.dtype}, {'requires' if param.requires_grad else 'needs no'} grad"
        )
        (experts if param_facts(param).is_expert else dense)[name] = described
    differences = [_layout_difference(list(dense.values()), groups.dp_cp)]
    differences.append(_layout_difference(list(experts.values()), groups.expt_dp))
    if group_size(stage_group) == 1:
        return
    with all_ranks_agree(stage_group):
        for difference in differences:
            if difference is not None:
                raise ValueError(difference)


def _layout_difference(lines: list[str], group: dist.ProcessGroup | None) -> str | None:
    digests = _gather(zlib.crc32("\n".join(lines).encode()), group)
    if len(set(digests)) == 1:
        return None
    per_rank = _gather(lines, group)
    position, rank = next(
        (position, rank)
        for position in range(max(map(len, per_rank)))
        for rank, other in enumerate(per_rank)
        if other[position : position + 1] != per_rank[0][position : position + 1]
    )
    first, other = (
        ["no further parameter", *lines[position : position + 1]][-1] for lines in (per_rank[0], per_rank[rank])
    )
    return (
        f"data-parallel rank 0 has {first} where rank {rank} has {other}: all replicas must wrap the same parameters "
        "in the same order, with the same settings"
    )


def raise_non_finite(names: list[str], groups: Sequence[dist.ProcessGroup | None]) -> None:
    """Raises NonFiniteGradientError with what the ranks of all groups found. Collective: on all of them.

    names: this rank's parameters with a gradient that is not finite. groups: each rank's tells the next one's ranks.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    found = {rank: names} if names else {}
    for group in groups:
        found = {rank: names for part in _gather(found, group) for rank, names in part.items()}
    lines = [f"rank {rank}: {', '.join(n[:_NAMES_SHOWN])}{_and_more(n)}" for rank, n in sorted(found.items())]
    raise NonFiniteGradientError(f"gradient is not finite on {'; '.join(lines)}. The model was not updated")


def _finite_sums_sync(grads: list[tuple[str, torch.Tensor]]) -> list[bool]:
    # A sum is finite only if all its terms are, and costs half of isfinite. NOTE: reads the device at each step.
    if not grads:
        return []
    return torch.stack([grad.sum().double() for _, grad in grads]).isfinite().tolist()


def _any_rank_sync(value: bool, group: dist.ProcessGroup | None, *, device: torch.device) -> bool:
    if group_size(group) == 1:
        return value
    # One number: what is wrong is only exchanged if something is. NOTE: reads the device at each step.
    flag = torch.tensor([float(value)], device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return bool(flag.item())


def _raise_named(found: list[str], group: dist.ProcessGroup | None) -> None:
    per_rank = [(rank, names) for rank, names in enumerate(_gather(found, group)) if names]
    # Every rank comes to the same conclusion here, since all have the same list.
    if not per_rank:
        return
    lines = [f"rank {rank}: {', '.join(names[:_NAMES_SHOWN])}{_and_more(names)}" for rank, names in per_rank]
    raise NonFiniteGradientError(f"gradient is not finite on {'; '.join(lines)}. The model was not updated")


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - _NAMES_SHOWN} more parameters" if len(names) > _NAMES_SHOWN else ""


def _describe_sync(suspects: list[tuple[str, torch.Tensor]]) -> list[str]:
    # The sum alone may have overflowed: look at the elements. NOTE: reads the device, which only an error does.
    return [
        f"{name} ({int(grad.isnan().sum())} NaN, {int(grad.isinf().sum())} infinite of {grad.numel()} elements)"
        for name, grad in suspects
        if not bool(grad.isfinite().all())
    ]


def _gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    if group_size(group) == 1:
        return [value]
    # Objects are pickled and slow; this is for the start of a run and for errors.
    values: list[Any] = [None] * group_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _crc32_sync(param: torch.Tensor) -> int:
    # As bytes: numpy has no bfloat16.
    return zlib.crc32(param.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
