"""docs/gpu_results.md from the JSON files of run_all.py, or what stands there while there are none. Measures nothing.

python benchmarks/gpu/results_page.py
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "gpu_results.md"

HEAD = """# Results on a GPU

Written by `benchmarks/gpu/results_page.py` from what `benchmarks/gpu/run_all.py` left in `benchmarks/results/`.

    make gpu                      # tests/gpu, then every benchmark of benchmarks/gpu, in about 12 minutes
    make gpu OUT=/tmp/results     # results into another folder; this page then stays as it is
    python3 benchmarks/gpu/run_all.py --only stash_copy graph_step

It needs one GPU, torch, Triton, NumPy, pytest and hypothesis, and no network; targets are for an H200. Where there is
no repository beside the files, set the variable COMMIT. `--only` picks parts, for machines that end commands early:
`tests sanitizer` first, the others in a second call. `--dry-run --out FOLDER` runs every program small, in a minute and
on a CPU too, where a tape stands for a CUDA graph.
"""
NOT_YET = """
**Not yet run on a GPU.** Kernels are compiled for sm_80, sm_90 and sm_100 and run in Triton's interpreter, and every
program below runs with `--small` on a CPU, in the tests of this project. Times and rates below are targets alone.
"""
# What has to hold, and the benchmark that says whether it does.
TARGETS = (
    ("stash + restore run at 0.9 of copy_'s rate, uncapped, groups of 128 MiB and more", "stash_copy"),
    (
        "beside a matrix product they cost it nothing, or 1.1 times two copies at most, with the best cap",
        "gemm_beside_stash",
    ),
    ("graph + stash takes 0.75 of an eager dropless step where launches decide", "graph_step"),
    ("graph + stash holds (phi + w c / S) of what eager dropless holds beside weights and states", "graph_step"),
)
SIDES = ("ms", "time_x", "peak_mib", "reserved_mib", "memory_x", "most_memory_x", "again", "on_host", "voids")


def page(results: Path) -> str:
    """The page for the results in that folder."""
    found = {
        path.stem.removesuffix("_gpu"): json.loads(path.read_text()) for path in sorted(results.glob("*_gpu.json"))
    }
    parts = [HEAD, "" if found else NOT_YET, "\n## Targets\n\n", *_targets(found)]
    for name, section in (
        ("run", _parts),
        ("stash_copy", _copies),
        ("gemm_beside_stash", _rivals),
        ("graph_step", _steps),
    ):
        if name in found:
            parts += [f"\n## {name}\n\n{_where(found[name])}\n\n", *section(found[name])]
            if (results / f"{name}_gpu.svg").exists():
                parts.append(f"\n![Plot of {name}](../benchmarks/results/{name}_gpu.svg)\n")
    others = [name for name in ("stash_step", "ddp") if name in found]
    links = ", ".join(f"[{name}](../benchmarks/results/{name}_gpu.json)" for name in others)
    return "".join([*parts, f"\nFurther figures: {links}.\n" if links else ""])


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


def _targets(found: Mapping[str, Any]) -> Iterator[str]:
    yield from _table(("target", "says"), [(words, f"`benchmarks/gpu/{name}.py`") for words, name in TARGETS])
    measured = [target for record in found.values() for target in record.get("targets", ())]
    if measured:
        rows = [(one["name"], one["measured"], one["limit"], "yes" if one["holds"] else "**no**") for one in measured]
        yield "\n"
        yield from _table(("measured", "figure", "limit", "holds"), rows)


def _parts(record: Mapping[str, Any]) -> Iterator[str]:
    yield from _table(("part", "ended", "seconds"), [(p["part"], p["verdict"], p["seconds"]) for p in record["parts"]])


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
    sys.exit(0)
