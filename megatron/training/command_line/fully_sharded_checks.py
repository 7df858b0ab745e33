"""Checks of flags that contradict --use-torch-fsdp2; TorchFullyShardedDataParallelConfig checks those of gradients."""

import argparse
from collections.abc import Iterator
from typing import Any

from megatron.core.distributed.torch_fsdp2_config import TorchFullyShardedDataParallelConfig
from megatron.training.command_line.config_builder import problems_of_config

_OFFLOADED = "what is kept for backward goes to the host, gathered parameters among it, whose memory is not there then"


def check_fully_sharded(args: argparse.Namespace) -> Iterator[str]:
    """Yields contradictions with what needs whole parameters, or exists only for buckets of gradients."""
    if not args.use_torch_fsdp2:
        if not args.torch_fsdp2_reshard_after_forward:
            yield (
                "--torch-fsdp2-no-reshard-after-forward is given without --use-torch-fsdp2: add it, or drop the first"
            )
        if args.init_model_with_meta_device:
            yield (
                "--init-model-with-meta-device is given without --use-torch-fsdp2: in all other modes each rank holds "
                "whole parameters; add it, or drop the first"
            )
        return
    for words, is_set, why in _contradictions(args):
        if is_set:
            yield f"{words} and --use-torch-fsdp2 is given: {why}; leave one of them out"
    yield from problems_of_config(TorchFullyShardedDataParallelConfig, args)


def _contradictions(args: argparse.Namespace) -> list[tuple[str, Any, str]]:
    """Returns settings that contradict --use-torch-fsdp2: in words, whether set, and the reason."""
    stages = args.pipeline_model_parallel_size
    return [
        (
            f"--pipeline-model-parallel-size is {stages}",
            stages > 1,
            "each microbatch of each stage would gather all of its parameters anew",
        ),
        (
            f"--optimizer is {args.optimizer}",
            args.optimizer == "distributed_fused_adam",
            "that optimizer spreads gradients over ranks by buckets of its own, and fully_shard does by units",
        ),
        (
            "--optimizer is muon",
            args.optimizer == "muon",
            "muon needs whole matrices, of which each rank has some rows",
        ),
        (
            f"--cuda-graph-impl is {args.cuda_graph_impl}",
            args.cuda_graph_impl != "none",
            "gathered parameters get their memory anew each time, which graphs have standing",
        ),
        (
            "--fine-grained-activation-offloading is given",
            args.fine_grained_activation_offloading,
            _OFFLOADED,
        ),
        (
            f"--cpu-offloading-num-layers is {args.cpu_offloading_num_layers}",
            args.cpu_offloading_num_layers > 0,
            _OFFLOADED,
        ),
    ]
