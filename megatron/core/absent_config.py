"""Megatron configuration fields for unsupported features, and for options that have no effect in this framework.

Code written for Megatron passes these fields. Readers of our configurations can ignore them. Each class below covers
one topic, and the configurations inherit from all of them. An unsupported_field accepts only its default; any other
value raises an error that names the field. A no_effect_field accepts every value, because results do not depend on it,
and the command line accepts its flag.

When a feature is added, edit this file (configuration fields), megatron/training/command_line/refusals.py (flags),
tools/translations.yaml (flags in launch scripts) and tools/megatron_api_unsupported.yaml (all other names).
"""

from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.config_field import no_effect_field, unsupported_field

_NO_GTP = "generalized tensor parallelism is not supported; use tensor_model_parallel_size"
_NO_8_BITS = "8- and 4-bit training is not supported; use bf16"
_NO_TE_OVERLAP = "tensor-parallel overlap inside Transformer Engine's kernels is not used here"
_NO_SERVING = "inference serving is not part of this framework"
_NO_HYBRID = "only transformer layers are supported"
_NO_VARIANT = "attention variants are not supported"
_NO_DSA = "sparse attention with an indexer is not supported"
_NO_MHC = "layers have a single residual stream here"
_NO_FSDP = "Megatron-FSDP is not supported; use torch's FSDP2 or use_distributed_optimizer"
_NO_BACK_END = "backends of the flex dispatcher have no separate settings here"
_NO_GROUPED = "moe_grouped_gemm groups only routed experts here"
_LATE_GRADIENTS = "weight gradients are computed together with input gradients here"
_WHOLE_LAYERS = "whole-layer offloading moves only activations, without double buffering"
_BY_DEVICE = "the device determines the kernels here"
_SAME_RESULTS = "it trades time for memory, with the same results"
_LOGS_CONFIG = "the training loop writes the configuration to the run's files"


# ModelParallelConfig.


@dataclass(kw_only=True)
class AbsentParallelFields:
    """Fields for parallel layouts, and for communication between ranks."""

    tensor_parallel_num_weight_shards: int | None = unsupported_field(None, why=_NO_GTP)
    gtp_weight_remat_size: int = unsupported_field(1, why=_NO_GTP)
    expert_tensor_parallel_num_weight_shards: int | None = unsupported_field(None, why=_NO_GTP)
    expert_gtp_weight_remat_size: int = unsupported_field(1, why=_NO_GTP)
    pipeline_model_parallel_comm_backend: str | None = unsupported_field(
        None, why="pipeline transfers use the device's backend here"
    )
    use_ring_exchange_p2p: bool = unsupported_field(False, why="pipeline transfers use NCCL or gloo here")
    variable_seq_lengths: bool = unsupported_field(
        False, why="all micro-batches have the same length here; pack samples to that length"
    )
    max_seqlen_per_dp_cp_rank: int | None = unsupported_field(
        None, why="all samples use the same context-parallel size here"
    )
    hybrid_context_parallel: bool = unsupported_field(False, why="all samples use the same context-parallel size here")
    mtp_standalone: bool = unsupported_field(
        False, why="pipeline_model_parallel_layout places the multi-token prediction layers here"
    )
    batch_p2p_comm: bool = no_effect_field(True, why="it changes only how transfers are launched")
    batch_p2p_sync: bool = no_effect_field(True, why="transfers are ordered by streams")
    overlap_p2p_comm_warmup_flush: bool = no_effect_field(False, why="it selects an overlap; results are the same")
    deallocate_pipeline_outputs: bool = no_effect_field(False, why=_SAME_RESULTS)
    overlap_moe_expert_parallel_comm: bool = no_effect_field(
        False, why="it selects an overlap; moe_shared_expert_overlap is the supported one"
    )
    ep_overlap_early_attn_memory_release: bool = no_effect_field(False, why=_SAME_RESULTS)


