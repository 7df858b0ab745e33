"""Decides for each argument whether the checkpoint or the command line determines its value when a run loads.

run_values.py applies the table: it adopts values, raises the errors and describes differences. docs/flags.md shows the
rule of each flag. A new flag needs a row only if the rule RUN does not suit it.
"""

import enum
import functools
from collections.abc import Mapping

from megatron.training.command_line.flags import FlagState, flag_table


class OnLoad(enum.Enum):
    """Rule that decides an argument's value when a checkpoint is loaded. docs/flags.md shows these values."""

    # Without --use-checkpoint-args, a difference is an error.
    WEIGHTS = "weights"
    # With --use-checkpoint-args the checkpoint's value is used, otherwise the command line's. Differences are noted.
    MODEL = "model"
    # As MODEL, except that a given value is used also with --use-checkpoint-args.
    GIVEN = "given"
    # A difference is an error if the optimizer's state is loaded.
    OPTIMIZER = "optimizer"
    # The scheduler compares the schedules that follow from these arguments. A difference is an error, unless
    # --override-opt-param-scheduler or --use-checkpoint-opt-param-scheduler selects one of the two.
    SCHEDULE = "schedule"
    # The command line's value is used. Differences are noted, because they change the run's results.
    RUN = "run"
    # The command line's value is used. It changes no result of a continued run: speed, memory, layout, files, logs, and
    # settings that only matter before the first step.
    FREE = "free"


