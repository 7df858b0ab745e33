"""Runs the GPU checks of registry.py: call A measures (480 s at most), call B tests (170 s, directly after A).

    python3 benchmarks/gpu/run_all.py --call A --out FOLDER               # then --call B, on the same machine
    python3 benchmarks/gpu/run_all.py --out FOLDER --resume               # both calls; skips what has a verdict
    python3 benchmarks/gpu/run_all.py --only tests_stash --out FOLDER     # by name, including checks of no call
    python3 benchmarks/gpu/run_all.py --dry-run --out FOLDER              # small, also on a CPU
    python3 benchmarks/gpu/run_all.py --list                              # expected seconds, and why

Requires Python >= 3.11, torch, Triton, NumPy, pytest, hypothesis and this project's packages, but no network,
installation or make. Each check is a fork of one server that has imported them, and has a deadline of its own: it may
use time that is left over, but not what later checks are expected to take. At its deadline it prints its stacks and is
killed with all its descendants. This program itself does not import torch.

FOLDER has at most seven files: checks.jsonl, with a line for each result as soon as it is reported and a verdict for
each check; output.log, the ends of all output; running.json while a check runs; and at most four files of checks, none
of them by a check of call A or B. Outside a git clone, the variable COMMIT names the commit.

--resume skips checks that passed, failed or timed out with the same code (benchmarks/source.py), in FOLDER or in
benchmarks/results.
docs/gpu_results.md is rewritten when results go to benchmarks/results. The exit status is 1 if a check failed, was
ended at its deadline, had no time for some of its sides or was not run.
"""

import argparse
import importlib.metadata
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

_BEGAN = time.monotonic()  # before the imports of this project, which count as part of the first call
ROOT = Path(__file__).resolve().parent.parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from benchmarks.gpu.fork_server import ENVIRONMENT, ForkServer, Program, ServerEnded  # noqa: E402
from benchmarks.gpu.journal import ERROR, Journal, OutputReader, Record, Running, Verdict, Where  # noqa: E402
from benchmarks.gpu.process_tree import (  # noqa: E402
    GRACE_SECONDS,
    MARK,
    adopt_orphans,
    descendants,
    end_all,
    interrupt,
    reap_orphans,
)
from benchmarks.gpu.protocol import DRY_RUN, INCOMPLETE, NEEDS_GPU, NOT_CHECKED, RESULT  # noqa: E402
from benchmarks.gpu.registry import (  # noqa: E402
    CALL_SECONDS,
    CHECKS,
    END_REASON,
    END_SECONDS,
    MOST_FILE_BYTES,
    MOST_FILES,
    MOST_FOLDERS,
    PRELOAD,
    RUNNER,
    START_REASON,
    START_SECONDS,
    Check,
)
from benchmarks.gpu.results_page import RESULTS, write_pages  # noqa: E402
from benchmarks.source import CodeBase, commit_of_tree  # noqa: E402

SHOWN_LINES, MAX_LINE_CHARACTERS, MAX_SIDES = 60, 400, 12
STACK_LINES = 240  # for an interrupted check, whose threads and ranks print stacks
LEAST_SECONDS = 2 * GRACE_SECONDS  # minimum time left for starting a check
LEAVE_SECONDS = 1.0  # after a normal exit, time for helpers such as fork servers to exit by themselves
COLLECT_SECONDS = 1.0  # after a kill, time until the server knows the exit status
PRELOAD_SECONDS = 60.0
POLL_SECONDS = 0.05
LOG_BYTES = 1 << 19  # of a check's output that output.log keeps
MOST_LOG_BYTES = 8 << 20  # of output.log when a run starts
STATUSES = {
    0: Verdict.PASSED,
    INCOMPLETE: Verdict.INCOMPLETE,
    NEEDS_GPU: Verdict.NEEDS_GPU,
    NOT_CHECKED: Verdict.NOT_CHECKED,
}


