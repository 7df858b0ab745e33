"""TransformerConfig, a flat configuration that inherits from one small dataclass per topic.

The settings of experts are in moe_config.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from megatron.core.block_scaled.format import BlockFormat
from megatron.core.config_field import config_field, run_checks, validate_fields
from megatron.core.model_parallel_config import (
    InitMethod,
    ModelParallelConfig,
    check_multiple,
    normalize_given_forms,
    set_timers,
    validate_layer_offload,
    validate_parallel_layout,
    validate_precision,
)
from megatron.core.pipeline_placement import check_chunks
from megatron.core.transformer.attention_config import (
    AttentionConfig,
    MLAConfig,
    validate_attention,
    validate_context_parallel,
    validate_mla,
    validate_qk_clip,
)
from megatron.core.transformer.cuda_graph_config import CudaGraphConfig, graphed_modules, normalize_graph_modules
from megatron.core.transformer.fp8_config import precision_words, validate_fp8
from megatron.core.transformer.layer_pattern import MAX_LAYERS, parse_layer_pattern
from megatron.core.transformer.lora_config import LoRAConfig, validate_lora, validate_lora_targets
from megatron.core.transformer.moe_config import (
    MoEConfig,
    layers_with_experts,
    validate_grouped_gemm,
    validate_moe,
    validate_moe_layer_freq,
)
from megatron.core.transformer.mtp_config import MTPConfig, validate_mtp, with_mtp_layers
from megatron.core.transformer.mup_config import MuPConfig, resolve_mup
from megatron.core.transformer.offload_config import (
    OffloadConfig,
    can_offload,
    validate_offload,
    validate_offload_with_recompute,
)
from megatron.core.transformer.paged_stash_config import (
    validate_paged_stash,
    validate_stash_with_activation_memory,
)
from megatron.core.transformer.pipeline_split import layers_per_part, mtp_layers_in_layout, validate_pipeline_split
from megatron.core.transformer.recompute_config import (
    RecomputeConfig,
    resolve_recompute,
    validate_recompute,
    validate_recompute_modules,
)
from megatron.core.transformer.yarn_config import YarnConfig, resolve_yarn


@dataclass(kw_only=True)
class TransformerConfig(
    ModelParallelConfig,
    AttentionConfig,
    MLAConfig,
    YarnConfig,
    MoEConfig,
    MTPConfig,
    MuPConfig,
    LoRAConfig,
    RecomputeConfig,
    OffloadConfig,
    CudaGraphConfig,
):
    """Configuration of a transformer block.

    activation_func, gated_linear_unit: the feed-forward layers compute act(x W), or act(x W_gate) * (x W_up) if gated.
    ffn_hidden_size: defaults to 4 * hidden_size in both cases; only --swiglu on the command line changes it to 8/3.
    init_method, output_layer_init_method: fill a weight in place; default: normal with init_method_std, divided by
    sqrt(2 * num_layers) for the layers that write into the residual stream. embedding_init_method: the same for word
    and position embeddings; default: normal with embedding_init_method_std if that is set, else init_method.
    unscaled_init_method: used for layers that do not sum over a width, including an untied output layer; default:
    init_method, or with use_mup normal with init_method_std. init_seed: seed of the initial weights; default: torch's
    seed at construction. num_layers, hidden_size and num_attention_heads may be 0 for code that uses only other fields,
    such as the data-parallel wrapper; blocks and attention layers reject 0 (require_sizes).
    """

    cli_group: ClassVar[str] = "transformer configuration"

    num_layers: int = config_field(
        0, cli_default=None, help="Number of transformer layers.", at_least=0, at_most=MAX_LAYERS
    )
    hidden_size: int = config_field(0, cli_default=None, help="Width of the residual stream.", at_least=0)
    ffn_hidden_size: int = config_field(
        None,
        filled_in=True,
        help="Inner width of the feed-forward layers; default: 4 x hidden size, or 8/3 x with --swiglu.",
        at_least=1,
    )
    hidden_dropout: float = config_field(
        0.1, help="Dropout probability of each layer's contribution to the residual stream.", at_least=0, less_than=1
    )
    add_bias_linear: bool = config_field(True, flags=("--disable-bias-linear",), help="Omit biases from linear layers.")
    normalization: str = config_field(
        "LayerNorm",
        help="Norm before attention, before feed-forward layers, and after the last layer.",
        choices=("LayerNorm", "RMSNorm"),
    )
    layernorm_epsilon: float = config_field(
        1e-5, flags=("--norm-epsilon",), help="Constant added to the variance in norms.", more_than=0
    )
    layernorm_zero_centered_gamma: bool = config_field(
        False,
        flags=("--apply-layernorm-1p",),
        help="Store norm weights as offsets from 1: they start at 0, and norms add 1 in fp32.",
    )
    fp32_residual_connection: bool = config_field(
        False,
        help="With --bf16 or --fp16, keep the residual stream in fp32, through all layers and between pipeline "
        "stages. Norms read it and return their result in the parameters' precision.",
    )
    init_method_std: float = config_field(0.02, help="Standard deviation of initial weights.", at_least=0)
    embedding_init_method_std: float | None = config_field(
        None,
        help="Standard deviation of the initial word and position embeddings, and of an output layer tied to the word "
        "embeddings; default: the value for other weights.",
        at_least=0,
    )
    activation_func: Callable[[torch.Tensor], torch.Tensor] = F.gelu
    gated_linear_unit: bool = False
    activation_func_clamp_value: float | None = config_field(
        None,
        help="In gated feed-forward layers, clamp gates to at most this value, and the values they multiply to "
        "between minus and plus this value.",
        more_than=0,
    )
    glu_linear_offset: float = config_field(
        0.0, help="In gated feed-forward layers, a constant added to the values that gates multiply, after clamping."
    )
    init_method: InitMethod | None = None
    output_layer_init_method: InitMethod | None = None
    embedding_init_method: InitMethod | None = None
    unscaled_init_method: InitMethod | None = None
    init_seed: int | None = None
    transformer_impl: str = config_field(
        "transformer_engine",
        flags=(),
        choices=("local", "transformer_engine"),
        help="Layer implementation for a script's model builder to read. No effect by itself, because the layer spec "
        "determines the layers.",
    )

    def __post_init__(self) -> None:
        normalize_given_forms(self)
        normalize_graph_modules(self)
        validate_fields(self)
        set_timers(self)
        resolve_yarn(self, multi_latent_attention=self.multi_latent_attention)
        if isinstance(self.moe_layer_freq, str):
            self.moe_layer_freq = parse_layer_pattern(self.moe_layer_freq, field="moe_layer_freq")
        if isinstance(self.window_attn_skip_freq, str):
            self.window_attn_skip_freq = parse_layer_pattern(self.window_attn_skip_freq, field="window_attn_skip_freq")
        # Validated first, because other checks iterate over this pattern.
        validate_moe_layer_freq(self, self.num_layers)
        run_checks(
            partial(validate_precision, self),
            partial(validate_residual, self),
            partial(validate_layer_offload, self),
            partial(validate_heads, self),
            # Derived fields are set after the checks whose messages quote user input.
            partial(fill_in_sizes, self),
            partial(validate_gated_unit, self),
            partial(validate_moe, self),
            partial(validate_expert_overlap, self),
            partial(validate_schedule, self),
            partial(validate_precision_of_experts, self),
            partial(validate_activations, self),
            partial(validate_layout_of_layers, self),
        )
        resolve_mup(self, hidden_size=self.hidden_size, has_adapters=self.lora_rank is not None)
        self._fill_in_init_methods()
        self._scale_scores()

    def take_tensor_sizes(self, *, tp: int, expt_tp: int) -> None:
        """Replaces tensor-parallel sizes of 1 by the sizes of this rank's groups.

        Raises ValueError if a layer cannot be split over the groups.
        """
        before = self.tensor_model_parallel_size, self.expert_tensor_parallel_size
        if self.tensor_model_parallel_size == 1:
            self.tensor_model_parallel_size = tp
        if self.expert_tensor_parallel_size == 1:
            self.expert_tensor_parallel_size = expt_tp
        if before != (self.tensor_model_parallel_size, self.expert_tensor_parallel_size):
            validate_layout_of_layers(self)

    def _scale_scores(self) -> None:
        # Latent attention applies the factor to its scale separately.
        if self.multi_latent_attention or not self.kv_channels or self.score_factor(self.kv_channels) == 1:
            return
        scale = self.score_factor(self.kv_channels) / math.sqrt(self.kv_channels)
        if self.softmax_scale not in (None, scale):
            raise ValueError(
                f"softmax_scale is {self.softmax_scale} and mup_base_head_dim is {self.mup_base_head_dim}, which "
                "determines the scale: set only one of them"
            )
        self.softmax_scale = scale

    def _fill_in_init_methods(self) -> None:
        if self.unscaled_init_method is None:
            self.unscaled_init_method = self.init_method or NormalInit(self.init_method_std)
        std = self.init_method_std
        if self.use_mup and self.mup_width_mult != 1:
            std /= math.sqrt(self.mup_width_mult)
        if self.init_method is None:
            self.init_method = NormalInit(std)
        if self.output_layer_init_method is None:
            # Each transformer layer adds two outputs to the residual stream. The variance of the sum over all layers
            # should be that of one output.
            self.output_layer_init_method = NormalInit(std / math.sqrt(2 * max(1, self.num_layers)))
        if self.embedding_init_method is None:
            of_embeddings = self.embedding_init_method_std
            self.embedding_init_method = (
                self.unscaled_init_method if of_embeddings is None else NormalInit(of_embeddings)
            )

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with experts, from 1; layers of multi-token prediction follow the others."""
        return tuple(number for number, has_experts in enumerate(_has_experts_with_mtp(self), 1) if has_experts)

    def block_format_of(self, layer_number: int | None) -> BlockFormat | None:
        """Returns the format of the operands of a layer's experts, or None if they compute in bf16.

        layer_number: starts at 1. first_last_layers_bf16 does not affect layers of multi-token prediction, which are
        None or above num_layers.
        """
        in_bf16 = self.is_first_or_last_in_bf16(layer_number, num_layers=self.num_layers)
        return None if in_bf16 else self.block_format

    @property
    def exchanges_dropless_rows(self) -> bool:
        """Whether ranks exchange rows whose number depends on the routing, so that they first exchange row counts."""
        return (
            self.num_moe_experts is not None
            and self.moe_token_dispatcher_type == "alltoall"
            and self.expert_model_parallel_size * self.expert_tensor_parallel_size > 1
            and self.moe_expert_rank_capacity_factor is None
            and not self.moe_pad_expert_input_to_capacity
        )

    @property
    def hidden_dtype(self) -> torch.dtype:
        """Dtype of the residual stream: at least fp32 with fp32_residual_connection."""
        return (
            torch.promote_types(self.params_dtype, torch.float32)
            if self.fp32_residual_connection
            else self.params_dtype
        )


