"""Latent attention: names and shapes, defaults, gradients and rejected settings. Its values are compared in
tests/unit_tests/core/models/test_hugging_face_agreement.py.
"""

from typing import Any

import pytest
import torch

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import build_module
from tests.unit_tests.core.models.small_models import LATENT, LLAMA_LIKE, loss_of, small_config, small_model

NO_QUERY_RANK = {**LATENT, "q_lora_rank": None}


def shapes(**fields: Any) -> dict[str, tuple[int, ...]]:
    prefix = "decoder.layers.0.self_attention."
    named = small_model(small_config(**fields)).named_parameters()
    return {name.removeprefix(prefix): tuple(p.shape) for name, p in named if name.startswith(prefix)}


def test_parameters_have_megatrons_names_and_shapes() -> None:
    # 4 heads with 6 + 4 query/key channels and 7 value channels; latent widths 12 (queries) and 10 (keys and values).
    shared = {
        "linear_kv_down_proj.weight": (10 + 4, 32),
        "linear_kv_up_proj.weight": (4 * (6 + 7), 10),
        "kv_layernorm.weight": (10,),
        "linear_proj.weight": (32, 4 * 7),
    }
    down_and_up = {
        "linear_q_down_proj.weight": (12, 32),
        "linear_q_up_proj.weight": (4 * 10, 12),
        "q_layernorm.weight": (12,),
    }
    assert shapes(**LATENT) == shared | down_and_up
    assert shapes(**NO_QUERY_RANK) == shared | {"linear_q_proj.weight": (4 * 10, 32)}
    norms = {"q_layernorm.weight", "kv_layernorm.weight"}
    assert shapes(**{**LATENT, "qk_layernorm": False}).keys() == (shared | down_and_up).keys() - norms
    # Only the layer that writes to the residual stream has a bias.
    assert shapes(**{**LATENT, "add_bias_linear": True}) == shared | down_and_up | {"linear_proj.bias": (32,)}


def test_the_configuration_of_scripts_has_the_defaults_of_deepseek() -> None:
    config = MLATransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=3)
    assert isinstance(config, TransformerConfig) and config.multi_latent_attention
    assert (config.q_lora_rank, config.kv_lora_rank, config.normalization) == (512, 512, "RMSNorm")
    assert (config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim) == (128, 64, 128)
    assert (config.rope_type, config.rotary_scaling_factor, config.beta_fast) == ("yarn", 40, 32)
    assert config.original_max_position_embeddings == 4096
    # The hidden size need not be divisible by the number of heads.
    assert config.kv_channels == 192
    with pytest.raises(ValueError, match="MLATransformerConfig.q_lora_rank is 0: must be at least 1"):
        MLATransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4, q_lora_rank=0)


@pytest.mark.parametrize("fields", [LATENT, NO_QUERY_RANK], ids=["query rank", "none"])
def test_a_token_does_not_see_later_ones(fields: dict[str, Any]) -> None:
    model = small_model(small_config(**fields))
    tokens = torch.randint(96, (1, 16), generator=torch.Generator().manual_seed(1))
    other = tokens.clone()
    other[:, 9:] = (other[:, 9:] + 1) % 96
    first, second = (model(ids, torch.arange(16)[None], None) for ids in (tokens, other))
    torch.testing.assert_close(first[:, :9], second[:, :9])
    assert not torch.allclose(first[:, 9:], second[:, 9:])


def test_scores_depend_on_distances_alone_and_only_through_the_rotating_channels() -> None:
    config = small_config(**LATENT, params_dtype=torch.float64)
    model = small_model(config)
    attention = model.decoder.layers[0].self_attention
    assert model.rotary_pos_emb is not None
    table = model.rotary_pos_emb(16)
    assert table.interleaved and table.cos.shape == (16, 2)
    # The same token at every position.
    hidden = torch.randn(1, 1, 32, dtype=torch.float64).expand(16, 1, 32)
    query, key, value = attention._projected(hidden, table)
    scores = torch.einsum("snd,tnd->nst", query[:, 0], key[:, 0])
    torch.testing.assert_close(scores[:, :-1, :-1], scores[:, 1:, 1:])
    assert (scores[:, 0, 0] - scores[:, 0, 5]).abs().max() > 1e-3
    torch.testing.assert_close(query[..., :6], query[:1, ..., :6].expand(16, 1, 4, 6))
    # All heads share the rotated channels of their keys.
    torch.testing.assert_close(key[..., 6:], key[:, :, :1, 6:].expand(16, 1, 4, 4))
    assert value.shape == (16, 1, 4, 7) and value.is_contiguous()


