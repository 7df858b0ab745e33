"""Maps parts of a config.json to settings, in both directions.

A family (families.py) is a list of parts. Settings are named as in the parsed arguments. expert_parts.py contains the
parts for experts, and names.py maps the tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

Values = dict[str, Any]
_REQUIRED = object()
# Keys of rope_scaling for YaRN, and the corresponding settings.
_YARN = {
    "factor": "rotary_scaling_factor",
    "original_max_position_embeddings": "yarn_original_max_position_embeddings",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "yarn_correction_range_round_to_int",
}
# All keys of rope_scaling and rope_parameters that are read.
ROTATION_KEYS = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "low_freq_factor", "high_freq_factor"),
    *("attention_factor", "full_attention", "sliding_attention", *_YARN),
)
# Kinds of layers in layer_types, below which rope_parameters may be nested.
LAYER_KINDS = ("full_attention", "sliding_attention")
_MAX_WINDOW_LAYERS = 28  # default for a config.json without the key
_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class Part(Protocol):
    """Converts some keys of a config.json to settings, and back."""

    def read(self, config: Mapping[str, Any]) -> Values:
        """Converts keys of config.json to settings. Raises ValueError naming a key without a corresponding setting."""
        ...

    def write(self, settings: Mapping[str, Any]) -> Values:
        """Converts settings to keys. If no key can express them, `read` of the result differs from `settings`."""
        ...


@dataclass(frozen=True)
class Same:
    """One value under two names. default: value for an absent key."""

    theirs: str
    ours: str
    default: Any = field(default=_REQUIRED)

    def read(self, config: Mapping[str, Any]) -> Values:
        value = config.get(self.theirs)
        if value is None:
            if self.default is _REQUIRED:
                raise ValueError(f"config.json has no {self.theirs}, which models of this architecture require")
            value = self.default
        return {self.ours: value}

    def write(self, settings: Mapping[str, Any]) -> Values:
        return {self.theirs: settings[self.ours]}


@dataclass(frozen=True)
class Fixed:
    """Settings that are the same for every model of a family."""

    settings: Values

    def read(self, config: Mapping[str, Any]) -> Values:
        return dict(self.settings)

    def write(self, settings: Mapping[str, Any]) -> Values:
        return {}


@dataclass(frozen=True)
class Only:
    """A key with one supported value, which is also the default of an absent key."""

    theirs: str
    value: Any

    def read(self, config: Mapping[str, Any]) -> Values:
        found = config.get(self.theirs, self.value)
        # transformers writes null for unused features.
        if found != self.value and not (found is None and not self.value):
            raise ValueError(f"config.json: {self.theirs} is {found!r}: only {self.value!r} can be converted")
        return {}

    def write(self, settings: Mapping[str, Any]) -> Values:
        return {self.theirs: self.value}


class Tied:
    """Maps the flag that ties the output layer to the embedding."""

    def read(self, config: Mapping[str, Any]) -> Values:
        return {"untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False)}

    def write(self, settings: Mapping[str, Any]) -> Values:
        return {"tie_word_embeddings": not settings["untie_embeddings_and_output_weights"]}


@dataclass(frozen=True)
class Heads:
    """Numbers of query heads and groups, and the head size.

    has_width: whether config.json always has a key for the head size. Without it, transformers still reads the key.
    default_width: default of this key.
    """

    has_width: bool = True
    default_width: int | None = None

    def read(self, config: Mapping[str, Any]) -> Values:
        heads = Same("num_attention_heads", "num_attention_heads").read(config)
        count = heads["num_attention_heads"]
        width = config.get("head_dim") or self.default_width
        return {
            **heads,
            "group_query_attention": True,
            "num_query_groups": config.get("num_key_value_heads") or count,
            "kv_channels": width or config["hidden_size"] // count,
        }

    def write(self, settings: Mapping[str, Any]) -> Values:
        heads = settings["num_attention_heads"]
        has_width = self.has_width or settings["kv_channels"] != settings["hidden_size"] // heads
        width = {"head_dim": settings["kv_channels"]} if has_width else {}
        groups = settings["num_query_groups"] if settings["group_query_attention"] else heads
        return {"num_attention_heads": heads, "num_key_value_heads": groups, **width}


class LatentHeads:
    """The heads of multi-latent attention and the ranks of its projections."""

    _widths = (
        Same("kv_lora_rank", "kv_lora_rank"),
        Same("q_lora_rank", "q_lora_rank", None),
        Same("qk_nope_head_dim", "qk_head_dim"),
        Same("qk_rope_head_dim", "qk_pos_emb_head_dim"),
        Same("v_head_dim", "v_head_dim"),
    )

    def read(self, config: Mapping[str, Any]) -> Values:
        heads = config["num_attention_heads"]
        if config.get("num_key_value_heads") not in (None, heads):
            raise ValueError(f"config.json: num_key_value_heads is {config['num_key_value_heads']}: must be {heads}")
        settings: Values = {"num_attention_heads": heads, "multi_latent_attention": True}
        settings |= {"group_query_attention": False, "num_query_groups": None, "kv_channels": None}
        for width in self._widths:
            settings |= width.read(config)
        return settings

    def write(self, settings: Mapping[str, Any]) -> Values:
        heads = settings["num_attention_heads"]
        config: Values = {"num_attention_heads": heads, "num_key_value_heads": heads}
        for width in self._widths:
            config |= width.write(settings)
        return config


@dataclass(frozen=True)
class Rotation:
    """Rotary position embeddings: base, rotated fraction of a head, and scaling.

    transformers before version 5 writes rope_theta and rope_scaling, and later versions write rope_parameters for both.
    default: rope_parameters of a config.json with neither rope_scaling nor rope_parameters.
    """

    default_base: float = 10000.0
    share: float | None = None  # default of partial_rotary_factor, or None if the family rotates whole heads
    unstretched: str | None = None  # rope_type without scaling
    default: Values | None = None

    def read(self, config: Mapping[str, Any]) -> Values:
        rotation = rotation_of(config, default=self.default)
        base = rotation.get("rope_theta") or self.default_base
        if int(base) != base:
            raise ValueError(f"config.json: rope_theta is {base}: only whole numbers can be converted")
        settings = {"position_embedding_type": "rope", "rotary_base": int(base), **_stretching(rotation)}
        settings.setdefault("rope_type", self.unstretched)
        share = rotation.get("partial_rotary_factor") or self.share or 1.0
        if self.share is not None:
            settings["rotary_percent"] = float(share)
        elif share != 1:
            raise ValueError(f"config.json: partial_rotary_factor is {share}: only 1.0 can be converted")
        return settings

    def write(self, settings: Mapping[str, Any]) -> Values:
        # A family with a default of its own would read null as this default.
        scaling: Values | None = None if self.default is None else {"rope_type": "default"}
        if settings["rope_type"] == "yarn":
            scaling = {"rope_type": "yarn", **{key: settings[name] for key, name in _YARN.items()}}
            if not settings["mscale_all_dim"]:
                # These two keys apply only together.
                del scaling["mscale"], scaling["mscale_all_dim"]
        elif settings["use_rope_scaling"]:
            scaling = {"rope_type": "llama3", "factor": float(settings["rope_scaling_factor"]), **_LLAMA_3}
        elif settings["rotary_seq_len_interpolation_factor"] not in (None, 1):
            scaling = {"rope_type": "linear", "factor": float(settings["rotary_seq_len_interpolation_factor"])}
        share = {} if self.share is None else {"partial_rotary_factor": settings["rotary_percent"]}
        return {"rope_theta": float(settings["rotary_base"]), "rope_scaling": scaling, **share}


def rotation_of(config: Mapping[str, Any], *, default: Values | None = None) -> Values:
    """Returns the rotary settings of either form of config.json as one dict, with the precedence of transformers.

    Of rope_scaling and rope_parameters, the first one that is not empty applies, and its keys precede the keys of the
    same name next to it. default: applies if both are absent. Raises ValueError if the settings differ between layers.
    """
    written = config.get("rope_scaling"), config.get("rope_parameters")
    found = dict(written[0] or written[1] or (default if written[1] is None else None) or {})
    of_layers = {kind: value for kind, value in found.items() if isinstance(value, dict) or kind in LAYER_KINDS}
    if of_layers:
        [first, *others] = of_layers.values()
        if first is None or any(other != first for other in others) or len(of_layers) < len(found):
            raise ValueError(
                f"config.json: rope_parameters has different values for {', '.join(found)}: can be converted only if "
                "all layers have the same"
            )
        found = dict(first)
    # Key of transformers before 4.43.
    kind = found.pop("type", None)
    found.setdefault("rope_type", kind or "default")
    for name in ("rope_theta", "partial_rotary_factor"):
        value = config.get(name)
        if value is not None:
            found.setdefault(name, value)
    # Unlike the others, this key precedes the one in the dict.
    original = config.get("original_max_position_embeddings")
    if found["rope_type"] in ("yarn", "llama3"):
        found["original_max_position_embeddings"] = (
            original or found.get("original_max_position_embeddings") or config.get("max_position_embeddings")
        )
    return found


def _stretching(rotation: Mapping[str, Any]) -> Values:
    kind, factor = rotation["rope_type"], rotation.get("factor")
    settings: Values = {
        "use_rope_scaling": False,
        "rope_scaling_factor": 8.0,
        "rotary_seq_len_interpolation_factor": None,
    }
    if kind == "yarn":
        settings |= _yarn(rotation)
    elif kind == "llama3":
        other = {key: rotation.get(key) for key, value in _LLAMA_3.items() if rotation.get(key) != value}
        if other:
            raise ValueError(f"config.json: rope_scaling has {other}: only {_LLAMA_3} can be converted")
        settings |= {"use_rope_scaling": True, "rope_scaling_factor": float(rotation["factor"])}
    elif kind == "linear" and factor == int(factor or 0):
        settings["rotary_seq_len_interpolation_factor"] = int(rotation["factor"])
    elif kind != "default":
        raise ValueError(f"config.json: rope_type is {kind!r} with factor {factor}: cannot be converted")
    return settings


def _yarn(rotation: Mapping[str, Any]) -> Values:
    if rotation.get("attention_factor") is not None:
        raise ValueError(
            f"config.json: attention_factor is {rotation['attention_factor']}: can be converted only if it is derived "
            "from mscale and mscale_all_dim"
        )
    defaults = {"beta_fast": 32.0, "beta_slow": 1.0}
    found = {**defaults, **{key: value for key, value in rotation.items() if value is not None}}
    found["truncate"] = bool(rotation.get("truncate", True))
    mscale, all_dim = found.get("mscale") or 0.0, found.get("mscale_all_dim") or 0.0
    if all_dim and not mscale:
        raise ValueError(f"config.json: mscale_all_dim is {all_dim} without mscale: cannot be converted")
    found |= {"mscale": mscale if all_dim else 1.0, "mscale_all_dim": all_dim}
    try:
        return {"rope_type": "yarn", **{name: found[key] for key, name in _YARN.items()}}
    except KeyError as error:
        raise ValueError(f"config.json: rope_scaling has no {error.args[0]}, which yarn requires") from error


class WindowRule(Enum):
    """Which layers have a sliding window, for families where this depends on more than the window size."""

    EVERY = auto()  # all layers; layer_types is not read
    FROM_A_LAYER = auto()  # layer_types; without it from max_window_layers on
    BELOW_A_LAYER = auto()  # layer_types; without it every other layer from the first, up to max_window_layers
    ALTERNATING = auto()  # layer_types; without it every other layer from the first


@dataclass(frozen=True)
class Windows:
    """Sliding-window attention. switch: whether the family has use_sliding_window, which must then enable it."""

    rule: WindowRule = WindowRule.FROM_A_LAYER
    switch: bool = True
    # transformers' default for a config.json without sliding_window.
    default_size: int | None = 4096

    def read(self, config: Mapping[str, Any]) -> Values:
        none = {"window_size": None, "window_attn_skip_freq": None}
        size = config.get("sliding_window", self.default_size)
        # Read even without a window, so that these keys do not count as unknown.
        pattern, is_on = self._pattern(config), not self.switch or config.get("use_sliding_window", False)
        if not size or not is_on or not any(pattern):
            return none
        # transformers' window includes the token itself.
        return {"window_size": (size - 1, 0), "window_attn_skip_freq": None if all(pattern) else pattern}

    def _pattern(self, config: Mapping[str, Any]) -> list[int]:
        layers, kinds = range(config["num_hidden_layers"]), config.get("layer_types")
        border = config.get("max_window_layers", _MAX_WINDOW_LAYERS)
        if self.rule is WindowRule.EVERY:
            return [1 for _ in layers]
        if kinds is not None:
            return [int(kind == "sliding_attention") for kind in kinds]
        if self.rule is WindowRule.FROM_A_LAYER:
            return [int(layer >= border) for layer in layers]
        end = border if self.rule is WindowRule.BELOW_A_LAYER else len(layers)
        return [int(layer % 2 == 0 and layer < end) for layer in layers]

    def write(self, settings: Mapping[str, Any]) -> Values:
        window, skip = settings["window_size"], settings["window_attn_skip_freq"]
        has_window = window is not None and window[0] >= 0
        # A family with layer_types but without a switch requires a size, even if no layer uses it.
        unused = self.default_size if self.rule is WindowRule.ALTERNATING else None
        size: Values = {"sliding_window": window[0] + 1 if has_window else unused}
        switch = {"use_sliding_window": has_window} if self.switch else {}
        if self.rule is WindowRule.EVERY or (self.switch and not has_window):
            return {**size, **switch}
        layers = settings["num_layers"]
        pattern = window_pattern(skip, num_layers=layers) if has_window else [0] * layers
        kinds = ["sliding_attention" if one else "full_attention" for one in pattern]
        return {**size, **switch, "layer_types": kinds}


def window_pattern(skip: int | list[int] | None, *, num_layers: int) -> list[int]:
    """Returns 1 for each layer with a window and 0 for each layer without. skip: value of window_attn_skip_freq."""
    if skip is None:
        return [1] * num_layers
    if isinstance(skip, int):
        return [int(number % skip != 0) for number in range(1, num_layers + 1)]
    return list(skip)
