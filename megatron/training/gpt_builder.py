"""Builds the GPT model that arguments describe, for pretrain_gpt.py and for tools that load checkpoints."""

import argparse
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.pipeline_placement import configured_placement
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.lora import freeze_all_but_adapters
from megatron.core.transformer.spec_utils import ModuleSpec, import_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.command_line.config_builder import flags_named_in_errors, run_config_of
from megatron.training.config import RunConfig
from megatron.training.meters.memory import check_weights_fit


def build_gpt(
    args: argparse.Namespace | RunConfig,
    *,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    config: TransformerConfig | None = None,
) -> GPTModel:
    """Builds a GPT model, or one pipeline stage of it, with initial weights, in fp32 or params_dtype.

    args: the settings of a run, or the arguments of a script, with vocabulary sizes. config: defaults to a
    configuration that only this model holds. Other parameters: as for GPTModel.
    """
    run_config = run_config_of(args)
    gpt = run_config.gpt
    config = config or run_config.model_config()
    with flags_named_in_errors():
        check_weights_fit(config, gpt.padded_vocab_size)
        # Arguments built by tools may lack transformer_impl.
        use_engine = run_config.values.get("transformer_impl") == "transformer_engine"
        spec = run_config.values.get("spec")
        layers: ModuleSpec | TransformerBlockSubmodules
        if spec is None:
            layers = get_gpt_decoder_block_spec(config, use_transformer_engine=use_engine)
        else:
            layers = _named_spec(spec, config)
    model = GPTModel(
        config=config,
        transformer_layer_spec=layers,
        mtp_block_spec=get_gpt_mtp_block_spec(config, layers),
        vocab_size=gpt.padded_vocab_size,
        unpadded_vocab_size=gpt.unpadded_vocab_size,
        max_sequence_length=gpt.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
        share_embeddings_and_output_weights=not gpt.untie_embeddings_and_output_weights,
        position_embedding_type=gpt.position_embedding_type,
        rotary_percent=gpt.rotary_percent,
        rotary_base=gpt.rotary_base,
        rope_scaling=gpt.use_rope_scaling,
        rope_scaling_factor=gpt.rope_scaling_factor,
        seq_len_interpolation_factor=gpt.rotary_seq_len_interpolation_factor,
    )
    if config.lora_rank is not None:
        freeze_all_but_adapters(model)
    return model


# Parallel sizes of a layout in which a single process holds all parameters.
_ONE_RANK = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "hierarchical_context_parallel_sizes": None,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "sequence_parallel": False,
    "pipeline_model_parallel_layout": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}


def whole_gpt(run_config: RunConfig, *, padded_vocab_size: int) -> GPTModel:
    """Builds the whole model on the meta device, with sequential experts, each of which has separate weights.

    The result provides the names and shapes of all parameters for a run in any layout.
    """
    [model] = parts_of_gpt(run_config, padded_vocab_size=padded_vocab_size)
    return model


def parts_of_gpt(
    run_config: RunConfig,
    *,
    padded_vocab_size: int,
    layout: Mapping[str, Any] | None = None,
    tensor: int = 0,
    pipeline: int = 0,
    expert: int = 0,
) -> list[GPTModel]:
    """Builds a rank's parts of the model on the meta device, with sequential experts. Not collective.

    layout: arguments of the parallel layout, which may differ from the run's layout; None means one process. Experts
    have the tensor-parallel size of other layers. tensor, pipeline, expert: the rank's coordinates in the layout.
    Raises ValueError for a layout that does not fit the model.
    """
    there = {name: value for name, value in _ONE_RANK.items() if name in run_config.values} | dict(layout or {})
    there["expert_tensor_parallel_size"] = there["tensor_model_parallel_size"]
    settings = run_config.changed(**there, padded_vocab_size=padded_vocab_size, moe_grouped_gemm=False)
    config = settings.transformer
    groups = _groups_of_place(config, tensor=tensor, pipeline=pipeline, expert=expert)
    placement, parts = configured_placement(config), []
    with torch.device("meta"):
        for chunk in range(placement.num_chunks):
            part = build_gpt(
                settings,
                pre_process=placement.has_embedding(pipeline, chunk),
                post_process=placement.has_loss(pipeline, chunk),
                vp_stage=chunk if placement.num_chunks > 1 else None,
                pg_collection=groups,
            )
            parts.append(part)
    return parts


def _groups_of_place(config: TransformerConfig, *, tensor: int, pipeline: int, expert: int) -> ProcessGroupCollection:
    """Returns process groups without connections, whose ranks and sizes suffice to build a rank's part of a model."""
    tp, pp = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    ep = config.expert_model_parallel_size
    tp_group, pp_group = _unconnected(tensor, tp), _unconnected(pipeline, pp)
    return ProcessGroupCollection(
        tp=tp_group,
        pp=pp_group,
        ep=_unconnected(expert, ep),
        expt_tp=tp_group,
        tp_ep=_unconnected(expert * tp + tensor, ep * tp),
        tp_cp=tp_group,
        tp_dp_cp=tp_group,
        embd=pp_group,
    )


def _unconnected(rank: int, size: int) -> dist.ProcessGroup | None:
    return dist.ProcessGroup(dist.HashStore(), rank, size) if size > 1 else None


def _named_spec(path: list[str], config: TransformerConfig) -> ModuleSpec | TransformerBlockSubmodules:
    """Imports the layer spec given by --spec. path: the module and the name of the spec in it."""
    try:
        found = import_module((path[0], path[1]))
    except ImportError as error:
        raise ValueError(
            f"spec is {path}: {path[0]} cannot be imported ({error}); add its folder to PYTHONPATH"
        ) from error
    kinds = (ModuleSpec, TransformerBlockSubmodules)
    if callable(found) and not isinstance(found, kinds):
        found = found(config)
    if not isinstance(found, kinds):
        raise ValueError(
            f"spec is {path}, a {type(found).__name__}: must be a ModuleSpec or TransformerBlockSubmodules, or a "
            "function that returns one for a TransformerConfig"
        )
    return found
