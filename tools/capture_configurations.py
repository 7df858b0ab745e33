"""Lists the configurations of the table in docs/cuda_graphs.md with their expected results.

Each model is as small as possible. Used by write_capture_table.py and by the test that checks every configuration.
megatron/core/graphs/safety.py decides what a graph can capture.
"""

from dataclasses import dataclass
from typing import Any

# Flag names without dashes. Values: a number, a word, a list of words, True for a flag without a value, None if absent.
Flags = dict[str, Any]

DENSE: Flags = {
    "mock-data": True,
    "tokenizer-type": "NullTokenizer",
    "vocab-size": 63,
    "seq-length": 16,
    "max-position-embeddings": 16,
    "micro-batch-size": 1,
    "train-iters": 8,
    "lr": 0.01,
    "eval-iters": 0,
    "num-workers": 0,
    "num-layers": 2,
    "hidden-size": 16,
    "num-attention-heads": 4,
    "hidden-dropout": 0.0,
    "attention-dropout": 0.0,
}
LLAMA: Flags = DENSE | {
    "group-query-attention": True,
    "num-query-groups": 2,
    "normalization": "RMSNorm",
    "position-embedding-type": "rope",
    "swiglu": True,
    "disable-bias-linear": True,
    "untie-embeddings-and-output-weights": True,
}
LATENT: Flags = {
    "position-embedding-type": "rope",
    "multi-latent-attention": True,
    "qk-layernorm": True,
    "q-lora-rank": 8,
    "kv-lora-rank": 8,
    "qk-head-dim": 4,
    "qk-pos-emb-head-dim": 2,
    "v-head-dim": 4,
    "rotary-scaling-factor": 4,
}
MOE: Flags = LLAMA | {
    "num-experts": 4,
    "moe-router-topk": 2,
    "moe-ffn-hidden-size": 16,
    "moe-grouped-gemm": True,
    "moe-aux-loss-coeff": 0.01,
}