def _other_default(name: str, default: Any) -> Any:
    """Returns a copy of a TransformerConfig field with a different default."""
    return field(default=default, metadata=TransformerConfig.__dataclass_fields__[name].metadata)


@dataclass(kw_only=True)
class MLATransformerConfig(TransformerConfig):
    """A TransformerConfig with Megatron's defaults for latent attention, which are those of DeepSeek-V2 and V3."""

    multi_latent_attention: bool = _other_default("multi_latent_attention", True)
    normalization: str = _other_default("normalization", "RMSNorm")
    q_lora_rank: int | None = _other_default("q_lora_rank", 512)
    kv_lora_rank: int = _other_default("kv_lora_rank", 512)
    rope_type: str | None = _other_default("rope_type", "yarn")
    original_max_position_embeddings: int | None = _other_default("original_max_position_embeddings", 4096)
    beta_fast: float | None = _other_default("beta_fast", 32.0)
    beta_slow: float | None = _other_default("beta_slow", 1.0)
    rotary_scaling_factor: float = _other_default("rotary_scaling_factor", 40.0)


@dataclass(frozen=True)
class NormalInit:
    """Init method that draws from a normal distribution with mean 0 and standard deviation std."""

    std: float

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """Fills a weight in place from torch's default generator; weight: any shape, any float dtype."""
        return torch.nn.init.normal_(weight, std=self.std)