def main(checks: Sequence[Check] = CHECKS, *, preload: Sequence[str] = PRELOAD) -> None:
    """Runs the checks selected on the command line and prints how each ended."""
    options = parse_options(checks)
    if options.list:
        print(schedule(checks))
        return
    device = name_of_gpu()
    if device is None and not options.dry_run:
        sys.exit("no GPU: to try the checks in small sizes, python3 benchmarks/gpu/run_all.py --dry-run --out FOLDER")
    options.out.mkdir(parents=True, exist_ok=True)
    where = Where(
        time.strftime("%Y-%m-%d"), device or cpu_name(), torch_version(), commit_of_tree(), "", options.dry_run
    )
    # On SIGTERM, the runner still ends its check and writes its line.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    adopt_orphans()
    factor = options.slowdown
    scaled = [replace(check, limit=factor * check.limit, expected=factor * check.expected) for check in checks]
    with Runner(options.out.resolve(), where=where, preload=preload, has_gpu=device is not None) as runner:
        runner.clear_up()
        decided = runner.decided() if options.resume else {}
        try:
            if options.only:
                named = [check for check in scaled if check.name in options.only]
                runner.run(named, deadline=_BEGAN + START_SECONDS + sum(check.limit for check in named))
            else:
                began = _BEGAN
                for call in [options.call] if options.call else CALL_SECONDS:
                    print(schedule(checks, call), flush=True)
                    seconds = CALL_SECONDS[call] if options.seconds is None else options.seconds
                    deadline = began + factor * seconds - END_SECONDS
                    runner.run([check for check in scaled if check.call == call], deadline=deadline, decided=decided)
                    began = time.monotonic()
        except KeyboardInterrupt:
            print("the runner was interrupted", flush=True)
            sys.exit(runner.report() or 1)
    if options.out.resolve() == RESULTS:
        write_pages()
    sys.exit(runner.report())


