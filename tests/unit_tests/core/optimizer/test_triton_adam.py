"""Adam's interpreted kernel agrees with adam.py on the CPU. test_compiled_kernels.py compiles it."""

import importlib
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core import optimizer
from megatron.core.optimizer.adam import AdamRates, AdamUpdate, FlatAdam, GradScale, Masters, StateForm, adam_step
from megatron.core.optimizer.stored_floats import Plain, StoredFloats
from tests.counts import long_count, soak_only
from tests.unit_tests.core.optimizer.adam_run import BF16, F16, F32, FORMS, NUMEL, Run, assert_near, settings

# numpy warns about operations that GPUs compute silently.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

all_forms = pytest.mark.parametrize(
    ("params", "form", "grads", "outs"),
    FORMS,
    ids=lambda value: f"{value.dtype}-{value.masters.name}-{value.is_scaled}" if isinstance(value, StateForm) else None,
)


@pytest.fixture
def kernel(interpreted: Callable[..., ModuleType]) -> ModuleType:
    return interpreted("triton_adam", of=optimizer.__name__)


def launch(
    kernel: ModuleType,
    run: Run,
    grad: Tensor,
    *,
    rates: AdamRates,
    divisor: Tensor | None = None,
    skip: Tensor | None = None,
    stored: list[StoredFloats] | None = None,
) -> None:
    kernel.step_run(
        stored or run.state.stored, grad, out=run.out, step=run.state.step, divisor=divisor, skip=skip, **vars(rates)
    )


def by_hand(run: Run, *, rates: AdamRates, count: int, divisor: Tensor | None) -> list[Tensor]:
    """Computes the new values of one step, with each operation rounded to fp32."""
    (main, mean, square), grad = run.values(), run.grad
    (beta1, beta2), lr = rates.betas, float(rates.lr)
    corrections = [1 - beta**count if rates.bias_correction else 1.0 for beta in rates.betas]
    grad = grad if divisor is None else grad / divisor
    if rates.adam_w_mode:
        main = main * (1 - lr * rates.weight_decay)
    else:
        grad = grad + main * rates.weight_decay
    mean = grad + -beta1 * (grad - mean) if beta1 <= 0.5 else mean + (1 - beta1) * (grad - mean)
    square = square * beta2 + (1 - beta2) * grad * grad
    # torch's fp32 square root is not always rounded to nearest.
    root = square.double().sqrt().float() / math.sqrt(corrections[1]) + rates.eps
    return [main - lr / corrections[0] * mean / root, mean, square]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"adam_w_mode": False},
        {"bias_correction": False},
        {"betas": (0.3, 0.5), "weight_decay": 0.0, "eps": 1e-3},
        {"betas": (0.0, 0.0)},
    ],
    ids=str,
)
@pytest.mark.parametrize("divisor", [None, torch.tensor(3.0)], ids=["whole", "divided"])
def test_the_kernel_rounds_each_operation_once(kernel: ModuleType, given: dict, divisor: Tensor | None) -> None:
    run, rates = Run(F32, StateForm(F32, Masters.NONE), None), settings(**given)
    for count in (4, 5):
        expected = by_hand(run, rates=rates, count=count, divisor=divisor)
        grad = run.grad.clone()
        launch(kernel, run, grad, rates=rates, divisor=divisor)
        assert all(map(torch.equal, run.values(), expected))
        assert torch.equal(grad, run.grad)
        run.state.step.add_(1)


@all_forms
def test_every_form_keeps_the_bytes_that_torch_makes_of_the_same_numbers(
    kernel: ModuleType, params: torch.dtype, form: StateForm, grads: torch.dtype, outs: torch.dtype | None
) -> None:
    run, expected = Run(params, form, outs), Run(params, form, outs)
    grad, divisor = run.grad.to(grads), torch.tensor(0.5)
    plain = [Plain(values) for values in expected.values()]
    whole = Run(F32, StateForm(F32, Masters.NONE), None)
    launch(kernel, whole, grad, rates=settings(), divisor=divisor, stored=plain)
    for stored, new in zip(expected.state.stored, plain):
        stored.write(0, new.tensor)
    if expected.out is not None:
        is_upper = form.masters is Masters.REMAINDERS
        expected.out.copy_(expected.model if is_upper else expected.state.main.read(0, NUMEL))
    launch(kernel, run, grad, rates=settings(), divisor=divisor)
    assert all(map(torch.equal, run.memory(), expected.memory()))


NEAR = [case for case in FORMS if case[1].dtype == F32]


