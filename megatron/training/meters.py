"""What a step's report holds beside what the step knows itself: each meter adds one thing that a flag asks for.

Meters run on every rank after each step and may be collective; printing and writing is the callbacks' work.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.device import device_name, memory_bytes
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.state_memory import StateBytes, state_bytes_of
from megatron.core.parallel_state import get_process_groups
from megatron.core.timers import Timers, format_times
from megatron.training.callbacks import RankTimes, StepReport
from megatron.training.device_table import peak_bf16_tflops
from megatron.training.expert_memory import ExpertMemory
from megatron.training.flops import num_floating_point_operations
from megatron.training.held_memory import HeldMemoryMeter
from megatron.training.logging_config import LoggingConfig
from megatron.training.overlap_meter import OverlapMeter
from megatron.training.routing_meter import RoutingMeter
from megatron.training.stash_meter import StashMeter
from megatron.training.stragglers import StragglerWatch

# The timers of a step in the order of the log; a timer that never ran is not shown.
STEP_TIMERS = (
    "forward-backward",
    "forward-compute",
    "backward-compute",
    "batch-generator",
    "all-grads-sync",
    "optimizer-clip-main-grad",
    "optimizer-count-zeros",
    "optimizer-inner-step",
    "optimizer",
)
# Those in which a rank of a data-parallel group waits for no other.
_OWN_WORK = ("forward-backward", "optimizer")
_MEMORY_WORDS = {
    "allocated": "allocated",
    "max_allocated": "max allocated",
    "reserved": "reserved",
    "max_reserved": "max reserved",
    "rss": "resident",
    "peak_rss": "max resident",
}


class Meter(Protocol):
    """Adds one thing to the report of a step."""

    def measure(self, report: StepReport) -> StepReport:
        """The report with what this meter measured; collective."""


def build_meters(
    logging: LoggingConfig,
    args: argparse.Namespace,
    *,
    model: Sequence[nn.Module],
    optimizer: MegatronOptimizer | None,
    timers: Timers,
    device: torch.device,
    expert_memory: ExpertMemory | None = None,
) -> list[Meter]:
    """The meters that the flags ask for; memory is always measured, at log lines.

    expert_memory: where experts have buffers of a fixed size.
    """
    chunks = [chunk for chunk in model if isinstance(chunk, _BaseDataParallel)]
    state = None if optimizer is None else state_bytes_of(chunks, optimizer.config)
    meters: list[Meter] = [MemoryMeter(device, logging.log_interval, state=state)]
    groups = get_process_groups()
    if optimizer is not None:
        meters.append(
            HeldMemoryMeter(
                model,
                optimizer,
                memory=expert_memory,
                groups=groups,
                device=device,
                interval=logging.log_interval,
            )
        )
    if logging.log_throughput:
        meters.append(ThroughputMeter(args, device_name(device), world_size=dist.get_world_size()))
    if logging.log_params_norm and optimizer is not None:
        meters.append(ParamsNormMeter(optimizer, model))
    if logging.timing_log_level > 0:
        watch = StragglerWatch() if args.log_straggler else None
        meters.append(TimerMeter(timers, logging.log_interval, watch=watch))
        meters.append(OverlapMeter(model, logging.log_interval, device=device))
    if expert_memory is not None and optimizer is not None:
        meters.append(StashMeter(expert_memory, args, device=device))
    if logging.record_routing is not None and optimizer is not None:
        samples = args.micro_batch_size * args.data_parallel_size
        meters.append(RoutingMeter(model, groups, samples_of_microbatch=samples))
    return meters


class ThroughputMeter:
    """Operations a second of one device and their share of its peak (MFU), where that is known."""

    def __init__(self, args: argparse.Namespace, name: str, *, world_size: int) -> None:
        # Linear in the batch, which may grow in the course of a run.
        self._tflop_per_sample = num_floating_point_operations(args, 1) / 1e12 / world_size
        self._peak = peak_bf16_tflops(name)

    def measure(self, report: StepReport) -> StepReport:
        """Sets tflops and mfu."""
        tflops = self._tflop_per_sample * report.global_batch_size / report.seconds
        return replace(report, tflops=tflops, mfu=None if self._peak is None else tflops / self._peak)


class ParamsNormMeter:
    """2-norm of all parameters: trained ones as the optimizer holds them, frozen ones as the model does."""

    def __init__(self, optimizer: MegatronOptimizer, model: Sequence[nn.Module]) -> None:
        self._optimizer = optimizer
        self._frozen = [p for chunk in model for p in chunk.parameters() if not p.requires_grad]

    def measure(self, report: StepReport) -> StepReport:
        """Sets params_norm."""
        # Also on ranks without any: others wait for them.
        frozen = self._optimizer.norm_of(self._frozen)
        return replace(report, params_norm=math.hypot(self._optimizer.params_norm(), frozen))


class MemoryMeter:
    """Bytes by kind on this rank at each log line, and lines for the console below the first.

    state: what is planned for training; None where nothing is trained.
    """

    def __init__(self, device: torch.device, interval: int, *, state: StateBytes | None = None) -> None:
        self._device = device
        self._interval = interval
        self._state = state
        self._told = False

    def measure(self, report: StepReport) -> StepReport:
        """Sets memory."""
        if report.iteration % self._interval:
            return report
        memory = memory_bytes(self._device)
        # A notice of every line would say the same again: memory settles in the first steps.
        notes: tuple[str, ...] = ()
        if not self._told:
            notes = (memory_line(memory, report.iteration, on_gpu=self._device.type == "cuda"),)
            notes += () if self._state is None else (state_line(self._state),)
        self._told = True
        return replace(report, memory=memory, notes=(*report.notes, *notes))


def memory_line(memory: dict[str, int], iteration: int, *, on_gpu: bool) -> str:
    """The line under the first log line: a GPU's memory, or the process's on the CPU."""
    kinds = [kind for kind in memory if kind.endswith("rss") != on_gpu]
    figures = [f" {_MEMORY_WORDS[kind]}: {memory[kind] / 2**20:.1f}" for kind in kinds]
    return " |".join([f"[Rank 0] (after {iteration} iterations) memory (MB)", *figures])


def state_line(state: StateBytes) -> str:
    """The line under that: what of it stays from step to step, as planned."""
    figures = [f" {name}: {value / 2**20:.1f}" for name, value in asdict(state).items()]
    return " |".join(["[Rank 0] kept from step to step (MB)", *figures, f" sum: {state.total / 2**20:.1f}"])


class TimerMeter:
    """Gathers the timers of all ranks at log lines, and says which rank worked longest."""

    def __init__(self, timers: Timers, interval: int, *, watch: StragglerWatch | None = None) -> None:
        self._timers = timers
        self._interval = interval
        self._watch = watch
        self._steps, self._seconds = 0, 0.0

    def measure(self, report: StepReport) -> StepReport:
        """Sets timers and, of several ranks, rank_times and straggler: means over the steps since the last line."""
        self._steps += 1
        if self._watch is not None:
            self._seconds += report.seconds
        if report.iteration % self._interval:
            return report
        seconds = self._timers.seconds_by_rank(STEP_TIMERS)
        milliseconds = {name: 1000.0 * max(ranks) / self._steps for name, ranks in seconds.items() if any(ranks)}
        notes = [format_times(seconds, self._timers.log_option, normalizer=self._steps)]
        times = straggler = None
        # One process is the fastest and the slowest: neither figure says anything.
        if len(seconds[_OWN_WORK[0]]) > 1:
            rows = [[1000.0 * t / self._steps for t in seconds[name]] for name in _OWN_WORK]
            times = rank_times(rows)
            notes.append(slowest_rank_line(times))
            if self._watch is not None:
                work_ms = [sum(column) for column in zip(*rows, strict=True)]
                straggler = self._watch.observe(work_ms, step_ms=1000.0 * self._seconds / self._steps)
        if straggler is not None:
            notes.append(str(straggler))
        self._steps, self._seconds = 0, 0.0
        return replace(
            report,
            timers=milliseconds,
            rank_times=times,
            straggler=None if straggler is None else asdict(straggler),
            notes=(*report.notes, *notes),
        )


def rank_times(milliseconds: Sequence[Sequence[float]]) -> RankTimes:
    """The fastest and the slowest rank by the sum over rows; milliseconds: [timers][ranks]."""
    totals = [sum(column) for column in zip(*milliseconds, strict=True)]
    fastest, slowest = (totals.index(choose(totals)) for choose in (min, max))
    return RankTimes(min_ms=totals[fastest], min_rank=fastest, max_ms=totals[slowest], max_rank=slowest)


def slowest_rank_line(times: RankTimes) -> str:
    """The line that names the ranks, for the console."""
    return (
        f"work of a rank per iteration (ms), waits for gradients left out | fastest: rank {times.min_rank}, "
        f"{times.min_ms:.1f} | slowest: rank {times.max_rank}, {times.max_ms:.1f} |"
    )
