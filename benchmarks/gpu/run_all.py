"""Runs the GPU checks of registry.py, in three calls of at most nine minutes each.

    python3 benchmarks/gpu/run_all.py --call 1 --out FOLDER --resume      # then --call 2 and --call 3
    python3 benchmarks/gpu/run_all.py --out FOLDER                        # the three calls in turn
    python3 benchmarks/gpu/run_all.py --only graph_step --out FOLDER      # by name, including benchmarks
    python3 benchmarks/gpu/run_all.py --dry-run --out FOLDER              # small, also on a CPU

Requires Python 3.11 or 3.12, torch, Triton, NumPy, pytest, hypothesis and this project's packages, but no network,
installation or make. Each check is a process with a separate time limit. When it ends, journal.py records it in
FOLDER/checks.jsonl: verdict, results, last lines, date, device, torch and commit. FOLDER/output.log has all output.
Outside a git clone, the variable COMMIT names the commit.

--resume skips checks that already have a verdict for the same files, and first runs checks of earlier calls that
had no time left or whose runner was killed. docs/gpu_results.md is rewritten when results go to benchmarks/results. The
exit status is 1 if a check failed, was ended at its limit or was not run. This program itself does not import torch.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from benchmarks.gpu.journal import Journal, Record, Verdict, Where  # noqa: E402
from benchmarks.gpu.process_tree import GRACE_SECONDS, Ending, adopt_orphans, end_all, run_program  # noqa: E402
from benchmarks.gpu.registry import CALL_SECONDS, CHECKS, DRY_RUN, NEEDS_GPU, NOT_CHECKED, NUM_CALLS, RESULT, Check  # noqa: E402
from benchmarks.gpu.results_page import PAGE, RESULTS, page  # noqa: E402
from benchmarks.source import commit_of_tree, digest_of_files  # noqa: E402

SHOWN_LINES, MAX_LINE_CHARACTERS = 60, 400
STACK_LINES = 240  # for an interrupted check, whose threads and ranks print stacks
LEAST_SECONDS = 2 * GRACE_SECONDS  # minimum time left for starting a check
STATUSES = {0: Verdict.PASSED, NEEDS_GPU: Verdict.NEEDS_GPU, NOT_CHECKED: Verdict.NOT_CHECKED}


def main(checks: Sequence[Check] = CHECKS) -> None:
    """Runs the checks selected on the command line and prints how each ended."""
    options = parse_options(checks)
    options.out.mkdir(parents=True, exist_ok=True)
    device = name_of_gpu()
    if device is None and not options.dry_run:
        sys.exit("benchmarks/gpu/run_all.py finds no GPU; test it with --dry-run")
    where = Where(
        time.strftime("%Y-%m-%d"), device or cpu_name(), torch_version(), commit_of_tree(), digest_of_files(),
        options.dry_run,
    )  # fmt: skip
    # On SIGTERM, the runner still ends its check and writes its line.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    adopt_orphans()
    runner = Runner(Journal(options.out), where=where, folder=options.out.resolve())
    runner.clear_up()
    if options.only:
        runner.run([check for check in checks if check.name in options.only], seconds=60 * options.minutes)
    else:
        for call in [options.call] if options.call else range(1, NUM_CALLS + 1):
            # Only --resume runs checks that earlier calls did not run.
            own = [c for c in checks if c.call is not None and (c.call == call or (options.resume and c.call < call))]
            runner.run(own, seconds=60 * options.minutes, decided=runner.decided() if options.resume else None)
    if options.out.resolve() == RESULTS:
        PAGE.write_text(page(RESULTS))
    sys.exit(runner.report())


class Runner:
    """Runs checks and records how they end."""

    def __init__(self, journal: Journal, *, where: Where, folder: Path) -> None:
        self._journal, self._where, self._folder = journal, where, folder
        self._ended: dict[str, Record] = {}

    def clear_up(self) -> None:
        """Repairs the file of a killed runner, ends that runner's processes and records its check."""
        self._journal.mend()
        interrupted = self._journal.interrupted()
        if interrupted is not None:
            check, mark = interrupted
            orphans = end_all(mark)
            text = [f"the runner ended while this check ran; {orphans} of its processes were still running"]
            self._journal.end(Record(check, Verdict.INTERRUPTED, self._where, orphans=orphans, output=text, mark=mark))

    def decided(self) -> dict[str, Record]:
        """Returns the last final verdict of each check for equal files. Dry-run verdicts count only for dry runs."""
        same = (self._where.files, self._where.dry_run)
        return {
            record.check: record
            for record in self._journal.read()
            if record.is_final and (record.where.files, record.where.dry_run) == same
        }

    def run(self, checks: Sequence[Check], *, seconds: float, decided: Mapping[str, Record] | None = None) -> None:
        """Runs checks one after the other. Checks for which no time is left are recorded as not run.

        decided: verdicts of checks to skip, which count in the report.
        """
        deadline = time.monotonic() + seconds
        known = decided or {}
        for check in checks:
            if check.name in known:
                self._ended[check.name] = known[check.name]
                print(f"== {check.name}: {known[check.name].verdict} before", flush=True)
        waiting = [check for check in checks if check.name not in known]
        for place, check in enumerate(waiting, 1):
            if check.small is None and self._where.dry_run:
                self._record(Record(check.name, Verdict.NEEDS_GPU, self._where))
                continue
            left = deadline - time.monotonic()
            spare = left - sum(later.limit for later in waiting[place:]) if check.is_elastic else 0.0
            limit = min(max(check.limit, spare), left)
            if limit < min(LEAST_SECONDS, check.limit):
                self._record(Record(check.name, Verdict.NO_TIME, self._where))
                continue
            self._run_check(check, limit)

    def _run_check(self, check: Check, limit: float) -> None:
        command = check.command(self._folder, is_dry=self._where.dry_run)
        print(f"\n== {check.name} (at most {limit:.0f} s): {' '.join(command)}", flush=True)
        log, mark = self._folder / "output.log", uuid.uuid4().hex
        with open(log, "ab") as stream:
            stream.write(f"\n== {check.name}\n".encode())
            start = stream.tell()
        self._journal.begin(check.name, mark)
        began = time.monotonic()
        try:
            ending = run_program(command, limit=limit, log=log, mark=mark, folder=ROOT, env=self._environment())
        except KeyboardInterrupt:
            seconds = round(time.monotonic() - began, 1)
            output, results = output_of(log, start, lines=STACK_LINES)
            self._record(
                Record(check.name, Verdict.INTERRUPTED, self._where, seconds, results=results, output=output, mark=mark)
            )
            sys.exit(self.report())
        output, results = output_of(log, start, lines=STACK_LINES if ending.timed_out else SHOWN_LINES)
        self._record(
            Record(
                check.name,
                verdict_of(ending),
                self._where,
                seconds=round(ending.seconds, 1),
                exit_status=ending.status,
                orphans=ending.num_orphans,
                results=results,
                output=output,
                mark=mark,
            )
        )

    def _record(self, record: Record) -> None:
        self._journal.end(record)
        self._ended[record.check] = record
        print(f"== {record.check}: {record.verdict}, {record.seconds:.0f} s", flush=True)

    def _environment(self) -> dict[str, str]:
        """Returns the environment variables for every check."""
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        dry = {DRY_RUN: "1"} if self._where.dry_run else {}
        kept = {name: value for name, value in os.environ.items() if name != DRY_RUN}
        return {**kept, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **dry}

    def report(self) -> int:
        """Prints a line for each check of this run, including skipped ones. Returns 1 if one failed, else 0.

        Outside a dry run, a check that needs a GPU counts as failed, because the driver shows a GPU that torch does not
        see.
        """
        where = self._where
        print(f"\n{where.device}, torch {where.torch}, commit {where.commit or 'unknown'}, {where.date}")
        for record in self._ended.values():
            numbers = ", ".join(f"{name} {value:.4g}" for name, value in numbers_of(record.results).items())
            print(f"{record.check:24}{record.verdict:24}{record.seconds:6.0f} s  {numbers}"[:200])
        failures = {verdict for verdict in Verdict if verdict.is_failure}
        if not where.dry_run:
            failures.add(Verdict.NEEDS_GPU)
        return int(any(record.verdict in failures for record in self._ended.values()))


