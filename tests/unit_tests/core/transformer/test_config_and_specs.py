"""TransformerConfig's checks and derived fields, and modules built from specs."""

import types
from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_mlp_module_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend, parse_attn_backend
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe_config import layers_with_experts
from megatron.core.transformer.spec_utils import ModuleSpec, build_module, import_module
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, NormalInit, TransformerConfig
from tests.unit_tests.core.models.small_models import LLAMA_LIKE, small_batch, small_config, small_model

LEVELS = {"context_parallel_size": 4, "cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [2, 2]}


NO_BIAS = {"add_bias_linear": False}


def test_unset_fields_follow_from_others() -> None:
    config = TransformerConfig(num_layers=8, hidden_size=64, num_attention_heads=4, num_moe_experts=2)
    assert (config.kv_channels, config.num_query_groups) == (16, 4)
    assert (config.ffn_hidden_size, config.moe_ffn_hidden_size) == (256, 256)
    assert config.init_method == NormalInit(0.02) and config.output_layer_init_method == NormalInit(0.005)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_size": 33}, r"hidden_size is 33: must be divisible by num_attention_heads \(4\)"),
        (
            {"hidden_size": 33, "num_query_groups": 3, "window_size": (4, 1), "fp16": True, "bf16": True},
            r"fp16 and ModelParallelConfig.bf16 are both.*\nhidden_size is 33.*\nnum_attention_heads is 4.*\nwindow",
        ),
        ({"num_query_groups": 3}, r"num_attention_heads is 4: must be divisible by num_query_groups \(3\)"),
        ({"window_size": (4, 1)}, r"window_size is \(4, 1\): must be \(left, 0\)"),
        ({"window_size": (4.5, 0)}, r"window_size is \(4.5, 0\): must be \(left, 0\) in tokens"),
        ({"window_size": (-2, 0)}, "window_size is -2: must be at least -1"),
        ({"window_attn_skip_freq": 2}, "window_attn_skip_freq is 2, but window_size is not given"),
        ({"window_size": (4, 0), "window_attn_skip_freq": [1]}, "must have a 1 .* for each of the 2 layers"),
        ({"window_size": (4, 0), "window_attn_skip_freq": "2*x"}, "window_attn_skip_freq is '2\\*x'"),
        ({"num_layers": None}, "num_layers is None: must be an integer"),
        ({"hidden_dropout": 1.0}, "hidden_dropout is 1.0: must be less than 1"),
        ({"normalization": "BatchNorm"}, "normalization is 'BatchNorm': must be one of LayerNorm, RMSNorm"),
        ({"num_moe_experts": 2, "moe_router_topk": 3}, r"moe_router_topk is 3: must be at most num_moe_experts \(2\)"),
        (
            {"num_moe_experts": 4, "moe_router_num_groups": 3, "moe_router_group_topk": 1},
            r"moe_router_num_groups is 3: must divide num_moe_experts \(4\)",
        ),
        (
            {"num_moe_experts": 4, "moe_router_num_groups": 4, "moe_router_group_topk": 3},
            "moe_router_group_topk is 3: must be at most .* and moe_router_topk",
        ),
        (
            {"num_moe_experts": 4, "moe_router_num_groups": 4, "moe_router_group_topk": 1},
            "moe_router_topk is 2: must be at most the 1 experts of moe_router_group_topk",
        ),
        (
            {"num_moe_experts": 4, "moe_router_bias_update_rate": 0.1},
            "moe_router_bias_update_rate is 0.1 but moe_router_enable_expert_bias is not set",
        ),
        (
            {
                "num_moe_experts": 4,
                "moe_router_load_balancing_type": ["sinkhorn", "aux_loss"],
                "moe_aux_loss_coeff": [0.0, 0.0],
            },
            "sinkhorn cannot be combined",
        ),
        (
            {
                "num_moe_experts": 4,
                "moe_router_load_balancing_type": "sinkhorn",
                "moe_router_score_function": "sigmoid",
            },
            "moe_router_score_function is sigmoid but moe_router_load_balancing_type is sinkhorn",
        ),
        ({"moe_grouped_gemm": True}, "moe_grouped_gemm is set but num_moe_experts is not"),
        (
            {"activation_func_clamp_value": 7.0},
            "activation_func_clamp_value is 7.0 but feed-forward layers are not gated",
        ),
        ({"glu_linear_offset": 1.0}, "glu_linear_offset is 1.0 but feed-forward layers are not gated"),
        ({"num_moe_experts": 2, "moe_layer_freq": [1]}, "moe_layer_freq has 1 entries.*num_layers is 2"),
        ({"num_moe_experts": 2, "moe_layer_freq": [1, 2]}, r"moe_layer_freq is \[1, 2\]: entries must be 0"),
        ({"num_moe_experts": 2, "moe_layer_freq": 0}, "moe_layer_freq is 0: must be at least 1"),
        ({"num_moe_experts": 2, "moe_aux_loss_coeff": [0.1, 0.2]}, "moe_aux_loss_coeff has 2 values"),
        ({"num_moe_experts": 2, "moe_aux_loss_coeff": float("inf")}, "moe_aux_loss_coeff is inf"),
        ({"moe_router_load_balancing_type": "quantile"}, "must be one of aux_loss, seq_aux_loss"),
        ({"tensor_model_parallel_size": 3}, r"num_attention_heads is 4: .* tensor_model_parallel_size \(3\)"),
        (
            {"tensor_model_parallel_size": 4, "num_query_groups": 2},
            r"num_query_groups is 2: must be a multiple of tensor_model_parallel_size \(4\)",
        ),
        (
            {"tensor_model_parallel_size": 4, "ffn_hidden_size": 6},
            r"ffn_hidden_size is 6: must be a multiple of tensor_model_parallel_size \(4\)",
        ),
        (
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            r"num_layers is 2: must be a multiple of pipeline_model_parallel_size x virtual stages \(4\)",
        ),
        (
            {"virtual_pipeline_model_parallel_size": 2},
            "virtual_pipeline_model_parallel_size is 2: must be 1 with pipeline_model_parallel_size 1",
        ),
        ({"cp_comm_type": ["p2p"] * 3}, "cp_comm_type has 3 values: must have 1, or one for each of the 2 layers"),
        (
            {"context_parallel_size": 2, "attention_dropout": 0.1, "cp_comm_type": ["a2a", "p2p"]},
            "attention_dropout is 0.1, context_parallel_size is 2 and cp_comm_type is p2p, .* not support dropout",
        ),
        (
            {"context_parallel_size": 4, "cp_comm_type": "a2a", "num_query_groups": 2},
            r"num_query_groups is 2: must be a multiple of .* cp_comm_type a2a \(4\)",
        ),
        (
            {"context_parallel_size": 4, "cp_comm_type": ["p2p", "a2a+p2p"]},
            r"cp_comm_type is a2a\+p2p, context_parallel_size is 4 and hierarchical_context_parallel_sizes is None",
        ),
        (
            {**LEVELS, "hierarchical_context_parallel_sizes": [2, 2, 1]},
            r"cp_comm_type is a2a\+p2p, .* hierarchical_context_parallel_sizes is \[2, 2, 1\]: must be two sizes",
        ),
        (
            {**LEVELS, "hierarchical_context_parallel_sizes": [2, 4]},
            r"hierarchical_context_parallel_sizes is \[2, 4\]: .* context_parallel_size \(4\)",
        ),
        (
            {**LEVELS, "hierarchical_context_parallel_sizes": [-2, -2]},
            "hierarchical_context_parallel_sizes is -2: must be at least 1",
        ),
        (
            {**LEVELS, "cp_comm_type": ["p2p", "a2a"]},
            r"hierarchical_context_parallel_sizes is \[2, 2\] and cp_comm_type is a2a, p2p: only a2a\+p2p has levels",
        ),
        (
            {**LEVELS, "num_query_groups": 1},
            "num_query_groups is 1: must be a multiple of tensor_model_parallel_size x the first of "
            r"hierarchical_context_parallel_sizes, for cp_comm_type a2a\+p2p \(2\)",
        ),
        (
            {**LEVELS, "tensor_model_parallel_size": 4},
            r"num_attention_heads is 4: must be a multiple of .*, for cp_comm_type a2a\+p2p \(8\)",
        ),
        (
            {**LEVELS, "attention_dropout": 0.1},
            r"attention_dropout is 0.1, context_parallel_size is 4 .* not support dropout",
        ),
        ({"expert_model_parallel_size": 2}, "expert_model_parallel_size is 2 but num_moe_experts is not set"),
        (
            {"expert_model_parallel_size": 2, "num_moe_experts": 3},
            r"num_moe_experts is 3: must be a multiple of expert_model_parallel_size \(2\)",
        ),
        (
            {"expert_tensor_parallel_size": 5, "num_moe_experts": 2},
            r"moe_ffn_hidden_size is .*: must be a multiple of expert_tensor_parallel_size \(5\)",
        ),
        (
            {
                "expert_tensor_parallel_size": 2,
                "num_moe_experts": 2,
                "moe_ffn_hidden_size": 20,
                "moe_grouped_gemm": True,
                "add_bias_linear": False,
            },
            "moe_ffn_hidden_size is 20: must be a multiple of 8 with moe_grouped_gemm",
        ),
        (
            {"lora_rank": 6, "num_moe_experts": 2, "moe_grouped_gemm": True},
            "lora_rank is 6: must be a multiple of 4, because the kernel of moe_grouped_gemm",
        ),
        (
            {"lora_rank": 4, "num_moe_experts": 2, "moe_grouped_gemm": True, "bf16": True},  # built in fp32, then cast
            "lora_rank is 4: must be a multiple of 8, because the kernel of moe_grouped_gemm",
        ),
        (
            {"moe_ffn_hidden_size": 20, "num_moe_experts": 2, "moe_grouped_gemm": True, "fp16": True, **NO_BIAS},
            "moe_ffn_hidden_size is 20: must be a multiple of 8 with moe_grouped_gemm",
        ),
        (
            {"hidden_size": 20, "num_moe_experts": 2, "moe_grouped_gemm": True, "bf16": True, **NO_BIAS},
            "hidden_size is 20: must be a multiple of 8 with moe_grouped_gemm",
        ),
        (
            {"lora_rank": 8, "num_moe_experts": 2, "expert_tensor_parallel_size": 2},
            "expert_tensor_parallel_size is 2 and lora_rank is set: experts with adapters cannot be split",
        ),
        (
            {"tensor_model_parallel_size": 2, "num_moe_experts": 2},
            "tensor_model_parallel_size is 2 and num_moe_experts is 2: experts then require --sequence-parallel",
        ),
        ({"bf16": True, "fp16": True}, "choose one precision"),
    ],
)
def test_impossible_fields_are_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        small_config(**fields)


