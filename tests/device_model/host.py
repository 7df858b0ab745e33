"""Runs functions on ranks, each of which sees one modelled GPU.

    from tests.device_model.host import on_modelled_gpus
    results = on_modelled_gpus(function, 2, *args)   # function(*args) on two ranks; returns the values in rank order

Torch queries the capabilities of a GPU only once, when it is imported. So these ranks cannot be forked from the server
of the other tests. Each process that calls on_modelled_gpus starts a separate process with a second server.
"""

import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

from tests import harness

PRELOAD = ["tests.device_model.library", *harness.PRELOAD, "tests.device_model.project", "tests.distributed.tiny_runs"]


def on_modelled_gpus(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 500) -> list[Any]:
    """Runs module-level `fn(*args)` on every rank of a fresh process group; returns the values in rank order.

    Raises the error of the rank that failed first; see harness.run_on_ranks.
    """
    connection = _host()
    connection.send_bytes(pickle.dumps((fn, world_size, args, timeout)))
    is_error, value = pickle.loads(connection.recv_bytes())
    if is_error:
        raise value
    return list(value)


@cache
def _host() -> Connection:
    ours, theirs = multiprocessing.Pipe()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "tests.device_model.host", str(theirs.fileno())]
    subprocess.Popen(words, cwd=harness.ROOT, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()
    return ours


def main() -> None:
    """Serves the calls of one process until that process ends."""
    harness.PRELOAD[:] = PRELOAD
    connection = Connection(int(sys.argv[1]))
    while True:
        try:
            fn, world_size, args, timeout = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            answer = False, harness.run_on_ranks(_on_rank, world_size, fn, args, timeout=timeout)
        except BaseException as error:
            answer = True, error
        connection.send_bytes(_pickled(answer))


def _pickled(answer: tuple[bool, Any]) -> bytes:
    try:
        data = pickle.dumps(answer)
        pickle.loads(data)
        return data
    except (pickle.PicklingError, TypeError, AttributeError):
        return pickle.dumps((True, RuntimeError(f"{type(answer[1]).__name__}: {answer[1]}")))


def _on_rank(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    from tests.device_model.project import install_model  # imported only in the rank, since it changes torch

    install_model()
    return fn(*args)


if __name__ == "__main__":
    main()