class Runner:
    """Runs checks and records how they end."""

    def __init__(self, folder: Path, *, where: Where, preload: Sequence[str], has_gpu: bool) -> None:
        self._journal, self._where, self._folder = Journal(folder), where, folder
        self._mark, self._preload, self._has_gpu = uuid.uuid4().hex, preload, has_gpu
        self._server: ForkServer | None = None
        self._code = CodeBase.of_tree(besides=RUNNER)
        self._codes: dict[str, str] = {}
        self._ended: dict[str, Record] = {}

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *error: object) -> None:
        self._end_server()

    def clear_up(self) -> None:
        """Repairs the file of a killed runner, ends that runner's processes and records its check."""
        self._journal.mend()
        running = self._journal.interrupted()
        if running is not None:
            orphans = end_all(running.mark)
            text = [f"the runner ended while this check ran; {orphans} of its processes were still running"]
            self._journal.end(
                Record(running.check, Verdict.INTERRUPTED, running.where, orphans=orphans, output=text, run=running.run)
            )
        shorten(self._journal.log, 0, most=MOST_LOG_BYTES)

    def decided(self) -> dict[str, Record]:
        """Returns each check's last final record in the folder or in benchmarks/results.

        Dry-run verdicts count only for dry runs.
        """
        records = [*Journal(RESULTS).read(), *self._journal.read()]
        return {
            record.check: record
            for record in records
            if record.is_final and record.where.dry_run == self._where.dry_run and record.where.code
        }

    def run(self, checks: Sequence[Check], *, deadline: float, decided: Mapping[str, Record] | None = None) -> None:
        """Runs checks one after the other. Checks for which no time is left are recorded as not run.

        deadline: time.monotonic() at which all have ended. decided: records that are not repeated for the same code.
        They count in the report.
        """
        self._start_server()  # imports while the digests are computed
        waiting = []
        for check in checks:
            before = (decided or {}).get(check.name)
            if before is not None and before.where.code == self._code_of(check):
                self._ended[check.name] = before
                print(f"== {check.name}: {before.verdict} before, {before.where.date}", flush=True)
            else:
                waiting.append(check)
        for place, check in enumerate(waiting, 1):
            self._run_in_time(check, deadline=deadline - sum(later.expected for later in waiting[place:]))

    def report(self) -> int:
        """Prints the verdict and the numbers of each check of this run, also of skipped ones. Returns an exit status.

        It is 1 if a check failed or the folder's files exceed the limits of registry.py. Outside a dry run, a check
        that needs a GPU counts as failed, because the driver shows a GPU that torch does not see.
        """
        where = self._where
        print(f"\n{where.device}, torch {where.torch}, commit {where.commit or 'unknown'}, {where.date}")
        for record in self._ended.values():
            print(f"{record.check:24}{record.verdict:20}{record.seconds:6.0f} s  {_shown(record.results)}"[:280])
            # Of tests, which have an outcome, only failed ones.
            sides = [pair for pair in record.sides.items() if pair[1].get("outcome", "failed") == "failed"]
            for side, results in sides[:MAX_SIDES]:
                print(f"    {side}: {_shown(results)}"[:280])
        excess = [] if self._folder == RESULTS else [*files_beyond_limits(self._folder)]
        print("\n".join(excess), flush=True)
        failures = {verdict for verdict in Verdict if verdict.is_failure}
        if not where.dry_run:
            failures.add(Verdict.NEEDS_GPU)
        return int(bool(excess) or any(record.verdict in failures for record in self._ended.values()))

    def _code_of(self, check: Check) -> str:
        """Returns the digest of a check's code, or "" if a file cannot be parsed."""
        if check.name not in self._codes:
            try:
                self._codes[check.name] = self._code.digest(check.module, check.words)
            except SyntaxError as error:
                print(f"{check.name}: {error}", flush=True)
                self._codes[check.name] = ""
        return self._codes[check.name]

    def _start_server(self) -> ForkServer:
        if self._server is None:
            self._is_ready = False
            path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
            kept = {name: value for name, value in os.environ.items() if name != DRY_RUN}
            dry = {DRY_RUN: "1"} if self._where.dry_run else {}
            # Kernels are interpreted if they were imported with this variable.
            interpreted = {} if self._has_gpu else {"TRITON_INTERPRET": "1"}
            own = {"PYTHONPATH": path, MARK: self._mark, **ENVIRONMENT, **dry, **interpreted}
            self._environment = {**kept, **own}
            self._server = ForkServer(self._preload, log=self._journal.log, folder=ROOT, environment=self._environment)
        return self._server

    def _prepare_server(self, *, until: float) -> str | None:
        """Starts the server if necessary, and waits for its imports. Returns why there is none, or None."""
        problem: str | None = None
        for _ in range(2):
            server = self._start_server()
            if self._is_ready:
                return None
            try:
                problem = server.wait_until_ready(max(0.0, min(PRELOAD_SECONDS, until - time.monotonic())))
            except ServerEnded:
                problem = "the server ended during its imports"
            self._is_ready = problem is None
            if problem is None:
                return None
            print(f"{problem}; checks now import the modules", flush=True)
            self._preload = ()
            self._end_server()
        return problem

    def _end_server(self) -> None:
        if self._server is not None:
            self._server.end()
            self._server = None

    def _run_in_time(self, check: Check, *, deadline: float) -> None:
        """Runs a check if there is time for it and a server."""
        least = min(LEAST_SECONDS, check.limit)
        if check.small is None and self._where.dry_run:
            self._record(check, Verdict.NEEDS_GPU)
        elif deadline - time.monotonic() < least:
            self._record(check, Verdict.NO_TIME)
        elif problem := self._prepare_server(until=deadline):
            self._record(check, Verdict.FAILED, output=[problem])
        elif (left := deadline - time.monotonic()) < least:
            self._record(check, Verdict.NO_TIME)
        else:
            self._run_check(check, min(check.limit, left))

    def _run_check(self, check: Check, limit: float) -> None:
        with open(self._journal.log, "ab") as stream:
            stream.write(f"\n== {check.name}\n".encode())
            start = stream.tell()
        running = Running(check.name, uuid.uuid4().hex, self._mark, start, self._where_of(check))
        self._journal.begin(running)
        output = OutputReader(self._journal.log, start)
        arguments = check.arguments(self._folder, seconds=limit - GRACE_SECONDS, is_dry=self._where.dry_run)
        print(f"\n== {check.name} (at most {limit:.0f} s): {' '.join([check.module, *arguments])}", flush=True)
        program = Program(check.module, arguments, self._environment)
        watch = Watch(self._start_server(), self._journal, running, output)
        try:
            watch.run(program, limit=limit)
        except KeyboardInterrupt:
            self._end_check(check, watch, Verdict.INTERRUPTED)
            raise
        if watch.has_lost_server:
            self._end_server()
        self._end_check(check, watch, watch.verdict)
        shorten(self._journal.log, start, most=LOG_BYTES)

    def _end_check(self, check: Check, watch: "Watch", verdict: Verdict) -> None:
        """Writes the verdict, and the cause if the check did not report one."""
        if verdict.is_failure and not any(side is None and ERROR in found for side, found in watch.output.results):
            self._journal.add(watch.running, {ERROR: watch.cause})
        num_shown = SHOWN_LINES if verdict in (Verdict.PASSED, Verdict.FAILED) else STACK_LINES
        shown = [line for line in watch.output.lines if line.strip() and not line.startswith(RESULT)][-num_shown:]
        self._record(
            check,
            verdict,
            seconds=round(watch.seconds, 1),
            exit_status=watch.status,
            orphans=watch.num_orphans,
            output=[line[:MAX_LINE_CHARACTERS] for line in shown],
            run=watch.running.run,
        )

    def _record(self, check: Check, verdict: Verdict, *, run: str | None = None, **values: Any) -> None:
        self._journal.end(Record(check.name, verdict, self._where_of(check), run=run or uuid.uuid4().hex, **values))
        record = self._ended[check.name] = self._journal.read()[-1]
        print(f"== {record.check}: {record.verdict}, {record.seconds:.0f} s", flush=True)

    def _where_of(self, check: Check) -> Where:
        return replace(self._where, code=self._code_of(check))


