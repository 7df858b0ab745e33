"""Bytes that a rank holds, by kind, and their maximum over ranks: before the first step, and measured in steps.

What a run will hold, before it is started, is dry_run/plan.py's; its kinds are the same.
"""

import argparse
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron.core.device import default_device, device_name, peak_memory_bytes, total_memory_bytes
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
from megatron.core.optimizer.state_memory import state_bytes_of
from megatron.core.process_groups_config import ProcessGroupCollection, group_rank, group_size
from megatron.core.utils import unwrap_model
from megatron.training.arguments import config_from_args
from megatron.training.callbacks import StepReport
from megatron.training.expert_memory import ExpertMemory
from megatron.training.memory_need import fit_in_words


def parameter_tensors(model: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Returns the storage of the chunks' parameters and module buffers: any shape, any dtype."""
    for chunk in model:
        yield from chunk.parameters()
        yield from unwrap_model(chunk).buffers()
        if isinstance(chunk, _BaseDataParallel):
            yield from (flat for buffer in chunk.all_buffers for flat in buffer.persistent_params)


def gradient_tensors(model: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Returns the persistent storage of the chunks' gradients: any shape, any dtype."""
    for chunk in model:
        if isinstance(chunk, _BaseDataParallel):
            yield from (flat for buffer in chunk.all_buffers for flat in buffer.persistent_grads)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of the tensors' storages, each counted once; of a DTensor only this rank's part.

    tensors: any shape, any dtype.
    """
    parts = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    memory = {part.untyped_storage()._cdata: part.untyped_storage().nbytes() for part in parts}
    return sum(memory.values())


def held_bytes(
    model: Sequence[nn.Module], optimizer: MegatronOptimizer, *, memory: ExpertMemory | None = None
) -> dict[str, int]:
    """Returns the bytes that this rank holds, by kind, as in RankPlan.

    memory: of experts, whose stash may have pages.
    """
    pages = {"device_pages": 0, "host_pages": 0}
    if memory is not None and memory.stash is not None:
        pages = memory.stash.pool.num_bytes
    return {
        "parameters": bytes_of(parameter_tensors(model)),
        "gradients": bytes_of(gradient_tensors(model)),
        **optimizer.state_bytes,
        "pages": pages["device_pages"],
        "host_pages": pages["host_pages"],
    }


def persistent_fit(model: Sequence[nn.Module], args: argparse.Namespace) -> str:
    """Returns a line that says whether weights, gradients and optimizer states fit the device. Collective.

    Called before the optimizer exists, whose states are estimated: building them may fail. Compares the rank that holds
    most with this rank's device; ranks on CPUs share the memory of their machine.
    """
    device = default_device()
    needed = bytes_of(parameter_tensors(model)) + bytes_of(gradient_tensors(model))
    chunks = [chunk for chunk in model if isinstance(chunk, _BaseDataParallel)]
    if not args.skip_train:
        config = config_from_args(OptimizerConfig, args)
        states = state_bytes_of(chunks, config)
        needed += int((states.masters + states.moments) * (1 - config.host_fraction))
    most = torch.tensor([needed], dtype=torch.int64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    needed, memory = int(most.item()), total_memory_bytes(device)
    if device.type != "cuda":
        memory //= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    name = device_name(device) if device.type == "cuda" else "this machine"
    what = "weights" if args.skip_train else "weights, gradients and optimizer states"
    more = f"--dry-run --world-size {args.world_size}"
    if needed > memory:
        return f"{fit_in_words(name, needed, memory)} for {what}; add {more} to find flags that fit"
    return f"{fit_in_words(name, needed, memory)} for {what}; activations are not counted, see {more}"


class HeldMemoryMeter:
    """Measures after the first step of a start, at log lines and after the last step: a pool of pages may grow."""

    def __init__(
        self,
        model: Sequence[nn.Module],
        optimizer: MegatronOptimizer,
        *,
        memory: ExpertMemory | None,
        groups: ProcessGroupCollection,
        device: torch.device,
        interval: int,
    ) -> None:
        self._model, self._optimizer, self._memory = model, optimizer, memory
        self._device, self._interval = device, interval
        self._stage, self._num_stages = group_rank(groups.pp), group_size(groups.pp)
        self._is_first = True

    def measure(self, report: StepReport) -> StepReport:
        """Sets held: "rank_0", "max" over ranks and "stages", the largest of each stage's, each kind to bytes.

        Beside what held_bytes gives there is the most that was in use so far: peak_allocated of a GPU's memory, as
        torch's allocator counts it, or peak_rss of the process on a CPU.
        """
        is_due = self._is_first or report.is_last or report.iteration % self._interval == 0
        if not is_due:
            return report
        self._is_first = False
        own = held_bytes(self._model, self._optimizer, memory=self._memory)
        peak = "peak_allocated" if self._device.type == "cuda" else "peak_rss"
        own[peak] = peak_memory_bytes(self._device)
        first, *stages = self._largest_sync(list(own.values()))
        largest = [max(column) for column in zip(*stages, strict=True)]
        held = {
            "rank_0": dict(zip(own, first, strict=True)),
            "max": dict(zip(own, largest, strict=True)),
            "stages": {stage: dict(zip(own, row, strict=True)) for stage, row in enumerate(stages)},
        }
        return replace(report, held=held)

    def _largest_sync(self, own: list[int]) -> list[list[int]]:
        """The first rank's numbers, then the largest of each stage's ranks.

        NOTE: reads the device, once a log line. Collective.
        """
        rows = torch.zeros(1 + self._num_stages, len(own), dtype=torch.int64)
        rows[1 + self._stage] = torch.tensor(own, dtype=torch.int64)
        if not dist.is_initialized() or dist.get_rank() == 0:
            rows[0] = torch.tensor(own, dtype=torch.int64)
        if dist.is_initialized() and dist.get_world_size() > 1:
            rows = rows.to(self._device)
            dist.all_reduce(rows, op=dist.ReduceOp.MAX)
        return rows.tolist()
