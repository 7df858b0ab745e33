"""Converts config.json to the settings of a model and back: finds the family and preserves keys of an existing file.

config_parts.py interprets single keys, and families.py lists the keys of each family.
"""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.core.models.gpt.gpt_config import default_ffn_hidden_size
from megatron.tools.hugging_face.config_kinds import without_unset_counts
from megatron.tools.hugging_face.config_parts import ROTATION_KEYS, Values, window_pattern
from megatron.tools.hugging_face.expert_parts import expert_layers
from megatron.tools.hugging_face.families import FAMILIES, Family
from megatron.tools.hugging_face.quantized import QUANTIZATION, require_known_quantization
from megatron.training.command_line.checkpoint_rules import OnLoad, names_with
from megatron.training.command_line.flags import flag_table

# Model settings that config.json cannot express, or that only affect training.
_NOT_COMPARED = ("seq_length", "make_vocab_size_divisible_by", "hidden_dropout", "attention_dropout")
_COMPARED = tuple(name for name in names_with(OnLoad.WEIGHTS, OnLoad.MODEL, OnLoad.GIVEN) if name not in _NOT_COMPARED)
# Settings of alternative position embeddings.
_ROTATION = ("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings")
# Keys that change no logits: names, tokens, losses of training, generation, quantization (which is dequantized), and
# names under which the original files of gpt-oss repeat other keys.
_WITHOUT_EFFECT = (
    *("architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "auto_map", "_name_or_path"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "tokenizer_class"),
    *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "aux_loss_alpha", "seq_aux"),
    *("use_cache", "output_attentions", "output_hidden_states", "return_dict", "pretraining_tp", "ep_size"),
    *("chunk_size_feed_forward", "is_encoder_decoder", "problem_type", "id2label", "label2id"),
    *("_attn_implementation", "attn_implementation", "_experts_implementation", "experts_implementation"),
    *(QUANTIZATION, "initial_context_length", "experts_per_token"),
)


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
    return _read(config)[0]


def unread_keys(config: Mapping[str, Any]) -> list[str]:
    """Returns the keys of a config.json that determine no setting, except keys that are known to change no logits.

    Includes keys of rope_scaling and rope_parameters. Raises the errors of settings_of_config.
    """
    family, keys = family_of_config(config), _read(config)[1]
    known = keys.used | set(family.aliases) | set(family.derived) | set(_WITHOUT_EFFECT)
    rotations = {name: config.get(name) or {} for name in ("rope_scaling", "rope_parameters")}
    unread = [key for key, value in config.items() if key not in known and value is not None]
    if all(rotations.values()):
        # As in transformers, the other one applies.
        unread.append("rope_parameters")
    for name, rotation in rotations.items():
        for part in (rotation, *(value for value in rotation.values() if isinstance(value, dict))):
            unread += [f"{name}.{key}" for key in part if key not in ROTATION_KEYS]
    return sorted(set(unread))


class _ReadKeys(dict[str, Any]):
    """A config.json that records which of its keys are read."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.used: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.used.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.used.add(key)
        return super().get(key, default)


def _read(config: Mapping[str, Any]) -> tuple[Values, _ReadKeys]:
    """Returns the settings, and the config.json with the record of its keys."""
    family = family_of_config(config)
    require_known_quantization(config)
    keys = _ReadKeys(without_unset_counts({**family.defaults, **_without_aliases(config, family)}))
    settings: Values = {}
    for part in family.parts:
        try:
            settings |= part.read(keys)
        except KeyError as error:
            raise ValueError(f"config.json has no {error.args[0]}, which {family.architecture} requires") from error
    return settings, keys


def _without_aliases(config: Mapping[str, Any], family: Family) -> Values:
    """Renames keys to the names of the family's parts. Raises ValueError if a value has two names and differs."""
    found = {key: value for key, value in config.items() if key not in family.aliases}
    for alias, key in family.aliases.items():
        value, other = config.get(alias), config.get(key)
        if None not in (value, other) and value != other:
            raise ValueError(f"config.json: {key} is {other!r}, but {alias} is {value!r}: must be equal")
        if value is not None:
            found[key] = value
    return found


