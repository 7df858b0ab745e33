"""Converts config.json to the settings of a model and back: finds the family and preserves keys of an existing file.

config_parts.py interprets single keys, and families.py lists the keys of each family.
"""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.tools.hugging_face.config_kinds import without_unset_counts
from megatron.tools.hugging_face.config_parts import Values, window_pattern
from megatron.tools.hugging_face.expert_parts import expert_layers
from megatron.tools.hugging_face.families import FAMILIES, Family
from megatron.tools.hugging_face.quantized import QUANTIZATION, require_known_quantization
from megatron.training.command_line.flags import MODEL_SHAPE_DESTS, flag_table

# Model settings that config.json cannot express, or that only affect training.
_NOT_COMPARED = ("seq_length", "make_vocab_size_divisible_by", "padded_vocab_size")
_COMPARED = (*(name for name in MODEL_SHAPE_DESTS if name not in _NOT_COMPARED), "vocab_size")
# Settings of alternative position embeddings.
_ROTATION = ("rope_theta", "rope_scaling", "rope_parameters")


def family_of_config(config: Mapping[str, Any]) -> Family:
    """Returns the family of a config.json.

    Raises ValueError naming an unsupported architecture and the supported ones.
    """
    names = config.get("architectures") or []
    for family in FAMILIES:
        if family.architecture in names or (not names and config.get("model_type") == family.model_type):
            return family
    name = names[0] if names else config.get("model_type")
    known = [family.architecture for family in FAMILIES]
    nearest = difflib.get_close_matches(str(name), known, n=1)
    hint = f"; the nearest is {nearest[0]}" if nearest else ""
    raise ValueError(f"config.json: the architecture is {name}: must be one of {', '.join(known)}{hint}")


def settings_of_config(config: Mapping[str, Any]) -> Values:
    """Returns the model settings in a config.json, by argument name.

    Raises ValueError naming a missing key, or a value without a corresponding setting.
    """
    family = family_of_config(config)
    require_known_quantization(config)
    config = without_unset_counts(config)
    settings: Values = {}
    for part in family.parts:
        try:
            settings |= part.read(config)
        except KeyError as error:
            raise ValueError(f"config.json has no {error.args[0]}, which {family.architecture} requires") from error
    return settings


def with_defaults(settings: Mapping[str, Any]) -> Values:
    """Returns the defaults of all flags updated by `settings`, because older checkpoints do not contain newer flags."""
    return {**{name: flag.default for name, flag in flag_table().by_dest.items()}, **settings}


def comparable_settings(settings: Mapping[str, Any]) -> Values:
    """Returns the command-line defaults updated by `settings`, in a canonical form for comparison."""
    defaults = {name: flag_table().by_dest[name].default for name in _COMPARED}
    values = {**defaults, **{name: value for name, value in settings.items() if name in _COMPARED}}
    if values["num_experts"] is None:
        values |= {name: default for name, default in defaults.items() if name.startswith("moe_")}
    elif values["moe_ffn_hidden_size"] is None:
        values["moe_ffn_hidden_size"] = values["ffn_hidden_size"]
    pattern = expert_layers(values)
    # The width of dense layers has no meaning without dense layers.
    values |= {"ffn_hidden_size": None if all(pattern) else values["ffn_hidden_size"], "moe_layer_freq": pattern}
    if not values["group_query_attention"]:
        values |= {"group_query_attention": True, "num_query_groups": values["num_attention_heads"]}
    # Latent attention has its own head sizes.
    if values["multi_latent_attention"]:
        values["kv_channels"] = None
    elif values["kv_channels"] is None:
        values["kv_channels"] = values["hidden_size"] // values["num_attention_heads"]
    values["mtp_num_layers"] = values["mtp_num_layers"] or None
    # Does not distinguish models: a conversion adds the 1 that stored norm weights do not include.
    values["layernorm_zero_centered_gamma"] = False
    return values | _one_window(values) | _one_rotation(values)


def _one_window(values: Values) -> Values:
    has_window = values["window_size"] is not None and values["window_size"][0] >= 0
    if not has_window:
        return {"window_size": None, "window_attn_skip_freq": None}
    pattern = window_pattern(values["window_attn_skip_freq"], num_layers=values["num_layers"])
    return {"window_size": list(values["window_size"]), "window_attn_skip_freq": pattern}


