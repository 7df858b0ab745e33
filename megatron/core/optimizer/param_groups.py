"""Which parameters share a learning rate and a weight decay, and how a script sets others for some of them.

The schedule turns these into numbers (optimizer_param_scheduler.py); where parameters lie is flat_params.py.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from megatron.core.optimizer.optimizer_config import OptimizerConfig

# Names under which GPTModel and its kin keep the weights that meet the vocabulary.
_VOCABULARY = ("*word_embeddings.weight", "*output_layer.weight")
_HEAD_NORMS = ("*.q_layernorm.*", "*.k_layernorm.*", "*.kv_layernorm.*")
_EMBEDDINGS = ("*embeddings.weight", "*output_layer.weight")


@dataclass(frozen=True, kw_only=True)
class ParamKey:
    """Selects the parameters of an override: those for which any of the given conditions holds.

    name: shell patterns for names without wrapper prefixes ("*.router.weight"). attr: attributes that are set and true
    on the parameter. predicate: takes name and parameter, for shapes and all else.
    """

    name: str | tuple[str, ...] = ()
    attr: str | tuple[str, ...] = ()
    predicate: Callable[[str, nn.Parameter], bool] | None = None

    def matches(self, name: str, param: nn.Parameter) -> bool:
        """Whether the override is for this parameter; param: any shape and dtype."""
        return (
            any(fnmatchcase(name, pattern) for pattern in _words(self.name))
            or any(vars(param).get(attribute) for attribute in _words(self.attr))
            or (self.predicate is not None and self.predicate(name, param))
        )


@dataclass(frozen=True, kw_only=True)
class ParamGroupOverride:
    """Values of its parameters in place of the run's; None: the run's.

    max_lr, min_lr: limits of the schedule's learning rate. start_wd, end_wd: weight decay over the run. lr_mult,
    wd_mult: factors of both; wd_mult 0 keeps parameters from decaying, 1 lets biases and norms decay too.
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
                f"ParamGroupOverride.start_wd is {self.start_wd} and end_wd is {self.end_wd}: give both or neither"
            )


ConfigOverrides = Mapping[ParamKey, ParamGroupOverride]


@dataclass(frozen=True, kw_only=True)
class GroupKey:
    """Properties that parameters of one group share. is_matrix: Muon updates them."""

    override: ParamGroupOverride
    is_decoupled_lr: bool = False
    is_matrix: bool = False

    def values(self, config: OptimizerConfig) -> dict[str, Any]:
        """A torch parameter group without its parameters, under the names that Megatron's groups have."""
        given = {name: value for name, value in vars(self.override).items() if value is not None}
        # The schedule multiplies by the factors; before its first word, the values are those of the configuration.
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
        """Raises ValueError where the lowest rate is above the highest."""
        highest = config.lr if self.override.max_lr is None else self.override.max_lr
        lowest = config.min_lr if self.override.min_lr is None else self.override.min_lr
        if highest is not None and lowest > highest:
            raise ValueError(f"ParamGroupOverride.min_lr is {lowest}: must be at most max_lr, which is {highest}")


class ParamGrouping:
    """Finds the group of each parameter from the settings and a script's overrides; of several, later ones win."""

    def __init__(self, config: OptimizerConfig, overrides: ConfigOverrides | None = None) -> None:
        self._config = config
        self._overrides = dict(overrides or {})
        # Places in the overrides of those that were for a parameter: what ranks can tell each other of them.
        self.used: set[int] = set()

    def key_of(self, name: str, param: nn.Parameter) -> GroupKey:
        """The group of a parameter; name: without wrapper prefixes, param: any shape and dtype.

        Raises ValueError where its rates contradict each other.
        """
        decays = weight_decays(name, param) or (self._config.apply_wd_to_qk_layernorm and _fits(name, _HEAD_NORMS))
        merged = ParamGroupOverride(wd_mult=1.0 if decays else 0.0)
        decoupled = self._config.decoupled_lr is not None and _fits(name, _VOCABULARY)
        if decoupled:
            merged = self._with_decoupled_rates(merged)
        for place, (key, override) in enumerate(self._overrides.items()):
            if key.matches(name, param):
                self.used.add(place)
                given = {field: value for field, value in vars(override).items() if value is not None}
                merged = dataclasses.replace(merged, **given)
        is_matrix = self._config.optimizer == "muon" and param.dim() == 2 and not _is_embedding_or_bias(name)
        group = GroupKey(override=merged, is_decoupled_lr=decoupled, is_matrix=is_matrix)
        group.check_rates(self._config)
        return group

    def plain_keys(self) -> list[GroupKey]:
        """The groups that every run has, so that a schedule and a log line find them also where they are empty."""
        plain = [ParamGroupOverride(wd_mult=wd_mult) for wd_mult in (1.0, 0.0)]
        keys = [GroupKey(override=override) for override in plain]
        if self._config.decoupled_lr is not None:
            keys.append(GroupKey(override=self._with_decoupled_rates(plain[0]), is_decoupled_lr=True))
        return keys

    def check_all_used(self, used: Collection[int]) -> None:
        """Raises ValueError for an override that is for no parameter; used: places of those that are."""
        # A misspelt name would change nothing, silently.
        for place, key in enumerate(self._overrides):
            if place not in used:
                raise ValueError(f"config_overrides: {key} matches no parameter that requires grad")

    def _with_decoupled_rates(self, override: ParamGroupOverride) -> ParamGroupOverride:
        # Without a minimum of their own these fall to the common one, as in Megatron.
        rates = {"max_lr": self._config.decoupled_lr, "min_lr": self._config.decoupled_min_lr}
        return dataclasses.replace(override, **rates)


def weight_decays(name: str, param: torch.Tensor) -> bool:
    """Whether a parameter decays: biases and one-dimensional parameters (norms) do not. param: any shape and dtype."""
    # By name too, since a bias may be stored with several dimensions.
    return not (_is_bias(name) or param.dim() <= 1)


def _is_bias(name: str) -> bool:
    # Grouped experts have those of both their layers under one name each.
    return name.rpartition(".")[2] in ("bias", "bias1", "bias2")


def _is_embedding_or_bias(name: str) -> bool:
    return _is_bias(name) or _fits(name, _EMBEDDINGS)


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _words(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value
