"""Schedules of learning rate and weight decay over consumed samples, and their settings.

Values are written into `optimizer.param_groups`, where the optimizer reads them.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Protocol

from megatron.core.config_field import config_field, run_checks, validate_fields
from megatron.core.num_microbatches_calculator import BatchSchedule

LR_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WEIGHT_DECAY_STYLES = ("constant", "linear", "cosine")


@dataclass(kw_only=True)
class OptimizerParamSchedulerConfig:
    """Settings of the learning-rate and weight-decay schedules. A run uses either iterations or samples."""

    cli_group: ClassVar[str] = "learning rate and weight decay"

    lr_decay_style: str = config_field(
        "linear", choices=LR_STYLES, help="Shape of the learning-rate decay after warm-up."
    )
    lr_wsd_decay_style: str = config_field(
        "exponential", choices=("exponential", "linear", "cosine", "minus_sqrt"), help="Shape of WSD's final decay."
    )
    lr_decay_iters: int | None = config_field(
        None, at_least=1, help="Iterations until the learning rate reaches its minimum; default: --train-iters."
    )
    lr_decay_samples: int | None = config_field(
        None, at_least=1, help="Samples until the learning rate reaches its minimum; default: --train-samples."
    )
    lr_wsd_decay_iters: int | None = config_field(None, at_least=1, help="Iterations of WSD's final decay.")
    lr_wsd_decay_samples: int | None = config_field(None, at_least=1, help="Samples of WSD's final decay.")
    lr_warmup_fraction: float | None = config_field(
        None, at_least=0, less_than=1, help="Fraction of the learning-rate schedule that is linear warm-up."
    )
    lr_warmup_iters: int = config_field(0, at_least=0, help="Iterations of linear warm-up.")
    lr_warmup_samples: int = config_field(0, at_least=0, help="Samples of linear warm-up.")
    lr_warmup_init: float = config_field(0.0, at_least=0, help="Learning rate at which the linear warm-up starts.")
    start_weight_decay: float | None = config_field(None, at_least=0, help="Weight decay of the first step.")
    end_weight_decay: float | None = config_field(None, at_least=0, help="Weight decay at the end of the run.")
    weight_decay_incr_style: str = config_field(
        "constant",
        choices=WEIGHT_DECAY_STYLES,
        help="Shape of the increase of weight decay from --start-weight-decay to --end-weight-decay; constant: "
        "--weight-decay.",
    )
    override_opt_param_scheduler: bool = config_field(
        False,
        flags=("--override-opt-param-scheduler", "--override-opt_param-scheduler"),
        help="On load, use the command line's schedule if the checkpoint's differs.",
    )
    use_checkpoint_opt_param_scheduler: bool = config_field(
        False,
        flags=("--use-checkpoint-opt-param-scheduler", "--use-checkpoint-opt_param-scheduler"),
        help="On load, use the checkpoint's schedule if the command line's differs.",
    )

    def __post_init__(self) -> None:
        validate_fields(self)
        run_checks(self.validate_warmup, self.validate_wsd, self.validate_weight_decay, self.validate_load_policy)

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
        # The length of the decay determines the other phases, and no default suits all runs.
        given = [name for name in ("lr_wsd_decay_iters", "lr_wsd_decay_samples") if vars(self)[name] is not None]
        if self.lr_decay_style == "WSD" and not given:
            raise ValueError("lr_decay_style is WSD: lr_wsd_decay_iters or lr_wsd_decay_samples must be given")
        if self.lr_decay_style != "WSD" and given:
            why = f"needs lr_decay_style WSD, which is {self.lr_decay_style}: change one of them"
            raise ValueError("\n".join(f"{name} {why}" for name in given))

    def validate_weight_decay(self) -> None:
        start, end, style = self.start_weight_decay, self.end_weight_decay, self.weight_decay_incr_style
        if style == "constant":
            if start is not None or end is not None:
                raise ValueError(
                    f"start_weight_decay is {start} and end_weight_decay is {end}, but weight_decay_incr_style is "
                    "constant: choose linear or cosine, or give only --weight-decay"
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
    """Raises ValueError if the command line and the checkpoint are both given precedence."""
    if override and use_checkpoint:
        raise ValueError(
            "override_opt_param_scheduler and use_checkpoint_opt_param_scheduler are both set: choose only one"
        )


_Decay = Callable[[float], float]

# Coefficients that decrease from 1 to 0 as progress goes from 0 to 1.
_DECAY: dict[str, _Decay] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (math.cos(math.pi * progress) + 1.0),
}
_WSD_DECAY: dict[str, _Decay] = {
    **_DECAY,
    "exponential": lambda progress: 2.0 * math.pow(0.5, progress) - 1.0,
    "minus_sqrt": lambda progress: 1.0 - math.sqrt(progress),
}


class HasParamGroups(Protocol):
    """An optimizer with parameter groups."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