@pytest.mark.parametrize(
    "fields",
    [{"moe_ffn_hidden_size": 20}, {"hidden_size": 36, "num_attention_heads": 6}, {"lora_rank": 4}, {"lora_rank": 12}],
)
def test_widths_that_a_cast_made_unreadable_are_named_in_forward(fields: dict[str, Any]) -> None:
    experts = {"num_moe_experts": 4, "moe_grouped_gemm": True, "moe_ffn_hidden_size": 16, "add_bias_linear": False}
    model = small_model(small_config(**{**experts, **fields})).half()
    tokens, positions, labels = small_batch()
    with pytest.raises(ValueError, match=r"hidden_size, moe_ffn_hidden_size .* and lora_rank must be multiples of 8"):
        model(tokens, positions, None, labels=labels)


def test_every_nth_layer_has_experts_from_the_first() -> None:
    assert layers_with_experts(2, 1, num_layers=3) == [1, 1, 1]
    assert layers_with_experts(2, 3, num_layers=5) == [1, 0, 0, 1, 0]
    assert layers_with_experts(None, 1, num_layers=2) == [0, 0]
    config = small_config(num_layers=4, num_moe_experts=2, moe_layer_freq="([0]+[1])*2")
    assert config.moe_layer_freq == [0, 1, 0, 1]


