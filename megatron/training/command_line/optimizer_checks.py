"""Flags that follow from --optimizer or contradict it; OptimizerConfig checks its own fields."""

import argparse
from collections.abc import Iterator


def check_optimizer(args: argparse.Namespace) -> Iterator[str]:
    """Sets what distributed_fused_adam and --optimizer-in-backward imply; yields what contradicts them."""
    yield from _check_in_backward(args)
    args.shard_gradients = args.optimizer == "distributed_fused_adam"
    if not args.shard_gradients:
        return
    args.use_distributed_optimizer = True
    patterns = args.ddp_param_name_patterns_for_fp32_local_accumulation
    contradictions = [
        (
            f"--cuda-graph-impl is {args.cuda_graph_impl}",
            args.cuda_graph_impl != "none",
            "gradients are allocated during each backward, but graphs need persistent ones",
        ),
        (
            "--ddp-debug is given",
            args.ddp_debug,
            "it checks gradients that are persistent in buffers and reduced once a step",
        ),
        (
            "--ddp-param-name-patterns-for-fp32-local-accumulation is " + " ".join(patterns),
            patterns,
            "micro-batches are reduced before they accumulate, --accumulate-allreduce-grads-in-fp32 reduces in fp32",
        ),
    ]
    for words, is_set, why in contradictions:
        if is_set:
            yield (
                f"{words} and --optimizer is distributed_fused_adam: {why}; leave it out, or use --optimizer adam with "
                "--use-distributed-optimizer"
            )


def _check_in_backward(args: argparse.Namespace) -> Iterator[str]:
    args.release_gradients = args.optimizer_in_backward
    if not args.optimizer_in_backward:
        return
    clip, patterns = args.optimizer_in_backward_clip, args.ddp_param_name_patterns_for_fp32_local_accumulation
    refused = [
        (f"--cuda-graph-impl is {args.cuda_graph_impl}", args.cuda_graph_impl != "none", "graphs need persistent ones"),
        ("--ddp-debug is given", args.ddp_debug, "it checks gradients that are persistent in buffers"),
        (
            "--ddp-param-name-patterns-for-fp32-local-accumulation is " + " ".join(patterns),
            patterns,
            "--accumulate-allreduce-grads-in-fp32 accumulates and reduces in fp32",
        ),
    ]
    for words, is_set, why in refused:
        if is_set:
            yield (
                f"{words} and --optimizer-in-backward is given: gradients are allocated during each backward, and "
                f"{why}; leave out one of the two"
            )
    if clip == "exact":
        return
    needs_exact = [
        (
            "--calculate-per-token-loss is given",
            args.calculate_per_token_loss,
            "gradients are divided by tokens that are counted when backward ends",
        ),
        (
            f"--moe-expert-rank-capacity-factor is {args.moe_expert_rank_capacity_factor}",
            args.moe_expert_rank_capacity_factor is not None,
            "a step in which experts got too many rows runs again, and must have changed nothing",
        ),
        (
            f"--tensor-model-parallel-size is {args.tensor_model_parallel_size}",
            clip == "per-bucket" and max(args.tensor_model_parallel_size, args.expert_tensor_parallel_size or 1) > 1,
            "norms of their buckets differ, and weights that all of them have would come apart",
        ),
    ]
    for words, is_set, why in needs_exact:
        if is_set:
            chosen = "not given" if clip is None else clip
            yield (
                f"{words} and --optimizer-in-backward-clip is {chosen}: {why}; it must be exact, or "
                "--optimizer-in-backward be left out"
            )
