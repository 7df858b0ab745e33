"""Tests that DistributedFusedAdam resumes bitwise from checkpoints, with any number of ranks and in any form."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from megatron.core.dist_checkpointing.spread_tensor import SpreadTensor
from megatron.core.group_collectives import RemoteRankError
from megatron.core.optimizer import DistributedFusedAdam
from tests.counts import slow, soak_only
from tests.distributed.profiled_memory import peak_bytes
from tests.harness import run_on_ranks

BEFORE, STEPS = 2, 4
RATES = {"lr": 0.01, "betas": (0.75, 0.5), "eps": 1e-6, "weight_decay": 0.125}
PLAIN = {}
REMAINDERS = {"store_params": False, "store_param_remainders": True}
SCALED = {"dtype": torch.float16, "with_scaled_states": True}
OWN_MEMORY = {"contiguous_param_buffer": False}
OVERLAPPED = {"overlap_param_sync": True}


class Net(nn.Module):
    """Convolutions in channels_last, a transposed weight, a scalar, an empty parameter, and a frozen layer."""

    def __init__(self, dtype=torch.float32, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(3, 7, 3).to(memory_format=torch.channels_last)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.out = nn.Linear(9, 21)
        self.out.weight = nn.Parameter(torch.randn(9, 21).t())
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.big = nn.Parameter(torch.randn(40, 33))
        self.to(dtype)

    def groups(self):
        """Returns parameter groups without weight decay for parameters of at most one dimension."""
        params = list(self.parameters())
        return [
            {"params": [param for param in params if param.dim() > 1]},
            {"params": [param for param in params if param.dim() <= 1], "weight_decay": 0.0, "lr": 0.02},
        ]


class Run:
    """A model and its optimizer, with small buckets so that ranks share each parameter."""

    def __init__(self, param_dtype=torch.float32, *, seed=0, **settings):
        self.model = Net(param_dtype, seed)
        self.optimizer = DistributedFusedAdam(
            self.model.groups(), **RATES, bucket_cap_mb=1024 / 2**20, average_grad_sync=False, **settings
        )

    def train(self, first, end):
        for step in range(first, end):
            self.optimizer.zero_grad()
            self.optimizer.wait_params(self.model.parameters())
            for number, param in enumerate(self.model.parameters()):
                if param.requires_grad:
                    # Only rank 0 has a gradient, so that the sum is bitwise equal for any number of ranks.
                    param.grad = gradient(param, step, number) if rank() == 0 else torch.zeros_like(param)
            self.optimizer.step()
        self.optimizer.wait_params(self.model.parameters())
        return self

    def save(self, folder):
        dcp.save({"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}, checkpoint_id=folder)

    def load(self, folder):
        both = {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}
        dcp.load(both, checkpoint_id=folder)
        self.model.load_state_dict(both["model"])
        self.optimizer.load_state_dict(both["optim"])
        return self

    def values(self):
        return [param.detach().clone() for param in self.model.parameters()]


def gradient(param, step, number):
    made = torch.Generator().manual_seed(100 * step + number)
    return torch.randn(param.shape, generator=made).to(param)


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def differing(ones, others):
    return [number for number, (one, other) in enumerate(zip(ones, others, strict=True)) if not torch.equal(one, other)]


def save_half_way(folder, cases):
    for name, (dtype, settings, _) in cases.items():
        Run(dtype, **settings).train(0, BEFORE).save(folder / name)


def go_on(folder, cases):
    for name, (dtype, settings, loaded_as) in cases.items():
        through = Run(dtype, **settings).train(0, BEFORE)
        half, whole = through.values(), through.train(BEFORE, STEPS).values()
        run = Run(dtype, seed=1, **loaded_as)
        assert len(differing(run.values(), half)) > 5, name
        run.load(folder / name)
        run.optimizer.wait_params(run.model.parameters())
        assert differing(run.values(), half) == [], name
        assert differing(run.train(BEFORE, STEPS).values(), whole) == [], name
        assert run.optimizer.param_groups[1]["lr"] == 0.02


# (parameter dtype, settings when saving, settings when loading)
CASES = {
    "plain": (torch.float32, PLAIN, PLAIN),
    "overlapped": (torch.float32, OVERLAPPED, OVERLAPPED),
    "own memory": (torch.float32, OWN_MEMORY, PLAIN),
    "copies": (torch.bfloat16, PLAIN, OWN_MEMORY),
    "doubles": (torch.float64, PLAIN, PLAIN),
    "scaled": (torch.bfloat16, SCALED, SCALED),
    "remainders": (torch.bfloat16, REMAINDERS, REMAINDERS),
}


# All forms are loaded by one more rank than saved them; forms whose parts differ in size, also by fewer.
SOME = {name: CASES[name] for name in ("plain", "scaled", "remainders")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("writers", "readers", "cases"),
    [
        slow(2, 3, CASES),
        (3, 1, SOME),
        *(soak_only(*ranks, CASES) for ranks in ((1, 2), (3, 1), (4, 5), (5, 4))),
    ],
)
def test_training_goes_on_bit_for_bit_at_another_number_of_ranks(tmp_path, writers, readers, cases):
    run_on_ranks(save_half_way, writers, tmp_path, cases)
    run_on_ranks(go_on, readers, tmp_path, cases)


def boxes(optimizer):
    """Returns this rank's state by parameter, kind and box."""
    state = optimizer.state_dict()["state"]
    values = [(i, kind, value) for i, entry in state.items() for kind, value in entry.items()]
    spread = [(i, kind, value) for i, kind, value in values if isinstance(value, SpreadTensor)]
    return {(i, kind, box): value.read(box).clone() for i, kind, value in spread for box in value.boxes}


