"""Stash flags for tests that build a planned run by hand. Contains no tests."""

import torch

from megatron.planner.stash.stages import StashFlags

FLAGS = StashFlags(
    expert_layers=tuple(range(1, 9)),
    block_format_of=lambda layer: None,
    hidden_size=32,
    moe_ffn_hidden_size=32,
    gated_linear_unit=True,
    expert_tensor_parallel_size=1,
    lora_rank=None,
    lora_target_modules=[],
    params_dtype=torch.float32,
    moe_expert_rank_capacity_factor=2.0,
    moe_paged_stash=True,
    moe_paged_stash_dtype=None,
    moe_paged_stash_page_size=4,
    moe_paged_stash_buffer_size_factor_cuda=1.1,
    moe_paged_stash_buffer_size_factor_cpu=0.0,
    moe_paged_stash_buffer_bytes=None,
    moe_paged_stash_prefetch_layers=1,
    stash_computes_in_pages=False,
    stash_recomputes=True,
    captures_experts=False,
    moe_paged_stash_overflow_policy="recompute",
)
