"""How long one kernel or one message takes on a device, by its figures; pure. Whole steps are step_time.py's."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from megatron.planner.traffic import RING_SHARES, Traffic
from megatron.training.compute.devices import Device

_GIGA, _TERA, _MICRO = 1e9, 1e12, 1e-6


class Unit(Enum):
    """The limit of a kernel's speed in addition to memory."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    MEMORY = "memory"


@dataclass(frozen=True)
class Kernel:
    """One operation on a device. kind: of the module that runs it, as activations are told apart. dtype: bf16, fp16,
    fp8 or fp32. flops: 2 for a multiply-add. num_bytes: read and written.
    """

    kind: str
    unit: Unit
    dtype: str
    flops: float
    num_bytes: float


# How often each kernel runs.
Kernels = Counter[Kernel]


def kernel_seconds(kernel: Kernel, device: Device) -> float:
    """The roofline (Williams et al., 2009): the longer of its arithmetic and its bytes, and no less than a launch.

    Raises ValueError for products in a type that the device does not compute in.
    """
    moving = kernel.num_bytes / (device.memory_gb_s * _GIGA * device.attainable_memory)
    if kernel.unit is Unit.MEMORY:
        return max(moving, device.kernel_us * _MICRO)
    share = device.attainable_matmul if kernel.unit is Unit.MATMUL else device.attainable_attention
    computing = kernel.flops / (device.tflops(kernel.dtype) * _TERA * share)
    return max(computing, moving, device.kernel_us * _MICRO)


def seconds_by_kind(kernels: Kernels, device: Device) -> dict[str, float]:
    """Returns the time of all kernels run one after the other, by the kind of module."""
    found: dict[str, float] = {}
    for kernel, count in kernels.items():
        found[kernel.kind] = found.get(kernel.kind, 0.0) + count * kernel_seconds(kernel, device)
    return found


def compute_seconds(kernels: Kernels, device: Device) -> float:
    """Returns the time of all kernels run one after the other."""
    return sum(seconds_by_kind(kernels, device).values())


def ranks_in_node(ranks: Sequence[int], devices_per_node: int) -> int:
    """Returns the most ranks of a group that share a node; nodes are of consecutive ranks."""
    return max(Counter(rank // devices_per_node for rank in ranks).values())


def message_seconds(traffic: Traffic, device: Device, *, in_node: int) -> float:
    """Returns the time of all messages of the entry, one after the other; in_node: ranks of the group that share a
    node.

    Collectives run as rings through nodes, one for each rank that a node has of the group, so that a node sends with as
    many network ports; an all-to-all sends to each rank directly. Latencies are those of trees, log2 of the ranks.
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
