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
from benchmarks.gpu.registry import CHECKS, Check  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "gpu_results.md"
NOTES = "gpu_notes.md"  # in the folder of results, written by hand

HEAD = """# Results on a GPU

Written by `benchmarks/gpu/results_page.py` from the output of `benchmarks/gpu/run_all.py` in `benchmarks/results/`.

    make gpu                         # three calls, at most 9 minutes each; continues where it was interrupted
    make gpu CALL=1                  # one call, for machines that end a command after ten minutes
    make gpu OUT=/tmp/results        # results in a different folder; this page is not changed
    python3 benchmarks/gpu/run_all.py --call 1 --resume --out FOLDER       # the same without make
    python3 benchmarks/gpu/run_all.py --only graph_step --out FOLDER       # checks by name
    python3 benchmarks/gpu/run_all.py --dry-run --out FOLDER               # small sizes, also on a CPU

The checks require one GPU, Python 3.11 or 3.12, torch 2.11 to 2.13, Triton, NumPy, pytest, hypothesis and PyYAML, but
no network and no installation. Targets are for an H200. Outside a git clone, set the variable COMMIT.

Each check runs in a separate process with a time limit. Five seconds before the limit it prints its stacks and receives
SIGINT. At the limit it is killed with all its descendants. When a check ends, one line is appended to `checks.jsonl`:
verdict, results, last lines of output, date, device, torch version and commit. `output.log` contains the whole output.
If the runner is killed, earlier lines remain complete. `--resume` skips checks that have a verdict for the same files
and runs the others, starting with those of earlier calls. If each call starts on an empty disk, copy `checks.jsonl`
there first. In a dry run, a tape replaces the CUDA graph, gloo replaces NCCL, and Triton's interpreter replaces
compiled kernels. Tests that are meaningless on a CPU end with "needs a GPU".
"""
NOT_YET = """
**Not yet run on a GPU.** A dry run executes the programs on a CPU, where tests/gpu and `ddp` are skipped. All times and
rates below are targets, not measurements.
"""
STATES = """
The column *state* has one of these values:

- **passed**, **failed**, **timed out**: run on a GPU, with date and device.
- **modelled on a CPU**: not run on a GPU yet. The same code has this property on a CPU, where a model of streams,
  graphs and memory, Triton's interpreter or plain operators replace the device.
- **compiled only**: the kernels compile for sm_80, sm_90 and sm_100. The rest has no replacement on a CPU.
- **not yet**: unknown, because the claim is about times, tools or the machine.

Terms: *pages* store the rows that the paged stash saves for backward. The *stash* copies rows to pages, and the
*restore* copies them back. A *program* is a thread block of a Triton kernel. *GEMM* is a matrix multiplication, and a
*grouped GEMM* multiplies each expert's rows with that expert's weights.
"""
SIDES = ("ms", "time_x", "peak_mib", "reserved_mib", "memory_x", "most_memory_x", "again", "on_host", "voids")

