"""One JSON line a step in `steps.jsonl`, with full-precision numbers, for tools that compare runs."""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.core.files import replaced_file
from megatron.training.callbacks.base import Callback, EvaluationReport, RunStart, StepReport
from megatron.training.callbacks.line_file import LineFile

# Fields of a report that a line has under the same name where the step knows them.
_OPTIONAL = (
    "num_zeros",
    "params_norm",
    "weight_decay",
    "decoupled_learning_rate",
    "tflops",
    "mfu",
    "memory",
    "held",
    "timers",
    "overlap",
    "expert_load",
    "per_layer",
    "straggler",
)


class JsonlLog(Callback):
    """Appends to `folder/steps.jsonl`; lines past the iteration that a run resumes from are dropped first."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "steps.jsonl"
        self._file: LineFile | None = None

    def on_train_start(self, start: RunStart) -> None:
        """Opens the file at the iteration that the run starts from."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        keep_lines_until(self.path, start.iteration)
        self._file = LineFile(self.path)

    def on_rewind(self, iteration: int) -> None:
        """Drops the lines of steps that come again."""
        self.on_run_end()
        self.on_train_start(RunStart(iteration=iteration, train_iters=iteration))

    def on_step_end(self, report: StepReport) -> None:
        """Writes the step's line at once: a killed run leaves complete lines."""
        losses = {name.replace(" ", "_"): value for name, value in report.losses.items()}
        known = {name: vars(report)[name] for name in _OPTIONAL if vars(report)[name] is not None}
        if report.rank_times is not None:
            known["rank_times"] = asdict(report.rank_times)
        if report.stash is not None:
            known["stash"] = asdict(report.stash)
        self._write(
            {
                "iteration": report.iteration,
                **losses,
                "grad_norm": report.grad_norm,
                "learning_rate": report.learning_rate,
                "loss_scale": report.loss_scale,
                "global_batch_size": report.global_batch_size,
                "consumed_samples": report.consumed_samples,
                "skipped": report.skipped,
                "seconds": round(report.seconds, 6),
                "tokens_per_second": round(report.tokens / report.seconds, 1),
                **known,
            }
        )

    def on_evaluation_end(self, report: EvaluationReport) -> None:
        """Writes the split's loss under `validation_loss` or `test_loss`, a script's other values as `test_NAME`."""
        words = {name: "loss" if name == "lm loss" else name.replace(" ", "_") for name in report.losses}
        values = {f"{report.split}_{words[name]}": value for name, value in report.losses.items()}
        self._write({"iteration": report.iteration, **values})

    def on_run_end(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, record: dict[str, Any]) -> None:
        assert self._file is not None, "the log is opened by on_train_start"
        self._file.write(json.dumps(_json_value(record)).encode() + b"\n")


def _json_value(value: Any) -> Any:
    """Numbers that JSON does not know become text: strict readers stay able to read the line."""
    if isinstance(value, dict):
        return {name: _json_value(inner) for name, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def lines_of(path: Path) -> Iterator[bytes]:
    """Line by line: with the load of many experts a log is larger than memory."""
    with path.open("rb") as file:
        yield from file


def keep_lines_until(
    path: Path,
    iteration: int,
    *,
    read: Callable[[Path], Iterable[bytes]] = lines_of,
    encode: Callable[[bytes], bytes] = bytes,
) -> None:
    """Rewrites the log without lines of later iterations, nor a last line that a kill cut short.

    encode: what a line becomes in the file, and read undoes.
    """
    if not path.exists():
        return
    with replaced_file(path) as new:
        for line in read(path):
            step = _iteration(line)
            if step is not None and step <= iteration:
                new.write(encode(line.rstrip(b"\n") + b"\n"))


def _iteration(line: bytes) -> int | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    step = record.get("iteration") if isinstance(record, dict) else None
    return step if isinstance(step, int) else None
