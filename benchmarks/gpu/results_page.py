"""Writes what is known about GPUs: docs/gpu_results.md, the marked parts of README.md, and gpu_tables.md.

    python benchmarks/gpu/results_page.py           # writes all of them
    python benchmarks/gpu/results_page.py FOLDER    # prints the page of the results in another folder

evidence.py decides what the records say, results_tables.py has all their numbers. Measures nothing.
"""

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from benchmarks.gpu.evidence import JOURNAL, Cause, Decision, Evidence, Outcome, Run, Side, read  # noqa: E402
from benchmarks.gpu.journal import Verdict  # noqa: E402
from benchmarks.gpu.results_tables import shown, table, tables  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
PAGE, README, TABLES = ROOT / "docs" / "gpu_results.md", ROOT / "README.md", RESULTS / "gpu_tables.md"

# Sides that capture a step with the stash, by preference.
HEADLINE = ("graph + stash, optimizer", "graph + stash")
PLAIN = "plain PyTorch"
# Checks whose results are not shown any more if the other one has run.
NEWER = {"environment": "ceilings", "trace": "qwen_4096"}
MOST_ROWS, MOST_NEVER = 4, 3  # of a table of kernels; of claims that were not run, which the tables below list too
NEW_CODE = ("prepared launches", "RoPE kernels")  # ids of claims about code that may be newer than all results
# What times of steps leave out; see [Note: stand-ins] and [Note: plain PyTorch].
STAND_INS = (
    "In all steps, the other ranks of the expert-parallel group are stand-ins on the same GPU: exchanges are device "
    "copies, all-reduces cost nothing, and losses are meaningless"
)
PLAIN_HAS_LESS = "; plain PyTorch keeps bf16 states and moves no rows"
NOT_TIMED = "Captured steps with the stash have not been timed yet."
WRAP: Mapping[str, Any] = {"width": 148, "break_long_words": False, "break_on_hyphens": False}

HEAD = """# Results on a GPU

Does it work on a GPU, how fast, and what is open? `benchmarks/gpu/results_page.py` writes this page from
[records](../benchmarks/results/checks.jsonl) and [causes](../benchmarks/results/gpu_evidence.yaml).
[gpu_tables.md](../benchmarks/results/gpu_tables.md) has all numbers.
"""
RUN = """
## Run it

    make gpu                         # call A (480 s), then call B (170 s)
    make gpu CALL=A                  # times of steps and kernels; CALL=B: what was open before, rows in 8 bits
    make gpu OUT=FOLDER              # results elsewhere; benchmarks/gpu/results_page.py FOLDER prints their page

One GPU, Python >= 3.11, torch >= 2.11, Triton, NumPy, pytest, hypothesis and PyYAML are required, but no
network and no installation. Targets are for an H200. Outside a git clone, set the variable COMMIT. Each result is
written at once to `checks.jsonl`; `make gpu` continues a killed run. It skips checks that passed, failed or timed out
on the same code: `benchmarks/gpu/run_all.py --only NAME` reruns one, `--list` shows all. `--dry-run --out FOLDER` runs
small sizes, also on a CPU.
"""
VERDICTS = """
*Passed when rerun*: a check failed, the cause beside it was removed, and its tests were run again on the same GPU.
*Modelled on a CPU*: the same code has this property on a CPU, where models and interpreters replace the device.
Evidence is of the commit named. CPUs test later changes.
"""
TERMS = """
*Pages* store the rows that the paged stash saves for backward. The *stash* copies rows to pages, the *restore* copies
them back. A *grouped GEMM* multiplies each expert's rows with that expert's weights. *Dropless* experts allocate
buffers of the exact size, *static* ones have a fixed size. A *graph* replays a captured step.
"""


def write_pages() -> None:
    """Writes all three files from benchmarks/results."""
    evidence = read(RESULTS)
    TABLES.write_text(tables(RESULTS, evidence), encoding="utf-8")
    PAGE.write_text(page(evidence), encoding="utf-8")
    README.write_text(readme(README.read_text(encoding="utf-8"), evidence), encoding="utf-8")


