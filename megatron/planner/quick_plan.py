"""A plan of a run in a fraction of a second: what ranks hold, from single layers; plan.py builds whole stages.

The two agree to the byte where all layers of a kind are alike (tests/unit_tests/planner/test_quick_plan.py);
layers that recompute or offloading treat by their place are the exception.
"""

import argparse
from itertools import islice

from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.pipeline_split import layers_per_part
from megatron.planner.layer_facts import ModelFacts, layer_kinds
from megatron.planner.stage_memory import (
    Shape,
    StageMemory,
    peak_activations,
    standing_bytes,
    stash_bytes,
)
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.command_line.config_builder import config_from_args
from megatron.training.command_line.errors import CommandLineError
from megatron.training.command_line.validation import batch_sizes
from megatron.training.data_parallel import ddp_config_of

_OPTIMIZERS = ("adam", "sgd", "distributed_fused_adam")


def shape_of(args: argparse.Namespace) -> Shape:
    """The sizes of the run of validated args."""
    kinds = iter(layer_kinds(args))
    counts = layers_per_part(core_transformer_config_from_args(args), num_layers=args.num_layers)
    return Shape(
        world_size=args.world_size,
        tensor=args.tensor_model_parallel_size,
        stages=args.pipeline_model_parallel_size,
        chunks=args.virtual_pipeline_model_parallel_size or 1,
        context=args.context_parallel_size,
        expert=args.expert_model_parallel_size,
        expert_tensor=args.expert_tensor_parallel_size or args.tensor_model_parallel_size,
        layers=tuple(tuple(islice(kinds, count)) for count in counts),
        num_microbatches=batch_sizes(args).final_num_microbatches,
        group_size=args.microbatch_group_size_per_vp_stage,
    )


def quick_stages(args: argparse.Namespace, facts: ModelFacts) -> list[StageMemory]:
    """What the first rank of each stage holds, in the run of validated args; facts: of these args.

    Raises CommandLineError for flags that lead to memory which is not counted here.
    """
    check_counted(args)
    shape, ddp_config = shape_of(args), ddp_config_of(args)
    optimizer_config = config_from_args(OptimizerConfig, args)
    stages = []
    for stage in range(shape.stages):
        device_pages, host_pages = stash_bytes(facts, shape, stage=stage)
        stages.append(
            StageMemory(
                standing_bytes(facts, shape, stage=stage, ddp_config=ddp_config, optimizer_config=optimizer_config),
                device_pages,
                host_pages,
                peak_activations(facts, shape, stage=stage, stashes=device_pages + host_pages > 0),
            )
        )
    return stages


def check_counted(args: argparse.Namespace) -> None:
    """Raises CommandLineError for flags that lead to memory which is not counted here."""
    if args.use_torch_fsdp2:
        raise CommandLineError("--use-torch-fsdp2: its shards are not counted without building them; see --dry-run")
    if args.optimizer not in _OPTIMIZERS:
        raise CommandLineError(
            f"--optimizer is {args.optimizer}: its states are not counted without building it; must be one of "
            f"{', '.join(_OPTIMIZERS)}, or see --dry-run"
        )
    if args.skip_train:
        raise CommandLineError("--skip-train: layouts are compared for training; drop it")
