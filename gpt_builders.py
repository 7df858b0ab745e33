"""Provides gpt_builder(args, ...), the builder that recent scripts of Megatron-LM bind to model_provider."""

import argparse

from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.gpt_builder import build_gpt


def gpt_builder(
    args: argparse.Namespace,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None = None,
    config: TransformerConfig | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> GPTModel:
    """Builds this rank's part of the GPT model. config: defaults to the configuration that `args` describe."""
    return build_gpt(
        args,
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
        config=config,
    )
