"""Describes kernels and messages of a training step as data, and estimates their time on a device.

All functions are pure. recorders.py records kernels and messages, and step_time.py estimates whole steps.

[Note: payload] num_bytes counts a collective's payload on this rank, the larger of its input and its output: the
tensor of an all-reduce, a broadcast, a send or a receive, the result of an all-gather, the input of a reduce-scatter,
and the input of an all-to-all, including this rank's part for itself. The bytes that cross a link depend on the
algorithm (see link_bytes).
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from megatron.core.block_scaled.format import BlockFormat
from megatron.training.compute.devices import Device

# Phases of a step.
FORWARD, BACKWARD, PIPELINE, GRADS, PARAMS, OPTIMIZER, AGREEMENT, STATISTICS, OTHER = (
    "forward",
    "backward",
    "pipeline",
    "grad reduce",
    "param gather",
    "optimizer",
    "agreement",
    "statistics",
    "other",
)
EXPERTS, OUTPUT, REST = "experts", "output and loss", "norms and residuals"
# EMBEDDING also names a part of a model chunk, as do END and "layer N".
EMBEDDING, END = "embedding", "end"
# The first pattern that matches a module's name determines the kind of its kernels and saved tensors.
_KINDS = (
    (re.compile(r"\b(self|cross)_attention\b"), "attention"),
    (re.compile(r"\bshared_experts\b"), "shared experts"),
    (re.compile(r"\bexperts\b"), EXPERTS),
    (re.compile(r"\brouter\b"), "router"),
    (re.compile(r"\bmlp\b"), "feed-forward"),
    (re.compile(r"\bembedding\b"), EMBEDDING),
    (re.compile(r"\boutput_layer\b"), OUTPUT),
)
_LAYER = re.compile(r"\bdecoder\.layers\.(\d+)\b")
# In a ring of n ranks, each rank sends and receives share * (n - 1) / n of the payload.
RING_SHARES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}
_GIGA, _TERA, _MICRO = 1e9, 1e12, 1e-6
# Names of devices whose tensor cores scale blocks of 32 elements (sm_100), and of devices that have 8-bit products, but
# none with scales for 128 elements. See docs/block_scaled.md.
_SCALE_BLOCKS = re.compile(r"\bG?B\d00\b")
_DECODE_BLOCKS = re.compile(r"^(L\d|MI\d)")


class Unit(Enum):
    """The peak rate that limits a kernel, in addition to memory bandwidth."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    MEMORY = "memory"


@dataclass(frozen=True)
class Kernel:
    """One kernel on a device.

    kind: kind of the module that launches it (see kind_of_module). dtype: bf16, fp16, fp32, fp8 (with a scale for 128
    elements) or mxfp8 (for 32). flops: 2 for each multiply-add. num_bytes: bytes read and written.
    """

    kind: str
    unit: Unit
    dtype: str
    flops: float
    num_bytes: float


# Number of launches of each kernel.
Kernels = Counter[Kernel]


@dataclass(frozen=True)
class ChunkWork:
    """Kernels of one microbatch in one model chunk.

    recompute: forward kernels repeated in backward. expert_layers: number of layers with experts. weights: the part of
    backward that a schedule with weight passes leaves to them; empty if it was not measured.
    """

    forward: Kernels
    backward: Kernels
    recompute: Kernels = field(default_factory=Kernels)
    expert_layers: int = 0
    weights: Kernels = field(default_factory=Kernels)

    @property
    def split_backward(self) -> Kernels:
        """Kernels of a backward with a later weight pass, without those that are repeated."""
        found = Kernels(self.backward)
        # Counts may be negative, as in PartWork, so that the difference of the times is exact.
        found.subtract(self.weights)
        return found


@dataclass(frozen=True)
class Traffic:
    """Messages of one kind that a rank sends in a training step, over all microbatches.

    group: name of the group, as in ProcessGroupCollection or one of etp, edp, stage and world. operation: all-reduce,
    all-gather, reduce-scatter, all-to-all, broadcast, send or receive. phase: one of the phases of a step above.
    count: number of messages. num_bytes: their total payload (see [Note: payload]).
    """

    group: str
    group_size: int
    operation: str
    phase: str
    count: int
    num_bytes: int


@dataclass(frozen=True)
class StageLoad:
    """Work of one rank of a stage in a step, empty by default.

    chunks: kernels of a microbatch in each model chunk. traffic: all messages of the rank. Messages of the forward and
    backward phases are assumed to be spread evenly over the passes. update: the optimizer's kernels.
    """

    chunks: tuple[ChunkWork, ...] = ()
    traffic: tuple[Traffic, ...] = ()
    update: Kernels = field(default_factory=Kernels)


def kind_of_module(name: str) -> str:
    """Maps a module's name to its kind, by which kernels and activations are grouped."""
    return next((kind for pattern, kind in _KINDS if pattern.search(name)), REST)


def part_of_name(name: str) -> str | None:
    """Returns the part that contains the module or tensor with this name, or None for names outside all parts."""
    layer = _LAYER.search(name)
    if layer is not None:
        return f"layer {layer[1]}"
    if re.search(r"\bembedding\b", name):
        return EMBEDDING
    return END if re.search(r"\b(mtp|final_layernorm|output_layer)\b", name) else None