_COPY_COLUMNS = {
    "tier": "location of the pages: device memory, or pinned host memory",
    "width": "bytes of a row of x, the experts' input",
    "rows": "number of live rows of x",
    "num_programs": "maximum number of programs of a copy kernel; 0: unlimited",
    "copy_gb_s": "rate of `copy_` of the same bytes, counting bytes read and written",
    "stash_gb_s": "rate of stash and restore, counting bytes read and written",
    "stash_x": "rate of the stash relative to `copy_`",
    "restore_x": "rate of the restore relative to `copy_`",
    "rate_x": "rate of stash and restore together, relative to `copy_`",
}
_RIVAL_COLUMNS = {
    "num_programs": "maximum number of programs of a copy kernel; 0: unlimited",
    "gemm_x": "time of the GEMMs during stash and restore, relative to the GEMMs alone",
    "rate_x": "rate of stash and restore during the GEMMs, relative to `copy_` alone",
    "cost_x": "additional time of the GEMMs per stash and restore, relative to the time of two `copy_` of the same "
    "bytes alone; 0: completely hidden, 1: as if the copies ran alone on the GPU",
}
_TESTS = {
    "passed": "number of tests",
    "failed": "number of tests",
    "failures": "`checks.jsonl` contains more lines of each failure.",
    "slowest": "The three slowest tests.",
}
# By check: meanings of results, and of the columns of its tables. Checks that are not listed run tests.
MEANINGS: dict[str, dict[str, str]] = {
    "environment": {
        "processors": "CPU cores",
        "host_gib": "host memory",
        "shared_memory_gib": "free space in /dev/shm",
        "locked_memory_limit": "limit of locked memory in bytes; -1: unlimited",
        "processors_of_gpu": "streaming multiprocessors of the GPU",
        "cache_mib": "L2 cache of the GPU",
        "free_gib": "free GPU memory",
        "total_gib": "GPU memory",
        "cudnn": "version of cuDNN",
        "first_use_seconds": "time of the first calls that use the GPU",
        "copy_gb_s": "rate of a device copy, counting bytes read and written",
        "product_tflop_s": "rate of a bf16 GEMM of size 8192",
        "import_seconds": "time to import the training program",
    },
    "launch_threads": {
        "compile_seconds": "compilation and first launch in the main thread",
        "backward_seconds": "two launches in autograd's thread, one with a compilation",
    },
    "pinned_access": {
        "mib": "size of the stashed rows",
        "stash_gb_s": "rate of the copy to host pages",
        "restore_gb_s": "rate of the copy from host pages",
    },
    "capture_streams": {"replay_us": "microseconds of one replay"},
    "eager_steps": {
        "worst_error": "largest relative difference of a loss from the CPU",
        "losses": "Loss of each step.",
    },
    "full_graph": {"steps": "steps of each case", "cases": "number of configurations"},
    "module_order": {"steps": "steps of each case", "cases": "number of configurations"},
    "forced_growth": {
        "peak_mib": "peak of allocated memory",
        "captures": "number of captures",
        "pool_bytes": "Size of the page pool in bytes, after each step.",
        "memory": "Memory in bytes, after each step.",
    },
    "copy_points": {"lowest_rate_x": "lowest `rate_x` of large groups with unlimited programs", **_COPY_COLUMNS},
    "products": {
        "shape": "model whose sizes are used",
        "product": "forward; gradient of x; gradient of the weights, written in bf16 or accumulated in fp32 "
        "(`added_weight`)",
        "distance": "largest difference of a result from torch's, relative to its norm",
        "before_ms": "time of our previous kernel",
        "ours_ms": "time of our kernel",
        "theirs_ms": "time of torch's `grouped_mm`",
        "rate_x": "torch's time / our time, median over rounds",
        "gain_x": "previous time / our time, median over rounds",
        "before_tflop_s": "rate of our previous kernel; `ours_tflop_s`, `theirs_tflop_s` likewise",
    },
    "product_beside_copies": {
        "lowest_cost_x": "lowest `cost_x`",
        "highest_cost_x": "highest `cost_x` of the current programs without a limit",
        "products": "GEMM that runs on the main stream",
        "side": "before: copy programs until 2026-11-27; after: current copy programs",
        "is_default": "whether this limit was the default",
        **_RIVAL_COLUMNS,
        "is_covered": "1 if the copies were running until the GEMMs ended",
        "pair_alone_us": "microseconds of one stash and restore alone",
    },
    "trace": {
        "step_ms": "time from the first to the end of the last launch",
        "busy_ms": "time in which a kernel, copy or fill was running",
        "launches": "number of kernels, copies and fills",
        "gaps": "Longest gaps without a running kernel or copy, with the host's activity in the middle of the gap.",
    },
    "launches": {
        "launches": "Launches on the GPU. *layer*: per MoE layer and step, of which *kernels* and *copies*; *rest*: "
        "per step without MoE layers.",
        "operators": "Operators of the same step on the CPU that launch kernels, per MoE layer. *rest*: per step "
        "without MoE layers.",
    },
    "host_waits": {
        "agreement_us": "Agreement of two processes on the plan of a step.",
        "captures_ms": "A step that captures 32 parts.",
        "grad_checks_ms": "Checks of the gradients of 400 parameters.",
        "grad_checks_launches": "Launches of these checks.",
        "captured_products": "Dtypes in which a CUDA graph can capture torch's grouped GEMM.",
    },
}


def page(results: Path) -> str:
    """Returns the text of the page. results: folder of the results."""
    found = {
        path.stem.removesuffix("_gpu"): json.loads(path.read_text()) for path in sorted(results.glob("*_gpu.json"))
    }
    records = last_records(Journal(results).read())
    is_measured = found or any(not record.where.dry_run for record in records.values())
    parts = [HEAD, "" if is_measured else NOT_YET]
    # Before the checks, because a verdict may be of a test that was fixed afterwards.
    parts += ["\n" + (results / NOTES).read_text()] if (results / NOTES).exists() else []
    parts += [STATES, *_checks(records), *_kernels(records), *_numbers(records), *_details(records), *_targets(found)]
    for name, section in (("stash_copy", _copies), ("gemm_beside_stash", _rivals), ("graph_step", _steps)):
        if name in found:
            parts += [f"\n## {name}\n\n{_where(found[name])}\n\n", *section(found[name])]
            if (results / f"{name}_gpu.svg").exists():
                parts.append(f"\n![Plot of {name}](../benchmarks/results/{name}_gpu.svg)\n")
    others = [name for name in ("stash_step", "ddp") if name in found]
    links = ", ".join(f"[{name}](../benchmarks/results/{name}_gpu.json)" for name in others)
    return "".join([*parts, f"\nFurther results: {links}.\n" if links else ""])


