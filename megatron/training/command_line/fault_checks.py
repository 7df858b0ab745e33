"""Checks of flags that contradict the handling of bad steps."""

import argparse
from collections.abc import Iterator


def check_faults(args: argparse.Namespace) -> Iterator[str]:
    """Yields flags that prevent skipping steps, going back or comparing replicas.

    Sets --timing-log-level 1 where --log-straggler needs it.
    """
    if args.log_straggler:
        args.timing_log_level = max(args.timing_log_level, 1)
    if args.check_weight_hash_across_dp_replicas_interval is not None and args.use_torch_fsdp2:
        yield (
            "--check-weight-hash-across-dp-replicas-interval and --use-torch-fsdp2 are given: sharded parameters have "
            "no replicas; leave one of them out"
        )
    policy = args.non_finite_policy
    if policy != "stop":
        yield from _check_policy(args, f"--non-finite-policy is {policy}")
    rewinds = [f"--non-finite-policy is {policy}"] if policy == "rewind" else []
    if args.loss_spike_rewind is not None:
        rewinds.append(f"--loss-spike-rewind is {args.loss_spike_rewind:g}")
    for words in rewinds:
        if args.save is None or args.save_interval is None:
            yield (f"{words}: needs --save and --save-interval: it goes back to a checkpoint")
        if args.no_save_optim or args.no_save_rng:
            yield f"{words}: needs whole checkpoints, leave out --no-save-optim and --no-save-rng"
        if args.cuda_graph_impl != "none":
            yield f"{words} and --cuda-graph-impl is given: loading a checkpoint invalidates graphs, leave one out"


def _check_policy(args: argparse.Namespace, words: str) -> Iterator[str]:
    if not args.check_for_nan_in_loss_and_grad:
        yield f"{words} and --no-check-for-nan-in-loss-and-grad is given: leave one of them out"
    if args.cuda_graph_impl != "none":
        yield f"{words} and --cuda-graph-impl is given: the host cannot look at a captured step, leave one out"
    clip = args.optimizer_in_backward_clip
    if args.optimizer_in_backward and clip != "exact" and args.non_finite_policy == "skip":
        yield (
            f"{words} and --optimizer-in-backward-clip is {clip}: parameters are updated before all gradients are "
            "known to be finite, must be exact"
        )
