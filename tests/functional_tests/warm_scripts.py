"""Runs shell scripts whose $PYTHON, python and torchrun are clients of this process. No tests.

The scripts are exactly those that users run, but their programs run on warm ranks, without spending time on imports.
"""

import importlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed.run import get_args_parser

from tests.functional_tests.launch import ROOT
from tests.harness import launch_on_ranks

# -SE skips site and the user's settings, which the client does not need, so it starts in a few milliseconds.
_CLIENT = """#!{python} -SE
import json, os, socket, sys
words = sys.argv[1:]
if words[:1] == ["-"]:
    words = ["-c", sys.stdin.read()]
with socket.socket(socket.AF_UNIX) as link:
    link.connect({address!r})
    link.sendall(json.dumps([{before!r} + words, os.getcwd(), dict(os.environ)]).encode() + b"\\n")
    code, out, err = json.loads(link.makefile().read())
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""
_TORCHRUN = ["-m", "torch.distributed.run"]


@dataclass(frozen=True)
class Launch:
    """A program that a script started with torchrun. torchrun: arguments of torchrun. argv: the program's arguments."""

    torchrun: list[str]
    argv: list[str]
    environment: Mapping[str, str]


@dataclass
class Finished:
    """Results of a script that has ended."""

    exit_code: int = 0
    stdout: str = ""
    stderr: str = ""
    launches: list[Launch] = field(default_factory=list)


def run_script(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path = ROOT,
    launching: bool = True,
    timeout: float = 300,
) -> Finished:
    """Runs `command` with clients as described above. cwd: the repository, or a folder with links to its files.

    launching: if False, programs under torchrun are not run but only recorded in `launches`, as for other machines.
    """
    finished = Finished()
    with tempfile.TemporaryDirectory(prefix="script-") as name, socket.socket(socket.AF_UNIX) as listener:
        folder = Path(name)
        listener.bind(str(folder / "socket"))
        listener.listen()
        for program, before in (("python", []), ("torchrun", _TORCHRUN)):
            client = folder / "bin" / program
            client.parent.mkdir(exist_ok=True)
            client.write_text(_CLIENT.format(python=sys.executable, address=str(folder / "socket"), before=before))
            client.chmod(0o755)
        environment = {**os.environ, **env, "PYTHON": str(folder / "bin" / "python")}
        environment["PATH"] = f"{folder / 'bin'}:{environment['PATH']}"
        with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
            process = subprocess.Popen(list(command), cwd=cwd, env=environment, stdout=out, stderr=err)
            try:
                while process.poll() is None:
                    if select.select([listener], [], [], 0.02)[0]:
                        _answer(listener, finished, launching=launching, timeout=timeout)
            finally:
                process.kill()
                finished.exit_code = process.wait()
        finished.stdout, finished.stderr = ((folder / one).read_text() for one in ("stdout", "stderr"))
    return finished


def _answer(listener: socket.socket, finished: Finished, *, launching: bool, timeout: float) -> None:
    """Runs the command that a client was called with, and sends the client its exit code and output."""
    link, _ = listener.accept()
    with link:
        words, folder, environment = json.loads(link.makefile().readline())
        processes = 1
        if words[:2] == _TORCHRUN:
            launcher = words[len(_TORCHRUN) :]
            options = get_args_parser().parse_args(launcher)
            words = [options.training_script, *options.training_script_args]
            finished.launches.append(Launch(launcher[: -len(words)], words[1:], environment))
            processes = int(options.nproc_per_node) if launching else 0
        run = _execute if words[0] == "-c" else _main
        outcomes = launch_on_ranks(run, processes, words, folder, backend=None, env=environment, timeout=timeout)
        code = max((outcome.exit_code or outcome.value for outcome in outcomes), default=0)
        written = ("".join(vars(outcome)[name] for outcome in outcomes) for name in ("stdout", "stderr"))
        link.sendall(json.dumps([code, *written]).encode())


def _main(words: list[str], folder: str) -> int:
    """Calls the main function of a program, as running its file would."""
    os.chdir(folder)
    module = ".".join(Path(words[0]).resolve().relative_to(ROOT).with_suffix("").parts)
    return int(vars(importlib.import_module(module))["main"](words[1:]) or 0)


def _execute(words: list[str], folder: str) -> int:
    """Executes the code after -c, or of stdin."""
    os.chdir(folder)
    exec(words[1], {"__name__": "__main__"})
    return 0