def validate_residual(config: TransformerConfig) -> None:
    """Raises ValueError if pipeline_dtype contradicts fp32_residual_connection."""
    if config.fp32_residual_connection and config.pipeline_dtype not in (None, config.hidden_dtype):
        raise ValueError(
            f"pipeline_dtype is {config.pipeline_dtype} and fp32_residual_connection is True: "
            f"pipeline_dtype must be {config.hidden_dtype} or None, because stages exchange the residual stream"
        )


def validate_gated_unit(config: TransformerConfig) -> None:
    """Raises ValueError if settings for gated feed-forward layers are given but the layers are not gated."""
    if config.gated_linear_unit:
        return
    for name, unset in (("activation_func_clamp_value", None), ("glu_linear_offset", 0.0)):
        if vars(config)[name] != unset:
            raise ValueError(
                f"{name} is {vars(config)[name]} but feed-forward layers are not gated: set gated_linear_unit "
                "(--swiglu or --quick-geglu)"
            )


def validate_heads(config: TransformerConfig) -> None:
    """Raises ValueError if attention settings contradict each other."""
    is_latent = config.multi_latent_attention
    if is_latent and config.kv_channels is None:
        # In latent attention the head width is a setting, not hidden_size divided by the number of heads.
        config.kv_channels = config.qk_width
    run_checks(
        partial(
            validate_mla,
            config,
            num_attention_heads=config.num_attention_heads,
            num_query_groups=config.num_query_groups,
            add_qkv_bias=config.add_qkv_bias,
            attention_output_gate=config.attention_output_gate,
            rotary_interleaved=config.rotary_interleaved,
        ),
        partial(validate_lora_targets, config, multi_latent_attention=is_latent, q_lora_rank=config.q_lora_rank),
        partial(validate_softmax_scale, config),
        partial(validate_attention, config, hidden_size=config.hidden_size, num_layers=config.num_layers),
        partial(validate_qk_clip, config, multi_latent_attention=is_latent),
    )


