"""GraphedReductions: the gathers and reductions of a stage's chunks as part of a step that a CUDA graph holds.

What is launched when is launch_order.py's; what a participant is, graph_capture.py's.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron.core.distributed.consistency import Measured
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.synced_group import ParamState
from megatron.core.graph_capture import GraphParticipant


class GraphedReductions(GraphParticipant):
    """Wrapped chunks that share a launch order, which stays as it is, as do buckets.

    With overlap_param_gather the graph begins with stale shards: each replay gathers the parameters of the moment, also
    where an evaluation in between has done so.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel]) -> None:
        settings = chunks[0].ddp_config
        if settings.gradients_are_transient:
            name = "shard_gradients" if settings.shard_gradients else "release_gradients"
            raise ValueError(
                f"DistributedDataParallelConfig.{name} is set: its gradients get their memory during backward, "
                "which a graph has standing; must be False for chunks in a graph"
            )
        self._chunks, self._order = list(chunks), chunks[0].launch_order
        self._gathered = [
            group
            for chunk in chunks
            if chunk.ddp_config.overlap_param_gather
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
            if group.is_sharded
        ]

    def prepare(self) -> None:
        """Completes the parameter gathers that were started, which would otherwise pair with gathers of the graph.

        Collective where anything has been gathered since the last update, which is the same on all ranks.
        """
        if any(group.param_state is not ParamState.STALE for group in self._gathered):
            self._order.finish_param_sync(self._gathered)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        with self._order.captured_iteration(self._gathered):
            yield

    def captured(self) -> list[Measured | None]:
        """Returns the gradient measurements of each chunk."""
        self._order.forget_captured(self._gathered)
        return [None if chunk.checks is None else chunk.checks.take_measured() for chunk in self._chunks]

    def dropped(self) -> None:
        self._order.forget_captured(self._gathered)

    def replayed(self, account: list[Measured | None]) -> None:
        self._order.note_replayed(self._gathered)
        for chunk, measured in zip(self._chunks, account):
            if chunk.checks is not None and measured is not None:
                chunk.checks.restore_measured(measured)
