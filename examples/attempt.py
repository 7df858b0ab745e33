#!/usr/bin/env python3
"""Runs one attempt of a training run, and reports by its exit code whether a cluster should start another attempt.

    examples/attempt.py [--signals-reach-command] FOLDER COMMAND...

FOLDER contains the checkpoints, unless COMMAND contains --save. Exit codes:

    0   the newest checkpoint is of the last iteration, and is new or COMMAND exited with 0
    75   there is a newer checkpoint than at the start: another attempt continues from it, even if --exit-interval
         or --exit-duration-in-mins ended this attempt
    any other: there is no new checkpoint: COMMAND's exit code, or 1 if that was 0 or 75; another attempt would make no
         progress

COMMAND's exit code is not sufficient: torchrun exits with 1 after a SIGTERM although its ranks have saved, and with 0
on a node that was not signalled. SIGTERM and SIGINT are forwarded. Requires only Linux (/proc) and Python.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

CONTINUE = 75  # EX_TEMPFAIL of sysexits.h
POLL_SECONDS = 0.25
LINGER_SECONDS = 5.0  # time for torchrun to exit after its ranks


def main(words: Sequence[str]) -> int:
    """Runs the command line `words` and returns the exit code described in the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--signals-reach-command",
        action="store_true",
        help="Signals to this process also reach COMMAND and cancel the run: do not forward them, and do not request a "
        "further attempt.",
    )
    parser.add_argument("folder", type=Path, help="Folder of the checkpoints.")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="Command to run.")
    args = parser.parse_args(words)
    if not args.command:
        parser.error("there is no COMMAND to run")
    folder = Path(value_of(args.command, "--save") or args.folder)
    before, _ = progress(folder)
    asked = value_of(args.command, "--train-iters")
    attempt = Attempt(args.command, hand_on=not args.signals_reach_command)
    code = attempt.run()
    iteration, last = progress(folder)
    # The checkpoint records the length of the run that wrote it, which may differ from this run's.
    last = int(asked) if asked is not None and asked.isdigit() and last else last
    found = f"iteration {iteration} of {last}" if last else "no checkpoint"
    state = f"the command ended with {code}, {folder} has {found}"
    if 0 < last <= iteration and (code == 0 or iteration != before):
        say(f"{state}: finished")
        return 0
    # A negative code is a signal number, which shells report as 128 + number.
    failure = 128 - code if code < 0 else code or 1
    failure = 1 if failure == CONTINUE else failure
    if attempt.signalled and args.signals_reach_command:
        say(f"{state}: canceled")
        return failure
    # Not "greater": a run that starts from scratch in an older run's folder has lower iterations.
    if iteration != before:
        say(f"{state}: another attempt continues from there")
        return CONTINUE
    say(f"{state}, as at the start: another attempt would make no progress")
    return failure


class Attempt:
    """Runs COMMAND as a child of this process, which may be the first process of a container."""

    def __init__(self, command: Sequence[str], *, hand_on: bool) -> None:
        self.command, self.hand_on = list(command), hand_on
        self.signalled = False
        self.process: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Runs the command until it ends, and returns its exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.receive)
        try:
            self.process = subprocess.Popen(self.command)
        except OSError as error:
            sys.exit(f"attempt.py: the command cannot be started: {error}")
        if self.signalled and self.hand_on:
            self.process.terminate()
        ranks: set[int] = set()
        ended_at: float | None = None
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(POLL_SECONDS)
            # Polls, because there is no notification when a child of a child ends.
            now = ranks_of(self.process.pid)
            ranks |= now
            if not ranks or now:
                ended_at = None
                continue
            ended_at = ended_at or time.monotonic()
            # torchrun waits 300 s for the torchruns of other nodes, which do not arrive if they were signalled and
            # this torchrun was not. It ignores SIGTERM meanwhile, and has no ranks left.
            if time.monotonic() - ended_at > LINGER_SECONDS:
                say(f"the ranks have ended, but the command has not ended within {LINGER_SECONDS:g} s: killing it")
                self.process.kill()
                return self.process.wait()

    def receive(self, number: int, _frame: FrameType | None) -> None:
        """Forwards only the first signal. At a third signal, torchrun would leave its ranks running without a save."""
        if self.hand_on and not self.signalled and self.process is not None:
            self.process.send_signal(number)
        self.signalled = True


def value_of(command: Sequence[str], flag: str) -> str | None:
    """Returns the value of the last occurrence of `flag` in the command, or None."""
    found = None
    for word, following in zip(command, [*command[1:], ""]):
        if word == flag and following:
            found = following
        if word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found


def progress(folder: Path) -> tuple[int, int]:
    """Returns the iteration of the newest checkpoint and the run's last iteration, or zeros without a checkpoint."""
    try:
        # Listing the folder refreshes a network file system's cache, which may contain an outdated tracker file.
        os.listdir(folder)
        iteration = int((folder / "latest_checkpointed_iteration.txt").read_text())
        values = json.loads((folder / f"iter_{iteration:07d}" / "common.json").read_text())
        return iteration, int(values["args"]["train_iters"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0, 0


def ranks_of(process: int) -> set[int]:
    """Returns the children of a process that are ranks, i.e. for which torchrun has set RANK."""
    found = set()
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
            with contextlib.suppress(OSError):
                if any(name.startswith(b"RANK=") for name in Path(f"/proc/{child}/environ").read_bytes().split(b"\0")):
                    found.add(int(child))
    return found


def say(text: str) -> None:
    """Prints a line to standard error."""
    print(f"[attempt] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