def change_form(folder, saved_as, loaded_as):
    saved = Run(torch.bfloat16, **saved_as).train(0, BEFORE)
    saved.save(folder)
    loaded = Run(torch.bfloat16, seed=1, **loaded_as).load(folder)
    for run in (saved, loaded):
        run.train(BEFORE, STEPS)
    ours, theirs = boxes(saved.optimizer), boxes(loaded.optimizer)
    assert ours.keys() == theirs.keys() and len(ours) > 10
    return [key for key, value in ours.items() if not torch.equal(value, theirs[key])]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved_as", "loaded_as"), [(PLAIN, REMAINDERS), (REMAINDERS, PLAIN), (REMAINDERS, OWN_MEMORY), (OVERLAPPED, PLAIN)]
)
def test_masters_of_fp32_go_on_with_the_same_bits_however_they_are_kept(tmp_path, saved_as, loaded_as):
    assert run_on_ranks(change_form, 2, tmp_path, saved_as, loaded_as) == [[], []]


def grid():
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return {
        "process_group": dist.group.WORLD,
        "distributed_process_group": pairs[rank() // 2],
        "redundant_process_group": columns[rank() % 2],
    }


def go_on_in_a_grid(folder, other):
    settings = grid()
    Run(**settings).train(0, BEFORE).save(folder)
    for source in (folder, other):
        whole = Run(**settings).train(0, STEPS).values()
        assert differing(Run(seed=1, **settings).load(source / "").train(BEFORE, STEPS).values(), whole) == []


@pytest.mark.slow
def test_a_grid_with_copies_goes_on_from_its_own_checkpoints_and_from_those_of_one_rank(tmp_path):
    run_on_ranks(save_half_way, 1, tmp_path, {"one": (torch.float32, PLAIN, PLAIN)})
    run_on_ranks(go_on_in_a_grid, 4, tmp_path / "grid", tmp_path / "one")
    run_on_ranks(go_on, 1, tmp_path, {"grid": (torch.float32, PLAIN, PLAIN)})


def go_on_as_plain_adamw(folder, is_adamw):
    """Moves the state from torch's optimizer to ours and back, and trains both after each move."""
    made = torch.optim.AdamW if is_adamw else torch.optim.Adam
    plain, run = Net(), Run(seed=1, adam_w_mode=is_adamw)
    optimizer = made(plain.groups(), fused=True, **RATES)
    train_plain(plain, optimizer, 0, BEFORE)
    run.model.load_state_dict(plain.state_dict())
    run.optimizer.load_state_dict(optimizer.state_dict())
    assert differing(run.values(), plain.parameters()) == []
    train_plain(plain, optimizer, BEFORE, STEPS)
    run.train(BEFORE, STEPS)
    assert differing(run.values(), plain.parameters()) == []
    gathered = run.optimizer.state_dict(state_dict_format="torch")
    assert (gathered is None) == (rank() != 0)
    if gathered is not None:
        again = made(plain.groups(), fused=True)
        again.load_state_dict(gathered)
        for param, state in optimizer.state.items():
            assert param.numel() == 0 or all(torch.equal(state[kind], again.state[param][kind]) for kind in state)
        assert again.param_groups[1]["lr"] == 0.02 and again.param_groups[0]["betas"] == RATES["betas"]


def train_plain(model, optimizer, first, end):
    for step in range(first, end):
        for number, param in enumerate(model.parameters()):
            if param.requires_grad:
                # torch's fused kernels read a gradient in memory order, ignoring its strides.
                param.grad = torch.empty_like(param).copy_(gradient(param, step, number))
        optimizer.step()


# The cases of `make test` cover both optimizers, one rank and several ranks.
@pytest.mark.parametrize(("ranks", "is_adamw"), [(1, True), (3, False), soak_only(1, False), soak_only(3, True)])
def test_torchs_adamw_and_adam_hand_over_to_us_and_take_over_bit_for_bit(tmp_path, ranks, is_adamw):
    run_on_ranks(go_on_as_plain_adamw, ranks, tmp_path, is_adamw)


def moment_gathered_in_a_group():
    """Returns exp_avg from a torch state dict, for a parameter that only the last two of three ranks step."""
    group = dist.new_group([1, 2])
    if rank() == 0:
        return None
    optimizer = DistributedFusedAdam([param := nn.Parameter(torch.ones(200))], **RATES, process_group=group)
    param.grad = torch.arange(200.0)
    optimizer.step()
    gathered = optimizer.state_dict(state_dict_format="torch")
    return None if gathered is None else gathered["state"][0]["exp_avg"]


def test_the_first_rank_of_a_group_gathers_its_state_for_torch_whatever_its_rank_of_all():
    outside, first, second = run_on_ranks(moment_gathered_in_a_group, 3, timeout=60)
    assert outside is None and second is None
    assert torch.equal(first, 0.25 * torch.arange(200.0))


def save_by_names(folder):
    run = Run().train(0, BEFORE)
    run.optimizer.zero_grad()
    before = boxes(run.optimizer)
    model, optimizer = get_state_dict(run.model, run.optimizer)
    # torch steps optimizers without state here, but must not step this one.
    after = boxes(run.optimizer)
    assert after.keys() == before.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert "conv.weight" in optimizer["state"]
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=folder)


