"""The environment variables of launchers: torchrun, and Slurm, MPI and Flux without torchrun.

All code reads torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
adopt_launcher sets them from the variables of another launcher. startup_handshake.py connects the ranks.
"""

import os
import re
import zlib
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass

import torch

Environment = Mapping[str, str]

_ADDRESS, _PORT = "MASTER_ADDR", "MASTER_PORT"
# Ports above Linux's range for outgoing connections.
_FIRST_PORT, _NUM_PORTS = 61440, 4096
# Step ids that Slurm reserves for steps that are not started by a user's srun: interactive, batch, extern, pending.
_FIRST_RESERVED_STEP = 0xFFFFFFF0


class LaunchError(ValueError):
    """Raised on each rank whose launcher's environment is incomplete or contradicts itself."""


@dataclass(frozen=True)
class _Names:
    """A launcher's variables. how: how to pass the address of rank 0 with it."""

    title: str
    rank: str
    size: str
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    how: str


_MPIRUN = "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500"
_MPIEXEC = "mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT 29500"


def _mpi(title: str, prefix: str, how: str) -> _Names:
    local = f"{prefix}_LOCAL"
    return _Names(title, f"{prefix}_RANK", f"{prefix}_SIZE", (f"{local}_RANK",), (f"{local}_SIZE",), how)


# The innermost launcher first: mpirun starts its daemons with srun, so its processes also have Slurm's variables.
_LAUNCHERS = (
    _mpi("Open MPI", "OMPI_COMM_WORLD", _MPIRUN),
    _mpi("MVAPICH", "MV2_COMM_WORLD", _MPIEXEC),
    _mpi("MVAPICH", "MVP_COMM_WORLD", _MPIEXEC),
    _Names(
        "jsrun",
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        ("JSM_NAMESPACE_LOCAL_RANK",),
        ("JSM_NAMESPACE_LOCAL_SIZE",),
        "jsrun -E MASTER_ADDR=HOST -E MASTER_PORT=29500",
    ),
    _Names(
        "PMI",
        "PMI_RANK",
        "PMI_SIZE",
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"),
        _MPIEXEC,
    ),
    _Names(
        "Flux",
        "FLUX_TASK_RANK",
        "FLUX_JOB_SIZE",
        ("FLUX_TASK_LOCAL_ID",),
        (),
        "flux run --env=MASTER_ADDR=HOST --env=MASTER_PORT=29500",
    ),
)


@dataclass(frozen=True)
class _Task:
    """One process of a launcher other than torchrun. None: the launcher does not tell.

    source: the variable with the number of processes. address, port: of rank 0. how: how to pass them.
    """

    title: str
    source: str
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    address: str | None
    port: int | None
    how: str


def adopt_launcher(environment: MutableMapping[str, str] | None = None) -> None:
    """Sets torchrun's variables that are missing, if Slurm, MPI or Flux has started several processes.

    Does nothing under torchrun, in a process that is alone, and if given variables contradict the launcher's, which
    launch_problem reports. environment: default os.environ. May be called repeatedly.
    """
    variables = os.environ if environment is None else environment
    try:
        task = _task(variables)
        if task is None or task.size == 1 or _contradiction(task, variables) is not None:
            return
    except LaunchError:
        return  # launch_problem reports it, if ranks are about to connect
    values = {
        "RANK": task.rank,
        "WORLD_SIZE": task.size,
        "LOCAL_RANK": task.local_rank,
        "LOCAL_WORLD_SIZE": task.local_size,
        _ADDRESS: task.address,
        _PORT: task.port,
    }
    if int(variables.get("WORLD_SIZE", task.size)) != task.size:
        return  # each task starts several ranks, and sets their variables
    for name, value in values.items():
        if value is not None and not variables.get(name):
            variables[name] = str(value)


def require_launch() -> None:
    """Calls adopt_launcher before ranks connect. Raises LaunchError if they cannot connect with these variables."""
    adopt_launcher()
    problem = launch_problem(os.environ, num_devices=torch.cuda.device_count())
    if problem is not None:
        raise LaunchError(problem)


def launch_problem(environment: Environment, *, num_devices: int) -> str | None:
    """Returns the reason why the ranks of this environment cannot train together, or None.

    environment: after adopt_launcher. num_devices: GPUs that this process can use.
    """
    try:
        return next(_problems(environment, num_devices=num_devices), None)
    except LaunchError as error:
        return str(error)


