"""Writes docs/gpu_results.md: the evidence for each check and kernel, and all results. Measures nothing.

python benchmarks/gpu/results_page.py
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from benchmarks.gpu.journal import Journal, Record, Verdict  # noqa: E402
from benchmarks.gpu.registry import CHECKS, EACH, Check  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "gpu_results.md"
NOTES = "gpu_notes.md"  # in the folder of results: written by hand

HEAD = """# Results on a GPU

Written by `benchmarks/gpu/results_page.py` from the output of `benchmarks/gpu/run_all.py` in `benchmarks/results/`.

    make gpu                         # three calls in turn, at most 9 minutes each; continues where it was stopped
    make gpu CALL=1                  # one call, for machines that end a command after ten minutes
    make gpu OUT=/tmp/results        # results in another folder; this page then stays unchanged
    python3 benchmarks/gpu/run_all.py --call 1 --resume --out FOLDER       # the same without make
    python3 benchmarks/gpu/run_all.py --only graph_step --out FOLDER       # checks by name
    python3 benchmarks/gpu/run_all.py --dry-run --out FOLDER               # small, also on a CPU

The checks need one GPU, Python 3.11 or 3.12, torch 2.11 to 2.13, Triton, NumPy, pytest, hypothesis and PyYAML. They
need no network and no installation. Targets are for an H200. Outside a git clone, set the variable COMMIT.

Each check runs in its own process, with a time limit. Five seconds before the limit it prints its stacks and receives
SIGINT. At the limit it is killed with all its descendants. When a check ends, one line is appended to `checks.jsonl`:
verdict, numbers, last lines of output, date, device, version of torch and commit. `output.log` has the whole output. If
the runner is killed, earlier lines stay complete. `--resume` skips checks that have a verdict for the same files and
runs the others, those of earlier calls first. If each call starts on an empty disk, copy `checks.jsonl` there first. In
a dry run, a tape replaces the CUDA graph, gloo replaces NCCL, and Triton's interpreter replaces compiled kernels. Tests
that show nothing on a CPU end with "needs a GPU".
"""
NOT_YET = """
**Not yet run on a GPU.** A dry run executes the programs on a CPU, where tests/gpu and `ddp` are skipped. All times and
rates below are targets, not measurements.
"""
STATES = """
The column *state* has one of these values:

- **passed**, **failed**, **timed out**: measured on a GPU, with date and device.
- **modelled on a CPU**: not run on a GPU yet. The same code has this property on a CPU, where a model of streams,
  graphs and memory, Triton's interpreter or plain operators replace the device.
