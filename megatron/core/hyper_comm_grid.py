"""HyperCommGrid: process groups along arbitrary named axes of a grid of ranks.

The class is for scripts with custom layouts. parallel_state.py builds the groups used in training.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.parallel_state import generate_masked_orthogonal_rank_groups


class HyperCommGrid:
    """Grid of ranks with named axes, and the process groups created along them.

    shape: number of ranks along each axis, from the fastest-varying to the slowest. rank_offset: first rank of the
    grid. backend: backend of the groups; None means the default backend of torch.distributed. Raises ValueError for
    axes that are inconsistent with the shape or the number of ranks, and RuntimeError if torch.distributed is not
    initialized.
    """

    def __init__(
        self, shape: Sequence[int], dim_names: Sequence[str], rank_offset: int = 0, backend: str | None = None
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError("torch.distributed is not initialized: call init_process_group() before HyperCommGrid")
        self.shape, self.dim_names = tuple(shape), tuple(dim_names)
        self.rank_offset, self.backend = rank_offset, backend
        if len(self.shape) != len(self.dim_names) or len(set(self.dim_names)) != len(self.dim_names):
            raise ValueError(
                f"dim_names is {list(dim_names)} and shape is {list(shape)}: must be one name for each axis, "
                "without duplicates"
            )
        if min(self.shape, default=0) < 1:
            raise ValueError(f"shape is {list(shape)}: sizes must be at least 1")
        self.size = math.prod(self.shape)
        if rank_offset < 0 or rank_offset + self.size > dist.get_world_size():
            raise ValueError(
                f"shape is {list(shape)} and rank_offset is {rank_offset}: the grid must be within the "
                f"{dist.get_world_size()} available ranks"
            )
        self._groups: dict[tuple[str, ...], ProcessGroup | None] = {}

    def create_pg(self, dims: str | Sequence[str], **kwargs: Any) -> ProcessGroup | None:
        """Creates all groups along `dims` and returns this rank's group, or None outside the grid. Collective.

        kwargs: additional arguments of torch.distributed.new_group. Raises KeyError if the groups already exist.
        """
        key = self._key(dims)
        if key in self._groups:
            raise KeyError(f"groups along {'-'.join(key)} already exist: use get_pg() to look up this rank's group")
        own = None
        options = {"backend": self.backend, "group_desc": "-".join(key), **kwargs}
        for ranks in self.get_rank_enum(dims):
            group = dist.new_group(ranks, **options)
            own = group if isinstance(group, ProcessGroup) else own
        self._groups[key] = own
        return own

    def get_pg(self, dims: str | Sequence[str]) -> ProcessGroup | None:
        """Returns this rank's group along `dims`, whose order is ignored. Raises KeyError if it was not created."""
        key = self._key(dims)
        if key not in self._groups:
            raise KeyError(f"groups along {'-'.join(key)} do not exist: call create_pg() first, on all ranks")
        return self._groups[key]

    def get_rank_enum(self, dims: str | Sequence[str]) -> list[list[int]]:
        """Returns one list of ranks for each group along `dims`."""
        key = self._key(dims)
        mask = [name in key for name in self.dim_names]
        groups = generate_masked_orthogonal_rank_groups(self.size, self.shape, mask)
        return [[self.rank_offset + rank for rank in ranks] for ranks in groups]

    def _key(self, dims: str | Sequence[str]) -> tuple[str, ...]:
        """Returns the axis names in grid order. Raises ValueError if a name is unknown or no name is given."""
        wanted = [dims] if isinstance(dims, str) else list(dims)
        if not wanted or not set(wanted) <= set(self.dim_names):
            raise ValueError(f"dims is {dims!r}: must be among {', '.join(self.dim_names)}")
        return tuple(name for name in self.dim_names if name in wanted)
