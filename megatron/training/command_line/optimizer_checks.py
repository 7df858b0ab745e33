"""What follows from --optimizer for other flags, and which contradict it; OptimizerConfig checks its own fields."""

import argparse

from megatron.training.command_line.errors import CommandLineError


def check_optimizer(args: argparse.Namespace) -> None:
    """Sets what distributed_fused_adam implies; raises CommandLineError where it cannot be had."""
    args.shard_gradients = args.optimizer == "distributed_fused_adam"
    if not args.shard_gradients:
        return
    args.use_distributed_optimizer = True
    patterns = args.ddp_param_name_patterns_for_fp32_local_accumulation
    contradictions = [
        (
            f"--cuda-graph-impl is {args.cuda_graph_impl}",
            args.cuda_graph_impl != "none",
            "gradients get their memory during each backward, which graphs have standing",
        ),
        (
            "--ddp-debug is given",
            args.ddp_debug,
            "its checks are of gradients that stand in buffers and are reduced once a step",
        ),
        (
            "--ddp-param-name-patterns-for-fp32-local-accumulation is " + " ".join(patterns),
            patterns,
            "no micro-batches add up before they are reduced, --accumulate-allreduce-grads-in-fp32 reduces in fp32",
        ),
    ]
    for words, is_set, why in contradictions:
        if is_set:
            raise CommandLineError(
                f"{words} and --optimizer is distributed_fused_adam: {why}; leave it out, or use --optimizer adam with "
                "--use-distributed-optimizer"
            )
