"""Parameter groups with a common learning rate and weight decay, and a script's overrides of both.

optimizer_param_scheduler.py computes the values of each step. flat_params.py joins parameters of a group in memory.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from megatron.core.optimizer.optimizer_config import OptimizerConfig, ParamKey, ParamWithNamePredicate
from megatron.core.tensor_parallel.param_attributes import param_facts

# Patterns for weights with a vocabulary dimension, as GPTModel and similar models name them.
_VOCABULARY = ("*word_embeddings.weight", "*output_layer.weight")
_HEAD_NORMS = ("*.q_layernorm.*", "*.k_layernorm.*", "*.kv_layernorm.*")
_EMBEDDINGS = ("*embeddings.weight", "*output_layer.weight")


@dataclass(frozen=True, kw_only=True)
class ParamGroupOverride:
    """Values for selected parameters that replace the configured ones; None leaves the configured value.

    max_lr, min_lr: limits of the schedule's learning rate. start_wd, end_wd: weight decay at the beginning and end of
    training. lr_mult, wd_mult: factors of learning rate and weight decay; wd_mult 0 disables decay, 1 enables it even
    for biases and norms.
    """

    max_lr: float | None = None
    min_lr: float | None = None
    start_wd: float | None = None
    end_wd: float | None = None
    lr_mult: float | None = None
    wd_mult: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"ParamGroupOverride.{name} is {value}: must be a number, at least 0")
        if (self.start_wd is None) != (self.end_wd is None):
            raise ValueError(
                f"ParamGroupOverride.start_wd is {self.start_wd} and end_wd is {self.end_wd}: set both or neither"
            )


ConfigOverrides = Mapping[ParamKey, ParamGroupOverride | Mapping[str, float | None]]
_VOCABULARY_KEY = ParamKey(name=_VOCABULARY)


def get_standard_config_overrides(config: OptimizerConfig) -> dict[ParamKey, ParamGroupOverride | Mapping[str, Any]]:
    """Returns the default overrides: no weight decay for biases and 1-D parameters, and the rates of --decoupled-lr.

    A script can add overrides; later ones win. With apply_wd_to_qk_layernorm, weight decay also applies to the norms of
    queries and keys.
    """
    exempt = (
        ParamWithNamePredicate("no weight decay, except for norms of heads", _is_exempt_but_head_norms)
        if config.apply_wd_to_qk_layernorm
        else ParamWithNamePredicate("no weight decay", _is_exempt)
    )
    standard: dict[ParamKey, ParamGroupOverride | Mapping[str, Any]] = {
        ParamKey(with_name_predicate=exempt): ParamGroupOverride(wd_mult=0.0)
    }
    if config.decoupled_lr is not None:
        # With decoupled_min_lr None, the common minimum applies, as in Megatron.
        rates = ParamGroupOverride(max_lr=config.decoupled_lr, min_lr=config.decoupled_min_lr)
        standard[_VOCABULARY_KEY] = rates
    return standard


def _is_exempt(param: torch.Tensor, name: str) -> bool:
    return not weight_decays(name, param)


def _is_exempt_but_head_norms(param: torch.Tensor, name: str) -> bool:
    return _is_exempt(param, name) and not _fits(name, _HEAD_NORMS)


def as_override(value: ParamGroupOverride | Mapping[str, Any]) -> ParamGroupOverride:
    """Converts a dictionary of fields to an override; returns an override unchanged.

    Raises ValueError for an unknown key.
    """
    if isinstance(value, ParamGroupOverride):
        return value
    names = [field.name for field in dataclasses.fields(ParamGroupOverride)]
    unknown = next((name for name in value if name not in names), None)
    if unknown is not None:
        raise ValueError(f"config_overrides contains the key {unknown!r}: must be one of {', '.join(names)}")
    return ParamGroupOverride(**value)


@dataclass(frozen=True, kw_only=True)
class GroupKey:
    """Properties shared by the parameters of one group. is_matrix: whether Muon updates them."""

    override: ParamGroupOverride
    is_decoupled_lr: bool = False
    is_matrix: bool = False

    def values(self, config: OptimizerConfig) -> dict[str, Any]:
        """Returns a torch parameter group without its parameters, with Megatron's keys."""
        given = {name: value for name, value in vars(self.override).items() if value is not None}
        # Initial values; the schedule replaces them, and applies the factors itself.
        lr_mult, wd_mult = given.get("lr_mult", 1.0), given["wd_mult"]
        decay = given.get("end_wd", config.weight_decay)
        values = {
            "lr": given.get("max_lr", config.lr) * lr_mult,
            "weight_decay": decay * wd_mult,
            "lr_mult": lr_mult,
            **given,
        }
        return {**values, "is_decoupled_lr": self.is_decoupled_lr}

    def check_rates(self, config: OptimizerConfig) -> None:
        """Raises ValueError if the minimum learning rate is above the maximum."""
        highest = config.lr if self.override.max_lr is None else self.override.max_lr
        lowest = config.lowest_lr if self.override.min_lr is None else self.override.min_lr
        if highest is not None and lowest > highest:
            raise ValueError(f"ParamGroupOverride.min_lr is {lowest}: must be at most max_lr, which is {highest}")


