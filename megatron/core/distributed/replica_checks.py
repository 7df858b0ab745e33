"""Checks that compare data-parallel replicas: equal weights at the start, finite gradients.

Repairs nothing; every rank raises the same error. A group of None is this rank alone.
"""

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.agreement import all_ranks_agree
from megatron.core.dist_checkpointing.logical import canonical_name
from megatron.core.group_collectives import gather_objects
from megatron.core.tensor_parallel.param_attributes import param_facts

_NAMES_SHOWN = 3


class NonFiniteGradientError(RuntimeError):
    """A gradient was NaN or infinite before it was reduced; raised on every rank of the group."""


def check_weights_agree(
    model: nn.Module, group: dist.ProcessGroup | None, *, expert_group: dist.ProcessGroup | None = None
) -> None:
    """Raises ValueError on all ranks, naming parameter and ranks, unless replicas are bit-identical. Collective.

    Identical in their values, and in which parameters require grad.

    group, expert_group: the ranks that hold the same dense and the same expert parameters. Ranks of a group without a
    difference raise RemoteRankError. Costs a checksum of all parameters and an exchange of a number each: for the
    start of a run.
    """
    dense: dict[str, tuple[int, bool]] = {}
    experts: dict[str, tuple[int, bool]] = {}
    for name, param in model.named_parameters():
        # On the meta device nothing has a value yet.
        fingerprint = 0 if param.is_meta else bits_sync(param), param.requires_grad
        (experts if param_facts(param).is_expert else dense)[canonical_name(name)] = fingerprint
    differences = [_first_difference(dense, group), _first_difference(experts, expert_group)]
    with all_ranks_agree():
        for difference in differences:
            if difference is not None:
                raise ValueError(difference)


def _first_difference(fingerprints: dict[str, tuple[int, bool]], group: dist.ProcessGroup | None) -> str | None:
    per_rank = gather_objects(fingerprints, group)
    if all(other == per_rank[0] for other in per_rank):
        return None
    name = next(n for n in [*per_rank[0], *fingerprints] if any(r.get(n) != per_rank[0].get(n) for r in per_rank))
    ranks = [rank for rank, other in enumerate(per_rank) if other.get(name) != per_rank[0].get(name)]
    return (
        f"parameter {name} differs between data-parallel rank 0 and ranks {ranks}: "
        "all replicas must start from the same seed or checkpoint and train the same parameters"
    )


def raise_non_finite(
    names: list[str], groups: Sequence[dist.ProcessGroup | None], *, in_backward: bool = False
) -> None:
    """Raises NonFiniteGradientError with what the ranks of all groups found. Collective: on all of them.

    names: this rank's parameters with a gradient that is not finite. groups: asked one after the other, so that
    what the ranks of one found reaches the ranks of the next. in_backward: an optimizer may have updated by them.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    found = {rank: names} if names else {}
    for group in groups:
        found = {rank: names for part in gather_objects(found, group) for rank, names in part.items()}
    lines = [f"rank {rank}: {', '.join(n[:_NAMES_SHOWN])}{_and_more(n)}" for rank, n in sorted(found.items())]
    left = "The model was not updated"
    if in_backward:
        left = "Parameters that are updated in backward may be spoilt: load a checkpoint, unless the policy is exact"
    raise NonFiniteGradientError(f"gradient is not finite on {'; '.join(lines)}. {left}")


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - _NAMES_SHOWN} more parameters" if len(names) > _NAMES_SHOWN else ""


def bits_sync(param: torch.Tensor) -> int:
    """A checksum of the bytes of a tensor, any shape and dtype: replicas are bit-identical, and NaN equals itself.

    NOTE: waits for the device; for the start of a run.
    """
    # As bytes: numpy has no bfloat16.
    return zlib.crc32(param.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