def lone_process_notice(environment: Environment) -> str | None:
    """Returns a line to log if a process trains alone in a Slurm allocation for several tasks, else None."""
    tasks = environment.get("SLURM_NTASKS", "1")
    if "WORLD_SIZE" in environment or tasks == "1" or _is_srun_task(environment) or "SLURM_JOB_ID" not in environment:
        return None
    return (
        f"  SLURM_NTASKS is {tasks}, but srun has not started this process: it trains alone; start ranks with srun or "
        "torchrun"
    )


def _problems(environment: Environment, *, num_devices: int) -> Iterator[str]:
    if "TORCHELASTIC_RUN_ID" in environment:
        return
    task = _task(environment)
    if task is not None and task.size > 1:
        if (contradiction := _contradiction(task, environment)) is not None:
            yield contradiction
        lacking = [name for name in (_ADDRESS, _PORT) if not environment.get(name)]
        if lacking:
            yield (
                f"{task.title} started {task.size} processes ({task.source}), but {' and '.join(lacking)} "
                f"{'is' if len(lacking) == 1 else 'are'} not set, so they cannot find rank 0: {task.how}, where HOST "
                "is the machine of rank 0, or start one torchrun per machine"
            )
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if name in environment:
            numbers[name] = _number(environment, name)
    rank, size = numbers.get("RANK"), numbers.get("WORLD_SIZE")
    if size is None:
        if rank is not None:
            yield (
                f"RANK is {rank} in the environment, but WORLD_SIZE is not set: start with torchrun, or unset RANK to "
                "train with one process"
            )
        return
    missing = [name for name in ("RANK", _ADDRESS, _PORT) if not environment.get(name)]
    if missing:
        yield f"WORLD_SIZE is set in the environment, but {', '.join(missing)} is not: start with torchrun"
    elif not 0 < _number(environment, _PORT) < 65536:
        yield f"MASTER_PORT is {environment[_PORT]} in the environment: must be from 1 to 65535"
    if rank is not None and rank >= size:
        yield f"RANK is {rank}: must be below WORLD_SIZE ({size})"
    local, of = numbers.get("LOCAL_RANK"), numbers.get("LOCAL_WORLD_SIZE")
    if local is not None and of is not None and local >= of:
        yield f"LOCAL_RANK is {local}: must be below LOCAL_WORLD_SIZE ({of})"
    if local is None and size > 1 and num_devices > 1:
        yield (
            f"WORLD_SIZE is {size} and this process can use {num_devices} GPUs, but LOCAL_RANK is not set, so all "
            "ranks of a machine would use the first one: set LOCAL_RANK, as torchrun does"
        )


def _contradiction(task: _Task, environment: Environment) -> str | None:
    """Returns the reason why torchrun's variables, as far as they are set, do not describe the launcher's processes."""
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return None
    size = _number(environment, "WORLD_SIZE") if "WORLD_SIZE" in environment else None
    rank = _number(environment, "RANK") if "RANK" in environment else None
    started = f"{task.title} started {task.size} processes ({task.source})"
    advice = "unset RANK and WORLD_SIZE to use the launcher's, or start one torchrun per machine"
    # A task may start several ranks, as one script per machine does, which then sets both variables.
    if size is not None and (size % task.size or size == 0 or (size != task.size and rank is None)):
        return f"WORLD_SIZE is {size} in the environment, but {started}: {advice}"
    if size in (None, task.size) and rank not in (None, task.rank):
        return f"RANK is {rank} in the environment, but this is process {task.rank}, and {started}: {advice}"
    return None


def _task(environment: Environment) -> _Task | None:
    """Returns this process's place among the processes of its launcher, or None if only torchrun or nobody started it.

    Raises LaunchError if the launcher's variables are incomplete.
    """
    if "TORCHELASTIC_RUN_ID" in environment:
        return None
    for names in _LAUNCHERS:
        if names.rank in environment or names.size in environment:
            task = _mpi_task(names, environment)
            return _started_by_srun(task, environment) if names.title == "PMI" else task
    if _is_srun_task(environment):
        return _slurm_task(environment)
    if "PMIX_RANK" in environment and "WORLD_SIZE" not in environment and "SLURM_JOB_ID" not in environment:
        raise LaunchError(
            f"PMIX_RANK is {environment['PMIX_RANK']}, so a launcher of several processes started this one, but no "
            "variable tells how many: set WORLD_SIZE and RANK, or start with torchrun"
        )
    return None