def with_defaults(settings: Mapping[str, Any]) -> Values:
    """Returns the settings of a run, with the defaults of unset ones and the values that a run derives from others.

    Older checkpoints do not contain newer flags.
    """
    values = {**{name: flag.default for name, flag in flag_table().by_dest.items()}, **settings}
    if values["ffn_hidden_size"] is None:
        values["ffn_hidden_size"] = default_ffn_hidden_size(values["hidden_size"], swiglu=bool(values["swiglu"]))
    if values["num_experts"] is not None and values["moe_ffn_hidden_size"] is None:
        values["moe_ffn_hidden_size"] = values["ffn_hidden_size"]
    if not values["group_query_attention"]:
        values["num_query_groups"] = values["num_attention_heads"]
    elif values["num_query_groups"] is None:
        values["num_query_groups"] = 1
    if values["kv_channels"] is None and not values["multi_latent_attention"]:
        values["kv_channels"] = values["hidden_size"] // values["num_attention_heads"]
    if values["max_position_embeddings"] is None:
        values["max_position_embeddings"] = values["seq_length"]
    return values


def comparable_settings(settings: Mapping[str, Any]) -> Values:
    """Returns the command-line defaults updated by `settings`, in a canonical form for comparison."""
    full = with_defaults(settings)
    values = {name: full[name] for name in _COMPARED}
    if values["num_experts"] is None:
        values |= {name: flag_table().by_dest[name].default for name in values if name.startswith("moe_")}
    pattern = expert_layers(values)
    # The width of dense layers has no meaning without dense layers.
    values |= {"ffn_hidden_size": None if all(pattern) else values["ffn_hidden_size"], "moe_layer_freq": pattern}
    values["group_query_attention"] = True
    # Latent attention has its own head sizes.
    if values["multi_latent_attention"]:
        values["kv_channels"] = None
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
    refusals: list[str] = []
    candidates = list(_candidates(settings, wanted, refusals))
    config, different = min(candidates, key=lambda one: len(one[1]), default=({}, {}))
    if different or not candidates:
        nearest = [f"{config['architectures'][0]} differs in {_words(different)}"] if different else []
        raise ValueError(f"no architecture supports these settings: {'; '.join([*refusals, *nearest])}")
    return _with_dtype(config, dtype)


def _candidates(
    settings: Mapping[str, Any], wanted: Values, refusals: list[str]
) -> Iterator[tuple[Values, dict[str, tuple[Any, Any]]]]:
    """Yields, for each architecture, the config.json closest to the settings, and the remaining differences.

    Architectures that cannot express the settings are appended to `refusals`, with the reason.
    """
    for family in FAMILIES:
        if family.has_experts == (wanted["num_experts"] is not None):
            config = _written(family, settings)
            try:
                yield config, differing(config, wanted)
            except ValueError as error:
                refusals.append(f"{family.architecture}: {error}")


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
    family = family_of_config(carried)
    written = _written(family, settings)
    kept = {key: value for key, value in carried.items() if key not in _ROTATION and key not in family.aliases}
    config = {**kept, **written}
    left = differing(config, wanted)
    if left:
        raise ValueError(f"{family.architecture} of the files next to the checkpoint differs in {_words(left)}")
    return config


def _written(family: Family, settings: Mapping[str, Any]) -> Values:
    full = with_defaults(settings)
    # A derived value, which files may omit.
    for name, value in comparable_settings(settings).items():
        if full[name] is None or name in ("group_query_attention", "num_query_groups"):
            full[name] = value
    config: Values = {"architectures": [family.architecture], "model_type": family.model_type}
    for part in family.parts:
        config |= part.write(full)
    return config


def _with_dtype(config: Values, dtype: str) -> Values:
    # Version 5 of transformers writes dtype, earlier ones torch_dtype. Version 5 reads both, and prefers dtype.
    keys = [key for key in ("dtype", "torch_dtype") if config.get(key) is not None] or ["dtype"]
    return config if all(config.get(key) == dtype for key in keys) else {**config, **dict.fromkeys(keys, dtype)}


def _words(different: Mapping[str, tuple[Any, Any]]) -> str:
    flags = {dest: flag for dest, flag in flag_table().by_dest.items() if dest in different}
    # The flag that disables a field does not name it.
    names = {dest: dest if flag.constant is False else flag.flags[0] for dest, flag in flags.items()}
    return ", ".join(f"{names[dest]} ({theirs}, {ours} here)" for dest, (ours, theirs) in different.items())
