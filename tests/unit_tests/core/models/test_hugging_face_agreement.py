"""GPTModel compared with models of the transformers library with the same weights: logits, loss and all gradients."""

from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.transformer.enums import AttnBackend
from tests.unit_tests.core.models.small_models import (
    LLAMA_LIKE,
    SEQ,
    VOCAB,
    from_hugging_face,
    gradients,
    small_batch,
    small_config,
    small_model,
)

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": SEQ,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def assert_agree(theirs: Any, *, arguments: dict[str, Any], norm_offset: float = 0.0, **fields: Any) -> None:
    """Copies the weights and compares both models within 1e-4, in fp32, in evaluation mode.

    arguments: passed to GPTModel. norm_offset: constant that the other model adds to the weights of its norms.
    """
    config = small_config(**{**LLAMA_LIKE, **fields})
    ours = small_model(config, **arguments).eval()
    theirs.eval()
    weights = {
        name: value.detach() + norm_offset * name.endswith("norm.weight") for name, value in theirs.named_parameters()
    }
    missing = ours.load_state_dict(from_hugging_face(weights, config), strict=False).missing_keys
    assert missing == []
    input_ids, position_ids, labels = small_batch()
    logits = ours(input_ids, position_ids, None)
    expected = theirs(input_ids).logits
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    loss = ours(input_ids, position_ids, None, labels=labels).mean()
    expected_loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(loss, expected_loss, atol=1e-4, rtol=1e-4)
    loss.backward()
    expected_loss.backward()
    wanted = from_hugging_face(gradients(theirs), config)
    found = gradients(ours)
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        torch.testing.assert_close(
            found[name], grad, atol=1e-4, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_dense_model_agrees_with_llama(groups: int, tied: bool) -> None:
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=groups, tie_word_embeddings=tied))
    assert_agree(llama, arguments={"share_embeddings_and_output_weights": tied}, num_query_groups=groups)


@pytest.mark.parametrize("topk", [1, 2, 3])
def test_expert_model_agrees_with_mixtral(topk: int) -> None:
    torch.manual_seed(0)
    mixtral = MixtralForCausalLM(
        MixtralConfig(
            **SIZES, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=topk, tie_word_embeddings=False
        )
    )
    experts = {"num_moe_experts": 4, "moe_router_topk": topk, "moe_grouped_gemm": True}
    assert_agree(mixtral, arguments={}, num_query_groups=2, **experts)


def rotary(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **parameters}}


