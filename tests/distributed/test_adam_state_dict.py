"""Tests state dicts of SpreadAdam: loading on any number of ranks, replicas that write once, and peak memory."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from megatron.core.optimizer.adam import Masters, StateForm
from megatron.core.optimizer.state_dict import MASTERS, gather_torch_state_sync
from tests.counts import slow, soak_only
from tests.distributed.profiled_memory import peak_bytes
from tests.harness import run_on_ranks
from tests.unit_tests.core.optimizer.spread_adam import KINDS, SpreadAdam, any_state, make_params

DTYPES = (torch.float32, torch.bfloat16)
REMAINDERS = StateForm(masters=Masters.REMAINDERS)
HALF = StateForm(torch.float16, is_scaled=True)


def spread(params=None, *, replicas=1, **settings):
    """Builds this rank's part.

    The ranks form a grid whose columns are `replicas` that own the same elements.
    """
    params = make_params(*DTYPES) if params is None else params
    num_ranks = dist.get_world_size() // replicas
    where = {"rank": dist.get_rank() % num_ranks, "num_ranks": num_ranks, "process_group": dist.group.WORLD}
    return SpreadAdam([params[:4], params[4:]], **where, **settings)


def few():
    """Returns seven numbers, which one rank owns entirely; the second group has no parameters."""
    return [nn.Parameter(torch.arange(7.0))]


def save(folder):
    spread().fill(any_state(make_params(*DTYPES))).save(folder / "all")
    spread(few()).fill(any_state(few())).save(folder / "few")


def load(folder):
    for form in (StateForm(), REMAINDERS):
        loaded = spread(form=form, bucket_size=600)
        loaded.load(folder / "all")
        assert loaded.lacks(any_state(make_params(*DTYPES))) == []
    loaded = spread(few())
    loaded.load(folder / "few")
    assert loaded.lacks(any_state(few())) == []
    return len(loaded.ranges)


@pytest.mark.slow
@pytest.mark.parametrize(("writers", "readers"), [(1, 3), (3, 2), soak_only(2, 5), soak_only(4, 1), soak_only(5, 4)])
def test_any_number_of_ranks_loads_what_any_other_number_saved(tmp_path, writers, readers):
    run_on_ranks(save, writers, tmp_path)
    # Ranks that own nothing take part in saving and loading.
    assert run_on_ranks(load, readers, tmp_path) == [1] + [0] * (readers - 1)


def save_and_load_replicas(folder, saved_as, loaded_as):
    saved = spread(replicas=2, form=saved_as).fill(any_state(make_params(*DTYPES)))
    saved.save(folder)
    loaded = spread(replicas=2, form=loaded_as)
    loaded.load(folder)
    alone = SpreadAdam(loaded.groups, rank=0, num_ranks=1, form=saved_as)
    alone.load(folder, no_dist=True)
    directly = spread(replicas=2, form=loaded_as).fill(alone.values())
    assert loaded.lacks(directly.values()) == []
    return sum(part.range.span.numel for part in saved.ranges)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved_as", "loaded_as"), [(StateForm(), HALF), slow(HALF, REMAINDERS), slow(REMAINDERS, StateForm())]
)
def test_replicas_write_each_element_once_and_share_the_work(tmp_path, saved_as, loaded_as):
    owned = run_on_ranks(save_and_load_replicas, 4, tmp_path, saved_as, loaded_as)
    assert owned[:2] == owned[2:]
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    chunks = [entry.chunks for key, entry in metadata.state_dict_metadata.items() if key.split(".")[-1] in KINDS]
    numel = sum(param.numel() for param in make_params())
    assert sum(chunk.sizes.numel() for chunks in chunks for chunk in chunks) == 3 * numel
    sizes = [path.stat().st_size for path in tmp_path.glob("*.distcp")]
    assert len(sizes) == 4 and max(sizes) < 0.4 * sum(sizes)


def gather(folder, replicas):
    params = make_params(torch.float32)
    ours = spread(params, replicas=replicas).fill(any_state(params))
    gathered = gather_torch_state_sync(ours.shard)
    if dist.get_rank() == 0:
        torch.save(gathered, folder / "gathered.pt")
    dist.barrier()
    # Every rank loads the whole state now, as a user would.
    loaded = spread(params, replicas=replicas)
    loaded.load_state_dict(torch.load(folder / "gathered.pt"))
    assert loaded.lacks({index: {**entry, MASTERS: params[index]} for index, entry in any_state(params).items()}) == []
    return gathered is None


@pytest.mark.parametrize(("ranks", "replicas"), [(3, 1), (4, 2)])
def test_rank_0_gathers_what_torchs_adamw_loads(tmp_path, ranks, replicas):
    assert run_on_ranks(gather, ranks, tmp_path, replicas) == [False] + [True] * (ranks - 1)
    params, state = make_params(torch.float32), any_state(make_params(torch.float32))
    plain = torch.optim.AdamW([{"params": params[:4]}, {"params": params[4:]}])
    plain.load_state_dict(torch.load(tmp_path / "gathered.pt"))
    for index, param in enumerate(params):
        for kind, value in plain.state[param].items() if param.numel() else ():
            assert torch.equal(value, state[index][kind])


def load_what_only_rank_1_cannot():
    ours, before = spread(), any_state(make_params(*DTYPES), seed=1)
    ours.fill(before)
    state_dict = {**ours.state_dict(), "state": any_state(make_params(*DTYPES))}
    if dist.get_rank() == 1:
        state_dict["state"][4]["exp_avg"] = torch.zeros(2, 3, 4, 5)
    with pytest.raises((ValueError, RuntimeError)) as error:
        ours.load_state_dict(state_dict)
    assert ours.lacks(before) == []
    return f"{type(error.value).__name__}: {error.value}"


def test_what_one_rank_cannot_load_no_rank_loads():
    said = (
        "exp_avg of parameter 4 [2, 3, 5, 4] has shape [2, 3, 4, 5] and dtype torch.float32: must be [2, 3, 5, 4], "
        "floating point"
    )
    assert run_on_ranks(load_what_only_rank_1_cannot, 3) == [
        f"RemoteRankError: rank 1: {said}",
        f"ValueError: {said}",
        f"RemoteRankError: rank 1: {said}",
    ]


def save_while_training_goes_on(folder, form):
    saved = spread(form=form).fill(any_state(make_params(*DTYPES)))
    kept = {index: {kind: value.clone() for kind, value in entry.items()} for index, entry in saved.values().items()}
    # A separate group: the saving thread must not mix its collectives with ours.
    group = dist.new_group(backend="gloo")
    response = dcp.async_save({"optim": saved.state_dict()}, checkpoint_id=folder, process_group=group)
    # Updates made during the save must not be saved.
    saved.fill(any_state(make_params(*DTYPES), seed=1))
    response.result()
    loaded = spread(form=form)
    loaded.load(folder)
    return loaded.lacks(kept)


@pytest.mark.parametrize("form", [StateForm(), HALF], ids=str)
def test_a_save_in_the_background_has_what_was_there_when_it_was_asked_for(tmp_path, form):
    assert run_on_ranks(save_while_training_goes_on, 2, tmp_path, form, backend="cpu:gloo") == [[], []]


SIZES = [(1024, 1024), (1000, 700), (3, 333_333), (256, 128, 3, 3)]


def large():
    params = [nn.Parameter(torch.zeros(size)) for size in SIZES]
    params[3].data = params[3].data.contiguous(memory_format=torch.channels_last)
    return params


def save_and_load_large(folder, form, also_read):
    held = spread(large(), bucket_size=400_000, form=form)
    loading = [partial(held.load, source) for source in (folder, also_read) if source is not None]
    return [peak_bytes(call) for call in (partial(held.save, folder), *loading)]


# Saving and loading split every form into boxes in the same way, so HALF, which has more parts, covers fp32 too.
@pytest.mark.slow
@pytest.mark.parametrize("form", [soak_only(StateForm()), slow(HALF)], ids=str)
def test_no_rank_holds_all_at_any_moment(tmp_path, form):
    everything = 3 * 4 * sum(torch.Size(size).numel() for size in SIZES)
    run_on_ranks(save_and_load_large, 1, tmp_path / "1", form, None)
    for saving, *loading in run_on_ranks(save_and_load_large, 4, tmp_path / "4", form, tmp_path / "1"):
        # One box at a time, and the plans of all ranks.
        assert 0.01 * everything < saving < 0.12 * everything
        for peak in loading:
            # The rank's loaded values, in addition to its state until loading is complete, and one saved box.
            assert 0.2 * everything < peak < 0.4 * everything