# The rounding of each mode is tested by test_the_kernel_rounds_each_operation_once.
@pytest.mark.parametrize(
    ("params", "form", "grads", "outs", "adam_w_mode"),
    [
        *((*case, number % 2 == 0) for number, case in enumerate(NEAR)),
        *(soak_only(*case, number % 2 == 1) for number, case in enumerate(NEAR)),
    ],
)
def test_a_step_is_near_that_of_torchs_kernel(
    kernel: ModuleType,
    params: torch.dtype,
    form: StateForm,
    grads: torch.dtype,
    outs: torch.dtype | None,
    adam_w_mode: bool,
) -> None:
    run, expected = Run(params, form, outs), Run(params, form, outs)
    grad, divisor, old = run.grad.to(grads), torch.tensor(0.5), run.values()
    rates = settings(adam_w_mode=adam_w_mode)
    launch(kernel, run, grad, rates=rates, divisor=divisor)
    adam_step([AdamUpdate(expected.state, grad, expected.out)], rates, scale=GradScale(divisor))
    assert_near(run, expected, old=old, rates=rates)


# Each form is tested with one of the two values. `make soak` tests both.
@pytest.mark.parametrize(
    ("params", "form", "grads", "outs", "poison"),
    [
        *((*case, (math.inf, math.nan)[number % 2]) for number, case in enumerate(FORMS)),
        *(soak_only(*case, (math.nan, math.inf)[number % 2]) for number, case in enumerate(FORMS)),
    ],
)
def test_a_skipped_step_changes_no_byte(
    kernel: ModuleType,
    params: torch.dtype,
    form: StateForm,
    grads: torch.dtype,
    outs: torch.dtype | None,
    poison: float,
) -> None:
    run = Run(params, form, outs)
    before = run.memory()
    launch(kernel, run, torch.full((NUMEL,), poison, dtype=grads), rates=settings(), skip=torch.tensor(1.0))
    assert all(map(torch.equal, run.memory(), before))
    launch(kernel, run, run.grad.to(grads), rates=settings(), skip=torch.tensor(0.0))
    assert not all(map(torch.equal, run.memory(), before))


@all_forms
def test_numbers_that_are_not_finite_arrive_where_they_do_on_the_cpu(
    kernel: ModuleType, params: torch.dtype, form: StateForm, grads: torch.dtype, outs: torch.dtype | None
) -> None:
    run, expected = Run(params, form, outs), Run(params, form, outs)
    grad = run.grad.to(grads)
    grad[5::64] = (
        torch.tensor([math.nan, math.inf, -math.inf, 1.0]).repeat(NUMEL // 64 // 4 + 1)[: NUMEL // 64].to(grads)
    )
    launch(kernel, run, grad, rates=settings())
    adam_step([AdamUpdate(expected.state, grad, expected.out)], settings(), scale=GradScale(1.0))
    for found, wanted in zip(run.values(), expected.values()):
        assert torch.equal(found.isnan(), wanted.isnan()) and torch.equal(found.isinf(), wanted.isinf())
        assert wanted.isnan().any()
    for found, wanted in zip(run.state.stored, expected.state.stored):
        if form.is_scaled and "exponents" in vars(wanted):
            # Only blocks with non-finite values: in others, the largest value's last digit may change the exponent.
            blocks = wanted.read(0, NUMEL).view(-1, 64).isfinite().logical_not().any(1)
            assert torch.equal(found.exponents[blocks], wanted.exponents[blocks])


def test_bf16_with_remainders_is_the_fp32_run_bit_for_bit(kernel: ModuleType) -> None:
    halves, whole = Run(BF16, StateForm(F32, Masters.REMAINDERS), None), Run(BF16, StateForm(F32, Masters.COPY), BF16)
    for number in range(long_count(4, soak=20)):
        grad = torch.randn(NUMEL, generator=torch.Generator().manual_seed(number)).bfloat16()
        for run in (halves, whole):
            launch(kernel, run, grad, rates=settings())
            run.state.step.add_(1)
        assert all(map(torch.equal, halves.values(), whole.values()))


def test_a_run_is_one_launch_and_no_number_makes_triton_compile_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    triton_adam = importlib.import_module(f"{optimizer.__name__}.triton_adam")
    backend = triton.compiler.make_backend(triton.backends.compiler.GPUTarget("cuda", 90, 32))
    kinds, launches = set(), []

    def note(kernel: Any, *args: Any, grid: object, warmup: bool, **named: Any) -> None:
        bind = triton.runtime.jit.create_function_from_signature(kernel.signature, kernel.params, backend)
        _, specialization, options = bind(*args, **named)
        kinds.add(f"{specialization} {options}")
        launches.append(kernel)

    monkeypatch.setattr(type(triton_adam.adam_kernel), "run", note)
    spare = torch.ones(8)
    for blocks in (1, 2, 16, 17):
        model = torch.zeros(64 * blocks, dtype=BF16)
        state = FlatAdam.of_form(model, StateForm(F16, is_scaled=True))
        for number, given in enumerate(({}, {"betas": (0.0, 0.5), "weight_decay": 0.0}, {"bias_correction": False})):
            numbers = {"step": spare[number], "divisor": spare[number + 1], "skip": spare[number + 2]}
            rates = settings(**given)
            triton_adam.step_run(state.stored, torch.zeros_like(model), out=model, **vars(rates), **numbers)
    assert len(kinds) == 1 and len(launches) == 12
