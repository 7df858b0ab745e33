"""Builds, warms up and measures the training steps of one side in this process.

A side trains with flags of pretrain_gpt.py, as rank 0 of 8 whose other ranks are stand-ins (see stand_ins.py), or is
the plain PyTorch model of plain_model.py. Its routing is forced: balanced, or skewed towards this rank, and different
in every step. checks/steps.py runs sides one after another, and checks/side_workers.py provides their processes.

[Note: plain PyTorch] The plain side has the same layers, tokens, routed rows and experts as one rank, in bf16 with
weights and fused AdamW's states in bf16. It uses F.grouped_mm, F.scaled_dot_product_attention and nn.RMSNorm. Each
choice of an expert of another rank is replaced by a choice of one of this rank's experts, so that the experts receive
the rows that balanced ranks would send. Unlike this framework's sides, it neither moves rows between ranks nor has
fp32 gradients and master weights, so it has less work.

[Note: steady memory] The reserved bytes of a side are the peak of reserved memory during steps that follow the warm-up,
after the allocator's cache was emptied. Eager warm-up steps and the capture, which reserve more, are reported apart,
and so is the part of the reserved memory that belongs to graphs.
"""

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.shapes import CAPACITY, RANKS, ROUTINGS, Routing, Shape, Side, sides_of
from benchmarks.gpu.stand_ins import TABLES, Choices, ForcedRouting, join_stand_ins, shares_of_layers
from benchmarks.plain_model import PlainConfig, PlainGroupedMoE, PlainModel
from benchmarks.train_step import build_run
from megatron.core import parallel_state
from megatron.core.device import (
    cuda_memory_snapshot,
    default_device,
    mark_time,
    memory_bytes,
    prepare_device,
    release_cached_memory,
    seconds_between,
)
from megatron.core.distributed import DistributedDataParallel
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.graphs.tape import TapeGraphs
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.core.transformer.cuda_graphs import CudaGraphManager
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.paged_stash import Counter
from megatron.training import setup
from megatron.training.command_line.published import publish_run
from megatron.training.run import TrainingRun
from megatron.training.training import run_step

WARM_STEPS = 4  # two eager steps, a capture and a replay
SETTLING_STEPS = 1  # after the cache was emptied, not timed
MOST_ROWS = 0.95  # fraction of a buffer, so that no step is discarded


@dataclass(frozen=True)
class Case:
    """A shape combined with a routing."""

    name: str
    shape: Shape
    routing_name: str

    @property
    def routing(self) -> Routing:
        """Distribution of the rows."""
        return ROUTINGS[self.routing_name]

    @property
    def sides(self) -> dict[str, Side]:
        """Sides by name."""
        return sides_of(self.routing)

    def __str__(self) -> str:
        return f"{self.name}, {self.routing_name}"


@dataclass
class Stepper:
    """A side that is ready to train.

    step: trains one step. check: raises RuntimeError if steps are not what the side claims. counters: returns counts of
    the last step by name.
    """

    device: torch.device
    step: Callable[[], None]
    check: Callable[[], None] = lambda: None
    counters: Callable[[], dict[str, int]] = dict


@dataclass
class Steps:
    """Measured steps of a side. seconds: of each step, by round. memory: of the last round; counters: maxima."""

    seconds: list[list[float]] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def median(self) -> float:
        """Median seconds of a step."""
        return statistics.median(second for one in self.seconds for second in one)

    @property
    def spread(self) -> float:
        """Largest relative distance of a round's median from the median."""
        return max(abs(statistics.median(one) / self.median - 1) for one in self.seconds)


@contextmanager
def started_side(case: Case, side: Side) -> Iterator[Stepper]:
    """Builds a side and yields its steps. Afterwards all of its state can be freed (see `free_memory`)."""
    if not dist.is_initialized():
        join_stand_ins(RANKS)
    if side.flags is None:
        yield plain_stepper(case)
        return
    try:
        run, routing = build(case, side.flags)
        yield stepper_of(run, routing)
        for chunk in run.model:
            if isinstance(chunk, DistributedDataParallel):
                # Its hooks on parameters are held by autograd, which would keep parameters and gradients.
                chunk.release()
    finally:
        publish_run(None)
        parallel_state.destroy_model_parallel()
        destroy_num_microbatches_calculator()


def stepper_of(run: TrainingRun, routing: ForcedRouting) -> Stepper:
    """Returns the steps of a run. Each has a different routing."""

    def step() -> None:
        routing.advance()
        run_step(run)

    return Stepper(run.device, step, lambda: check_graph(run), lambda: counters_of(run))


def build(case: Case, flags: str) -> tuple[TrainingRun, ForcedRouting]:
    """Builds the run that pretrain_gpt.py would train, and the routing that its routers follow."""
    if not dist.is_initialized():
        join_stand_ins(RANKS)
    if default_device().type == "cpu":
        setup.graph_device = TapeGraphs
    run = build_run(*case.shape.flags.split(), *flags.split())
    routers = [layer.router for chunk in run.model for layer in chunk.modules() if isinstance(layer, MoELayer)]
    return run, ForcedRouting(routers, tables_of(case, run.device))


