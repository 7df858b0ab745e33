"""Changes of the loss scale over sequences of clean and overflowing steps."""

import pytest

from megatron.core.optimizer import ConstantGradScaler, DynamicGradScaler


def dynamic(**changes):
    values = {"initial_scale": 16.0, "min_scale": 1.0, "growth_factor": 2.0, "backoff_factor": 0.5}
    return DynamicGradScaler(**{**values, "growth_interval": 3, "hysteresis": 2, **changes})


@pytest.mark.parametrize(
    "steps, scales",
    [
        ("...", [16, 16, 32]),
        ("......", [16, 16, 32, 32, 32, 64]),
        ("x", [16]),  # the hysteresis tolerates the first overflow
        ("xx", [16, 8]),
        ("x.x", [16, 16, 8]),  # clean steps in between do not restore the hysteresis
        ("xxx", [16, 8, 4]),  # once used up, the hysteresis stays so until the scale grows
        ("x..." + "x", [16, 16, 16, 32, 32]),
        ("..x..." + "xx", [16, 16, 16, 16, 16, 32, 32, 16]),
        ("xxxxxxxx", [16, 8, 4, 2, 1, 1, 1, 1]),
    ],
)
def test_dynamic_scale_follows_the_steps(steps, scales):
    scaler = dynamic()
    seen = []
    for step in steps:
        scaler.update(step == "x")
        seen.append(scaler.scale)
    assert seen == scales


def test_state_continues_in_the_middle_of_a_window():
    straight, resumed = dynamic(), dynamic(initial_scale=2.0)
    for found_inf in (True, False, False):
        straight.update(found_inf)
    resumed.load_state_dict(straight.state_dict())
    for found_inf in (False, True, True):
        straight.update(found_inf)
        resumed.update(found_inf)
        assert resumed.state_dict() == straight.state_dict()


def test_a_shorter_window_and_a_lower_hysteresis_apply_from_the_resume_on():
    long = dynamic(growth_interval=10, hysteresis=5)
    for _ in range(6):
        long.update(False)
    short = dynamic(growth_interval=3, hysteresis=2)
    short.load_state_dict(long.state_dict())
    short.update(False)
    assert short.scale == 32.0  # six clean steps exceed the window of three
    short.load_state_dict(long.state_dict())
    short.update(True), short.update(True)
    assert short.scale == 8.0
    higher = dynamic(initial_scale=64.0, min_scale=32.0)
    higher.load_state_dict(long.state_dict())
    assert higher.scale == 32.0


def test_constant_scale_ignores_overflow_and_states_of_other_scalers():
    scaler = ConstantGradScaler(128.0)
    scaler.update(True)
    scaler.load_state_dict(dynamic().state_dict())
    assert scaler.scale == 128.0
    other = dynamic()
    other.load_state_dict(scaler.state_dict())
    assert other.scale == 16.0


@pytest.mark.parametrize("field, value", [("growth_factor", 1.0), ("backoff_factor", 1.0), ("hysteresis", 0)])
def test_values_that_could_not_work_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        dynamic(**{field: value})


@pytest.mark.parametrize("scale", [0, -1.0, float("nan"), float("inf"), "1"])
def test_a_constant_scale_is_a_finite_number_above_0(scale):
    with pytest.raises(ValueError, match="initial_scale is .*: must be a finite number above 0"):
        ConstantGradScaler(scale)


@pytest.mark.parametrize("field", ["initial_scale", "growth_factor", "hysteresis"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1"])
def test_a_dynamic_scale_has_finite_numbers(field, value):
    with pytest.raises(ValueError, match=f"^{field} is {value!r}: must be a finite number$"):
        dynamic(**{field: value})
