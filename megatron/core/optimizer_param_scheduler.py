"""Learning rate and weight decay over training, counted in samples.

Does not know what the optimizer does with the values; it writes them into `optimizer.param_groups`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from megatron.core.config_field import config_field, validate_fields

_Decay = Callable[[float], float]

# Each maps progress in [0, 1] to a coefficient that falls from 1 to 0.
_DECAY: dict[str, _Decay] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (math.cos(math.pi * progress) + 1.0),
}
_WSD_DECAY: dict[str, _Decay] = {
    **_DECAY,
    "exponential": lambda progress: 2.0 * math.pow(0.5, progress) - 1.0,
    "minus_sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
_LR_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
_WEIGHT_DECAY_STYLES = ("constant", "linear", "cosine")


@dataclass(kw_only=True)
class OptimizerParamSchedulerConfig:
    """The schedule as a user gives it, in iterations."""

    cli_group: ClassVar[str] = "learning rate and weight decay"

    lr_decay_style: str = config_field("linear", choices=_LR_STYLES, help="How the learning rate decays after warm-up.")
    lr_wsd_decay_style: str = config_field(
        "exponential", choices=("exponential", "linear", "cosine", "minus_sqrt"), help="Shape of WSD's final decay."
    )
    lr_decay_iters: int | None = config_field(
        None, at_least=1, help="Iterations until the learning rate is at its minimum; none means --train-iters."
    )
    lr_wsd_decay_iters: int | None = config_field(None, at_least=1, help="Iterations of WSD's final decay.")
    lr_warmup_fraction: float | None = config_field(
        None, at_least=0, less_than=1, help="Share of --lr-decay-iters that is linear warm-up."
    )
    lr_warmup_iters: int = config_field(0, at_least=0, help="Iterations of linear warm-up.")
    override_opt_param_scheduler: bool = config_field(
        False,
        flags=("--override-opt-param-scheduler", "--override-opt_param-scheduler"),
        help="On load, keep the schedule of the command line where the checkpoint's differs.",
    )
    use_checkpoint_opt_param_scheduler: bool = config_field(
        False,
        flags=("--use-checkpoint-opt-param-scheduler", "--use-checkpoint-opt_param-scheduler"),
        help="On load, take the checkpoint's schedule where the command line's differs.",
    )

    def __post_init__(self) -> None:
        validate_fields(self)
        self.validate_warmup()
        self.validate_wsd()
        self.validate_load_policy()

    def validate_warmup(self) -> None:
        if self.lr_warmup_fraction is not None and self.lr_warmup_iters > 0:
            raise ValueError(
                f"lr_warmup_fraction is {self.lr_warmup_fraction} and lr_warmup_iters is {self.lr_warmup_iters}: "
                "give only one of them"
            )
        if self.lr_decay_iters is not None and self.lr_warmup_iters >= self.lr_decay_iters:
            raise ValueError(
                f"lr_warmup_iters is {self.lr_warmup_iters}: must be less than lr_decay_iters ({self.lr_decay_iters})"
            )

    def validate_wsd(self) -> None:
        if self.lr_decay_style == "WSD" and self.lr_wsd_decay_iters is None:
            raise ValueError("lr_decay_style is WSD: lr_wsd_decay_iters must be given")

    def validate_load_policy(self) -> None:
        _check_load_policy(
            override=self.override_opt_param_scheduler, use_checkpoint=self.use_checkpoint_opt_param_scheduler
        )


def _check_load_policy(*, override: bool, use_checkpoint: bool) -> None:
    if override and use_checkpoint:
        raise ValueError(
            "override_opt_param_scheduler and use_checkpoint_opt_param_scheduler are both set: "
            "choose whose schedule wins on load"
        )