def _given_overlap(config: TransformerConfig) -> str | None:
    """Returns the first field that is set to overlap exchanges of rows with computation, or None."""
    fields = {
        "overlap_moe_expert_parallel_comm": config.overlap_moe_expert_parallel_comm,
        "delay_wgrad_compute": config.delay_wgrad_compute,
        "overlap_dispatch_backward_with_experts_wgrad": config.overlap_dispatch_backward_with_experts_wgrad,
    }
    return next((name for name, is_given in fields.items() if is_given), None)


def validate_expert_overlap(config: TransformerConfig) -> None:
    """Raises ValueError if rows are not exchanged, or not in a way that computation can overlap with."""
    given = _given_overlap(config)
    if given is None:
        return
    if config.num_moe_experts is None:
        raise ValueError(f"{given} is True but num_moe_experts is not set: without experts no rows are exchanged")
    if config.expert_model_parallel_size * config.expert_tensor_parallel_size == 1:
        raise ValueError(
            f"{given} is True and expert_model_parallel_size is 1: experts of a single rank exchange no rows, so "
            "distribute them over at least 2 ranks, or omit it"
        )
    if config.moe_token_dispatcher_type != "alltoall":
        why = ", and its buffers hold the rows of one pass only" if config.moe_token_dispatcher_type == "flex" else ""
        raise ValueError(
            f"{given} is True and moe_token_dispatcher_type is {config.moe_token_dispatcher_type}: must be alltoall, "
            f"because {config.moe_token_dispatcher_type} waits for an exchange where it launches it{why}"
        )
    captured = graphed_modules(config.cuda_graph_modules, [1]) if config.cuda_graph_impl == "local" else ()
    if config.overlap_moe_expert_parallel_comm and "moe" in captured:
        raise ValueError(
            "overlap_moe_expert_parallel_comm is True and cuda_graph_modules captures moe: its exchanges are in the "
            "graph, where passes cannot take turns, so capture attn, moe_router, moe_preprocess and experts, or the "
            "full_iteration"
        )