- **compiled only**: the kernels compile for sm_80, sm_90 and sm_100. Nothing on a CPU replaces the rest.
- **not yet**: unknown, because the claim concerns times, tools or the machine.
"""
SIDES = ("ms", "time_x", "peak_mib", "reserved_mib", "memory_x", "most_memory_x", "again", "on_host", "voids")


def page(results: Path) -> str:
    """Returns the page for the results in that folder."""
    found = {
        path.stem.removesuffix("_gpu"): json.loads(path.read_text()) for path in sorted(results.glob("*_gpu.json"))
    }
    records = last_records(Journal(results).read())
    is_measured = found or any(not record.where.dry_run for record in records.values())
    parts = [HEAD, "" if is_measured else NOT_YET]
    # First, because a verdict below may be of a test that was fixed afterwards.
    parts += ["\n" + (results / NOTES).read_text()] if (results / NOTES).exists() else []
    parts += [STATES, *_checks(records), *_kernels(records), *_numbers(records), *_details(records), *_targets(found)]
    for name, section in (("stash_copy", _copies), ("gemm_beside_stash", _rivals), ("graph_step", _steps)):
        if name in found:
            parts += [f"\n## {name}\n\n{_where(found[name])}\n\n", *section(found[name])]
            if (results / f"{name}_gpu.svg").exists():
                parts.append(f"\n![Plot of {name}](../benchmarks/results/{name}_gpu.svg)\n")
    others = [name for name in ("stash_step", "ddp") if name in found]
    links = ", ".join(f"[{name}](../benchmarks/results/{name}_gpu.json)" for name in others)
    return "".join([*parts, f"\nFurther figures: {links}.\n" if links else ""])


def last_records(records: Sequence[Record]) -> dict[str, Record]:
    """Returns the last decisive record of each check. A record without time left changes nothing."""
    return {record.check: record for record in records if record.is_final}


def state_of(check: Check, record: Record | None) -> str:
    """Returns the cell of the column *state*."""
    if record is None or record.verdict in (Verdict.NEEDS_GPU, Verdict.NOT_CHECKED):
        return check.known.value
    where = record.where
    if where.dry_run:
        return f"{check.known.value} (dry run {record.verdict}, {where.date}, {where.device})"
    verdict = str(record.verdict) if record.verdict is Verdict.PASSED else f"**{record.verdict}**"
    return f"{verdict}, {where.date}, {where.device}, torch {where.torch}, commit {where.commit[:12] or 'unknown'}"


def _checks(records: Mapping[str, Record]) -> Iterator[str]:
    part = ""
    yield "\n## Checks\n"
    for check in CHECKS:
        if check.part != part:
            part = check.part
            yield f"\n### {part}{'' if check.call else ', which run only when named'}\n\n"
            yield "| call | check | claim | seconds at most | state |\n|---|---|---|---|---|\n"
        cells = (check.call or "", f"`{check.name}`", check.claim, int(check.limit), _state(check, records))
        yield f"| {' | '.join(map(str, cells))} |\n"


def _state(check: Check, records: Mapping[str, Record]) -> str:
    return state_of(check, records.get(check.name))


def _kernels(records: Mapping[str, Record]) -> Iterator[str]:
    yield "\n## Triton kernels\n\n"
    rows = []
    for kernel in dict.fromkeys(kernel for check in CHECKS for kernel in check.kernels):
        users = [check for check in CHECKS if kernel in check.kernels]
        # Only the small case, which shows that a kernel compiles, launches and computes.
        first = next(check for check in users if check.part == EACH)
        rows.append((f"`{kernel}`", ", ".join(f"`{check.name}`" for check in users), _state(first, records)))
    yield from _table(("kernel", "checks that launch it", "state of its small case"), rows)


def _numbers(records: Mapping[str, Record]) -> Iterator[str]:
    """Returns plain numbers that checks reported on a GPU."""
    rows = [
        (f"`{record.check}`", name, value)
        for record in records.values()
        if not record.where.dry_run
        for name, value in record.results.items()
        if type(value) in (int, float)
    ]
    if rows:
        yield "\n## Numbers\n\n"
        yield from _table(("check", "number", "value"), rows)


def _where(record: Mapping[str, Any]) -> str:
    commit = record["commit"][:12] or "unknown"
    return f"{record['device']}, torch {record['torch']}, {record['date']}, commit {commit}."


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n"
    yield from (f"| {' | '.join(map(_shown, row))} |\n" for row in rows)


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return "" if value is None else str(value)


def _details(records: Mapping[str, Record]) -> Iterator[str]:
    """Returns lists that checks reported on a GPU: tables of points, the gaps of a trace, failed tests."""
    for record in records.values():
        for name, value in {} if record.where.dry_run else record.results.items():
            if not isinstance(value, list | dict) or not value:
                continue
            yield f"\n### `{record.check}`: {name}\n\n"
            if isinstance(value, dict):
                yield from _table((name, "value"), [(f"`{key}`", _cell(one)) for key, one in value.items()])
            elif isinstance(value[0], dict):
                columns = list(dict.fromkeys(key for row in value for key in row))
                yield from _table(columns, [[_cell(row.get(key)) for key in columns] for row in value])
            else:
                yield "".join(f"- {_cell(one)}\n" for one in value)


def _cell(value: object) -> object:
    """Formats a value in one line of a table."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(one)}" for key, one in value.items())
    if isinstance(value, list):
        return ", ".join(str(_cell(one)) for one in value)
    return value if isinstance(value, int | float | None) else " ".join(str(value).replace("|", "/").split())[:300]


def _targets(found: Mapping[str, Any]) -> Iterator[str]:
    measured = [target for record in found.values() for target in record.get("targets", ())]
    if measured:
        rows = [(one["name"], one["measured"], one["limit"], "yes" if one["holds"] else "**no**") for one in measured]
        yield "\n## Targets\n\n"
        yield from _table(("measured", "figure", "limit", "holds"), rows)


def _copies(record: Mapping[str, Any]) -> Iterator[str]:
    columns = ("tier", "width", "rows", "num_programs", "copy_gb_s", "stash_gb_s", "stash_x", "restore_x", "rate_x")
    yield from _table(columns, [[row[column] for column in columns] for row in record["rows"]])


def _rivals(record: Mapping[str, Any]) -> Iterator[str]:
    columns = ("num_programs", "gemm_x", "rate_x", "cost_x")
    yield from _table(columns, [[row[column] for column in columns] for row in record["rows"]])


def _steps(record: Mapping[str, Any]) -> Iterator[str]:
    for case in record["cases"]:
        settings = ", ".join(f"{name} {_shown(value)}" for name, value in case["settings"].items())
        yield f"\n{case['case']} ({settings}):\n\n"
        rows = [[name, *(side.get(column, "failed") for column in SIDES)] for name, side in case["sides"].items()]
        yield from _table(("side", *SIDES), rows)


if __name__ == "__main__":
    PAGE.write_text(page(RESULTS))