@dataclass(kw_only=True)
class AbsentTransformerEngineOverlapFields:
    """Fields without effect: overlap of tensor-parallel communication inside Transformer Engine."""

    tp_comm_overlap: bool = no_effect_field(False, why=f"it selects an overlap; {_NO_TE_OVERLAP}")
    tp_comm_bulk_wgrad: bool = no_effect_field(True, why=_NO_TE_OVERLAP)
    tp_comm_bulk_dgrad: bool = no_effect_field(True, why=_NO_TE_OVERLAP)
    tp_comm_overlap_ag: bool = no_effect_field(True, why=_NO_TE_OVERLAP)
    tp_comm_overlap_rs: bool = no_effect_field(True, why=_NO_TE_OVERLAP)
    tp_comm_overlap_rs_dgrad: bool = no_effect_field(False, why=_NO_TE_OVERLAP)
    tp_comm_split_ag: bool = no_effect_field(True, why=_NO_TE_OVERLAP)
    tp_comm_atomic_ag: bool = no_effect_field(False, why=_NO_TE_OVERLAP)
    tp_comm_split_rs: bool = no_effect_field(True, why=_NO_TE_OVERLAP)
    tp_comm_atomic_rs: bool = no_effect_field(False, why=_NO_TE_OVERLAP)
    tp_comm_overlap_disable_qkv: bool = no_effect_field(False, why=_NO_TE_OVERLAP)
    tp_comm_overlap_disable_fc1: bool = no_effect_field(False, why=_NO_TE_OVERLAP)
    tp_comm_bootstrap_backend: str = no_effect_field("nccl", why=_NO_TE_OVERLAP)


@dataclass(kw_only=True)
class AbsentComputeFields:
    """Fields for precision, gradient computation and memory use."""

    enable_autocast: bool = unsupported_field(False, why="autocast is not used here")
    autocast_dtype: torch.dtype | None = unsupported_field(None, why="autocast is not used here")
    moe_grad_scale_func: Any = unsupported_field(None, why="grad_scale_func also scales the losses of routers")
    mtp_grad_scale_func: Any = unsupported_field(
        None, why="grad_scale_func also scales the multi-token prediction losses"
    )
    num_microbatches_with_partial_activation_checkpoints: int | None = unsupported_field(
        None, why="all micro-batches use the same recomputation here"
    )
    delay_wgrad_compute: bool = no_effect_field(False, why=_LATE_GRADIENTS)
    overlap_dispatch_backward_with_experts_wgrad: bool = no_effect_field(False, why=_LATE_GRADIENTS)
    defer_embedding_wgrad_compute: bool = no_effect_field(False, why=_LATE_GRADIENTS)
    wgrad_deferral_limit: int = no_effect_field(0, why=_LATE_GRADIENTS)
    cross_entropy_fusion_impl: str = no_effect_field("native", why="logits are converted to losses in one fused pass")
    use_te_rng_tracker: bool = no_effect_field(False, why="random-number streams can always be captured in graphs")
    cpu_offloading_activations: bool = unsupported_field(True, why=_WHOLE_LAYERS)
    cpu_offloading_weights: bool = unsupported_field(False, why=_WHOLE_LAYERS)
    cpu_offloading_double_buffering: bool = unsupported_field(False, why=_WHOLE_LAYERS)
    cpu_offloading_retain_pinned_cpu_buffers: bool = no_effect_field(False, why=_SAME_RESULTS)
    _cpu_offloading_context: Any = unsupported_field(None, why="the transformer block offloads activations itself")
    barrier_with_L1_time: bool = no_effect_field(True, why="it only adds to the times that are logged")


# TransformerConfig.


