"""Result checks made by loss functions of scripts, and their marks in traces."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import StragglerDetector


def test_a_rejected_result_is_an_error_or_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    check = get_rerun_state_machine().validate_result
    check(result=torch.tensor(1.0), rejection_func=torch.isnan, message="found NaN", tolerance=0.0, fatal=True)
    with pytest.raises(RuntimeError, match="found NaN: the result is nan"):
        check(torch.tensor(float("nan")), torch.isnan, message="found NaN")
    check(torch.tensor(3.0), lambda loss: loss > 2, message="spike", fatal=False)
    assert capsys.readouterr().out == "WARNING: spike: the result is 3.0\n"
    with pytest.raises(ValueError, match="comparison_func is"):
        check(1.0, bool, comparison_func=max)


def test_parts_of_a_forward_step_are_ranges_of_a_trace() -> None:
    stimer = StragglerDetector()
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        with stimer(bdata=True):
            torch.ones(2)
        with stimer:
            torch.ones(2)
        with stimer():
            torch.ones(2)
    names = [event.key for event in trace.events() if event.key in ("batch", "forward")]
    assert names == ["batch", "forward", "forward"]
