"""State dicts of DistributedFusedAdam that an earlier commit wrote go on bit for bit. See stored_runs/README.md."""

import tarfile
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing.spread_tensor import SpreadTensor
from megatron.core.logical_tensors import whole
from megatron.core.optimizer.adam import EXP_AVG, EXP_AVG_SQ
from megatron.core.optimizer.state_dict import MASTERS, STEP
from tests.harness import run_on_ranks
from tests.stored_runs.fused_adam import ARCHIVE, CASES, RANKS, SAVED, STEPS, Run, load_sharded


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "fused_adam"


def _assert_goes_on(run: Run, folder: Path) -> None:
    """Asserts that a run has the stored parameters and states, and that further steps give the stored parameters."""
    expected = torch.load(folder / "expected.pt")
    run.optimizer.wait_params(run.model.parameters())
    for name, param in run.model.named_parameters():
        assert torch.equal(param, expected["model"][name]), (folder.name, name)
    state = run.optimizer.state_dict()["state"]
    assert state.keys() == expected["state"].keys()
    for index, kind in product(state, (STEP, EXP_AVG, EXP_AVG_SQ, MASTERS)):
        stored, own = expected["state"][index][kind], state[index][kind]
        for box in own.boxes if isinstance(own, SpreadTensor) else ():
            assert torch.equal(own.read(box), stored[box.relative_to(whole(stored.shape))]), (folder.name, index, kind)
    for param, trained in zip(run.train(SAVED, STEPS), expected["trained"], strict=True):
        assert torch.equal(param, trained), folder.name


def _go_on_from_all_ranks(stored: Path) -> None:
    for name, case in CASES.items():
        run = Run(case, seed=1)
        load_sharded(run, stored / name / "sharded")
        _assert_goes_on(run, stored / name)


def _go_on_from_this_rank(stored: Path) -> None:
    for name, case in CASES.items():
        run = Run(case, seed=1)
        run.load(torch.load(stored / name / f"rank_{dist.get_rank()}.pt"))
        _assert_goes_on(run, stored / name)


@pytest.mark.parametrize("ranks", [1, RANKS, pytest.param(3, marks=pytest.mark.slow)])
def test_a_stored_checkpoint_goes_on_at_any_number_of_ranks(stored: Path, ranks: int) -> None:
    run_on_ranks(_go_on_from_all_ranks, ranks, stored)


def test_the_stored_state_dict_of_each_rank_goes_on(stored: Path) -> None:
    run_on_ranks(_go_on_from_this_rank, RANKS, stored)


def test_a_stored_state_in_torchs_format_goes_on(stored: Path) -> None:
    # The parameters are their own masters, because this format contains none.
    folder, run = stored / "plain", Run(CASES["plain"], seed=1)
    expected = torch.load(folder / "expected.pt")
    run.load({"model": expected["model"], "optimizer": expected["torch"]})
    _assert_goes_on(run, folder)