@dataclass(kw_only=True)
class AbsentLayerFields:
    """Fields for variants of transformer layers."""

    apply_residual_connection_post_layernorm: bool = unsupported_field(
        False, why="residual connections start before the norm here"
    )
    apply_query_key_layer_scaling: bool = unsupported_field(
        False, why="attention scores are computed in fp32 and require no scaling by layer number"
    )
    qk_l2_norm: bool = unsupported_field(False, why="qk_layernorm selects the norm of queries and keys here")
    no_rope_freq: int | list[int] | None = unsupported_field(
        None, why="all layers use the same position embedding here"
    )
    flash_attention_version: int | None = unsupported_field(None, why="attention_backend chooses the kernel here")
    test_mode: bool = unsupported_field(False, why="layers have no test mode here")
    mtp_use_repeated_layer: bool = unsupported_field(False, why="each predicted token has its own layer here")
    mtp_detach_heads: bool = unsupported_field(False, why="losses of additional tokens train the whole model here")
    mtp_hsm: bool = unsupported_field(False, why="only mtp_num_layers predicts additional tokens")
    mtp_hybrid_override_pattern: str | None = unsupported_field(None, why=_NO_HYBRID)
    mrope_section: list[int] | None = unsupported_field(None, why="only text models are trained here")
    mlp_chunks_for_training: int = unsupported_field(
        1, why="use recompute_modules to reduce the memory of feed-forward layers"
    )
    disable_bf16_reduced_precision_matmul: bool = unsupported_field(
        False, why="use torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction, which is set per process"
    )
    quant_recipe: Any = unsupported_field(None, why=_NO_8_BITS)
    heterogeneous_block_specs: bool = unsupported_field(False, why="all layers have the same shape here")
    hetereogenous_dist_checkpoint: bool = unsupported_field(False, why="all layers have the same shape here")
    config_logger_dir: str = unsupported_field("", why=_LOGS_CONFIG)
    enable_mhc_connections: bool = unsupported_field(False, why=_NO_MHC)
    mhc_num_residual_streams: int = unsupported_field(4, why=_NO_MHC)
    mhc_sinkhorn_iterations: int = unsupported_field(20, why=_NO_MHC)
    mhc_init_gating_factor: float = unsupported_field(0.01, why=_NO_MHC)
    mhc_recompute_layer_num: int | None = unsupported_field(None, why=_NO_MHC)


@dataclass(kw_only=True)
class AbsentKernelFields:
    """Fields that select kernels or memory use without changing results."""

    bias_activation_fusion: bool = no_effect_field(False, why=_BY_DEVICE)
    masked_softmax_fusion: bool = no_effect_field(False, why=_BY_DEVICE)
    persist_layer_norm: bool = no_effect_field(False, why=_BY_DEVICE)
    memory_efficient_layer_norm: bool = no_effect_field(False, why=_SAME_RESULTS)
    bias_dropout_fusion: bool = no_effect_field(False, why=_BY_DEVICE)
    apply_rope_fusion: bool = no_effect_field(False, why=_BY_DEVICE)
    fused_single_qkv_rope: bool = no_effect_field(False, why=_BY_DEVICE)
    fused_residual_rmsnorm: bool = no_effect_field(False, why=_BY_DEVICE)
    use_fused_weighted_squared_relu: bool = no_effect_field(False, why=_BY_DEVICE)
    use_transformer_engine_op_fuser: bool = no_effect_field(False, why=_BY_DEVICE)
    use_te_activation_func: bool = no_effect_field(False, why=_BY_DEVICE)
    moe_router_fusion: bool = no_effect_field(False, why=_BY_DEVICE)
    distribute_saved_activations: bool | None = no_effect_field(False, why=_SAME_RESULTS)
    clone_scatter_output_in_embedding: bool = no_effect_field(True, why=_SAME_RESULTS)
    delay_offload_until_cuda_graph: bool = no_effect_field(False, why=_SAME_RESULTS)
    delta_offload_bytes_across_pp_ranks: int = no_effect_field(0, why=_SAME_RESULTS)
    fine_grained_offloading_max_inflight_offloads: int | None = no_effect_field(None, why=_SAME_RESULTS)
    cuda_graph_use_single_mempool: bool = no_effect_field(True, why=_SAME_RESULTS)
    cuda_graph_retain_backward_graph: bool = no_effect_field(False, why=_SAME_RESULTS)
    high_priority_a2a_comm_stream: bool = no_effect_field(False, why="it selects an overlap; results are the same")
    enable_cuda_graph: bool = unsupported_field(False, why="replaced by cuda_graph_impl='local'")
    external_cuda_graph: bool = unsupported_field(False, why="replaced by cuda_graph_impl='local'")
    cuda_graph_scope: Any = unsupported_field(None, why="renamed to cuda_graph_modules")


