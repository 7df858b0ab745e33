"""Parts of a config.json and the settings that they stand for, each readable in both directions.

A family (families.py) is a list of these. Settings are named as in the parsed arguments; tensors are names.py's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron.core.transformer.moe.moe_config import layers_with_experts

Values = dict[str, Any]
_REQUIRED = object()
_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class Part(Protocol):
    """What some keys of a config.json say, as settings, and the keys that say the same of settings."""

    def read(self, config: Mapping[str, Any]) -> Values:
        """Raises ValueError naming the key where no setting says the same."""
        ...

    def write(self, settings: Mapping[str, Any]) -> Values:
        """Where no key can say it, what `read` makes of the result differs from `settings`."""
        ...


@dataclass(frozen=True)
class Same:
    """One value under two names; default: what a config.json without the key means; also: another name of the key."""

    theirs: str
    ours: str
    default: Any = field(default=_REQUIRED)
    also: str | None = None

    def read(self, config: Mapping[str, Any]) -> Values:
        value = config.get(self.theirs)
        if value is None and self.also is not None:
            value = config.get(self.also)
        if value is None:
            if self.default is _REQUIRED:
                raise ValueError(f"config.json has no {self.theirs}: a model of this architecture must have it")
            value = self.default
        return {self.ours: value}

    def write(self, settings: Mapping[str, Any]) -> Values:
        return {self.theirs: settings[self.ours]}


@dataclass(frozen=True)
class Fixed:
    """Settings that every model of a family has."""

    settings: Values

    def read(self, config: Mapping[str, Any]) -> Values:
        return dict(self.settings)

    def write(self, settings: Mapping[str, Any]) -> Values:
        return {}


@dataclass(frozen=True)
class Only:
    """A key with the one value that can be honoured, which a config.json without the key means too."""

    theirs: str
    value: Any

    def read(self, config: Mapping[str, Any]) -> Values:
        found = config.get(self.theirs, self.value)
        # Null is how transformers writes what is not used.
        if found != self.value and not (found is None and not self.value):
            raise ValueError(f"config.json: {self.theirs} is {found!r}: only {self.value!r} can be converted")
        return {}

    def write(self, settings: Mapping[str, Any]) -> Values:
        return {self.theirs: self.value}


class Tied:
    """Whether the output layer has weights of its own."""

    def read(self, config: Mapping[str, Any]) -> Values:
        return {"untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False)}

    def write(self, settings: Mapping[str, Any]) -> Values:
        return {"tie_word_embeddings": not settings["untie_embeddings_and_output_weights"]}


@dataclass(frozen=True)
class Heads:
    """Query heads, groups and the width of a head; has_width: config.json has a key for it, of this default."""

    has_width: bool = True
    default_width: int | None = None

    def read(self, config: Mapping[str, Any]) -> Values:
        heads = Same("num_attention_heads", "num_attention_heads").read(config)
        count = heads["num_attention_heads"]
        width = (config.get("head_dim") or self.default_width) if self.has_width else None
        return {
            **heads,
            "group_query_attention": True,
            "num_query_groups": config.get("num_key_value_heads") or count,
            "kv_channels": width or config["hidden_size"] // count,
        }

    def write(self, settings: Mapping[str, Any]) -> Values:
        heads = settings["num_attention_heads"]
        width = {"head_dim": settings["kv_channels"]} if self.has_width else {}
        groups = settings["num_query_groups"] if settings["group_query_attention"] else heads
        return {"num_attention_heads": heads, "num_key_value_heads": groups, **width}


@dataclass(frozen=True)
class Rotation:
    """Rotary positions: their base, how much of a head they turn, and what stretches them.

    Files of transformers before 5 have rope_theta and rope_scaling, later ones rope_parameters for both.
    """

    default_base: float = 10000.0
    share: float | None = None  # the default of partial_rotary_factor, where the family has that key

    def read(self, config: Mapping[str, Any]) -> Values:
        rotation = rotation_of(config)
        base = rotation.get("rope_theta") or self.default_base
        if int(base) != base:
            raise ValueError(f"config.json: rope_theta is {base}: only whole numbers can be converted")
        settings = {"position_embedding_type": "rope", "rotary_base": int(base), **_stretching(rotation)}
        if self.share is not None:
            share = config.get("partial_rotary_factor") or rotation.get("partial_rotary_factor") or self.share
            settings["rotary_percent"] = float(share)
        return settings

    def write(self, settings: Mapping[str, Any]) -> Values:
        scaling: Values | None = None
        if settings["use_rope_scaling"]:
            scaling = {"rope_type": "llama3", "factor": float(settings["rope_scaling_factor"]), **_LLAMA_3}
        elif settings["rotary_seq_len_interpolation_factor"] not in (None, 1):
            scaling = {"rope_type": "linear", "factor": float(settings["rotary_seq_len_interpolation_factor"])}
        share = {} if self.share is None else {"partial_rotary_factor": settings["rotary_percent"]}
        return {"rope_theta": float(settings["rotary_base"]), "rope_scaling": scaling, **share}


def rotation_of(config: Mapping[str, Any]) -> Values:
    """What a config.json of either form says of rotary positions, in one dict."""
    found = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    # The word of transformers before 4.43.
    kind = found.pop("type", None)
    found.setdefault("rope_type", kind or "default")
    if config.get("rope_theta") is not None:
        found.setdefault("rope_theta", config["rope_theta"])
    return found


def _stretching(rotation: Mapping[str, Any]) -> Values:
    kind, factor = rotation["rope_type"], rotation.get("factor")
    settings: Values = {
        "use_rope_scaling": False,
        "rope_scaling_factor": 8.0,
        "rotary_seq_len_interpolation_factor": None,
    }
    if kind == "llama3":
        other = {key: rotation.get(key) for key, value in _LLAMA_3.items() if rotation.get(key) != value}
        if other:
            raise ValueError(f"config.json: rope_scaling has {other}: only {_LLAMA_3} can be converted")
        settings |= {"use_rope_scaling": True, "rope_scaling_factor": float(rotation["factor"])}
    elif kind == "linear" and factor == int(factor or 0):
        settings["rotary_seq_len_interpolation_factor"] = int(rotation["factor"])
    elif kind != "default":
        raise ValueError(f"config.json: rope_type is {kind!r} with factor {factor}: cannot be converted")
    return settings


@dataclass(frozen=True)
class Windows:
    """Sliding windows; switch: whether the family has use_sliding_window, without which there is none."""

    switch: bool = True

    def read(self, config: Mapping[str, Any]) -> Values:
        none = {"window_size": None, "window_attn_skip_freq": None}
        size, num_layers = config.get("sliding_window"), config["num_hidden_layers"]
        if not size or (self.switch and not config.get("use_sliding_window", False)):
            return none
        kinds, first = config.get("layer_types"), config.get("max_window_layers", 0)
        if kinds is not None:
            pattern = [int(kind == "sliding_attention") for kind in kinds]
        else:
            pattern = [int(layer >= first) for layer in range(num_layers)]
        if not any(pattern):
            return none
        # Theirs counts the token itself.
        return {"window_size": (size - 1, 0), "window_attn_skip_freq": None if all(pattern) else pattern}

    def write(self, settings: Mapping[str, Any]) -> Values:
        window, skip = settings["window_size"], settings["window_attn_skip_freq"]
        has_window = window is not None and window[0] >= 0
        size = {"sliding_window": window[0] + 1 if has_window else None}
        if not self.switch:
            return size
        if not has_window:
            return {**size, "use_sliding_window": False}
        pattern = window_pattern(skip, num_layers=settings["num_layers"])
        kinds = ["sliding_attention" if one else "full_attention" for one in pattern]
        return {**size, "use_sliding_window": True, "layer_types": kinds}


def window_pattern(skip: int | list[int] | None, *, num_layers: int) -> list[int]:
    """1 for each layer with a window, 0 for each without; skip: window_attn_skip_freq."""
    if skip is None:
        return [1] * num_layers
    if isinstance(skip, int):
        return [int(number % skip != 0) for number in range(1, num_layers + 1)]
    return list(skip)


class SparseLayers:
    """Which layers have experts, as Qwen's models say it."""

    def read(self, config: Mapping[str, Any]) -> Values:
        step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
        layers = range(config["num_hidden_layers"])
        return {"moe_layer_freq": short_pattern([int(i not in dense and (i + 1) % step == 0) for i in layers])}

    def write(self, settings: Mapping[str, Any]) -> Values:
        pattern = expert_layers(settings)
        return {"decoder_sparse_step": 1, "mlp_only_layers": [i for i, has in enumerate(pattern) if not has]}


