"""Writes a self-contained HTML page about a run: `python tools/report.py RUN_DIR [RUN_DIR ...]`.

With --serve it instead serves a page that follows the run. RUN_DIR is the run's --tensorboard-dir or --save folder.
Several runs are drawn into the same figures. The run may still be in progress. report_figures.py and report_sections.py
select the figures and tables, and report_page.html.jinja and report_page.js draw them.
"""

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

if not __package__:  # run by its path, as in a clone without installation
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.pages.page import FOLDER, MissingPackageError, plotly_script, render, require_packages
from megatron.tools.report_figures import expert_loads, make_figures, run_names
from megatron.tools.report_sections import memory_section, rows_figures, stash_section, timeline
from megatron.tools.report_server import Asset, LiveReport, ReportServer, serve_until_signal
from megatron.tools.run_log import RunLog, read_run
from megatron.training.command_line.flags import flag_table, yaml_of_value
from megatron.version_flag import PrintVersions

TEMPLATE = Path(__file__).with_name("report_page.html.jinja")
# In the order of execution.
LIVE_SCRIPTS = (FOLDER / "plots.js", TEMPLATE.with_name("report_page.js"), TEMPLATE.with_name("report_live.js"))
DEFAULT_PORT = 8000
RECENT_SHARE = 0.02  # fraction of the steps, at the end, whose mean loss is in the summary


def main(argv: list[str] | None = None) -> int:
    """Writes or serves the report and returns the exit status.

    Returns 1 if there is no log, a package that pages require is missing, or the port cannot be used.
    """
    options = parse_options(argv)
    try:
        require_packages()
        if options.serve:
            serve(options.runs, host=options.host, port=options.port)
            return 0
        runs = [read_run(place) for place in options.runs]
        output = options.output or runs[0].path.with_name("report.html")
        output.write_text(page(runs), encoding="utf-8")
    except (ValueError, OSError, MissingPackageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"Report: {output} ({output.stat().st_size / 1e6:.1f} MB)")
    return 0


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line of this tool."""
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action=PrintVersions)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR", help="folder of a run, or its steps.jsonl")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="default: report.html in the folder of the first run's log"
    )
    parser.add_argument("--serve", action="store_true", help="serve a page that follows the runs, until Ctrl-C")
    parser.add_argument(
        "--port", type=int, default=None, help=f"port of --serve; 0 chooses a free one (default: {DEFAULT_PORT})"
    )
    parser.add_argument(
        "--host", help="address of this machine for --serve (default: 127.0.0.1, reachable from this machine only)"
    )
    options = parser.parse_args(argv)
    if not options.serve and (options.port is not None or options.host is not None):
        parser.error("--port and --host require --serve")
    if options.serve and options.output is not None:
        parser.error("--serve does not support --output, because it writes no file")
    options.port = DEFAULT_PORT if options.port is None else options.port
    if not 0 <= options.port < 2**16:
        parser.error(f"--port is {options.port}: must be from 0 to 65535")
    options.host = options.host or "127.0.0.1"
    return options


def serve(places: Sequence[Path], *, host: str, port: int) -> None:
    """Serves the live page until SIGINT or SIGTERM. Raises ValueError for a missing folder or an unusable port."""
    missing = [place for place in places if not place.exists()]
    if missing:
        raise ValueError(f"{missing[0]} does not exist: give the folder of --tensorboard-dir or --save")
    live = LiveReport(places, page_content)
    with ReportServer((host, port), live, assets=live_assets()) as server:
        if not server.is_loopback:
            print(
                f"WARNING: --host is {host}: anyone who can reach this machine on port {server.server_address[1]} "
                "can read the run's settings, paths and numbers without a password; ssh -L from the reader's "
                "machine is safer",
                file=sys.stderr,
            )
        serve_until_signal(server)


def live_assets() -> dict[str, Asset]:
    """Returns the static assets of a live page by path."""
    library = plotly_script().encode()
    # Named by a hash of its content, so that browsers may cache it.
    plotly = f"/plotly-{hashlib.sha256(library).hexdigest()[:12]}.js"
    scripts = "".join(path.read_text(encoding="utf-8") for path in LIVE_SCRIPTS)
    frame = render(TEMPLATE, title="Run report", script_paths=[plotly, "/page.js"])
    return {
        "/": Asset(frame.encode(), "text/html"),
        "/page.js": Asset(scripts.encode(), "text/javascript"),
        plotly: Asset(library, "text/javascript", is_fixed=True),
    }


def page(runs: Sequence[RunLog]) -> str:
    """Returns the whole HTML page, which does not depend on other files."""
    return render(TEMPLATE, title="Run report", script_paths=[], content=page_content(runs))


def page_content(runs: Sequence[RunLog]) -> dict[str, Any]:
    """Returns the complete content of the page as JSON values."""
    names = run_names(runs)
    return {
        "title": " and ".join(names),
        "runs": [_about(run, name) for run, name in zip(runs, names)],
        "figures": make_figures(runs) + rows_figures(runs),
        "loads": [expert_loads(run) for run in runs],
        "timelines": [timeline(run) for run in runs],
        "stashes": [stash_section(run) for run in runs],
        "memories": [memory_section(run) for run in runs],
        "flags": _flag_rows(runs),
        "environment": _rows([run.record.get("environment") or {} for run in runs]),
    }


def _about(run: RunLog, name: str) -> dict[str, Any]:
    record = run.record
    notes = [] if record else [f"There is no run.json next to {run.path}: flags and environment are unknown."]
    if run.num_unreadable:
        notes.append(f"{run.num_unreadable} lines of {run.path} could not be read and are omitted.")
    starts = [one for one in record.get("starts") or [] if isinstance(one, dict) and one.get("iteration")]
    return {
        "name": name,
        "path": str(run.path),
        "notes": notes,
        "last_step": int(run.steps[-1]) if run.num_steps else 0,
        "facts": dict(facts(run)),
        "resumes": [{"step": one["iteration"], "when": str(one.get("started", ""))} for one in starts],
    }


def facts(run: RunLog) -> list[tuple[str, str]]:
    """Returns the names and values of a run's summary, without unknown values."""
    flags, model = run.record.get("flags") or {}, run.record.get("model") or {}
    environment = run.record.get("environment") or {}
    found: list[tuple[str, str | None]] = [
        ("steps", _steps(run, flags.get("train_iters"))),
        ("loss, last steps", _number(_recent_mean(run, "lm_loss"), "{:.4f}")),
        ("validation loss", _evaluation(run, "validation_loss")),
        ("test loss", _evaluation(run, "test_loss")),
        ("tokens", _tokens(run, flags.get("seq_length"))),
        ("time in steps", _duration(run)),
        ("tokens/s, median", _number(_middle(run, "tokens_per_second"), "{:,.0f}")),
        ("TFLOP/s per device, median", _number(_middle(run, "tflops"), "{:,.3g}")),
        ("MFU, median", _number(_middle(run, "mfu"), "{:.1%}")),
        ("parameters", _large(model.get("parameters"))),
        ("active parameters", _large(model.get("active_parameters"))),
        ("processes", _number(environment.get("world_size"), "{:,}")),
        ("peak memory", _peak_memory(run)),
        ("skipped steps", _skipped(run)),
        ("started", _started(run.record)),
    ]
    return [(name, value) for name, value in found if value is not None]


