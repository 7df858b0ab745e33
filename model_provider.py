"""Provides model_provider(model_builder, ...), which recent scripts of Megatron-LM import and pass to pretrain()."""

from collections.abc import Callable
from typing import Any

from torch import nn

from megatron.training import get_args


def model_provider(
    model_builder: Callable[..., nn.Module],
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> nn.Module:
    """Builds a part of the run's model with `model_builder`, such as gpt_builders.gpt_builder.

    Scripts bind the builder: pretrain(datasets_provider, partial(model_provider, gpt_builder), ...).
    """
    return model_builder(
        get_args(), pre_process, post_process, vp_stage=vp_stage, config=config, pg_collection=pg_collection
    )