def load_by_names(folder):
    whole, run = Run().train(0, STEPS).values(), Run(seed=1)
    model, optimizer = get_state_dict(run.model, run.optimizer)
    dcp.load({"model": model, "optim": optimizer}, checkpoint_id=folder)
    set_state_dict(run.model, run.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    return differing(run.train(BEFORE, STEPS).values(), whole)


@pytest.mark.slow
def test_torchs_state_dicts_by_name_take_it_as_any_optimizer(tmp_path):
    run_on_ranks(save_by_names, 3, tmp_path)
    assert run_on_ranks(load_by_names, 2, tmp_path) == [[], []]


def refuse(folder):
    run = Run().train(0, BEFORE)
    before, values = boxes(run.optimizer), run.values()
    state_dict = Run(seed=1).optimizer.state_dict()
    if rank() == 1:
        state_dict["param_groups"][1]["lr"] = None
    errors = []
    for wrong in (state_dict, {"state": {}, "param_groups": []}):
        with pytest.raises((ValueError, RuntimeError)) as error:
            run.optimizer.load_state_dict(wrong)
        errors.append(f"{type(error.value).__name__}: {error.value}")
    after = boxes(run.optimizer)
    assert all(torch.equal(before[key], after[key]) for key in before) and differing(run.values(), values) == []
    assert differing(run.train(BEFORE, STEPS).values(), Run().train(0, STEPS).values()) == []
    return errors


@pytest.mark.slow
def test_what_cannot_be_loaded_is_refused_on_all_ranks_and_training_goes_on(tmp_path):
    lr = "param group 1 of the state dict has lr None: must be a number"
    empty = "ValueError: param_groups of the state dict have [] parameters: must be [5, 4], as in this optimizer"
    other = [f"RemoteRankError: rank 1: {lr}", empty]
    assert run_on_ranks(refuse, 3, tmp_path) == [other, [f"ValueError: {lr}", empty], other]


def unfreeze_late(folder):
    def made():
        run = Run()
        run.model.big.requires_grad_(False)
        return run

    def train(run):
        # Step counts are stored per parameter.
        run.train(0, BEFORE).model.big.requires_grad_(True)
        return run.train(BEFORE, STEPS)

    train(made()).save(folder)
    whole = train(made()).train(STEPS, STEPS + 2).values()
    together = Run()
    with pytest.raises((ValueError, RuntimeError), match="must be equal.*Call init_params separately for"):
        together.load(folder)
    apart = Run()
    apart.optimizer.init_params([apart.model.big])
    return differing(apart.load(folder).train(STEPS, STEPS + 2).values(), whole)


@pytest.mark.slow
def test_parameters_that_came_late_go_on_with_their_own_count_of_steps(tmp_path):
    assert run_on_ranks(unfreeze_late, 2, tmp_path) == [[], []]


def save_each_rank(folder):
    lr = torch.tensor(0.5)
    saved = Run(capturable=True).train(0, BEFORE)
    torch.save((saved.model.state_dict(), saved.optimizer.state_dict()), folder / f"{rank()}.pt")
    loaded = Run(seed=1, capturable=True)
    rates = loaded.optimizer.param_groups[1]["lr"]
    rates.copy_(lr)
    model, optimizer = torch.load(folder / f"{rank()}.pt")
    loaded.model.load_state_dict(model)
    loaded.optimizer.load_state_dict(optimizer)
    # Graphs read the same memory in every replay.
    assert loaded.optimizer.param_groups[1]["lr"] is rates and rates == torch.tensor(0.02)
    return differing(loaded.train(BEFORE, STEPS).values(), saved.train(BEFORE, STEPS).values())


def test_each_rank_can_save_its_own_part_for_the_same_ranks(tmp_path):
    assert run_on_ranks(save_each_rank, 3, tmp_path) == [[], [], []]


def load_what_others_hold(folder):
    """Returns the peak memory of saving and of loading, relative to the bytes of all ranks' states."""
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 600), nn.Linear(600, 1024)).bfloat16()
    optimizer = DistributedFusedAdam(model.parameters(), bucket_cap_mb=1)
    optimizer.init_params()
    peaks = [peak_bytes(lambda: dcp.save({"optim": optimizer}, checkpoint_id=folder))]
    peaks += [peak_bytes(lambda: dcp.load({"optim": optimizer}, checkpoint_id=folder))]
    everything = 12 * sum(param.numel() for param in model.parameters())
    return [peak / everything for peak in peaks]