def test_scores_are_scaled_by_the_width_of_keys_and_by_yarn() -> None:
    plain = small_model(small_config(**LATENT)).decoder.layers[0].self_attention.core_attention
    assert plain.softmax_scale == pytest.approx(10**-0.5)
    fields = {**LATENT, "rotary_scaling_factor": 40.0, "mscale_all_dim": 1.0}
    scaled = small_model(small_config(**fields)).decoder.layers[0].self_attention.core_attention
    assert scaled.softmax_scale == pytest.approx(10**-0.5 * 1.3688879454113936**2)


def test_matrices_are_those_of_keys_values_and_latents() -> None:
    config = small_config(**LATENT)
    attention = small_model(config).decoder.layers[0].self_attention
    named = dict(attention.named_parameters())
    found = attention.weight_matrices()
    up, down = named["linear_kv_up_proj.weight"], named["linear_kv_down_proj.weight"]
    by_head = up.view(4, 6 + 7, 10)
    wanted = {
        "linear_kv_up_proj.weight": [by_head[:, :6], by_head[:, 6:]],
        "linear_kv_down_proj.weight": [down[:10], down[10:]],
    }
    assert found.keys() == wanted.keys()
    for name, parts in wanted.items():
        for window, part in zip(found[name], parts, strict=True):
            assert torch.equal(window.view_of(named[name].data), part)
            assert window.matrix_shape[1] == part.shape[-1]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({**LLAMA_LIKE, "q_lora_rank": 8}, "q_lora_rank is 8: requires multi_latent_attention"),
        ({**LLAMA_LIKE, "v_head_dim": 64}, "v_head_dim is 64: requires multi_latent_attention"),
        ({**LATENT, "qk_pos_emb_head_dim": 5}, "qk_pos_emb_head_dim is 5: must be even"),
        ({**LATENT, "kv_lora_rank": 0}, "kv_lora_rank is 0: must be at least 1"),
        ({**LATENT, "num_query_groups": 2}, "num_query_groups is 2 and multi_latent_attention is True.* 4 heads"),
        ({**LATENT, "add_qkv_bias": True}, "add_qkv_bias is True and multi_latent_attention is True"),
        ({**LATENT, "rotary_interleaved": True}, "rotary_interleaved is True and multi_latent_attention is True"),
        (
            {**LATENT, "tensor_model_parallel_size": 3},
            "num_attention_heads is 4: must be a multiple of tensor_model_parallel_size",
        ),
        (
            {**LATENT, "context_parallel_size": 8, "cp_comm_type": "a2a"},
            "num_attention_heads is 4: must be a multiple of tensor_model_parallel_size x context_parallel_size",
        ),
        (
            {**LLAMA_LIKE, "recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]},
            "recompute_modules contains mla_up_proj: requires multi_latent_attention",
        ),
    ],
)
def test_impossible_settings_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        small_config(**fields)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"position_embedding_type": "none"}, "multi_latent_attention is True and position_embedding_type is none"),
        ({"rotary_percent": 0.5}, "rotary_percent is 0.5 and multi_latent_attention is True.* \\(4\\) is rotated"),
    ],
)
def test_models_whose_positions_do_not_fit_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        small_model(small_config(**LATENT), **arguments)


def test_layers_without_what_they_need_are_refused() -> None:
    spec = get_gpt_layer_local_submodules(None, False, True, True).self_attention
    attention = build_module(spec, config=small_config(**LATENT), layer_number=1)
    with pytest.raises(ValueError, match="rotary_pos_emb is None: latent attention requires a rotary table"):
        attention(torch.zeros(4, 1, 32))
    with pytest.raises(ValueError, match="multi_latent_attention is False: must be True for MLASelfAttention"):
        build_module(spec, config=small_config(), layer_number=1)
    parts = {**vars(spec.submodules), "kv_layernorm": None}
    with pytest.raises(ValueError, match="must have q_layernorm and kv_layernorm"):
        MLASelfAttention(small_config(**LATENT), MLASelfAttentionSubmodules(**parts), 1)


def test_dropout_of_probabilities_acts_in_training_alone() -> None:
    model = small_model(small_config(**LATENT, attention_dropout=0.5))
    first, second = loss_of(model), loss_of(model)
    assert first != second
    model.eval()
    assert loss_of(model) == loss_of(model)
