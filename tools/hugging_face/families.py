"""The architectures that can be converted: what their config.json says, and how their tensors are named.

How one is found from settings, and config.json kept up with them, is in settings.py.
"""

from dataclasses import dataclass, field
from typing import Any

from tools.hugging_face.config_parts import (
    ExpertGroups,
    ExpertWidth,
    Fixed,
    Heads,
    LeadingDenseLayers,
    Only,
    Part,
    Rotation,
    Same,
    ScaledWeights,
    SharedExperts,
    SparseLayers,
    Tied,
    WeightsOfExperts,
    Windows,
)


@dataclass(frozen=True)
class FeedForwardNames:
    """What tensors below model.layers.I are called, where families differ.

    block: what holds the router and the experts. gate, up, down: the matrices of an expert. bias: of the router's
    choice. shared, shared_gate: the shared expert and its gate.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    bias: str = "gate.e_score_correction_bias"
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"


@dataclass(frozen=True, eq=False)
class Family:
    """An architecture by its names in config.json, and the parts of which config.json consists."""

    model_type: str
    architecture: str
    parts: tuple[Part, ...]
    names: FeedForwardNames = field(default_factory=FeedForwardNames)

    @property
    def has_experts(self) -> bool:
        """Whether its models are mixtures of experts."""
        return any(isinstance(part, Same) and part.ours == "num_experts" for part in self.parts)


# What all of them have: biases only where a flag of its own asks for them, and no dropout but that of attention.
_DECODER: tuple[Part, ...] = (
    Fixed(
        {
            "normalization": "RMSNorm",
            "add_bias_linear": False,
            "swiglu": True,
            "squared_relu": False,
            "hidden_dropout": 0.0,
            "rotary_interleaved": False,
        }
    ),
    Only("hidden_act", "silu"),
    Same("vocab_size", "vocab_size"),
    Same("hidden_size", "hidden_size"),
    Same("num_hidden_layers", "num_layers"),
    Same("max_position_embeddings", "max_position_embeddings"),
    Same("attention_dropout", "attention_dropout", 0.0),
    Same("initializer_range", "init_method_std", 0.02),
    Tied(),
)
_DENSE: tuple[Part, ...] = (
    Same("intermediate_size", "ffn_hidden_size"),
    Fixed({"num_experts": None, "moe_layer_freq": 1, "moe_ffn_hidden_size": None}),
)
# Given for every model with experts; computing them together changes no value.
_EXPERTS: tuple[Part, ...] = (Same("num_experts_per_tok", "moe_router_topk"), Fixed({"moe_grouped_gemm": True}))
_SOFTMAX: Any = Fixed(
    {
        "moe_router_score_function": "softmax",
        "moe_router_enable_expert_bias": False,
        "moe_router_num_groups": None,
        "moe_router_group_topk": None,
        "moe_router_topk_scaling_factor": None,
    }
)
_PLAIN_ATTENTION = Fixed({"add_qkv_bias": False, "qk_layernorm": False})
_WHOLE_HEADS = Fixed({"rotary_percent": 1.0})
_NO_SHARED = Fixed({"moe_shared_expert_intermediate_size": None, "moe_shared_expert_gate": False})

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    (
        *_DECODER,
        *_DENSE,
        Heads(),
        Rotation(),
        _WHOLE_HEADS,
        _PLAIN_ATTENTION,
        Same("rms_norm_eps", "layernorm_epsilon", 1e-6),
        Fixed({"window_size": None, "window_attn_skip_freq": None}),
        Only("attention_bias", False),
        Only("mlp_bias", False),
    ),
)
_QWEN: tuple[Part, ...] = (
    Rotation(),
    _WHOLE_HEADS,
    Windows(),
    Same("rms_norm_eps", "layernorm_epsilon", 1e-6),
)
_QWEN_2 = Fixed({"add_qkv_bias": True, "qk_layernorm": False})
_QWEN_3 = Fixed({"add_qkv_bias": False, "qk_layernorm": True})
QWEN_2 = Family("qwen2", "Qwen2ForCausalLM", (*_DECODER, *_DENSE, Heads(has_width=False), *_QWEN, _QWEN_2))
QWEN_3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    (*_DECODER, *_DENSE, Heads(default_width=128), *_QWEN, _QWEN_3, Only("attention_bias", False)),
)
_QWEN_EXPERTS: tuple[Part, ...] = (
    *_EXPERTS,
    # transformers 5 writes some of them under Mixtral's name.
    Same("num_experts", "num_experts", also="num_local_experts"),
    Same("intermediate_size", "ffn_hidden_size"),
    Same("moe_intermediate_size", "moe_ffn_hidden_size"),
    SparseLayers(),
    WeightsOfExperts(),
    _SOFTMAX,
)
QWEN_2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    (
        *_DECODER,
        *_QWEN_EXPERTS,
        Heads(has_width=False),
        *_QWEN,
        _QWEN_2,
        Only("qkv_bias", True),
        Same("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", None),
        Fixed({"moe_shared_expert_gate": True}),
    ),
    FeedForwardNames(shared="shared_expert"),
)
QWEN_3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    (
        *_DECODER,
        *_QWEN_EXPERTS,
        # Unlike the dense one, it has no width of its own by default.
        Heads(),
        *_QWEN,
        _QWEN_3,
        _NO_SHARED,
        Only("attention_bias", False),
    ),
)
MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    (
        *_DECODER,
        *_EXPERTS,
        Same("num_local_experts", "num_experts"),
        ExpertWidth(),
        Heads(),
        Rotation(default_base=1e6),
        _WHOLE_HEADS,
        Windows(switch=False),
        Same("rms_norm_eps", "layernorm_epsilon", 1e-5),
        _PLAIN_ATTENTION,
        _SOFTMAX,
        _NO_SHARED,
        Fixed({"moe_layer_freq": 1, "moe_router_pre_softmax": False}),
    ),
    FeedForwardNames("block_sparse_moe", "w1", "w3", "w2"),
)
GLM_4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    (
        *_DECODER,
        *_EXPERTS,
        Same("n_routed_experts", "num_experts"),
        Same("intermediate_size", "ffn_hidden_size"),
        Same("moe_intermediate_size", "moe_ffn_hidden_size"),
        LeadingDenseLayers(),
        SharedExperts(),
        ExpertGroups(),
        ScaledWeights(),
        Heads(),
        Rotation(share=0.5),
        Same("rms_norm_eps", "layernorm_epsilon", 1e-5),
        Same("attention_bias", "add_qkv_bias", False),
        Same("use_qk_norm", "qk_layernorm", False),
        Only("norm_topk_prob", True),
        Fixed(
            {
                "window_size": None,
                "window_attn_skip_freq": None,
                "moe_shared_expert_gate": False,
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_router_dtype": "fp32",
                "moe_router_pre_softmax": False,
            }
        ),
    ),
)

FAMILIES: tuple[Family, ...] = (LLAMA, QWEN_2, QWEN_3, QWEN_2_MOE, QWEN_3_MOE, MIXTRAL, GLM_4_MOE)
