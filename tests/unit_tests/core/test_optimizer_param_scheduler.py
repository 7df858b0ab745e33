"""Learning rates and weight decay compared with values computed by hand."""

import math
import random

import pytest

from megatron.core.num_microbatches_calculator import constant_batch, ramp_up
from megatron.core.optimizer_param_scheduler import (
    OptimizerParamScheduler,
    OptimizerParamSchedulerConfig,
    get_optimizer_param_scheduler,
)


class Groups:
    """A mock of an optimizer, with parameter groups."""

    def __init__(self, *groups):
        self.param_groups = list(groups) or [{}]


def schedule(style, groups=None, **changes):
    values = {"init_lr": 0.0, "max_lr": 1.0, "min_lr": 0.1, "lr_warmup_steps": 100, "lr_decay_steps": 500}
    values.update(start_wd=0.1, end_wd=0.1, wd_incr_steps=1000, wd_incr_style="constant")
    return OptimizerParamScheduler(groups or Groups(), lr_decay_style=style, **{**values, **changes})


def rate_at(style, step, **changes):
    scheduler = schedule(style, **changes)
    scheduler.step(step)
    return scheduler.optimizer.param_groups[0]["lr"]


def wsd(shape):
    return {"wsd_decay_steps": 200, "lr_wsd_decay_style": shape}


@pytest.mark.parametrize(
    "style, step, expected, changes",
    [
        ("constant", 50, 0.5, {}),
        ("constant", 10_000, 1.0, {}),
        ("linear", 0, 0.0, {}),
        ("linear", 0, 0.05, {"init_lr": 0.05}),
        ("linear", 25, 0.05 + 0.95 * 0.25, {"init_lr": 0.05}),
        ("linear", 100, 1.0, {}),
        ("linear", 200, 0.775, {}),
        ("linear", 500, 0.1, {}),
        ("linear", 501, 0.1, {}),
        ("linear", 0, 1.0, {"lr_warmup_steps": 0}),
        ("cosine", 300, 0.55, {}),
        ("cosine", 200, 0.1 + 0.9 * 0.5 * (math.sqrt(0.5) + 1), {}),
        ("inverse-square-root", 400, 0.5, {}),
        ("inverse-square-root", 400, 0.7, {"min_lr": 0.7}),
        ("inverse-square-root", 501, 0.1, {}),
        ("WSD", 300, 1.0, wsd("linear")),
        ("WSD", 400, 0.55, wsd("linear")),
        ("WSD", 400, 0.55, wsd("cosine")),
        ("WSD", 400, 0.1 + 0.9 * (2 * math.sqrt(0.5) - 1), wsd("exponential")),
        ("WSD", 350, 0.55, wsd("minus_sqrt")),
        ("WSD", 500, 0.1, wsd("exponential")),
    ],
)
def test_learning_rate_has_the_value_worked_out_by_hand(style, step, expected, changes):
    assert rate_at(style, step, **changes) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("style, expected", [("linear", 0.2), ("cosine", 0.1 + 0.4 * 0.5 * (1 - math.sqrt(0.5)))])
def test_weight_decay_grows_to_its_end(style, expected):
    scheduler = schedule("constant", start_wd=0.1, end_wd=0.5, wd_incr_style=style)
    scheduler.step(250)
    assert scheduler.optimizer.param_groups[0]["weight_decay"] == pytest.approx(expected)
    scheduler.step(10_000)
    assert scheduler.optimizer.param_groups[0]["weight_decay"] == 0.5


def test_groups_scale_and_override_the_schedule():
    groups = Groups({"lr_mult": 0.5, "wd_mult": 0.0}, {"max_lr": 3.0, "min_lr": 0.0})
    groups.param_groups.append({"start_wd": 0.5, "end_wd": 0.5})
    schedule("linear", groups).step(300)
    assert [group["lr"] for group in groups.param_groups] == pytest.approx([0.275, 1.5, 0.55])
    assert [group["weight_decay"] for group in groups.param_groups] == [0.0, 0.1, 0.5]


def test_iterations_of_the_command_line_become_samples():
    config = OptimizerParamSchedulerConfig(lr_decay_style="WSD", lr_warmup_fraction=0.25, lr_wsd_decay_iters=10)
    rates = {"max_lr": 1.0, "min_lr": 0.0, "weight_decay": 0.1}
    groups = Groups()
    run = {"train_iters": 40, "train_samples": None, "batches": constant_batch(8)}
    scheduler = get_optimizer_param_scheduler(groups, config, **rates, **run)
    seen = []
    for _ in range(40):
        scheduler.step(8)
        seen.append(groups.param_groups[0]["lr"])
    assert seen[4] == 0.5 and seen[9:30] == [1.0] * 21 and seen[30] < 1.0 and seen[39] == 0.0


