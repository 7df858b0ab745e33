"""Checks of the parallel layout against the number of processes, the sequence and the vocabulary.

What layers must fulfil is checked by TransformerConfig.
"""

import argparse

from megatron.core.parallel_layout_config import check_multiple
from megatron.core.pipeline_split import num_parts_in_layout
from megatron.core.rank_generator import DEFAULT_ORDER, rank_grids
from megatron.training.command_line.config_builder import flags_named_in_errors
from megatron.training.command_line.errors import CommandLineError


def check_layout(args: argparse.Namespace) -> None:
    """Sets the data-parallel and the virtual pipeline size; CommandLineError where ranks or tokens do not divide."""
    tensor_size, context_size = args.tensor_model_parallel_size, args.context_parallel_size
    # As in Megatron, scripts may leave it on while they vary the tensor size.
    args.sequence_parallel = args.sequence_parallel and tensor_size > 1
    with flags_named_in_errors():
        dense, _ = rank_grids(args.world_size, layout_sizes(args), order=DEFAULT_ORDER)
        if context_size > 1:
            # Each rank holds an early and a late chunk, so that all have the same number of keys to look at.
            check_multiple("seq_length", args.seq_length, of="2 x context_parallel_size", size=2 * context_size)
        if args.sequence_parallel:
            cuts = context_size * tensor_size
            check_multiple(
                "seq_length", args.seq_length, of="context_parallel_size x tensor_model_parallel_size", size=cuts
            )
        if args.padded_vocab_size is not None:
            check_multiple(
                "padded_vocab_size", args.padded_vocab_size, of="tensor_model_parallel_size", size=tensor_size
            )
    if context_size > 1 and args.reset_attention_mask and args.create_attention_mask_in_dataloader:
        raise CommandLineError(
            f"--reset-attention-mask makes masks of whole sequences, and --context-parallel-size is {context_size}: "
            "add --no-create-attention-mask-in-dataloader, which hands over borders of documents instead"
        )
    if args.optimizer == "muon" and max(tensor_size, args.expert_tensor_parallel_size or tensor_size) > 1:
        raise CommandLineError(
            f"--optimizer is muon and --tensor-model-parallel-size is {tensor_size}: muon needs whole matrices, so it "
            "and --expert-tensor-parallel-size must be 1"
        )
    args.data_parallel_size = dense.name_to_size["dp"]
    derive_virtual_stages(args)


def layout_sizes(args: argparse.Namespace) -> dict[str, int]:
    """The sizes of the rank grids, by the argument names of initialize_model_parallel."""
    tensor_size = args.tensor_model_parallel_size
    return {
        "tensor_model_parallel_size": tensor_size,
        "context_parallel_size": args.context_parallel_size,
        "pipeline_model_parallel_size": args.pipeline_model_parallel_size,
        "expert_model_parallel_size": args.expert_model_parallel_size,
        "expert_tensor_parallel_size": args.expert_tensor_parallel_size or tensor_size,
    }


def derive_virtual_stages(args: argparse.Namespace) -> None:
    """Sets the virtual pipeline size, None where a stage is one piece, from any of the flags for it."""
    layers, pieces = args.num_layers_per_virtual_pipeline_stage, args.num_virtual_stages_per_pipeline_rank
    stages, layout = args.pipeline_model_parallel_size, args.pipeline_model_parallel_layout
    args.virtual_pipeline_model_parallel_size = None
    if layers is not None and pieces is not None:
        raise CommandLineError(
            f"--num-layers-per-virtual-pipeline-stage is {layers} and --num-virtual-stages-per-pipeline-rank is "
            f"{pieces}: give one of them"
        )
    if layout is not None:
        if layers is not None or pieces is not None:
            flag = (
                "--num-layers-per-virtual-pipeline-stage"
                if pieces is None
                else "--num-virtual-stages-per-pipeline-rank"
            )
            raise CommandLineError(f"--pipeline-model-parallel-layout says what every virtual stage holds: drop {flag}")
        with flags_named_in_errors():
            parts = num_parts_in_layout(layout)
            check_multiple(
                "pipeline_model_parallel_layout's stages", parts, of="pipeline_model_parallel_size", size=stages
            )
        pieces = parts // stages
    if layers is not None:
        if layers < 1:
            raise CommandLineError(f"--num-layers-per-virtual-pipeline-stage is {layers}: must be at least 1")
        if args.num_layers % (stages * layers):
            raise CommandLineError(
                f"--num-layers is {args.num_layers}: must be a multiple of --pipeline-model-parallel-size x "
                f"--num-layers-per-virtual-pipeline-stage ({stages * layers})"
            )
        pieces = args.num_layers // (stages * layers)
    if pieces is not None and pieces > 1:
        if stages == 1:
            raise CommandLineError(
                f"--pipeline-model-parallel-size is 1: {pieces} virtual stages per rank need at least 2"
            )
        args.virtual_pipeline_model_parallel_size = pieces
