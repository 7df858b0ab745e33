"""Flat runs step like torch's Adam in every form of storage, and skip the step if a flag on the device is set."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.optimizer import adam
from megatron.core.optimizer.adam import (
    AdamRates,
    AdamUpdate,
    FlatAdam,
    GradScale,
    GradUse,
    Masters,
    StateForm,
    adam_step,
)

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# More than one piece, with a partial last piece.
NUMEL = 64 * 1100
LR = 1e-2


def forms() -> list[tuple[torch.dtype, StateForm]]:
    """Returns every parameter dtype with every form of states that it supports."""
    made = []
    for params, dtype, masters, is_scaled in itertools.product(DTYPES, DTYPES, Masters, (False, True)):
        form = StateForm(dtype, masters, is_scaled)
        try:
            FlatAdam.of_form(torch.zeros(64, dtype=params), form)
        except ValueError:
            continue
        made.append((params, form))
    return made


all_forms = pytest.mark.parametrize(
    ("params", "form"), forms(), ids=lambda value: getattr(value, "name", str(value).replace("torch.", ""))
)


def all_forms_with(**options: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes over all forms. Each form uses one value of the option in turn, or all values under `make soak`."""
    ((name, values),) = options.items()
    cases = [
        pytest.param(*form, value, marks=() if (number + at) % len(values) == 0 else pytest.mark.soak)
        for number, form in enumerate(forms())
        for at, value in enumerate(values)
    ]
    return pytest.mark.parametrize(("params", "form", name), cases, ids=str)


