"""The routing trace, a file of how many tokens chose which expert, and no word of the tokens: its lines and reader.

JSON lines, each in a gzip member of its own where the file's name ends in .gz. A header describes the steps after it,
until the next one; a run that resumes with other settings writes its own. A step has

    {"iteration": 7, "tokens": {"2": [M][R][E] whole numbers, ...}}

by the number of the layer, from 1: tokens that chose each of E experts, before a capacity drops any, in each of the M
micro-batches of each of the R ranks of a pipeline stage. The ranks that share experts stand next to each other: of
expert-model-parallel size n and expert-tensor-parallel size t, each n * t.
"""

import argparse
import gzip
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from megatron.core.transformer.moe_config import layers_with_experts
from megatron.core.transformer.mtp_config import with_mtp_layers

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class RoutingHeader:
    """What the counts are of: layers with experts out of num_layers; tokens of a rank's micro-batch, topk experts each;
    the layout of the run; its moe_expert_rank_capacity_factor, None without; the shape of an expert.
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
    def of(cls, args: argparse.Namespace) -> "RoutingHeader":
        """Returns the header of a run with these arguments."""
        has_experts = layers_with_experts(args.num_experts, args.moe_layer_freq, num_layers=args.num_layers)
        has_experts = with_mtp_layers(has_experts, args.mtp_num_layers)
        shared_by = args.tensor_model_parallel_size * args.context_parallel_size
        return cls(
            layers=[number for number, experts in enumerate(has_experts, 1) if experts],
            num_layers=len(has_experts),
            num_experts=args.num_experts,
            topk=args.moe_router_topk,
            tokens_of_microbatch=args.seq_length * args.micro_batch_size // shared_by,
            tensor_model_parallel_size=args.tensor_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            data_parallel_size=args.data_parallel_size,
            pipeline_model_parallel_size=args.pipeline_model_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size or args.tensor_model_parallel_size,
            capacity_factor=args.moe_expert_rank_capacity_factor,
            hidden_size=args.hidden_size,
            moe_ffn_hidden_size=args.moe_ffn_hidden_size or args.ffn_hidden_size,
            gated_linear_unit=args.swiglu or args.quick_geglu,
            itemsize=2 if args.bf16 or args.fp16 else 4,
        )

    def line(self, iteration: int) -> bytes:
        """The header of a run that goes on from this iteration."""
        return _line({"routing_trace": FORMAT, "iteration": iteration, **asdict(self)})

    @classmethod
    def from_record(cls, record: dict[str, Any], where: str) -> "RoutingHeader":
        """Returns the header from the JSON of `line`; where: file and line. Raises ValueError for another format."""
        names = {field.name for field in fields(cls)}
        if record.get("routing_trace") != FORMAT or not names <= record.keys():
            raise ValueError(f"{where} is not the header of a routing trace of format {FORMAT}: {str(record)[:60]!r}")
        sizes = {field.name: record[field.name] for field in fields(cls) if field.type is int}
        wrong = {name: size for name, size in sizes.items() if type(size) is not int or size < 1}
        if wrong:
            raise ValueError(f"{where} has {wrong}: must be whole numbers of at least 1")
        return cls(**{name: record[name] for name in names})


@dataclass(frozen=True)
class RoutingStep:
    """One step of a trace. tokens: layer number -> [M, R, E], int64."""

    header: RoutingHeader
    iteration: int
    tokens: dict[int, np.ndarray]


def step_line(iteration: int, tokens: dict[int, Tensor]) -> bytes:
    """A step as the trace has it; tokens: layer number -> [M, R, E], int64, on the host."""
    return _line(
        {"iteration": iteration, "tokens": {layer: counts.numpy().tolist() for layer, counts in tokens.items()}}
    )


def read_routing(path: Path | str) -> Iterator[RoutingStep]:
    """The steps of a trace, one at a time; a last line that is cut short is left out.

    Raises ValueError, which names the line, for a file that is no trace, OSError for one that cannot be read.
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
                raise ValueError(f"{where} is not of a routing trace: {line[:60]!r}")
            return
        if header is None or "routing_trace" in record:
            header = RoutingHeader.from_record(record, where)
            continue
        yield RoutingStep(header, record["iteration"], _tokens_of(record, header, where=where))


def _tokens_of(record: dict[str, Any], header: RoutingHeader, *, where: str) -> dict[int, np.ndarray]:
    """Layer number -> [M, R, E], int64, as `step_line` wrote it. Raises ValueError for anything else."""
    refusal = ValueError(
        f"{where} must have, for each of the layers {header.layers}, tokens [M][R][{header.num_experts}], whole numbers"
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
    """Returns the header that applies to steps appended to this trace; None without one. Raises as read_routing."""
    found = None
    for number, line in enumerate(read_lines(path), 1):
        # `line` puts the word first: steps, which are long, need not be parsed.
        if line.startswith(b'{"routing_trace"'):
            found = RoutingHeader.from_record(json.loads(line), f"{path}, line {number}")
    return found


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a trace as they were written, until the end or until where the file was cut."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        try:
            yield from file
        except EOFError:
            return  # a kill left half of a compressed line


def encoded(line: bytes, path: Path) -> bytes:
    """A line as the file holds it: whatever was written before, it can be appended."""
    return gzip.compress(line, compresslevel=6, mtime=0) if path.suffix == ".gz" else line


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"
