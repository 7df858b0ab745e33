"""Checks of the parallel layout against the number of processes, the sequence and the vocabulary.

What layers must fulfil is checked by TransformerConfig.
"""

import argparse
from collections.abc import Iterator
from functools import partial

from megatron.core.model_parallel_config import check_multiple
from megatron.core.parallel_state import DEFAULT_ORDER, rank_grids
from megatron.core.transformer.pipeline_split import num_parts_in_layout
from megatron.training.command_line.config_builder import problems_of_call


def check_layout(args: argparse.Namespace) -> Iterator[str]:
    """Derives data_parallel_size and virtual_pipeline_model_parallel_size; yields sizes that do not divide.

    After an error the first is 1 or the second is None, so that other checks can go on.
    """
    tensor_size, context_size = args.tensor_model_parallel_size, args.context_parallel_size
    # As in Megatron, scripts may leave it on while they vary the tensor size.
    args.sequence_parallel = args.sequence_parallel and tensor_size > 1
    yield from problems_of_call(partial(_derive_replicas, args))
    if context_size > 1:
        # Each rank holds an early and a late chunk, so that all have the same number of keys to look at.
        yield from _uneven("seq_length", args.seq_length, of="2 x context_parallel_size", size=2 * context_size)
    if args.sequence_parallel:
        parts = "context_parallel_size x tensor_model_parallel_size"
        yield from _uneven("seq_length", args.seq_length, of=parts, size=context_size * tensor_size)
    if args.padded_vocab_size is not None:
        yield from _uneven(
            "padded_vocab_size", args.padded_vocab_size, of="tensor_model_parallel_size", size=tensor_size
        )
    if context_size > 1 and args.reset_attention_mask and args.create_attention_mask_in_dataloader:
        yield (
            f"--reset-attention-mask makes masks of whole sequences, and --context-parallel-size is {context_size}: "
            "add --no-create-attention-mask-in-dataloader, which hands over borders of documents instead"
        )
    if args.optimizer == "muon" and max(tensor_size, args.expert_tensor_parallel_size or tensor_size) > 1:
        yield (
            f"--optimizer is muon and --tensor-model-parallel-size is {tensor_size}: muon needs whole matrices, so it "
            "and --expert-tensor-parallel-size must be 1"
        )
    yield from derive_virtual_stages(args)


def _derive_replicas(args: argparse.Namespace) -> None:
    args.data_parallel_size = 1
    dense, _ = rank_grids(args.world_size, layout_sizes(args), order=DEFAULT_ORDER)
    args.data_parallel_size = dense.name_to_size["dp"]


def _uneven(name: str, value: int, *, of: str, size: int) -> list[str]:
    return problems_of_call(lambda: check_multiple(name, value, of=of, size=size))


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


def derive_virtual_stages(args: argparse.Namespace) -> Iterator[str]:
    """Sets the virtual pipeline size from any of the flags for it; None where a stage is one piece, or they clash."""
    layers, pieces = args.num_layers_per_virtual_pipeline_stage, args.num_virtual_stages_per_pipeline_rank
    stages, layout = args.pipeline_model_parallel_size, args.pipeline_model_parallel_layout
    args.virtual_pipeline_model_parallel_size = None
    if layers is not None and pieces is not None:
        yield (
            f"--num-layers-per-virtual-pipeline-stage is {layers} and --num-virtual-stages-per-pipeline-rank is "
            f"{pieces}: give one of them"
        )
        return
    if layout is not None:
        if layers is not None or pieces is not None:
            flag = (
                "--num-layers-per-virtual-pipeline-stage"
                if pieces is None
                else "--num-virtual-stages-per-pipeline-rank"
            )
            yield f"--pipeline-model-parallel-layout says what every virtual stage holds: drop {flag}"
            return
        wrong = problems_of_call(lambda: _check_stages_of_layout(layout, stages))
        if wrong:
            yield from wrong
            return
        pieces = num_parts_in_layout(layout) // stages
    if layers is not None:
        if layers < 1:
            yield f"--num-layers-per-virtual-pipeline-stage is {layers}: must be at least 1"
            return
        if args.num_layers % (stages * layers):
            yield (
                f"--num-layers is {args.num_layers}: must be a multiple of --pipeline-model-parallel-size x "
                f"--num-layers-per-virtual-pipeline-stage ({stages * layers})"
            )
            return
        pieces = args.num_layers // (stages * layers)
    if pieces is not None and pieces > 1:
        if stages == 1:
            yield (f"--pipeline-model-parallel-size is 1: {pieces} virtual stages per rank need at least 2")
            return
        args.virtual_pipeline_model_parallel_size = pieces


def _check_stages_of_layout(layout: str, stages: int) -> None:
    parts = num_parts_in_layout(layout)
    check_multiple("pipeline_model_parallel_layout's stages", parts, of="pipeline_model_parallel_size", size=stages)