@dataclass(kw_only=True)
class AbsentExpertFields:
    """Fields for routers, experts and token-dispatch libraries."""

    use_grouped_gemm_for_shared_expert: bool = unsupported_field(False, why=_NO_GROUPED)
    use_grouped_gemm_for_dense_mlp: bool = unsupported_field(False, why=_NO_GROUPED)
    moe_use_grouped_tensor: bool = unsupported_field(False, why=_NO_GROUPED)
    moe_single_grouped_weight: bool = unsupported_field(False, why=_NO_GROUPED)
    moe_single_grouped_bias: bool = unsupported_field(False, why=_NO_GROUPED)
    moe_shared_expert_glu_interleave_size: int | None = unsupported_field(
        None, why="gate and up projections are halves of one weight here, not interleaved"
    )
    moe_mlp_glu_interleave_size: int | None = unsupported_field(
        None, why="gate and up projections are halves of one weight here, not interleaved"
    )
    moe_router_topk_limited_devices: int | None = unsupported_field(
        None, why="replaced by moe_router_group_topk with moe_router_num_groups"
    )
    moe_router_quantile_balancing_ema: float = unsupported_field(0.0, why="quantile balancing is not supported")
    moe_router_force_biased: float | None = unsupported_field(
        None, why="only moe_router_force_load_balancing forces the routing"
    )
    moe_token_dropping: bool = unsupported_field(False, why="moe_expert_capacity_factor drops tokens here")
    moe_apply_probs_on_input: bool = unsupported_field(
        False, why="routing probabilities are applied inside experts here"
    )
    moe_latent_size: int | None = unsupported_field(None, why="experts in a latent space are not supported")
    moe_enable_deepep: bool = unsupported_field(
        False, why="use moe_token_dispatcher_type flex with moe_flex_dispatcher_backend deepep"
    )
    moe_permute_fusion_into_hybridep: bool = unsupported_field(False, why=_NO_BACK_END)
    moe_hybridep_pad_uneven_dispatch_inputs: bool = unsupported_field(False, why=_NO_BACK_END)
    moe_flex_dispatcher_num_sms: int | None = unsupported_field(None, why=_NO_BACK_END)
    moe_deepep_num_sms: int | None = unsupported_field(None, why=_NO_BACK_END)
    moe_hybridep_num_sms: int | None = unsupported_field(None, why=_NO_BACK_END)
    moe_hybridep_num_blocks_permute: int | None = unsupported_field(None, why=_NO_BACK_END)
    moe_hybridep_num_blocks_unpermute: int | None = unsupported_field(None, why=_NO_BACK_END)
    moe_hybridep_num_sms_preprocessing: int = unsupported_field(108, why=_NO_BACK_END)
    moe_ncclep_zero_copy: bool = unsupported_field(False, why=_NO_BACK_END)
    gtp_remat_opt_in_modules: list[str] = unsupported_field(default_factory=list, why=_NO_GTP)


@dataclass(kw_only=True)
class AbsentLowPrecisionFields:
    """Fields for 8- and 4-bit training."""

    fp8: str | None = unsupported_field(None, why=_NO_8_BITS)
    fp8_recipe: str = unsupported_field("delayed", why=_NO_8_BITS)
    fp8_param: bool = unsupported_field(False, why=_NO_8_BITS)
    fp8_quantizer_factory: str | None = unsupported_field(None, why=_NO_8_BITS)
    fp8_margin: int = unsupported_field(0, why=_NO_8_BITS)
    fp8_interval: int = unsupported_field(1, why=_NO_8_BITS)
    fp8_amax_history_len: int = unsupported_field(1, why=_NO_8_BITS)
    fp8_amax_compute_algo: str = unsupported_field("most_recent", why=_NO_8_BITS)
    fp8_wgrad: bool = unsupported_field(True, why=_NO_8_BITS)
    fp8_output_proj: bool = unsupported_field(False, why=_NO_8_BITS)
    fp8_dot_product_attention: bool = unsupported_field(False, why=_NO_8_BITS)
    fp8_multi_head_attention: bool = unsupported_field(False, why=_NO_8_BITS)
    activation_func_fp8_input_store: bool = unsupported_field(False, why=_NO_8_BITS)
    fp4: str | None = unsupported_field(None, why=_NO_8_BITS)
    fp4_recipe: str | None = unsupported_field("nvfp4", why=_NO_8_BITS)
    fp4_param: bool = unsupported_field(False, why=_NO_8_BITS)
    fp4_quantizer_factory: str | None = unsupported_field(None, why=_NO_8_BITS)
    tp_only_amax_red: bool = unsupported_field(False, why=_NO_8_BITS)
    moe_router_padding_for_quantization: bool | None = unsupported_field(False, why=_NO_8_BITS)
    moe_router_padding_for_fp8: bool | None = unsupported_field(False, why=_NO_8_BITS)
    moe_dispatch_fwd_dtype: str = unsupported_field("bf16", why=_NO_8_BITS)
    moe_combine_bwd_dtype: str = unsupported_field("bf16", why=_NO_8_BITS)


