"""The routing trace, a file with the number of tokens that chose each expert: its format, writing callback and reader.

The file has JSON lines, each compressed as a separate gzip member if the file name ends in .gz. A header describes
the steps that follow, until the next header. A run that resumes with other settings writes a new header. The line of
a step is

    {"iteration": 7, "tokens": {"2": [M][R][E] integers, ...}}

Each key is a layer number, counted from 1. Its value holds the number of tokens that chose each of the E experts,
before any are dropped for capacity, in each of the M microbatches on each of the R ranks of a pipeline stage. Ranks
that share experts are adjacent: groups of n * t ranks for expert-model-parallel size n and expert-tensor-parallel size
t.
"""

import gzip
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from megatron.core.transformer.moe_config import layers_with_experts
from megatron.core.transformer.mtp_config import with_mtp_layers
from megatron.training.callbacks.base import Callback, RunStart, StepReport
from megatron.training.callbacks.lines import LineFile
from megatron.training.callbacks.run_files import keep_lines_until
from megatron.training.config import RunConfig

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class RoutingHeader:
    """Model and layout of the steps that follow in a trace.

    layers: numbers of the MoE layers, out of num_layers. tokens_of_microbatch: tokens per rank. capacity_factor:
    moe_expert_rank_capacity_factor, or None. itemsize: bytes per element of a parameter.
    """

    layers: list[int]
    num_layers: int
    num_experts: int
    topk: int
    tokens_of_microbatch: int
    tensor_model_parallel_size: int
    context_parallel_size: int
    data_parallel_size: int
    pipeline_model_parallel_size: int
    expert_model_parallel_size: int
    expert_tensor_parallel_size: int
    capacity_factor: float | None
    hidden_size: int
    moe_ffn_hidden_size: int
    gated_linear_unit: bool
    itemsize: int

    @classmethod
    def of(cls, run_config: RunConfig) -> "RoutingHeader":
        """Builds the header of a run with these settings."""
        transformer = run_config.transformer
        has_experts = layers_with_experts(
            transformer.num_moe_experts, transformer.moe_layer_freq, num_layers=transformer.num_layers
        )
        has_experts = with_mtp_layers(has_experts, transformer.mtp_num_layers)
        shared_by = transformer.tensor_model_parallel_size * transformer.context_parallel_size
        return cls(
            layers=[number for number, experts in enumerate(has_experts, 1) if experts],
            num_layers=len(has_experts),
            num_experts=transformer.num_moe_experts or 0,
            topk=transformer.moe_router_topk,
            tokens_of_microbatch=run_config.data.seq_length * run_config.training.micro_batch_size // shared_by,
            tensor_model_parallel_size=transformer.tensor_model_parallel_size,
            context_parallel_size=transformer.context_parallel_size,
            data_parallel_size=run_config.launch.data_parallel_size,
            pipeline_model_parallel_size=transformer.pipeline_model_parallel_size,
            expert_model_parallel_size=transformer.expert_model_parallel_size,
            expert_tensor_parallel_size=transformer.expert_tensor_parallel_size,
            capacity_factor=transformer.moe_expert_rank_capacity_factor,
            hidden_size=transformer.hidden_size,
            moe_ffn_hidden_size=transformer.moe_ffn_hidden_size,
            gated_linear_unit=transformer.gated_linear_unit,
            itemsize=transformer.params_dtype.itemsize,
        )

    def line(self, iteration: int) -> bytes:
        """Formats the header as a line that precedes the steps after `iteration`."""
        return _line({"routing_trace": FORMAT, "iteration": iteration, **asdict(self)})

    @classmethod
    def from_record(cls, record: dict[str, Any], where: str) -> "RoutingHeader":
        """Parses a header from the JSON of its line. where: file and line, for errors.

        Raises ValueError if the record is not a header of the current format.
        """
        names = {field.name for field in fields(cls)}
        if record.get("routing_trace") != FORMAT or not names <= record.keys():
            raise ValueError(f"{where} is not the header of a routing trace of format {FORMAT}: {str(record)[:60]!r}")
        sizes = {field.name: record[field.name] for field in fields(cls) if field.type is int}
        wrong = {name: size for name, size in sizes.items() if type(size) is not int or size < 1}
        if wrong:
            raise ValueError(f"{where} has {wrong}: must be integers of at least 1")
        return cls(**{name: record[name] for name in names})


@dataclass(frozen=True)
class RoutingStep:
    """One step of a trace. tokens: maps a layer number to token counts, [M, R, E], int64."""

    header: RoutingHeader
    iteration: int
    tokens: dict[int, np.ndarray]


