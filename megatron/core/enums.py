"""Enumerations that several packages share."""

import enum


class ModelType(enum.Enum):
    """Type of the model that `pretrain` builds. As in Megatron, decoder-only models use `encoder_or_decoder`."""

    encoder_or_decoder = 1
    encoder_and_decoder = 2