def part_at(name: str, entered: int, *, layers: Sequence[str]) -> str:
    """Returns the part that is active while the module `name` runs and after `entered` layers have started.

    name: "" outside all modules. layers: the parts of all layers, in order.
    """
    part = part_of_name(name)
    if part is None:
        return layers[entered] if entered < len(layers) else END
    # Multi-token prediction embeds tokens after the layers.
    return END if part == EMBEDDING and entered else part


def kernel_seconds(kernel: Kernel, device: Device) -> float:
    """Returns the roofline time of a kernel (Williams et al., 2009), in seconds.

    This is the longest of the kernel's arithmetic, its memory traffic and a launch. Raises ValueError for a matmul
    dtype that the device does not support.
    """
    moving = kernel.num_bytes / (device.memory_gb_s * _GIGA * device.attainable_memory)
    if kernel.unit is Unit.MEMORY:
        return max(moving, device.kernel_us * _MICRO)
    share = device.attainable_matmul if kernel.unit is Unit.MATMUL else device.attainable_attention
    computing = kernel.flops / (device.tflops(multiplied_dtype(kernel.dtype, device)) * _TERA * share)
    return max(computing, moving, device.kernel_us * _MICRO)


def scaled_dtype(form: BlockFormat) -> str:
    """Returns the dtype of kernels that multiply block-scaled rows, as in Kernel."""
    return "mxfp8" if form.block == 32 else "fp8"


def multiplied_dtype(dtype: str, device: Device) -> str:
    """Returns the dtype in which a device multiplies operands of a kernel's dtype.

    Devices that cannot multiply blocks in 8 bits decode them to bf16 first.
    """
    if dtype == "mxfp8":
        return "fp8" if _SCALE_BLOCKS.search(device.name) else "bf16"
    if dtype == "fp8" and (device.fp8_tflops is None or _DECODE_BLOCKS.search(device.name)):
        return "bf16"
    return dtype


def seconds_by_kind(kernels: Kernels, device: Device) -> dict[str, float]:
    """Returns the time of all kernels, run one after the other, in seconds by kind of module."""
    found: dict[str, float] = {}
    for kernel, count in kernels.items():
        found[kernel.kind] = found.get(kernel.kind, 0.0) + count * kernel_seconds(kernel, device)
    return found


def compute_seconds(kernels: Kernels, device: Device) -> float:
    """Returns the time of all kernels, run one after the other, in seconds."""
    return sum(seconds_by_kind(kernels, device).values())


def merged(messages: Iterable[Traffic]) -> tuple[Traffic, ...]:
    """Merges messages into one entry for each group, operation and phase, sorted by these names."""
    found: dict[tuple[str, int, str, str], Traffic] = {}
    for one in messages:
        key = (one.group, one.group_size, one.operation, one.phase)
        known = found.get(key)
        count, num_bytes = (0, 0) if known is None else (known.count, known.num_bytes)
        found[key] = replace(one, count=count + one.count, num_bytes=num_bytes + one.num_bytes)
    return tuple(found[key] for key in sorted(found))


def link_bytes(traffic: Traffic) -> float:
    """Returns the bytes that leave this rank if collectives run as rings (Patarasu and Yuan, 2009).

    With n ranks, this is 2 (n - 1) / n of the payload of an all-reduce, and (n - 1) / n of the payload of an
    all-gather, reduce-scatter or all-to-all. The same number of bytes arrives. A send, a receive or a broadcast moves
    its payload one way.
    """
    share = RING_SHARES.get(traffic.operation)
    if share is None:
        return float(traffic.num_bytes)
    return traffic.num_bytes * share * (traffic.group_size - 1) / traffic.group_size


def ranks_in_node(ranks: Sequence[int], devices_per_node: int) -> int:
    """Returns the largest number of a group's ranks on one node. Nodes hold consecutive ranks."""
    return max(Counter(rank // devices_per_node for rank in ranks).values())


def message_seconds(traffic: Traffic, device: Device, *, in_node: int) -> float:
    """Returns the time of all messages in a Traffic entry, sent one after the other, in seconds.

    in_node: number of the group's ranks on one node. A collective runs one ring across nodes for each of these ranks,
    so that a node sends through that many network ports. An all-to-all sends to each rank directly. Latency grows with
    log2 of the number of ranks, as in a tree.
    """
    size = traffic.group_size
    if size < 2 or not traffic.count:
        return 0.0
    between = in_node < size
    latency = (device.network_latency_us if between else device.node_latency_us) * _MICRO
    node, network = (gb * _GIGA * device.attainable_link for gb in (device.node_gb_s, device.network_gb_s))
    if traffic.operation not in RING_SHARES:
        rate = network if between else node
        return traffic.num_bytes / rate + traffic.count * latency
    moved = traffic.num_bytes * RING_SHARES[traffic.operation] / size
    if traffic.operation == "all-to-all":
        seconds = max(moved * (in_node - 1) / node, moved * (size - in_node) / network)
    else:
        seconds = moved * (size - 1) / (min(node, in_node * network) if between else node)
    return seconds + traffic.count * math.ceil(math.log2(size)) * latency
