"""Specs of GPT layers: the classes of a dense or mixture-of-experts layer, with or without adapters."""

from dataclasses import fields, is_dataclass, replace
from typing import Any

from megatron.core.extensions import transformer_engine
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.lora import LoRAColumnParallelLinear, LoRAReplicatedLinear, LoRARowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import ExpertAdapter, GroupedMLP, GroupedMLPSubmodules, SequentialMLP
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

_ADAPTED = {
    ColumnParallelLinear: LoRAColumnParallelLinear,
    ReplicatedLinear: LoRAReplicatedLinear,
    RowParallelLinear: LoRARowParallelLinear,
}


def get_gpt_decoder_block_spec(
    config: TransformerConfig, use_transformer_engine: bool = False
) -> TransformerBlockSubmodules:
    """Returns the spec of each layer, dense or with experts according to moe_layer_freq, and of the final norm.

    use_transformer_engine: see get_gpt_layer_with_transformer_engine_spec. Raises ValueError for unsupported settings.
    """
    # Layers share two specs, which building does not change.
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
    """Returns the specs of multi-token prediction layers, which equal the last layer of `spec`; None without any.

    use_transformer_engine: ignored, since `spec` determines the layers.
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
    """Returns the spec of a layer with the kernels of torch.

    num_experts: None for a dense layer. qk_layernorm: normalize queries and keys. multi_latent_attention: use latent
    attention.
    """
    submodules = get_gpt_layer_local_submodules(num_experts, moe_grouped_gemm, qk_layernorm, multi_latent_attention)
    return ModuleSpec(module=TransformerLayer, submodules=submodules)


def get_gpt_layer_with_transformer_engine_spec(
    num_experts: int | None = None,
    moe_grouped_gemm: bool = False,
    qk_layernorm: bool = False,
    multi_latent_attention: bool = False,
) -> ModuleSpec:
    """Returns the spec of a layer with the norms, attention core and linear layers of Transformer Engine.

    Experts and shared experts are those of get_gpt_layer_local_spec. multi_latent_attention: must be False. Raises an
    error that is both a ValueError and an ImportError if the package is missing.
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
    """Returns the parts of get_gpt_layer_local_spec's layer, for scripts that replace some of them."""
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
    """Returns the spec of a dense feed-forward layer, or of a mixture of grouped or sequential experts."""
    dense = ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    )
    if num_experts is None:
        return dense
    # Sequential experts are dense layers. Grouped experts have no replaceable parts except adapters.
    experts = ModuleSpec(SequentialMLP, submodules=dense.submodules)
    if moe_grouped_gemm:
        experts = ModuleSpec(GroupedMLP, submodules=GroupedMLPSubmodules())
    # Built only if the configuration sets its width.
    shared_experts = ModuleSpec(SharedExpertMLP, submodules=dense.submodules)
    return ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=experts, shared_experts=shared_experts))


def with_adapters(spec: Any, targets: list[str]) -> Any:
    """Returns a spec, or a dataclass of specs, with low-rank adapters on the linear layers of these names."""
    if isinstance(spec, ModuleSpec):
        return replace(spec, submodules=with_adapters(spec.submodules, targets))
    if not is_dataclass(spec) or isinstance(spec, type):
        return spec
    names = [part.name for part in fields(spec)]
    if isinstance(spec, GroupedMLPSubmodules):
        # Grouped weights are not linear layers, so their adapters are modules of their own.
        return replace(spec, **{name: ExpertAdapter for name in names if name in targets})
    changed = {}
    for name in names:
        value = vars(spec)[name]
        is_target = name in targets and isinstance(value, type)
        changed[name] = _ADAPTED.get(value, value) if is_target else with_adapters(value, targets)
    return replace(spec, **changed)