class LeadingDenseLayers:
    """How many layers before those with experts are dense."""

    def read(self, config: Mapping[str, Any]) -> Values:
        dense, layers = config.get("first_k_dense_replace", 0), config["num_hidden_layers"]
        return {"moe_layer_freq": short_pattern([0] * dense + [1] * (layers - dense))}

    def write(self, settings: Mapping[str, Any]) -> Values:
        return {"first_k_dense_replace": [*expert_layers(settings), 1].index(1)}


class ExpertWidth:
    """The width of an expert, where it is the one width that there is."""

    def read(self, config: Mapping[str, Any]) -> Values:
        width = config["intermediate_size"]
        return {"ffn_hidden_size": width, "moe_ffn_hidden_size": width}

    def write(self, settings: Mapping[str, Any]) -> Values:
        return {"intermediate_size": settings["moe_ffn_hidden_size"]}


class WeightsOfExperts:
    """Softmax scores: of the chosen alone (normalised), or of all experts."""

    def read(self, config: Mapping[str, Any]) -> Values:
        return {"moe_router_pre_softmax": not config.get("norm_topk_prob", False)}

    def write(self, settings: Mapping[str, Any]) -> Values:
        return {"norm_topk_prob": not settings["moe_router_pre_softmax"]}


@dataclass(frozen=True)
class SharedExperts:
    """Shared experts that are counted: their width together is that many times one expert's."""

    def read(self, config: Mapping[str, Any]) -> Values:
        count = config.get("n_shared_experts") or 0
        return {"moe_shared_expert_intermediate_size": count * config["moe_intermediate_size"] or None}

    def write(self, settings: Mapping[str, Any]) -> Values:
        width = settings["moe_shared_expert_intermediate_size"] or 0
        return {"n_shared_experts": width // settings["moe_ffn_hidden_size"]}


class ExpertGroups:
    """Groups of experts, of which a token uses some; one group is none."""

    def read(self, config: Mapping[str, Any]) -> Values:
        groups = config.get("n_group") or 1
        chosen = config.get("topk_group") if groups > 1 else None
        experts = config["num_experts_per_tok"]
        # A group is as good as its two best experts there; here, as those that a token takes from each.
        if chosen is not None and experts // chosen != 2:
            raise ValueError(
                f"config.json: topk_group is {chosen} and num_experts_per_tok {experts}: only twice as many experts as "
                "groups can be converted"
            )
        return {"moe_router_num_groups": groups if groups > 1 else None, "moe_router_group_topk": chosen}

    def write(self, settings: Mapping[str, Any]) -> Values:
        groups = settings["moe_router_num_groups"] or 1
        return {"n_group": groups, "topk_group": settings["moe_router_group_topk"] or 1}


class ScaledWeights:
    """A factor of all routing weights; 1 is none."""

    def read(self, config: Mapping[str, Any]) -> Values:
        factor = config.get("routed_scaling_factor") or 1.0
        return {"moe_router_topk_scaling_factor": None if factor == 1 else float(factor)}

    def write(self, settings: Mapping[str, Any]) -> Values:
        return {"routed_scaling_factor": settings["moe_router_topk_scaling_factor"] or 1.0}


def expert_layers(settings: Mapping[str, Any]) -> list[int]:
    """1 for each layer with experts, 0 for each dense one."""
    return layers_with_experts(settings["num_experts"], settings["moe_layer_freq"], num_layers=settings["num_layers"])


def short_pattern(pattern: list[int]) -> int | list[int]:
    """A pattern as moe_layer_freq is given: 1 where all layers have experts."""
    return 1 if all(pattern) else pattern
