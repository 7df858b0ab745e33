"""Architecture fields of config.json of published models, and their numbers of parameters. Contains no tests.

Values are copied from the files on the Hub, by preset, without dtype, token ids and names of authors.
"""

from typing import Any

Config = dict[str, Any]
_LLAMA: Config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 8}
_LLAMA |= {"vocab_size": 128256, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu"}
_LLAMA |= {"attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": False, "mlp_bias": False}
_LLAMA |= {"initializer_range": 0.02}


def _llama_3_1(factor: float) -> Config:
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {
        "rope_scaling": {**scaling, "original_max_position_embeddings": 8192},
        "max_position_embeddings": 131072,
    }


def _shape(hidden: int, width: int, layers: int, heads: int) -> Config:
    return {
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


_QWEN: Config = {"hidden_act": "silu", "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "attention_dropout": 0.0}
_QWEN |= {"use_sliding_window": False, "initializer_range": 0.02, "tie_word_embeddings": False, "vocab_size": 151936}
_QWEN_2 = {**_QWEN, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
_QWEN_2 |= {"max_position_embeddings": 131072, "sliding_window": 131072}
_QWEN_3 = {**_QWEN, "max_position_embeddings": 40960, "sliding_window": None, "head_dim": 128, "attention_bias": False}
_QWEN_3 |= {"rope_scaling": None}
_DENSE_3 = {**_QWEN_3, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_key_value_heads": 8}
_MOE_3 = {**_QWEN_3, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_key_value_heads": 4}
_MOE_3 |= {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1}
_MOE_3 |= {"mlp_only_layers": [], "router_aux_loss_coef": 0.001, "output_router_logits": False}
_MIXTRAL: Config = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_key_value_heads": 8}
_MIXTRAL |= {"hidden_act": "silu", "rope_theta": 1000000.0, "rms_norm_eps": 1e-5, "attention_dropout": 0.0}
_MIXTRAL |= {"num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000, "tie_word_embeddings": False}
_MIXTRAL |= {"sliding_window": None, "initializer_range": 0.02, "output_router_logits": False}
_GLM: Config = {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True}
_GLM |= {"vocab_size": 151552, "head_dim": 128, "num_key_value_heads": 8, "partial_rotary_factor": 0.5, "n_group": 1}
_GLM |= {"topk_group": 1, "n_shared_experts": 1, "num_experts_per_tok": 8, "norm_topk_prob": True, "rope_scaling": None}
_GLM |= {"rope_theta": 1000000, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "hidden_act": "silu"}
_GLM |= {"attention_dropout": 0.0, "initializer_range": 0.02, "tie_word_embeddings": False, "num_attention_heads": 96}
_GLM |= {"num_nextn_predict_layers": 1}

_DEEPSEEK: Config = {"hidden_act": "silu", "rope_theta": 10000, "rms_norm_eps": 1e-6, "attention_bias": False}
_DEEPSEEK |= {"attention_dropout": 0.0, "initializer_range": 0.02, "tie_word_embeddings": False, "moe_layer_freq": 1}
_DEEPSEEK |= {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_DEEPSEEK |= {"max_position_embeddings": 163840, "pretraining_tp": 1, "seq_aux": True, "aux_loss_alpha": 0.001}
_YARN: Config = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1}
_YARN |= {"original_max_position_embeddings": 4096}
_DEEPSEEK_2 = {**_DEEPSEEK, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
_DEEPSEEK_2 |= {"vocab_size": 102400, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1}
_DEEPSEEK_2 |= {"norm_topk_prob": False, "scoring_func": "softmax"}
_DEEPSEEK_2 |= {"rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}}
_OSS: Config = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True}
_OSS |= {"hidden_act": "silu", "vocab_size": 201088, "head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128}
_OSS |= {"num_experts_per_tok": 4, "swiglu_limit": 7.0, "rope_theta": 150000, "max_position_embeddings": 131072}
_OSS |= {"rms_norm_eps": 1e-5, "attention_dropout": 0.0, "initializer_range": 0.02, "tie_word_embeddings": False}
_OSS |= {"rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}}
_OSS["rope_scaling"]["original_max_position_embeddings"] = 4096


def _alternating(layers: int) -> Config:
    return {"layer_types": ["sliding_attention", "full_attention"] * (layers // 2)}


KNOWN_CONFIGS: dict[str, Config] = {
    "llama3-8b": {**_LLAMA, **_shape(4096, 14336, 32, 32), "max_position_embeddings": 8192, "rope_scaling": None},
    "llama3-70b": {**_LLAMA, **_shape(8192, 28672, 80, 64), "max_position_embeddings": 8192, "rope_scaling": None},
    "llama3.1-8b": {**_LLAMA, **_shape(4096, 14336, 32, 32), **_llama_3_1(8.0)},
    "llama3.1-70b": {**_LLAMA, **_shape(8192, 28672, 80, 64), **_llama_3_1(8.0)},
    "llama3.1-405b": {**_LLAMA, **_shape(16384, 53248, 126, 128), **_llama_3_1(8.0)},
    "llama3.2-1b": {
        **_LLAMA,
        **_shape(2048, 8192, 16, 32),
        **_llama_3_1(32.0),
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "llama3.2-3b": {
        **_LLAMA,
        **_shape(3072, 8192, 28, 24),
        **_llama_3_1(32.0),
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "qwen2-0.5b": {
        **_QWEN_2,
        **_shape(896, 4864, 24, 14),
        "num_key_value_heads": 2,
        "max_window_layers": 24,
        "tie_word_embeddings": True,
    },
    "qwen2-7b": {
        **_QWEN_2,
        **_shape(3584, 18944, 28, 28),
        "num_key_value_heads": 4,
        "max_window_layers": 28,
        "vocab_size": 152064,
    },
    "qwen2-57b-a14b": {
        **_QWEN_2,
        **_shape(3584, 18944, 28, 28),
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "num_key_value_heads": 4,
        "max_window_layers": 28,
        "moe_intermediate_size": 2560,
        "shared_expert_intermediate_size": 20480,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    },
    "qwen3-0.6b": {
        **_DENSE_3,
        **_shape(1024, 3072, 28, 16),
        "max_window_layers": 28,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {**_DENSE_3, **_shape(4096, 12288, 36, 32), "max_window_layers": 36},
    "qwen3-32b": {**_DENSE_3, **_shape(5120, 25600, 64, 64), "max_window_layers": 64},
    "qwen3-30b-a3b": {**_MOE_3, **_shape(2048, 6144, 48, 32), "moe_intermediate_size": 768},
    "qwen3-235b-a22b": {**_MOE_3, **_shape(4096, 12288, 94, 64), "moe_intermediate_size": 1536},
    "mixtral-8x7b": {**_MIXTRAL, **_shape(4096, 14336, 32, 32), "max_position_embeddings": 32768},
    "mixtral-8x22b": {**_MIXTRAL, **_shape(6144, 16384, 56, 48), "max_position_embeddings": 65536},
    "glm-4.5": {
        **_GLM,
        **_shape(5120, 12288, 92, 96),
        "moe_intermediate_size": 1536,
        "n_routed_experts": 160,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
    },
    "glm-4.5-air": {
        **_GLM,
        **_shape(4096, 10944, 46, 96),
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
        "use_qk_norm": False,
    },
    "deepseek-v2-lite": {
        **_DEEPSEEK_2,
        **_shape(2048, 10944, 27, 16),
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
    },
    "deepseek-v2": {
        **_DEEPSEEK_2,
        **_shape(5120, 12288, 60, 128),
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 160,
        "routed_scaling_factor": 16.0,
        "topk_method": "group_limited_greedy",
        "n_group": 8,
        "topk_group": 3,
    },
    "deepseek-v3": {
        **_DEEPSEEK,
        **_shape(7168, 18432, 61, 128),
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": 128,
        "vocab_size": 129280,
        "q_lora_rank": 1536,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": 8,
        "topk_group": 4,
        "num_nextn_predict_layers": 1,
        "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "gpt-oss-20b": {**_OSS, **_shape(2880, 2880, 24, 64), "num_local_experts": 32, **_alternating(24)},
    "gpt-oss-120b": {**_OSS, **_shape(2880, 2880, 36, 64), "num_local_experts": 128, **_alternating(36)},
}