def _started(record: dict[str, Any]) -> str | None:
    starts = record.get("starts") or [record]
    first = str(starts[0].get("started") or "")[:16].replace("T", " ")
    return (first + (f", resumed {len(starts) - 1} x" if len(starts) > 1 else "")) or None


def _steps(run: RunLog, planned: Any) -> str:
    last = int(run.steps[-1]) if run.num_steps else 0
    return f"{last:,} of {planned:,}" if isinstance(planned, int) else f"{last:,}"


def _number(value: Any, form: str) -> str | None:
    return form.format(value) if isinstance(value, (int, float)) else None


def _finite(run: RunLog, name: str) -> np.ndarray:
    """Returns the finite values of a field, [n] float64."""
    if name not in run.series:
        return np.zeros(0)
    values = run.series[name].values
    return values[np.isfinite(values)]


def _recent_mean(run: RunLog, name: str) -> float | None:
    values = _finite(run, name)
    return float(values[-max(1, int(RECENT_SHARE * len(values))) :].mean()) if values.size else None


def _middle(run: RunLog, name: str) -> float | None:
    values = _finite(run, name)
    return float(np.median(values)) if values.size else None


def _evaluation(run: RunLog, name: str) -> str | None:
    values = _finite(run, name)
    return f"{values[-1]:.4f} (ppl {np.exp(min(values[-1], 20)):,.4g})" if values.size else None


def _tokens(run: RunLog, seq_length: Any) -> str | None:
    samples = _finite(run, "consumed_samples")
    if not samples.size or not isinstance(seq_length, int):
        return None
    padding = _finite(run, "consumed_padding_tokens")
    return _large(int(samples[-1]) * seq_length - (int(padding[-1]) if padding.size else 0))


def _duration(run: RunLog) -> str | None:
    total = _finite(run, "seconds").sum()
    minutes, seconds = divmod(int(total), 60)
    hours, minutes = divmod(minutes, 60)
    if not total:
        return None
    return f"{hours:,} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{total:.1f} s"


def _large(number: Any) -> str | None:
    """Formats a number with three digits and a word, for example 47.2 billion."""
    if not isinstance(number, int):
        return None
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:#.3g} {word}".replace(". ", " ")
    return f"{number:,}"


def _peak_memory(run: RunLog) -> str | None:
    for name in ("memory/max_allocated", "memory/peak_rss"):
        values = _finite(run, name)
        if values.size:
            return f"{values.max() / 2**30:.2f} GiB"
    return None


def _skipped(run: RunLog) -> str | None:
    skipped = int(_finite(run, "skipped").sum())
    return f"{skipped:,}" if skipped else None


def _flag_rows(runs: Sequence[RunLog]) -> list[dict[str, Any]]:
    """Returns the flags with each run's value, the most informative flags first.

    Flags that differ between runs come first, then non-default flags, then the rest.
    """
    rows = _rows([run.record.get("flags") or {} for run in runs])
    defaults = {flag.dest: yaml_of_value(flag.default) for flag in flag_table().flags}
    for row in rows:
        name = row["name"]
        row["default"] = _text(defaults[name]) if name in defaults else "none"
        row["set"] = any(value != row["default"] for value in row["values"])
    return sorted(rows, key=lambda row: (len(set(row["values"])) == 1, not row["set"], row["name"]))


def _rows(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    names = dict.fromkeys(name for record in records for name in record)
    return [
        {"name": name, "values": [_text(record[name]) if name in record else "" for record in records]}
        for name in names
    ]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_text, value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    sys.exit(main())
