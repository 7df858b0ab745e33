"""Gathers the tokens per expert of each microbatch, layer and rank once per step on the first rank, for traces."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.device import default_device
from megatron.core.group_collectives import gather_objects
from megatron.core.process_groups_config import ProcessGroupCollection, group_rank, group_size
from megatron.core.transformer.moe.router import TopKRouter
from megatron.training.callbacks import StepReport


class RoutingMeter:
    """Records the counts of each forward on the device, and gathers and reads them once at the end of a step."""

    def __init__(
        self, model: Sequence[nn.Module], groups: ProcessGroupCollection, *, samples_of_microbatch: int
    ) -> None:
        """Enables the recording of counts in the model's routers. Collective.

        samples_of_microbatch: number of samples in a microbatch, summed over the data-parallel ranks.
        """
        self._samples_of_microbatch = samples_of_microbatch
        routers = [part for chunk in model for part in chunk.modules() if isinstance(part, TopKRouter)]
        for router in routers:
            router.keep_passes()
        # Routers of a rank may share a recorder, which returns its records only once.
        self._recorders = list(dict.fromkeys(router.aux_losses for router in routers))
        self._layers = sorted(router.layer_number for router in routers)
        group = dist.group.WORLD if dist.is_initialized() else None
        self._device = default_device()
        self._rank, self._world_size = group_rank(group), group_size(group)
        own = _Place(
            stage=group_rank(groups.pp),
            sharing=_ranks_of(groups.tp_ep, self._rank),
            layers=self._layers,
            num_experts=max((router.num_experts for router in routers), default=0),
        )
        everyone = gather_objects(own, group)
        self._num_experts = max(place.num_experts for place in everyone)
        self._most_layers = max(len(place.layers) for place in everyone)
        self._stages = _stages_of(everyone)

    def measure(self, report: StepReport) -> StepReport:
        """Sets routing, on the first rank only."""
        passes: dict[int, list[Tensor]] = {}
        for recorder in self._recorders:
            passes |= recorder.take_passes()
        # A pipeline stage may contain no MoE layer.
        num_microbatches = report.global_batch_size // self._samples_of_microbatch
        own = torch.zeros(
            self._most_layers, num_microbatches, self._num_experts, dtype=torch.int64, device=self._device
        )
        for index, layer in enumerate(self._layers):
            own[index] = torch.stack(passes[layer])
        by_rank = self._gather_sync(own)
        if by_rank is None:
            return report
        routing = {
            layer: torch.stack([by_rank[rank][index] for rank in ranks], dim=1)
            for ranks, layers in self._stages
            for index, layer in enumerate(layers)
        }
        return replace(report, routing=dict(sorted(routing.items())))

    def _gather_sync(self, own: Tensor) -> Tensor | None:
        """Gathers `own`, [L, M, E], int64, to [ranks, L, M, E] on the host of the first rank. Returns None on others.

        Collective. NOTE: waits for the device once per step.
        """
        if self._world_size == 1:
            return own.cpu().unsqueeze(0)
        everyone = [torch.empty_like(own) for _ in range(self._world_size)] if self._rank == 0 else None
        dist.gather(own, everyone)
        return None if everyone is None else torch.stack(everyone).cpu()


@dataclass(frozen=True)
class _Place:
    """A rank's pipeline stage, the ranks that share experts with it (including itself), and the stage's MoE layers."""

    stage: int
    sharing: list[int]
    layers: list[int]
    num_experts: int


def _stages_of(places: Sequence[_Place]) -> list[tuple[list[int], list[int]]]:
    """Returns the ranks of each stage, in the order of the trace, and its layers. places: place of each rank."""
    stages: dict[int, tuple[list[int], list[int]]] = {}
    for rank, place in enumerate(places):
        ranks, _ = stages.setdefault(place.stage, ([], place.layers))
        if rank not in ranks:
            ranks += place.sharing
    return [stages[stage] for stage in sorted(stages)]


def _ranks_of(group: dist.ProcessGroup | None, own: int) -> list[int]:
    return [own] if group_size(group) == 1 else dist.get_process_group_ranks(group)
