"""DistributedOptimizer: each data-parallel rank steps its shard of every bucket, then ranks gather the parameters.

megatron.core.distributed cuts buckets and launches collectives; optimizer.py implements the step.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.distributed.layout import FlatBuffer
from megatron.core.logical_tensors import LogicalPiece
from megatron.core.optimizer.adam import GradScale, UpdateRule
from megatron.core.optimizer.clip_grads import GradStats
from megatron.core.optimizer.flat_params import FlatParamRange
from megatron.core.optimizer.grad_scaler import GradScaler
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig


class DistributedOptimizer(MegatronOptimizer):
    """ZeRO-1: masters and moments of this rank's shards only. ZeRO-2 if the chunks shard gradients too.

    Steps like MegatronOptimizer, but an update consists of:

    1. the parameters of other ranks' shards become stale;
    2. this rank's shards are updated;
    3. parameters are gathered: without overlap immediately, with overlap_param_gather in forward before each module,
       with overlap_param_gather_with_optimizer_step each bucket as soon as it is updated, in the order of forward.

    A rank may own padding only, or nothing of a parameter group. The norm counts each element once, so that all ranks
    skip a step together. Checkpoints hold boxes of whole tensors and load on any number of ranks.
    """

    def __init__(
        self,
        rules: Sequence[UpdateRule],
        config: OptimizerConfig,
        *,
        runs: Sequence[FlatParamRange],
        model_chunks: Sequence[DistributedDataParallel],
        grad_stats: GradStats,
        grad_scaler: GradScaler | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(
            rules,
            config,
            runs=runs,
            model_chunks=model_chunks,
            grad_stats=grad_stats,
            grad_scaler=grad_scaler,
            device=device,
        )
        self._sharded_chunks = list(model_chunks)
        # Chunks of a stage share a scheduler, which orders their gathers.
        self._gather_schedulers = list(dict.fromkeys(chunk.launch_order for chunk in model_chunks))
        overlap = model_chunks[0].ddp_config
        self._gathers_in_step = overlap.overlap_param_gather_with_optimizer_step
        self._gathers_after_step = not overlap.overlap_param_gather
        self._ranges_in: dict[tuple[FlatBuffer, int], list[FlatParamRange]] = {}
        for param_range in runs:
            self._ranges_in.setdefault((param_range.buffer, param_range.bucket), []).append(param_range)

    @contextmanager
    def loading(self, model_pieces: dict[str, list[LogicalPiece]]) -> Iterator[list[ShardedTensor]]:
        """Yields the boxes of sharded_state to load in place. Collective if masters are stored as remainders."""
        with super().loading(model_pieces) as tensors:
            yield tensors
        # Decided by the chunks' dtypes, not by this rank's ranges, of which there may be none.
        dtypes = [buffer.param_data.dtype for chunk in self._sharded_chunks for buffer in chunk.all_buffers]
        if self.config.keeps_remainders and torch.bfloat16 in dtypes:
            # Loading remainders has changed this rank's shard of the parameters, so the others gather it.
            for chunk in self._sharded_chunks:
                chunk.start_param_sync(force_sync=True, force_dispatch=True)

    def _update(self, scale: GradScale) -> None:
        # First of all, because a gather in flight would overwrite updated parameters.
        self._mark_params_stale()
        if self._gathers_in_step:
            with self._whole_update():
                self._update_and_gather_buckets(scale)
            self._note_update()
            return
        super()._update(scale)
        if self._gathers_after_step:
            self._start_gathers()

    def _after_device_update(self) -> None:
        self._mark_params_stale()
        super()._after_device_update()
        # `step` could gather each bucket after its update. Here the host learns of the update only at the end.
        if self._gathers_in_step or self._gathers_after_step:
            self._start_gathers()

    def _mark_params_stale(self) -> None:
        for chunk in self._sharded_chunks:
            chunk.mark_params_stale()

    def _start_gathers(self) -> None:
        for chunk in self._sharded_chunks:
            chunk.start_param_sync()

    def _update_and_gather_buckets(self, scale: GradScale) -> None:
        together = [rule for rule in self._rules if rule.is_collective]
        self._step_ranges(scale, self._runs, rules=together)
        rest = [rule for rule in self._rules if not rule.is_collective]
        for scheduler in self._gather_schedulers:
            for group in scheduler.gather_order:
                places = [(bucket.buffer, bucket.layout.index) for bucket in group.buckets]
                ranges = [one for place in places for one in self._ranges_in.get(place, [])]
                self._step_ranges(scale, ranges, rules=rest)
                scheduler.start_param_sync([group])


def check_same_sharding(chunks: list[_BaseDataParallel], *, wanted: bool | None) -> bool:
    """Returns whether the chunks are sharded; raises ValueError if they differ, or differ from `wanted` unless None."""
    sharded = [chunk.ddp_config.use_distributed_optimizer for chunk in chunks]
    if len(set(sharded)) > 1:
        raise ValueError(
            f"DistributedDataParallelConfig.use_distributed_optimizer of the chunks is {sharded}: must be the same"
        )
    if wanted not in (None, sharded[0]):
        raise ValueError(
            f"OptimizerConfig.use_distributed_optimizer is {wanted} and "
            f"DistributedDataParallelConfig.use_distributed_optimizer is {sharded[0]}: must be the same"
        )
    return sharded[0]


def check_sharded_gradients(chunks: list[_BaseDataParallel], *, optimizer: str) -> None:
    """Raises ValueError unless all chunks shard gradients with distributed_fused_adam, and none does without it."""
    wanted = optimizer == "distributed_fused_adam"
    found = [chunk.ddp_config.shard_gradients for chunk in chunks]
    if any(is_sharded != wanted for is_sharded in found):
        raise ValueError(
            f"OptimizerConfig.optimizer is {optimizer} and DistributedDataParallelConfig.shard_gradients of the chunks "
            f"is {found}: must be {wanted} in all of them, or optimizer be "
            + ("adam" if wanted else "distributed_fused_adam")
        )
