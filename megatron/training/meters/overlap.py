"""Measures how much of a step's communication was overlapped with backward on this rank, at log lines."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.bucket_group import Traffic
from megatron.core.distributed.event_log import (
    EventLog,
    StepTimes,
    exposed_seconds,
    hidden_seconds,
    hidden_share,
    launched_before_next_was_ready,
)
from megatron.training.callbacks import StepReport


class OverlapMeter:
    """Records the communication events of steps with a log line. Other steps have no overhead."""

    def __init__(self, model: Sequence[nn.Module], interval: int, *, device: torch.device) -> None:
        self._interval = interval
        self._log = EventLog(device)
        for order in {chunk.launch_order for chunk in model if isinstance(chunk, DistributedDataParallel)}:
            order.observe(self._log)
        if interval <= 2:
            # The scheduler learns its order in the first step, so recording can start with the second.
            self._log.record_next_step()

    def measure(self, report: StepReport) -> StepReport:
        """Sets overlap and appends a note, if the step was recorded."""
        if (report.iteration + 2) % self._interval == 0:
            # Recording begins after the next step's reductions, with the parameter gathers of the step to be logged.
            self._log.record_next_step()
        if report.iteration % self._interval:
            return report
        steps = [step for step in self._log.take_sync() if step.transfers]
        if not steps:
            return report
        overlap = overlap_record(steps[-1])
        return replace(report, overlap=overlap, notes=(*report.notes, overlap_line(overlap)))


def overlap_record(step: StepTimes) -> dict[str, Any]:
    """Converts the times of a step to a JSON record. "transfers" lists each bucket's times, in milliseconds."""
    exposed = {
        word: 1e3 * sum(exposed_seconds(one) for one in step.transfers if (one.traffic is Traffic.GATHER) == gathers)
        for word, gathers in (("reduce", False), ("gather", True))
    }
    in_order = launched_before_next_was_ready(step)
    return {
        "hidden_share": hidden_share(step),
        "exposed_reduce_ms": round(exposed["reduce"], 3),
        "exposed_gather_ms": round(exposed["gather"], 3),
        "hidden_reduce_ms": round(1e3 * hidden_seconds(step, Traffic.REDUCE), 3),
        "hidden_gather_ms": round(1e3 * hidden_seconds(step, Traffic.GATHER), 3),
        "launched_early": sum(in_order),
        "could_be_early": len(in_order),
        "backward_end_ms": round(1e3 * step.backward_end, 3),
        "transfers": [
            {
                "name": one.name,
                "traffic": one.traffic.value,
                "bytes": one.num_bytes,
                "ready_ms": round(1e3 * one.ready, 3),
                "launched_ms": round(1e3 * one.launched, 3),
                "done_ms": round(1e3 * one.done, 3),
                "waits_ms": [[round(1e3 * moment, 3) for moment in wait] for wait in one.waits],
            }
            for one in step.transfers
        ],
    }


def overlap_line(overlap: dict[str, Any]) -> str:
    """Formats an overlap record as a console line."""
    share, buckets = overlap["hidden_share"], overlap["could_be_early"] + 1
    hidden = "nothing to overlap" if share is None else f"hidden under backward: {100 * share:.0f}% of what fits"
    early = f"{overlap['launched_early']} of {overlap['could_be_early']}" if buckets > 1 else "a single one"
    return (
        f"[Rank 0] communication | {hidden} | buckets sent before the next was complete: {early} | "
        f"waited (ms) for gradients: {overlap['exposed_reduce_ms']:.1f} | "
        f"for parameters: {overlap['exposed_gather_ms']:.1f} |"
    )