def verdict_of(ending: Ending) -> Verdict:
    """Returns the verdict for an ending. An interrupted check timed out, even if it then exited with 0."""
    return Verdict.TIMED_OUT if ending.timed_out else STATUSES.get(ending.status, Verdict.FAILED)


def output_of(log: Path, start: int, *, lines: int) -> tuple[list[str], dict[str, Any]]:
    """Returns the last `lines` lines of a check's output, and the results from all its result lines."""
    with open(log, "rb") as stream:
        stream.seek(start)
        written = stream.read().decode(errors="replace").splitlines()
    results: dict[str, Any] = {}
    for line in written:
        if line.startswith(RESULT):
            try:
                results |= json.loads(line.removeprefix(RESULT))
            except ValueError:
                continue  # truncated when the check was ended
    shown = [line for line in written if line.strip() and not line.startswith(RESULT)]
    return [line[:MAX_LINE_CHARACTERS] for line in shown[-lines:]], results


def numbers_of(results: Mapping[str, Any]) -> dict[str, float]:
    """Returns the results that are plain numbers."""
    return {name: value for name, value in results.items() if type(value) in (int, float)}


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
    parser.add_argument(
        "--call", type=int, choices=range(1, NUM_CALLS + 1), help="run only this call (default: all in turn)"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results (default: benchmarks/results)")
    parser.add_argument("--resume", action="store_true", help="skip checks that have a verdict for the same files")
    parser.add_argument("--only", nargs="+", choices=[check.name for check in checks], help="run only these checks")
    minutes = CALL_SECONDS / 60
    parser.add_argument("--minutes", type=float, default=minutes, help=f"limit of each call (default: {minutes:g})")
    parser.add_argument(
        "--dry-run", action="store_true", help="run all checks in small sizes, also on the CPU; requires --out"
    )
    options = parser.parse_args()
    if options.dry_run and options.out.resolve() == RESULTS:
        parser.error("--dry-run writes meaningless results: give a different folder with --out")
    return options


if __name__ == "__main__":
    main()
