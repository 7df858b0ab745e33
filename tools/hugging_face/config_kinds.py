"""Checks the types of the values in config.json, so that wrong types are reported before the values are used.

config_parts.py and expert_parts.py interpret the keys. Keys without a rule here are checked there or not read.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from megatron.tools.hugging_face.config_parts import LAYER_KINDS

# Integers from 1, and from 0.
_COUNTS = """vocab_size hidden_size intermediate_size moe_intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim num_experts num_local_experts n_routed_experts num_experts_per_tok
    max_position_embeddings kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim decoder_sparse_step
    n_group topk_group"""
_COUNTS_FROM_0 = """n_shared_experts shared_expert_intermediate_size first_k_dense_replace
    num_nextn_predict_layers num_mtp_layers max_window_layers sliding_window"""
_POSITIVE = """rms_norm_eps rope_theta partial_rotary_factor swiglu_limit factor low_freq_factor high_freq_factor
    original_max_position_embeddings beta_fast beta_slow attention_factor"""
_FROM_0 = "attention_dropout initializer_range routed_scaling_factor mscale mscale_all_dim"
_SWITCHES = """tie_word_embeddings use_sliding_window norm_topk_prob attention_bias mlp_bias qkv_bias use_qk_norm
    rope_interleave truncate"""
_OBJECTS = ("rope_scaling", "rope_parameters", "quantization_config")


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_list(value: Any, is_element: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(is_element(element) for element in value)


# Checks of values by key, with descriptions of valid ones.
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(_COUNTS.split(), (lambda value: _is_whole(value, 1), "a whole number, 1 or more")),
    **dict.fromkeys(_COUNTS_FROM_0.split(), (lambda value: _is_whole(value, 0), "a whole number, 0 or more")),
    **dict.fromkeys(_POSITIVE.split(), (lambda value: _is_number(value) and value > 0, "a number above 0")),
    **dict.fromkeys(_FROM_0.split(), (lambda value: _is_number(value) and value >= 0, "a number, 0 or more")),
    **dict.fromkeys(_SWITCHES.split(), (lambda value: isinstance(value, bool), "true or false")),
    **dict.fromkeys(_OBJECTS, (lambda value: isinstance(value, dict), "an object")),
    "architectures": (lambda value: _is_list(value, lambda one: isinstance(one, str)), "a list of names"),
    "mlp_only_layers": (lambda value: _is_list(value, lambda one: _is_whole(one, 0)), "a list of layers"),
    "layer_types": (
        lambda value: _is_list(value, lambda one: one in LAYER_KINDS),
        f"a list of {' and '.join(LAYER_KINDS)}",
    ),
}


def require_known_kinds(config: Mapping[str, Any]) -> None:
    """Raises ValueError naming a config.json value of the wrong type. null counts as absent."""
    for key, value in config.items():
        if value is None or key not in _RULES:
            continue
        will_do, words = _RULES[key]
        if not will_do(value):
            raise ValueError(f"config.json: {key} is {value!r}: must be {words}")
        if key in ("rope_scaling", "rope_parameters"):
            for part in (value, *(value.get(kind) for kind in LAYER_KINDS)):
                if part is not None and not isinstance(part, dict):
                    raise ValueError(f"config.json: {key} has {part!r} for a kind of layers: must be an object")
                require_known_kinds(part or {})
    kinds, layers = config.get("layer_types"), config.get("num_hidden_layers")
    if kinds is not None and layers is not None and len(kinds) != layers:
        raise ValueError(f"config.json: layer_types lists {len(kinds)} layers, but num_hidden_layers is {layers}")


def without_unset_counts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config without sizes and counts that are null, which is equivalent to absent."""
    counts = (_COUNTS + _COUNTS_FROM_0.removesuffix("sliding_window")).split()
    return {key: value for key, value in config.items() if value is not None or key not in counts}
