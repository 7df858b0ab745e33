"""Specs of GPT's layers: which classes a dense or mixture-of-experts layer is made of; sizes come from the config."""

from dataclasses import replace

from megatron.core.extensions import transformer_engine
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.lora_specs import with_adapters
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import GroupedMLP, GroupedMLPSubmodules, SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe_config import layers_with_experts
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.norms import Norm
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules


def get_gpt_decoder_block_spec(
    config: TransformerConfig, use_transformer_engine: bool = False
) -> TransformerBlockSubmodules:
    """One layer spec per layer, dense or with experts as moe_layer_freq says, and the final norm.

    use_transformer_engine: see get_gpt_layer_with_transformer_engine_spec; raises ValueError for what it does not have.
    """
    # Two specs serve all layers: a spec is a description, building copies nothing from it.
    attention = config.qk_layernorm, config.multi_latent_attention
    layer = get_gpt_layer_local_spec
    if use_transformer_engine:
        transformer_engine.check_supported(config)
        layer = get_gpt_layer_with_transformer_engine_spec
    dense = layer(None, False, *attention)
    experts = layer(config.num_moe_experts, config.moe_grouped_gemm, *attention)
    if config.lora_rank is not None:
        dense, experts = (with_adapters(spec, config.lora_target_modules) for spec in (dense, experts))
    has_experts = layers_with_experts(config.num_moe_experts, config.moe_layer_freq, num_layers=config.num_layers)
    return TransformerBlockSubmodules(
        layer_specs=[experts if with_experts else dense for with_experts in has_experts],
        layer_norm=transformer_engine.TENorm if use_transformer_engine else Norm,
    )


def get_gpt_mtp_block_spec(
    config: TransformerConfig,
    spec: TransformerBlockSubmodules | ModuleSpec,
    use_transformer_engine: bool = False,
) -> MultiTokenPredictionBlockSubmodules | None:
    """The layers of multi-token prediction, of the kind of the last layer of `spec`; None where there are none.

    use_transformer_engine: as old scripts give it; what their transformer layers are is said by `spec`.
    """
    if not config.mtp_num_layers:
        return None
    last = spec.layer_specs[-1] if isinstance(spec, TransformerBlockSubmodules) else spec
    layer = ModuleSpec(
        MultiTokenPredictionLayer, submodules=MultiTokenPredictionLayerSubmodules(transformer_layer=last)
    )
    return MultiTokenPredictionBlockSubmodules(layer_specs=[layer] * config.mtp_num_layers)


def get_gpt_layer_local_spec(
    num_experts: int | None = None,
    moe_grouped_gemm: bool = False,
    qk_layernorm: bool = False,
    multi_latent_attention: bool = False,
) -> ModuleSpec:
    """A layer of torch's own kernels; with experts where num_experts is given, with norms of queries and keys where
    qk_layernorm is set, with latent attention where multi_latent_attention is.
    """
    submodules = get_gpt_layer_local_submodules(num_experts, moe_grouped_gemm, qk_layernorm, multi_latent_attention)
    return ModuleSpec(module=TransformerLayer, submodules=submodules)


def get_gpt_layer_with_transformer_engine_spec(
    num_experts: int | None = None,
    moe_grouped_gemm: bool = False,
    qk_layernorm: bool = False,
    multi_latent_attention: bool = False,
) -> ModuleSpec:
    """As get_gpt_layer_local_spec, with Transformer Engine's norms, attention core and linear layers; experts and
    shared experts are this project's own. Raises ValueError, an ImportError too, where the package is missing.

    multi_latent_attention: must be False.
    """
    if multi_latent_attention:
        raise ValueError("multi_latent_attention is True: layers of Transformer Engine do not have it here")
    submodules = get_gpt_layer_local_submodules(num_experts, moe_grouped_gemm, qk_layernorm)
    norm = transformer_engine.TENorm
    linear = transformer_engine.TEColumnParallelLinear, transformer_engine.TERowParallelLinear
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=linear[0],
            core_attention=transformer_engine.TEDotProductAttention,
            linear_proj=linear[1],
            q_layernorm=norm if qk_layernorm else None,
            k_layernorm=norm if qk_layernorm else None,
        ),
    )
    parts = {"input_layernorm": norm, "self_attention": attention, "pre_mlp_layernorm": norm}
    if num_experts is None:
        parts["mlp"] = ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=linear[0], linear_fc2=linear[1]))
    return ModuleSpec(module=TransformerLayer, submodules=replace(submodules, **parts))


def get_gpt_layer_local_submodules(
    num_experts: int | None = None,
    moe_grouped_gemm: bool = False,
    qk_layernorm: bool = False,
    multi_latent_attention: bool = False,
) -> TransformerLayerSubmodules:
    """The parts of get_gpt_layer_local_spec's layer, for scripts that replace some."""
    norm = Norm if qk_layernorm else None
    return TransformerLayerSubmodules(
        input_layernorm=Norm,
        self_attention=_latent_attention(norm) if multi_latent_attention else _grouped_attention(norm),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=Norm,
        mlp=get_mlp_module_spec(num_experts, moe_grouped_gemm),
        mlp_bda=get_bias_dropout_add,
    )


def _grouped_attention(norm: type | None) -> ModuleSpec:
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=norm,
            k_layernorm=norm,
        ),
    )


def _latent_attention(norm: type | None) -> ModuleSpec:
    return ModuleSpec(
        module=MLASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=ReplicatedLinear,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=ReplicatedLinear,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=norm,
            kv_layernorm=norm,
        ),
    )


def get_mlp_module_spec(num_experts: int | None = None, moe_grouped_gemm: bool = False) -> ModuleSpec:
    """A dense feed-forward layer, or a mixture of experts with grouped or sequential experts."""
    dense = ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    )
    if num_experts is None:
        return dense
    # The sequential experts are dense layers; the grouped ones have no parts to choose but adapters.
    experts = ModuleSpec(SequentialMLP, submodules=dense.submodules)
    if moe_grouped_gemm:
        experts = ModuleSpec(GroupedMLP, submodules=GroupedMLPSubmodules())
    # Built only where the configuration gives it a width.
    shared_experts = ModuleSpec(SharedExpertMLP, submodules=dense.submodules)
    return ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=experts, shared_experts=shared_experts))
