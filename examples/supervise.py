#!/usr/bin/env python
"""Keeps a training command running on this machine: restarts it after any failure until it succeeds.

    examples/supervise.py [--max-failures N] torchrun ... pretrain_gpt.py ... --save DIR --save-interval 100

torchrun --max-restarts survives the death of a rank. This supervisor also survives the death of torchrun, whose ranks
may continue to run, and of the supervisor: when restarted with the same --save, it kills the remaining processes of the
previous run and continues from the last checkpoint. Run one supervisor per machine. Requires only Linux (/proc) and
Python.
"""

import argparse
import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from types import FrameType

MARK = "SUPERVISED_RUN"  # in the environment of all processes that the command starts
COUNT = "SUPERVISOR_RESTART_COUNT"  # tells pretrain_gpt.py to continue from --save
TRACKER = "latest_checkpointed_iteration.txt"
TERMINATE_SECONDS = 30.0  # time within which processes must end after a SIGKILL


def main(words: Sequence[str]) -> int:
    """Runs the command line `words`. Returns 0, or the exit code of the command's last failure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--max-failures", type=int, default=3, help="Give up after this many failures since the last new checkpoint."
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="Command to run, which must contain --save DIR.")
    args = parser.parse_args(words)
    if args.max_failures < 1:
        parser.error(f"--max-failures is {args.max_failures}: must be 1 or more")
    # argparse keeps the `--` that separates its options from the command.
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    folder = save_folder(command)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"supervise.py: --save {folder} cannot be written: {error}")
    # The lock is released however this process ends, because child processes do not inherit it.
    with (folder / f"supervisor.{socket.gethostname()}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another supervisor of --save {folder} is running on this machine: exiting")
            return 1
        return Supervisor(command, folder, max_failures=args.max_failures).run()


def save_folder(command: Sequence[str]) -> Path:
    """Returns the folder of --save in the command. Exits if there is none."""
    for word, following in zip(command, [*command[1:], ""]):
        if word == "--save" and following:
            return Path(following)
        if word.startswith("--save="):
            return Path(word.partition("=")[2])
    sys.exit("supervise.py: the command must contain --save DIR, from which a restart continues")


class Supervisor:
    """Runs the command in a loop.

    State that must outlive this process is stored in `folder`: the mark of its processes and the number of starts.
    """

    def __init__(self, command: Sequence[str], folder: Path, *, max_failures: int) -> None:
        self.command, self.folder, self.max_failures = list(command), folder, max_failures
        self.state_file = folder / f"supervisor.{socket.gethostname()}.json"
        self.process: subprocess.Popen[bytes] | None = None
        self.told_to_end = False

    def run(self) -> int:
        """Starts the command until it succeeds, is told to end, or fails too often without a new checkpoint."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.end)
        mark, starts = self.state()
        failures = 0
        while True:
            end_marked(mark)
            before = self.progress()
            code = self.start_once(mark, starts)
            starts += 1
            if code == 0 or self.told_to_end:
                end_marked(mark)
                say(f"the command ended with {code}" + (", as requested" if self.told_to_end else ""))
                # A run that was told to end continues when it is restarted. A run that succeeded is over.
                if not self.told_to_end:
                    self.state_file.unlink()
                return code
            failures = 1 if self.progress() != before else failures + 1
            say(f"the command ended with {code}; failures since the last new checkpoint: {failures}")
            if failures >= self.max_failures:
                end_marked(mark)
                say(f"giving up; the last checkpoint is {self.progress() or 'none'}")
                return code

    def state(self) -> tuple[str, int]:
        """Returns the mark of this run's processes, and how often the run was started.

        The number includes the starts by a supervisor that was killed.
        """
        try:
            known = json.loads(self.state_file.read_text())
            mark, starts = str(uuid.UUID(known["mark"])), int(known["starts"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return str(uuid.uuid4()), 0
        say(f"continuing after a supervisor that was killed: {starts} starts so far")
        return mark, starts

    def start_once(self, mark: str, starts: int) -> int:
        """Runs the command until it ends, and returns its exit code."""
        # Written before the process starts, so that the next supervisor finds all processes.
        temporary = self.state_file.with_suffix(".tmp")
        temporary.write_text(json.dumps({"mark": mark, "starts": starts + 1}))
        temporary.replace(self.state_file)
        say(f"start {starts + 1}: {' '.join(self.command)}")
        try:
            self.process = subprocess.Popen(self.command, env={**os.environ, MARK: mark, COUNT: str(starts)})
        except OSError as error:
            sys.exit(f"supervise.py: the command cannot be started: {error}")
        if self.told_to_end:
            self.process.terminate()
        return self.process.wait()

    def progress(self) -> str:
        """Returns the name of the latest checkpoint from the tracker file, or "" if there is none."""
        try:
            return (self.folder / TRACKER).read_text().strip()
        except OSError:
            return ""

    def end(self, number: int, _frame: FrameType | None) -> None:
        """Forwards a signal to the command, which is then not restarted."""
        self.told_to_end = True
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)


def end_marked(mark: str) -> None:
    """Kills every process whose environment contains the mark, i.e. the remaining processes of an earlier start."""
    found = marked(mark)
    if not found:
        return
    say(f"ending processes of an earlier start: {', '.join(map(str, sorted(found)))}")
    # Not SIGTERM, because the remaining processes would save although other ranks of their run have ended.
    deadline = time.monotonic() + TERMINATE_SECONDS
    while found and time.monotonic() < deadline:
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)
        found = marked(mark)
    if found:
        sys.exit(f"supervise.py: processes {sorted(found)} cannot be ended: a device may hang")


def marked(mark: str) -> list[int]:
    """Returns this user's processes whose environment contains the mark.

    A reused process id is not mistaken for one of them, because its environment differs.
    """
    wanted, own = f"{MARK}={mark}".encode(), os.getpid()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == own:
            continue
        # Other users' environments cannot be read, and processes may end meanwhile. Zombies do not have to be killed.
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def say(text: str) -> None:
    """Prints a line with the time to standard error."""
    print(f"[supervise {datetime.now():%Y-%m-%d %H:%M:%S}] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
