"""Builds the GPT model that arguments describe, for pretrain_gpt.py and for tools that load checkpoints."""

import argparse

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.transformer.lora import freeze_all_but_adapters
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.command_line.config_builder import flags_named_in_errors
from megatron.training.meters.memory import check_weights_fit


def build_gpt(
    args: argparse.Namespace, *, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
) -> GPTModel:
    """Builds a model, or a part of one, with initial weights, in fp32 or args.params_dtype.

    args: validated, with vocabulary sizes. Other parameters: as for GPTModel.
    """
    config = core_transformer_config_from_args(args)
    with flags_named_in_errors():
        check_weights_fit(config, args.padded_vocab_size)
        # The arguments of tools may lack it.
        use_engine = vars(args).get("transformer_impl") == "transformer_engine"
        layers = get_gpt_decoder_block_spec(config, use_transformer_engine=use_engine)
    model = GPTModel(
        config=config,
        transformer_layer_spec=layers,
        mtp_block_spec=get_gpt_mtp_block_spec(config, layers),
        vocab_size=args.padded_vocab_size,
        unpadded_vocab_size=args.unpadded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
    )
    if config.lora_rank is not None:
        freeze_all_but_adapters(model)
    return model
