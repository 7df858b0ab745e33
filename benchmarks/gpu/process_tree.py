"""Finds, interrupts and kills the processes that a check has started. Independent of checks and servers. Linux only.

[Note: who belongs to a check] Ranks of tests and of elastic launchers call setsid, so signals to a process group do not
reach them, and a process whose parent has ended belongs to init. Two mechanisms find them. First, the runner is a child
subreaper: descendants whose parent ended become its children, so the tree below it is complete. Except for its server
all of them belong to the check that runs. Second, the server has an environment variable that its descendants inherit.
/proc shows it even after a process has cleared its environment. It also identifies processes of a runner that was
itself killed.

[Note: order of ending] At its limit a check first shows where it hangs. Processes that have a handler for SIGUSR1,
such as the ranks of tests, receive it and print their stacks. The output that they wrote to separate files is copied.
Then all receive SIGINT, so that Python reports the line and cleans up. Processes that still run after GRACE_SECONDS
receive SIGKILL.
"""

import ctypes
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

MARK = "GPU_CHECK_PROCESS"
GRACE_SECONDS = 5.0  # time between SIGINT and SIGKILL; part of the limit
_SHOWN_LINES = 40  # last lines of a descendant's error file to show
_POLL_SECONDS = 0.05
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # options of prctl


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose parent ends. No effect if Linux rejects it."""
    _prctl(_SET_CHILD_SUBREAPER)


def die_with_parent() -> None:
    """Makes the kernel kill this process when its parent ends."""
    _prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL))


def end_all(mark: str, *, spare: int | None = None) -> int:
    """Kills all descendants of this process and all processes with the mark, except `spare`, and returns their number.

    Tries for GRACE_SECONDS. A process in an uninterruptible driver call may survive.
    """
    met: set[int] = set()
    until = time.monotonic() + GRACE_SECONDS
    # A process may fork while the list is read, hence more than one pass.
    while (found := set(descendants(mark)) - {spare}) and time.monotonic() < until:
        met.update(found)
        for pid in found:
            _send(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
        reap_orphans(besides=spare)
    return len(met)


def descendants(mark: str) -> Iterator[int]:
    """Yields the processes below this process and all processes with the mark.

    See [Note: who belongs to a check].
    """
    entry = f"{MARK}={mark}".encode()
    parents = _parents()
    below = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    for pid in parents:
        if pid != os.getpid() and (pid in below or entry in _environment(pid)):
            yield pid


def _parents() -> dict[int, int]:
    """Returns the parent of each process that is not a zombie."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # The name of a program, in parentheses, may contain any characters.
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state not in "ZX":
            found[int(folder.name)] = int(parent)
    return found


def _environment(pid: int) -> Sequence[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ()


def _catches(pid: int, number: int) -> bool:
    """Returns whether a process has a handler for a signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def interrupt(mark: str, log: Path, *, spare: int) -> None:
    """Makes the processes except `spare` print their stacks, then interrupts them. See [Note: order of ending]."""
    found = set(descendants(mark)) - {spare}
    files = {path for pid in found if (path := _error_file(pid)) is not None and path != log.resolve()}
    shown = [pid for pid in found if _catches(pid, signal.SIGUSR1)]
    for pid in shown:
        _send(pid, signal.SIGUSR1)
    if shown:
        time.sleep(0.3)  # lets the handlers write the stacks, because they do not signal when they are done
    with open(log, "a") as stream:
        for path in sorted(files):
            stream.write(f"--- the end of {path}\n" + "".join(_last_lines(path)) + "---\n")
    for pid in found:
        _send(pid, signal.SIGINT)


def _error_file(pid: int) -> Path | None:
    """Returns the file that a process uses as standard error, or None if it is not a regular file."""
    try:
        path = Path(os.readlink(f"/proc/{pid}/fd/2"))
    except OSError:
        return None
    return path if path.is_file() else None


def _last_lines(path: Path) -> list[str]:
    try:
        lines = path.read_text(errors="replace").splitlines(keepends=True)
    except OSError as error:
        return [f"{error}\n"]
    return [line if line.endswith("\n") else line + "\n" for line in lines[-_SHOWN_LINES:]]


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        # It has ended meanwhile, or its number now belongs to another user's process.
        return


def reap_orphans(besides: int | None = None) -> None:
    """Collects the exit statuses of children that have ended, except the child `besides`."""
    for entry in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        try:
            children = [int(pid) for pid in entry.read_text().split()]
        except OSError:
            continue
        for pid in children:
            if pid != besides:
                try:
                    os.waitpid(pid, os.WNOHANG)
                except ChildProcessError:
                    continue


def _prctl(option: int, value: int = 1) -> None:
    _LIBC.prctl(option, value, 0, 0, 0)


_LIBC = ctypes.CDLL(None, use_errno=True)