class Watch:
    """Runs one check with a time limit, and copies its results to the journal while it runs.

    status: its exit status, negative for a signal, None if it is unknown. seconds: how long it ran. num_orphans: number
    of its descendants that were alive when it ended and were killed. has_lost_server: whether the server has ended.
    """

    def __init__(self, server: ForkServer, journal: Journal, running: Running, output: OutputReader) -> None:
        self.running, self.output = running, output
        self.status: int | None = None
        self.seconds, self.num_orphans = 0.0, 0
        self.has_lost_server, self._timed_out = False, False
        self._server, self._journal, self._limit = server, journal, 0.0

    @property
    def verdict(self) -> Verdict:
        """The verdict for this ending. An interrupted check timed out, even if it then exited with 0."""
        if self._timed_out:
            return Verdict.TIMED_OUT
        return Verdict.FAILED if self.status is None else STATUSES.get(self.status, Verdict.FAILED)

    @property
    def cause(self) -> str:
        """Why the check did not pass, as far as the runner knows."""
        if self._timed_out:
            return f"did not end in {self._limit:.0f} s"
        if self.has_lost_server:
            return "its server ended, and the check with it"
        if self.status is None:
            return "the runner was interrupted"
        if self.status == INCOMPLETE:
            return "no time was left for some sides"
        return f"ended by {signal.Signals(-self.status).name}" if self.status < 0 else f"exit status {self.status}"

    def run(self, program: Program, *, limit: float) -> None:
        """Runs a check. Interrupts it GRACE_SECONDS before `limit` and kills it at `limit`.

        Its descendants are also killed, which may take up to GRACE_SECONDS more.
        """
        began = time.monotonic()
        self._limit = limit
        pid = None
        try:
            pid = self._server.start(program)
            self._wait(began + max(0.0, limit - GRACE_SECONDS))
            if self.status is None:
                self._timed_out = True
                interrupt(self.running.mark, self._journal.log, spare=self._server.pid)
                self._wait(began + limit)
            self._wait_for_descendants(LEAVE_SECONDS if not self._timed_out else 0.0)
        except ServerEnded:
            self.has_lost_server = True
        finally:
            self.num_orphans = len(set(descendants(self.running.mark)) - {self._server.pid, pid})
            end_all(self.running.mark, spare=self._server.pid)
            self._copy_output()
            self.seconds = time.monotonic() - began
        if self.status is None and not self.has_lost_server:
            self._collect()

    def _collect(self) -> None:
        """Waits for the status of a killed check."""
        try:
            self._wait(time.monotonic() + COLLECT_SECONDS)
        except ServerEnded:
            self.has_lost_server = True
        if self.status is None:
            self.has_lost_server = True  # the server waits for a process that cannot be killed

    def _wait(self, until: float) -> None:
        while self.status is None and time.monotonic() < until:
            self.status = self._server.wait(POLL_SECONDS)
            self._copy_output()
            reap_orphans(besides=self._server.pid)

    def _wait_for_descendants(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while set(descendants(self.running.mark)) - {self._server.pid} and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
            reap_orphans(besides=self._server.pid)

    def _copy_output(self) -> None:
        """Shows new output and writes new results to the journal."""
        known = len(self.output.results)
        new = self.output.read()
        for side, results in self.output.results[known:]:
            self._journal.add(self.running, results, side=side)
        sys.stdout.write(new)
        sys.stdout.flush()


def schedule(checks: Sequence[Check], *calls: str) -> str:
    """Returns a table of the expected seconds of calls, by default of all, with their sums and limits."""
    lines = []
    for call in calls or CALL_SECONDS:
        rows = [(START_SECONDS, START_REASON)]
        rows += [(check.expected, f"{check.name}: {check.reason}") for check in checks if check.call == call]
        rows.append((END_SECONDS, END_REASON))
        total = sum(seconds for seconds, _ in rows)
        lines += [f"call {call}: {total:.0f} s expected, {CALL_SECONDS[call]:.0f} s at most"]
        lines += [f"{seconds:6.0f} s  {text}" for seconds, text in rows]
    if not calls:
        lines += ["run only when named (--only), with their limits:"]
        lines += [f"{check.limit:6.0f} s  {check.name}: {check.purpose}" for check in checks if check.call is None]
    return "\n".join(lines)


def shorten(log: Path, start: int, *, most: int) -> None:
    """Removes the middle of a file's content after `start` if it is longer than `most` bytes."""
    if not log.exists() or log.stat().st_size - start <= most:
        return
    with open(log, "r+b") as stream:
        stream.seek(-most // 2, os.SEEK_END)
        end = stream.read()
        stream.truncate(start + most // 2)
        stream.seek(0, os.SEEK_END)
        stream.write(b"\n... left out ...\n" + end)


def files_beyond_limits(folder: Path) -> Iterator[str]:
    """Yields a description of each way in which a folder's files exceed what comes back from a machine."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    if len(found) > MOST_FILES:
        names = ", ".join(sorted(path.name for path in found))
        yield f"{len(found)} files in {folder}, more than {MOST_FILES}: {names}"
    for path in found:
        if path.stat().st_size > MOST_FILE_BYTES:
            yield f"{path} has {path.stat().st_size} bytes, more than {MOST_FILE_BYTES}"
        if len(path.relative_to(folder).parents) > MOST_FOLDERS + 1:
            yield f"{path} is more than {MOST_FOLDERS} folders below {folder}"


def _shown(results: Mapping[str, Any]) -> str:
    """Formats the results that are plain numbers, and errors."""
    numbers = [f"{name} {value:.4g}" for name, value in results.items() if type(value) in (int, float)]
    return ", ".join([*(f"{ERROR}: {results[ERROR]}" for _ in range(ERROR in results)), *numbers])


def name_of_gpu() -> str | None:
    """Returns the driver's name of the first GPU without using torch, or None if there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        words = [tool, "--query-gpu=name", "--format=csv,noheader"]
        try:
            asked = subprocess.run(words, capture_output=True, text=True, check=False, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            asked = None
        if asked is not None and asked.returncode == 0 and asked.stdout.strip():
            return asked.stdout.splitlines()[0].strip()
    return "GPU" if list(Path("/dev").glob("nvidia[0-9]*")) else None


def cpu_name() -> str:
    """Returns the name of the processor, which dry runs record as the device."""
    return f"CPU {platform.processor() or platform.machine()}"


def torch_version() -> str:
    """Returns the installed torch version without importing it."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def parse_options(checks: Sequence[Check]) -> argparse.Namespace:
    """Parses the command line of this program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--call", choices=CALL_SECONDS, help="run only this call (default: both)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results (default: benchmarks/results)")
    parser.add_argument(
        "--resume", action="store_true", help="skip checks that passed, failed or timed out with the same code"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[check.name for check in checks],
        metavar="NAME",
        help="run only these checks (--list shows their names)",
    )
    parser.add_argument("--list", action="store_true", help="print the expected seconds of all checks and run none")
    limits = " and ".join(f"{seconds:g}" for seconds in CALL_SECONDS.values())
    parser.add_argument("--seconds", type=float, help=f"limit of a call (default: {limits})")
    parser.add_argument("--slowdown", type=float, default=1.0, help="multiplies all limits, for slow machines")
    parser.add_argument(
        "--dry-run", action="store_true", help="run all checks in small sizes, also on the CPU; requires --out"
    )
    options = parser.parse_args()
    if options.dry_run and options.out.resolve() == RESULTS:
        parser.error("--dry-run writes meaningless results: give a different folder with --out")
    return options


if __name__ == "__main__":
    main()
