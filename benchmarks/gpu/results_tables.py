"""Writes all numbers of the GPU checks as tables: benchmarks/results/gpu_tables.md. results_page.py has verdicts."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.evidence import Evidence, Run, Side

HEAD = """# All numbers of the GPU checks

Written by `benchmarks/gpu/results_page.py` from [checks.jsonl](checks.jsonl): the last results of each check.
[gpu_results.md](../../docs/gpu_results.md) has the verdicts and the terms.
"""
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
    "captured_pair": {"steps": "steps of each case", "cases": "number of configurations"},
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


def tables(results: Path, evidence: Evidence) -> str:
    """Returns the text of the file. results: folder of the results."""
    found = {
        path.stem.removesuffix("_gpu"): json.loads(path.read_text()) for path in sorted(results.glob("*_gpu.json"))
    }
    checks = dict.fromkeys(run.check for run in evidence.on_gpu)
    runs = [run for check in checks if (run := evidence.last(check))]
    parts = [HEAD, *_sides(evidence), *_numbers(runs), *_details(runs), *_targets(found)]
    for name, section in (("stash_copy", _copies), ("gemm_beside_stash", _rivals)):
        if name in found:
            parts += [f"\n## {name}\n\n{_where(found[name])}\n\n", *section(found[name])]
            if (results / f"{name}_gpu.svg").exists():
                parts.append(f"\n![Plot of {name}]({name}_gpu.svg)\n")
    links = ", ".join(f"[{name}]({name}_gpu.json)" for name in ("stash_step", "ddp") if name in found)
    return "".join([*parts, f"\nFurther results: {links}.\n" if links else ""])


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """Yields the lines of a table."""
    yield f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n"
    yield from (f"| {' | '.join(map(shown, row))} |\n" for row in rows)


def shown(value: object) -> str:
    """Formats a value with three digits. None is empty."""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return "" if value is None else str(value)


def _sides(evidence: Evidence) -> Iterator[str]:
    """Yields everything that was reported about the sides of each shape."""
    by_check: dict[str, list[Side]] = {}
    for side in evidence.sides():
        by_check.setdefault(side.check or "by hand", []).append(side)
    for check in evidence.numbers:
        if run := evidence.last(check):
            by_check[check] = [
                Side(check, "", name, run.date, run.device, run.commit, values) for name, values in run.sides.items()
            ]
    for check, sides in by_check.items():
        yield f"\n## Sides: {check}\n\n"
        values = [{"shape": side.shape, "side": side.name, **side.values} for side in sides]
        columns = list(dict.fromkeys(name for one in values for name in one if not isinstance(one[name], list)))
        yield from table(columns, [[_cell(one.get(column)) for column in columns] for one in values])
        for side in sides:
            for name, rows in side.values.items():
                if isinstance(rows, list) and rows and isinstance(rows[0], dict):
                    yield f"\n### {check}, {side.name}: {name}\n\n"
                    columns = list(dict.fromkeys(column for row in rows for column in row))
                    yield from table(columns, [[_cell(row.get(column)) for column in columns] for row in rows])


def _numbers(runs: Sequence[Run]) -> Iterator[str]:
    rows = [
        (f"`{run.check}`", name, value, meaning(run.check, name))
        for run in runs
        for name, value in run.results.items()
        if type(value) in (int, float)
    ]
    if rows:
        yield "\n## Numbers\n\n"
        yield from table(("check", "number", "value", "meaning"), rows)


def _where(record: Mapping[str, Any]) -> str:
    commit = record["commit"][:12] or "unknown"
    return f"{record['device']}, torch {record['torch']}, {record['date']}, commit {commit}."


def _details(runs: Sequence[Run]) -> Iterator[str]:
    """Yields the lists that checks reported on a GPU: tables of points, the gaps of a trace, failed tests."""
    for run in runs:
        for name, value in run.results.items():
            if not isinstance(value, list | dict) or not value:
                continue
            yield f"\n### `{run.check}`: {name}\n\n"
            if isinstance(value, list) and isinstance(value[0], dict):
                columns = list(dict.fromkeys(key for row in value for key in row))
                yield from table(columns, [[_cell(row.get(key)) for key in columns] for row in value])
                yield from _definitions(run.check, columns)
                continue
            if words := meaning(run.check, name):
                yield f"{words}\n\n"
            if isinstance(value, dict):
                shorten = _last_line if name == "failures" else _cell
                titles = {"failures": ("test", "last line"), "slowest": ("test", "seconds")}.get(name, (name, "value"))
                yield from table(titles, [(f"`{key}`", shorten(one)) for key, one in value.items()])
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
        yield from table(("target", "measured", "limit", "holds"), rows)


def _copies(record: Mapping[str, Any]) -> Iterator[str]:
    columns = tuple(_COPY_COLUMNS)
    yield from table(columns, [[row[column] for column in columns] for row in record["rows"]])
    yield from _definitions("copy_points", columns)


def _rivals(record: Mapping[str, Any]) -> Iterator[str]:
    columns = tuple(_RIVAL_COLUMNS)
    yield from table(columns, [[row[column] for column in columns] for row in record["rows"]])
    yield from _definitions("product_beside_copies", columns)
