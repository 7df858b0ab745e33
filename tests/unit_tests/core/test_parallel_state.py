"""Process groups compared with a plain enumeration, for many sizes and orders, on torch's fake process group."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core import parallel_state
from megatron.core.parallel_state import RankGenerator
from megatron.core.pipeline_parallel.utils import is_pp_first_stage, is_pp_last_stage
from tests.unit_tests.core.fake_world import fake_world

# tp, cp, dp, pp, etp, ep; edp follows from these.
GRIDS = [
    (1, 1, 1, 1, 1, 1),
    (1, 1, 4, 1, 1, 2),
    (2, 1, 1, 1, 1, 2),
    (2, 1, 2, 2, 2, 2),
    (2, 2, 2, 1, 1, 8),
    (2, 3, 2, 3, 4, 3),
    (3, 1, 2, 4, 1, 6),
    (1, 2, 2, 4, 2, 1),
]
DENSE = {"tp": "tp", "cp": "cp", "dp": "dp", "pp": "pp", "dp_cp": "dp cp", "tp_cp": "tp cp", "tp_dp": "tp dp"}
DENSE |= {"tp_dp_cp": "tp dp cp", "mp": "tp pp"}
EXPERT = {"expt_tp": "tp", "ep": "ep", "expt_dp": "dp", "tp_ep": "tp ep", "tp_ep_pp": "tp ep pp"}


def coordinates(rank: int, sizes: dict[str, int], order: str) -> dict[str, int]:
    found = {}
    for axis in order.split("-"):
        rank, found[axis] = divmod(rank, sizes.get(axis, 1))
    return found


def naive_group(rank: int, axes: str, *, sizes: dict[str, int], world_size: int, order: str) -> list[int]:
    def outside(other: int) -> list[int]:
        return [value for axis, value in coordinates(other, sizes, order).items() if axis not in axes.split()]

    return [other for other in range(world_size) if outside(other) == outside(rank)]


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "ep-cp-tp-dp-pp", "cp-dp-tp-ep-pp"])
@pytest.mark.parametrize("grid", GRIDS)
def test_every_group_of_every_rank_has_the_ranks_of_a_naive_enumeration(grid: tuple[int, ...], order: str) -> None:
    tp, cp, dp, pp, etp, ep = grid
    world_size = tp * cp * dp * pp
    dense = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
    expert = {"tp": etp, "ep": ep, "dp": world_size // (etp * ep * pp), "pp": pp}
    for rank in range(world_size):
        with fake_world(rank, world_size):
            initialize(grid, order=order)
            groups = vars(parallel_state.get_process_groups())
            for sizes, kinds in ((dense, DENSE), (expert, EXPERT)):
                for kind, axes in kinds.items():
                    expected = naive_group(rank, axes, sizes=sizes, world_size=world_size, order=order)
                    assert dist.get_process_group_ranks(groups[kind]) == expected, (kind, rank)
            stages = naive_group(rank, "pp", sizes=dense, world_size=world_size, order=order)
            ends = sorted({stages[0], stages[-1]})
            shared = parallel_state.get_embedding_group(check_initialized=False)
            assert (shared is not None) == (rank in ends)
            if rank in ends:
                assert dist.get_process_group_ranks(parallel_state.get_embedding_group()) == ends
            check_getters(coordinates(rank, dense, order), coordinates(rank, expert, order), stages=stages)
            check_meshes(groups)


@pytest.mark.parametrize("grid", [(1, 1, 6, 1, 1, 1), (2, 1, 4, 2, 1, 2), (1, 2, 4, 1, 2, 2), (2, 3, 2, 3, 2, 3)])
def test_optimizer_instances_are_neighbours_and_the_same_for_both_kinds_of_layers(grid: tuple[int, ...]) -> None:
    tp, cp, dp, pp, etp, ep = grid
    world_size = tp * cp * dp * pp
    of_stage = world_size // pp
    half = of_stage // 2
    for rank in range(world_size):
        with fake_world(rank, world_size):
            initialize(grid, num_distributed_optimizer_instances=2)
            groups = vars(parallel_state.get_process_groups())
            mine = [other for other in range(world_size) if other % of_stage // half == rank % of_stage // half]
            first = rank - rank % half - (half if rank % of_stage >= half else 0)
            expected = {
                "intra_dist_opt": mine,
                "inter_dist_opt": [first + rank % half, first + half + rank % half],
                "intra_dp_cp": [other for other in dist.get_process_group_ranks(groups["dp_cp"]) if other in mine],
                "intra_expt_dp": [other for other in dist.get_process_group_ranks(groups["expt_dp"]) if other in mine],
            }
            assert {name: dist.get_process_group_ranks(groups[name]) for name in expected} == expected
            assert parallel_state.get_data_parallel_group(True, partial_data_parallel=True) is groups["intra_dp_cp"]
            assert (
                parallel_state.get_expert_data_parallel_world_size(partial_expert_data_parallel=True) * 2
                == groups["expt_dp"].size()
            )
            with pytest.raises(ValueError, match="requires with_context_parallel"):
                parallel_state.get_data_parallel_rank(partial_data_parallel=True)


def test_levels_of_context_parallel_groups_divide_them_from_the_innermost() -> None:
    with fake_world(6, 16):
        parallel_state.initialize_model_parallel(2, context_parallel_size=8, hierarchical_context_parallel_sizes=(2, 4))
        assert dist.get_process_group_ranks(parallel_state.get_context_parallel_group()) == list(range(0, 16, 2))
        levels = parallel_state.get_hierarchical_context_parallel_groups()
        assert [dist.get_process_group_ranks(group) for group in levels] == [[4, 6], [2, 6, 10, 14]]
        assert parallel_state.get_process_groups().hcp == levels
        of_device, of_host = parallel_state.create_hierarchical_groups(6, [0, 2, 4, 6, 8, 10, 12, 14], [2, 2, 2])
        expected = [[4, 6], [2, 6], [6, 14]]
        assert [dist.get_process_group_ranks(group) for group in of_device] == expected and of_host == []
        assert parallel_state.create_hierarchical_groups(6, [0, 1], [2]) == ([], [])
        with pytest.raises(ValueError, match=r"hierarchical_group_sizes is \[2\]: the product must be .* 4"):
            parallel_state.create_hierarchical_groups(6, [0, 1, 2, 3], [2])
        for group in of_device:
            dist.destroy_process_group(group)
    with fake_world(0, 2):
        parallel_state.initialize_model_parallel()
        assert parallel_state.get_hierarchical_context_parallel_groups(check_initialized=False) is None
        with pytest.raises(RuntimeError, match="have no levels: pass hierarchical_context_parallel_sizes"):
            parallel_state.get_hierarchical_context_parallel_groups()


def test_callers_may_choose_the_stages_with_embeddings() -> None:
    with fake_world(4, 8):
        parallel_state.initialize_model_parallel(
            2, 4, 2, get_embedding_ranks=lambda ranks: [ranks[3], ranks[0], ranks[2]], create_gloo_process_groups=False
        )
        assert dist.get_process_group_ranks(parallel_state.get_embedding_group()) == [0, 4, 6]
        with pytest.raises(RuntimeError, match="this rank is not in any pos_embd group"):
            parallel_state.get_position_embedding_group()
    with fake_world(0, 4):
        with pytest.raises(
            ValueError, match=r"get_position_embedding_ranks returned \[7\] for the pipeline \[0, 1, 2, 3"
        ):
            parallel_state.initialize_model_parallel(1, 4, get_position_embedding_ranks=lambda ranks: [7])
        parallel_state.initialize_model_parallel(1, 4, 2)
        assert dist.get_process_group_ranks(parallel_state.get_position_embedding_group()) == [0]


def test_groups_on_the_host_have_the_ranks_of_the_groups() -> None:
    ps = parallel_state
    with fake_world(7, 8):
        assert not ps.model_parallel_is_initialized()
        ps.initialize_model_parallel(2, 2, expert_model_parallel_size=2)
        assert ps.model_parallel_is_initialized()
        ranks = dist.get_process_group_ranks(ps.get_data_parallel_group())
        assert dist.get_process_group_ranks(ps.get_data_parallel_group_gloo(True, True)) == ranks
        assert ps.get_expert_data_parallel_group_gloo() is ps.get_expert_data_parallel_group()
        assert dist.get_process_group_ranks(ps.get_expert_tensor_and_model_parallel_group()) == [4, 5, 6, 7]


def test_timeouts_of_groups_can_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    changed: list[tuple[timedelta, dist.ProcessGroup]] = []
    # The fake backend has no timeout.
    monkeypatch.setattr(
        dist.distributed_c10d, "_set_pg_timeout", lambda timeout, group: changed.append((timeout, group))
    )
    with fake_world(0, 4):
        parallel_state.initialize_model_parallel(2)
        own = parallel_state.create_group([0, 3], timeout=timedelta(seconds=5), group_desc="pairs")
        assert parallel_state.create_group([1, 2]) is dist.GroupMember.NON_GROUP_MEMBER
        parallel_state.update_pg_timeout(timedelta(minutes=1), own)
        assert changed == [(timedelta(minutes=1), own)]
        parallel_state.update_pg_timeout(timedelta(minutes=2))
        assert {group for timeout, group in changed if timeout == timedelta(minutes=2)} >= {
            own,
            dist.group.WORLD,
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_data_parallel_group(),
        }
        dist.destroy_process_group(own)


def initialize(grid: tuple[int, ...], **options: Any) -> None:
    tp, cp, _, pp, etp, ep = grid
    parallel_state.initialize_model_parallel(
        tp,
        pp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        **options,
    )


def check_getters(dense: dict[str, int], expert: dict[str, int], *, stages: list[int]) -> None:
    ps = parallel_state
    assert ps.get_tensor_model_parallel_rank() == dense["tp"]
    assert ps.get_context_parallel_rank() == dense["cp"]
    assert ps.get_data_parallel_rank() == dense["dp"]
    assert ps.get_expert_tensor_parallel_rank() == expert["tp"]
    assert ps.get_expert_model_parallel_rank() == expert["ep"]
    assert ps.get_expert_data_parallel_rank(partial_expert_data_parallel=True) == expert["dp"]
    assert ps.get_data_parallel_group(True, partial_data_parallel=True) is ps.get_process_groups().dp_cp
    assert ps.get_intra_distributed_optimizer_instance_group().size() == dist.get_world_size()
    assert ps.get_inter_distributed_optimizer_instance_group(check_initialized=False) is None
    assert ps.get_tensor_and_data_parallel_group(True, True) is ps.get_process_groups().tp_dp_cp
    shared = ps.get_tensor_and_context_parallel_group(check_initialized=False)
    assert shared is ps.get_process_groups().tp_cp and shared.size() == ps.get_tensor_and_context_parallel_world_size()
    assert shared.rank() == ps.get_tensor_and_context_parallel_rank()
    stage = ps.get_pipeline_model_parallel_rank()
    assert stage == dense["pp"] == expert["pp"]
    assert ps.get_pipeline_model_parallel_next_rank() == stages[(stage + 1) % len(stages)]
    assert ps.get_pipeline_model_parallel_prev_rank() == stages[stage - 1]
    pp, ends = ps.get_pipeline_model_parallel_group(), (stage == 0, stage == len(stages) - 1)
    assert (ps.is_pipeline_first_stage(), ps.is_pipeline_last_stage()) == ends
    assert (is_pp_first_stage(pp), is_pp_last_stage(pp)) == ends


def check_meshes(groups: dict[str, Any]) -> None:
    for kind, names in (("dense", ("tp", "cp", "dp", "pp")), ("expert", ("expt_tp", "ep", "expt_dp", "pp"))):
        mesh = parallel_state.get_device_mesh(kind)
        for name in names:
            axis = mesh[name.removeprefix("expt_")]
            assert axis.get_group() is groups[name]
            assert axis.mesh.tolist() == dist.get_process_group_ranks(groups[name])


def test_groups_of_a_world_of_16384_ranks_are_there_in_seconds() -> None:
    with fake_world(5461, 16384):
        start = time.process_time()
        parallel_state.initialize_model_parallel(
            8, 16, context_parallel_size=2, expert_model_parallel_size=32, expert_tensor_parallel_size=2
        )
        assert time.process_time() - start < 10
        assert parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True).size() == 1024


def test_virtual_stages_decide_who_is_first_and_last_only_when_asked() -> None:
    with fake_world(1, 2):
        parallel_state.initialize_model_parallel(1, 2, 3)
        assert parallel_state.is_pipeline_last_stage()
        assert [parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk) for chunk in range(3)] == [
            False,
            False,
            True,
        ]
        parallel_state.set_virtual_pipeline_model_parallel_rank(2)
        assert parallel_state.is_pipeline_last_stage(ignore_virtual=False)
        assert not parallel_state.is_pipeline_first_stage()
        assert parallel_state.get_virtual_pipeline_model_parallel_world_size() == 3


@pytest.mark.parametrize(("rank", "chunks"), [(0, [(True, False), (False, True)]), (1, [(False, False)] * 2)])
def test_the_first_stage_of_a_v_holds_both_ends_of_the_model(rank: int, chunks: list[tuple[bool, bool]]) -> None:
    with fake_world(rank, 2):
        parallel_state.initialize_model_parallel(1, 2, 2, pipeline_schedule="zbv")
        for chunk, ends in enumerate(chunks):
            asked: dict[str, Any] = {"ignore_virtual": False, "vp_stage": chunk}
            assert parallel_state.is_pipeline_first_stage(**asked) == ends[0]
            assert parallel_state.is_pipeline_last_stage(**asked) == ends[1]
        assert parallel_state.is_pipeline_first_stage() == parallel_state.is_pipeline_last_stage() == (rank == 0)
        # Tied weights need no group, because their gradients are added on one stage.
        embedding = parallel_state.get_embedding_group(check_initialized=False)
        assert embedding is None if rank == 1 else embedding is not None and embedding.size() == 1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tensor_model_parallel_size": 5}, "world size is 12: must be a multiple of tensor_.* x context_.* \\(5\\)"),
        ({"expert_model_parallel_size": 8}, "world size is 12: must be a multiple of expert_tensor.* \\(8\\)"),
        (
            {"tensor_model_parallel_size": 4, "expert_model_parallel_size": 2},
            "expert_tensor_parallel_size x .* \\(8\\)",
        ),
        ({"context_parallel_size": 0}, "context_parallel_size is 0: must be at least 1"),
        ({"num_distributed_optimizer_instances": 5}, "instances is 5: must divide the data-parallel .* size, 12"),
        (
            {"num_distributed_optimizer_instances": 2, "expert_model_parallel_size": 4},
            "instances is 2: must divide the expert-data-parallel size, 3",
        ),
        (
            {"num_distributed_optimizer_instances": 2, "expert_model_parallel_size": 3, "order": "dp-ep-tp-cp-pp"},
            "instances is 2: must be 1 with order 'dp-ep-tp-cp-pp'.* list dp after tp, cp and ep",
        ),
        ({"virtual_pipeline_model_parallel_size": 2}, "requires a pipeline_model_parallel_size \\(1\\) of at least 2"),
        (
            {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zbv"},
            "virtual_pipeline_model_parallel_size is None and pipeline_schedule is zbv: must be 2",
        ),
        (
            {"create_gloo_process_groups": False, "use_sharp": True},
            "use_sharp is True: not available here; keep the default F",
        ),
        (
            {"nccl_communicator_config_path": "nccl.yaml"},
            "nccl_communicator_config_path is 'nccl.yaml'.* keep the default None",
        ),
        ({"gtp_remat_size": 2}, "gtp_remat_size is 2: not available here; keep the default 1"),
        ({"rank_offset": 4}, "rank_offset is 4: not available here; keep the default 0"),
        ({"local_world_size": 4}, "local_world_size is 4: not available here; keep the default 12"),
        (
            {"hierarchical_context_parallel_sizes": [2, 2], "context_parallel_size": 6},
            r"hierarchical_context_parallel_sizes is \[2, 2\]: .* context_parallel_size \(6\)",
        ),
        ({"order": "tp-cp-dp-dp-pp"}, "order is 'tp-cp-dp-dp-pp'"),
        ({"order": "tp-cp-ep-pp"}, "must contain 'dp', whose size is 12"),
        (
            {"order": "tp-pp-cp-ep-dp", "pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2}
            | {"expert_tensor_parallel_size": 1},
            "must end with pp, .* different pipeline stages",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_any_group_is_made(sizes: dict[str, Any], message: str) -> None:
    with fake_world(0, 12):
        with pytest.raises(ValueError, match=message):
            parallel_state.initialize_model_parallel(**sizes)
        assert not parallel_state.model_parallel_is_initialized()
        assert len(dist.distributed_c10d._world.pg_map) == 1


def test_groups_that_ended_with_their_world_can_be_forgotten_in_the_next_one() -> None:
    with fake_world(0, 2):
        parallel_state.initialize_model_parallel(2)
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(2)
        assert parallel_state.get_data_parallel_world_size() == 2


@pytest.mark.parametrize("ask", [parallel_state.get_process_groups, parallel_state.get_tensor_model_parallel_rank])
def test_getters_say_what_to_call_first(ask: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match="call initialize_model_parallel"):
        ask()
    assert parallel_state.get_embedding_group(check_initialized=False) is None


def test_a_grid_lists_its_groups_as_users_of_get_ranks_expect() -> None:
    grid = RankGenerator(tp=2, ep=1, dp=2, pp=2, cp=1, order="tp-pp-dp", rank_offset=8)
    assert grid.get_ranks("tp") == [[8, 9], [10, 11], [12, 13], [14, 15]]
    assert grid.get_ranks("dp") == [[8, 12], [9, 13], [10, 14], [11, 15]]
    assert grid.get_ranks("tp-pp") == [[8, 9, 10, 11], [12, 13, 14, 15]]
    with pytest.raises(ValueError, match="token is 'tp-xp': 'xp'"):
        grid.get_ranks("tp-xp")
