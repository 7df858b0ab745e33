"""Runs a function on N ranks, forked from a warm server that has already imported the slow modules.

Every call uses fresh processes, so no state, seed or group is left over from an earlier test. Independent of pytest.
"""

import faulthandler
import multiprocessing
import os
import pickle
import random
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import torch
import torch.distributed as dist

from megatron.core.group_collectives import RemoteRankError
from megatron.tools.ports import free_port

SEED = 1234
ROOT = Path(__file__).resolve().parents[1]
_GLOO_LOST_A_RANK = r"Connection (closed|reset) by peer|Timed out waiting|Broken pipe"
GRACE_SECONDS = 10.0  # time in which other ranks may end by themselves after the first failure
OUTLIVED_SECONDS = 10.0
# Modules that are slow to import and that rank functions need. None of them starts a thread or calls CUDA, since
# neither survives a fork.
PRELOAD = ["numpy", "pytest", "rich.progress", "tokenizers", "yaml"]
PRELOAD += ["torch._dynamo", "torch.distributed.checkpoint", "torch.testing", "torch.utils.tensorboard"]
PRELOAD += ["pretrain_gpt", "tests.warm_server"]


@dataclass
class RankOutcome:
    """The outcome of one rank: its return value, or the error that ended it, and its output in both cases.

    outlived: whether processes forked by the rank were alive OUTLIVED_SECONDS after the last rank had ended.
    """

    rank: int
    value: Any = None
    error: BaseException | None = None
    ended_at: float = 0.0
    stdout: str = ""
    stderr: str = ""
    outlived: bool = False

    @property
    def exit_code(self) -> int:
        """The exit status that the function would have had as the main program of a process."""
        if isinstance(self.error, SystemExit):
            code = self.error.code
            return code if isinstance(code, int) else int(code is not None)
        return int(self.error is not None)


@dataclass(frozen=True)
class _Job:
    """Settings of one rank, pickled and sent to its process."""

    rank: int
    world_size: int
    backend: str | None
    timeout: float
    folder: Path
    environment: Mapping[str, str]


def run_on_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, backend: str | None = "gloo", timeout: float = 120
) -> list[Any]:
    """Runs module-level `fn(*args)` on every rank of a fresh process group, and returns the values in rank order.

    Raises the error of the rank that failed first, with the rank and its traceback as a note; errors that only report
    the failure of a different rank are raised last. Raises TimeoutError when ranks do not end, and prints their stacks.
    backend: None leaves init_process_group to `fn`. The environment variables of torchrun are always set.
    """
    outcomes = launch_on_ranks(fn, world_size, *args, backend=backend, timeout=timeout)
    for outcome in outcomes:
        sys.stdout.write(outcome.stdout)
        sys.stderr.write(f"--- rank {outcome.rank}\n{outcome.stderr}" if outcome.stderr else "")
    failed = [outcome for outcome in outcomes if outcome.exit_code != 0]
    if failed:
        first = min(failed, key=lambda outcome: (_is_consequence(outcome.error), outcome.ended_at))
        assert first.error is not None
        raise first.error
    return [outcome.value for outcome in outcomes]


def launch_on_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str | None = "gloo",
    timeout: float = 120,
    grace: float = GRACE_SECONDS,
    env: Mapping[str, str] | None = None,
) -> list[RankOutcome]:
    """Runs like run_on_ranks, but returns the outcomes of all ranks, including failed ones, instead of raising."""
    call = pickle.dumps((fn, args))
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **(env or {})}
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        jobs = [_Job(rank, world_size, backend, timeout, Path(folder), environment) for rank in range(world_size)]
        started = [_start(job, call) for job in jobs]
        try:
            outcomes = _collect(started, deadline=time.monotonic() + timeout, grace=grace)
        finally:
            for process, _ in started:
                _kill(process)
        end = time.monotonic() + OUTLIVED_SECONDS
        for outcome, (_, receiver) in zip(outcomes, started):
            outcome.outlived = not _is_closed(receiver, until=end)
        for outcome in outcomes:
            outcome.stdout = _output_path(Path(folder), outcome.rank, "stdout").read_text(errors="replace")
            outcome.stderr = _output_path(Path(folder), outcome.rank, "stderr").read_text(errors="replace")
    return outcomes


# Functions that run in the parent.


def _start(job: _Job, call: bytes) -> tuple[BaseProcess, Connection]:
    context = _warm_server()
    for name in ("stdout", "stderr"):
        _output_path(job.folder, job.rank, name).touch()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_rank_main, args=(job, call, sender), name=f"rank {job.rank}")
    process.start()
    sender.close()
    return process, receiver