def _one_rotation(values: Values) -> Values:
    is_yarn = values["position_embedding_type"] == "yarn" or values["rope_type"] == "yarn"
    if is_yarn or (values["rope_type"] is None and values["multi_latent_attention"]):
        unset = {"yarn_original_max_position_embeddings": 4096, "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0}
        filled = {name: value for name, value in unset.items() if values[name] is None}
        return {"position_embedding_type": "rope", "rope_type": "yarn", **filled}
    return {"rope_type": "rope"}


def config_of_settings(settings: Mapping[str, Any], *, dtype: str, carried: Mapping[str, Any] | None = None) -> Values:
    """Returns the config.json of a model: `carried` if it is equivalent, else a corrected copy or a new one.

    settings: settings of a run, by argument name. dtype: dtype of the tensors, such as "bfloat16". carried: config.json
    of the model that the run started from. Raises ValueError naming settings that no family, or not the family of
    `carried`, supports.
    """
    wanted = comparable_settings(settings)
    if carried is not None:
        # The written weights are not quantized.
        carried = {key: value for key, value in carried.items() if key != QUANTIZATION}
        return _with_dtype(_kept_up(carried, wanted, settings=settings), dtype)
    candidates = list(_candidates(settings, wanted))
    config, different = min(candidates, key=lambda one: len(one[1]), default=({}, {}))
    if different or not candidates:
        nearest = f": {config['architectures'][0]} differs in {_words(different)}" if different else ""
        raise ValueError(f"no architecture supports these settings{nearest}")
    return _with_dtype(config, dtype)


def _candidates(settings: Mapping[str, Any], wanted: Values) -> Iterator[tuple[Values, dict[str, tuple[Any, Any]]]]:
    """Yields, for each architecture, the config.json closest to the settings, and the remaining differences."""
    for family in FAMILIES:
        if family.has_experts == (wanted["num_experts"] is not None):
            config = _written(family, settings)
            try:
                yield config, differing(config, wanted)
            except ValueError:
                # This architecture cannot express the settings.
                continue


def differing(config: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns the settings that differ, as (value in `wanted`, value in `config`).

    wanted: comparable settings.
    """
    found = comparable_settings(settings_of_config(config))
    # transformers writes neither these layers nor their number in config.json.
    if wanted["mtp_num_layers"] is None:
        found["mtp_num_layers"] = None
    return {name: (wanted[name], found[name]) for name in _COMPARED if wanted[name] != found[name]}


def _kept_up(carried: Mapping[str, Any], wanted: Mapping[str, Any], *, settings: Mapping[str, Any]) -> Values:
    if not differing(carried, wanted):
        return dict(carried)
    written = _written(family_of_config(carried), settings)
    kept = {key: value for key, value in carried.items() if key not in _ROTATION}
    config = {**kept, **written}
    left = differing(config, wanted)
    if left:
        raise ValueError(
            f"{family_of_config(carried).architecture} of the files next to the checkpoint differs in {_words(left)}"
        )
    return config


def _written(family: Family, settings: Mapping[str, Any]) -> Values:
    full = with_defaults(settings)
    # A derived value, which files may omit.
    for name, value in comparable_settings(settings).items():
        if full[name] is None or name in ("group_query_attention", "num_query_groups"):
            full[name] = value
    if full["ffn_hidden_size"] is None:
        full["ffn_hidden_size"] = full["moe_ffn_hidden_size"]
    config: Values = {"architectures": [family.architecture], "model_type": family.model_type}
    for part in family.parts:
        config |= part.write(full)
    return config


def _with_dtype(config: Values, dtype: str) -> Values:
    # Later versions of transformers write the first key. All versions read both.
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    return config if config.get(key) == dtype else {**config, key: dtype}


def _words(different: Mapping[str, tuple[Any, Any]]) -> str:
    flags = {dest: flag for dest, flag in flag_table().by_dest.items() if dest in different}
    # The flag that disables a field does not name it.
    names = {dest: dest if flag.constant is False else flag.flags[0] for dest, flag in flags.items()}
    return ", ".join(f"{names[dest]} ({theirs}, {ours} here)" for dest, (ours, theirs) in different.items())