def check_graph(run: TrainingRun) -> None:
    """Raises RuntimeError if steps that should replay a graph do not, because a run would continue without it."""
    graph = run.steps.graph
    if isinstance(graph, FullCudaGraphWrapper | CudaGraphManager) and (graph.failure or graph.num_graphs == 0):
        raise RuntimeError(f"no graph was captured in {WARM_STEPS} steps: {graph.failure}")


def counters_of(run: TrainingRun) -> dict[str, int]:
    """Returns the number of graphs, and the stash's counts of recomputed tensors, host pages and discarded attempts."""
    graph = run.steps.graph
    found = {"graphs": graph.num_graphs} if isinstance(graph, FullCudaGraphWrapper | CudaGraphManager) else {}
    step = None if run.expert_memory is None else run.expert_memory.last_step
    if step is None or step.layout is None:
        return found
    return {
        **found,
        "recomputed": step.counters[Counter.DROPPED_GATE_UP],
        "host_pages": step.counters[Counter.SPILLED_PAGES],
        "discarded": step.num_discards,
    }


def tables_of(case: Case, device: torch.device) -> Tensor:
    """Returns the expert choices of all layers for each routing, which steps cycle through.

    The result is [TABLES, layers, T, K], int64, on the device, because a CPU would take 8 s for the largest shape.
    """
    shape, routing = case.shape, case.routing
    generator = torch.Generator(device).manual_seed(1)
    choices = Choices(shape.seq, shape.topk, shape.num_experts, num_own=shape.num_own, unevenness=routing.unevenness)
    most = MOST_ROWS * min(CAPACITY, RANKS * shape.num_own / shape.topk)
    turns = [
        shares_of_layers(shape.layers, mean=routing.mean, spread=routing.spread, most=most, generator=generator)
        for _ in range(TABLES)
    ]
    return torch.stack([torch.stack([choices.draw(share, generator) for share in shares]) for shares in turns])


def plain_stepper(case: Case) -> Stepper:
    """Builds the plain side; see [Note: plain PyTorch]."""
    shape, device = case.shape, default_device()
    prepare_device(device)
    config = PlainConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_heads=shape.heads,
        num_groups=shape.groups,
        head_width=shape.kv_channels,
        qk_norm=shape.has_qk_norm,
        num_experts=shape.num_own,
        num_scores=shape.num_experts,
        topk=shape.topk,
        ffn_hidden_size=shape.ffn,
        vocab_size=shape.vocab,
        grouped=True,
    )
    torch.manual_seed(1)
    with torch.device(device):
        model = PlainModel(config).to(torch.bfloat16 if "--bf16" in shape.extra else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    layers = [layer for layer in model.modules() if isinstance(layer, PlainGroupedMoE)]
    tables = tables_of(case, device) % shape.num_own
    turn = 0

    def step() -> None:
        nonlocal turn
        turn = (turn + 1) % len(tables)
        for layer, chosen in zip(layers, tables[turn], strict=True):
            layer.forced = chosen
        for _ in range(shape.microbatches):
            tokens = torch.randint(shape.vocab, (1, shape.seq + 1), device=device)
            loss = model(tokens[:, :-1], tokens[:, 1:])
            (loss / shape.microbatches).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return Stepper(device, step)


def warm_up(stepper: Stepper) -> dict[str, int]:
    """Runs the steps in which kernels are compiled and graphs are captured. Returns the memory they have used."""
    for _ in range(WARM_STEPS):
        stepper.step()
    stepper.check()
    memory = memory_bytes(stepper.device)
    release_cached_memory(stepper.device)
    reset_peaks(stepper.device)
    for _ in range(SETTLING_STEPS):
        stepper.step()
    return memory


def measured_rounds(stepper: Stepper, *, rounds: int, steps: int) -> Iterator[Steps]:
    """Yields the measurements so far after each round of steps.

    A step ends at the device's position when the host has finished the step.
    """
    found = Steps()
    for _ in range(rounds):
        marks = [mark_time(stepper.device)]
        for _ in range(steps):
            stepper.step()
            marks.append(mark_time(stepper.device))
            found.counters = most_of(found.counters, stepper.counters())
        found.seconds.append([seconds_between(*pair) for pair in zip(marks, marks[1:], strict=False)])
        found.memory = memory_bytes(stepper.device)
        yield found


def most_of(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """Returns the larger of two counts for each name."""
    return {name: max(one.get(name, 0), other.get(name, 0)) for name in [*one, *(set(other) - set(one))]}


def reset_peaks(device: torch.device) -> None:
    """Makes peaks of allocated and reserved memory start at the current values. Does nothing on a CPU."""
    if device.type != "cpu":
        torch.get_device_module(device).reset_peak_memory_stats(device)


def graph_bytes(device: torch.device) -> int:
    """Returns the reserved bytes that belong to the memory pools of graphs."""
    if device.type != "cuda":
        return 0
    segments: list[dict[str, Any]] = cuda_memory_snapshot()["segments"]
    return sum(one["total_size"] for one in segments if tuple(one["segment_pool_id"]) != (0, 0))


def free_memory(device: torch.device) -> int:
    """Frees the memory of a side whose references are gone. Returns the bytes that are still reserved on a GPU."""
    # A finished run is part of reference cycles.
    gc.collect()
    release_cached_memory(device)
    return memory_bytes(device).get("reserved", 0)
