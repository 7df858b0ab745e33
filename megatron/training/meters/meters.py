"""Defines the meters. Each meter adds one measurement that a flag requests to the report of a step.

Meters run on every rank after each step and may be collective. Callbacks print and write the reports.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.device import device_name
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.state_memory import StateBytes, state_bytes_of
from megatron.core.parallel_state import get_process_groups
from megatron.core.timers import Timers, format_times
from megatron.training.callbacks import RankTimes, StepReport
from megatron.training.compute.devices import peak_bf16_tflops
from megatron.training.compute.flops import num_operations_of_samples
from megatron.training.config import LoggingConfig, RunConfig
from megatron.training.meters.memory import HeldMemoryMeter, MemoryMeter, quantized_bytes
from megatron.training.meters.overlap import OverlapMeter
from megatron.training.meters.routing import RoutingMeter
from megatron.training.meters.stash import StashMeter
from megatron.training.step.expert_memory import ExpertMemory

# Timers of a step, in the order of the log. Timers that never ran are not shown.
STEP_TIMERS = (
    "forward-backward",
    "forward-compute",
    "backward-compute",
    "weight-compute",
    "pair-compute",
    "batch-generator",
    "all-grads-sync",
    "optimizer-clip-main-grad",
    "optimizer-count-zeros",
    "optimizer-inner-step",
    "optimizer",
)
# Timers during which a data-parallel rank does not wait for others.
_OWN_WORK = ("forward-backward", "optimizer")


class Meter(Protocol):
    """Interface of objects that add a measurement to the report of a step."""

    def measure(self, report: StepReport) -> StepReport:
        """Returns the report with this meter's measurement. Collective."""


def build_meters(
    logging: LoggingConfig,
    run_config: RunConfig,
    *,
    model: Sequence[nn.Module],
    optimizer: MegatronOptimizer | None,
    timers: Timers,
    device: torch.device,
    expert_memory: ExpertMemory | None = None,
) -> list[Meter]:
    """Builds the meters that the flags request, and the memory meters, which always run at log lines.

    expert_memory: None unless expert buffers have a fixed size.
    """
    chunks = [chunk for chunk in model if isinstance(chunk, _BaseDataParallel)]
    state = None
    if optimizer is not None:
        state = state_bytes_of(chunks, optimizer.config) + StateBytes(parameters=quantized_bytes(model))
    meters: list[Meter] = [MemoryMeter(device, logging.log_interval, state=state, has_notes=not logging.is_compact)]
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
        meters.append(ThroughputMeter(run_config, device_name(device), world_size=dist.get_world_size()))
    if logging.log_params_norm and optimizer is not None:
        meters.append(ParamsNormMeter(optimizer, model))
    if logging.timing_log_level > 0:
        watch = StragglerWatch() if run_config.faults.log_straggler else None
        meters.append(TimerMeter(timers, logging.log_interval, watch=watch))
        meters.append(OverlapMeter(model, logging.log_interval, device=device))
    if expert_memory is not None and optimizer is not None:
        meters.append(StashMeter(expert_memory, run_config, device=device, has_notes=not logging.is_compact))
    if logging.record_routing is not None and optimizer is not None:
        samples = run_config.training.micro_batch_size * run_config.launch.data_parallel_size
        meters.append(RoutingMeter(model, groups, samples_of_microbatch=samples))
    return meters


class ThroughputMeter:
    """Measures operations per second of one device, and their share of its peak (MFU) if the peak is known."""

    def __init__(self, run_config: RunConfig, name: str, *, world_size: int) -> None:
        self._run_config, self._world_size = run_config, world_size
        self._peak = peak_bf16_tflops(name)

    def measure(self, report: StepReport) -> StepReport:
        """Sets tflops and mfu."""
        operations = num_operations_of_samples(self._run_config, report.global_batch_size, report.padding)
        tflops = operations / 1e12 / self._world_size / report.seconds
        return replace(report, tflops=tflops, mfu=None if self._peak is None else tflops / self._peak)


