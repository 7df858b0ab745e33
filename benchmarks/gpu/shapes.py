"""Defines the measurements of graph_step.py: layers similar to known models, reduced to fit, and the sides to compare,
as flags.
"""

from dataclasses import dataclass, replace

RANKS = 8  # ranks that share the experts; see [Note: stand-ins]
CAPACITY = 2.0  # c
PREFETCH = 1
HEADROOM = 1.1  # phi: pages over the average requirement of the routing
BASE = "eager dropless"
FACTOR = "--moe-expert-rank-capacity-factor"
STASH = f"--moe-paged-stash --moe-paged-stash-prefetch-layers {PREFETCH}"
DEVICE_PAGES = "--moe-paged-stash-buffer-size-factor-cuda"
HOST_PAGES = "--moe-paged-stash-buffer-size-factor-cpu"
GRAPH = "--cuda-graph-impl full_iteration --cuda-graph-warmup-steps 2"
SGD = "--optimizer sgd --sgd-momentum 0"  # no optimizer states, so that more layers fit


@dataclass(frozen=True)
class Routing:
    """Number of this rank's rows relative to balanced routing.

    mean, spread: over the layers. unevenness: imbalance among this rank's experts.
    """

    mean: float
    spread: float
    unevenness: float


ROUTINGS = {"balanced": Routing(1.0, 0.0, 0.0), "skewed": Routing(1.4, 0.3, 1.0)}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Layers of a model.

    num_experts: over all ranks. seq: tokens of a microbatch. extra: additional flags. at_once: number of sides that fit
    into the memory of one GPU at the same time.
    """

    hidden: int
    ffn: int
    topk: int
    num_experts: int
    layers: int
    heads: int
    groups: int
    seq: int
    microbatches: int
    kv_channels: int = 128
    extra: str = ""
    is_launch_bound: bool = False
    at_once: int = 8

    @property
    def num_own(self) -> int:
        """Number of experts of a rank."""
        return self.num_experts // RANKS

    @property
    def flags(self) -> str:
        """Flags of pretrain_gpt.py."""
        return f"""
            --num-layers {self.layers} --hidden-size {self.hidden} --num-attention-heads {self.heads}
            --group-query-attention --num-query-groups {self.groups} --kv-channels {self.kv_channels}
            --num-experts {self.num_experts} --moe-router-topk {self.topk} --moe-ffn-hidden-size {self.ffn}
            --seq-length {self.seq} --max-position-embeddings {self.seq} --micro-batch-size 1
            --global-batch-size {RANKS * self.microbatches} --expert-model-parallel-size {RANKS}
            --moe-token-dispatcher-type allgather {self.extra}
        """


_QWEN3 = Shape(
    hidden=2048,
    ffn=768,
    topk=8,
    num_experts=32,
    layers=12,
    heads=32,
    groups=4,
    seq=4096,
    microbatches=2,
    extra="--bf16 --qk-layernorm",
    at_once=5,
)
# Widths, head size and top-k are the models' values. Numbers of layers, experts and heads are reduced.
SHAPES = {
    "Qwen3-30B-A3B, short": replace(_QWEN3, seq=512, microbatches=4, at_once=8, is_launch_bound=True),
    "Qwen3-30B-A3B": _QWEN3,
    "DeepSeek-V3": Shape(
        hidden=7168,
        ffn=2048,
        topk=8,
        num_experts=16,
        layers=6,
        heads=16,
        groups=16,
        seq=2048,
        microbatches=2,
        extra=f"--bf16 --moe-shared-expert-intermediate-size 2048 --moe-router-score-function sigmoid {SGD}",
        at_once=5,
    ),
    "Mixtral-8x7B": Shape(
        hidden=4096,
        ffn=14336,
        topk=2,
        num_experts=8,
        layers=6,
        heads=32,
        groups=8,
        seq=2048,
        microbatches=2,
        extra=f"--bf16 {SGD}",
        at_once=5,
    ),
}
SMALL = {
    "small": Shape(
        hidden=32,
        ffn=32,
        topk=2,
        num_experts=16,
        layers=4,
        heads=2,
        groups=1,
        seq=64,
        microbatches=2,
        kv_channels=16,
        # To accumulate experts' gradients, the CPU counts rows on the host, which a tape cannot capture.
        extra="--vocab-size 256 --no-gradient-accumulation-fusion",
        at_once=5,
    )
}


@dataclass(frozen=True)
class Side:
    """One way to run a shape. flags: added to the shape's flags. phi: pages on the device over the live rows."""

    flags: str
    label: str
    phi: float | None = None

    def most_memory(self, shape: Shape, routing: Routing) -> float | None:
        """Returns the memory limit (phi + w c / S) relative to the bytes that dropless saves, or None without a stash.

        c is the capacity over the live rows.
        """
        if self.phi is None:
            return None
        return self.phi + (1 + PREFETCH) * CAPACITY / routing.mean / shape.layers


def sides_of(routing: Routing) -> dict[str, Side]:
    """Returns the sides by name, with the base first."""
    static = f"{FACTOR} {CAPACITY}"
    stash, graph = f"{static} {STASH}", f"{static} {GRAPH}"
    graph_stash = f"{stash} {GRAPH}"
    host = f"{graph_stash} {HOST_PAGES} {0.6 * routing.mean:g}"
    return {
        BASE: Side("", "dropless"),
        "eager static": Side(static, "static"),
        "eager static + stash": _stash(stash, "stash", phi=HEADROOM, mean=routing.mean),
        "graph": Side(graph, "graph"),
        "graph + stash": _stash(graph_stash, "graph stash", phi=HEADROOM, mean=routing.mean),
        "graph + stash, optimizer": _stash(
            f"{graph_stash} --optimizer-cuda-graph", "graph all", phi=HEADROOM, mean=routing.mean
        ),
        "graph + stash, spill": _stash(host, "graph spill", phi=0.7, mean=routing.mean),
        "graph + stash, rungs": _stash(graph_stash, "graph rungs", phi=0.6, mean=routing.mean),
    }


def _stash(flags: str, label: str, *, phi: float, mean: float) -> Side:
    # The flag is relative to balanced rows.
    return Side(f"{flags} {DEVICE_PAGES} {phi * mean:g}", label, phi)