@dataclass(frozen=True, kw_only=True)
class _Schedule:
    """Schedule as stored in checkpoints, with Megatron's field names. Steps are counted in samples."""

    max_lr: float
    min_lr: float
    lr_warmup_steps: float
    lr_decay_steps: int
    lr_decay_style: str
    start_wd: float
    end_wd: float
    wd_incr_style: str
    wd_incr_steps: int
    init_lr: float = 0.0
    # Used only by WSD. Megatron-LM does not store these two.
    wsd_decay_steps: int | None = None
    lr_wsd_decay_style: str | None = None

    def __post_init__(self) -> None:
        self.validate_learning_rate()
        self.validate_steps()
        self.validate_wsd()
        self.validate_weight_decay()

    def validate_learning_rate(self) -> None:
        _require(self.max_lr >= self.min_lr >= 0, "min_lr", value=self.min_lr, wanted=f"in 0 .. max_lr ({self.max_lr})")
        _require(
            self.lr_decay_style in LR_STYLES, "lr_decay_style", value=self.lr_decay_style, wanted=f"in {LR_STYLES}"
        )
        _require(
            0 <= self.init_lr <= self.max_lr, "init_lr", value=self.init_lr, wanted=f"in 0 .. max_lr ({self.max_lr})"
        )

    def validate_steps(self) -> None:
        _require(self.lr_decay_steps > 0, "lr_decay_steps", value=self.lr_decay_steps, wanted="more than 0")
        # Equality would leave no steps for the decay, and divide by zero.
        in_range = 0 <= self.lr_warmup_steps < self.lr_decay_steps
        wanted = f"in 0 .. lr_decay_steps - 1 ({self.lr_decay_steps - 1})"
        _require(in_range, "lr_warmup_steps", value=self.lr_warmup_steps, wanted=wanted)

    def validate_wsd(self) -> None:
        if self.lr_decay_style != "WSD":
            return
        styles, steps = tuple(_WSD_DECAY), self.wsd_decay_steps
        _require(
            self.lr_wsd_decay_style in styles,
            "lr_wsd_decay_style",
            value=self.lr_wsd_decay_style,
            wanted=f"in {styles}",
        )
        _require(
            steps is not None and steps > 0, "wsd_decay_steps", value=steps, wanted="more than 0 for a WSD schedule"
        )

    def validate_weight_decay(self) -> None:
        styles = WEIGHT_DECAY_STYLES
        _require(self.wd_incr_style in styles, "wd_incr_style", value=self.wd_incr_style, wanted=f"in {styles}")
        in_range = self.end_wd >= self.start_wd >= 0
        _require(in_range, "start_wd", value=self.start_wd, wanted=f"in 0 .. end_wd ({self.end_wd})")
        constant = self.wd_incr_style == "constant"
        _require(
            not constant or self.start_wd == self.end_wd, "end_wd", value=self.end_wd, wanted="start_wd when constant"
        )


