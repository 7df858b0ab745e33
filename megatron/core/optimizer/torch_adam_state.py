"""The state of a spread Adam as torch.optim.Adam and AdamW write theirs: whole tensors on one rank.

How it is loaded from that is adam_state_dict.py's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.group_collectives import gather_objects, message_device
from megatron.core.optimizer.adam_state_checks import BIAS_CORRECTION, EXP_AVG, EXP_AVG_SQ, STEP, groups_to_save_sync
from megatron.core.optimizer.adam_state_dict import AdamShard, OwnedRange, range_values


@dataclass(frozen=True)
class _Claim:
    """A range as other ranks see it."""

    index: int
    start: int
    numel: int
    step: float
    dtype: torch.dtype


@torch.no_grad()
def gather_torch_state_sync(shard: AdamShard) -> dict[str, Any] | None:
    """On the group's rank 0 a state dict that torch.optim.AdamW loads (Adam without adam_w_mode), None on the others.

    Collective. The tensors are on the host, fp32 (fp64 where states are computed so), [*parameter's shape] in its
    memory format, the step counts [], fp32. Only rank 0 ever holds more than its own, and that without masters:
    torch's optimizers have none, so save the parameters as well. Raises ValueError for bias_correction=False, which
    torch's cannot do.
    """
    groups = groups_to_save_sync(shard.param_groups, adam_w_mode=shard.adam_w_mode)
    for number, group in enumerate(groups):
        if not group.pop(BIAS_CORRECTION, True):
            raise ValueError(f"{BIAS_CORRECTION} of param group {number} is False: must be True for torch.optim's Adam")
    mine = [_Claim(part.index, part.start, part.numel, part.adam.step.item(), part.adam.wide) for part in shard.ranges]
    claims = gather_objects(mine, shard.process_group)
    # Replicas claim the same range: the first rank sends it.
    senders: dict[int, dict[int, tuple[int, _Claim]]] = {}
    for rank, of_rank in enumerate(claims):
        for claim in of_rank:
            senders.setdefault(claim.index, {}).setdefault(claim.start, (rank, claim))
    transfer = _Transfer({(part.index, part.start): part for part in shard.ranges}, shard.process_group)
    state = {}
    for index, param in enumerate(shard.params):
        if index in shard.without_state:
            continue
        of_param = sorted(senders.get(index, {}).values(), key=lambda pair: pair[1].start)
        moments = {kind: transfer.whole(param, kind, senders=of_param) for kind in (EXP_AVG, EXP_AVG_SQ)}
        step = of_param[0][1].step if of_param else 0.0
        state[index] = {STEP: torch.tensor(step, dtype=torch.float32), **moments}
    return {"state": state, "param_groups": groups} if transfer.rank == 0 else None


class _Transfer:
    """Sends ranges to rank 0 of a group, one after the other in the same order on all ranks."""

    def __init__(self, mine: dict[tuple[int, int], OwnedRange], group: dist.ProcessGroup | None) -> None:
        self._mine, self._group = mine, group
        self._device = message_device([group])
        self.rank = 0 if group is None else dist.get_rank(group)

    def whole(self, param: nn.Parameter, kind: str, *, senders: Sequence[tuple[int, _Claim]]) -> torch.Tensor | None:
        """A moment of a parameter on rank 0: [*parameter's shape], fp32 or fp64, on the host; None on the others."""
        for rank, claim in senders:
            if rank == self.rank != 0:
                dist.send(self._values(claim, kind).to(self._device), group=self._group, group_dst=0)
        if self.rank != 0:
            return None
        dtype = senders[0][1].dtype if senders else torch.promote_types(param.dtype, torch.float32)
        full = torch.empty_strided(param.shape, param.stride(), dtype=dtype)
        flat = full.as_strided((param.numel(),), (1,))
        for rank, claim in senders:
            flat[claim.start : claim.start + claim.numel].copy_(
                self._values(claim, kind) if rank == 0 else self._received(rank, claim)
            )
        return full

    def _values(self, claim: _Claim, kind: str) -> torch.Tensor:
        part = self._mine[claim.index, claim.start]
        return range_values(part, part.adam.exp_avg if kind == EXP_AVG else part.adam.exp_avg_sq)

    def _received(self, rank: int, claim: _Claim) -> torch.Tensor:
        values = torch.empty(claim.numel, dtype=claim.dtype, device=self._device)
        dist.recv(values, group=self._group, group_src=rank)
        return values
