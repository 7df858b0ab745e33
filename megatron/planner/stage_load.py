"""How long stages of a layout take, from the work of single layers: for ranking, and for step_time.py; pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.planner.layer_facts import ModelFacts
from megatron.planner.layout_space import Sharding
from megatron.planner.model_work import ModelWork
from megatron.planner.part_work import PartWork, together
from megatron.planner.rates import Kernels, message_seconds, seconds_by_kind
from megatron.planner.stage_memory import Shape, chunk_buffers, stage_chunks
from megatron.planner.step_time import (
    BACKWARD,
    FORWARD,
    GRADS,
    PARAMS,
    StageLoad,
)
from megatron.planner.traffic import Traffic, merged
from megatron.training.compute.devices import Device


@dataclass(frozen=True)
class PassSeconds:
    """Times of one microbatch. exposed: messages that its passes wait for."""

    forward: float
    backward: float
    exposed: float

    @property
    def total(self) -> float:
        """The sum of all fields."""
        return self.forward + self.backward + self.exposed


def seconds_of(
    work: PartWork, device: Device, *, in_node: Mapping[str, int], behind: Mapping[str, tuple[str, ...]]
) -> PassSeconds:
    """One kernel and one message after the other, but for what kinds of kernels hide; see Overlap."""
    chunk = work.chunk()
    passes = {FORWARD: chunk.forward, BACKWARD: chunk.backward + chunk.recompute}
    computed = {phase: seconds_by_kind(kernels, device) for phase, kernels in passes.items()}
    sent: dict[tuple[str, str], float] = {}
    for one in work.traffic:
        seconds = message_seconds(one, device, in_node=in_node.get(one.group, one.group_size))
        sent[one.group, one.phase] = sent.get((one.group, one.phase), 0.0) + seconds
    exposed = sum(
        max(0.0, seconds - sum(computed[phase].get(kind, 0.0) for kind in behind.get(group, ())))
        for (group, phase), seconds in sent.items()
    )
    return PassSeconds(sum(computed[FORWARD].values()), sum(computed[BACKWARD].values()), exposed)


def in_node_ranks(shape: Shape, devices_per_node: int) -> dict[str, int]:
    """Returns by group how many of its ranks share a node, in the order of ranks that runs have."""
    tp, etp = shape.tensor, shape.expert_tensor
    groups = {
        "tp": (1, tp),
        "cp": (tp, shape.context),
        "tp_cp": (1, tp * shape.context),
        "dp": (tp * shape.context, shape.dense_ranks // shape.context),
        "dp_cp": (tp, shape.dense_ranks),
        "pp": (shape.world_size // shape.stages, shape.stages),
        "etp": (1, etp),
        "ep": (etp, shape.expert),
        "tp_ep": (1, etp * shape.expert),
        "edp": (etp * shape.expert, shape.expert_ranks),
        "embd": (shape.world_size // shape.stages * max(1, shape.stages - 1), 2),
        "stage": (1, shape.world_size // shape.stages),
        "world": (1, shape.world_size),
    }
    return {name: max(1, min(size, devices_per_node // stride)) for name, (stride, size) in groups.items()}


def quick_seconds(
    stages: Sequence[PassSeconds],
    shape: Shape,
    *,
    reduced: float,
    gathered: float,
    updated: float,
    sharding: Sharding,
) -> float:
    """Estimates a step: microbatches through the slowest stage, and each stage once while the pipeline fills.

    stages: of all layers of each, one microbatch. reduced, gathered, updated: seconds of the slowest rank's gradients,
    parameters and update; the first two overlap with the last backward and the first forward.
    """
    slowest = max(stages, key=lambda one: one.total)
    filling = (sum(one.total for one in stages) - slowest.total) / shape.chunks
    times = shape.num_microbatches if sharding is Sharding.GRADIENTS else 1
    late = max(0.0, reduced - times * slowest.backward) + max(0.0, gathered - slowest.forward)
    return shape.num_microbatches * slowest.total + filling + late + updated


def data_traffic(weights: Mapping[bool, tuple[int, int]], shape: Shape, *, sharding: Sharding) -> tuple[Traffic, ...]:
    """Gradients and parameters of a step. weights: of experts and of the rest, bytes of parameters and gradients."""
    found = []
    times = shape.num_microbatches if sharding is Sharding.GRADIENTS else 1
    for is_expert, (params, grads) in weights.items():
        name, size = ("edp", shape.expert_ranks) if is_expert else ("dp_cp", shape.dense_ranks)
        if size < 2:
            continue
        if sharding is Sharding.NOTHING:
            found.append(Traffic(name, size, "all-reduce", GRADS, times, grads))
            continue
        found.append(Traffic(name, size, "reduce-scatter", GRADS, times, times * grads))
        found.append(Traffic(name, size, "all-gather", PARAMS, 1, params))
    return tuple(found)


def data_messages(
    facts: ModelFacts, shape: Shape, *, stage: int, ddp_config: DistributedDataParallelConfig
) -> tuple[Traffic, ...]:
    """Gradients and parameters of a step of a stage, bucket by bucket."""
    found = []
    times = shape.num_microbatches if ddp_config.has_bucket_lifetime_grads else 1
    for number, parts in enumerate(stage_chunks(facts, shape, stage=stage)):
        for kind, layout in chunk_buffers(parts, shape, is_first=number + stage == 0, ddp_config=ddp_config):
            if layout.num_shards < 2:
                continue
            name = "edp" if kind.is_expert else "dp_cp" if shape.context > 1 else "dp"
            group, count = (name, layout.num_shards), len(layout.buckets)
            grads = layout.numel * kind.grad_dtype.itemsize
            if not ddp_config.use_distributed_optimizer:
                found.append(Traffic(*group, "all-reduce", GRADS, times * count, times * grads))
                continue
            found.append(Traffic(*group, "reduce-scatter", GRADS, times * count, times * grads))
            found.append(Traffic(*group, "all-gather", PARAMS, count, layout.numel * kind.param_dtype.itemsize))
    return merged(found)


def stage_load(
    shape: Shape,
    work: ModelWork,
    *,
    stage: int,
    hidden_bytes: int,
    own: Sequence[Traffic],
    state_bytes: float,
) -> StageLoad:
    """Returns the work of a stage's rank in a step. hidden_bytes: sent to the next stage. own: gradients and
    parameters.

    state_bytes: of what its optimizer steps.
    """
    chunks, traffic = [], [*own, *work.told]
    times, last = shape.num_microbatches, len(shape.layers) - 1
    if stage in (0, shape.stages - 1):
        traffic += [replace(one, group="embd", group_size=2) for one in work.tied]
    for number in range(stage, len(shape.layers), shape.stages):
        parts = [work.embedding] if number == 0 else []
        parts += [work.layers[kind] for kind in shape.layers[number]]
        parts += [work.end] if number == last else []
        whole = together(parts)
        chunks.append(whole.chunk())
        traffic += whole.times(times).traffic
        if number < last and shape.stages > 1:
            traffic.append(Traffic("pp", shape.stages, "send", FORWARD, times, times * hidden_bytes))
        if number > 0 and shape.stages > 1:
            traffic.append(Traffic("pp", shape.stages, "send", BACKWARD, times, times * hidden_bytes))
    share = state_bytes / max(1, work.state_bytes)
    update = Kernels()
    for kernel, count in work.update.items():
        update[replace(kernel, flops=kernel.flops * share, num_bytes=kernel.num_bytes * share)] += count
    return StageLoad(tuple(chunks), merged(traffic), update)
