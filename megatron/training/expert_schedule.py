"""Which expert groups of this rank run forward and backward when, for any number of microbatches.

The schedule is pipeline_parallel's, the names are those that expert layers give their groups.
"""

from collections.abc import Sequence
from functools import lru_cache

from torch import nn

from megatron.core.pipeline_parallel.expansion import ExpertEvent, expand, kept_events
from megatron.core.pipeline_parallel.schedule import Pipeline, stage_orders
from megatron.core.process_groups_config import ProcessGroupCollection, group_rank, group_size
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.paged_stash import EventKind, StashEvent, layer_name
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock
from megatron.core.transformer.recompute import Recomputed
from megatron.core.transformer.transformer_block import TransformerBlock


class ExpertSchedule:
    """The layers with experts of a rank's model chunks, and their order in a step."""

    def __init__(
        self, chunks: Sequence[nn.Module], groups: ProcessGroupCollection, *, microbatch_group_size: int | None
    ) -> None:
        """microbatch_group_size: of interleaved schedules, as in the configuration."""
        self.layers = [[part for part in chunk.modules() if isinstance(part, MoELayer)] for chunk in chunks]
        self._layer_map = [[layer.router.layer_number for layer in layers] for layers in self.layers]
        self._recomputed = _recomputed_layers(chunks)
        self._pipeline = Pipeline(group_size(groups.pp), len(chunks))
        self._stage, self._microbatch_group_size = group_rank(groups.pp), microbatch_group_size
        self.events = lru_cache(maxsize=16)(self._events)

    def _events(self, num_microbatches: int) -> tuple[StashEvent, ...]:
        """The passes of a training step whose tensors wait for backward, in order."""
        orders = stage_orders(self._pipeline, num_microbatches, group_size=self._microbatch_group_size)
        return stash_events(kept_events(expand(orders[self._stage], self._layer_map, recompute=self._recomputed)))


def stash_events(events: Sequence[ExpertEvent]) -> tuple[StashEvent, ...]:
    """The events of a schedule as the stash has them; without groups that run again, see kept_events."""
    return tuple(StashEvent(EventKind(one.kind.value), layer_name(one.layer), one.instance) for one in events)


def _recomputed_layers(chunks: Sequence[nn.Module]) -> dict[int, int]:
    """Number of each layer that runs again as a whole -> number of the segment that it runs again with."""
    blocks = [part for chunk in chunks for part in chunk.modules() if isinstance(part, TransformerBlock)]
    segments = [
        [block.layers.offset + index + 1 for index in segment.layers]
        for block in blocks
        for segment in block.arrangement.segments
        if isinstance(segment.run, Recomputed)
    ]
    further = [part for chunk in chunks for part in chunk.modules() if isinstance(part, MultiTokenPredictionBlock)]
    segments += [[layer] for block in further for layer in block.recomputed_layers()]
    return {layer: number for number, layers in enumerate(segments) for layer in layers}
