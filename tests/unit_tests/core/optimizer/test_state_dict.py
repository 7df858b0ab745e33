"""State dicts of sharded Adam in one process: contents, loading, torch.optim's format and errors."""

import copy
import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.testing import assert_close

from megatron.core.dist_checkpointing.spread_tensor import SpreadTensor
from megatron.core.logical_tensors import disjoint_parts
from megatron.core.optimizer.adam import Masters, StateForm
from megatron.core.optimizer.state_dict import MASTERS, STEP, gather_torch_state_sync
from tests.counts import soak_only
from tests.unit_tests.core.optimizer.spread_adam import KINDS, SHAPES, SpreadAdam, any_state, make_params

MIXED = (torch.float32, torch.bfloat16, torch.float64)
FORMS = [
    StateForm(),
    StateForm(masters=Masters.REMAINDERS),
    StateForm(masters=Masters.NONE),
    StateForm(torch.float64),
    StateForm(torch.bfloat16),
    StateForm(torch.float16, is_scaled=True),
]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def spread(*dtypes: torch.dtype, params: list[nn.Parameter] | None = None, **settings) -> SpreadAdam:
    """Shards the parameters of make_params in two groups."""
    params = params or make_params(*dtypes)
    return SpreadAdam([params[:4], params[4:]], **settings)


@pytest.mark.parametrize("num_ranks", range(1, 6))
def test_ranks_together_have_every_element_once_and_the_same_keys(num_ranks: int) -> None:
    dicts = [spread(*MIXED, rank=rank, num_ranks=num_ranks).state_dict() for rank in range(num_ranks)]
    for index, shape in enumerate(SHAPES):
        assert all(one["state"][index].keys() == {STEP, *KINDS} for one in dicts)
        for kind in KINDS:
            values = [one["state"][index][kind] for one in dicts]
            assert {tuple(value.shape) for value in values} == {shape}
            boxes = [box for value in values if isinstance(value, SpreadTensor) for box in value.boxes]
            assert sum(box.volume for box in boxes) == torch.Size(shape).numel()
            assert len(disjoint_parts(boxes)) == len(boxes)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_what_is_loaded_is_held_as_exactly_as_the_form_can(form: StateForm) -> None:
    params = make_params(*MIXED)
    state = any_state(params)
    held = spread(*MIXED, form=form).fill(state).values()
    digits = 2.0 ** -{torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}[form.dtype]
    for index, param in enumerate(params):
        for kind in KINDS if param.numel() else ():
            wanted = state[index][kind]
            # Parameters without separate masters have the precision of their dtype.
            is_param = kind == MASTERS and form.masters is Masters.NONE
            least = {torch.bfloat16: 2.0**-8, torch.float64: 0.0}.get(param.dtype, 0.0) if is_param else digits
            # Values far below the largest one with the same scale lose precision.
            near = wanted.abs().max().item() * digits if form.is_scaled else 0.0
            assert_close(held[index][kind], wanted, rtol=least, atol=near, check_dtype=False, check_stride=False)


# Each form is loaded as two other forms, or as every form under `make soak`.
CONVERSIONS = [(number, (number + more) % len(FORMS)) for number in range(len(FORMS)) for more in range(len(FORMS))]


@pytest.mark.parametrize(
    ("saved_as", "loaded_as"),
    [
        (FORMS[one], FORMS[other]) if (other - one) % len(FORMS) in (1, 3) else soak_only(FORMS[one], FORMS[other])
        for one, other in CONVERSIONS
    ],
    ids=str,
)
def test_every_form_of_states_loads_every_other(tmp_path, saved_as: StateForm, loaded_as: StateForm) -> None:
    saved = spread(*MIXED, form=saved_as).fill(any_state(make_params(*MIXED)))
    loaded = spread(*MIXED, form=loaded_as, bucket_size=1024)
    saved.save(tmp_path)
    loaded.load(tmp_path)
    directly = spread(*MIXED, form=loaded_as).fill(saved.values()).values()
    assert len(spread(*MIXED, form=loaded_as).lacks(directly)) > len(SHAPES)
    assert loaded.lacks(directly) == []


