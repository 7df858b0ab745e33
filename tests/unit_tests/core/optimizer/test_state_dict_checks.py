"""State dicts that sharded Adam cannot load raise descriptive errors and change nothing; hyperparameters of groups."""

import pytest
import torch

from megatron.core.optimizer.adam import EXP_AVG, EXP_AVG_SQ
from megatron.core.optimizer.state_dict import MASTERS, STEP, gather_torch_state_sync
from tests.unit_tests.core.optimizer.spread_adam import SpreadAdam, any_state, make_params


def spread() -> SpreadAdam:
    params = make_params()
    made = SpreadAdam([params[:4], params[4:]])
    made.param_groups[1]["param_names"] = ["conv", "out", "deep", "wide", "bias"]
    return made


def of_torch(state_dict: dict) -> None:
    for entry in state_dict["state"].values():
        del entry[MASTERS]


# (defect, function that causes it, error message)
WRONG = [
    ("no dict", lambda d: d.clear(), r"state_dict is \[\]: must contain 'state' and 'param_groups', on every rank"),
    ("a group", lambda d: d["param_groups"].pop(), r"have \[4\] parameters: must be \[4, 5\]"),
    ("sizes", lambda d: d["param_groups"][0]["params"].pop(), r"have \[3, 5\] parameters: must be \[4, 5\]"),
    ("no params", lambda d: d["param_groups"][1].pop("params"), "group 1 .* is {.*}: must be a dict with 'params'"),
    ("no lr", lambda d: d["param_groups"][1].pop("lr"), r"group 1 of the state dict has lr None: must be a number"),
    ("betas", lambda d: d["param_groups"][0].update(betas=0.9), "group 0 .* has betas 0.9: must be two numbers"),
    ("amsgrad", lambda d: d["param_groups"][1].update(amsgrad=True), "group 1 .* has amsgrad True: must be False"),
    (
        "decay",
        lambda d: d["param_groups"][1].update(decoupled_weight_decay=False),
        "decoupled_weight_decay False with weight_decay 0.1: must be True, like adam_w_mode",
    ),
    (
        "entry",
        lambda d: d["state"].pop(5),
        r"state lacks parameter 5 out \[6, 9\]: must contain its \['exp_avg', 'exp_avg_sq'",
    ),
    ("more", lambda d: d["state"].update({9: {}}), "state contains key 9: must be one of the 9 parameters"),
    ("kind", lambda d: d["state"][4].pop(EXP_AVG), r"parameter 4 conv \[2, 3, 5, 4\] has \['exp_avg_sq', 'fp32_param'"),
    ("masters", lambda d: d["state"][0].pop(MASTERS), r"parameter 0 \[7, 5\] has \['exp_avg', 'exp_avg_sq', 'step'\]"),
    ("max", lambda d: d["state"][0].update(max_exp_avg_sq=0), r"parameter 0 \[7, 5\] has .*'max_exp_avg_sq'.*: must"),
    (
        "shape",
        lambda d: d["state"][5].update(exp_avg=torch.zeros(9, 6)),
        r"exp_avg of parameter 5 out \[6, 9\] has shape \[9, 6\] and dtype torch.float32: must be",
    ),
    (
        "step",
        lambda d: d["state"][5].update(step=torch.ones(1)),
        r"step of .* 5 out \[6, 9\] has shape \[1\].*must be \[\]",
    ),
    (
        "dtype",
        lambda d: d["state"][1].update(exp_avg=torch.ones(64).int()),
        "exp_avg of .* torch.int32: must be .* floating point",
    ),
    ("type", lambda d: d["state"][1].update(exp_avg=[0.0] * 64), r"exp_avg of parameter 1 \[64\] is a list: must be"),
    (
        "steps",
        lambda d: d["state"][0].update(step=torch.tensor(8.0)),
        r"step of parameter [01] is [78] and step of parameter [01] is [78]: must be equal for parameters",
    ),
    (
        "another rank's",
        lambda d: d["state"].update(SpreadAdam([make_params()], rank=1, num_ranks=2).state_dict()["state"]),
        r"of parameter \d \[.*\] lacks \d+ elements that this rank owns: it was saved by one rank of a "
        "different layout. Use torch.distributed.checkpoint",
    ),
]


@pytest.mark.parametrize(("spoil", "message"), [pytest.param(*case[1:], id=case[0]) for case in WRONG])
def test_what_cannot_be_loaded_is_named_and_changes_nothing(spoil, message: str) -> None:
    ours, before = spread(), any_state(make_params(), seed=1)
    ours.fill(before)
    state_dict = {**ours.state_dict(), "state": any_state(make_params())}
    for group in state_dict["param_groups"]:
        group["lr"] = 99.0
    spoil(state_dict)
    with pytest.raises(ValueError, match=message):
        ours.load_state_dict(state_dict)
    assert ours.lacks(before) == []
    assert [group["lr"] for group in ours.param_groups] == [1e-3, 1e-3]


def test_a_state_of_torch_before_its_first_step_is_a_start() -> None:
    ours = spread().fill(any_state(make_params()))
    params = [param for params in ours.groups for param in params]
    plain = torch.optim.AdamW([{"params": ours.groups[0]}, {"params": ours.groups[1]}], lr=0.5)
    ours.load_state_dict(plain.state_dict())
    zeros = {STEP: torch.zeros(())}
    start = {EXP_AVG: torch.zeros_like, EXP_AVG_SQ: torch.zeros_like, MASTERS: torch.Tensor.detach}
    assert ours.lacks({i: {**zeros, **{k: of(p) for k, of in start.items()}} for i, p in enumerate(params)}) == []
    assert ours.param_groups[1]["lr"] == 0.5


def test_numbers_of_parameters_are_those_of_the_saved_groups() -> None:
    """As in torch, a parameter is identified by its place in the groups, whatever its number."""
    state = any_state(make_params())
    ours = spread()
    state_dict = ours.state_dict()
    state_dict["state"] = {100 - index: entry for index, entry in state.items()}
    for group in state_dict["param_groups"]:
        group["params"] = [100 - number for number in group["params"]]
    ours.load_state_dict(state_dict)
    assert ours.lacks(state) == []


def test_hyper_parameters_return_and_tensors_keep_their_memory() -> None:
    saved, loaded = spread(), spread()
    saved.param_groups[0].update(lr=torch.tensor(0.25, dtype=torch.float64), betas=(0.5, 0.75), initial_lr=0.5)
    saved.param_groups[1].update(lr=0.125, weight_decay=0.0, eps=1e-4, bias_correction=False)
    rate = loaded.param_groups[1]["lr"] = torch.zeros((), dtype=torch.float64)
    state_dict = saved.state_dict()
    # Plain numbers load equally into optimizers with and without tensor learning rates.
    assert state_dict["param_groups"][0]["lr"] == 0.25 and type(state_dict["param_groups"][0]["lr"]) is float
    loaded.load_state_dict(state_dict)
    assert loaded.param_groups[1]["lr"] is rate and rate == 0.125
    wanted = [{**group, "params": ours["params"]} for group, ours in zip(saved.param_groups, loaded.param_groups)]
    assert loaded.param_groups == wanted
    with pytest.raises(ValueError, match="bias_correction of param group 1 is False: must be True for torch.optim"):
        gather_torch_state_sync(saved.shard)