def normal(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rates(**settings: object) -> AdamRates:
    return AdamRates(torch.tensor(LR, dtype=torch.float64), **settings)  # type: ignore[arg-type]


def step(state: FlatAdam, grad: Tensor, *, out: Tensor | None = None, divisor=1.0, skip=None, **settings) -> None:
    adam_step([AdamUpdate(state, grad, out)], rates(**settings), scale=GradScale(divisor, skip))


class Run:
    """A run after two steps, and the memory that a step may change."""

    def __init__(self, params: torch.dtype, form: StateForm) -> None:
        self.model = normal(0, params)
        self.state = FlatAdam.of_form(self.model, form)
        self.out = self.model if form.masters is Masters.COPY else None
        for seed in (1, 2):
            step(self.state, normal(seed), out=self.out)

    def memory(self) -> list[Tensor]:
        held = [value for stored in self.state.stored for value in vars(stored).values()]
        kept = [value for value in held if isinstance(value, Tensor)]
        return [tensor.view(torch.uint8).clone() for tensor in (*kept, self.model, self.state.step.view(1))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("adam", [torch.optim.Adam, torch.optim.AdamW])
def test_plain_runs_step_to_the_bits_of_torch(dtype: torch.dtype, adam: type[torch.optim.Adam]) -> None:
    theirs = [torch.nn.Parameter(normal(seed, dtype)) for seed in (1, 2)]
    ours = [parameter.detach().clone() for parameter in theirs]
    states = [FlatAdam.of_form(values, StateForm(dtype, Masters.NONE)) for values in ours]
    optimizer = adam(theirs, lr=LR, weight_decay=0.1, fused=True)
    for number in range(20):
        for index, parameter in enumerate(theirs):
            parameter.grad = normal(100 * number + index, dtype)
        updates = [AdamUpdate(state, parameter.grad) for state, parameter in zip(states, theirs)]
        optimizer.step()
        settings = rates(weight_decay=0.1, adam_w_mode=adam is torch.optim.AdamW)
        adam_step(updates, settings, scale=GradScale(1.0))
    assert all(map(torch.equal, ours, theirs))
    assert [int(state.step) for state in states] == [20, 20]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_divided_in_place_step_to_the_same_bits(dtype: torch.dtype) -> None:
    form, divisor = StateForm(dtype, Masters.NONE), torch.tensor(3.7)
    for skip in (None, torch.tensor(0.0), torch.tensor(1.0)):
        one, other = Run(dtype, form), Run(dtype, form)
        grad, divided = normal(3, dtype), normal(3, dtype)
        step(one.state, grad, divisor=divisor, skip=skip)
        scale = GradScale(divisor, skip)
        adam_step([AdamUpdate(other.state, divided)], rates(), scale=scale, grads=GradUse.DIVIDE)
        assert all(map(torch.equal, one.memory(), other.memory()))
        assert torch.equal(grad, normal(3, dtype))
        assert torch.equal(divided, grad if skip is not None and skip > 0 else grad / divisor)


def test_both_dtypes_step_in_one_call_of_adam_step() -> None:
    """Compares with separate steps: plain runs share one kernel per dtype, and the other runs step individually."""
    alone = [Run(params, form) for params, form in forms()]
    together = [Run(params, form) for params, form in forms()]
    for run in alone:
        step(run.state, normal(3), out=run.out)
    adam_step([AdamUpdate(run.state, normal(3), run.out) for run in together], rates(), scale=GradScale(1.0))
    for one, other in zip(alone, together):
        assert all(map(torch.equal, one.memory(), other.memory()))


def test_bf16_with_remainders_is_the_fp32_run_bit_for_bit() -> None:
    start = normal(1, torch.bfloat16)
    halves, whole, rounded = start.clone(), start.float(), start.clone()
    forms = (StateForm(masters=Masters.REMAINDERS), StateForm(masters=Masters.NONE), StateForm(masters=Masters.COPY))
    states = [FlatAdam.of_form(model, form) for model, form in zip((halves, whole, rounded), forms)]
    for number in range(20):
        grad = normal(number, torch.bfloat16)
        for state, out in zip(states, (None, None, rounded)):
            step(state, grad, out=out, weight_decay=0.1)
        read = [stored.main.read(0, NUMEL).view(torch.int32) for stored in states]
        assert torch.equal(read[0], read[1]) and torch.equal(read[2], read[1])
        assert torch.equal(rounded, whole.bfloat16())
        # Only ties are rounded away from zero.
        is_half = read[1] & 0xFFFF == 0x8000
        assert torch.equal(halves[~is_half], rounded[~is_half])


@all_forms_with(divisor=[1.0, 2.0, torch.tensor(2.0)])
def test_a_skipped_step_changes_no_byte_and_a_step_does(params: torch.dtype, form: StateForm, divisor) -> None:
    run = Run(params, form)
    before = run.memory()
    for poison in (math.inf, math.nan, 1.0):
        step(run.state, torch.full((NUMEL,), poison), out=run.out, divisor=divisor, skip=torch.tensor(1.0))
        assert all(map(torch.equal, run.memory(), before))
    step(run.state, normal(3), out=run.out, divisor=divisor, skip=torch.tensor(0.0))
    assert not any(map(torch.equal, run.memory(), before))


@all_forms
def test_a_gradient_counts_divided_and_is_only_read(params: torch.dtype, form: StateForm) -> None:
    divided, whole = Run(params, form), Run(params, form)
    for dtype in (torch.bfloat16, form.dtype):
        grad = normal(3, dtype)
        for divisor in (4.0, torch.tensor(4.0)):
            step(divided.state, grad, out=divided.out, divisor=divisor)
            assert torch.equal(grad, normal(3, dtype))
            # No digit is lost, because the smallest value is far above fp16's smallest.
            step(whole.state, grad.float() / 4, out=whole.out)
            assert all(map(torch.equal, divided.memory(), whole.memory()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_divided_gradients_step_to_the_bits_of_torchs_own_division(dtype: torch.dtype) -> None:
    theirs = torch.nn.Parameter(normal(1, dtype))
    state = FlatAdam.of_form(theirs.detach().clone(), StateForm(dtype, Masters.NONE))
    optimizer = torch.optim.AdamW([theirs], lr=LR, weight_decay=0.1, fused=True)
    divisor, skip = torch.tensor(3.0), torch.tensor(0.0)
    vars(optimizer).update(grad_scale=divisor, found_inf=skip)  # as torch.amp.GradScaler passes them
    for number in range(5):
        skip.fill_(number == 2)
        theirs.grad = normal(number, dtype)
        step(state, normal(number, dtype), divisor=divisor, skip=skip, weight_decay=0.1)
        optimizer.step()
        assert torch.equal(state.main.read(0, NUMEL), theirs)
    assert state.step == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_without_bias_correction_moments_count_as_they_are(dtype: torch.dtype, adam_w_mode: bool) -> None:
    model = normal(1, dtype)
    state = FlatAdam.of_form(model, StateForm(dtype, Masters.NONE))
    expected, mean, square = model.double().clone(), torch.zeros(NUMEL).double(), torch.zeros(NUMEL).double()
    for number in range(5):
        grad = normal(number, dtype)
        step(state, grad, bias_correction=False, weight_decay=0.1, adam_w_mode=adam_w_mode)
        slope = grad.double() + (0.0 if adam_w_mode else 0.1 * expected)
        mean, square = 0.9 * mean + 0.1 * slope, 0.999 * square + 0.001 * slope**2
        expected = expected * (1 - 0.1 * LR if adam_w_mode else 1.0) - LR * mean / (square.sqrt() + 1e-8)
    # Without bias correction the first steps are larger, up to 0.03 each, and a few gradients nearly cancel.
    torch.testing.assert_close(model.double(), expected, rtol=0, atol=20 * torch.finfo(dtype).eps)
    assert state.step == 5


@all_forms_with(out_dtype=DTYPES)
def test_parameters_are_written_in_any_dtype(params: torch.dtype, form: StateForm, out_dtype: torch.dtype) -> None:
    run, out = Run(params, form), torch.zeros(NUMEL, dtype=out_dtype)
    step(run.state, normal(3), out=out)
    is_upper = form.masters is Masters.REMAINDERS
    assert torch.equal(out, (run.model if is_upper else run.state.main.read(0, NUMEL)).to(out_dtype))


@all_forms
def test_on_a_gpu_remainders_and_scaled_states_alone_take_the_one_pass(params: torch.dtype, form: StateForm) -> None:
    is_scaled = form.is_scaled and form.dtype == torch.float16
    state = FlatAdam.of_form(torch.zeros(64, dtype=params), form)
    assert adam._is_one_pass(state) == (form.masters is Masters.REMAINDERS or is_scaled)


@pytest.mark.parametrize(
    ("params", "form", "message"),
    [
        (torch.float32, StateForm(torch.int32), "dtype is torch.int32"),
        (torch.float32, StateForm(torch.float32, is_scaled=True), "is_scaled is True with dtype torch.float32"),
        (torch.bfloat16, StateForm(torch.float16, Masters.REMAINDERS), "must be float32"),
        (torch.float16, StateForm(masters=Masters.REMAINDERS), "parameters of torch.float16: must be COPY or NONE"),
        (torch.float64, StateForm(torch.float16, Masters.NONE, is_scaled=True), "masters is NONE .*: must be COPY"),
    ],
)
def test_forms_that_cannot_be_are_refused(params: torch.dtype, form: StateForm, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlatAdam.of_form(torch.zeros(64, dtype=params), form)
