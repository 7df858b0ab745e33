"""Defines what training steps are measured: shapes of models, the routing of their rows, and the sides to compare.

Sides are flags of pretrain_gpt.py, except for the plain PyTorch model. Measures nothing.
"""

from dataclasses import dataclass, replace

RANKS = 8  # ranks that share the experts; see [Note: stand-ins]
CAPACITY = 2.0  # c
PREFETCH = 1
HEADROOM = 1.1  # pages over the average requirement of the routing
FACTOR = "--moe-expert-rank-capacity-factor"
STASH = f"--moe-paged-stash --moe-paged-stash-prefetch-layers {PREFETCH}"
# Explicit, because the default depends on the device.
IN_PAGES, IN_COPIES = "--moe-paged-stash-compute pages", "--moe-paged-stash-compute copies"
DEVICE_PAGES = "--moe-paged-stash-buffer-size-factor-cuda"
HOST_PAGES = "--moe-paged-stash-buffer-size-factor-cpu"
GRAPH = "--cuda-graph-impl full_iteration --cuda-graph-warmup-steps 2"
LOCAL_GRAPHS = "--cuda-graph-impl local --cuda-graph-warmup-steps 2"
SGD = "--optimizer sgd --sgd-momentum 0"  # no optimizer states, so that more layers fit


@dataclass(frozen=True)
class Routing:
    """Number of this rank's rows relative to balanced routing.

    mean, spread: over the layers. unevenness: imbalance among this rank's experts.
    """

    mean: float
    spread: float
    unevenness: float


BALANCED = "balanced"
ROUTINGS = {BALANCED: Routing(1.0, 0.0, 0.0), "skewed": Routing(1.4, 0.3, 1.0)}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Layers of a model.

    num_experts: over all ranks. seq: tokens of a microbatch. has_qk_norm: whether queries and keys are normalized.
    extra: additional flags.
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
    vocab: int = 8192
    has_qk_norm: bool = False
    extra: str = ""

    @property
    def num_own(self) -> int:
        """Number of experts of a rank."""
        return self.num_experts // RANKS

    @property
    def tokens(self) -> int:
        """Tokens of one rank in a step."""
        return self.seq * self.microbatches

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of a row."""
        return 2 if "--bf16" in self.extra else 4

    @property
    def flags(self) -> str:
        """Flags of pretrain_gpt.py."""
        return f"""
            --num-layers {self.layers} --hidden-size {self.hidden} --num-attention-heads {self.heads}
            --group-query-attention --num-query-groups {self.groups} --kv-channels {self.kv_channels}
            --num-experts {self.num_experts} --moe-router-topk {self.topk} --moe-ffn-hidden-size {self.ffn}
            --seq-length {self.seq} --max-position-embeddings {self.seq} --micro-batch-size 1
            --global-batch-size {RANKS * self.microbatches} --expert-model-parallel-size {RANKS}
            --moe-token-dispatcher-type allgather --vocab-size {self.vocab}
            {"--qk-layernorm" if self.has_qk_norm else ""} {self.extra}
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
    has_qk_norm=True,
    extra="--bf16",
)
# Widths, head size and top-k are the models' values. Layers, experts, heads and vocabulary are reduced, except in the
# shape of one rank, which is configs/qwen3-30b-a3b.yaml.
SHAPES = {
    "Qwen3-30B-A3B, short": replace(_QWEN3, seq=512, microbatches=4),
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
    ),
    "Qwen3-30B-A3B, one rank of EP 8": replace(
        _QWEN3,
        layers=48,
        num_experts=128,
        vocab=151_936,
        extra="--bf16 --rotary-base 1000000 --norm-epsilon 1e-6",
    ),
}
SMALL = Shape(
    hidden=32,
    ffn=32,
    topk=2,
    num_experts=16,
    layers=2,
    heads=2,
    groups=1,
    seq=64,
    microbatches=2,
    kv_channels=16,
    vocab=256,
    has_qk_norm=True,
    # To accumulate experts' gradients, the CPU counts rows on the host, which a tape cannot capture.
    extra="--no-gradient-accumulation-fusion",
)


@dataclass(frozen=True)
class Side:
    """One way to run a shape. flags: added to the shape's flags, or None for the plain PyTorch model."""

    flags: str | None

    @property
    def is_plain(self) -> bool:
        """Whether the side is the plain PyTorch model."""
        return self.flags is None

    @property
    def has_static_rows(self) -> bool:
        """Whether rows are in buffers of a fixed size."""
        return FACTOR in (self.flags or "")

    @property
    def has_stash(self) -> bool:
        """Whether rows wait for backward in pages."""
        return STASH in (self.flags or "")

    @property
    def computes_in_pages(self) -> bool:
        """Whether experts compute in the pages of a stash, so that rows are not copied."""
        return IN_PAGES in (self.flags or "")


PLAIN, DROPLESS, STATIC, GRAPHED = "plain PyTorch", "eager dropless", "eager static", "graph"
HEADLINE, PAGED = "graph + stash, optimizer", "graph + stash, pages"


def sides_of(routing: Routing) -> dict[str, Side]:
    """Returns the sides by name. Those with a stash copy rows into pages, unless their name ends in ", pages"."""
    static = f"{FACTOR} {CAPACITY}"
    stash, graph = f"{static} {STASH} {IN_COPIES}", f"{static} {GRAPH}"
    paged, graph_stash = f"{static} {STASH} {IN_PAGES}", f"{stash} {GRAPH}"

    def pages(share: float) -> str:
        # The flag is relative to balanced rows.
        return f"{DEVICE_PAGES} {share * routing.mean:g}"

    return {
        PLAIN: Side(None),
        DROPLESS: Side(""),
        STATIC: Side(static),
        "eager static + stash": Side(f"{stash} {pages(HEADROOM)}"),
        "eager static + stash, pages": Side(f"{paged} {pages(HEADROOM)}"),
        "local graphs": Side(f"{static} {LOCAL_GRAPHS}"),
        GRAPHED: Side(graph),
        "graph + stash": Side(f"{graph_stash} {pages(HEADROOM)}"),
        PAGED: Side(f"{paged} {GRAPH} {pages(HEADROOM)}"),
        HEADLINE: Side(f"{graph_stash} --optimizer-cuda-graph {pages(HEADROOM)}"),
        "graph + stash, spill": Side(f"{graph_stash} {pages(0.7)} {HOST_PAGES} {0.6 * routing.mean:g}"),
        "graph + stash, 60% of pages": Side(f"{graph_stash} {pages(0.6)}"),
    }