@pytest.mark.slow
def test_no_rank_holds_the_states_of_all_while_it_saves_or_loads(tmp_path):
    for saving, loading in run_on_ranks(load_what_others_hold, 4, tmp_path):
        assert saving < 0.15 and 0.2 < loading < 0.4


def _trained():
    torch.manual_seed(5)
    module = nn.Linear(5, 2)
    optimizer = DistributedFusedAdam(module.parameters(), lr=0.01)
    module(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    return module, optimizer


def _odd_on_one_rank():
    """Tests each way in which the last rank's state dict may differ from the other ranks'."""
    _, trained = _trained()
    good = trained.state_dict()
    odd = {
        "nothing": None,
        "a list": [],
        "no order": {key: value for key, value in good.items() if key != "order"},
        "another order": {**good, "order": [[1], [0]]},
        "words for an order": {**good, "order": "01"},
        "no state": {key: value for key, value in good.items() if key != "state"},
        "no groups": {key: value for key, value in good.items() if key != "param_groups"},
        "groups of another kind": {**good, "param_groups": None},
        "entries of another kind": {**good, "state": {**good["state"], 0: None}},
        "a missing entry": {**good, "state": {0: good["state"][0]}},
        "a step that is text": {**good, "state": {**good["state"], 0: {**good["state"][0], "step": "1"}}},
    }
    last = dist.get_rank() == dist.get_world_size() - 1
    for name, given in odd.items():
        torch.manual_seed(6)
        module = nn.Linear(5, 2)
        before = [param.detach().clone() for param in module.parameters()]
        optimizer = DistributedFusedAdam(module.parameters(), lr=0.02)
        with pytest.raises((ValueError, TypeError) if last else (ValueError, RemoteRankError)):
            optimizer.load_state_dict(given if last else good)
        dist.barrier()  # no rank may still wait in a collective
        assert all(torch.equal(param, value) for param, value in zip(module.parameters(), before)), name
        assert optimizer.param_groups[0]["lr"] == 0.02, name
        optimizer.load_state_dict(good)
        assert optimizer.param_groups[0]["lr"] == 0.01, name


def test_a_state_dict_that_one_rank_lacks_is_an_error_of_all_and_changes_nothing():
    run_on_ranks(_odd_on_one_rank, 2)


def test_hooks_of_state_dicts_are_called_as_torchs_optimizers_call_them():
    _, optimizer = _trained()
    calls = []
    optimizer.register_state_dict_pre_hook(lambda own: calls.append("saves"))
    optimizer.register_state_dict_post_hook(lambda own, state: {**state, "extra": 7})
    optimizer.register_load_state_dict_pre_hook(
        lambda own, state: calls.append("loads") or {key: value for key, value in state.items() if key != "extra"}
    )
    optimizer.register_load_state_dict_post_hook(lambda own: calls.append("loaded"))
    saved = optimizer.state_dict()
    assert saved["extra"] == 7 and optimizer.state_dict(state_dict_format="torch")["extra"] == 7
    optimizer.load_state_dict(saved)
    assert calls == ["saves", "saves", "loads", "loaded"]


@pytest.mark.parametrize("is_scaled", [False, True])
def test_hooks_of_steps_are_called_once_with_a_scaler_too(is_scaled):
    module, optimizer = _trained()
    calls = []
    optimizer.register_step_pre_hook(lambda own, args, kwargs: calls.append(("before", len(args), kwargs)))
    optimizer.register_step_post_hook(lambda own, args, kwargs: calls.append(("after", len(args), kwargs)))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer.zero_grad()
    scaler.scale(module(torch.ones(1, 5)).sum()).backward()
    optimizer.step(grad_scaler=scaler) if is_scaled else scaler.step(optimizer)
    assert calls == [("before", 1, {}), ("after", 1, {})]
