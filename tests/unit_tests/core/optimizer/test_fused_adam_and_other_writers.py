"""Parameters of a DistributedFusedAdam that are written, frozen, stored or pickled by other code, on one rank."""

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


def _forget_moments(optimizer: DistributedFusedAdam) -> None:
    """Resets the moments and step counts to zero through the optimizer's state dict."""
    state = pickle.loads(pickle.dumps(optimizer.state_dict()))
    for of_param in state["state"].values():
        for name in ("step", "exp_avg", "exp_avg_sq"):
            for box in of_param[name].boxes:
                of_param[name].read(box).zero_()
    optimizer.load_state_dict(state)


@pytest.mark.parametrize("settings", [{}, REMAINDERS, {"contiguous_param_buffer": False}], ids=str)
def test_masters_follow_what_others_write_once_they_are_reloaded(settings):
    written = torch.linspace(-3, 3, 77).bfloat16()
    expected, param = (nn.Parameter(start.clone()) for start in (written, torch.ones(77).bfloat16()))
    fresh, optimizer = (DistributedFusedAdam([p], lr=1e-3, **settings) for p in (expected, param))
    step(optimizer, param)
    with torch.no_grad():
        param.copy_(written)
    optimizer.reload_params()
    _forget_moments(optimizer)
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
    with pytest.raises(ValueError, match="second was frozen after the optimizer registered it"):
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


@pytest.mark.parametrize("settings", [{}, {"contiguous_param_buffer": False}, REMAINDERS], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_step_goes_on_from_what_others_have_written_and_keeps_the_digits_of_the_rest(settings, dtype):
    if dtype == torch.float32 and settings is REMAINDERS:
        settings = {}
    start = torch.linspace(-3, 3, 77).to(dtype)
    kept, written = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    plain = nn.Parameter(start.clone())
    optimizer, alone = (
        DistributedFusedAdam([kept, written], lr=1e-4, **settings),
        DistributedFusedAdam([plain], lr=1e-4),
    )
    for number in range(8):
        optimizer.zero_grad()
        (kept.float().square().sum() + written.float().square().sum()).backward()
        optimizer.step()
        alone.zero_grad()
        plain.float().square().sum().backward()
        alone.step()
        if number == 4:
            with torch.no_grad():
                written[3:5] = 7.0
                kept.copy_(kept.clone())
    assert torch.equal(kept, plain)
    assert torch.equal(written[:3], plain[:3]) and torch.equal(written[5:], plain[5:])
    assert float((written.detach()[3:5] - 7.0).abs().max()) < 0.05


def test_a_share_of_states_fits_an_optimizer_that_has_not_stepped_whatever_its_order_was():
    def build() -> tuple[nn.Module, DistributedFusedAdam]:
        torch.manual_seed(0)
        model = nn.LSTM(4, 4)
        return model, DistributedFusedAdam(model.parameters(), bucket_cap_mb=512 / 2**20)

    def train(model: nn.Module, optimizer: DistributedFusedAdam) -> None:
        optimizer.zero_grad()
        model(torch.linspace(0, 1, 24).view(3, 2, 4))[0].square().sum().backward()
        optimizer.step()

    model, optimizer = build()
    train(model, optimizer)
    stored = pickle.loads(pickle.dumps({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
    other, resumed = build()
    other.load_state_dict(stored["model"])
    resumed.load_state_dict(stored["optimizer"])
    assert resumed.state_dict()["order"] == optimizer.state_dict()["order"] != [[0, 1, 2, 3]]
    train(model, optimizer)
    train(other, resumed)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((nn.Linear(2, 2),), "params is a Linear: must be parameters"),
        (([nn.Parameter(torch.ones(2))], "1e-3"), "lr is '1e-3': must be a number"),
        (([{"lr": 1.0}],), "group 0 of params has lr: must contain its parameters as params"),
        (([nn.Parameter(torch.ones(2, device="meta"))],), "on the meta device: must be a full tensor"),
        (
            ([nn.Parameter(torch.ones(2))], torch.tensor([1.0, 2.0])),
            "lr is tensor.*: must be a number, or a tensor with one element",
        ),
    ],
)
def test_what_cannot_be_stepped_is_refused_in_words(arguments, text):
    with pytest.raises((TypeError, ValueError), match=text):
        DistributedFusedAdam(*arguments)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"overlap_param_sync": "yes"}, "overlap_param_sync is 'yes': must be True or False"),
        ({"debug": True}, "debug is True: requires overlap_param_sync"),
    ],
)
def test_switches_are_true_or_false_and_change_something(settings, text):
    with pytest.raises(ValueError, match=text):
        DistributedFusedAdam([nn.Parameter(torch.ones(2))], **settings)


def test_parameters_are_found_by_their_places():
    params = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = DistributedFusedAdam([{"params": params[:1]}, {"params": params[1:]}])
    found = [optimizer.parameter(0, 0), optimizer.parameter(1, 0), optimizer.parameter(1, 1)]
    assert all(one is param for one, param in zip(found, params, strict=True))


def test_no_process_group_is_taken_for_one():
    with pytest.raises(TypeError, match="process_group is 'world': must be a torch.distributed.ProcessGroup"):
        DistributedFusedAdam([nn.Parameter(torch.ones(2))], process_group="world")