@dataclass(kw_only=True)
class AbsentLowPrecisionLayerFields:
    """Fields for layers that remain in bf16 during 8- and 4-bit training, and for low-precision libraries."""

    first_last_layers_bf16: bool = unsupported_field(False, why=_NO_8_BITS)
    num_layers_at_start_in_bf16: int = unsupported_field(1, why=_NO_8_BITS)
    num_layers_at_end_in_bf16: int = unsupported_field(1, why=_NO_8_BITS)
    disable_parameter_transpose_cache: bool = unsupported_field(False, why=_NO_8_BITS)
    use_kitchen: bool = unsupported_field(False, why=_NO_8_BITS)
    use_kitchen_attention: bool = unsupported_field(False, why=_NO_8_BITS)
    kitchen_attention_backend: str = unsupported_field("sdpa", why=_NO_8_BITS)


@dataclass(kw_only=True)
class AbsentServingFields:
    """Fields for inference serving."""

    flash_decode: bool = unsupported_field(False, why=_NO_SERVING)
    batch_invariant_mode: bool = unsupported_field(False, why=_NO_SERVING)
    batch_invariant_backend: str = unsupported_field("te_native", why=_NO_SERVING)
    inference_rng_tracker: bool = unsupported_field(False, why=_NO_SERVING)
    inference_sampling_seed: int = unsupported_field(42, why=_NO_SERVING)
    inference_cuda_graph_scope: Any = unsupported_field(None, why=_NO_SERVING)
    symmetric_ar_type: str | None = unsupported_field(None, why=_NO_SERVING)
    nccl_all_reduce_for_prefill: bool = unsupported_field(False, why=_NO_SERVING)
    use_inference_optimized_layers: bool = unsupported_field(False, why=_NO_SERVING)
    inference_fuse_tp_communication: bool = unsupported_field(False, why=_NO_SERVING)
    inference_disable_triton_nvls_kernels: bool = unsupported_field(False, why=_NO_SERVING)
    inference_grouped_gemm_backend: str = unsupported_field("vllm", why=_NO_SERVING)
    inference_moe_disable_fused_quant_kernels: bool = unsupported_field(False, why=_NO_SERVING)
    inference_moe_token_dispatcher_type: str = unsupported_field("nvls", why=_NO_SERVING)
    moe_pad_experts_for_cuda_graph_inference: bool = unsupported_field(False, why=_NO_SERVING)
    mlp_chunks_for_prefill: int = unsupported_field(1, why=_NO_SERVING)


@dataclass(kw_only=True)
class AbsentSparseAttentionFields:
    """Fields for sparse attention and other attention variants."""

    experimental_attention_variant: str | None = unsupported_field(None, why=_NO_VARIANT)
    experimental_attention_variant_loss_scale_func: Any = unsupported_field(None, why=_NO_VARIANT)
    dsa_indexer_n_heads: int | None = unsupported_field(None, why=_NO_DSA)
    dsa_indexer_head_dim: int | None = unsupported_field(None, why=_NO_DSA)
    dsa_indexer_topk: int | None = unsupported_field(None, why=_NO_DSA)
    dsa_indexer_topk_freq: int = unsupported_field(1, why=_NO_DSA)
    dsa_indexer_skip_topk_offset: int = unsupported_field(0, why=_NO_DSA)
    dsa_indexer_loss_coeff: float | None = unsupported_field(None, why=_NO_DSA)
    dsa_indexer_use_sparse_loss: bool = unsupported_field(False, why=_NO_DSA)
    dsa_kernel_backend: str = unsupported_field("none", why=_NO_DSA)
    dsa_indexer_rope_interleaved: bool = unsupported_field(False, why=_NO_DSA)
    dsa_indexer_rotate_activation: bool = unsupported_field(True, why=_NO_DSA)
    dsa_indexer_scoring_relu: bool = unsupported_field(True, why=_NO_DSA)
    dsa_indexer_k_norm_epsilon: float | None = unsupported_field(None, why=_NO_DSA)
    dsa_indexer_k_norm_fp32: bool = unsupported_field(False, why=_NO_DSA)


