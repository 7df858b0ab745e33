"""Settings of pipeline stages: how layers are spread over them, and how they send and receive."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from megatron.core.config_field import config_field, validate_fields


@dataclass(kw_only=True)
class PipelineConfig:
    """How the layers are cut into stages; unset, all stages (and their chunks) have equally many.

    pipeline_dtype: of what stages exchange, which must be that of the hidden states; unset: params_dtype.
    What the cut comes to is computed in pipeline_split.py.
    """

    cli_group: ClassVar[str] = "pipeline stages"

    pipeline_dtype: torch.dtype | None = None

    microbatch_group_size_per_vp_stage: int | None = config_field(
        None,
        flags=("--microbatch-group-size-per-virtual-pipeline-stage",),
        help="Micro-batches that pass through a chunk before the stage turns to its next one; unset: as many as "
        "there are stages, which is the least.",
        at_least=1,
    )
    num_layers_in_first_pipeline_stage: int | None = config_field(
        None,
        flags=("--decoder-first-pipeline-num-layers",),
        dest="decoder_first_pipeline_num_layers",
        help="Layers of the first stage; the stages without a number of their own share the rest evenly.",
        at_least=1,
    )
    num_layers_in_last_pipeline_stage: int | None = config_field(
        None,
        flags=("--decoder-last-pipeline-num-layers",),
        dest="decoder_last_pipeline_num_layers",
        help="Layers of the last stage; the stages without a number of their own share the rest evenly.",
        at_least=1,
    )
    account_for_embedding_in_pipeline_split: bool = config_field(
        False, help="Count the embedding as a layer of the first stage when layers are spread evenly."
    )
    account_for_loss_in_pipeline_split: bool = config_field(
        False, help="Count output layer and loss as a layer of the last stage when layers are spread evenly."
    )
    pipeline_model_parallel_layout: str | None = config_field(
        None,
        help="What each stage (chunk by chunk of all stages) holds: E embedding, t layer, m layer of multi-token "
        "prediction, L loss, | next stage, *N times, (...) group; for example Et*3|(tt|)*2tL.",
    )
    overlap_p2p_comm: bool = config_field(
        True,
        flags=("--no-overlap-p2p-communication",),
        help="Receive what a stage needs next when it needs it, not while it computes.",
    )

    def __post_init__(self) -> None:
        validate_fields(self)