def test_attention_backends_are_known_by_name() -> None:
    assert parse_attn_backend("fused") is AttnBackend.fused and str(AttnBackend.auto) == "auto"
    with pytest.raises(ValueError, match="'quick' is not an attention backend: choose from flash"):
        parse_attn_backend("quick")


def test_specs_build_classes_paths_and_functions() -> None:
    spec = ModuleSpec(("torch.nn", "Linear"), params={"in_features": 3, "bias": False})
    linear = build_module(spec, out_features=2)
    assert isinstance(linear, nn.Linear) and linear.weight.shape == (2, 3) and linear.bias is None
    assert build_module(nn.Linear, 3, 2).weight.shape == (2, 3)
    assert import_module(("torch.nn", "Linear")) is nn.Linear

    def function() -> None: ...

    assert isinstance(function, types.FunctionType) and build_module(ModuleSpec(function), 1) is function


def test_a_failing_spec_says_which_module_it_was() -> None:
    with pytest.raises(TypeError) as error:
        build_module(ModuleSpec(nn.Linear), width=3)
    assert error.value.__notes__ == ["while building torch.nn.modules.linear.Linear"]


def test_a_misspelt_name_in_a_spec_is_told_with_its_module() -> None:
    with pytest.raises(ValueError, match="torch.nn has no 'Linaer'"):
        build_module(ModuleSpec(("torch.nn", "Linaer")), 3, 2)