def parse_options() -> argparse.Namespace:
    """Parses the command line of this program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="print the page of this folder and write nothing")
    options = parser.parse_args()
    if options.folder is not None and not (options.folder / JOURNAL).exists():
        parser.error(f"{options.folder} has no {JOURNAL}; give the folder of a run of make gpu OUT=FOLDER")
    return options


def page(evidence: Evidence) -> str:
    """Returns the text of docs/gpu_results.md."""
    decisions = evidence.decisions()
    parts = [HEAD, f"\n{textwrap.fill(summary(evidence, decisions), **WRAP)}\n", *_speed(evidence)]
    return "".join([*parts, *_open(evidence, decisions), *_claims(decisions), RUN])


def readme(text: str, evidence: Evidence) -> str:
    """Returns the README's text with its marked parts rewritten: `<!-- gpu:NAME -->...<!-- /gpu:NAME -->`."""
    decisions = evidence.decisions()
    lines = textwrap.wrap(f"**On GPUs** ([results](docs/gpu_results.md)): {summary(evidence, decisions)}", **WRAP)
    parts = {
        "status": "".join(f"\n> {line}" for line in lines) + "\n> ",
        "throughput": f"[{_throughput(evidence, decisions)}](docs/gpu_results.md#how-fast)",
        "libraries": _libraries(decisions),
    }
    for name, part in parts.items():
        marks = f"<!-- gpu:{name} -->", f"<!-- /gpu:{name} -->"
        if text.count(marks[0]) != 1 or text.count(marks[1]) != 1:
            raise ValueError(f"README.md needs one {marks[0]} and one {marks[1]} after it")
        text = re.sub(
            f"({re.escape(marks[0])}).*({re.escape(marks[1])})",
            lambda found, part=part: f"{found[1]}{part}{found[2]}",  # type: ignore[misc]
            text, flags=re.DOTALL,
        )  # fmt: skip
    return text


def summary(evidence: Evidence, decisions: Sequence[Decision]) -> str:
    """Returns the state in a few sentences: what ran where, the times of steps, and what is open."""
    if not evidence.on_gpu:
        return f"Nothing has run on a GPU yet; all evidence is from CPUs. {NOT_TIMED}"
    num_held = sum(not one.outcome.is_open for one in decisions)
    num_failed = sum(one.outcome in (Outcome.FAILED, Outcome.TEST_WRONG) for one in decisions)
    devices = ", ".join(dict.fromkeys(run.device for run in evidence.on_gpu))
    last = max(run.date for run in evidence.on_gpu)
    num_open = len(decisions) - num_held - num_failed
    text = [
        f"{num_held} of {len(decisions)} claims about kernels, the stash, graphs and training were shown to hold on "
        f"one {devices} (last run {last}), {num_failed or 'none'} failed, and {num_open} are open.",
        *_sentences_on_steps(evidence),
    ]
    if _is_open(decisions, "several GPUs"):
        text.append("Nothing has run on several GPUs.")
    return " ".join(text)


def _sentences_on_steps(evidence: Evidence) -> Iterator[str]:
    """Yields the times of captured steps of the README's shapes, or that there are none and which steps were timed.

    If any side was timed, the last sentence says what the times leave out.
    """
    sides = evidence.sides()
    found = [side for shape in evidence.headlines if (side := headline(sides, shape))]
    for side in found:
        relative = _relative(side, sides)
        beside = f", {relative:.2f} times the time of plain PyTorch" if relative else ""
        yield f"A captured step of {side.shape}, with the stash, took {side.ms:,.0f} ms{beside} ({_rates(side)})."
    if not found:
        yield NOT_TIMED
        for shape in dict.fromkeys(side.shape for side in sides if side.ms):
            timed = [side for side in sides if side.shape == shape and side.ms]
            times = ", ".join(f"{side.ms:.0f} ms ({side.name})" for side in timed)
            yield f"{timed[0].note or f'Steps of {shape}.'} A step took {times}."
    if timed_sides := [side.name for side in sides if side.ms]:
        yield f"{STAND_INS}{PLAIN_HAS_LESS if PLAIN in timed_sides else ''}."