DROPOUT: Flags = {"hidden-dropout": 0.1, "attention-dropout": 0.1}
EVERY_LAYER: Flags = {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
PARTS: Flags = {
    "recompute-granularity": "selective",
    "recompute-modules": ["core_attn", "layernorm", "shared_experts"],
}
PACKED: Flags = {
    "reset-position-ids": True,
    "reset-attention-mask": True,
    "no-create-attention-mask-in-dataloader": True,
}
SHARDED: Flags = {"use-distributed-optimizer": True, "overlap-grad-reduce": True, "overlap-param-gather": True}
TENSORS: Flags = {"tensor-model-parallel-size": 2, "sequence-parallel": True}
STAGES: Flags = {"pipeline-model-parallel-size": 2}
SEQUENCES: Flags = {"context-parallel-size": 2}
UPDATE: Flags = {"optimizer-cuda-graph": True}
STATIC: Flags = {"moe-expert-rank-capacity-factor": 2}
STASH: Flags = STATIC | {"moe-paged-stash": True}
CAPACITY: Flags = {"moe-expert-capacity-factor": 1.5, "moe-pad-expert-input-to-capacity": True}
EP: Flags = {"expert-model-parallel-size": 2}
ALLGATHER: Flags = EP | {"moe-token-dispatcher-type": "allgather"}
ALLTOALL: Flags = EP | {"moe-token-dispatcher-type": "alltoall"}
TURNS: Flags = {"overlap-moe-expert-parallel-comm": True, "delay-wgrad-compute": True}
SHARED: Flags = {"moe-shared-expert-intermediate-size": 16}
ROUTER: Flags = {
    "moe-router-load-balancing-type": ["aux_loss", "global_aux_loss"],
    "moe-aux-loss-coeff": [0.01, 0.01],
    "moe-z-loss-coeff": 0.001,
    "moe-router-score-function": "sigmoid",
    "moe-router-enable-expert-bias": True,
}
JITTER: Flags = {"moe-input-jitter-eps": 0.1}
# The combined features of the two models, with sliding-window attention or dense MLPs in some layers.
GPT_OSS: Flags = {
    "disable-bias-linear": None,
    "swiglu": None,
    "quick-geglu": True,
    "activation-func-clamp-value": 0.5,
    "glu-linear-offset": 1.0,
    "softmax-type": "learnable",
    "window-size": "4,0",
    "window-attn-skip-freq": "[1,0]",
    "rope-type": "yarn",
    "rotary-scaling-factor": 4,
    "yarn-original-max-position-embeddings": 8,
}
DEEPSEEK: Flags = LATENT | {
    "num-layers": 3,
    "moe-layer-freq": "[0,1,1]",
    "num-query-groups": None,
    "group-query-attention": None,
    "yarn-original-max-position-embeddings": 8,
    "mtp-num-layers": 1,
    "moe-shared-expert-intermediate-size": 16,
    "moe-router-score-function": "sigmoid",
    "moe-router-enable-expert-bias": True,
    "moe-router-num-groups": 2,
    "moe-router-group-topk": 1,
    "moe-router-topk-scaling-factor": 2.5,
    "moe-router-load-balancing-type": "seq_aux_loss",
}
FLEX: Flags = STATIC | EP | {"moe-token-dispatcher-type": "flex", "bf16": True}


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One row of the table.

    flags: added to the flags of `base`. is_whole: whether one graph can capture the whole iteration. modules: parts of
    a layer that --cuda-graph-impl local can capture. needs_gpu: the configuration does not run on the CPU, so only its
    flags are checked and its modules are unknown.
    """

    base: Flags
    flags: Flags
    ranks: int = 1
    is_whole: bool = True
    modules: str = "attn mlp"
    needs_gpu: bool = False

    @property
    def argv(self) -> list[str]:
        """Command line without flags that request graphs of the forward and backward passes."""
        return words_of({**self.base, "global-batch-size": 2 * self.ranks, **self.flags})


def words_of(flags: Flags) -> list[str]:
    """Returns the flags as command-line words."""
    words: list[str] = []
    for name, value in flags.items():
        values = [] if value is True else value if isinstance(value, list) else [value]
        words += [] if value is None else [f"--{name}", *map(str, values)]
    return words


def _dense(flags: Flags, **more: Any) -> Configuration:
    return Configuration(base=more.pop("base", LLAMA), flags=flags, **more)


def _experts(flags: Flags, *, modules: str = "attn moe", **more: Any) -> Configuration:
    pages: Flags = {"moe-paged-stash-page-size": 2} if "moe-paged-stash" in flags else {}
    return Configuration(base=MOE | pages, flags=flags, modules=modules, **more)


_DENSE = {
    "dense, as GPT-2": _dense({}, base=DENSE),
    "dense with dropout": _dense(DROPOUT, base=DENSE),
    "dense, as Llama": _dense({}),
    "sliding window": _dense({"window-size": "(4,0)"}),
    "latent attention with YaRN": _dense(LATENT, base=DENSE),
    "latent attention, recompute of its projections": _dense(
        LATENT | {"recompute-granularity": "selective", "recompute-modules": ["mla_up_proj"]}, base=DENSE
    ),
    "packed documents": _dense(PACKED, is_whole=False, modules="mlp"),
    "bf16": _dense({"bf16": True}),
    "fp16 with loss scaling": _dense({"fp16": True}),
    "loss for each token": _dense({"calculate-per-token-loss": True}),
    "recompute of every layer": _dense(EVERY_LAYER, modules=""),
    "recompute of attention": _dense({"recompute-activations": True}),
    "recompute with dropout": _dense(EVERY_LAYER | DROPOUT, is_whole=False, modules=""),
    "recompute of attention with dropout": _dense(
        {"recompute-activations": True} | DROPOUT, is_whole=False, modules=""
    ),
    "layers kept on the host": _dense({"cpu-offloading-num-layers": 1}, is_whole=False, modules=""),
    "activations kept on the host": _dense(
        {"fine-grained-activation-offloading": True, "offload-modules": ["core_attn"]}, is_whole=False, modules=""
    ),
    "optimizer in the graph": _dense(UPDATE, modules=""),
    "the same in fp16": _dense(UPDATE | {"fp16": True}, modules=""),
    "Muon": _dense({"optimizer": "muon"}),
    "Muon in the graph": _dense(UPDATE | {"optimizer": "muon"}, is_whole=False, modules=""),
    "optimizer on the host": _dense({"optimizer-cpu-offload": True}),
    "the same in the graph": _dense(UPDATE | {"optimizer-cpu-offload": True}, is_whole=False, modules=""),
}
_DENSE_RANKS = {
    "data parallel": _dense({}, ranks=2),
    "ZeRO-1 with overlap": _dense(SHARDED, ranks=2),
    "ZeRO-1 in bf16, optimizer in the graph": _dense(SHARDED | UPDATE | {"bf16": True}, ranks=2, modules=""),
    "tensor and sequence parallel": _dense(TENSORS, ranks=2),
    "the same with latent attention": _dense(TENSORS | LATENT, base=DENSE, ranks=2),
    "the same with dropout": _dense(TENSORS | DROPOUT, ranks=2),
    "context parallel": _dense(SEQUENCES, ranks=2),
    "pipeline": _dense(STAGES, ranks=2),
    "pipeline of virtual stages": _dense(
        STAGES | {"num-layers": 4, "num-layers-per-virtual-pipeline-stage": 1}, ranks=2
    ),
}
_EXPERTS = {
    "dropless experts": _experts({}),
    "experts of a fixed size": _experts(STATIC),
    "experts that drop over capacity": _experts(CAPACITY),
    "shared experts": _experts(STATIC | SHARED),
    "router with losses and a bias": _experts(STATIC | ROUTER),
    "experts with deterministic kernels": _experts(STATIC | {"deterministic-mode": True}),
    "router with jitter": _experts(STATIC | JITTER),
    "experts, recompute of every layer": _experts(STATIC | EVERY_LAYER, modules=""),
    "experts, recompute of parts": _experts(STATIC | SHARED | PARTS),
    "experts, packed documents": _experts(STATIC | PACKED, is_whole=False, modules="moe"),
    "experts, optimizer in the graph": _experts(STATIC | UPDATE, modules=""),
    "stash": _experts(STASH),
    "stash in bf16": _experts(STASH | {"bf16": True}),
    "stash that spills to the host": _experts(
        STASH | {"moe-paged-stash-buffer-size-factor-cuda": 1.0, "moe-paged-stash-buffer-size-factor-cpu": 3.0},
    ),
    "stash that drops to recompute": _experts(
        STASH | {"moe-paged-stash-buffer-size-factor-cuda": 1.2}, modules="attn moe"
    ),
    "stash with dropout, losses and a bias": _experts(STASH | DROPOUT | ROUTER, modules="attn moe"),
    "stash, recompute of parts": _experts(STASH | SHARED | PARTS),
    "stash, optimizer in the graph": _experts(STASH | UPDATE, modules=""),
    "stash, as gpt-oss": _experts(STASH | GPT_OSS),
    "stash, as DeepSeek-V3": _experts(STASH | DEEPSEEK),
}
_EXPERTS_RANKS = {
    "dropless over ranks, all-gather": _experts(ALLGATHER, ranks=2, is_whole=False, modules="attn moe_router"),
    "dropless over ranks, all-to-all": _experts(ALLTOALL, ranks=2, is_whole=False, modules="attn moe_router"),
    "fixed size over ranks, all-gather": _experts(STATIC | ALLGATHER, ranks=2),
    "fixed size over ranks, all-to-all": _experts(STATIC | ALLTOALL, ranks=2),
    "experts cut over ranks": _experts(STATIC | TENSORS | {"expert-tensor-parallel-size": 2}, ranks=2),
    "capacity over ranks, all-gather": _experts(CAPACITY | ALLGATHER, ranks=2),
    "capacity over ranks, all-to-all": _experts(CAPACITY | ALLTOALL, ranks=2),
    "experts in a pipeline": _experts(STATIC | STAGES, ranks=2),
    "experts, packed documents, context parallel": _experts(
        STATIC | PACKED | SEQUENCES, ranks=2, is_whole=False, modules="moe"
    ),
    "stash over ranks, ZeRO-1": _experts(STASH | ALLTOALL | SHARDED, ranks=2),
    "stash over ranks, ZeRO-1, passes in turns": _experts(
        STASH | ALLTOALL | SHARDED | TURNS, ranks=2, modules="attn moe_router moe_preprocess experts"
    ),
    "stash in a pipeline": _experts(STASH | STAGES, ranks=2),
    "stash in a pipeline, weight gradients as passes": _experts(
        STASH | STAGES | {"pipeline-schedule": "zb-h1"}, ranks=2, modules=""
    ),
    "symmetric memory": _experts(FLEX | {"moe-flex-dispatcher-backend": "symm_mem"}, ranks=2, needs_gpu=True),
    "DeepEP": _experts(
        FLEX | {"moe-flex-dispatcher-backend": "deepep"},
        ranks=2,
        is_whole=False,
        needs_gpu=True,
    ),
}
CONFIGURATIONS: dict[str, Configuration] = {**_DENSE, **_DENSE_RANKS, **_EXPERTS, **_EXPERTS_RANKS}