def test_identity_operations_give_back_what_they_get() -> None:
    x = torch.randn(2)
    assert IdentityOp(1, a=2)(x, None) is x
    assert IdentityFuncOp()(True)(x) is x


def test_a_block_wants_one_spec_a_layer() -> None:
    with pytest.raises(ValueError, match="has 0 layers: must have num_layers .2., or the 2 layers"):
        TransformerBlock(small_config(**LLAMA_LIKE), TransformerBlockSubmodules())


def test_a_block_without_the_first_part_goes_on_from_the_tensor_it_was_given() -> None:
    config, x = small_config(), torch.randn(3, 2, 32)
    blocks = [TransformerBlock(config, get_gpt_decoder_block_spec(config), True, first) for first in (True, False)]
    blocks[1].load_state_dict(blocks[0].state_dict())
    blocks[1].set_input_tensor(x)
    assert torch.equal(blocks[1](None), blocks[0](x))
    for block in blocks:
        with pytest.raises(ValueError, match="no embedding: call set_input_tensor"):
            block(None)


def test_a_layer_of_experts_records_under_its_number() -> None:
    config = small_config(num_moe_experts=4, moe_aux_loss_coeff=0.1, moe_router_load_balancing_type="aux_loss")
    layer = MoELayer(config, get_mlp_module_spec(False, 4, True).submodules, 3)
    layer(torch.randn(3, 2, 32))
    assert layer.router.aux_losses.counts.sum(dim=0).tolist() == [0, 0, 1]


def test_configurations_with_all_defaults_have_those_of_megatron_and_build_no_layers() -> None:
    config = TransformerConfig(num_attention_heads=1, num_layers=1, timers=None)
    assert (config.hidden_size, config.gradient_accumulation_fusion, config.overlap_p2p_comm) == (0, False, False)
    assert TransformerConfig().num_layers == 0 and callable(config.timers)
    with pytest.raises(ValueError, match="hidden_size is 0: must be at least 1 to build this part of a model"):
        TransformerBlock(config, get_gpt_decoder_block_spec(config))


def test_fields_of_what_does_not_exist_here_are_accepted_at_their_defaults_alone() -> None:
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    TransformerConfig(**sizes, fp4=None, fp4_recipe="nvfp4", mamba_state_dim=128, bias_dropout_fusion=True)
    with pytest.raises(ValueError, match=r"TransformerConfig\.fp4 is 'e2m1': 4-bit training .*; keep the default None"):
        TransformerConfig(**sizes, fp4="e2m1")
    with pytest.raises(ValueError, match="cpu_offloading is True and cpu_offloading_num_layers is 0"):
        TransformerConfig(**sizes, cpu_offloading=True)
    with pytest.raises(ValueError, match="softmax_scale is 0.5 and multi_latent_attention is True"):
        TransformerConfig(**sizes, softmax_scale=0.5, multi_latent_attention=True)


def test_latent_attention_without_yarn_needs_no_other_field() -> None:
    config = MLATransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
    assert (config.rope_type, config.original_max_position_embeddings, config.beta_fast) == ("yarn", 4096, 32)
    plain = MLATransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, rope_type="rope")
    assert plain.rope_type == "rope"
    with pytest.raises(ValueError, match="beta_fast is 5.* but rope_type is rope: requires"):
        MLATransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, rope_type="rope", beta_fast=5)


def test_scores_of_attention_are_scaled_by_softmax_scale() -> None:
    query, key, value = torch.randn(3, 4, 1, 2, 4, generator=torch.Generator().manual_seed(1)).unbind()
    outputs = [
        DotProductAttention(small_config(hidden_size=8, num_attention_heads=2, **fields), 1)(query * factor, key, value)
        for fields, factor in (({"softmax_scale": 0.25}, 1.0), ({}, 0.5))
    ]
    torch.testing.assert_close(*outputs)