def validate_schedule(config: TransformerConfig) -> None:
    """Raises ValueError for what a schedule with weight gradients as passes of their own does not support."""
    kind = config.pipeline_schedule
    if kind == "1f1b":
        return
    chunks = config.virtual_pipeline_model_parallel_size or 1
    if kind == "zb-h1" and chunks > 1:
        raise ValueError(
            f"pipeline_schedule is {kind} and virtual_pipeline_model_parallel_size is {chunks}: {kind} has one chunk "
            "per stage, so omit virtual stages, or use 1f1b"
        )
    check_chunks(kind, config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size)
    if kind == "dualpipev":
        _validate_pairs(config)
    given = None if kind == "dualpipev" else _given_overlap(config)
    if given is not None:
        raise ValueError(
            f"pipeline_schedule is {kind} and {given} is True: {kind} has passes for weight gradients, which exchange "
            "nothing, so omit one of the two, or use dualpipev"
        )
    if config.cuda_graph_impl == "local" and graphed_modules(config.cuda_graph_modules, [1]):
        raise ValueError(
            f"pipeline_schedule is {kind} and cuda_graph_modules captures parts of layers: a part computes all its "
            "gradients in one replay, so capture the full_iteration, or use 1f1b"
        )


def _validate_pairs(config: TransformerConfig) -> None:
    """Raises ValueError for settings of overlapped exchanges with which dualpipev cannot run."""
    if not config.overlap_moe_expert_parallel_comm:
        raise ValueError(
            "pipeline_schedule is dualpipev and overlap_moe_expert_parallel_comm is False: dualpipev has pairs of "
            "passes, of which one computes while the other exchanges rows, so set it, or use zbv"
        )
    if config.overlap_dispatch_backward_with_experts_wgrad:
        raise ValueError(
            "pipeline_schedule is dualpipev and overlap_dispatch_backward_with_experts_wgrad is True, which holds "
            "gradients of experts only: dualpipev holds those of all layers, so set delay_wgrad_compute instead"
        )


def validate_softmax_scale(config: TransformerConfig) -> None:
    """Raises ValueError for a scale of attention scores that latent attention would ignore."""
    if config.multi_latent_attention and config.softmax_scale is not None:
        raise ValueError(
            f"softmax_scale is {config.softmax_scale} and multi_latent_attention is True, which computes the "
            "scale from its widths and mscale_all_dim: softmax_scale must be None"
        )


def require_sizes(config: TransformerConfig, *names: str) -> None:
    """Raises ValueError if one of the named fields is 0, which a configuration otherwise accepts."""
    for name in names:
        if not vars(config)[name]:
            raise ValueError(f"{name} is {vars(config)[name]}: must be at least 1 to build this part of a model")


def fill_in_sizes(config: TransformerConfig) -> None:
    """Computes unset sizes from the sizes that are set."""
    if config.kv_channels is None:
        config.kv_channels = config.hidden_size // max(1, config.num_attention_heads)
    if config.num_query_groups is None:
        config.num_query_groups = config.num_attention_heads
    if config.ffn_hidden_size is None:
        config.ffn_hidden_size = 4 * config.hidden_size
    if config.expert_tensor_parallel_size is None:
        config.expert_tensor_parallel_size = config.tensor_model_parallel_size
    if config.moe_ffn_hidden_size is None:
        config.moe_ffn_hidden_size = config.ffn_hidden_size


def validate_precision_of_experts(config: TransformerConfig) -> None:
    """Raises ValueError for unsupported settings of 8-bit experts, or if they would have no effect."""
    validate_fp8(
        config,
        params_dtype=config.params_dtype,
        lora_rank=config.lora_rank,
        moe_grouped_gemm=config.moe_grouped_gemm,
        moe_expert_rank_capacity_factor=config.moe_expert_rank_capacity_factor,
        num_layers=config.num_layers,
        has_experts=_has_experts_with_mtp(config),
    )


def precision_lines(config: TransformerConfig) -> tuple[str, ...]:
    """Returns log lines about the layers whose experts compute in 8 bits, or nothing without such layers."""
    lines = precision_words(
        config,
        params_dtype=config.params_dtype,
        num_layers=config.num_layers,
        has_experts=_has_experts_with_mtp(config),
    )
    is_sent = config.expert_model_parallel_size * config.expert_tensor_parallel_size > 1
    if config.moe_dispatch_fwd_dtype != "bf16" and not is_sent:
        lines = (*lines, "moe_dispatch_fwd_dtype has no effect: each rank has all experts, so that no rows are sent")
    return lines