def headline(sides: Sequence[Side], shape: str) -> Side | None:
    """Returns the timed side that captures a step of a shape with the stash, None if there is none."""
    timed = {side.name: side for side in sides if side.ms and side.shape == shape}
    return next((timed[name] for name in HEADLINE if name in timed), None)


def _relative(side: Side, sides: Sequence[Side]) -> float | None:
    """Returns a side's time over that of plain PyTorch in the same check, None if one of them is missing."""
    plain = next((one.ms for one in sides if (one.check, one.shape, one.name) == (side.check, side.shape, PLAIN)), None)
    return side.ms / plain if side.ms and plain else None


def _rates(side: Side) -> str:
    found = [
        ("tokens_s", lambda value: f"{value:,.0f} tokens/s"),
        ("mfu", lambda value: f"{value:.0%} MFU"),
        ("reserved_gib", lambda value: f"{value:.1f} GiB reserved"),
    ]
    return ", ".join(show(side.values[name]) for name, show in found if side.values.get(name) is not None)


def _throughput(evidence: Evidence, decisions: Sequence[Decision]) -> str:
    """Returns the README's cell on throughput: on several GPUs, and the last of the README's shapes on one."""
    many = "not yet" if _is_open(decisions, "several GPUs") else "yes"
    found = [side for shape in evidence.headlines if (side := headline(evidence.sides(), shape)) and _rates(side)]
    return f"{many}; one {found[-1].device}: {_rates(found[-1])}" if found else many


def _libraries(decisions: Sequence[Decision]) -> str:
    """Returns the README's words on libraries that need a GPU."""
    links = {"Transformer Engine": "docs/model.md#transformer-engine", "DeepEP": "docs/moe.md#back-ends"}
    never = [f"[{name}]({link})" for name, link in links.items() if _is_open(decisions, name)]
    ran = [f"[{name}]({link})" for name, link in links.items() if not _is_open(decisions, name)]
    return ", ".join([*ran, *([f"{' and '.join(never)} never run"] if never else [])])


def _is_open(decisions: Sequence[Decision], name: str) -> bool:
    return any(one.claim.id == name and one.outcome.is_open for one in decisions)


# Section: how fast.


def _speed(evidence: Evidence) -> Iterator[str]:
    yield "\n## How fast\n"
    sides = evidence.sides()
    if not any(headline(sides, shape) for shape in evidence.headlines):
        yield "\nCaptured steps with the stash: **not yet** timed. Call A adds their times here.\n"
    if sides:
        yield "\n"
        yield from _side_table(sides)
        yield f"\nMeasured on {'; '.join(dict.fromkeys(map(_place, sides)))}.\n"
    if targets := evidence.targets():
        yield "\n"
        yield from table(("target", "measured", "limit", "holds"), [_target_row(*one) for one in targets])
    for check, title in evidence.numbers.items():
        yield from _numbers(evidence.last(check), title)
    yield from _kernels(sides)
    ran = {run.check for run in evidence.on_gpu}
    figures = [
        figure
        for check, key, figures_of in _FIGURES
        if NEWER.get(check) not in ran and (run := evidence.last(check, key))
        for figure in figures_of(run.results)
    ]
    if figures:
        yield "\nOther measurements:\n\n"
        yield from table(("measured", "result"), figures)


def _place(one: Side | Run) -> str:
    """Returns the date, device and commit of a measurement."""
    return f"{one.date}, {one.device}{f' ({one.commit[:8]})' if one.commit else ''}"