def _started_by_srun(task: _Task, environment: Environment) -> _Task:
    """Returns srun's description of a process to which srun has given PMI's variables, or else `task`.

    Raises LaunchError for PMI's variables of a single process in a step of several tasks, which an outer shell has set.
    """
    if not _is_srun_task(environment):
        return task
    step = _slurm_task(environment)
    if task.size == 1 and step.size > 1:
        raise LaunchError(
            f"{task.source} in the environment, but srun started {step.size} processes ({step.source}), so all of them "
            "would train alone: unset PMI_RANK and PMI_SIZE"
        )
    return step if (task.rank, task.size) == (step.rank, step.size) else task


def _mpi_task(names: _Names, environment: Environment) -> _Task:
    for name, other in ((names.rank, names.size), (names.size, names.rank)):
        if name not in environment:
            raise LaunchError(f"{other} is set in the environment, but {name} is not: {names.title} sets both")
    size, local_size = _number(environment, names.size), _first_number(environment, names.local_size)
    # A job's name, which differs between jobs. All processes are on this machine.
    job = environment.get("PMIX_NAMESPACE") if names.title == "Open MPI" and local_size == size else None
    return _Task(
        names.title,
        f"{names.size}={size}",
        _below(_number(environment, names.rank), size, names.rank, names.size),
        size,
        _first_number(environment, names.local_rank),
        local_size,
        address=None if job is None else "127.0.0.1",
        port=None if job is None else _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS,
        how=f"use {names.how}",
    )


def _is_srun_task(environment: Environment) -> bool:
    """Returns whether srun started this process. The script of sbatch and the shell of salloc have PROCID 0 as well.

    Raises LaunchError if process 0 of the same launch would take itself for such a script.
    """
    if "SLURM_PROCID" not in environment:
        return False
    step = environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID", ""))
    if step.isdigit():
        return int(step) < _FIRST_RESERVED_STEP
    # Scripts and shells have the id of their job.
    if "SLURM_STEP_NUM_TASKS" in environment or "SLURM_JOB_ID" not in environment:
        return True
    if environment["SLURM_PROCID"] != "0":
        raise LaunchError(
            f"SLURM_PROCID is {environment['SLURM_PROCID']} and SLURM_STEP_ID is not set, so process 0 cannot tell "
            "that srun started it: pass SLURM_STEP_ID on to each process, as srun sets it"
        )
    return False


def _slurm_task(environment: Environment) -> _Task:
    # salloc's shell keeps the allocation's SLURM_NTASKS in a step of one task.
    counts = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    source = next((name for name in counts if name in environment), None)
    if source is None:
        raise LaunchError("SLURM_PROCID is set in the environment, but SLURM_NTASKS is not: srun sets both")
    size = _number(environment, source)
    rank = _below(_number(environment, "SLURM_PROCID"), size, "SLURM_PROCID", source)
    job, step = (environment.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    nodes = next((environment[name] for name in _NODE_LISTS if name in environment), "")
    # Rank 0 is on the first node, except in these cases.
    is_elsewhere = environment.get("SLURM_DISTRIBUTION", "").startswith("arbitrary") or "SLURM_HET_SIZE" in environment
    number = zlib.crc32(f"{job}.{step}".encode())
    return _Task(
        "srun",
        f"{source}={size}",
        rank,
        size,
        _first_number(environment, ("SLURM_LOCALID",)),
        _tasks_of_node(environment),
        address=None if is_elsewhere else first_node(nodes),
        port=_FIRST_PORT + number % _NUM_PORTS,
        how="export MASTER_ADDR=HOST before srun",
    )


_NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")


def first_node(nodes: str) -> str | None:
    """Returns the first name of a Slurm node list such as "gpu[007-010,12],login1". None: the list is empty."""
    match = re.match(r"\s*((?:[^,\[\]]|\[[^\]]*\])+)", nodes)
    if match is None:
        return None
    # In each bracket, the first number or the start of the first range. Leading zeros are part of the name.
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", match[1]).strip() or None


def _tasks_of_node(environment: Environment) -> int | None:
    """Returns the number of tasks on this node, from counts such as "2(x3),1": three nodes with 2, and one with 1."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", ""))
    node = environment.get("SLURM_NODEID", "0")
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else None


def _first_number(environment: Environment, names: tuple[str, ...]) -> int | None:
    return next((_number(environment, name) for name in names if name in environment), None)


def _number(environment: Environment, name: str) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdigit()):
        raise LaunchError(f"{name} is {text!r} in the environment: must be a whole number of at least 0")
    return int(text)


def _below(rank: int, size: int, name: str, of: str) -> int:
    if rank >= size:
        raise LaunchError(f"{name} is {rank} in the environment: must be below {of} ({size})")
    return rank