def step_line(iteration: int, tokens: dict[int, Tensor]) -> bytes:
    """Formats the line of a step. tokens: maps a layer number to counts [M, R, E], int64, on the host."""
    return _line(
        {"iteration": iteration, "tokens": {layer: counts.numpy().tolist() for layer, counts in tokens.items()}}
    )


def read_routing(path: Path | str) -> Iterator[RoutingStep]:
    """Yields the steps of a trace. Ignores a truncated last line.

    Raises ValueError naming the invalid line if the file is not a trace, and OSError if it cannot be read.
    """
    header = None
    for number, line in enumerate(read_lines(Path(path)), 1):
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("iteration"), int):
            if header is None or line.endswith(b"\n"):
                raise ValueError(f"{where} is not a line of a routing trace: {line[:60]!r}")
            return
        if header is None or "routing_trace" in record:
            header = RoutingHeader.from_record(record, where)
            continue
        yield RoutingStep(header, record["iteration"], _tokens_of(record, header, where=where))


def _tokens_of(record: dict[str, Any], header: RoutingHeader, *, where: str) -> dict[int, np.ndarray]:
    """Returns the counts [M, R, E], int64, by layer number. Raises ValueError for an invalid record."""
    refusal = ValueError(
        f"{where} must have, for each of the layers {header.layers}, tokens [M][R][{header.num_experts}] as integers"
    )
    try:
        tokens = {int(layer): np.array(counts) for layer, counts in record["tokens"].items()}
    except (KeyError, AttributeError, ValueError):
        raise refusal from None
    shapes = {counts.shape for counts in tokens.values()}
    is_counted = all(counts.dtype == np.int64 and counts.size and counts.min() >= 0 for counts in tokens.values())
    if sorted(tokens) != header.layers or not is_counted or [shape[2:] for shape in shapes] != [(header.num_experts,)]:
        raise refusal
    return tokens


def last_header(path: Path) -> RoutingHeader | None:
    """Returns the last header of a trace, which applies to appended steps, or None without a header.

    Raises the same errors as read_routing.
    """
    found = None
    for number, line in enumerate(read_lines(path), 1):
        # `line` writes this key first, so that the long lines of steps need not be parsed.
        if line.startswith(b'{"routing_trace"'):
            found = RoutingHeader.from_record(json.loads(line), f"{path}, line {number}")
    return found


def read_lines(path: Path) -> Iterator[bytes]:
    """Yields the decompressed lines of a trace, up to its end or the first truncated gzip member."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        try:
            yield from file
        except EOFError:
            return  # a killed run left a truncated member


def encoded(line: bytes, path: Path) -> bytes:
    """Encodes a line for appending to the file, as a separate gzip member if the name ends in .gz."""
    return gzip.compress(line, compresslevel=6, mtime=0) if path.suffix == ".gz" else line


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


class RoutingLog(Callback):
    """Writes one line per step to the trace. First removes the lines of steps that a resumed run will repeat."""

    def __init__(self, path: Path, header: RoutingHeader) -> None:
        """Checks the file. Raises ValueError for an unwritable path or an existing file that is not a trace."""
        self.path, self.header = path, header
        self._file: LineFile | None = None
        try:
            path.open("ab").close()
        except OSError as error:
            raise ValueError(
                f"--record-routing is {path}: must be a file in a writable folder ({error.strerror})"
            ) from error
        if path.stat().st_size and last_header(path) is None:
            raise ValueError(
                f"--record-routing is {path}: this file exists and is not a routing trace; choose another name"
            )

    def on_train_start(self, start: RunStart) -> None:
        """Opens the file, truncates it to the run's first iteration, and writes a header if the last one differs."""
        keep_lines_until(self.path, start.iteration, read=read_lines, encode=partial(encoded, path=self.path))
        is_described = self.path.exists() and last_header(self.path) == self.header
        self._file = LineFile(self.path)
        if not is_described:
            self._write(self.header.line(start.iteration))

    def on_rewind(self, iteration: int) -> None:
        """Removes the lines of steps that will be repeated."""
        self.on_run_end()
        self.on_train_start(RunStart(iteration=iteration, train_iters=iteration))

    def on_step_end(self, report: StepReport) -> None:
        """Writes the line of the step."""
        assert report.routing is not None, "a meter sets the routing on this rank"
        self._write(step_line(report.iteration, report.routing))

    def on_run_end(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: bytes) -> None:
        assert self._file is not None, "on_train_start opens the file"
        self._file.write(encoded(line, self.path))