@cache
def _warm_server() -> ForkServerContext:
    """Starts the process that ranks are forked from, once. One thread, as BLAS libraries start threads on import."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    # torch queries NVML instead of CUDA for GPUs, because a process that has called CUDA must not fork.
    # The server does not inherit sys.path, and silently skips modules that it cannot import.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with patch.dict(os.environ, OMP_NUM_THREADS="1", PYTORCH_NVML_BASED_CUDA_CHECK="1", PYTHONPATH=path):
        forkserver.ensure_running()
    return context


def _collect(started: list[tuple[BaseProcess, Connection]], *, deadline: float, grace: float) -> list[RankOutcome]:
    """Waits for the outcomes of all ranks, for at most `grace` seconds after the first failure."""
    outcomes: dict[int, RankOutcome] = {}
    pending = {receiver: rank for rank, (_, receiver) in enumerate(started)}
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = pending.pop(receiver)
            outcomes[rank] = _receive(rank, started[rank])
            if outcomes[rank].exit_code != 0:
                deadline = min(deadline, time.monotonic() + grace)
    failed = [rank for rank, outcome in outcomes.items() if outcome.exit_code != 0]
    stuck = sorted(pending.values())
    _print_stacks([started[rank][0] for rank in stuck])
    for rank in stuck:
        reason = f"after rank {failed[0]} had failed" if failed else "within the timeout"
        text = f"{_named(stuck)} of {len(started)} did not end {reason}; their stacks are in their stderr"
        outcomes[rank] = RankOutcome(rank, error=TimeoutError(text), ended_at=time.monotonic())
    return [outcomes[rank] for rank in range(len(started))]


def _receive(rank: int, started: tuple[BaseProcess, Connection]) -> RankOutcome:
    process, receiver = started
    try:
        outcome = pickle.loads(receiver.recv_bytes())
        assert isinstance(outcome, RankOutcome)
        return outcome
    except EOFError:
        process.join(GRACE_SECONDS)
        error = ChildProcessError(f"rank {rank} died without a result, exit code {process.exitcode}")
        return RankOutcome(rank, error=error, ended_at=time.monotonic())


def _is_closed(receiver: Connection, *, until: float) -> bool:
    """Returns whether a rank and its forked processes have ended, by waiting until all have closed the rank's pipe."""
    while receiver.poll(max(0.0, until - time.monotonic())):
        try:
            receiver.recv_bytes()
        except EOFError:
            return True
    return False


def _print_stacks(processes: list[BaseProcess]) -> None:
    """Makes all ranks that did not end write their stacks to stderr, before any of them can fail as a consequence."""
    for process in processes:
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGUSR1)
    if processes:
        time.sleep(0.2)


def _named(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _kill(process: BaseProcess) -> None:
    """Kills a rank and its process group, which the rank leads."""
    if process.is_alive() and process.pid is not None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            process.kill()
    process.join()
    process.close()


def _is_consequence(error: BaseException | None) -> bool:
    if isinstance(error, (RemoteRankError, TimeoutError, dist.DistError)):
        return True
    # gloo's messages when another rank has ended or does not respond.
    return isinstance(error, RuntimeError) and re.search(_GLOO_LOST_A_RANK, str(error)) is not None


def _output_path(folder: Path, rank: int, name: str) -> Path:
    return folder / f"rank{rank}.{name}"


# Functions that run in the rank's process.


def _rank_main(job: _Job, call: bytes, sender: Connection) -> None:
    _prepare_process(job)
    outcome = RankOutcome(job.rank)
    store = None
    try:
        fn, args = pickle.loads(call)
        if job.backend is not None:
            store = _init_process_group(job, job.backend)
        outcome.value = fn(*args)
    except BaseException as error:  # any error is reported to the parent
        error.add_note(f"rank {job.rank} of {job.world_size}:\n{traceback.format_exc()}")
        outcome.error = error
    outcome.ended_at = time.monotonic()
    sys.stdout.flush()
    sys.stderr.flush()
    sender.send_bytes(_pickle(outcome))
    if store is not None:
        store.set(_key("ended", job.rank), "")
    if outcome.error is None and dist.is_initialized():
        if store is not None:
            # A rank that ends closes its sockets, to which other ranks may still connect while they build a group.
            with suppress(dist.DistStoreError):
                _wait_for_ranks(store, job, "ended", seconds=GRACE_SECONDS)
        dist.destroy_process_group()
    # A failed rank exits immediately. The other ranks notice its failure by the closed sockets.
    os._exit(0)


def _prepare_process(job: _Job) -> None:
    os.setsid()
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        with open(_output_path(job.folder, job.rank, name), "wb") as stream:
            os.dup2(stream.fileno(), descriptor)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    faulthandler.register(signal.SIGUSR1)
    faulthandler.dump_traceback_later(job.timeout + 60, exit=True)  # in case the parent dies
    rank, size = str(job.rank), str(job.world_size)
    # The server has the environment variables from the time when it was started.
    os.environ.clear()
    os.environ.update(
        job.environment, OMP_NUM_THREADS="1", RANK=rank, WORLD_SIZE=size, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=size
    )
    torch.set_num_threads(1)
    random.seed(SEED)
    numpy.random.seed(SEED)
    torch.manual_seed(SEED)


def _init_process_group(job: _Job, backend: str) -> dist.Store:
    if backend == "nccl":
        torch.cuda.set_device(job.rank)
    store = dist.FileStore(str(job.folder / "store"), job.world_size)
    dist.init_process_group(
        backend, store=store, rank=job.rank, world_size=job.world_size, timeout=timedelta(seconds=job.timeout + 60)
    )
    # Otherwise a rank that fails immediately could close its sockets while other ranks still connect to it.
    store.set(_key("connected", job.rank), "")
    _wait_for_ranks(store, job, "connected", seconds=job.timeout)
    return store


def _wait_for_ranks(store: dist.Store, job: _Job, state: str, *, seconds: float) -> None:
    store.wait([_key(state, rank) for rank in range(job.world_size)], timedelta(seconds=seconds))


def _key(state: str, rank: int) -> str:
    return f"{state} {rank}"


def _pickle(outcome: RankOutcome) -> bytes:
    """Pickles an outcome. If its value or error cannot be pickled, a RuntimeError with the message replaces it."""
    try:
        data = pickle.dumps(outcome)
        pickle.loads(data)  # exceptions with a custom __init__ may fail only here
        return data
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        cause = outcome.error or error
        readable = RuntimeError(f"{type(cause).__name__}: {cause}")
        readable.__notes__ = list(vars(cause).get("__notes__", []))
        return pickle.dumps(RankOutcome(outcome.rank, error=readable, ended_at=outcome.ended_at))
