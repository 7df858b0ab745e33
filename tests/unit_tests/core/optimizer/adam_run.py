"""A run in every form that Adam's kernel steps, for its tests here and on GPUs."""

from typing import Any

import torch
from torch import Tensor

from megatron.core.optimizer.adam import AdamRates, FlatAdam, Masters, StateForm

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# A tile that is not full, and more tiles than programs.
NUMEL = 64 * 37
LR = 2.0**-7  # the same in fp32 and fp64
# Parameters, the form of states, gradients, and where parameters are written.
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
    """A run of random numbers of any sizes, with moments as after some steps, and what is kept of it as bytes."""

    def __init__(self, params: torch.dtype, form: StateForm, outs: torch.dtype | None, device: str = "cpu") -> None:
        # A block of zeros, and blocks from very small to very large numbers.
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


def assert_near(run: Run, expected: Run, *, old: list[Tensor], rates: AdamRates) -> None:
    """That both have made the same fourth step from `old`, up to the order of roundings; all [NUMEL], fp32."""
    new = expected.values()
    main, mean, square = (torch.maximum(before.abs(), after.abs()) for before, after in zip(old, new))
    # torch's kernel rounds some products and sums together: a digit of the larger operand. Of parameters, both of what
    # they were and of how far a mean of that size would have moved them, where what it was and the gradient cancel.
    corrections = [1 - beta**4 for beta in rates.betas]
    moved = LR / corrections[0] * mean / ((new[2] / corrections[1]).sqrt() + rates.eps)
    for found, wanted, largest in zip(run.values(), new, (main + moved, mean, square)):
        assert ((found.to(wanted.device) - wanted).abs() <= 2 * torch.finfo(F32).eps * largest).all()
