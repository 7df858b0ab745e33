"""Runs each check in a fork of one process that has imported the slow modules. Sets no time limits.

[Note: fork server] Importing torch, Triton and this project takes 10 s on a machine with a GPU. The server does it once
and never calls CUDA, which does not survive a fork, so each check has a CUDA context of its own and a crash costs one
check. The runner itself imports none of these modules. If an import fails, the checks that need it fail by themselves.
If one crashes, hangs or uses the GPU, the runner starts a server without imports. The server runs one check at a time
and is killed with its runner; a check is killed with its server.
"""

import argparse
import faulthandler
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.gpu.journal import ERROR
from benchmarks.gpu.process_tree import die_with_parent
from benchmarks.gpu.protocol import result_line

# torch queries NVML instead of CUDA for GPUs, also in checks, which may fork. BLAS libraries start no threads.
ENVIRONMENT = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "OMP_NUM_THREADS": "1"}
_USED_BY_CUDA = "/dev/nvidia-uvm"  # opened by CUDA's initialization, but not by NVML
_MOST_BYTES = 1 << 16  # of one read
_FORK_SECONDS = 20


class ServerEnded(Exception):
    """The server has ended, and with it the check that it ran."""


@dataclass(frozen=True)
class Program:
    """A module whose main() is a check, with its command-line arguments and environment variables."""

    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str]


class ForkServer:
    """The runner's side of a server.

    preload: modules to import. log: file to which the server and its checks append their output. environment: of the
    server.
    """

    def __init__(self, preload: Sequence[str], *, log: Path, folder: Path, environment: Mapping[str, str]) -> None:
        self.preload = preload
        ours, theirs = socket.socketpair()
        with theirs, open(log, "ab") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu.fork_server", str(theirs.fileno()), str(log), *preload],
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a key press that interrupts the runner does not reach the server
                preexec_fn=die_with_parent,
            )
        self._socket, self._rest = ours, b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self, seconds: float) -> str | None:
        """Waits for the imports. Returns why the server must not be used, or None. Raises ServerEnded."""
        answer = self._receive(seconds)
        if answer is None:
            return f"the imports took more than {seconds:.0f} s"
        for module, error in answer["failed"].items():
            print(f"{module} could not be imported: {error}", flush=True)
        return f"an import initialized CUDA, which opened {_USED_BY_CUDA}" if answer["uses_gpu"] else None

    def start(self, program: Program) -> int:
        """Starts a check and returns its process id. Raises ServerEnded."""
        try:
            self._socket.sendall(json.dumps(asdict(program)).encode() + b"\n")
        except OSError as error:
            raise ServerEnded from error
        answer = self._receive(_FORK_SECONDS)
        if answer is None:
            raise ServerEnded
        return int(answer["pid"])

    def wait(self, seconds: float) -> int | None:
        """Waits for the check. Returns its exit status, negative for a signal, or None. Raises ServerEnded."""
        answer = self._receive(seconds)
        return None if answer is None else int(answer["status"])

    def end(self) -> None:
        """Kills the server, and so its check."""
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def _receive(self, seconds: float) -> dict[str, Any] | None:
        """Returns the next message, or None if it does not arrive in time."""
        self._socket.settimeout(seconds)
        while b"\n" not in self._rest:
            try:
                new = self._socket.recv(_MOST_BYTES)
            except TimeoutError:
                return None
            except OSError as error:
                raise ServerEnded from error
            if not new:
                raise ServerEnded
            self._rest += new
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


# Functions that run in the server.


def main() -> None:
    """Imports modules, then runs checks until the runner closes the connection."""
    options = parse_options()
    connection = socket.socket(fileno=options.connection)
    failed = {}
    for module in options.modules:
        try:
            importlib.import_module(module)
        except BaseException as error:  # whatever it is, checks report it too
            traceback.print_exc()
            failed[module] = f"{type(error).__name__}: {str(error)[:300]}"
    _send(connection, failed=failed, uses_gpu=_uses_gpu())
    with connection, connection.makefile("rb") as requests:
        for request in requests:
            program = Program(**json.loads(request))
            sys.stdout.flush()
            sys.stderr.flush()
            server = os.getpid()
            # Python discards signals that arrive during a fork, so the child receives them when `run` is ready.
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            child = os.fork()
            if child == 0:
                break
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            _send(connection, pid=child)
            _send(connection, status=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        else:
            return
    # In the check's process, outside the loop, so that it ends like any program.
    die_with_parent()
    if os.getppid() == server:
        run(program, options.log)


def _send(connection: socket.socket, **values: object) -> None:
    connection.sendall(json.dumps(values).encode() + b"\n")


def _uses_gpu() -> bool:
    """Returns whether this process has initialized CUDA."""
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor with which the folder was read
            if os.readlink(entry) == _USED_BY_CUDA:
                return True
    return False


# Functions that run in the process of a check.


def run(program: Program, log: Path) -> NoReturn:
    """Runs a check as the main program of this process. An exception becomes a result."""
    os.setsid()
    _redirect_output(log)
    os.environ.clear()
    os.environ.update(program.environment)
    # On SIGINT all threads print their stacks before Python raises KeyboardInterrupt. A thread that hangs in a driver
    # call never raises it, but its stack shows where it hangs.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable()
    faulthandler.register(signal.SIGINT, all_threads=True, chain=True)
    sys.argv = [program.module, *program.arguments]
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        importlib.import_module(program.module).main()
    except SystemExit as error:
        if isinstance(error.code, str):
            sys.stdout.write(f"\n{result_line({ERROR: error.code})}\n")
        raise
    except KeyboardInterrupt:
        raise  # the runner interrupted the check, and knows why
    except BaseException as error:  # every failure of a check is a result
        traceback.print_exc()
        sys.stdout.write(f"\n{result_line({ERROR: f'{type(error).__name__}: {str(error)[:500]}'})}\n")
        sys.exit(1)
    sys.exit(0)


def _redirect_output(log: Path) -> None:
    with open(log, "ab") as stream, open(os.devnull) as nothing:
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)
        os.dup2(nothing.fileno(), 0)
    # Line by line, so that a crash loses no line.
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)


def parse_options() -> argparse.Namespace:
    """Parses the command line of the server, which only the runner writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("connection", type=int, help="file descriptor of the socket to the runner")
    parser.add_argument("log", type=Path, help="file to which checks append their output")
    parser.add_argument("modules", nargs="*", help="modules to import")
    return parser.parse_args()


if __name__ == "__main__":
    main()
