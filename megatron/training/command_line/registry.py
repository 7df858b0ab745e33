"""Which configuration classes make up the command line, and which arguments shape the weights.

The table that joins them with the known flags is built in flag_table.py.
"""

import functools

from megatron.core.datasets.data_config import DataConfig
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.torch_fsdp2_config import FullyShardConfig
from megatron.core.models.gpt.gpt_config import GPTModelConfig
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamSchedulerConfig
from megatron.core.tokenizers.build import TokenizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.command_line.flag_table import FlagTable, build_flag_table
from megatron.training.command_line.known_flags import load_known_flags
from megatron.training.config import (
    BatchScheduleConfig,
    CheckpointConfig,
    CommandLineConfig,
    DistributedConfig,
    GradientReductionConfig,
    ShardedParametersConfig,
    TrainingConfig,
    VirtualStagesConfig,
)
from megatron.training.dry_run_config import DryRunConfig
from megatron.training.fault_config import FaultConfig
from megatron.training.logging_config import GarbageCollectionConfig, LoggingConfig, ProfilingConfig

# Groups of --help appear in this order.
CONFIG_CLASSES: tuple[type, ...] = (
    CommandLineConfig,
    TrainingConfig,
    BatchScheduleConfig,
    DataConfig,
    TokenizerConfig,
    TransformerConfig,
    GPTModelConfig,
    VirtualStagesConfig,
    OptimizerConfig,
    OptimizerParamSchedulerConfig,
    CheckpointConfig,
    LoggingConfig,
    ProfilingConfig,
    GarbageCollectionConfig,
    FaultConfig,
    DistributedConfig,
    DistributedDataParallelConfig,
    GradientReductionConfig,
    ShardedParametersConfig,
    FullyShardConfig,
    DryRunConfig,
)

# What --use-checkpoint-args takes over: names in the parsed arguments that decide the shape of the weights.
MODEL_SHAPE_DESTS: tuple[str, ...] = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "group_query_attention",
    "num_query_groups",
    "kv_channels",
    "add_bias_linear",
    "normalization",
    "layernorm_epsilon",
    "swiglu",
    "quick_geglu",
    "activation_func_clamp_value",
    "glu_linear_offset",
    "squared_relu",
    "add_qkv_bias",
    "qk_layernorm",
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "softmax_type",
    "window_size",
    "window_attn_skip_freq",
    "untie_embeddings_and_output_weights",
    "position_embedding_type",
    "max_position_embeddings",
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
    "rope_type",
    "rotary_scaling_factor",
    "yarn_original_max_position_embeddings",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_correction_range_round_to_int",
    "mscale",
    "mscale_all_dim",
    "seq_length",
    "make_vocab_size_divisible_by",
    "num_experts",
    "moe_layer_freq",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_group_score",
    "moe_router_topk_scaling_factor",
    "moe_router_enable_expert_bias",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "mtp_num_layers",
    "lora_rank",
    "lora_alpha",
    "lora_target_modules",
)


@functools.cache
def flag_table() -> FlagTable:
    """The table of all flags, built once per process."""
    return build_flag_table(CONFIG_CLASSES, load_known_flags())
