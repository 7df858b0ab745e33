"""Flat runs in every form that Adam's kernel supports, for its tests on CPUs and GPUs. Contains no tests."""

from typing import Any

import torch
from torch import Tensor

from megatron.core.optimizer.adam import AdamRates, FlatAdam, Masters, StateForm

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# The last tile is partial, and there are more tiles than programs.
NUMEL = 64 * 37
LR = 2.0**-7  # exactly representable in fp32 and fp64
# Dtype of parameters, form of states, dtype of gradients, and dtype that parameters are written to.
FORMS = [
    (F32, StateForm(F32, Masters.NONE), F32, None),
    (F32, StateForm(F32, Masters.NONE), BF16, None),
    (F32, StateForm(F32, Masters.COPY), F32, torch.float64),
    (BF16, StateForm(F32, Masters.COPY), BF16, BF16),
    (F16, StateForm(F32, Masters.COPY), F16, F16),
    (BF16, StateForm(F32, Masters.REMAINDERS), BF16, None),
    (BF16, StateForm(F32, Masters.REMAINDERS), F32, BF16),
    (F32, StateForm(BF16, Masters.COPY), F32, F32),
    (BF16, StateForm(BF16, Masters.NONE), BF16, None),
    (F16, StateForm(F16, Masters.COPY), F16, F16),
    (F16, StateForm(F16, Masters.COPY, is_scaled=True), F16, F16),
    (BF16, StateForm(F16, Masters.COPY, is_scaled=True), BF16, BF16),
    (F32, StateForm(F16, Masters.NONE, is_scaled=True), torch.float64, None),
]


class Run:
    """A run of random values of widely varying sizes, with moments as after some steps, and its state as bytes."""

    def __init__(self, params: torch.dtype, form: StateForm, outs: torch.dtype | None, device: str = "cpu") -> None:
        # A block of zeros, and blocks of very small to very large values.
        sizes = torch.logspace(-9, 3, NUMEL // 64).repeat_interleave(64)
        sizes[64:128] = 0
        generator = torch.Generator().manual_seed(1)
        self.model = (torch.randn(NUMEL, generator=generator) * sizes.clamp(max=8)).to(device, params)
        self.state = FlatAdam.of_form(self.model, form)
        wide = self.state.wide
        self.state.exp_avg.write(0, (torch.randn(NUMEL, generator=generator) * sizes).to(device, wide))
        self.state.exp_avg_sq.write(0, (torch.rand(NUMEL, generator=generator) * sizes.square()).to(device, wide))
        self.state.step.fill_(3)
        self.grad = (torch.randn(NUMEL, generator=generator) * sizes).to(device, wide)
        self.out = None if outs is None else self.model.to(outs)

    def memory(self) -> list[Tensor]:
        kept = [
            tensor for stored in self.state.stored for tensor in vars(stored).values() if isinstance(tensor, Tensor)
        ]
        others = [self.model, self.state.step.view(1), *([] if self.out is None else [self.out])]
        return [tensor.view(torch.uint8).clone() for tensor in (*kept, *others)]

    def values(self) -> list[Tensor]:
        return [stored.read(0, NUMEL).clone() for stored in self.state.stored]


def settings(device: str = "cpu", **given: Any) -> AdamRates:
    dtype = torch.float64 if device == "cpu" else torch.float32
    return AdamRates(torch.tensor(LR, dtype=dtype, device=device), **{"weight_decay": 0.1, **given})


def assert_near(
    run: Run, expected: Run, *, old: list[Tensor], rates: AdamRates, torch_grad: Tensor | None = None
) -> None:
    """Asserts that both runs made the same fourth step from `old`, up to rounding order; all [NUMEL], fp32.

    torch_grad: the gradient added to the mean, if torch's kernel on a GPU made the step of `run`.
    """
    new, eps = expected.values(), torch.finfo(F32).eps
    main, mean, square = (torch.maximum(before.abs(), after.abs()) for before, after in zip(old, new))
    # torch's kernel fuses some multiply-adds, which changes one digit of the larger operand. A parameter's bound uses
    # the old value and the largest update by a mean of that size, because the old value and the gradient may cancel.
    corrections = [1 - beta**4 for beta in rates.betas]
    root = (new[2] / corrections[1]).sqrt() + rates.eps
    moved = LR / corrections[0] * mean / root
    bounds = [2 * eps * (main + moved), 2 * eps * mean, 2 * eps * square]
    if torch_grad is not None:
        # On a GPU that kernel rounds the betas and their powers to fp32, by up to 2**-25, before it subtracts them from
        # 1. The gradient's coefficients are off by 2 eps of 0.1 for 0.9 and by 108 eps of 0.001 for 0.999, and the
        # corrections of the fourth step by 2 and 159 eps. Deviations measured on an H200 agree: up to 5.3 eps of the
        # mean, 103 eps of the square, and 54 eps of the bound of a parameter.
        rounded = [_rounded(beta) for beta in rates.betas]
        lost = [abs(rough - beta) for rough, beta in zip(rounded, rates.betas)]
        powers = [(_rounded(rough**4), beta**4) for rough, beta in zip(rounded, rates.betas)]
        off = [abs(rough - exact) / (1 - exact) for rough, exact in powers]
        of_mean, of_square = lost[0] * torch_grad.abs(), lost[1] * torch_grad.square()
        step = LR / corrections[0] / root
        relative = off[0] + off[1] / 2 + torch.where(new[2] > 0, of_square / new[2], 0.0) / 2
        extra = step * (of_mean + new[1].abs() * relative), of_mean, of_square
        bounds = [bound + more for bound, more in zip(bounds, extra)]
    for found, wanted, bound in zip(run.values(), new, bounds):
        assert ((found.to(wanted.device) - wanted).abs() <= bound).all()


def _rounded(number: float) -> float:
    return float(torch.tensor(number, dtype=F32))