def _has_experts_with_mtp(config: TransformerConfig) -> list[int]:
    has_experts = layers_with_experts(config.num_moe_experts, config.moe_layer_freq, num_layers=config.num_layers)
    return with_mtp_layers(has_experts, config.mtp_num_layers)


def validate_activations(config: TransformerConfig) -> None:
    """Raises ValueError if settings of recompute, offloading and the stash contradict each other or the model."""
    validate_activation_memory(config)
    # Last, because it depends on which layers are recomputed.
    validate_stash(config)


def validate_activation_memory(config: TransformerConfig) -> None:
    """Expands shorthand recompute flags, and raises ValueError if recompute and offloading are inconsistent."""
    has_experts = layers_with_experts(config.num_moe_experts, config.moe_layer_freq, num_layers=config.num_layers)
    grouped_experts = 1 in has_experts and config.moe_grouped_gemm
    resolve_recompute(config)
    validate_recompute(config, num_layers=config.num_layers)
    validate_recompute_modules(
        config,
        has_experts=has_experts,
        grouped_experts=grouped_experts,
        shared_experts=config.moe_shared_expert_intermediate_size is not None,
        multi_latent_attention=config.multi_latent_attention,
    )
    validate_offload(config, has_experts=has_experts, grouped_experts=grouped_experts)
    validate_offload_with_recompute(
        config,
        recompute_granularity=config.recompute_granularity,
        recompute_modules=config.recompute_modules,
    )


def validate_stash(config: TransformerConfig) -> None:
    """Raises ValueError if the paged stash would store nothing, or if its settings are inconsistent."""
    has_experts = layers_with_experts(config.num_moe_experts, config.moe_layer_freq, num_layers=config.num_layers)
    validate_paged_stash(
        config,
        hidden_size=config.hidden_size,
        itemsize=config.compute_itemsize,
        is_bf16=config.params_dtype is torch.bfloat16,
        moe_expert_rank_capacity_factor=config.moe_expert_rank_capacity_factor,
        has_experts=has_experts,
    )
    validate_stash_with_activation_memory(
        config,
        has_experts=has_experts,
        runs_again=layers_run_again(config),
        recompute_modules=config.recompute_modules or [],
        offload_modules=config.offload_modules,
        offloaded_layers=config.cpu_offloading_num_layers,
    )


def layers_run_again(config: TransformerConfig) -> list[bool]:
    """Returns, for each layer, whether backward recomputes the whole layer."""
    if config.recompute_granularity != "full":
        return [False] * config.num_layers
    if config.recompute_method == "uniform":
        return [True] * config.num_layers
    assert config.recompute_num_layers is not None, "checked by validate_recompute"
    # recompute_num_layers applies to each chunk of each stage.
    parts = layers_per_part(config, num_layers=config.num_layers)
    return [index < config.recompute_num_layers for part in parts for index in range(part)]


def validate_layout_of_layers(config: TransformerConfig) -> None:
    """Raises ValueError if the parallel layout cannot divide layers, heads, widths or experts, or is not supported."""
    run_checks(
        partial(validate_tensor_split, config),
        partial(validate_layout_of_stages, config),
        partial(validate_layout_of_contexts, config),
        partial(validate_layout_of_experts, config),
        partial(validate_parallel_layout, config),
    )


def validate_tensor_split(config: TransformerConfig) -> None:
    """Raises ValueError if heads or widths cannot be divided among tensor-parallel ranks."""
    has_experts = layers_with_experts(config.num_moe_experts, config.moe_layer_freq, num_layers=config.num_layers)
    cut = ["num_attention_heads", "num_query_groups"]
    cut += ["ffn_hidden_size"] if 0 in has_experts else []
    cut += ["moe_shared_expert_intermediate_size"] if config.moe_shared_expert_intermediate_size is not None else []
    size = config.tensor_model_parallel_size
    run_checks(
        *(partial(check_multiple, name, vars(config)[name], of="tensor_model_parallel_size", size=size) for name in cut)
    )


