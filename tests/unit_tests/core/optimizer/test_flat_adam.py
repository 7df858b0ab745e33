"""Flat runs step as torch's own Adam does, in every form of storage, and not at all where the device says so."""


import pytest
import torch
from torch import Tensor

from megatron.core.optimizer.flat_adam import AdamRates, AdamUpdate, FlatAdam, Masters, StateForm, adam_step
from megatron.core.optimizer.update_rules import GradScale

# More than one piece, and a piece that is not full.
NUMEL = 64 * 1100
LR = 1e-2


def normal(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rates(**settings: object) -> AdamRates:
    return AdamRates(torch.tensor(LR, dtype=torch.float64), **settings)  # type: ignore[arg-type]


def step(state: FlatAdam, grad: Tensor, *, out: Tensor | None = None, divisor=1.0, skip=None, **settings) -> None:
    adam_step([AdamUpdate(state, grad, out)], rates(**settings), scale=GradScale(divisor, skip))


def memory(state: FlatAdam) -> list[Tensor]:
    """Every tensor that it keeps, as bytes."""
    kept = [tensor for stored in state.stored for tensor in vars(stored).values() if isinstance(tensor, Tensor)]
    return [tensor.view(torch.uint8).clone() for tensor in (*kept, state.step.view(1))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("adam", [torch.optim.Adam, torch.optim.AdamW])
def test_plain_runs_step_to_the_bits_of_torch(dtype: torch.dtype, adam: type[torch.optim.Adam]) -> None:
    theirs = [torch.nn.Parameter(normal(seed, dtype)) for seed in (1, 2)]
    ours = [parameter.detach().clone() for parameter in theirs]
    states = [FlatAdam(values, StateForm(dtype, Masters.NONE)) for values in ours]
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
