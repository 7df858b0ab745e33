"""Predicts the memory and counts the FLOPs of sides with the planner, in a process that runs beside the measurements.

Measures nothing.
"""

import os
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch

import pretrain_gpt
from benchmarks.gpu.checks.side_workers import error_of
from benchmarks.gpu.shapes import RANKS
from benchmarks.train_step import FLAGS
from megatron.planner.plan import plan_run
from megatron.training.command_line.config_builder import run_config_of
from megatron.training.initialize import read_arguments


@dataclass(frozen=True)
class Prediction:
    """Prediction for one rank. peak_bytes: on the device. flops: of a step, as the training log counts them."""

    peak_bytes: int
    flops: float


def predict(flags: str) -> Prediction:
    """Plans the first rank of a run. flags: added to those of the benchmarks. Requires no process group."""
    words = [*FLAGS.split(), *flags.split(), "--dry-run", "--world-size", str(RANKS)]
    args = read_arguments(argv=words)
    plan = plan_run(run_config_of(args), pretrain_gpt.model_provider, forward_step_func=pretrain_gpt.forward_step)
    flops = plan.flops_per_sample * args.global_batch_size / RANKS
    return Prediction(max(stage.memory.peak for stage in plan.stages), flops)


class Predictions:
    """Predictions by name, computed in a child process in the order of `flags`. Must be built before CUDA is used."""

    def __init__(self, flags: Mapping[str, str]) -> None:
        context = get_context("fork")
        self._connection, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_serve, args=(theirs, dict(flags)), daemon=True)
        self._process.start()
        theirs.close()
        self._found: dict[str, Prediction | str] = {}

    def of(self, name: str, *, seconds: float) -> Prediction | str:
        """Returns a prediction, or why there is none. Waits for at most this many seconds."""
        end = time.monotonic() + seconds
        try:
            while name not in self._found and self._connection.poll(max(0.0, end - time.monotonic())):
                key, prediction = self._connection.recv()
                self._found[key] = prediction
        except (EOFError, OSError):
            return self._found.get(name, "its process ended")
        return self._found.get(name, "not computed in time")

    def leave(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.join()


def _serve(connection: Connection, flags: dict[str, str]) -> None:
    torch.set_num_threads(1)
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        for name, words in flags.items():
            found: list[Prediction] = []
            error = error_of(lambda: found.append(predict(words)))  # noqa: B023
            connection.send((name, error or found[0]))