def last_records(records: Sequence[Record]) -> dict[str, Record]:
    """Returns each check's latest final record. Ignores records of checks that did not run; see Record.is_final."""
    return {record.check: record for record in records if record.is_final}


def state_of(check: Check, record: Record | None) -> str:
    """Returns the text of the column *state* for a check."""
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
            yield f"\n### {part}{'' if check.call else ' that run only when named'}\n\n"
            yield "| call | check | claim or measurement | time limit, s | state |\n|---|---|---|---|---|\n"
        cells = (check.call or "", f"`{check.name}`", check.claim, int(check.limit), _state(check, records))
        yield f"| {' | '.join(map(str, cells))} |\n"


def _state(check: Check, records: Mapping[str, Record]) -> str:
    return state_of(check, records.get(check.name))


def _kernels(records: Mapping[str, Record]) -> Iterator[str]:
    yield "\n## Triton kernels\n\n"
    rows = []
    for kernel in dict.fromkeys(kernel for check in CHECKS for kernel in check.kernels):
        users = [check for check in CHECKS if kernel in check.kernels]
        decided = next((check for check in users if check.name in records), users[0])
        rows.append((f"`{kernel}`", ", ".join(f"`{check.name}`" for check in users), _state(decided, records)))
    yield from _table(("kernel", "checks that launch it", "state of the first that ran"), rows)


def _numbers(records: Mapping[str, Record]) -> Iterator[str]:
    """Yields a table of the plain numbers that checks reported on a GPU."""
    rows = [
        (f"`{record.check}`", name, value, meaning(record.check, name))
        for record in records.values()
        if not record.where.dry_run
        for name, value in record.results.items()
        if type(value) in (int, float)
    ]
    if rows:
        yield "\n## Numbers\n\n"
        yield from _table(("check", "number", "value", "meaning"), rows)


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
    """Yields the lists that checks reported on a GPU: tables of points, the gaps of a trace, failed tests."""
    for record in records.values():
        for name, value in {} if record.where.dry_run else record.results.items():
            if not isinstance(value, list | dict) or not value:
                continue
            yield f"\n### `{record.check}`: {name}\n\n"
            if isinstance(value, list) and isinstance(value[0], dict):
                columns = list(dict.fromkeys(key for row in value for key in row))
                yield from _table(columns, [[_cell(row.get(key)) for key in columns] for row in value])
                yield from _definitions(record.check, columns)
                continue
            if words := meaning(record.check, name):
                yield f"{words}\n\n"
            if isinstance(value, dict):
                shorten = _last_line if name == "failures" else _cell
                titles = {"failures": ("test", "last line"), "slowest": ("test", "seconds")}.get(name, (name, "value"))
                yield from _table(titles, [(f"`{key}`", shorten(one)) for key, one in value.items()])
            elif isinstance(value[0], int | float):
                yield f"{', '.join(map(str, value))}\n"
            else:
                yield "".join(f"- {_cell(one)}\n" for one in value)


def meaning(check: str, name: str) -> str:
    """Returns the meaning of a result or column of a check, or "" if it needs none."""
    return MEANINGS.get(check, _TESTS).get(name, "")


def _definitions(check: str, columns: Sequence[str]) -> Iterator[str]:
    """Yields a list of the columns' meanings."""
    rows = [(column, words) for column in columns if (words := meaning(check, column))]
    yield from ("\n", *(f"- `{column}`: {words}\n" for column, words in rows)) if rows else ()


def _last_line(text: object) -> object:
    """Returns the last line of a test's failure, without pytest's mark."""
    lines = [line.removeprefix("E").strip() for line in str(text).splitlines() if line.strip()]
    return _cell(lines[-1].removeprefix("+").replace("<", "&lt;")) if lines else ""


def _cell(value: object) -> object:
    """Formats a value as one line of text in a table."""
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
        yield from _table(("target", "measured", "limit", "holds"), rows)


def _copies(record: Mapping[str, Any]) -> Iterator[str]:
    columns = tuple(_COPY_COLUMNS)
    yield from _table(columns, [[row[column] for column in columns] for row in record["rows"]])
    yield from _definitions("copy_points", columns)


def _rivals(record: Mapping[str, Any]) -> Iterator[str]:
    columns = tuple(_RIVAL_COLUMNS)
    yield from _table(columns, [[row[column] for column in columns] for row in record["rows"]])
    yield from _definitions("product_beside_copies", columns)


def _steps(record: Mapping[str, Any]) -> Iterator[str]:
    for case in record["cases"]:
        settings = ", ".join(f"{name} {_shown(value)}" for name, value in case["settings"].items())
        yield f"\n{case['case']} ({settings}):\n\n"
        rows = [[name, *(side.get(column, "failed") for column in SIDES)] for name, side in case["sides"].items()]
        yield from _table(("side", *SIDES), rows)


if __name__ == "__main__":
    PAGE.write_text(page(RESULTS))
