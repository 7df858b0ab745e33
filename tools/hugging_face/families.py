"""Defines the architectures that can be converted: their config.json and tensor names.

settings.py selects the architecture for given settings and updates config.json.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megatron.tools.hugging_face.config_parts import (
    Fixed,
    Heads,
    LatentHeads,
    Only,
    Part,
    Rotation,
    Same,
    Tied,
    Values,
    WindowRule,
    Windows,
)
from megatron.tools.hugging_face.expert_parts import (
    ExpertGroups,
    ExpertWidth,
    GroupLimitedGreedy,
    LeadingDenseLayers,
    MTPLayers,
    RoutedScaling,
    SharedExperts,
    SparseLayers,
    TopKNormalization,
)


@dataclass(frozen=True)
class FeedForwardNames:
    """Tensor names below model.layers.I that differ between families.

    block: module of the router and the experts. gate, up, down: matrices of an expert. bias: expert bias of the router.
    shared, shared_gate: shared expert and its gate. router: routing matrix. interleaved: whether one tensor contains
    all experts, with gate and up in alternating columns. stacked: whether one tensor contains all experts, with the
    rows of gate before those of up.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    bias: str = "gate.e_score_correction_bias"
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"
    router: str = "gate"
    interleaved: bool = False
    stacked: bool = False

    @property
    def in_memory(self) -> "FeedForwardNames":
        """Names in the modules of transformers 5, which save_pretrained(save_original_format=False) also writes."""
        return self if self.interleaved else replace(self, block="mlp", stacked=True)


@dataclass(frozen=True, eq=False)
class Family:
    """An architecture: its names in config.json, its config.json parts and its tensor names.

    defaults: values of transformers for absent keys, unless a part defines them. null is not absent. aliases: further
    names of keys, which transformers maps to the names in `parts`. derived: keys that transformers always computes from
    others.
    """

    model_type: str
    architecture: str
    parts: tuple[Part, ...]
    names: FeedForwardNames = field(default_factory=FeedForwardNames)
    defaults: Values = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    derived: tuple[str, ...] = ()

    @property
    def has_experts(self) -> bool:
        """Whether its models are mixtures of experts."""
        return any(isinstance(part, Same) and part.ours == "num_experts" for part in self.parts)