@pytest.mark.parametrize("form", [FORMS[0], FORMS[1], FORMS[3]], ids=str)
def test_remainders_and_wide_masters_return_bit_for_bit(tmp_path, form: StateForm) -> None:
    dtypes = (torch.float32, torch.bfloat16)
    state = any_state(make_params(*dtypes))
    saved, loaded = spread(*dtypes, form=form).fill(state), spread(*dtypes, form=form)
    assert len(loaded.lacks(state)) > len(SHAPES)
    saved.save(tmp_path)
    loaded.load(tmp_path)
    assert loaded.lacks(state) == []


@pytest.mark.parametrize("made", ["pickle", "deep copy", "none"])
def test_a_copy_of_a_state_dict_loads_where_it_was_made(made: str) -> None:
    state = any_state(make_params(*MIXED))
    for rank in range(3):
        saved = spread(*MIXED, rank=rank, num_ranks=3).fill(state)
        state_dict = saved.state_dict()
        if made == "pickle":
            file = io.BytesIO()
            torch.save(state_dict, file)
            file.seek(0)
            state_dict = torch.load(file)
        if made == "deep copy":
            state_dict = copy.deepcopy(state_dict)
        if made != "none":
            saved.fill(any_state(make_params(*MIXED), seed=1))
        loaded = spread(*MIXED, rank=rank, num_ranks=3)
        loaded.load_state_dict(state_dict)
        assert loaded.lacks(state) == []


def test_a_pickle_has_this_ranks_elements_and_no_memory_around_them() -> None:
    saved = SpreadAdam([[nn.Parameter(torch.zeros(1000, 1000))]], rank=1, num_ranks=4, bucket_size=100_000)
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    assert file.tell() == pytest.approx(12 * 1_000_000 / 4, rel=0.05)


def test_a_state_dict_shows_what_its_owner_holds_until_something_is_loaded_into_it(tmp_path) -> None:
    first, second = (any_state(make_params(), seed=seed) for seed in (0, 1))
    saved, loaded = spread(), spread()
    state_dict = saved.state_dict()
    saved.fill(first)
    dcp.save({"optim": state_dict}, checkpoint_id=tmp_path)
    state_dict = loaded.fill(second).state_dict()
    dcp.load({"optim": state_dict}, checkpoint_id=tmp_path)
    assert loaded.lacks(second) == []
    loaded.load_state_dict(state_dict)
    assert loaded.lacks(first) == []