def _model_of(side: Side, sides: Sequence[Side]) -> str:
    """Returns the name of a side's shape, with the check if another one measured the shape before."""
    first = next(one.check for one in sides if one.shape == side.shape)
    return side.shape if side.check == first else f"{side.shape} ({side.check})"


def _side_table(sides: Sequence[Side]) -> Iterator[str]:
    columns = ("model", "side", "ms per step", "tokens/s", "MFU", "reserved GiB", "time / plain PyTorch")
    models = [_model_of(side, sides) for side in sides]
    # Only the first row of a model names it, and columns without any value are left out.
    named = ["" if model == before else model for model, before in zip(models, ["", *models], strict=False)]
    rows = [[model, *_side_cells(side, sides)] for model, side in zip(named, sides, strict=True)]
    used = [number for number in range(len(columns)) if any(row[number] for row in rows)]
    yield from table([columns[number] for number in used], [[row[number] for number in used] for row in rows])


def _side_cells(side: Side, sides: Sequence[Side]) -> list[object]:
    values, relative = side.values, _relative(side, sides)
    if side.is_too_large:
        needed = values.get("predicted_gib")
        time = "out of memory" + (f" (predicted {needed:.0f} GiB)" if needed else "")
    elif side.is_skipped:
        time = "not started"
    elif side.ms is None:
        time = f"failed: {_plain_text(side.error)}"
    else:
        time = f"{side.ms:.1f}" if side.ms < 100 else f"{side.ms:,.0f}"
    tokens, mfu, reserved = (values.get(name) for name in ("tokens_s", "mfu", "reserved_gib"))
    return [
        side.name,
        time,
        tokens and f"{tokens:,.0f}",
        mfu and f"{mfu:.1%}",
        reserved and f"{reserved:.1f}",
        relative and f"{relative:.2f}",
    ]


def _target_row(run: Run, target: Mapping[str, Any]) -> list[object]:
    measured = "not measured" if target.get("measured") is None else target["measured"]
    limit = f"{'>=' if target.get('is_least') else '<='} {shown(target['limit'])}"
    holds = "open" if target.get("measured") is None else "yes" if target["holds"] else "**no**"
    return [_target_name(run, target), measured, limit, holds]


def _target_name(run: Run, target: Mapping[str, Any]) -> str:
    return f"{run.results.get('shape', run.check)}: {target['name']}"


def _numbers(run: Run | None, title: str) -> Iterator[str]:
    """Yields the rates and times of each side of a check."""
    units = {"gb_s": "GB/s", "tflop_s": "TFLOP/s", "us": "us", "rate_x": "x"}
    sides = run.sides if run is not None else {}
    rates = {
        name: [f"{shown(values[key])} {unit}" for key, unit in units.items() if values.get(key) is not None]
        for name, values in sides.items()
    }
    known = [f"{name} {', '.join(found)}" for name, found in rates.items() if found]
    if known:
        yield f"\n{title}: {'; '.join(known)}.\n"
    for key, title in (("error", "Failed"), ("skipped", "Not started")):
        if found := [name for name, values in sides.items() if values.get(key)]:
            yield f"\n{title}: {', '.join(found)}.\n"


def _kernels(sides: Sequence[Side]) -> Iterator[str]:
    """Yields the longest kernels of each profiled step."""
    for side in sides:
        if rows := side.values.get("kernels"):
            busy, span = (side.values.get(name) or 0.0 for name in ("busy_ms", "span_ms"))
            yield (
                f"\nLongest kernels of a profiled step ({side.shape}, {side.name}), "
                f"in which the device was busy for {busy:.1f} of {span:.1f} ms:\n\n"
            )
            names = {"count": "launches", "us": "us", "gb_s": "GB/s", "tflop_s": "TFLOP/s"}
            cells = [[_kernel_name(row["kernel"]), *map(row.get, names)] for row in rows[:MOST_ROWS]]
            yield from table(("kernel", *names.values()), cells)


