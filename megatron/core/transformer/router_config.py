"""Settings of routers: scores, expert choice, weights and load balancing. moe_config.py has all other MoE settings."""

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from megatron.core.config_field import config_field, run_checks, validate_fields

LOAD_BALANCING_TYPES = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")
# Types that add no loss.
_LOSSLESS_TYPES = ("sinkhorn", "none")
_BIAS_UPDATE_RATE = 1e-3


@dataclass(kw_only=True)
class RouterConfig:
    """Settings for the choice of experts, their weights, and load balancing."""

    cli_group: ClassVar[str] = "moe"

    moe_router_topk: int = config_field(2, help="Number of experts per token.", at_least=1)
    moe_router_score_function: str = config_field(
        "softmax", help="Function that turns router logits into scores.", choices=("softmax", "sigmoid", "sqrtsoftplus")
    )
    moe_router_pre_softmax: bool = config_field(
        False, help="Compute weights with a softmax over all experts instead of only the chosen ones."
    )
    moe_router_num_groups: int | None = config_field(
        None, help="Number of expert groups; each token is routed to --moe-router-group-topk of them.", at_least=1
    )
    moe_router_group_topk: int | None = config_field(
        None, help="Number of best-scoring groups from which the experts of a token are chosen.", at_least=1
    )
    moe_router_group_score: str = config_field(
        "sum",
        help="Score of a group: the sum over its best top-k / group-topk experts (sum, DeepSeek-V3), or the score of "
        "its best expert (max, DeepSeek-V2).",
        choices=("sum", "max"),
    )
    moe_router_topk_scaling_factor: float | None = config_field(
        None, help="Scale applied to all routing weights.", more_than=0
    )
    moe_router_dtype: str | None = config_field(
        None,
        help="Precision of the router, including its GEMM; unset: the GEMM uses the precision of the model.",
        choices=("fp32", "fp64"),
    )
    moe_router_enable_expert_bias: bool = config_field(
        False,
        help="Balance loads with a per-expert bias that is added to scores when choosing experts, but not to the "
        "weights.",
    )
    moe_router_bias_update_rate: float = config_field(
        _BIAS_UPDATE_RATE, help="Amount by which each step changes the bias of an expert.", at_least=0
    )
    moe_router_load_balancing_type: str | list[str] = config_field(
        "aux_loss",
        help="Methods that balance the loads of experts.",
        choices=LOAD_BALANCING_TYPES,
        nargs="+",
    )
    moe_aux_loss_coeff: float | list[float] = config_field(
        0.0,
        help="Weight of the load-balancing loss, one value per balancing type; 1e-2 is a good starting point.",
        at_least=0,
        nargs="+",
    )
    moe_z_loss_coeff: float | None = config_field(
        None, help="Weight of the z-loss, which keeps router logits small; 1e-3 is a good starting point.", at_least=0
    )
    moe_input_jitter_eps: float | None = config_field(
        None,
        help="During training, multiply the input of the router by uniform noise between 1 - eps and 1 + eps.",
        at_least=0,
        less_than=1,
    )
    moe_router_force_load_balancing: bool = config_field(
        False, help="For benchmarks: route by noise instead of logits, so that loads are balanced."
    )
    moe_enable_routing_replay: bool = config_field(
        False,
        help="Let RouterReplay (megatron.core.transformer.moe.router_replay) record the experts that routers choose, "
        "and replay them in later passes. No effect by itself.",
    )
    moe_per_layer_logging: bool = config_field(
        False, help="Log the router losses and the tokens per expert of each layer."
    )

    def __post_init__(self) -> None:
        validate_fields(self)

    def aux_loss_coefficient(self, balancing_type: str) -> float:
        """Returns the weight of the loss of a balancing type; 0 if the type is not used."""
        types, coefficients = _as_list(self.moe_router_load_balancing_type), _as_list(self.moe_aux_loss_coeff)
        return float(dict(zip(types, coefficients, strict=True)).get(balancing_type, 0.0))

    @property
    def uses_sinkhorn(self) -> bool:
        """Whether experts are chosen by Sinkhorn normalization of the logits."""
        return "sinkhorn" in _as_list(self.moe_router_load_balancing_type)

    @property
    def has_constant_weights(self) -> bool:
        """Whether the weight of a token's only expert is always 1, so that the loss gives the router no gradient."""
        after_choice = self.moe_router_score_function == "softmax" and not self.moe_router_pre_softmax
        return self.moe_router_topk == 1 and after_choice and not self.uses_sinkhorn


def validate_router(config: RouterConfig, *, num_experts: int) -> None:
    """Raises ValueError if router settings contradict each other or the number of experts."""
    run_checks(
        partial(validate_topk, config, num_experts),
        partial(validate_expert_bias, config),
        partial(validate_aux_loss, config),
        partial(validate_sinkhorn, config),
    )


