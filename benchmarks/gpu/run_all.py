"""Everything that a machine with a GPU is for, in one call: the tests in tests/gpu, then all GPU benchmarks.

    python benchmarks/gpu/run_all.py [--out benchmarks/results] [--minutes 12] [--only PART ...]
    python benchmarks/gpu/run_all.py --dry-run --out FOLDER     # small and on the CPU too: tries the programs out

Needs nothing but Python, torch, Triton, NumPy and this project's packages: no network, no installation. Each benchmark
writes NAME_gpu.json, with date, device, version of torch and commit, and plots NAME_gpu.svg; run_gpu.json says how each
part ended. Where there is no repository, the variable COMMIT names the commit. docs/gpu_results.md is written anew when
results go to benchmarks/results. Exit status 1 if a part failed, missed a target or was not run.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from benchmarks.gpu.results_page import PAGE, RESULTS, page  # noqa: E402
from benchmarks.sides import context  # noqa: E402
from megatron.core.device import default_device, device_name  # noqa: E402

NOT_CHECKED = 77  # the exit status of a part that says that it cannot run here
SHOWN_LINES = 60
HERE = "benchmarks/gpu"


@dataclass(frozen=True)
class Part:
    """A program. small: its arguments in a dry run, None where it then stays out; {out}: the folder of results."""

    words: str
    seconds: float
    small: str | None

    def command(self, out: Path, *, is_dry: bool) -> list[str]:
        """As it is started."""
        words = f"{self.words} {self.small}" if is_dry else self.words
        return [sys.executable if word == "python" else word.format(out=out) for word in words.split()]


def _results(name: str) -> str:
    return f"--json {{out}}/{name}_gpu.json --plot {{out}}/{name}_gpu.svg"


PARTS = {
    "tests": Part("python -m pytest -q tests/gpu", 420, "-k gathered"),
    "stash_copy": Part(f"python {HERE}/stash_copy.py {_results('stash_copy')}", 120, "--small --rounds 2"),
    "gemm_beside_stash": Part(
        f"python {HERE}/gemm_beside_stash.py {_results('gemm_beside_stash')}", 60, "--small --rounds 2"
    ),
    "graph_step": Part(
        f"python {HERE}/graph_step.py {_results('graph_step')}", 420, "--small --rounds 1 --steps 1 --routings skewed"
    ),
    "stash_step": Part(
        "python benchmarks/stash_step.py --device cuda --tokens 8192 --hidden 2048 --ffn 768 "
        "--json {out}/stash_step_gpu.json",
        60,
        "--device cpu --rounds 1 --layers 3 --tokens 64 --hidden 32 --ffn 16",
    ),
    "ddp": Part(f"python {HERE}/ddp.py --json {{out}}/ddp_gpu.json", 60, None),
    "sanitizer": Part("sh tests/gpu/sanitize.sh python", 240, ""),
}


@dataclass(frozen=True)
class Outcome:
    """How a part ended; output: its last lines."""

    part: str
    verdict: str
    exit_status: int | None
    seconds: float
    output: list[str]

    @property
    def is_failure(self) -> bool:
        """Whether it must not end like this."""
        return self.verdict not in ("passed", "not checked here")


def run_part(name: str, command: list[str], *, seconds: float) -> Outcome:
    """Runs a part for so long at most, shows what it prints, and ends everything that it started."""
    print(f"\n== {name}: {' '.join(command)}", flush=True)
    began = time.monotonic()
    if seconds <= 0:
        print("not run: no time is left")
        return Outcome(name, "not run", None, 0.0, [])
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    alarm = threading.Timer(seconds, lambda: os.killpg(process.pid, signal.SIGKILL))
    alarm.start()
    lines: deque[str] = deque(maxlen=SHOWN_LINES)
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line.rstrip("\n"))
    status = process.wait()
    took = time.monotonic() - began
    alarm.cancel()
    known = {0: "passed", NOT_CHECKED: "not checked here", -signal.SIGKILL: f"killed after {took:.0f} seconds"}
    verdict = known.get(status, "failed")
    print(f"== {name}: {verdict}, {took:.0f} s", flush=True)
    return Outcome(name, verdict, status, round(took, 1), [*lines])


def main() -> None:
    """Runs the parts, and says how each ended."""
    options = parse_options()
    options.out.mkdir(parents=True, exist_ok=True)
    device = default_device()
    if device.type == "cpu" and not options.dry_run:
        sys.exit(f"{HERE}/run_all.py needs a GPU; try it out with --dry-run")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    ends = time.monotonic() + 60 * options.minutes
    outcomes = []
    for name in options.only:
        part = PARTS[name]
        if not (options.dry_run and part.small is None):
            command = part.command(options.out.resolve(), is_dry=options.dry_run)
            outcomes.append(run_part(name, command, seconds=min(part.seconds, ends - time.monotonic())))
    where = {**context(), "device": device_name(device)}
    shown = [asdict(outcome) for outcome in outcomes]
    (options.out / "run_gpu.json").write_text(json.dumps({**where, "parts": shown}, indent=1) + "\n")
    if options.out.resolve() == RESULTS:
        PAGE.write_text(page(RESULTS))
    print(f"\n{where['device']}, torch {where['torch']}, commit {where['commit'] or 'unknown'}, {where['date']}")
    for outcome in outcomes:
        print(f"{outcome.part:20}{outcome.verdict:26}{outcome.seconds:7.0f} s")
    sys.exit(any(outcome.is_failure for outcome in outcomes))


def parse_options() -> argparse.Namespace:
    """The command line of this program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results (default: benchmarks/results)")
    parser.add_argument("--minutes", type=float, default=12, help="for all parts together (default: 12)")
    parser.add_argument("--only", nargs="+", default=[*PARTS], choices=[*PARTS], help="these parts, in this order")
    parser.add_argument("--dry-run", action="store_true", help="all parts small, on the CPU too; --out must be given")
    options = parser.parse_args()
    if options.dry_run and options.out == RESULTS:
        parser.error("--dry-run writes results that mean nothing: give another folder with --out")
    return options


if __name__ == "__main__":
    main()
