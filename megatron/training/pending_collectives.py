"""Which collective this rank has waited in longest, from torch's flight recorder: for messages about ranks that hang.

Transfers between two ranks are not recorded by gloo.
"""

import json
import os
import time
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed.distributed_c10d import _world

# Entries that torch keeps, and writes out at each look: 100 take 1 ms a second, 500 take 16.
_BUFFER_SIZE = "100"
_OVERDUE_SHARE = 0.95
# One for the host's library and one for the GPU's. torch before 2.12 may lack the first.
_RECORDERS = tuple(
    vars(_distributed_c10d)[name]
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    if name in vars(_distributed_c10d)
)


@dataclass(frozen=True)
class PendingCollective:
    """A collective that has begun here and not ended. number: how many of its group began, with this one.

    is_on_gpu: the GPU's library runs it, which ends the process when it has taken too long, without an exception.
    """

    operation: str
    group: str
    ranks: tuple[int, ...]
    number: int
    seconds: float
    limit_seconds: float
    is_on_gpu: bool

    @property
    def is_overdue_on_gpu(self) -> bool:
        """Whether the GPU's library is about to lose its patience with it."""
        return self.is_on_gpu and self.seconds > _OVERDUE_SHARE * self.limit_seconds > 0

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        return f"{self.operation} number {self.number} of group {self.group} (ranks {ranks})"


def record_collectives() -> None:
    """Switches the recorder on, which a user's own TORCH_FR_BUFFER_SIZE overrules; before the first process group."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _BUFFER_SIZE)


def oldest_pending() -> PendingCollective | None:
    """The one that began first of those under way, from any thread; None where there is none, or no record."""
    found = []
    for dump in _RECORDERS:
        # All of them: that only those under way are wanted is not heeded for the host's library.
        record = json.loads(dump())
        found += [entry for entry in record.get("entries", []) if not entry.get("retired", False)]
    found = [entry for entry in found if entry["state"] != "completed"]
    return _collective(min(found, key=lambda entry: entry["time_created_ns"])) if found else None


def _collective(entry: dict[str, Any]) -> PendingCollective:
    library, _, operation = str(entry["profiling_name"]).rpartition(":")
    name, description = entry["process_group"]
    return PendingCollective(
        operation=operation,
        group="world" if description == "default_pg" else description,
        ranks=_ranks_of(name),
        number=entry["collective_seq_id"],
        seconds=time.time() - entry["time_created_ns"] / 1e9,
        limit_seconds=entry.get("timeout_ms", 0) / 1e3,
        is_on_gpu=library == "nccl",
    )


def _ranks_of(name: str) -> tuple[int, ...]:
    # Another thread may make groups meanwhile.
    groups = [group for group, its_name in list(_world.pg_names.items()) if its_name == name]
    return tuple(dist.get_process_group_ranks(groups[0])) if groups else ()
