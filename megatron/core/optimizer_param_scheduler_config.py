"""Settings of learning rate and weight decay over training; optimizer_param_scheduler.py makes the schedule of them."""

from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config_field import config_field, validate_fields

LR_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WEIGHT_DECAY_STYLES = ("constant", "linear", "cosine")


@dataclass(kw_only=True)
class OptimizerParamSchedulerConfig:
    """The schedule as a user gives it, in iterations or in samples; validation.py keeps the two apart."""

    cli_group: ClassVar[str] = "learning rate and weight decay"

    lr_decay_style: str = config_field("linear", choices=LR_STYLES, help="How the learning rate decays after warm-up.")
    lr_wsd_decay_style: str = config_field(
        "exponential", choices=("exponential", "linear", "cosine", "minus_sqrt"), help="Shape of WSD's final decay."
    )
    lr_decay_iters: int | None = config_field(
        None, at_least=1, help="Iterations until the learning rate is at its minimum; none means --train-iters."
    )
    lr_decay_samples: int | None = config_field(
        None, at_least=1, help="Samples until the learning rate is at its minimum; none means --train-samples."
    )
    lr_wsd_decay_iters: int | None = config_field(None, at_least=1, help="Iterations of WSD's final decay.")
    lr_wsd_decay_samples: int | None = config_field(None, at_least=1, help="Samples of WSD's final decay.")
    lr_warmup_fraction: float | None = config_field(
        None, at_least=0, less_than=1, help="Share of the learning rate's schedule that is linear warm-up."
    )
    lr_warmup_iters: int = config_field(0, at_least=0, help="Iterations of linear warm-up.")
    lr_warmup_samples: int = config_field(0, at_least=0, help="Samples of linear warm-up.")
    start_weight_decay: float | None = config_field(None, at_least=0, help="Weight decay of the first step.")
    end_weight_decay: float | None = config_field(None, at_least=0, help="Weight decay at the end of the run.")
    weight_decay_incr_style: str = config_field(
        "constant",
        choices=WEIGHT_DECAY_STYLES,
        help="How weight decay rises from --start-weight-decay to --end-weight-decay; constant: --weight-decay.",
    )
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
        self.validate_weight_decay()
        self.validate_load_policy()

    def validate_warmup(self) -> None:
        for unit in ("iters", "samples"):
            warmup, decay = vars(self)[f"lr_warmup_{unit}"], vars(self)[f"lr_decay_{unit}"]
            if self.lr_warmup_fraction is not None and warmup > 0:
                raise ValueError(
                    f"lr_warmup_fraction is {self.lr_warmup_fraction} and lr_warmup_{unit} is {warmup}: "
                    "give only one of them"
                )
            if decay is not None and warmup >= decay:
                raise ValueError(f"lr_warmup_{unit} is {warmup}: must be less than lr_decay_{unit} ({decay})")

    def validate_wsd(self) -> None:
        # Its other phases follow from the decay's length, which has no good default.
        if self.lr_decay_style == "WSD" and self.lr_wsd_decay_iters is None and self.lr_wsd_decay_samples is None:
            raise ValueError("lr_decay_style is WSD: lr_wsd_decay_iters or lr_wsd_decay_samples must be given")

    def validate_weight_decay(self) -> None:
        start, end, style = self.start_weight_decay, self.end_weight_decay, self.weight_decay_incr_style
        if style == "constant":
            if start is not None or end is not None:
                raise ValueError(
                    f"start_weight_decay is {start} and end_weight_decay is {end}, but weight_decay_incr_style is "
                    "constant: choose linear or cosine, or give --weight-decay alone"
                )
            return
        if start is None or end is None:
            raise ValueError(
                f"weight_decay_incr_style is {style}: start_weight_decay and end_weight_decay must both be given"
            )
        if start > end:
            raise ValueError(f"start_weight_decay is {start}: must be at most end_weight_decay ({end})")

    def validate_load_policy(self) -> None:
        check_load_policy(
            override=self.override_opt_param_scheduler, use_checkpoint=self.use_checkpoint_opt_param_scheduler
        )


def check_load_policy(*, override: bool, use_checkpoint: bool) -> None:
    """Raises ValueError where both the command line and the checkpoint shall win."""
    if override and use_checkpoint:
        raise ValueError(
            "override_opt_param_scheduler and use_checkpoint_opt_param_scheduler are both set: "
            "choose whose schedule wins on load"
        )