def test_under_a_ramp_iterations_and_samples_give_the_same_schedule():
    batches, rates = ramp_up([2, 2, 20], 8), {"max_lr": 1.0, "min_lr": 0.1, "weight_decay": 0.1}
    decay = {"start_weight_decay": 0.0, "end_weight_decay": 0.2, "weight_decay_incr_style": "cosine"}
    run, at = {"train_iters": 12, "batches": batches}, batches.samples_after
    iterations = {"lr_warmup_iters": 3, "lr_decay_iters": 11, "lr_wsd_decay_iters": 4}
    samples = {"lr_warmup_samples": at(3), "lr_decay_samples": at(11), "lr_wsd_decay_samples": at(11) - at(7)}
    seen = []
    for lengths, train_samples in ((iterations, None), (samples, at(12))):
        config = OptimizerParamSchedulerConfig(lr_decay_style="WSD", **lengths, **decay)
        scheduler = get_optimizer_param_scheduler(Groups(), config, **rates, **run, train_samples=train_samples)
        seen.append([])
        for step in range(12):
            seen[-1].append(dict(scheduler.optimizer.param_groups[0]))
            scheduler.step(at(step + 1) - at(step))
    assert seen[0] == seen[1]
    assert [group["lr"] == 1.0 for group in seen[0]] == [False] * 3 + [True] * 5 + [False] * 4
    assert seen[0][0]["weight_decay"] == 0.0 and scheduler.get_wd() == pytest.approx(0.2)


@pytest.mark.parametrize("seed", range(100))
def test_random_schedules_give_the_plain_formulas(seed):
    rng = random.Random(seed)
    style, growth = rng.choice(["linear", "cosine", "inverse-square-root"]), rng.choice(["linear", "cosine"])
    warmup, decay, low, high = rng.randint(0, 90), rng.randint(100, 200), rng.random() * 0.1, 0.1 + rng.random()
    start, end, length = rng.random(), 1.0 + rng.random(), rng.randint(50, 250)
    scheduler = schedule(style, max_lr=high, min_lr=low, lr_warmup_steps=warmup, lr_decay_steps=decay,
                         start_wd=start, end_wd=end, wd_incr_steps=length, wd_incr_style=growth)  # fmt: skip
    down = {"linear": lambda p: 1 - p, "cosine": lambda p: (1 + math.cos(math.pi * p)) / 2}
    step = 0
    while step < 260:
        if warmup and step <= warmup:
            rate = high * step / warmup
        elif step > decay:
            rate = low
        elif style == "inverse-square-root":
            rate = max(low, high * math.sqrt(max(warmup, 1) / max(step, 1)))
        else:
            rate = low + (high - low) * down[style]((step - warmup) / (decay - warmup))
        group = scheduler.optimizer.param_groups[0]
        assert group["lr"] == pytest.approx(rate, rel=1e-12)
        assert group["weight_decay"] == pytest.approx(start + (end - start) * (1 - down[growth](min(1, step / length))))
        increment = rng.randint(1, 30)
        scheduler.step(increment)
        step += increment


def resumed(saved, **changes):
    scheduler = schedule("linear", **changes)
    scheduler.load_state_dict(saved.state_dict())
    return scheduler


def test_a_resumed_schedule_has_its_rates_before_the_first_step():
    saved = schedule("linear", start_wd=0.0, end_wd=0.1, wd_incr_style="linear")
    saved.step(300)
    groups = resumed(saved, start_wd=0.0, end_wd=0.1, wd_incr_style="linear").optimizer.param_groups
    assert groups == saved.optimizer.param_groups


def test_flags_say_whose_schedule_wins():
    saved = schedule("linear")
    saved.step(200)
    neither = {"max_lr": 2.0, "use_checkpoint_opt_param_scheduler": False}
    with pytest.raises(ValueError, match=r"max_lr \(2.0, checkpoint 1.0\).*--override-opt-param-scheduler"):
        resumed(saved, **neither)
    override = resumed(saved, **neither, override_opt_param_scheduler=True)
    assert override.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 + 1.9 * 0.75)
    checkpoint = resumed(saved, max_lr=2.0)
    assert checkpoint.optimizer.param_groups[0]["lr"] == pytest.approx(0.775)


def test_a_run_may_grow_longer_where_its_end_changes_no_rate():
    neither = {"use_checkpoint_opt_param_scheduler": False}
    saved = schedule("constant")
    saved.step(200)
    longer = schedule("constant", lr_decay_steps=900, wd_incr_steps=2000, **neither)
    longer.load_state_dict(saved.state_dict())
    assert longer.num_steps == 200
    with pytest.raises(ValueError, match=r"lr_decay_steps \(900, checkpoint 500\)"):
        resumed(schedule("linear"), lr_decay_steps=900, **neither)


def random_schedule(rng):
    """Settings of a schedule, each field of which may differ from those of another."""
    high, start = rng.choice([1.0, 2.0]), rng.choice([0.1, 0.2])
    growth = rng.choice(["constant", "linear", "cosine"])
    return {
        "style": rng.choice(["constant", "linear", "cosine", "inverse-square-root", "WSD", "WSD", "WSD"]),
        "max_lr": high,
        "min_lr": rng.choice([0.0, 0.1]),
        "init_lr": rng.choice([0.0, 0.05]),
        "lr_warmup_steps": rng.choice([0, 10, 20]),
        "lr_decay_steps": rng.choice([100, 150]),
        "start_wd": start,
        "end_wd": start if growth == "constant" else 0.3,
        "wd_incr_style": growth,
        "wd_incr_steps": rng.choice([80, 120]),
        "wsd_decay_steps": rng.choice([20, 50]),
        "lr_wsd_decay_style": rng.choice(["linear", "cosine", "exponential", "minus_sqrt"]),
    }