_WEIGHTS = """
    num_layers hidden_size ffn_hidden_size num_attention_heads group_query_attention num_query_groups kv_channels
    add_bias_linear normalization layernorm_zero_centered_gamma use_mup mup_width_mult mup_base_hidden_size
    mup_embedding_mult mup_output_mult mup_base_head_dim mup_attn_scale_power swiglu quick_geglu squared_relu
    activation_func_clamp_value glu_linear_offset add_qkv_bias attention_output_gate qk_layernorm multi_latent_attention
    q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim softmax_type position_embedding_type
    rotary_percent rotary_interleaved num_experts moe_layer_freq moe_ffn_hidden_size moe_router_score_function
    moe_router_enable_expert_bias moe_shared_expert_intermediate_size moe_shared_expert_gate mtp_num_layers
    lora_rank lora_alpha lora_target_modules vocab_size
"""
# A model may be trained further with other values, for example on longer texts.
_MODEL = """
    layernorm_epsilon rotary_base rotary_seq_len_interpolation_factor use_rope_scaling rope_scaling_factor rope_type
    rotary_scaling_factor yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow
    yarn_correction_range_round_to_int mscale mscale_all_dim window_size window_attn_skip_freq
    make_vocab_size_divisible_by moe_router_topk moe_router_pre_softmax moe_router_num_groups moe_router_group_topk
    moe_router_group_score moe_router_topk_scaling_factor untie_embeddings_and_output_weights
"""
# max_position_embeddings is a shape of weights only with learned positions.
_GIVEN = "seq_length max_position_embeddings hidden_dropout attention_dropout"
_OPTIMIZER = "optimizer fp16 bf16"
_SCHEDULE = """
    lr min_lr lr_decay_style lr_wsd_decay_style lr_decay_iters lr_decay_samples lr_wsd_decay_iters lr_wsd_decay_samples
    lr_warmup_fraction lr_warmup_iters lr_warmup_samples lr_warmup_init weight_decay start_weight_decay
    end_weight_decay weight_decay_incr_style
"""
_RUN = """
    seed train_iters train_samples micro_batch_size global_batch_size rampup_batch_size step_batch_size_schedule
    decrease_batch_size_if_needed iterations_to_skip calculate_per_token_loss deterministic_mode
    eval_iters eval_interval start_eval_at_iter eval_global_batch_size full_validation multiple_validation_sets
    data_path train_data_path valid_data_path test_data_path data_args_path split mock_data reset_position_ids
    reset_attention_mask eod_mask_loss dataloader_type
    tokenizer_type tokenizer_model vocab_file merge_file tiktoken_pattern null_tokenizer_eod_id
    spec fp32_residual_connection attention_softmax_in_fp32 qk_clip qk_clip_alpha qk_clip_threshold
    moe_router_dtype moe_router_bias_update_rate moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff
    moe_input_jitter_eps moe_router_force_load_balancing moe_enable_routing_replay moe_expert_capacity_factor
    moe_token_drop_policy moe_pad_expert_input_to_capacity mtp_loss_scaling_factor
    fp8 fp8_recipe first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16
    decoupled_lr decoupled_min_lr apply_wd_to_qk_layernorm adam_beta1 adam_beta2 adam_eps sgd_momentum clip_grad
    muon_momentum muon_nesterov muon_num_ns_steps muon_scale_mode muon_extra_scale_factor muon_split_qkv
    loss_scale min_loss_scale loss_scale_window hysteresis optimizer_in_backward optimizer_in_backward_clip
    use_precision_aware_optimizer main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype
    grad_reduce_in_bf16 accumulate_allreduce_grads_in_fp32 ddp_reduce_scatter_with_fp32_accumulation
    ddp_param_name_patterns_for_fp32_local_accumulation
    check_for_nan_in_loss_and_grad non_finite_policy loss_spike_rewind max_rewinds
"""
_FREE = """
    config print_config model model_scale list_models
    exit_interval exit_duration_in_mins exit_signal_handler exit_signal skip_train deprecated_use_mcore_models
    transformer_impl manual_gc manual_gc_interval manual_gc_eval
    data_cache_path mmap_bin_files dataloader_fast_cache_load dataloader_defer_npy_index_mmap num_workers
    validation_set_names create_attention_mask_in_dataloader
    init_method_std embedding_init_method_std init_method_xavier_uniform use_cpu_initialization
    init_model_with_meta_device initial_loss_scale padded_vocab_size add_position_embedding
    use_rotary_position_embeddings
    cross_entropy_loss_fusion gradient_accumulation_fusion attention_backend log_max_attention_logit
    tensor_model_parallel_size sequence_parallel pipeline_model_parallel_size context_parallel_size
    hierarchical_context_parallel_sizes cp_comm_type expert_model_parallel_size expert_tensor_parallel_size
    num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank microbatch_group_size_per_vp_stage
    decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers account_for_embedding_in_pipeline_split
    account_for_loss_in_pipeline_split pipeline_model_parallel_layout pipeline_schedule overlap_p2p_comm
    overlap_moe_expert_parallel_comm delay_wgrad_compute overlap_dispatch_backward_with_experts_wgrad
    moe_grouped_gemm moe_token_dispatcher_type moe_flex_dispatcher_backend moe_dispatch_fwd_dtype moe_permute_fusion
    moe_shared_expert_overlap moe_router_padding_for_quantization moe_per_layer_logging
    moe_expert_rank_capacity_factor moe_paged_stash moe_paged_stash_compute moe_paged_stash_dtype
    moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_buffer_size_factor_cpu
    moe_paged_stash_buffer_bytes
    moe_paged_stash_prefetch_layers moe_paged_stash_copy_sms moe_paged_stash_overflow_policy
    recompute_granularity recompute_method recompute_num_layers recompute_modules recompute_activations
    moe_layer_recompute fine_grained_activation_offloading offload_modules activation_offload_fraction
    min_offloaded_tensor_size cpu_offloading_num_layers cuda_graph_impl cuda_graph_modules cuda_graph_warmup_steps
    optimizer_cuda_graph optimizer_cpu_offload optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d muon_tp_mode
    override_opt_param_scheduler use_checkpoint_opt_param_scheduler
    save save_interval async_save save_retain_interval ckpt_fully_parallel_save ckpt_fully_parallel_load
    dist_ckpt_strictness dist_ckpt_optim_fully_reshardable load pretrained_checkpoint finetune moe_use_upcycling
    ckpt_step use_checkpoint_args exit_on_missing_checkpoint ckpt_format no_save_optim no_save_rng no_load_optim
    no_load_rng
    log_interval log_format log_throughput log_params_norm log_num_zeros_in_grad log_progress timing_log_level
    timing_log_option tensorboard_dir tensorboard_log_interval tensorboard_queue_size log_timers_to_tensorboard
    log_loss_scale_to_tensorboard log_validation_ppl_to_tensorboard log_memory_to_tensorboard wandb_project
    wandb_exp_name wandb_save_dir wandb_entity record_routing log_world_size_to_tensorboard
    profile profile_step_start profile_step_end profile_ranks use_pytorch_profiler pytorch_profiler_collect_shapes
    pytorch_profiler_collect_callstack record_memory_history memory_snapshot_path
    check_weight_hash_across_dp_replicas_interval log_straggler
    distributed_backend distributed_timeout_minutes use_gloo_process_groups use_tp_pp_dp_mapping fake_process_group
    overlap_grad_reduce overlap_param_gather align_param_gather use_distributed_optimizer
    num_distributed_optimizer_instances check_for_large_grads ddp_bucket_size ddp_num_buckets
    ddp_pad_buckets_for_high_nccl_busbw ddp_average_in_collective overlap_param_gather_with_optimizer_step ddp_debug
    align_grad_reduce use_torch_fsdp2 data_parallel_sharding_strategy torch_fsdp2_reshard_after_forward
    dry_run world_size
"""
_NAMES = {
    OnLoad.WEIGHTS: _WEIGHTS,
    OnLoad.MODEL: _MODEL,
    OnLoad.GIVEN: _GIVEN,
    OnLoad.OPTIMIZER: _OPTIMIZER,
    OnLoad.SCHEDULE: _SCHEDULE,
    OnLoad.RUN: _RUN,
    OnLoad.FREE: _FREE,
}
# Arguments without a flag: derived from others, or set by the launcher and the loading of a checkpoint.
DERIVED = frozenset(
    """
    rank local_rank iteration consumed_train_samples consumed_valid_samples data_parallel_size params_dtype
    unpadded_vocab_size virtual_pipeline_model_parallel_size release_gradients shard_gradients
    num_floating_point_operations_so_far
    """.split()
)


@functools.cache
def on_load_rules() -> Mapping[str, OnLoad]:
    """Returns the rule of each argument of a working flag. RUN applies to arguments that the table does not name."""
    rules: dict[str, OnLoad] = {}
    for rule, names in _NAMES.items():
        for name in names.split():
            assert name not in rules, f"{name} has two rules"
            rules[name] = rule
    for flag in flag_table().in_state(FlagState.WORKS):
        rules.setdefault(flag.dest, OnLoad.RUN)
    return rules


def names_with(*rules: OnLoad) -> tuple[str, ...]:
    """Returns the arguments that have one of these rules, in the order of the table."""
    return tuple(name for name, rule in on_load_rules().items() if rule in rules)


def changes_results(name: str) -> bool:
    """Returns whether an argument changes results of a run. True for arguments of a script, whose effect is unknown."""
    flag = flag_table().by_dest.get(name)
    if flag is not None and flag.state is not FlagState.WORKS:
        return False
    return on_load_rules().get(name, OnLoad.RUN) is not OnLoad.FREE