@dataclass(kw_only=True)
class AbsentHybridFields:
    """Fields for layers without attention or with linear attention."""

    is_hybrid_model: bool = unsupported_field(False, why=_NO_HYBRID)
    mamba_state_dim: int = unsupported_field(128, why=_NO_HYBRID)
    mamba_head_dim: int = unsupported_field(64, why=_NO_HYBRID)
    mamba_num_groups: int = unsupported_field(8, why=_NO_HYBRID)
    mamba_num_heads: int | None = unsupported_field(None, why=_NO_HYBRID)
    mamba_training_ssm_states_dtype: torch.dtype | None = unsupported_field(None, why=_NO_HYBRID)
    use_mamba_mem_eff_path: bool = unsupported_field(True, why=_NO_HYBRID)
    gdp_num_householder: int = unsupported_field(3, why=_NO_HYBRID)
    gdp_cutedsl_kernel: bool = unsupported_field(False, why=_NO_HYBRID)
    gdp_num_chunk_states_to_recompute: int = unsupported_field(2, why=_NO_HYBRID)
    linear_attention_freq: int | list[int] | None = unsupported_field(None, why=_NO_HYBRID)
    linear_conv_kernel_dim: int | None = unsupported_field(4, why=_NO_HYBRID)
    linear_key_head_dim: int | None = unsupported_field(128, why=_NO_HYBRID)
    linear_value_head_dim: int | None = unsupported_field(128, why=_NO_HYBRID)
    linear_num_key_heads: int | None = unsupported_field(16, why=_NO_HYBRID)
    linear_num_value_heads: int | None = unsupported_field(32, why=_NO_HYBRID)


@dataclass(kw_only=True)
class AbsentTransformerFields(
    AbsentLayerFields,
    AbsentKernelFields,
    AbsentExpertFields,
    AbsentLowPrecisionFields,
    AbsentLowPrecisionLayerFields,
    AbsentServingFields,
    AbsentSparseAttentionFields,
    AbsentHybridFields,
):
    """Combines the absent fields of TransformerConfig from all topics."""


# DistributedDataParallelConfig and OptimizerConfig.


