"""What else is done to the parameters of a DistributedFusedAdam: written, frozen, stored, pickled. One rank."""

import pickle

import pytest
import torch
from torch import nn

from megatron.core.optimizer import DistributedFusedAdam

REMAINDERS = {"store_params": False, "store_param_remainders": True}


def step(optimizer: DistributedFusedAdam, param: nn.Parameter) -> None:
    optimizer.zero_grad()
    (param.float() * torch.arange(1.0, 1 + param.numel())).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("settings", [{}, REMAINDERS, {"contiguous_param_buffer": False}], ids=str)
def test_masters_follow_what_others_write_once_they_are_reloaded(settings):
    written = torch.linspace(-3, 3, 77).bfloat16()
    expected, param = (nn.Parameter(start.clone()) for start in (written, torch.ones(77).bfloat16()))
    fresh, optimizer = (DistributedFusedAdam([p], lr=1e-3, **settings) for p in (expected, param))
    step(optimizer, param)
    with torch.no_grad():
        param.copy_(written)
    optimizer.reload_params()
    for stored in (part for run in optimizer._shards.runs for part in run.state.stored[1:]):
        stored.write(0, torch.zeros(stored.numel))
    for run in optimizer._shards.runs:
        run.state.step.zero_()
    step(optimizer, param)
    step(fresh, expected)
    assert torch.equal(param, expected)


def test_a_parameter_that_is_frozen_after_it_was_taken_over_is_named():
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = DistributedFusedAdam([("first", params[0]), ("second", params[1])])
    sum(param.sum() for param in params).backward()
    optimizer.step()
    optimizer.zero_grad()
    params[1].requires_grad_(False)
    params[0].sum().backward()
    with pytest.raises(ValueError, match="second was frozen after the optimizer took it over"):
        optimizer.step()


def test_modules_are_stored_without_their_optimizer_and_optimizers_not_at_all():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = DistributedFusedAdam(model.parameters(), overlap_param_sync=True)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    stored = pickle.loads(pickle.dumps(model))
    assert torch.equal(stored(torch.ones(2, 3)), model(torch.ones(2, 3)))
    with pytest.raises(TypeError, match="save its state_dict"):
        pickle.dumps(optimizer)