# Common to all families: no dropout except in attention.
_DECODER: tuple[Part, ...] = (
    Fixed({"normalization": "RMSNorm", "squared_relu": False, "hidden_dropout": 0.0, "rotary_interleaved": False}),
    Only("hidden_act", "silu"),
    Same("vocab_size", "vocab_size"),
    Same("hidden_size", "hidden_size"),
    Same("num_hidden_layers", "num_layers"),
    Same("max_position_embeddings", "max_position_embeddings"),
    Same("attention_dropout", "attention_dropout", 0.0),
    Same("initializer_range", "init_method_std", 0.02),
    Tied(),
)
# All families except gpt-oss.
_PLAIN = Fixed(
    {
        "add_bias_linear": False,
        "swiglu": True,
        "quick_geglu": False,
        "activation_func_clamp_value": None,
        "glu_linear_offset": 0.0,
        "softmax_type": "vanilla",
    }
)
# All families except DeepSeek's.
_HEADS_OF_THEIR_OWN = Fixed({"multi_latent_attention": False, "attention_output_gate": False})
_DENSE: tuple[Part, ...] = (
    Same("intermediate_size", "ffn_hidden_size"),
    Fixed({"num_experts": None, "moe_layer_freq": 1, "moe_ffn_hidden_size": None}),
)
# All MoE models. Grouped GEMMs do not change the model.
_EXPERTS: tuple[Part, ...] = (Same("num_experts_per_tok", "moe_router_topk"), Fixed({"moe_grouped_gemm": True}))
# DeepSeek and GLM-4.5: many narrow experts, shared experts, and dense layers before the MoE layers.
_FINE_GRAINED_EXPERTS: tuple[Part, ...] = (
    *_EXPERTS,
    Same("n_routed_experts", "num_experts"),
    Same("intermediate_size", "ffn_hidden_size"),
    Same("moe_intermediate_size", "moe_ffn_hidden_size"),
    LeadingDenseLayers(),
    SharedExperts(),
    RoutedScaling(),
    Fixed({"moe_shared_expert_gate": False, "moe_router_dtype": "fp32"}),
    Only("moe_layer_freq", 1),
)
_FINE_GRAINED_ALIASES = {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"}
_SIGMOID = Fixed(
    {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_pre_softmax": False,
        "moe_router_group_score": "sum",
    }
)
_SOFTMAX_SCORES = {"moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False}
_SOFTMAX = Fixed(
    {
        **_SOFTMAX_SCORES,
        "moe_router_num_groups": None,
        "moe_router_group_topk": None,
        "moe_router_group_score": "sum",
        "moe_router_topk_scaling_factor": None,
    }
)
_SOFTMAX_OF_ALL = Fixed({**_SOFTMAX_SCORES, "moe_router_pre_softmax": True})
_NO_WINDOW = Fixed({"window_size": None, "window_attn_skip_freq": None})
_PLAIN_ATTENTION = Fixed({"add_qkv_bias": False, "qk_layernorm": False})
_WHOLE_HEADS = Fixed({"rotary_percent": 1.0})
_NO_SHARED = Fixed({"moe_shared_expert_intermediate_size": None, "moe_shared_expert_gate": False})

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    (
        *_DECODER,
        *_DENSE,
        _PLAIN,
        _HEADS_OF_THEIR_OWN,
        Heads(),
        Rotation(),
        _WHOLE_HEADS,
        _PLAIN_ATTENTION,
        Same("rms_norm_eps", "layernorm_epsilon", 1e-6),
        _NO_WINDOW,
        Only("attention_bias", False),
        Only("mlp_bias", False),
    ),
)
_QWEN: tuple[Part, ...] = (
    _PLAIN,
    _HEADS_OF_THEIR_OWN,
    Rotation(),
    _WHOLE_HEADS,
    Same("rms_norm_eps", "layernorm_epsilon", 1e-6),
)
_QWEN_2 = Fixed({"add_qkv_bias": True, "qk_layernorm": False})
_QWEN_3 = Fixed({"add_qkv_bias": False, "qk_layernorm": True})
QWEN_2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    (*_DECODER, *_DENSE, Heads(has_width=False), *_QWEN, _QWEN_2, Windows()),
    defaults={"num_key_value_heads": 32},
)
QWEN_3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    (*_DECODER, *_DENSE, Heads(default_width=128), *_QWEN, _QWEN_3, Windows(), Only("attention_bias", False)),
    defaults={"num_key_value_heads": 32},
)
_QWEN_EXPERTS: tuple[Part, ...] = (
    *_EXPERTS,
    Same("num_experts", "num_experts"),
    Same("intermediate_size", "ffn_hidden_size"),
    Same("moe_intermediate_size", "moe_ffn_hidden_size"),
    SparseLayers(),
    TopKNormalization(),
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
        Windows(WindowRule.BELOW_A_LAYER),
        Only("qkv_bias", True),
        Same("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", None),
        Fixed({"moe_shared_expert_gate": True}),
    ),
    FeedForwardNames(shared="shared_expert"),
    defaults={"num_key_value_heads": 16, "shared_expert_intermediate_size": 5632},
)
QWEN_3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    (
        *_DECODER,
        *_QWEN_EXPERTS,
        # Unlike the dense model, it has no default width.
        Heads(),
        *_QWEN,
        _QWEN_3,
        Windows(WindowRule.EVERY),
        _NO_SHARED,
        Only("attention_bias", False),
    ),
    defaults={"num_key_value_heads": 4},
    # transformers 5 writes this key.
    aliases={"num_local_experts": "num_experts"},
)
MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    (
        *_DECODER,
        _PLAIN,
        _HEADS_OF_THEIR_OWN,
        *_EXPERTS,
        Same("num_local_experts", "num_experts"),
        ExpertWidth(),
        Heads(),
        Rotation(default_base=1e6),
        _WHOLE_HEADS,
        Windows(WindowRule.EVERY, switch=False, default_size=None),
        Same("rms_norm_eps", "layernorm_epsilon", 1e-5),
        _PLAIN_ATTENTION,
        _SOFTMAX,
        _NO_SHARED,
        Fixed({"moe_layer_freq": 1, "moe_router_pre_softmax": False}),
    ),
    FeedForwardNames("block_sparse_moe", "w1", "w3", "w2"),
    defaults={"num_key_value_heads": 8},
    aliases={"num_experts": "num_local_experts"},
)
GLM_4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    (
        *_DECODER,
        _PLAIN,
        _HEADS_OF_THEIR_OWN,
        *_FINE_GRAINED_EXPERTS,
        _SIGMOID,
        ExpertGroups(),
        Heads(),
        Rotation(share=0.5),
        Same("rms_norm_eps", "layernorm_epsilon", 1e-5),
        Same("attention_bias", "add_qkv_bias", False),
        Same("use_qk_norm", "qk_layernorm", False),
        Only("norm_topk_prob", True),
        _NO_WINDOW,
        MTPLayers(),
    ),
    defaults={
        "num_key_value_heads": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 1,
    },
    aliases=_FINE_GRAINED_ALIASES,
)
_DEEPSEEK: tuple[Part, ...] = (
    *_DECODER,
    _PLAIN,
    *_FINE_GRAINED_EXPERTS,
    LatentHeads(),
    # Latent attention would use YaRN by default.
    Rotation(unstretched="rope"),
    _WHOLE_HEADS,
    # transformers uses this epsilon for the norms of down-projections, regardless of config.json.
    Only("rms_norm_eps", 1e-6),
    Only("attention_bias", False),
    Fixed({"layernorm_epsilon": 1e-6, "add_qkv_bias": False, "attention_output_gate": False, "qk_layernorm": True}),
    _NO_WINDOW,
)
_LATENT_WIDTHS = ("head_dim", "qk_head_dim")
DEEPSEEK_V2 = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    (
        *_DEEPSEEK,
        GroupLimitedGreedy(),
        Only("norm_topk_prob", False),
        Only("mlp_bias", False),
        Only("scoring_func", "softmax"),
        _SOFTMAX_OF_ALL,
    ),
    defaults={"q_lora_rank": 1536, "n_shared_experts": 2},
    aliases={"num_experts": "n_routed_experts"},
    derived=_LATENT_WIDTHS,
)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    (
        *_DEEPSEEK,
        _SIGMOID,
        ExpertGroups(),
        Only("norm_topk_prob", True),
        Only("rope_interleave", True),
        Only("scoring_func", "sigmoid"),
        Only("topk_method", "noaux_tc"),
        MTPLayers(),
    ),
    defaults={
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "num_nextn_predict_layers": 1,
    },
    aliases=_FINE_GRAINED_ALIASES,
    derived=_LATENT_WIDTHS,
)
GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    (
        *_DECODER,
        _HEADS_OF_THEIR_OWN,
        *_EXPERTS,
        Same("num_local_experts", "num_experts"),
        ExpertWidth(),
        Heads(default_width=64),
        Rotation(
            default_base=150000.0,
            default={
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        ),
        _WHOLE_HEADS,
        Windows(WindowRule.ALTERNATING, switch=False, default_size=128),
        Same("rms_norm_eps", "layernorm_epsilon", 1e-5),
        Same("swiglu_limit", "activation_func_clamp_value", 7.0),
        Only("swiglu_alpha", 1.702),
        Only("attention_bias", True),
        _SOFTMAX,
        _NO_SHARED,
        _PLAIN_ATTENTION,
        Fixed(
            {
                "add_bias_linear": True,
                "swiglu": False,
                "quick_geglu": True,
                "glu_linear_offset": 1.0,
                "softmax_type": "learnable",
                "moe_layer_freq": 1,
                "moe_router_pre_softmax": False,
            }
        ),
    ),
    FeedForwardNames(router="router", interleaved=True),
    defaults={"num_key_value_heads": 8},
    aliases={"num_experts": "num_local_experts"},
)

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    QWEN_2,
    QWEN_3,
    QWEN_2_MOE,
    QWEN_3_MOE,
    MIXTRAL,
    GLM_4_MOE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GPT_OSS,
)