class ParamsNormMeter:
    """Measures the 2-norm of all parameters. Trained parameters are measured in the optimizer's copies."""

    def __init__(self, optimizer: MegatronOptimizer, model: Sequence[nn.Module]) -> None:
        self._optimizer = optimizer
        self._frozen = [p for chunk in model for p in chunk.parameters() if not p.requires_grad]

    def measure(self, report: StepReport) -> StepReport:
        """Sets params_norm."""
        # norm_of is collective, so ranks without frozen parameters call it too.
        frozen = self._optimizer.norm_of(self._frozen)
        return replace(report, params_norm=math.hypot(self._optimizer.params_norm(), frozen))


# A straggler exceeds the median by this factor in this number of consecutive log intervals, which excludes noise.
_SLOW_FACTOR, _INTERVALS = 1.1, 3


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank that is persistently slower than the others. Times are milliseconds, as means per step.

    work_ms: work of the rank. median_ms: work of the median rank. waits_ms: time that the median rank waits for others.
    intervals: number of consecutive log intervals in which the rank was the slowest.
    """

    rank: int
    work_ms: float
    median_ms: float
    waits_ms: float
    intervals: int

    def __str__(self) -> str:
        return (
            f"straggler: rank {self.rank} works {self.work_ms:.1f} ms per step, "
            f"{self.work_ms / self.median_ms:.2f} times the median of {self.median_ms:.1f} ms, for "
            f"{self.intervals} log intervals; the median rank waits {self.waits_ms:.1f} ms per step"
        )


class StragglerWatch:
    """Compares the ranks' times over log intervals, and reports a rank that is persistently slow."""

    def __init__(self) -> None:
        self._rank: int | None = None
        self._intervals = 0

    def observe(self, work_ms: Sequence[float], *, step_ms: float) -> Straggler | None:
        """Records the mean times of a log interval, and returns a straggler if a rank was slow in enough intervals.

        work_ms: milliseconds per step of each rank, excluding waits for others. step_ms: including these waits.
        """
        # The lower median, because the slower of two ranks would otherwise be compared with itself.
        median, slowest = statistics.median_low(work_ms), max(range(len(work_ms)), key=work_ms.__getitem__)
        if work_ms[slowest] <= _SLOW_FACTOR * median:
            self._intervals = 0
            return None
        self._intervals = self._intervals + 1 if slowest == self._rank else 1
        self._rank = slowest
        if self._intervals < _INTERVALS:
            return None
        return Straggler(
            rank=slowest,
            work_ms=work_ms[slowest],
            median_ms=median,
            waits_ms=max(0.0, step_ms - median),
            intervals=self._intervals,
        )


class TimerMeter:
    """Gathers the timers of all ranks at log lines, and reports the fastest and the slowest rank."""

    def __init__(self, timers: Timers, interval: int, *, watch: StragglerWatch | None = None) -> None:
        self._timers = timers
        self._interval = interval
        self._watch = watch
        self._steps, self._seconds = 0, 0.0

    def measure(self, report: StepReport) -> StepReport:
        """Sets timers and, with several ranks, rank_times and straggler: means over the steps since the last line."""
        self._steps += 1
        if self._watch is not None:
            self._seconds += report.seconds
        if report.iteration % self._interval:
            return report
        seconds = self._timers.seconds_by_rank(STEP_TIMERS)
        milliseconds = {name: 1000.0 * max(ranks) / self._steps for name, ranks in seconds.items() if any(ranks)}
        notes = [format_times(seconds, self._timers.log_option, normalizer=self._steps)]
        times = straggler = None
        # A single process has no other rank to compare with.
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
    """Determines the fastest and the slowest rank by the sum of their timers. milliseconds: [timers][ranks]."""
    totals = [sum(column) for column in zip(*milliseconds, strict=True)]
    fastest, slowest = (totals.index(choose(totals)) for choose in (min, max))
    return RankTimes(min_ms=totals[fastest], min_rank=fastest, max_ms=totals[slowest], max_rank=slowest)


def slowest_rank_line(times: RankTimes) -> str:
    """Formats the console line that names the fastest and the slowest rank."""
    return (
        f"work of a rank per iteration (ms), waits for gradients left out | fastest: rank {times.min_rank}, "
        f"{times.min_ms:.1f} | slowest: rank {times.max_rank}, {times.max_ms:.1f} |"
    )