def validate_layout_of_stages(config: TransformerConfig) -> None:
    """Raises ValueError if pipeline stages cannot divide the layers, or do not support MTP or offloading as set."""
    validate_pipeline_split(config, num_layers=config.num_layers)
    layout = config.pipeline_model_parallel_layout
    validate_mtp(config, pipeline_layout=layout, letters=mtp_layers_in_layout(layout) if layout else 0)
    validate_offload_in_stages(config)


def validate_layout_of_contexts(config: TransformerConfig) -> None:
    """Raises ValueError if cp_comm_type does not support this context-parallel layout."""
    size, levels = config.context_parallel_size, config.hierarchical_context_parallel_sizes
    exchanges = validate_context_parallel(
        config, num_layers=config.num_layers, context_parallel_size=size, levels=levels
    )
    # Number of ranks that exchange heads, for each cp_comm_type that exchanges heads.
    ranks = {"a2a": ("context_parallel_size", size)}
    if levels is not None:
        ranks["a2a+p2p"] = ("the first of hierarchical_context_parallel_sizes", levels[0])
    for kind in sorted(exchanges & ranks.keys()):
        of = f"tensor_model_parallel_size x {ranks[kind][0]}, for cp_comm_type {kind}"
        for name in ("num_attention_heads", "num_query_groups"):
            check_multiple(name, vars(config)[name], of=of, size=config.tensor_model_parallel_size * ranks[kind][1])


def validate_offload_in_stages(config: TransformerConfig) -> None:
    """Raises ValueError for layer offloading with pipeline stages, or if no chunk has a part to offload."""
    if config.cpu_offloading_num_layers and config.pipeline_model_parallel_size > 1:
        raise ValueError(
            f"cpu_offloading_num_layers is {config.cpu_offloading_num_layers} and pipeline_model_parallel_size is "
            f"{config.pipeline_model_parallel_size}: whole layers can be offloaded only without pipeline stages; "
            "use fine_grained_activation_offloading instead"
        )
    has_experts = layers_with_experts(config.num_moe_experts, config.moe_layer_freq, num_layers=config.num_layers)
    ends = [*accumulate(layers_per_part(config, num_layers=config.num_layers))]
    chunks = [has_experts[start:end] for start, end in zip([0, *ends], ends)]
    if config.fine_grained_activation_offloading and not any(can_offload(config, chunk) for chunk in chunks):
        raise ValueError(
            f"offload_modules is {' '.join(config.offload_modules)} but nothing would be offloaded, because the last "
            "layer of a pipeline chunk never is; layers by chunk, 1 for a layer with experts: {chunks}"
        )


def validate_layout_of_experts(config: TransformerConfig) -> None:
    """Raises ValueError if experts cannot be divided among the ranks, or do not support the requested adapters."""
    validate_lora(
        config,
        grouped_experts=config.moe_grouped_gemm,
        expert_parts=1 if config.num_moe_experts is None else config.expert_tensor_parallel_size,
        itemsize=config.compute_itemsize,
    )
    if config.num_moe_experts is None:
        if config.expert_model_parallel_size > 1:
            raise ValueError(
                f"expert_model_parallel_size is {config.expert_model_parallel_size} but num_moe_experts is not set: "
                "a dense model has no experts to distribute"
            )
        return
    check_multiple(
        "num_moe_experts",
        config.num_moe_experts,
        of="expert_model_parallel_size",
        size=config.expert_model_parallel_size,
    )
    expert_tensor_size = config.expert_tensor_parallel_size
    tensor_size = config.tensor_model_parallel_size
    check_multiple(
        "moe_ffn_hidden_size", config.moe_ffn_hidden_size, of="expert_tensor_parallel_size", size=expert_tensor_size
    )
    validate_grouped_gemm(
        config,
        hidden_size=config.hidden_size,
        itemsize=config.compute_itemsize,
        expert_tensor_size=expert_tensor_size,
    )
    if tensor_size > 1 and not config.sequence_parallel:
        raise ValueError(
            f"tensor_model_parallel_size is {tensor_size} and num_moe_experts is {config.num_moe_experts}: experts "
            "then require --sequence-parallel, so that no token is processed twice"
        )
