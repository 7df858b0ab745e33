"""Tests how the variables of launchers become torchrun's. Expected values follow the launchers' manual pages."""

import os
import re
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.device.launcher import (
    adopt_launcher,
    first_node,
    launch_problem,
    lone_process_notice,
    require_launch,
)
from megatron.training.config import DistributedConfig, LaunchConfig
from megatron.training.initialize import leave_process_group
from megatron.training.startup_handshake import join_process_group
from tests.harness import run_on_ranks


def _words(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


def _adopted(text: str) -> dict[str, str]:
    """Returns the variables that adopt_launcher adds to an environment."""
    given = _words(text)
    environment = dict(given)
    adopt_launcher(environment)
    assert {name: environment[name] for name in given} == given
    return {name: value for name, value in environment.items() if name not in given}


STEP = "SLURM_JOB_ID=7 SLURM_STEP_ID=2 "
NODES = "SLURM_STEP_NODELIST=gpu[09-11] SLURM_STEP_TASKS_PER_NODE=4(x2),1 "
PORT_OF_STEP = str(61440 + zlib.crc32(b"7.2") % 4096)
PORT_OF_JOB = str(61440 + zlib.crc32(b"prterun-1@1") % 4096)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param(
            STEP + NODES + "SLURM_STEP_NUM_TASKS=9 SLURM_PROCID=8 SLURM_LOCALID=0 SLURM_NODEID=2 SLURM_NTASKS=9",
            f"RANK=8 WORLD_SIZE=9 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=gpu09 MASTER_PORT={PORT_OF_STEP}",
            id="srun",
        ),
        pytest.param(
            STEP + "SLURM_NTASKS=2 SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_JOB_NODELIST=a,b MASTER_PORT=5 MASTER_ADDR=b",
            "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1",
            id="srun, address given",
        ),
        pytest.param(
            "SLURM_NTASKS=2 SLURM_PROCID=0 SLURM_LOCALID=0 MASTER_PORT=5 MASTER_ADDR=b",
            "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0",
            id="srun, in a container that passes few variables",
        ),
        pytest.param(
            STEP + "SLURM_NTASKS=4 SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_JOB_NODELIST=n-1,n-2 WORLD_SIZE=4",
            f"RANK=3 LOCAL_RANK=1 MASTER_ADDR=n-1 MASTER_PORT={PORT_OF_STEP}",
            id="srun, WORLD_SIZE exported in the script",
        ),
        pytest.param(
            "OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=2",
            "RANK=2 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2",
            id="mpirun on two machines",
        ),
        pytest.param(
            "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 "
            "PMIX_NAMESPACE=prterun-1@1 PMIX_RANK=1",
            f"RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={PORT_OF_JOB}",
            id="mpirun on one machine",
        ),
        pytest.param(
            # mpirun starts one daemon per machine with srun, which leaves its variables.
            STEP + "SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=1 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_RANK=6 "
            "OMPI_COMM_WORLD_LOCAL_RANK=2",
            "RANK=6 WORLD_SIZE=8 LOCAL_RANK=2",
            id="mpirun inside Slurm",
        ),
        pytest.param(
            "PMI_RANK=5 PMI_SIZE=8 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=4",
            "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4",
            id="Hydra",
        ),
        pytest.param(
            STEP + NODES + "SLURM_STEP_NUM_TASKS=9 SLURM_PROCID=5 SLURM_LOCALID=1 SLURM_NODEID=1 PMI_RANK=5 PMI_SIZE=9",
            f"RANK=5 WORLD_SIZE=9 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=gpu09 MASTER_PORT={PORT_OF_STEP}",
            id="srun --mpi=pmi2",
        ),
        pytest.param(
            STEP + "SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=1 PMI_RANK=6 PMI_SIZE=8 MPI_LOCALRANKID=2",
            "RANK=6 WORLD_SIZE=8 LOCAL_RANK=2",
            id="Hydra, whose proxies srun starts",
        ),
        pytest.param(
            "MV2_COMM_WORLD_RANK=1 MV2_COMM_WORLD_SIZE=2 MV2_COMM_WORLD_LOCAL_RANK=1 MASTER_ADDR=a MASTER_PORT=1",
            "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1",
            id="MVAPICH",
        ),
        pytest.param("FLUX_TASK_RANK=0 FLUX_JOB_SIZE=2 FLUX_TASK_LOCAL_ID=0", "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0"),
    ],
)
def test_ranks_of_a_launcher_are_those_of_torchrun(given: str, expected: str) -> None:
    assert _adopted(given) == _words(expected)