def _kernel_name(name: str) -> str:
    """Returns a kernel's name without its template arguments and parameters."""
    short = re.split(r"[<(]", name.removeprefix("void "))[0].rpartition("::")[2] or name
    return f"`{_plain_text(short)}`"


def _plain_text(value: object) -> object:
    return value if isinstance(value, int | float | None) else str(value).replace("|", "/")[:60]


def _span(rows: Sequence[Mapping[str, Any]], key: str) -> str:
    """Returns the lowest and highest value of a column."""
    values = sorted(row[key] for row in rows)
    return f"{values[0]:.2f} to {values[-1]:.2f}" if len(values) > 1 else f"{values[0]:.2f}"


def _device(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "device copy, bytes read and written", f"{found['copy_gb_s']:,.0f} GB/s"
    yield "bf16 GEMM of size 8192", f"{found['product_tflop_s']:.0f} TFLOP/s"


def _copy_rates(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    large = [row for row in found["points"] if row["rows"] >= 4096 and not row["num_programs"]]
    tiers = (("device", "device pages"), ("host", "pinned host pages"))
    spans = [(name, [row for row in large if row["tier"] == tier]) for tier, name in tiers]
    rates = ", ".join(f"{_span(rows, 'rate_x')} ({name})" for name, rows in spans if rows)
    yield "stash and restore of large groups: rate / rate of `copy_`", rates


def _product_rates(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    names = {
        "forward": "forward", "grad_x": "gradient of x", "grad_weight": "gradient of weights",
        "added_weight": "gradient of weights, accumulated in fp32",
    }  # fmt: skip
    spans = [(name, [row for row in found["products"] if row["product"] == key]) for key, name in names.items()]
    rates = "; ".join(f"{_span(rows, 'rate_x')} ({name})" for name, rows in spans if rows)
    yield "our grouped GEMM: throughput / that of torch's `grouped_mm`", rates


def _copies_beside(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    rows = [row for row in found["rows"] if row["side"] == "after" and row["num_programs"] == 0]
    costs = ", ".join(f"{row['cost_x']:.2f} ({row['products']})" for row in rows)
    yield "share of the copies' time that a concurrent GEMM loses; 0: hidden", costs


def _launch_counts(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    counts = ", ".join(f"{counts['layer']:.0f} ({side})" for side, counts in found["launches"].items())
    yield "launches per MoE layer and step", counts


def _busy(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "device time in a profiled eager step with a stash", f"{found['busy_ms']:.0f} of {found['step_ms']:.0f} ms"


# Checks whose results are shown in a line or two, and the result that this requires.
_FIGURES: Sequence[tuple[str, str, Callable[[Mapping[str, Any]], Iterator[tuple[str, str]]]]] = (
    ("environment", "product_tflop_s", _device),
    ("copy_points", "points", _copy_rates),
    ("products", "products", _product_rates),
    ("product_beside_copies", "rows", _copies_beside),
    ("launches", "launches", _launch_counts),
    ("trace", "busy_ms", _busy),
)


# Section: what is open.


def _open(evidence: Evidence, decisions: Sequence[Decision]) -> Iterator[str]:
    yield "\n## What is open\n\n"
    failed = [one for one in decisions if one.outcome in (Outcome.FAILED, Outcome.TEST_WRONG)]
    partly = [one for one in decisions if one.outcome in (Outcome.TIMED_OUT, Outcome.PARTLY)]
    never = [one.claim.claim for one in decisions if one.outcome is Outcome.NOT_YET]
    sides = evidence.sides()
    missing = [shape for shape in evidence.headlines if not headline(sides, shape)]
    items = [f"Failed: {one.claim.claim}{_tests_of(one)}." for one in failed]
    items += [f"Failed: {side.shape}, {side.name}: {_plain_text(side.error)}." for side in sides if side.error]
    for run, target in evidence.targets():
        if not target["holds"]:
            missed = "Target not measured" if target.get("measured") is None else "Target missed"
            items.append(f"{missed}: {_target_name(run, target)}.")
    items += _incomplete(evidence)
    items += [f"Not complete ({one.outcome.value.strip('*')}): {one.claim.claim}." for one in partly]
    items += [f"Not started: {side.shape}, {side.name}." for side in sides if side.is_skipped]
    items += [f"Not timed yet, captured and with the stash: {'; '.join(missing)}."] if missing else []
    items += [f"Not run yet: {claim}." for claim in never[:MOST_NEVER]]
    items += [f"Not run yet: {len(never) - MOST_NEVER} more, see below."] if len(never) > MOST_NEVER else []
    yield "".join(f"- {item}\n" for item in items) if items else "Nothing that the checks cover.\n"


def _tests_of(one: Decision) -> str:
    tests = [*one.run.failures][:3] if one.run else []
    return f" ({', '.join(f'`{test}`' for test in tests)})" if tests else ""


def _incomplete(evidence: Evidence) -> list[str]:
    """Returns the measurements that did not come to their end the last time."""
    checks = dict.fromkeys([*(side.check for side in evidence.sides()), *evidence.numbers, *evidence.measurements])
    last = {run.check: run for run in evidence.on_gpu if run.check in checks}
    short = (Verdict.TIMED_OUT, Verdict.INTERRUPTED, Verdict.INCOMPLETE, "")
    is_short = {check: run.verdict in short for check, run in last.items()}
    return [
        f"Not complete: measurement `{check}` at {last[check].commit[:8]}." for check in checks if is_short.get(check)
    ]


# Section: what works.


def _claims(decisions: Sequence[Decision]) -> Iterator[str]:
    yield f"\n## What works\n{VERDICTS}"
    never = {one.claim.id for one in decisions if one.outcome is Outcome.NOT_YET}
    new = [name for name in NEW_CODE if name in never]
    text = f"{' and '.join(new)} have not run on a GPU yet.\n"
    yield f"{text[0].upper()}{text[1:]}" if new else ""
    yield TERMS
    runs = dict.fromkeys(_place(one.run) for one in decisions if one.run)
    yield f"\nRuns: {'; '.join(sorted(runs))}.\n" if runs else ""
    for area in dict.fromkeys(one.claim.area for one in decisions):
        yield f"\n### {area}\n\n"
        rows = [_claim_row(one) for one in decisions if one.claim.area == area]
        yield from table(("claim", "verdict, newest evidence", "causes of failures"), rows)


def _claim_row(one: Decision) -> list[object]:
    kernels = ", ".join(f"`{kernel}`" for kernel in one.claim.kernels)
    claim = f"{kernels}: {one.claim.claim}" if kernels else one.claim.claim
    return [claim, _verdict(one), ". ".join(_reason(one, run, cause) for run, cause in one.causes)]


def _verdict(one: Decision) -> str:
    """Returns the verdict with its newest evidence, or with the evidence without a GPU."""
    place = f" ({one.claim.known})" if one.claim.known else ""
    if one.rerun is not None:
        place = f" ({one.rerun.ran}{f', {one.rerun.commit[:8]}' if one.rerun.commit else ''})"
    elif one.run is not None:
        place = f" (`{one.run.check}`, {one.run.commit[:8]})"
    return f"{one.outcome.value}{place}"


def _reason(one: Decision, run: Run, cause: Cause) -> str:
    """Returns when the check failed, whether the test, the program or the machine was the cause, and how."""
    kind = {"test": "**the test was wrong**", "code": "a bug", "machine": "the machine or a tool, not the program"}
    fixed = ", fixed" if cause.kind == "code" and not one.outcome.is_open else ""
    return f"{cause.seen or f'{run.verdict} at {run.commit[:8]}'}; {kind[cause.kind]}{fixed}: {cause.cause}"


def main() -> None:
    """Writes all three files, or prints the page of the folder on the command line."""
    options = parse_options()
    if options.folder is None:
        write_pages()
    else:
        print(page(read(options.folder)), end="")


if __name__ == "__main__":
    main()
