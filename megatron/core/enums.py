"""Enumerations that several packages share."""

import enum


class ModelType(enum.Enum):
    """Kind of model that `pretrain` builds; decoder-only models use `encoder_or_decoder`, as in Megatron scripts."""

    encoder_or_decoder = 1
    encoder_and_decoder = 2