@dataclass(kw_only=True)
class AbsentDataParallelFields:
    """Unsupported fields and fields without effect: Megatron-FSDP, NCCL buffer registration and 8-bit all-gathers."""

    gradient_reduce_div_fusion: bool = no_effect_field(True, why=_BY_DEVICE)
    delay_wgrad_compute: bool = no_effect_field(False, why=_LATE_GRADIENTS)
    fp8_param_gather: bool = unsupported_field(False, why=_NO_8_BITS)
    fp4_param_gather: bool = unsupported_field(False, why=_NO_8_BITS)
    reuse_grad_buf_for_mxfp8_param_ag: bool = unsupported_field(False, why=_NO_8_BITS)
    keep_fp8_transpose_cache: bool = unsupported_field(False, why=_NO_8_BITS)
    nccl_ub: bool = unsupported_field(False, why="buffers are not registered with NCCL here")
    disable_symmetric_registration: bool = unsupported_field(False, why="buffers are not registered with NCCL here")
    use_megatron_fsdp: bool = unsupported_field(False, why=_NO_FSDP)
    use_custom_fsdp: bool = unsupported_field(False, why=_NO_FSDP)
    megatron_fsdp_version: int = unsupported_field(1, why=_NO_FSDP)
    data_parallel_sharding_strategy: str = unsupported_field("no_shard", why=_NO_FSDP)
    outer_dp_sharding_strategy: str = unsupported_field("no_shard", why=_NO_FSDP)
    suggested_communication_unit_size: int | None = unsupported_field(None, why=_NO_FSDP)
    fsdp_double_buffer: bool = unsupported_field(False, why=_NO_FSDP)
    fsdp_db_use_persist_buf_on_alloc_fail: bool = unsupported_field(False, why=_NO_FSDP)
    fsdp_all_gather_in_start_param_sync: bool = unsupported_field(True, why=_NO_FSDP)
    fsdp_manual_registration: bool = unsupported_field(False, why=_NO_FSDP)
    megatron_fsdp_main_params_dtype: torch.dtype | None = unsupported_field(torch.float32, why=_NO_FSDP)
    megatron_fsdp_main_grads_dtype: torch.dtype | None = unsupported_field(None, why=_NO_FSDP)
    megatron_fsdp_grad_comm_dtype: torch.dtype | None = unsupported_field(None, why=_NO_FSDP)
    megatron_fsdp_use_decoupled_grad: bool = unsupported_field(False, why=_NO_FSDP)
    megatron_fsdp_cuda_graph_mode: bool = unsupported_field(False, why=_NO_FSDP)
    megatron_fsdp_enable_fine_grained_param_gather: bool = unsupported_field(False, why=_NO_FSDP)
    megatron_fsdp_max_pool_double_buffer: bool = unsupported_field(False, why=_NO_FSDP)


_NO_RULE = "this update rule is not supported"
_OWN_MUON = "Muon always uses the Newton-Schulz coefficients of torch.optim.Muon here"


@dataclass(kw_only=True)
class AbsentOptimizerFields:
    """Fields for other update rules, Muon variants and optimizer offloading."""

    fp8_recipe: str | None = unsupported_field(None, why=_NO_8_BITS)
    reuse_grad_buf_for_mxfp8_param_ag: bool = unsupported_field(False, why=_NO_8_BITS)
    decoupled_weight_decay: bool = unsupported_field(
        True, why="Adam decouples weight decay from gradients here (AdamW)"
    )
    muon_fp32_matmul_prec: str = no_effect_field("medium", why=_BY_DEVICE)
    # Megatron's default, quintic, changes its coefficients from step to step, and trains a different model.
    muon_coefficient_type: str = unsupported_field("simple", why=_OWN_MUON)
    muon_use_syrk: bool = no_effect_field(False, why=_BY_DEVICE)
    muon_scalar_optimizer: str = unsupported_field("adam", why="parameters that are not matrices are updated by AdamW")
    lion_beta1: float = unsupported_field(0.95, why=_NO_RULE)
    lion_beta2: float = unsupported_field(0.98, why=_NO_RULE)
    soap_shampoo_beta: float = unsupported_field(0.95, why=_NO_RULE)
    soap_use_kl_shampoo: bool = unsupported_field(True, why=_NO_RULE)
    adaptive_muon_moment2_method: str = unsupported_field("adamuon", why=_NO_RULE)
    adaptive_muon_beta2: float = unsupported_field(0.95, why=_NO_RULE)
    adaptive_muon_eps: float = unsupported_field(1e-8, why=_NO_RULE)
    use_layer_wise_distributed_optimizer: bool = unsupported_field(
        False, why="use_distributed_optimizer shards by element, not by layer"
    )
    use_torch_optimizer_for_cpu_offload: bool = no_effect_field(False, why=_BY_DEVICE)
    pin_cpu_grads: bool = no_effect_field(True, why="with a GPU, host copies are always in pinned memory")
    pin_cpu_params: bool = no_effect_field(True, why="with a GPU, host copies are always in pinned memory")
    grad_norm_skip_threshold: float = unsupported_field(
        float("inf"), why="steps with a large gradient norm are clipped by clip_grad, not skipped"
    )
    barrier_with_L1_time: bool = no_effect_field(False, why="it only affects the times that are logged")
    config_logger_dir: str = unsupported_field("", why=_LOGS_CONFIG)
