"""YaRN's frequencies and attention factors compared with transformers and closed forms, and invalid settings."""

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron.core.transformer.rope import RotaryEmbedding, yarn_frequencies, yarn_score_scale, yarn_table_scale
from megatron.core.transformer.yarn_config import YarnConfig, resolve_yarn
from tests.unit_tests.core.models.small_models import small_config, small_model

# rotated width, base, rope settings on the Hub
PUBLISHED: dict[str, tuple[int, float, dict[str, Any]]] = {
    "deepseek-v3": (64, 1e4, {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}),
    "deepseek-v2-lite": (64, 1e4, {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707}),
    "gpt-oss": (64, 15e4, {"factor": 32.0, "truncate": False}),
    "qwen3": (128, 1e6, {"factor": 4.0, "original_max_position_embeddings": 32768}),
    "other turns": (
        32,
        1e4,
        {"factor": 8.0, "beta_fast": 20.0, "beta_slow": 2.5, "mscale": 0.5, "mscale_all_dim": 2.0},
    ),
    "all within two channels": (8, 1e4, {"factor": 3.0, "beta_fast": 4.0, "beta_slow": 3.5}),
}


def plain(width: int, base: float) -> torch.Tensor:
    return base ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)


def yarn(**fields: Any) -> YarnConfig:
    config = YarnConfig(rope_type="yarn", **fields)
    resolve_yarn(config, multi_latent_attention=False)
    return config


@pytest.mark.parametrize("name", PUBLISHED)
def test_frequencies_and_scale_are_those_of_transformers(name: str) -> None:
    width, base, settings = PUBLISHED[name]
    parameters = {"rope_type": "yarn", "rope_theta": base, "original_max_position_embeddings": 4096, **settings}
    theirs, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](
        LlamaConfig(head_dim=width, rope_parameters=parameters), torch.device("cpu")
    )
    renamed = {"factor": "rotary_scaling_factor", "truncate": "yarn_correction_range_round_to_int"}
    config = yarn(**{renamed.get(field, field): value for field, value in settings.items()})
    found = yarn_frequencies(plain(width, base), base=base, config=config)
    torch.testing.assert_close(found, theirs.double(), rtol=2e-6, atol=0)
    assert yarn_table_scale(config) == pytest.approx(attention_factor)
    # The model's rotary tables use these two values.
    rotary = RotaryEmbedding(width, 8, rotary_base=base, yarn=config, dtype=torch.float64)
    angles = torch.outer(torch.arange(8, dtype=torch.float64), found)
    torch.testing.assert_close(rotary.cos, angles.cos() * attention_factor)
    torch.testing.assert_close(rotary.sin, angles.sin() * attention_factor)


@pytest.mark.parametrize("rounds", [False, True])
def test_fast_channels_stay_slow_ones_are_divided_and_the_share_between_falls_linearly(rounds: bool) -> None:
    before = plain(64, 1e4)
    config = yarn(rotary_scaling_factor=40.0, yarn_correction_range_round_to_int=rounds)
    found = yarn_frequencies(before, base=1e4, config=config)
    turns = before * 4096 / (2 * math.pi)
    # Rounding widens the range by less than one channel on either side.
    margin = 1e4 ** (2 / 64) if rounds else 1.0
    assert torch.equal(found[turns >= 32 * margin], before[turns >= 32 * margin])
    torch.testing.assert_close(found[turns <= 1 / margin], before[turns <= 1 / margin] / 40, rtol=1e-12, atol=0)
    kept = (found / before - 1 / 40) / (1 - 1 / 40)
    steps = -kept[(kept > 1e-9) & (kept < 1 - 1e-9)].diff()
    assert len(steps) >= 10
    torch.testing.assert_close(steps, steps[:1].expand_as(steps))


def test_a_factor_of_one_changes_nothing() -> None:
    config = yarn(mscale=0.7, mscale_all_dim=0.3)
    before = plain(64, 1e4)
    torch.testing.assert_close(yarn_frequencies(before, base=1e4, config=config), before, rtol=1e-15, atol=0)
    assert yarn_table_scale(config) == yarn_score_scale(config) == 1


def test_scores_of_latent_attention_grow_with_the_square_of_the_logarithm() -> None:
    config = yarn(rotary_scaling_factor=40.0, mscale=1.0, mscale_all_dim=1.0)
    assert yarn_table_scale(config) == 1
    assert yarn_score_scale(config) == pytest.approx((0.1 * math.log(40) + 1) ** 2)
    assert yarn_score_scale(yarn(rotary_scaling_factor=40.0)) == 1


def test_unset_fields_become_the_usual_ones_and_positions_of_latent_attention_are_yarns() -> None:
    config = small_config(rope_type="yarn")
    assert (config.original_max_position_embeddings, config.beta_fast, config.beta_slow) == (4096, 32, 1)
    assert small_config().rope_type == "rope"
    latent = YarnConfig(rotary_scaling_factor=2)
    resolve_yarn(latent, multi_latent_attention=True)
    assert latent.rope_type == "yarn" and latent.beta_fast == 32


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rotary_scaling_factor": 4.0}, "rotary_scaling_factor is 4.0 but rope_type is rope: requires"),
        ({"mscale_all_dim": 1.0, "rope_type": "rope"}, "mscale_all_dim is 1.0 but rope_type is rope: requires"),
        ({"yarn_correction_range_round_to_int": False}, "yarn_correction_range_round_to_int is False but rope_type"),
        ({"rope_type": "yarn", "beta_slow": 32.0}, "beta_fast is 32.0: must be more than beta_slow \\(32.0\\)"),
        ({"rope_type": "yarn", "rotary_scaling_factor": 0.5}, "rotary_scaling_factor is 0.5: must be at least 1"),
        ({"rope_type": "linear"}, "rope_type is 'linear': must be one of rope, yarn"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 0}, "original_max_position_embeddings is 0: must"),
    ],
)
def test_impossible_settings_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        small_config(**fields)


@pytest.mark.parametrize(
    ("fields", "arguments", "words"),
    [
        (
            {},
            {"position_embedding_type": "yarn"},
            "position_embedding_type is yarn and rope_type is rope: both must be",
        ),
        (
            {"rope_type": "yarn"},
            {"position_embedding_type": "none"},
            "rope_type is yarn and position_embedding_type is none: must be rope",
        ),
        ({"rope_type": "yarn"}, {"rope_scaling": True}, "rope_scaling_factor is 8.0 and rope_type is yarn"),
        ({"rope_type": "yarn"}, {"rotary_base": 1}, "rotary_base is 1 and rope_type is yarn: must be more than 1"),
    ],
)
def test_models_whose_positions_contradict_yarn_are_refused(
    fields: dict[str, Any], arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        small_model(small_config(**fields), **arguments)
