"""Specs of GPT layers, which select the classes of dense and mixture-of-experts layers, and adapters."""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

from megatron.core.config_field import require_defaults
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
from megatron.core.transformer.norms import LayerNorm, Norm, RMSNorm
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

_ADAPTED = {
    ColumnParallelLinear: LoRAColumnParallelLinear,
    ReplicatedLinear: LoRAReplicatedLinear,
    RowParallelLinear: LoRARowParallelLinear,
}


def get_gpt_decoder_layer_specs(
    config: TransformerConfig,
    use_transformer_engine: bool = False,
    normalization: str | None = None,
    qk_l2_norm: bool = False,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> list[ModuleSpec]:
    """Returns the spec of each layer of the model, dense or with experts according to moe_layer_freq.

    use_transformer_engine: see get_gpt_layer_with_transformer_engine_spec. normalization: LayerNorm or RMSNorm; None
    means the configured norm. qk_l2_norm: must be False. vp_stage, pp_rank: ignored, because the specs of the whole
    model are returned. Raises ValueError for unsupported settings.
    """
    # All layers share two specs. Building a module does not modify its spec.
    attention = {"qk_layernorm": config.qk_layernorm, "multi_latent_attention": config.multi_latent_attention}
    attention |= {"qk_l2_norm": qk_l2_norm}
    layer: Callable[..., ModuleSpec] = partial(get_gpt_layer_local_spec, normalization=normalization, **attention)
    if use_transformer_engine:
        transformer_engine.check_supported(config)
        _norm_of(normalization, config)
        layer = partial(get_gpt_layer_with_transformer_engine_spec, **attention)
    dense, experts = layer(None, False), layer(config.num_moe_experts, config.moe_grouped_gemm)
    if config.lora_rank is not None:
        dense, experts = (with_adapters(spec, config.lora_target_modules) for spec in (dense, experts))
    has_experts = layers_with_experts(config.num_moe_experts, config.moe_layer_freq, num_layers=config.num_layers)
    return [experts if with_experts else dense for with_experts in has_experts]


def get_gpt_decoder_block_spec(
    config: TransformerConfig,
    use_transformer_engine: bool = False,
    normalization: str | None = None,
    qk_l2_norm: bool = False,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> TransformerBlockSubmodules:
    """Returns the layer specs of get_gpt_decoder_layer_specs and the spec of the final norm.

    vp_stage, pp_rank: if either is given, only the layers of that model chunk are returned. Otherwise all layers of the
    model are returned, from which a block selects the layers of its chunk.
    """
    layers = get_gpt_decoder_layer_specs(config, use_transformer_engine, normalization, qk_l2_norm)
    if vp_stage is not None or pp_rank is not None:
        first = get_transformer_layer_offset(config, vp_stage, pp_rank)
        layers = layers[first : first + get_num_layers_to_build(config, vp_stage, pp_rank)]
    norm = transformer_engine.TENorm if use_transformer_engine else _norm_of(normalization)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def get_gpt_mtp_block_spec(
    config: TransformerConfig,
    spec: TransformerBlockSubmodules | ModuleSpec,
    use_transformer_engine: bool = False,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> MultiTokenPredictionBlockSubmodules | None:
    """Returns the specs of the multi-token prediction layers, or None without mtp_num_layers.

    spec: layer or block spec, whose last layer serves as the transformer layer of each depth. use_transformer_engine:
    ignored, because `spec` determines the layers. vp_stage, pp_rank: ignored, because a model uses the result only on
    its last stage.
    """
    if not config.mtp_num_layers:
        return None
    last = spec.layer_specs[-1] if isinstance(spec, TransformerBlockSubmodules) else spec
    layer = ModuleSpec(
        MultiTokenPredictionLayer, submodules=MultiTokenPredictionLayerSubmodules(transformer_layer=last)
    )
    return MultiTokenPredictionBlockSubmodules(layer_specs=[layer] * config.mtp_num_layers)


def get_gpt_layer_local_spec(*args: Any, **kwargs: Any) -> ModuleSpec:
    """Returns the spec of a layer with torch kernels. The arguments are as in get_gpt_layer_local_submodules."""
    return ModuleSpec(module=TransformerLayer, submodules=get_gpt_layer_local_submodules(*args, **kwargs))


def get_gpt_layer_with_transformer_engine_spec(*args: Any, **kwargs: Any) -> ModuleSpec:
    """Returns the spec of a layer with the norms, attention core and linear layers of Transformer Engine.

    The arguments are as in get_gpt_layer_with_transformer_engine_submodules.
    """
    submodules = get_gpt_layer_with_transformer_engine_submodules(*args, **kwargs)
    return ModuleSpec(module=TransformerLayer, submodules=submodules)


def get_gpt_layer_with_transformer_engine_submodules(
    num_experts: int | None = None,
    moe_grouped_gemm: bool = False,
    qk_layernorm: bool = False,
    multi_latent_attention: bool = False,
    fp8: str | None = None,
    qk_l2_norm: bool = False,
    use_te_op_fuser: bool = False,
    use_kitchen: bool = False,
    use_te_activation_func: bool = False,
    use_kitchen_attention: bool = False,
    kitchen_attention_backend: str = "sdpa",
    mla_down_proj_fusion: bool = False,
    use_grouped_gemm_for_dense_mlp: bool = False,
) -> TransformerLayerSubmodules:
    """Returns the submodules of a layer with the norms, attention core and linear layers of Transformer Engine.

    Experts and shared experts are the same as in get_gpt_layer_local_spec. num_experts, moe_grouped_gemm, qk_layernorm,
    multi_latent_attention: as in get_gpt_layer_local_submodules. All other arguments must have their defaults. If the
    package is missing, raises an error that is both a ValueError and an ImportError.
    """
    require_defaults(
        "get_gpt_layer_with_transformer_engine_submodules",
        _NOT_HERE,
        fp8=(fp8, None),
        qk_l2_norm=(qk_l2_norm, False),
        use_te_op_fuser=(use_te_op_fuser, False),
        use_kitchen=(use_kitchen, False),
        use_te_activation_func=(use_te_activation_func, False),
        use_kitchen_attention=(use_kitchen_attention, False),
        kitchen_attention_backend=(kitchen_attention_backend, "sdpa"),
        mla_down_proj_fusion=(mla_down_proj_fusion, False),
        use_grouped_gemm_for_dense_mlp=(use_grouped_gemm_for_dense_mlp, False),
    )
    layers = _engine_layers()
    qk_norm = layers.norm if qk_layernorm else None
    return TransformerLayerSubmodules(
        input_layernorm=layers.norm,
        self_attention=_attention_spec(layers, qk_norm, is_latent=multi_latent_attention),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=layers.norm,
        mlp=get_mlp_module_spec(num_experts is None, num_experts, moe_grouped_gemm),
        mlp_bda=get_bias_dropout_add,
    )


def get_gpt_layer_local_submodules(
    num_experts: int | None = None,
    moe_grouped_gemm: bool = False,
    qk_layernorm: bool = False,
    multi_latent_attention: bool = False,
    fp8: str | None = None,
    normalization: str | None = None,
    qk_l2_norm: bool = False,
    use_kitchen: bool = False,
    use_kitchen_attention: bool = False,
    kitchen_attention_backend: str = "sdpa",
) -> TransformerLayerSubmodules:
    """Returns the submodules of a layer with torch kernels, for scripts that replace some of them.

    num_experts: None builds a dense layer. moe_grouped_gemm: use grouped experts. qk_layernorm: normalize queries and
    keys. multi_latent_attention: use latent attention. normalization: LayerNorm or RMSNorm; None means the configured
    norm. All other arguments must have their defaults.
    """
    require_defaults(
        "get_gpt_layer_local_submodules",
        _NOT_HERE,
        fp8=(fp8, None),
        qk_l2_norm=(qk_l2_norm, False),
        use_kitchen=(use_kitchen, False),
        use_kitchen_attention=(use_kitchen_attention, False),
        kitchen_attention_backend=(kitchen_attention_backend, "sdpa"),
    )
    norm = _norm_of(normalization)
    layers = replace(_LOCAL_LAYERS, norm=norm)
    return TransformerLayerSubmodules(
        input_layernorm=norm,
        self_attention=_attention_spec(layers, norm if qk_layernorm else None, is_latent=multi_latent_attention),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=norm,
        mlp=get_mlp_module_spec(False, num_experts, moe_grouped_gemm),
        mlp_bda=get_bias_dropout_add,
    )


_NOT_HERE = "8-bit layers, L2 norms of heads and other kernel libraries are not supported"


@dataclass(frozen=True)
class _Layers:
    """The layer classes of one implementation, torch or Transformer Engine."""

    column: Any
    row: Any
    replicated: Any
    core: Any
    norm: Any


_LOCAL_LAYERS = _Layers(ColumnParallelLinear, RowParallelLinear, ReplicatedLinear, DotProductAttention, Norm)


def _engine_layers() -> _Layers:
    return _Layers(
        transformer_engine.TEColumnParallelLinear,
        transformer_engine.TERowParallelLinear,
        transformer_engine.TELinear,
        transformer_engine.TEDotProductAttention,
        transformer_engine.TENorm,
    )


def _norm_of(normalization: str | None, config: TransformerConfig | None = None) -> Any:
    """Returns the norm class for `normalization`. Raises ValueError if it differs from config.normalization."""
    kinds = {None: Norm, "LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
    if normalization not in kinds:
        raise ValueError(f"normalization is {normalization!r}: must be LayerNorm or RMSNorm")
    if config is not None and normalization not in (None, config.normalization):
        raise ValueError(
            f"normalization is {normalization} and config.normalization is {config.normalization}, which layers of "
            "Transformer Engine read: both must be the same"
        )
    return kinds[normalization]


def _attention_spec(layers: _Layers, qk_norm: Any, *, is_latent: bool) -> ModuleSpec:
    params = {"attn_mask_type": AttnMaskType.causal}
    if not is_latent:
        grouped = SelfAttentionSubmodules(layers.column, layers.core, layers.row, qk_norm, qk_norm)
        return ModuleSpec(SelfAttention, params, grouped)
    latent = MLASelfAttentionSubmodules(
        linear_q_proj=layers.column,
        linear_q_down_proj=layers.replicated,
        linear_q_up_proj=layers.column,
        linear_kv_down_proj=layers.replicated,
        linear_kv_up_proj=layers.column,
        core_attention=layers.core,
        linear_proj=layers.row,
        q_layernorm=qk_norm,
        kv_layernorm=qk_norm,
    )
    return ModuleSpec(MLASelfAttention, params, latent)


def get_mlp_module_spec(
    use_te: bool = True,
    num_experts: int | None = None,
    moe_grouped_gemm: bool = False,
    fp8: str | None = None,
    use_te_op_fuser: bool = False,
) -> ModuleSpec:
    """Returns the spec of a dense feed-forward layer, or of a mixture of grouped or sequential experts.

    use_te: use linear layers of Transformer Engine in a dense layer; experts always use layers of this project. fp8,
    use_te_op_fuser: must have their defaults.
    """
    require_defaults("get_mlp_module_spec", _NOT_HERE, fp8=(fp8, None), use_te_op_fuser=(use_te_op_fuser, False))
    layers = _engine_layers() if use_te and num_experts is None else _LOCAL_LAYERS
    dense = ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=layers.column, linear_fc2=layers.row))
    if num_experts is None:
        return dense
    # Sequential experts are dense layers. Grouped experts have no replaceable submodules except adapters.
    experts = ModuleSpec(SequentialMLP, submodules=dense.submodules)
    if moe_grouped_gemm:
        experts = ModuleSpec(GroupedMLP, submodules=GroupedMLPSubmodules())
    # Built only if the configuration sets its width.
    shared_experts = ModuleSpec(SharedExpertMLP, submodules=dense.submodules)
    return ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=experts, shared_experts=shared_experts))


def with_adapters(spec: Any, targets: list[str]) -> Any:
    """Returns a copy of a spec, or of a dataclass of specs, with adapters on the linear layers named in `targets`."""
    if isinstance(spec, ModuleSpec):
        return replace(spec, submodules=with_adapters(spec.submodules, targets))
    if not is_dataclass(spec) or isinstance(spec, type):
        return spec
    names = [part.name for part in fields(spec)]
    if isinstance(spec, GroupedMLPSubmodules):
        # Grouped weights are not linear layers, so their adapters are separate modules.
        return replace(spec, **{name: ExpertAdapter for name in names if name in targets})
    changed = {}
    for name in names:
        value = vars(spec)[name]
        is_target = name in targets and isinstance(value, type)
        changed[name] = _ADAPTED.get(value, value) if is_target else with_adapters(value, targets)
    return replace(spec, **changed)
