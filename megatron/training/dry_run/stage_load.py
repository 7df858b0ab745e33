"""How long stages of a layout take, from the work of single layers: for ranking, and for step_time.py; pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron.training.device_table import Device
from megatron.training.dry_run.layer_facts import LayerKind
from megatron.training.dry_run.layer_work import PartWork
from megatron.training.dry_run.layout_space import Sharding
from megatron.training.dry_run.rates import Kernel, Kernels, Unit, compute_seconds, message_seconds
from megatron.training.dry_run.stage_memory import Shape
from megatron.training.dry_run.step_time import (
    BACKWARD,
    FORWARD,
    GRADS,
    OPTIMIZER,
    PARAMS,
    ChunkWork,
    Overlap,
    StageLoad,
)
from megatron.training.dry_run.traffic import Traffic, merged


@dataclass(frozen=True)
class Works:
    """Of one microbatch on a rank, by what a chunk is made of."""

    layers: Mapping[LayerKind, PartWork]
    end: PartWork


@dataclass(frozen=True)
class PassSeconds:
    """Of a microbatch. exposed: messages that its passes wait for."""

    forward: float
    backward: float
    exposed: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.forward + self.backward + self.exposed


def seconds_of(work: PartWork, device: Device, *, in_node: Mapping[str, int]) -> PassSeconds:
    """One kernel and one message after the other."""
    chunk = work.chunk
    messages = sum(message_seconds(one, device, in_node=in_node.get(one.group, 1)) for one in work.traffic)
    backward = compute_seconds(chunk.backward, device) + compute_seconds(chunk.recompute, device)
    return PassSeconds(compute_seconds(chunk.forward, device), backward, messages)


def in_node_ranks(shape: Shape, devices_per_node: int) -> dict[str, int]:
    """By group, how many of its ranks share a node, in the order of ranks that runs have."""
    tp, etp = shape.tensor, shape.expert_tensor
    groups = {
        "tp": (1, tp),
        "cp": (tp, shape.context),
        "dp_cp": (tp, shape.dense_ranks),
        "pp": (shape.world_size // shape.stages, shape.stages),
        "etp": (1, etp),
        "ep": (etp, shape.expert),
        "edp": (etp * shape.expert, shape.expert_ranks),
    }
    return {name: max(1, min(size, devices_per_node // stride)) for name, (stride, size) in groups.items()}


def quick_seconds(
    stages: Sequence[PassSeconds],
    shape: Shape,
    *,
    reduced: float,
    gathered: float,
    updated: float,
    sharding: Sharding | None,
) -> float:
    """About a step's seconds: microbatches through the slowest stage, and each stage once while the pipeline fills.

    stages: of all layers of each, one microbatch. reduced, gathered, updated: seconds of the slowest rank's gradients,
    parameters and update; the first two beside the last backward and the first forward.
    """
    slowest = max(stages, key=lambda one: one.total)
    filling = (sum(one.total for one in stages) - slowest.total) / shape.chunks
    times = shape.num_microbatches if sharding is Sharding.GRADIENTS else 1
    late = max(0.0, reduced - times * slowest.backward) + max(0.0, gathered - slowest.forward)
    return shape.num_microbatches * slowest.total + filling + late + updated


def data_traffic(
    weights: Mapping[bool, tuple[int, int]], shape: Shape, *, sharding: Sharding | None
) -> tuple[Traffic, ...]:
    """Gradients and parameters of a step. weights: of experts and of the rest, bytes of parameters and gradients."""
    found = []
    times = shape.num_microbatches if sharding is Sharding.GRADIENTS else 1
    for is_expert, (params, grads) in weights.items():
        name, size = ("edp", shape.expert_ranks) if is_expert else ("dp_cp", shape.dense_ranks)
        if size < 2:
            continue
        if sharding in (None, Sharding.NOTHING):
            found.append(Traffic(name, size, "all-reduce", GRADS, times, grads))
            continue
        found.append(Traffic(name, size, "reduce-scatter", GRADS, times, times * grads))
        found.append(Traffic(name, size, "all-gather", PARAMS, 1, params))
    return tuple(found)


def stage_load(
    shape: Shape, works: Works, *, stage: int, hidden_bytes: int, own: Sequence[Traffic], optimizer_bytes: float
) -> StageLoad:
    """What a rank of a stage does in a step. hidden_bytes: that it sends to the next. own: gradients and parameters."""
    chunks, traffic = [], list(own)
    times = shape.num_microbatches
    for number in range(stage, len(shape.layers), shape.stages):
        parts = [works.layers[kind] for kind in shape.layers[number]]
        parts += [works.end] if number == len(shape.layers) - 1 else []
        chunks.append(_together(parts))
        for part in parts:
            traffic += [replace(one, count=one.count * times, num_bytes=one.num_bytes * times) for one in part.traffic]
        if number < len(shape.layers) - 1 and shape.stages > 1:
            traffic.append(Traffic("pp", shape.stages, "send", FORWARD, times, times * hidden_bytes))
        if number > 0 and shape.stages > 1:
            traffic.append(Traffic("pp", shape.stages, "send", BACKWARD, times, times * hidden_bytes))
    update: Kernels = Counter({Kernel(OPTIMIZER, Unit.MEMORY, "fp32", 0.0, optimizer_bytes): 1})
    return StageLoad(tuple(chunks), merged(traffic), update)


def overlap_of(sharding: Sharding | None) -> Overlap:
    """What the flags of layout_space.py let run beside computation."""
    shares = sharding not in (None, Sharding.NOTHING)
    return Overlap(gradients=shares, parameters=shares, in_every_pass=sharding is Sharding.GRADIENTS)


def _together(parts: Sequence[PartWork]) -> ChunkWork:
    forward: Kernels = Counter()
    backward: Kernels = Counter()
    again: Kernels = Counter()
    for part in parts:
        forward.update(part.chunk.forward)
        backward.update(part.chunk.backward)
        again.update(part.chunk.recompute)
    return ChunkWork(forward, backward, again)
