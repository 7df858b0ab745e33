"""YaRN (Peng et al., 2023): frequencies and lengths of queries and keys for contexts longer than a model was made for.

Tables are made of them in rope.py. The weights mscale and mscale_all_dim are DeepSeek-V2's addition.
"""

import math

import torch
from torch import Tensor

from megatron.core.transformer.yarn_config import YarnConfig


def yarn_frequencies(frequencies: Tensor, *, base: float, config: YarnConfig) -> Tensor:
    """Frequencies whose slow end is divided by the factor; [D_rot / 2], fp64 -> same.

    Over the channels between beta_fast and beta_slow turns within the original context the share that stays falls
    linearly. config: of rope_type yarn. Raises ValueError for a base of 1, which turns all channels alike.
    """
    if base <= 1:
        raise ValueError(f"rotary_base is {base} and rope_type is yarn: must be more than 1")
    assert config.beta_fast is not None and config.beta_slow is not None, "filled in by resolve_yarn"
    assert config.original_max_position_embeddings is not None, "filled in by resolve_yarn"
    width = 2 * len(frequencies)
    # The pairs of channels, as fractions, that turn so often within the original context.
    first, last = (
        width * math.log(config.original_max_position_embeddings / (turns * 2 * math.pi), base) / 2
        for turns in (config.beta_fast, config.beta_slow)
    )
    if config.yarn_correction_range_round_to_int:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    # A step instead of a ramp, without a division by 0.
    length = last - first if last != first else 0.001
    channels = torch.arange(len(frequencies), dtype=frequencies.dtype, device=frequencies.device)
    slowed = ((channels - first) / length).clamp(0, 1)
    return frequencies * (1 - slowed + slowed / config.rotary_scaling_factor)


def yarn_table_scale(config: YarnConfig) -> float:
    """Returns the factor of cosines and sines; the scores of rotated channels grow with its square."""
    return _magnitude(config, config.mscale) / _magnitude(config, config.mscale_all_dim)


def yarn_score_scale(config: YarnConfig) -> float:
    """Returns the factor of all scores of latent attention."""
    return _magnitude(config, config.mscale_all_dim) ** 2


def _magnitude(config: YarnConfig, weight: float) -> float:
    # The logarithm of 1 is 0: a factor of 1 changes nothing.
    return 1 + 0.1 * weight * math.log(config.rotary_scaling_factor)
