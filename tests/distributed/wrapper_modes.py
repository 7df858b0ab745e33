"""Modes of DistributedDataParallel, as fields of the wrapper's and the optimizer's configurations. Holds no tests."""

from typing import Any

Modes = dict[str, tuple[dict[str, Any], dict[str, Any]]]

RELEASED = {"release_gradients": True}
IN_BACKWARD = {"optimizer_in_backward": True, "optimizer_in_backward_clip": "exact"}


def wrapper_modes(bucket_size: int) -> Modes:
    """Returns each mode by name. bucket_size: number of elements of a bucket in overlapped modes."""
    overlapped = {"overlap_grad_reduce": True, "bucket_size": bucket_size}
    sharded = {"use_distributed_optimizer": True}
    gathered = {**sharded, **overlapped, "overlap_param_gather": True}
    zero2 = {**sharded, "optimizer": "distributed_fused_adam"}
    return {
        "ddp": ({}, {}),
        "ddp, overlapped": (overlapped, {}),
        "zero1": (sharded, sharded),
        "zero1, overlapped": (gathered, sharded),
        "zero2": ({**sharded, "shard_gradients": True}, zero2),
        "zero2, overlapped": ({**gathered, "shard_gradients": True}, zero2),
        "ddp in backward": ({**RELEASED, **overlapped}, IN_BACKWARD),
        "zero1 in backward": ({**RELEASED, **gathered}, {**sharded, **IN_BACKWARD}),
    }
