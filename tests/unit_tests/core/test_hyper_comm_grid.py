"""Process groups along the axes of a grid with user-defined names."""

import pytest
import torch.distributed as dist

from megatron.core.hyper_comm_grid import HyperCommGrid
from tests.unit_tests.core.fake_world import fake_world


def test_groups_along_axes_have_the_ranks_that_differ_there_alone() -> None:
    with fake_world(5, 14):
        grid = HyperCommGrid([2, 3, 2], ["tp", "cp", "dp"], rank_offset=2)
        assert grid.get_rank_enum("tp") == [[2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13]]
        assert grid.get_rank_enum("cp")[:2] == [[2, 4, 6], [3, 5, 7]]
        assert grid.get_rank_enum(["dp", "tp"])[0] == [2, 3, 8, 9] and grid.size == 12
        pairs = grid.create_pg(["dp", "tp"], group_desc="mine")
        assert dist.get_process_group_ranks(pairs) == [4, 5, 10, 11]
        assert grid.get_pg(["tp", "dp"]) is pairs
        with pytest.raises(KeyError, match="groups along tp-dp already exist"):
            grid.create_pg(["tp", "dp"])
        with pytest.raises(KeyError, match=r"groups along cp do not exist: call create_pg\(\) first"):
            grid.get_pg("cp")
        with pytest.raises(ValueError, match="dims is 'pp': must be among tp, cp, dp"):
            grid.get_pg("pp")
        dist.destroy_process_group(pairs)
    with fake_world(0, 4):
        assert HyperCommGrid([2], ["tp"], rank_offset=2).create_pg("tp") is None


@pytest.mark.parametrize(
    ("shape", "names", "offset", "message"),
    [
        ([2, 2], ["tp"], 0, r"dim_names is \['tp'\] and shape is \[2, 2\]"),
        ([2, 2], ["tp", "tp"], 0, "one name for each axis, without duplicates"),
        ([2, 0], ["tp", "dp"], 0, "sizes must be at least 1"),
        ([2, 2], ["tp", "dp"], 1, "rank_offset is 1: the grid must be within the 4 available ranks"),
    ],
)
def test_grids_that_do_not_fit_are_refused(shape: list[int], names: list[str], offset: int, message: str) -> None:
    with pytest.raises(RuntimeError, match="torch.distributed is not initialized"):
        HyperCommGrid(shape, names)
    with fake_world(0, 4), pytest.raises(ValueError, match=message):
        HyperCommGrid(shape, names, offset)