def validate_topk(config: RouterConfig, num_experts: int) -> None:
    """Raises ValueError if top-k exceeds the number of experts, or the number of experts in the chosen groups."""
    if config.moe_router_topk > num_experts:
        raise ValueError(
            f"moe_router_topk is {config.moe_router_topk}: must be at most num_moe_experts ({num_experts})"
        )
    validate_groups(config, num_experts)


def validate_groups(config: RouterConfig, num_experts: int) -> None:
    """Raises ValueError if groups do not divide the experts, or if a token's groups contain fewer than top-k."""
    groups, group_topk, topk = config.moe_router_num_groups, config.moe_router_group_topk, config.moe_router_topk
    if groups is None and group_topk is None:
        if config.moe_router_group_score != "sum":
            raise ValueError(
                f"moe_router_group_score is {config.moe_router_group_score} but there are no groups: set "
                "moe_router_num_groups and moe_router_group_topk, or leave moe_router_group_score unset"
            )
        return
    if groups is None or group_topk is None:
        raise ValueError(
            f"moe_router_num_groups is {groups} and moe_router_group_topk is {group_topk}: set both, or neither"
        )
    if num_experts % groups:
        raise ValueError(f"moe_router_num_groups is {groups}: must divide num_moe_experts ({num_experts})")
    if group_topk > min(groups, topk):
        raise ValueError(
            f"moe_router_group_topk is {group_topk}: must be at most moe_router_num_groups ({groups}) and "
            f"moe_router_topk ({topk})"
        )
    if topk > group_topk * (num_experts // groups):
        raise ValueError(
            f"moe_router_topk is {topk}: must be at most the {group_topk * (num_experts // groups)} experts of "
            f"moe_router_group_topk ({group_topk}) groups"
        )


def validate_expert_bias(config: RouterConfig) -> None:
    """Raises ValueError for a bias with softmax scores, and for a bias update rate without a bias."""
    if not config.moe_router_enable_expert_bias:
        if config.moe_router_bias_update_rate != _BIAS_UPDATE_RATE:
            raise ValueError(
                f"moe_router_bias_update_rate is {config.moe_router_bias_update_rate} but "
                "moe_router_enable_expert_bias is not set: set both, or neither"
            )
    elif config.moe_router_score_function == "softmax":
        raise ValueError(
            "moe_router_enable_expert_bias requires moe_router_score_function sigmoid or sqrtsoftplus, because "
            "softmax scores do not measure experts independently"
        )


def validate_aux_loss(config: RouterConfig) -> None:
    """Raises ValueError unless there is one finite coefficient per balancing type, 0 for types without a loss."""
    types, coefficients = _as_list(config.moe_router_load_balancing_type), _as_list(config.moe_aux_loss_coeff)
    if len(types) != len(coefficients):
        raise ValueError(
            f"moe_aux_loss_coeff has {len(coefficients)} values: must have one per moe_router_load_balancing_type "
            f"({', '.join(map(str, types))})"
        )
    if len(set(types)) < len(types):
        raise ValueError(f"moe_router_load_balancing_type is {types}: must name each type once")
    for lossless in _LOSSLESS_TYPES:
        if dict(zip(types, coefficients)).get(lossless):
            raise ValueError(
                f"moe_aux_loss_coeff is {config.moe_aux_loss_coeff} but moe_router_load_balancing_type is {lossless}: "
                "must be 0, or choose aux_loss"
            )
    if not all(math.isfinite(float(value)) for value in coefficients):
        raise ValueError(f"moe_aux_loss_coeff is {config.moe_aux_loss_coeff}: must be finite")


def validate_sinkhorn(config: RouterConfig) -> None:
    """Raises ValueError if Sinkhorn routing is combined with other options for the choice or the weights."""
    if not config.uses_sinkhorn:
        return
    if config.moe_router_load_balancing_type not in ("sinkhorn", ["sinkhorn"]):
        raise ValueError(
            f"moe_router_load_balancing_type is {config.moe_router_load_balancing_type}: sinkhorn cannot be "
            "combined with other types"
        )
    for name, plain in (
        ("moe_router_score_function", "softmax"),
        ("moe_router_pre_softmax", False),
        ("moe_router_num_groups", None),
        ("moe_router_topk_scaling_factor", None),
    ):
        if vars(config)[name] != plain:
            raise ValueError(
                f"{name} is {vars(config)[name]} but moe_router_load_balancing_type is sinkhorn, which chooses and "
                f"weights experts itself: do not set {name}"
            )


def _as_list(value: object) -> list:
    return list(value) if isinstance(value, (list, tuple)) else [value]