class ParamGrouping:
    """Assigns each parameter to a group, according to the settings and a script's overrides; later overrides win.

    overrides: all overrides; None means get_standard_config_overrides, and {} means that every parameter decays.
    """

    def __init__(self, config: OptimizerConfig, overrides: ConfigOverrides | None = None) -> None:
        self._config = config
        self._standard = get_standard_config_overrides(config)
        given = self._standard if overrides is None else overrides
        self._overrides = {key: as_override(value) for key, value in given.items()}
        # Indices of overrides that apply to a parameter; ranks exchange them.
        self.used: set[int] = set()

    def key_of(self, name: str, param: nn.Parameter) -> GroupKey:
        """Returns the group of a parameter. name: without wrapper prefixes.

        Raises ValueError if its learning rates contradict each other.
        """
        merged, decoupled = ParamGroupOverride(wd_mult=1.0), False
        for place, (key, override) in enumerate(self._overrides.items()):
            if key.matches(param, name):
                self.used.add(place)
                decoupled = decoupled or key == _VOCABULARY_KEY
                given = {field: value for field, value in vars(override).items() if value is not None}
                merged = dataclasses.replace(merged, **given)
        is_matrix = self._config.optimizer == "muon" and param.dim() == 2 and not _is_embedding_or_bias(name)
        merged = self._with_width(merged, name, param_facts(param).width_mult, is_matrix=is_matrix)
        group = GroupKey(override=merged, is_decoupled_lr=decoupled, is_matrix=is_matrix)
        group.check_rates(self._config)
        return group

    def _with_width(
        self, override: ParamGroupOverride, name: str, width_mult: float, *, is_matrix: bool
    ) -> ParamGroupOverride:
        """Adds the learning-rate factor of muP for a parameter's relative width, unless lr_mult was set explicitly."""
        if width_mult == 1 or override.lr_mult is not None:
            return override
        if self._config.optimizer == "sgd":
            raise ValueError(
                f"OptimizerConfig.optimizer is sgd and use_mup has given {name} the relative width {width_mult}: "
                "its learning rate is divided by the width, which is supported for adam, distributed_fused_adam and "
                "muon"
            )
        if not is_matrix:
            return dataclasses.replace(override, lr_mult=1 / width_mult)
        # An orthogonal update preserves the size of its operand, up to the scale: sqrt(the wider side), or a ratio.
        grows = self._config.muon_scale_mode == "spectral"
        return dataclasses.replace(override, lr_mult=width_mult**-0.5) if grows else override

    def plain_keys(self) -> list[GroupKey]:
        """Returns the groups that always exist, even if empty, so that schedules and log lines find them."""
        decayed = ParamGroupOverride(wd_mult=1.0)
        standard = {key: as_override(value) for key, value in self._standard.items() if key in self._overrides}
        keys = [GroupKey(override=decayed)]
        for key, override in standard.items():
            values = {name: value for name, value in vars(override).items() if value is not None}
            merged = dataclasses.replace(decayed, **values)
            keys.append(GroupKey(override=merged, is_decoupled_lr=key == _VOCABULARY_KEY))
        return keys

    def check_all_used(self, used: Collection[int]) -> None:
        """Raises ValueError for an override that applies to no parameter; used: indices of overrides that apply."""
        # A misspelt name would silently have no effect.
        for place, key in enumerate(self._overrides):
            # A model may legitimately have no bias.
            if place not in used and key not in self._standard:
                raise ValueError(
                    f"config_overrides contains {key}, which matches no parameter that requires grad: must match at "
                    "least one"
                )


def weight_decays(name: str, param: torch.Tensor) -> bool:
    """Returns whether weight decay applies to a parameter; biases and 1-D parameters are excluded."""
    # Biases are found by name too, because one may be stored with several dimensions.
    return not (_is_bias(name) or param.dim() <= 1)


def _is_bias(name: str) -> bool:
    # bias1 and bias2 belong to the two layers of grouped experts.
    return name.rpartition(".")[2] in ("bias", "bias1", "bias2")


def _is_embedding_or_bias(name: str) -> bool:
    return _is_bias(name) or _fits(name, _EMBEDDINGS)


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