def test_a_checkpoint_that_does_not_fit_or_breaks_off_changes_nothing(tmp_path) -> None:
    saved, state = spread().fill(any_state(make_params())), any_state(make_params(), seed=1)
    dcp.save({"optim": saved.state_dict()}, checkpoint_id=tmp_path)
    params = make_params()
    params[1] = nn.Parameter(torch.zeros(65))
    with pytest.raises(CheckpointException, match=r"(?s)Size mismatch.*\[64\].*\[65\].*optim.state.1"):
        dcp.load({"optim": spread(params=params).state_dict()}, checkpoint_id=tmp_path)
    params = [*make_params(), nn.Parameter(torch.zeros(3))]
    with pytest.raises(CheckpointException, match="(?s)Missing key.*optim.state.9"):
        dcp.load({"optim": spread(params=params).state_dict()}, checkpoint_id=tmp_path)
    (data,) = tmp_path.glob("*.distcp")
    data.write_bytes(data.read_bytes()[: data.stat().st_size * 3 // 4])
    same = spread().fill(state)
    with pytest.raises(CheckpointException):
        dcp.load({"optim": same.state_dict()}, checkpoint_id=tmp_path)
    assert same.lacks(state) == []


def stepped(made: type[torch.optim.Adam], params: list[nn.Parameter], **settings) -> torch.optim.Adam:
    groups = [{"params": params[:4], "lr": 0.25}, {"params": params[4:], "betas": (0.5, 0.75)}]
    plain = made(groups, weight_decay=0.125, **settings)
    for _ in range(3):
        for param in params:
            param.grad = torch.randn_like(param)
        plain.step()
    return plain


@pytest.mark.parametrize("made", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("settings", [{}, {"fused": True, "lr": torch.tensor(0.5)}, {"foreach": True}], ids=str)
def test_a_state_goes_to_torchs_optimizers_and_back_bit_for_bit(made, settings) -> None:
    params = make_params(torch.float32, torch.float64)
    plain = stepped(made, params, **settings)
    is_adamw = made is torch.optim.AdamW
    ours = spread(params=params, adam_w_mode=is_adamw, form=StateForm(torch.float64))
    ours.load_state_dict(plain.state_dict())
    assert ours.lacks({i: {**plain.state[param], MASTERS: param} for i, param in enumerate(params)}) == []
    assert [group["lr"] for group in ours.param_groups] == [0.25, settings.get("lr", 1e-3)]
    assert [group["betas"] for group in ours.param_groups] == [(0.9, 0.999), (0.5, 0.75)]
    back = gather_torch_state_sync(ours.shard)
    again = made([{"params": params[:4]}, {"params": params[4:]}])
    again.load_state_dict(back)
    for param in params:
        for kind, value in plain.state[param].items() if param.numel() else ():
            assert torch.equal(again.state[param][kind], value), kind
            assert kind == STEP or again.state[param][kind].stride() == param.stride()
    # The loaded optimizer must be able to step.
    again.step()


def test_torchs_optimizer_loads_our_checkpoint_and_we_load_its(tmp_path) -> None:
    params = make_params()
    plain, ours = stepped(torch.optim.AdamW, params), spread(params=params)
    dcp.save({"optim": plain.state_dict()}, checkpoint_id=tmp_path / "plain")
    state_dict = ours.state_dict()
    # Torch's optimizer has no masters, so a partial load keeps ours.
    partial = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load({"optim": state_dict}, checkpoint_id=tmp_path / "plain", planner=partial)
    for entry in state_dict["state"].values():
        del entry[MASTERS]
    ours.load_state_dict(state_dict)
    assert ours.lacks({i: {**plain.state[param], MASTERS: param} for i, param in enumerate(params)}) == []
    dcp.save({"optim": ours.state_dict()}, checkpoint_id=tmp_path / "ours")
    again = stepped(torch.optim.AdamW, params)
    state_dict = again.state_dict()
    dcp.load({"optim": state_dict}, checkpoint_id=tmp_path / "ours")
    again.load_state_dict(state_dict)
    for param in params:
        for kind, value in plain.state[param].items() if param.numel() else ():
            assert torch.equal(again.state[param][kind], value), kind
    assert again.param_groups[1]["betas"] == (0.5, 0.75)


def test_what_is_frozen_has_no_state_as_in_torch(tmp_path) -> None:
    params = make_params()
    for param in (params[1], params[3], params[5]):
        param.requires_grad_(False)
    trained = [param for param in params if param.requires_grad]
    whole = any_state(params)
    numbers = [index for index, param in enumerate(params) if param.requires_grad]
    state = {index: whole[index] for index in numbers}
    # Frozen parameters belong to a group, but to no buffer.
    ours, again = (spread(params=params) for _ in range(2))
    ours.fill(state)
    assert [*ours.state_dict()["state"]] == numbers
    ours.save(tmp_path)
    again.load(tmp_path)
    assert again.lacks(whole) == [] and len(trained) == len(numbers)
    plain = torch.optim.AdamW([{"params": params[:4]}, {"params": params[4:]}])
    plain.load_state_dict(gather_torch_state_sync(ours.shard))
    assert {*plain.state} == {*trained}
    again.load_state_dict(plain.state_dict())
    # State of parameters that are frozen now, but were trained before, is not required.
    again.fill(whole)