class OptimizerParamScheduler:
    """Sets `lr` and `weight_decay` of an optimizer's parameter groups from the number of consumed samples.

    `max_lr`, `min_lr`, `start_wd` and `end_wd` of a group override the values of the schedule; `lr_mult` and `wd_mult`
    scale the results. init_lr: the learning rate at the start of warm-up. wsd_decay_steps: length of WSD's final decay.
    All steps are counted in samples, and `num_steps` is the current step. Loading raises an error if the schedule
    differs from the checkpoint's, unless a flag selects one of the two.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        init_lr: float,
        max_lr: float,
        min_lr: float,
        lr_warmup_steps: float,
        lr_decay_steps: int,
        lr_decay_style: str,
        start_wd: float,
        end_wd: float,
        wd_incr_steps: int,
        wd_incr_style: str,
        use_checkpoint_opt_param_scheduler: bool = True,
        override_opt_param_scheduler: bool = False,
        wsd_decay_steps: int | None = None,
        lr_wsd_decay_style: str | None = None,
    ):
        check_load_policy(override=override_opt_param_scheduler, use_checkpoint=use_checkpoint_opt_param_scheduler)
        self.optimizer = optimizer
        self.num_steps = 0
        self.schedule = _Schedule(
            max_lr=max_lr,
            min_lr=min_lr,
            lr_warmup_steps=lr_warmup_steps,
            lr_decay_steps=lr_decay_steps,
            lr_decay_style=lr_decay_style,
            start_wd=start_wd,
            end_wd=end_wd,
            wd_incr_style=wd_incr_style,
            wd_incr_steps=wd_incr_steps,
            init_lr=init_lr,
            wsd_decay_steps=wsd_decay_steps,
            lr_wsd_decay_style=lr_wsd_decay_style,
        )
        self._override = override_opt_param_scheduler
        self._use_checkpoint = use_checkpoint_opt_param_scheduler
        self.step(0)

    @property
    def init_lr(self) -> float:
        """Learning rate at the start of warm-up."""
        return self.schedule.init_lr

    def step(self, increment: int) -> None:
        """Advances by `increment` samples and writes the new values into the parameter groups."""
        self.num_steps += increment
        for group in self.optimizer.param_groups:
            # Python numbers, because a tensor would have to be read from the device in each step.
            group["lr"] = self.get_lr(group) * group.get("lr_mult", 1.0)
            group["weight_decay"] = self.get_wd(group) * group.get("wd_mult", 1.0)

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """Returns the learning rate of a parameter group at the current step, without its multiplier."""
        schedule, step = self.schedule, self.num_steps
        max_lr = _or_default(param_group.get("max_lr"), schedule.max_lr)
        min_lr = _or_default(param_group.get("min_lr"), schedule.min_lr)
        # All styles begin with warm-up, including the constant one.
        if 0 < schedule.lr_warmup_steps and step <= schedule.lr_warmup_steps:
            # Multiplies before it divides, as in Megatron; the other order differs in the last bit.
            return schedule.init_lr + (max_lr - schedule.init_lr) * step / schedule.lr_warmup_steps
        if schedule.lr_decay_style == "constant":
            return max_lr
        # Beyond the end of the schedule, the rate remains at its minimum.
        if step > schedule.lr_decay_steps:
            return min_lr
        if schedule.lr_decay_style == "inverse-square-root":
            return max(min_lr, max_lr * max(schedule.lr_warmup_steps, 1) ** 0.5 / max(step, 1) ** 0.5)
        return min_lr + self._decay_coefficient() * (max_lr - min_lr)

    def get_wd(self, param_group: dict[str, Any] | None = None) -> float:
        """Returns the weight decay of a group (None: the schedule's) at the current step, without its multiplier."""
        schedule, group = self.schedule, param_group or {}
        start_wd = _or_default(group.get("start_wd"), schedule.start_wd)
        end_wd = _or_default(group.get("end_wd"), schedule.end_wd)
        if schedule.wd_incr_style == "constant" or self.num_steps > schedule.wd_incr_steps:
            return end_wd
        growth = 1.0 - _DECAY[schedule.wd_incr_style](self.num_steps / schedule.wd_incr_steps)
        return start_wd + growth * (end_wd - start_wd)

    def state_dict(self) -> dict[str, Any]:
        """Returns the current step and the schedule, as JSON values."""
        return {**asdict(self.schedule), "num_steps": self.num_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from the checkpoint's step. Raises ValueError if the schedule differs and no flag selects one."""
        ours = asdict(self.schedule)
        # Older checkpoints may lack newer names, which are then not compared.
        theirs = {name: state_dict.get(name, value) for name, value in ours.items()}
        if self._use_checkpoint and theirs["lr_decay_style"] == "WSD" and theirs["wsd_decay_steps"] is None:
            raise ValueError(
                "the checkpoint's WSD schedule was stored without the length of its decay: give --lr-decay-style WSD, "
                "--lr-wsd-decay-iters (or --lr-wsd-decay-samples) and --lr-wsd-decay-style as in its run"
            )
        # replace() also validates the checkpoint's values.
        if self._use_checkpoint:
            self.schedule = replace(self.schedule, **theirs)
        elif not self._override:
            _require_equal(_with_effect(ours), theirs)
        self.num_steps = int(state_dict["num_steps"])
        # Otherwise the first step after a resume would use the rates of step 0.
        self.step(0)

    def _decay_coefficient(self) -> float:
        schedule = self.schedule
        # WSD counts from the end of the schedule, other styles from the end of warm-up.
        if schedule.lr_decay_style == "WSD":
            assert schedule.lr_wsd_decay_style is not None and schedule.wsd_decay_steps is not None, "validated above"
            decayed = max(0, self.num_steps - schedule.lr_decay_steps + schedule.wsd_decay_steps)
            return _WSD_DECAY[schedule.lr_wsd_decay_style](decayed / schedule.wsd_decay_steps)
        steps = schedule.lr_decay_steps - schedule.lr_warmup_steps
        return _DECAY[schedule.lr_decay_style]((self.num_steps - schedule.lr_warmup_steps) / steps)


def get_optimizer_param_scheduler(
    optimizer: HasParamGroups,
    config: OptimizerParamSchedulerConfig,
    *,
    max_lr: float,
    min_lr: float,
    weight_decay: float,
    train_iters: int,
    train_samples: int | None,
    batches: BatchSchedule,
) -> OptimizerParamScheduler:
    """Builds the scheduler that `config` describes.

    train_samples: length of the run in samples; None for a run of `train_iters` iterations. batches: converts
    iterations to samples.
    """
    run_steps = batches.samples_after(train_iters) if train_samples is None else train_samples
    decay_steps = config.lr_decay_samples or run_steps
    if config.lr_decay_iters is not None:
        decay_steps = batches.samples_after(config.lr_decay_iters)
    warmup_steps: float = config.lr_warmup_samples or batches.samples_after(config.lr_warmup_iters)
    if config.lr_warmup_fraction is not None:
        # The result may be fractional.
        warmup_steps = config.lr_warmup_fraction * decay_steps
    # As in Megatron, start_weight_decay and end_weight_decay take precedence over weight_decay.
    start_wd, end_wd = config.start_weight_decay, config.end_weight_decay
    return OptimizerParamScheduler(
        optimizer,
        init_lr=config.lr_warmup_init,
        max_lr=max_lr,
        min_lr=min_lr,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=config.lr_decay_style,
        start_wd=_or_default(start_wd, weight_decay),
        end_wd=_or_default(end_wd, weight_decay),
        wd_incr_steps=run_steps,
        wd_incr_style=config.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=config.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=config.override_opt_param_scheduler,
        wsd_decay_steps=_wsd_steps(config, decay_steps, train_iters=train_iters, batches=batches),
        lr_wsd_decay_style=config.lr_wsd_decay_style,
    )


def _wsd_steps(
    config: OptimizerParamSchedulerConfig, decay_steps: int, *, train_iters: int, batches: BatchSchedule
) -> int | None:
    """Returns the length in samples of WSD's final decay, which covers the last iterations of the schedule."""
    if config.lr_wsd_decay_iters is None:
        return config.lr_wsd_decay_samples
    decay_iters = config.lr_decay_iters or train_iters
    stable_iters = max(0, decay_iters - config.lr_wsd_decay_iters)
    early = config.lr_wsd_decay_iters - (decay_iters - stable_iters)
    # A decay longer than the schedule extends before its start, with the initial batch size.
    return decay_steps - batches.samples_after(stable_iters) + early * batches.sizes[0]


def _or_default(value: float | None, default: float) -> float:
    return default if value is None else value


def _require(holds: bool, name: str, *, value: Any, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value}: must be {wanted}")


def _with_effect(schedule: dict[str, Any]) -> dict[str, Any]:
    """Returns the values that affect the run. A constant style ignores its length, so --train-iters may change."""
    without = {"wd_incr_steps"} if schedule["wd_incr_style"] == "constant" else set()
    without |= {"lr_decay_steps"} if schedule["lr_decay_style"] == "constant" else set()
    without |= {"init_lr"} if schedule["lr_warmup_steps"] == 0 else set()
    without |= {"wsd_decay_steps", "lr_wsd_decay_style"} if schedule["lr_decay_style"] != "WSD" else set()
    return {name: value for name, value in schedule.items() if name not in without}


def _require_equal(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    # Reports all differences together.
    different = [f"{name} ({ours[name]}, checkpoint {theirs[name]})" for name in ours if ours[name] != theirs[name]]
    if different:
        # The command-line flags have different names and units.
        unit = " (_steps are samples: flags in iterations x --global-batch-size)" if "_steps" in str(different) else ""
        raise ValueError(
            f"the learning-rate schedule differs from the checkpoint's: {', '.join(different)}{unit}; give "
            "--override-opt-param-scheduler to use the command line's or --use-checkpoint-opt-param-scheduler to "
            "use the checkpoint's"
        )