def test_an_empty_address_is_a_missing_one() -> None:
    environment = _words(STEP + NODES + "SLURM_NTASKS=9 SLURM_PROCID=1 MASTER_ADDR= MASTER_PORT=")
    adopt_launcher(environment)
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("gpu09", PORT_OF_STEP)


@pytest.mark.parametrize(
    "given",
    [
        pytest.param("", id="a plain process"),
        pytest.param("SLURM_JOB_ID=7 SLURM_NTASKS=8 SLURM_PROCID=0 SLURM_NODEID=0", id="script of sbatch"),
        pytest.param("SLURM_JOB_ID=7 SLURM_NTASKS=8 SLURM_NNODES=2", id="shell of salloc"),
        pytest.param(
            "SLURM_JOB_ID=7 SLURM_NTASKS=8 SLURM_PROCID=0 SLURM_STEP_ID=4294967290 SLURM_STEP_NUM_TASKS=1 PMIX_RANK=0",
            id="interactive step of salloc",
        ),
        pytest.param("SLURM_JOB_ID=7 SLURM_NTASKS=8 SLURM_PROCID=0 SLURM_STEP_ID=4294967291", id="batch step"),
        pytest.param(
            STEP + "SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0 SLURM_JOB_NODELIST=a", id="srun -n 1"
        ),
        pytest.param("OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_RANK=0", id="mpirun -n 1"),
        pytest.param(
            STEP + "SLURM_NTASKS=2 SLURM_PROCID=1 TORCHELASTIC_RUN_ID=1 RANK=9 WORLD_SIZE=16 LOCAL_RANK=1 "
            "MASTER_ADDR=a MASTER_PORT=1",
            id="one torchrun per machine",
        ),
        pytest.param(
            STEP + "SLURM_NTASKS=2 SLURM_PROCID=1 RANK=9 WORLD_SIZE=16 LOCAL_RANK=1 MASTER_ADDR=a MASTER_PORT=1",
            id="one script per machine that starts ranks",
        ),
    ],
)
def test_a_process_that_is_alone_or_has_all_variables_stays_as_it_is(given: str) -> None:
    assert _adopted(given) == {}
    assert launch_problem(_words(given), num_devices=8) is None


