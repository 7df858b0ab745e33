"""Adam's kernel on a GPU is close to torch's kernel on the CPU, consistent in all forms, and works in a CUDA graph."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megatron.core.optimizer.adam import AdamUpdate, FlatAdam, GradScale, Masters, StateForm, adam_step
from megatron.core.optimizer.stored_floats import Plain, StoredFloats
from tests.unit_tests.core.optimizer.adam_run import BF16, F32, FORMS, LR, NUMEL, Run, assert_near, settings

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
triton_adam = pytest.importorskip("megatron.core.optimizer.triton_adam")
all_forms = pytest.mark.parametrize(("params", "form", "grads", "outs"), FORMS)


def number(value: float, device: str = DEVICE) -> Tensor:
    return torch.full((), value, device=device)


def step(run: Run, grad: Tensor, *, scale: GradScale, device: str = DEVICE) -> None:
    adam_step([AdamUpdate(run.state, grad, run.out)], settings(device), scale=scale)


def launch(
    run: Run, grad: Tensor, *, divisor: Tensor | None = None, stored: Sequence[StoredFloats] | None = None
) -> None:
    """Launches the Triton kernel directly, which adam_step uses only for some of the forms."""
    numbers = {"step": run.state.step, "divisor": divisor, "skip": None}
    triton_adam.step_run(stored or run.state.stored, grad, out=run.out, **vars(settings(DEVICE)), **numbers)


@pytest.mark.parametrize(("params", "form", "grads", "outs"), [case for case in FORMS if case[1].dtype == F32])
@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_a_step_is_near_that_of_the_cpu(params, form, grads, outs, adam_w_mode: bool) -> None:
    run, expected = Run(params, form, outs, DEVICE), Run(params, form, outs)
    old = expected.values()
    for one, device in ((run, DEVICE), (expected, "cpu")):
        rates, scale = settings(device, adam_w_mode=adam_w_mode), GradScale(number(0.5, device))
        adam_step([AdamUpdate(one.state, one.grad.to(grads), one.out)], rates, scale=scale)
    rates = settings(adam_w_mode=adam_w_mode)
    # The Triton kernel updates the form with remainders. Torch's kernel updates the other forms.
    torch_grad = None
    if form.masters is not Masters.REMAINDERS:
        torch_grad = expected.grad.to(grads).float() / 0.5 + (0.0 if adam_w_mode else rates.weight_decay * old[0])
    assert_near(run, expected, old=old, rates=rates, torch_grad=torch_grad)
    assert run.state.step == 4


@all_forms
def test_every_form_keeps_the_bytes_that_torch_makes_of_the_same_numbers(params, form, grads, outs) -> None:
    run, expected = Run(params, form, outs, DEVICE), Run(params, form, outs, DEVICE)
    grad, divisor = run.grad.to(grads), number(0.5)
    plain = [Plain(values) for values in expected.values()]
    launch(Run(F32, StateForm(F32, Masters.NONE), None, DEVICE), grad, divisor=divisor, stored=plain)
    for stored, new in zip(expected.state.stored, plain):
        stored.write(0, new.tensor)
    if expected.out is not None:
        is_upper = form.masters is Masters.REMAINDERS
        expected.out.copy_(expected.model if is_upper else expected.state.main.read(0, NUMEL))
    launch(run, grad, divisor=divisor)
    assert all(map(torch.equal, run.memory(), expected.memory()))


@all_forms
@pytest.mark.parametrize("poison", [math.inf, math.nan])
def test_a_skipped_step_changes_no_byte(params, form, grads, outs, poison: float) -> None:
    run = Run(params, form, outs, DEVICE)
    before = run.memory()
    bad = torch.full((NUMEL,), poison, dtype=grads, device=DEVICE)
    step(run, bad, scale=GradScale(number(2.0), number(1.0)))
    assert all(map(torch.equal, run.memory(), before))


def test_bf16_with_remainders_is_the_fp32_run_bit_for_bit() -> None:
    halves = Run(BF16, StateForm(F32, Masters.REMAINDERS), None, DEVICE)
    whole = Run(BF16, StateForm(F32, Masters.COPY), BF16, DEVICE)
    for seed in range(20):
        grad = torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)).to(DEVICE, BF16)
        for run in (halves, whole):
            launch(run, grad)
            run.state.step.add_(1)
        assert all(map(torch.equal, halves.values(), whole.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("adam", [torch.optim.Adam, torch.optim.AdamW])
def test_plain_runs_step_to_the_bits_of_torch(dtype: torch.dtype, adam: type[torch.optim.Adam]) -> None:
    start = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    theirs = torch.nn.Parameter(start.clone())
    state = FlatAdam.of_form(start, StateForm(dtype, Masters.NONE))
    optimizer = adam([theirs], lr=torch.full((), LR, device=DEVICE), weight_decay=0.1, fused=True)
    rates = settings(DEVICE, adam_w_mode=adam is torch.optim.AdamW)
    for seed in range(20):
        theirs.grad = torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
        adam_step([AdamUpdate(state, theirs.grad)], rates, scale=GradScale(1.0))
        optimizer.step()
        assert torch.equal(start, theirs)


@all_forms
@pytest.mark.parametrize("is_divided", [False, True])
def test_a_captured_step_follows_gradients_rates_divisors_and_skips(params, form, grads, outs, is_divided) -> None:
    graphed, host = Run(params, form, outs, DEVICE), Run(params, form, outs, DEVICE)
    grad, rates = torch.zeros(NUMEL, dtype=grads, device=DEVICE), settings(DEVICE)
    scale = GradScale(number(1.0) if is_divided else 1.0, number(0.0))
    graph = torch.cuda.CUDAGraph()

    def captured() -> None:
        adam_step([AdamUpdate(graphed.state, grad, graphed.out)], rates, scale=scale)

    # Compiles the kernel, which is not possible during a capture. The skip flag on the device prevents the update.
    scale.skip.fill_(1.0)
    captured()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured()
    for seed in range(6):
        grad.copy_(torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)))
        rates.lr.fill_(LR / (seed + 1))
        scale.skip.fill_(float(seed in (1, 4)))
        if is_divided:
            scale.divisor.fill_(0.5 + seed)
        torch.cuda.set_sync_debug_mode("error")
        try:
            graph.replay()
            adam_step([AdamUpdate(host.state, grad, host.out)], rates, scale=scale)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(map(torch.equal, graphed.memory(), host.memory()))
    assert host.state.step == 3 + 4