def values_from(scheduler, first):
    """Rates and weight decays that a scheduler sets from a step on."""
    scheduler.step(first - scheduler.num_steps)
    values = []
    for _ in range(20):
        scheduler.step(9)
        values.append(dict(scheduler.optimizer.param_groups[0]))
    return values


@pytest.mark.parametrize("seed", range(100))
def test_a_stored_schedule_is_adopted_overridden_or_must_be_equal_in_every_field(seed):
    """Compares with schedules that were never stored. Differences without effect on the values must be accepted."""
    rng = random.Random(seed)
    theirs = random_schedule(rng)
    ours = {**theirs, **{name: random_schedule(rng)[name] for name in rng.sample(list(theirs), rng.randint(0, 3))}}
    if ours["wd_incr_style"] == "constant":
        ours["end_wd"] = ours["start_wd"]
    elif ours["end_wd"] < 0.3:
        ours["end_wd"] = 0.3
    saved = schedule(**theirs)
    saved.step(30)
    state, policies = saved.state_dict(), ("use_checkpoint_opt_param_scheduler", "override_opt_param_scheduler")
    stored, given = values_from(schedule(**theirs), 30), values_from(schedule(**ours), 30)
    for flag, expected in zip(policies, (stored, given)):
        run = schedule(**ours, **{name: name == flag for name in policies})
        run.load_state_dict(state)
        assert values_from(run, 30) == expected
    run = schedule(**ours, use_checkpoint_opt_param_scheduler=False)
    # Warm-up has passed at step 30, but its values count as a difference.
    if values_from(schedule(**ours), 0) == values_from(schedule(**theirs), 0):
        run.load_state_dict(state)
        assert values_from(run, 30) == stored
    else:
        with pytest.raises(ValueError, match="the learning-rate schedule differs from the checkpoint's"):
            run.load_state_dict(state)


def test_schedules_stored_without_the_fields_of_wsd_load():
    old = {name: value for name, value in schedule("WSD", **wsd("linear")).state_dict().items() if "wsd" not in name}
    for policy in (True, False):
        run = schedule("WSD", **wsd("cosine"), use_checkpoint_opt_param_scheduler=policy)
        run.load_state_dict(old)
        assert (run.schedule.wsd_decay_steps, run.schedule.lr_wsd_decay_style) == (200, "cosine")
    with pytest.raises(ValueError, match="give --lr-decay-style WSD, --lr-wsd-decay-iters .* as in its run"):
        schedule("linear").load_state_dict(old)
    run = schedule("linear", wsd_decay_steps=100, lr_wsd_decay_style="linear")
    run.load_state_dict(old)
    run.step(450)
    assert run.optimizer.param_groups[0]["lr"] == pytest.approx(0.55)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"lr_warmup_fraction": 0.1, "lr_warmup_iters": 5}, "give only one"),
        ({"lr_warmup_iters": 5, "lr_decay_iters": 5}, "lr_warmup_iters is 5: must be less than"),
        ({"lr_decay_style": "WSD"}, "lr_wsd_decay_iters or lr_wsd_decay_samples must be given"),
        ({"lr_wsd_decay_samples": 5}, "lr_wsd_decay_samples needs lr_decay_style WSD, which is linear"),
        (
            {"lr_wsd_decay_iters": 5, "start_weight_decay": 0.1},
            "lr_wsd_decay_iters needs lr_decay_style WSD.*\nstart_weight_decay is 0.1",
        ),
        ({"override_opt_param_scheduler": True, "use_checkpoint_opt_param_scheduler": True}, "both set"),
        ({"lr_decay_style": "exponential"}, "must be one of"),
        ({"start_weight_decay": 0.1}, "weight_decay_incr_style is constant: choose linear or cosine"),
        ({"weight_decay_incr_style": "linear", "end_weight_decay": 0.1}, "must both be given"),
    ],
)
def test_contradictory_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        OptimizerParamSchedulerConfig(**settings)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"lr_warmup_steps": 500}, "lr_warmup_steps is 500"),
        ({"min_lr": 2.0}, "min_lr is 2.0"),
        ({"end_wd": 0.5}, "end_wd is 0.5: must be start_wd"),
        ({"lr_decay_steps": 0}, "lr_decay_steps is 0"),
        ({"style": "WSD", "wsd_decay_steps": 5}, "lr_wsd_decay_style is None"),
        ({"style": "WSD", "lr_wsd_decay_style": "linear"}, "wsd_decay_steps is None: must be more than 0"),
    ],
)
def test_schedules_that_cannot_be_followed_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        schedule(**{"style": "linear", **changes})