LLAMA_3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "tie_word_embeddings": False}
PLAIN_MLP: dict[str, Any] = {"gated_linear_unit": False, "normalization": "LayerNorm"}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": None,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 9,
    # All layers are dense here.
    "first_k_dense_replace": 2,
    "tie_word_embeddings": False,
}
OURS: dict[str, Any] = {
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "kv_lora_rank": 12,
    "qk_head_dim": 10,
    "qk_pos_emb_head_dim": 6,
    "v_head_dim": 9,
    # transformers uses this value for the norms inside attention, whatever the other norms use.
    "layernorm_epsilon": 1e-6,
    "num_query_groups": None,
}
YARN: dict[str, Any] = {"factor": 40.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # name: model class, config class, its settings, our configuration's fields, GPTModel's arguments
    "qwen2-qkv-bias": (Qwen2ForCausalLM, Qwen2Config, GROUPED, {"add_qkv_bias": True}, {}),
    "qwen3-qk-norm": (Qwen3ForCausalLM, Qwen3Config, {**GROUPED, "head_dim": 8}, {"qk_layernorm": True}, {}),
    "mistral-window": (
        MistralForCausalLM,
        MistralConfig,
        {**GROUPED, "sliding_window": 5},
        {"window_size": (4, 0)},
        {},
    ),
    "llama-3.1-rope-scaling": (
        LlamaForCausalLM,
        LlamaConfig,
        {**GROUPED, **rotary(rope_type="llama3", **LLAMA_3)},
        {},
        {"rope_scaling": True},
    ),
    "llama-yarn": (
        LlamaForCausalLM,
        LlamaConfig,
        {**GROUPED, **rotary(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, truncate=False)},
        {
            "rope_type": "yarn",
            "rotary_scaling_factor": 4.0,
            "original_max_position_embeddings": 64,
            "yarn_correction_range_round_to_int": False,
        },
        {"position_embedding_type": "yarn"},
    ),
    "deepseek-v2-lite": (DeepseekV3ForCausalLM, DeepseekV3Config, {**DEEPSEEK, "rms_norm_eps": 1e-6}, OURS, {}),
    "deepseek-v3-yarn": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        {
            **DEEPSEEK,
            "rms_norm_eps": 1e-6,
            "q_lora_rank": 20,
            "v_head_dim": 24,
            **rotary(rope_type="yarn", **YARN),
        },
        {
            **OURS,
            "q_lora_rank": 20,
            "v_head_dim": 24,
            "rotary_scaling_factor": 40.0,
            "original_max_position_embeddings": 64,
            "mscale_all_dim": 1.0,
        },
        {},
    ),
    "llama-interpolated-positions": (
        LlamaForCausalLM,
        LlamaConfig,
        {**GROUPED, **rotary(rope_type="linear", factor=4.0)},
        {},
        {"seq_len_interpolation_factor": 4},
    ),
    "glm-partial-interleaved": (
        GlmForCausalLM,
        GlmConfig,
        {**GROUPED, "head_dim": 8, "attention_bias": True, "pad_token_id": 0, **rotary(partial_rotary_factor=0.5)},
        {"add_qkv_bias": True, "rotary_interleaved": True},
        {"rotary_percent": 0.5},
    ),
    "nemotron-squared-relu": (
        NemotronForCausalLM,
        NemotronConfig,
        {**GROUPED, "norm_eps": 1e-5, **rotary(partial_rotary_factor=0.5)},
        {**PLAIN_MLP, "activation_func": squared_relu, "norm_offset": 1.0},
        {"rotary_percent": 0.5},
    ),
    "gpt-neox-partial-biases": (
        GPTNeoXForCausalLM,
        GPTNeoXConfig,
        {"use_parallel_residual": False, "layer_norm_eps": 1e-5, **rotary(partial_rotary_factor=0.25)},
        {**PLAIN_MLP, "activation_func": torch.nn.functional.gelu, "add_bias_linear": True},
        {"rotary_percent": 0.25},
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_options_agree_with_the_models_that_have_them(family: str) -> None:
    torch.manual_seed(0)
    model, config, settings, fields, arguments = FAMILIES[family]
    theirs = model(config(**{**SIZES, **settings}))
    with torch.no_grad():
        # Initial biases of 0 and norm weights of 1 would hide mistakes.
        for value in theirs.parameters():
            if value.dim() == 1:
                value.add_(0.1 * torch.randn_like(value))
    groups = settings.get("num_key_value_heads")
    assert_agree(theirs, arguments=arguments, **{"num_query_groups": groups, **fields})


GPT_OSS: dict[str, Any] = {
    "num_query_groups": 2,
    "add_bias_linear": True,
    "softmax_type": "learnable",
    "window_size": (4, 0),
    "window_attn_skip_freq": 2,
    "activation_func": quick_gelu,
    "activation_func_clamp_value": 1.0,
    "glu_linear_offset": 1.0,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_grouped_gemm": True,
    "rope_type": "yarn",
    "rotary_scaling_factor": 4.0,
    "original_max_position_embeddings": 64,
    "yarn_correction_range_round_to_int": False,
}


@pytest.mark.parametrize(
    "fields",
    [{}, {"moe_expert_rank_capacity_factor": 4.0}, {"attention_backend": AttnBackend.unfused}],
    ids=["auto", "static", "plain attention"],
)
def test_expert_model_with_sinks_windows_biases_and_clamped_units_agrees_with_gpt_oss(fields: dict[str, Any]) -> None:
    torch.manual_seed(0)
    scaling = {"factor": 4.0, "original_max_position_embeddings": 64, "truncate": False}
    config = GptOssConfig(
        **{**SIZES, **GROUPED, **rotary(rope_type="yarn", beta_fast=32.0, beta_slow=1.0, **scaling)},
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=5,
        swiglu_limit=1.0,
        attn_implementation="eager",
    )
    theirs = GptOssForCausalLM(config)
    assert config.layer_types == ["sliding_attention", "full_attention"]
    with torch.no_grad():
        for name, value in theirs.named_parameters():
            if value.dim() == 1 or name.endswith("bias"):
                value.add_(0.3 * torch.randn_like(value))
    assert_agree(theirs, arguments={"position_embedding_type": "yarn"}, **GPT_OSS, **fields)