ADDRESS = "MASTER_ADDR=a MASTER_PORT=1 "


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ADDRESS + "SLURM_JOB_ID=7 SLURM_NTASKS=2 SLURM_PROCID=1",
            "SLURM_PROCID is 1 and SLURM_STEP_ID is not set, so process 0 cannot tell that srun started it",
        ),
        ("SLURM_PROCID=0", "SLURM_PROCID is set in the environment, but SLURM_NTASKS is not"),
        (STEP + "SLURM_NTASKS=2 SLURM_PROCID=1", r"srun started 2 processes \(SLURM_NTASKS=2\), but MASTER_ADDR is"),
        (
            STEP + "SLURM_NTASKS=2 SLURM_PROCID=1 SLURM_JOB_NODELIST=a,b SLURM_DISTRIBUTION=arbitrary",
            "MASTER_ADDR is not set, so they cannot find rank 0: export MASTER_ADDR=HOST before srun",
        ),
        (
            "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0",
            "Open MPI started 2 .*MASTER_ADDR and MASTER_PORT are not set",
        ),
        ("OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_RANK is set in the environment, but OMPI_COMM_WORLD_SIZE is not"),
        ("PMI_RANK=3 PMI_SIZE=2", r"PMI_RANK is 3 in the environment: must be below PMI_SIZE \(2\)"),
        (
            STEP + "SLURM_NTASKS=4 SLURM_PROCID=0 PMI_RANK=0 PMI_SIZE=1",
            r"PMI_SIZE=1 in the environment, but srun started 4 processes \(SLURM_NTASKS=4\).*unset PMI_RANK and",
        ),
        ("WORLD_SIZE=1 RANK=0 MASTER_ADDR= MASTER_PORT=1", "WORLD_SIZE is set in the environment, but MASTER_ADDR is"),
        ("WORLD_SIZE=1 RANK=0 MASTER_ADDR=a MASTER_PORT=auto", "MASTER_PORT is 'auto' .*: must be a whole number"),
        ("WORLD_SIZE=1 RANK=0 MASTER_ADDR=a MASTER_PORT=70000", "MASTER_PORT is 70000 .*: must be from 1 to 65535"),
        ("OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0 MASTER_ADDR= MASTER_PORT=1", "but MASTER_ADDR is not set"),
        ("PMIX_RANK=0", "PMIX_RANK is 0, .* but no variable tells how many"),
        (ADDRESS + "RANK=1", "RANK is 1 in the environment, but WORLD_SIZE is not set"),
        (ADDRESS + "WORLD_SIZE=2", "WORLD_SIZE is set in the environment, but RANK is not"),
        (
            "WORLD_SIZE=2 RANK=0 LOCAL_RANK=0",
            "WORLD_SIZE is set in the environment, but MASTER_ADDR, MASTER_PORT is not",
        ),
        (ADDRESS + "WORLD_SIZE=2 RANK=2 LOCAL_RANK=0", r"RANK is 2: must be below WORLD_SIZE \(2\)"),
        (ADDRESS + "WORLD_SIZE=2 RANK=1", "can use 4 GPUs, but LOCAL_RANK is not set"),
        (ADDRESS + "WORLD_SIZE=4 RANK=3 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2", "LOCAL_RANK is 2: must be below LOCAL_WORLD"),
        (ADDRESS + "WORLD_SIZE=two RANK=1", "WORLD_SIZE is 'two' in the environment: must be a whole number"),
        (
            STEP + ADDRESS + "SLURM_NTASKS=4 SLURM_PROCID=1 WORLD_SIZE=1 RANK=0",
            r"WORLD_SIZE is 1 in the environment, but srun started 4 processes \(SLURM_NTASKS=4\)",
        ),
        (
            STEP + ADDRESS + "SLURM_NTASKS=4 SLURM_PROCID=1 WORLD_SIZE=8",
            "WORLD_SIZE is 8 in the environment, but srun started 4",
        ),
        (
            STEP + ADDRESS + "SLURM_NTASKS=4 SLURM_PROCID=1 RANK=0 WORLD_SIZE=4",
            "RANK is 0 in the environment, but this is process 1, and srun started 4 processes",
        ),
        (
            STEP + ADDRESS + "SLURM_NTASKS=4 SLURM_PROCID=1 RANK=0",
            "RANK is 0 .* but this is process 1, and srun started 4",
        ),
        (
            ADDRESS + "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1 WORLD_SIZE=3 RANK=1 LOCAL_RANK=1",
            "WORLD_SIZE is 3 in the environment, but Open MPI started 2",
        ),
    ],
)
def test_what_does_not_describe_a_run_is_refused(given: str, said: str) -> None:
    environment = _words(given)
    adopt_launcher(environment)
    problem = launch_problem(environment, num_devices=4)
    assert problem is not None and re.search(said, problem), problem


