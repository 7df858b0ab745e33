"""State dicts of DistributedFusedAdam that an earlier commit wrote: their settings and training. See README.md.

PYTHONPATH=TREE python -P tests/stored_runs/fused_adam.py      TREE: a checkout of the commit
"""

import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn

from megatron.core.optimizer import DistributedFusedAdam

ARCHIVE = Path(__file__).with_name("fixtures") / "fused_adam.tar.xz"
SAVED, STEPS, RANKS = 2, 4, 2
BUCKET_MIB = 512 / 2**20


@dataclass(frozen=True)
class Case:
    """Dtype of the parameters, and settings of the optimizer."""

    dtype: torch.dtype = torch.float32
    settings: dict[str, Any] = field(default_factory=dict)


CASES = {
    "plain": Case(),
    "remainders": Case(torch.bfloat16, {"store_params": False, "store_param_remainders": True}),
    "scaled": Case(torch.float16, {"dtype": torch.float16, "with_scaled_states": True}),
    "own_memory": Case(torch.bfloat16, {"contiguous_param_buffer": False, "overlap_param_sync": True}),
}


class Net(nn.Module):
    """A convolution in channels_last (NHWC), a transposed weight, a scalar, an empty parameter and a larger one."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(seed)
        shapes = {"kernel": (3, 2, 2, 2), "weight": (7, 5), "scale": (), "nothing": (0, 3), "big": (9, 15)}
        values = {name: torch.randn(shape, generator=made) for name, shape in shapes.items()}
        values["kernel"] = values["kernel"].to(memory_format=torch.channels_last)
        values["weight"] = values["weight"].t()
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value.to(dtype)))


class Run:
    """A model and its optimizer, with buckets so small that ranks share parameters."""

    def __init__(self, case: Case, *, seed: int = 0) -> None:
        self.model = Net(case.dtype, seed)
        kernel, *others = self.model.parameters()
        groups: list[dict[str, Any]] = [{"params": [kernel], "lr": 0.02, "weight_decay": 0.0}, {"params": others}]
        rates: dict[str, Any] = {"lr": 0.01, "betas": (0.75, 0.5), "eps": 1e-6, "weight_decay": 0.125}
        self.optimizer = DistributedFusedAdam(
            groups, **rates, bucket_cap_mb=BUCKET_MIB, average_grad_sync=False, **case.settings
        )

    def train(self, first: int, end: int) -> list[torch.Tensor]:
        """Runs steps and returns the parameters, which do not depend on the number of ranks."""
        for step in range(first, end):
            self.optimizer.zero_grad()
            self.optimizer.wait_params(self.model.parameters())
            for number, param in enumerate(self.model.parameters()):
                made = torch.Generator().manual_seed(100 * step + number)
                grad = torch.randn(param.shape, generator=made).to(param)
                # Only one rank has a gradient, so that no sum is rounded.
                param.grad = grad if not dist.is_initialized() or dist.get_rank() == 0 else torch.zeros_like(grad)
            self.optimizer.step()
        self.optimizer.wait_params(self.model.parameters())
        return [param.detach().clone() for param in self.model.parameters()]

    def states(self) -> dict[str, Any]:
        """Returns the state dicts of model and optimizer. Collective."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, states: dict[str, Any]) -> None:
        """Loads the result of `states`, or an optimizer's state in torch's format. Collective."""
        self.model.load_state_dict(states["model"])
        self.optimizer.load_state_dict(states["optimizer"])


def load_sharded(run: Run, folder: Path) -> None:
    """Loads a checkpoint of all ranks. Collective."""
    states = run.states()
    dcp.load(states, checkpoint_id=folder)
    run.load(states)


def _write(rank: int, store: str, place: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    for name, case in CASES.items():
        folder, run = Path(place) / name, Run(case)
        folder.mkdir(exist_ok=True)
        run.train(0, SAVED)
        states = run.states()
        dcp.save(states, checkpoint_id=folder / "sharded")
        torch.save(states, folder / f"rank_{rank}.pt")
        expected = {
            "model": {name: param.detach().clone() for name, param in run.model.named_parameters()},
            "state": _whole(states["optimizer"]["state"], folder / "sharded"),
            "torch": run.optimizer.state_dict(state_dict_format="torch"),
            "trained": run.train(SAVED, STEPS),
        }
        if rank == 0:
            torch.save(expected, folder / "expected.pt")
    dist.destroy_process_group()


def _whole(state: dict[int, dict[str, torch.Tensor]], folder: Path) -> dict[int, dict[str, torch.Tensor]]:
    """Reads all elements of an optimizer's state from a checkpoint."""
    found = {
        index: {kind: torch.zeros(value.shape, dtype=value.dtype) for kind, value in entry.items()}
        for index, entry in state.items()
    }
    dcp.load({"optimizer": {"state": found}}, checkpoint_id=folder, no_dist=True)
    return found


def write() -> None:
    """Writes the archive, with a folder for each case."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "fused_adam"
        folder.mkdir()
        mp.spawn(_write, (f"{place}/store", str(folder)), nprocs=RANKS)
        with tarfile.open(ARCHIVE, "w:xz") as archive:
            archive.add(folder, arcname=folder.name)


if __name__ == "__main__":
    write()