@given(
    tasks=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    launcher=st.sampled_from(["srun", "srun WORLD_SIZE", "mpirun", "hydra"]),
    job=st.integers(1, 10**8),
)
def test_every_launch_forms_one_group_with_each_rank_once(tasks: list[int], launcher: str, job: int) -> None:
    """The property: n started processes are ranks 0 to n - 1 of n with one address, or all of them are refused."""
    ranks = []
    for node, count in enumerate(tasks):
        for local in range(count):
            rank, size = sum(tasks[:node]) + local, sum(tasks)
            environment = {"SLURM_JOB_ID": str(job)} if "srun" in launcher else _words(ADDRESS)
            if "srun" in launcher:
                environment |= _words(f"SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS={size} SLURM_PROCID={rank}")
                environment |= _words(
                    f"SLURM_LOCALID={local} SLURM_NODEID={node} SLURM_STEP_NODELIST=n[01-{len(tasks)}]"
                )
                environment |= {"SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, tasks))}
                environment |= {"WORLD_SIZE": str(size)} if "WORLD_SIZE" in launcher and size > 1 else {}
            elif launcher == "mpirun":
                environment |= _words(f"OMPI_COMM_WORLD_SIZE={size} OMPI_COMM_WORLD_RANK={rank}")
                environment |= _words(f"OMPI_COMM_WORLD_LOCAL_RANK={local} OMPI_COMM_WORLD_LOCAL_SIZE={count}")
            else:
                environment |= _words(
                    f"PMI_SIZE={size} PMI_RANK={rank} MPI_LOCALRANKID={local} MPI_LOCALNRANKS={count}"
                )
            adopt_launcher(environment)
            assert launch_problem(environment, num_devices=8) is None
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
            ranks.append([environment.get(name) for name in names])
            assert size == 1 or ranks[-1][:4] == [str(rank), str(size), str(local), str(count)]
    assert len({tuple(rank[4:]) for rank in ranks}) == 1
    assert len(ranks) == 1 or None not in ranks[0]


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a", "a"),
        ("gpu[007-010,12],login1", "gpu007"),
        ("n[3,1]-x[02-04]", "n3-x02"),
        ("host-1.site.org,host-2", "host-1.site.org"),
        ("", None),
    ],
)
def test_the_first_node_of_a_list(nodes: str, first: str | None) -> None:
    assert first_node(nodes) == first


def test_a_process_that_trains_alone_in_an_allocation_says_so() -> None:
    notice = lone_process_notice(_words("SLURM_JOB_ID=7 SLURM_NTASKS=8 SLURM_PROCID=0"))
    assert notice is not None and "SLURM_NTASKS is 8, but srun has not started this process" in notice
    for quiet in (
        "",
        "SLURM_JOB_ID=7 SLURM_NTASKS=1",
        "SLURM_JOB_ID=7 SLURM_NTASKS=8 WORLD_SIZE=8",
        STEP + "SLURM_PROCID=1",
    ):
        assert lone_process_notice(_words(quiet)) is None


def test_tasks_of_srun_train_together() -> None:
    assert run_on_ranks(_join_as_task, 2, backend=None) == [(0, 2, 3.0), (1, 2, 3.0)]


def _join_as_task() -> tuple[int, int, float]:
    """Joins without torchrun's variables, and returns rank, size and the sum of rank + 1."""
    rank, port = os.environ["RANK"], os.environ["MASTER_PORT"]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        del os.environ[name]
    os.environ.update(_words(f"SLURM_JOB_ID=7 SLURM_NTASKS=2 SLURM_PROCID={rank} SLURM_LOCALID={rank} SLURM_STEP_ID=0"))
    os.environ.update(SLURM_JOB_NODELIST="localhost", MASTER_PORT=port)
    require_launch()
    join_process_group(DistributedConfig(), LaunchConfig(), torch.device("cpu"), settings=dict, broadcast=None)
    total = torch.tensor(float(rank) + 1)
    torch.distributed.all_reduce(total)
    size = torch.distributed.get_world_size()
    leave_process_group()
    return int(os.environ["RANK"]), size, total.item()
