"""Builds the report's figures as plain values: the list of figures, and lines and heat maps of logged fields.

report_page.js draws them with plotly, and run_log.py reads the log.
"""

import base64
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.tools.run_log import LOG_NAME, LayerTable, RunLog, Series

MAX_POINTS = 1200  # points of a line, more than its width in pixels
MEDIAN_POINTS = 300
SMOOTHED_FROM = 60  # minimum number of steps of a noisy line with a running median
MAX_LINES_OF_LAYERS = 8  # more layers are drawn as a heat map
PERPLEXITY_LIMIT = 20.0  # as in the log: upper bound of the exponent
DASHES = ("solid", "dash", "dot", "dashdot")
MAX_DASHED_FIELDS = 3
GIB = 1 / 2**30


@dataclass(frozen=True)
class Figure:
    """One figure.

    fields: (name in the log, label); a name that ends with a slash selects all names with this prefix. axis: title and
    unit. scale: multiplier of logged values. noisy: drawn pale, below its running median. mean: draw the running mean
    instead of the median, which is uninformative for counts that are mostly 0. from_zero: the axis starts at 0. steps:
    drawn as a step function. occurring: omit fields that are always 0.
    """

    id: str
    section: str
    title: str
    axis: str
    fields: tuple[tuple[str, str], ...]
    note: str = ""
    log: bool = False
    scale: float = 1.0
    noisy: bool = False
    from_zero: bool = False
    steps: bool = False
    occurring: bool = False
    stacked: bool = False
    mean: bool = False


FIGURES = (
    Figure(
        *("loss", "Loss", "Loss", "lm loss (nats per token)"),
        (("lm_loss", "training"), ("validation_loss", "validation"), ("test_loss", "test")),
        "Mean over tokens. Crosses: skipped steps. The first 1% of a long run may lie above the axis.",
        noisy=True,
    ),
    Figure(
        *("perplexity", "Loss", "Perplexity", "perplexity (tokens)"),
        (("lm_loss", "training"), ("validation_loss", "validation"), ("test_loss", "test")),
        "exp(loss): the number of equally likely tokens with the same loss.",
        log=True,
        noisy=True,
    ),
    Figure(
        *("learning-rate", "Optimizer", "Learning rate", "learning rate"),
        (("learning_rate", "learning rate"), ("decoupled_learning_rate", "embeddings and output")),
        "Learning rate used by the step.",
        from_zero=True,
    ),
    Figure(
        *("grad-norm", "Optimizer", "Gradient norm", "2-norm"),
        (("grad_norm", "gradient norm"),),
        "Over all parameters, before clipping.",
        log=True,
        noisy=True,
    ),
    Figure(
        *("params-norm", "Optimizer", "Parameter norm", "2-norm"),
        (("params_norm", "norm"),),
        "Over all parameters, after the step.",
    ),
    Figure(*("zeros", "Optimizer", "Zeros in the gradient", "elements"), (("num_zeros", "zeros"),), noisy=True),
    Figure(
        *("weight-decay", "Optimizer", "Weight decay", "weight decay"),
        (("weight_decay", "weight decay"),),
        from_zero=True,
    ),
    Figure(
        *("loss-scale", "Optimizer", "Loss scale", "loss scale"),
        (("loss_scale", "loss scale"),),
        "Multiplier of the loss in fp16. Crosses: skipped steps.",
        log=True,
        steps=True,
    ),
    Figure(
        *("batch-size", "Optimizer", "Batch size", "samples per step"),
        (("global_batch_size", "global batch size"),),
        from_zero=True,
        steps=True,
    ),
    Figure(
        *("throughput", "Speed", "Throughput", "tokens per second"),
        (("tokens_per_second", "all devices"),),
        "Tokens of the global batch divided by the step time.",
        noisy=True,
    ),
    Figure(
        *("step-time", "Speed", "Step time", "seconds"),
        (("seconds", "step"),),
        "Data loading, forward, backward and optimizer; without evaluation and checkpointing.",
        noisy=True,
    ),
    Figure(
        *("tflops", "Speed", "Arithmetic rate", "TFLOP/s per device"),
        (("tflops", "TFLOP/s"),),
        "Floating-point operations of the model, excluding recomputation.",
        noisy=True,
    ),
    Figure(
        *("mfu", "Speed", "Model FLOPs utilization", "% of the device's peak"),
        (("mfu", "MFU"),),
        scale=100.0,
        noisy=True,
    ),
    Figure(
        *("timers", "Speed", "Parts of a step", "milliseconds per step"),
        (("timers/", ""),),
        "On the slowest rank, by timer. A nested timer also counts in the timer around it.",
        from_zero=True,
    ),
    Figure(
        *("rank-times", "Speed", "Fastest and slowest rank", "milliseconds per step"),
        (("rank_times/max_ms", "slowest"), ("rank_times/min_ms", "fastest")),
        "Working time, excluding waits for gradients.",
    ),
    Figure(
        *("hidden-share", "Communication", "Communication hidden under backward", "% of the possible"),
        (("overlap/hidden_share", "hidden"),),
        "Reduction time before the end of backward, as a share of the largest possible. On rank 0.",
        scale=100.0,
        from_zero=True,
    ),
    Figure(
        *("exposed", "Communication", "Communication, hidden and exposed", "milliseconds per step"),
        (
            ("overlap/exposed_reduce_ms", "exposed, gradients"),
            ("overlap/exposed_gather_ms", "exposed, parameters"),
            ("overlap/hidden_reduce_ms", "hidden, gradients"),
            ("overlap/hidden_gather_ms", "hidden, parameters"),
        ),
        "On rank 0. Exposed: the step waited for it. Hidden: it overlapped with other work.",
        from_zero=True,
        occurring=True,
        stacked=True,
    ),
    Figure(
        *("memory", "Memory", "Memory in use", "GiB"),
        (("memory/", ""),),
        "On rank 0, after the step. max and peak: the maximum so far.",
        scale=GIB,
        from_zero=True,
    ),
    Figure(
        *("capacity-factor", "Expert memory", "Required expert buffer capacity", "multiple of the balanced case"),
        (("stash/capacity_factor_needed", "needed"), ("stash/capacity_factor", "given")),
        "Smallest sufficient --moe-expert-rank-capacity-factor of each step.",
        noisy=True,
        steps=True,
    ),
    Figure(
        *("pool-factor", "Expert memory", "Required pages", "multiple of the balanced peak"),
        (("stash/pool_factor_needed", "needed"), ("stash/pool_factor", "given")),
        "Smallest --moe-paged-stash-buffer-size-factor-cuda with which nothing is spilled or recomputed.",
        noisy=True,
        steps=True,
    ),
    Figure(
        *("stash-pages", "Expert memory", "Pages in use", "pages"),
        (
            ("stash/device_high_water", "device, peak"),
            ("stash/device_pages", "device, pool size"),
            ("stash/host_high_water", "host, peak"),
            ("stash/host_pages", "host, pool size"),
        ),
        "On the rank with the fullest pool, in its fullest step since the previous log line.",
        from_zero=True,
    ),
    Figure(
        *("rungs", "Expert memory", "Recompute levels reached", "count per step"),
        (
            ("stash/rungs/spilled_pages", "pages spilled to the host"),
            ("stash/rungs/dropped_gate_up", "gate_up recomputed"),
            ("stash/rungs/void_steps", "steps discarded and retried"),
        ),
        "Pages, tensors and retries of each step, summed over ranks. Long runs show the mean, with extremes in a "
        "pale color. Counts that are always 0 have no line.",
        from_zero=True,
        noisy=True,
        mean=True,
        steps=True,
        occurring=True,
    ),
    Figure(
        *("stash-tails", "Expert memory", "Unused bytes of pages", "% of the allocated pages"),
        (("stash/tail_share", "tails"),),
        "The last page of a tensor is only partly filled. Smaller pages waste less.",
        scale=100.0,
        from_zero=True,
    ),
)
# Fields that are shown in other figures, or that are not quantities.
SHOWN = ("iteration", "skipped", "consumed_samples", "rank_times/", "overlap/", "stash/")


def make_figures(runs: Sequence[RunLog]) -> list[dict[str, Any]]:
    """Returns the figures for which at least one run has values, in page order."""
    found = [_draw(figure, runs) for figure in _figures_for(runs)]
    found += _layer_figures(runs)
    return [figure for figure in found if figure["traces"]]


def _figures_for(runs: Sequence[RunLog]) -> Iterator[Figure]:
    """Yields the FIGURES, except a constant loss scale, and a figure for each field that no other figure shows."""
    scaled = any(_varies(run, "loss_scale") or _varies(run, "skipped") for run in runs)
    yield from (figure for figure in FIGURES if figure.id != "loss-scale" or scaled)
    shown = tuple(name for figure in FIGURES for name, _ in figure.fields) + SHOWN
    names = dict.fromkeys(name for run in runs for name in run.series if not name.startswith(shown))
    for name in names:
        words = name.replace("_", " ").replace("/", ": ")
        section = "Router" if name.endswith("_loss") else "Other numbers"
        yield Figure(name.replace("/", "-"), section, _capital(words), words, ((name, words),), noisy=True)


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _varies(run: RunLog, name: str) -> bool:
    series = run.series.get(name)
    return series is not None and bool(np.any(series.values != series.values[0]))


def _draw(figure: Figure, runs: Sequence[RunLog]) -> dict[str, Any]:
    traces: list[dict[str, Any]] = []
    fields = list(dict.fromkeys(field for run in runs for field in _fields_of(figure, run)))
    for index, run in enumerate(runs):
        prefix = f"{run_names(runs)[index]}: " if len(runs) > 1 else ""
        for name, label in _fields_of(figure, run):
            place = fields.index((name, label))
            # Several runs: one color per run and one dash style per field, if there are enough dash styles.
            colors_fields = len(runs) == 1 or len(fields) > MAX_DASHED_FIELDS
            color, number = (place, index) if colors_fields else (index, place)
            style = {"name": prefix + label, "color": color, "dash": DASHES[number % len(DASHES)]}
            traces += _lines(_values(figure, run.series[name]), style=style, figure=figure)
        if figure.id in ("loss", "loss-scale"):
            traces += _skipped(figure, run, style={"name": f"{prefix}skipped", "color": index if prefix else 3})
    # Even a single line needs a legend if the figure can show several.
    named = len(figure.fields) > 1 or figure.fields[0][0].endswith("/")
    options = {
        "log": figure.log,
        "fromZero": figure.from_zero,
        "steps": figure.steps,
        "stacked": figure.stacked,
    }
    return {
        **_frame(figure),
        **options,
        "named": named,
        "range": _late_range(traces) if figure.id == "loss" else None,
        "traces": traces,
    }


def _late_range(traces: list[dict[str, Any]]) -> list[float] | None:
    """Returns the axis range of a long run without its first 1% of steps, which would dominate the axis."""
    last = max((trace["x"][-1] for trace in traces), default=0)
    pairs = [pair for trace in traces for pair in zip(trace["x"], trace["y"])]
    late = [value for step, value in pairs if value is not None and step > last / 100]
    if last < 10 * SMOOTHED_FROM or not late:
        return None
    margin = 0.05 * (max(late) - min(late))
    return [min(late) - margin, max(late) + margin]


def _frame(figure: Figure) -> dict[str, Any]:
    return {name: vars(figure)[name] for name in ("id", "section", "title", "axis", "note")}


def run_names(runs: Sequence[RunLog]) -> list[str]:
    """Returns a name for each run: the shortest suffix of its folder that differs between runs."""
    # A folder contains one steps.jsonl, but may contain several console logs.
    paths = [run.path.absolute() for run in runs]
    parts = [(path.parent if path.name == LOG_NAME else path).parts for path in paths]
    # The last part alone is often just "checkpoints".
    for length in range(1 if len(runs) > 1 else 2, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(run.path.parent) for run in runs]


def _fields_of(figure: Figure, run: RunLog) -> list[tuple[str, str]]:
    found = []
    for name, label in figure.fields:
        if name.endswith("/"):
            inner = [key for key in run.series if key.startswith(name)]
            inner.sort(key=lambda key: -float(np.nanmax(run.series[key].values, initial=0.0)))
            found += [(key, key.removeprefix(name).replace("_", " ")) for key in inner]
        elif name in run.series and not (figure.occurring and not run.series[name].values.any()):
            found.append((name, label))
    return found


def _values(figure: Figure, series: Series) -> Series:
    if figure.id == "perplexity":
        return Series(series.steps, np.exp(np.minimum(series.values, PERPLEXITY_LIMIT)))
    return Series(series.steps, series.values * figure.scale)


def _lines(series: Series, *, style: dict[str, Any], figure: Figure) -> list[dict[str, Any]]:
    """Returns the traces of a line. A noisy line with many steps is pale, and the legend shows its running average."""
    thin = thinned(series)
    mode = "lines+markers" if len(thin.steps) <= 40 else "lines"
    if not figure.noisy or len(series.steps) < SMOOTHED_FROM:
        return [{**style, **points(thin), "mode": mode}]
    middle = smoothed(series, np.mean if figure.mean else np.median)
    pale = {**style, **points(thin), "mode": "lines", "pale": True, "dash": "solid"}
    return [pale, {**style, **points(middle), "mode": "lines"}]


def _skipped(figure: Figure, run: RunLog, *, style: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns crosses at steps that were skipped or have no finite loss, at the height of the last finite value."""
    line, skipped = run.series.get(figure.fields[0][0]), run.series.get("skipped")
    if line is None:
        return []
    steps = line.steps[~np.isfinite(line.values)]
    if skipped is not None:
        steps = np.union1d(steps, skipped.steps[skipped.values == 1])
    finite = np.isfinite(line.values)
    if not steps.size or not finite.any():
        return []
    before = np.clip(np.searchsorted(line.steps[finite], steps, side="right") - 1, 0, None)
    marks = thinned(Series(steps, line.values[finite][before]))
    return [{**style, **points(marks), "mode": "markers", "symbol": "x"}]


def thinned(series: Series) -> Series:
    """Returns at most MAX_POINTS points: the minimum and maximum of each interval, so that spikes remain visible.

    Interval lengths are powers of 2. New steps change only the last interval, until the length doubles.
    """
    num_steps = len(series.steps)
    if num_steps <= MAX_POINTS:
        return series
    kept = []
    finite = np.isfinite(series.values)
    length = _power_of_2(num_steps / (MAX_POINTS // 2))
    for start in range(0, num_steps, length):
        usable = start + np.flatnonzero(finite[start : start + length])
        if usable.size:
            values = series.values[usable]
            kept += sorted({int(usable[values.argmin()]), int(usable[values.argmax()])})
        else:
            kept.append(start)
    return Series(series.steps[kept], series.values[kept])


def smoothed(series: Series, middle: Callable[[np.ndarray], np.floating]) -> Series:
    """Returns a running average at up to MEDIAN_POINTS steps, each over about 4% of the steps around it.

    middle: np.median, which is robust to spikes, or np.mean. As in thinned(), new steps change only the last values.
    """
    num_steps = len(series.steps)
    stride = _power_of_2(num_steps / MEDIAN_POINTS)
    half = 5 * stride if stride > 1 else max(2, _power_of_2(num_steps / 64))
    centres = np.unique([*range(0, num_steps, stride), num_steps - 1])
    # Windows are symmetric, and shorter at the ends: an asymmetric window would shift a falling line.
    halves = np.maximum(np.minimum(half, np.minimum(centres, num_steps - 1 - centres)), half // 4)
    windows = [series.values[max(0, centre - reach) : centre + reach + 1] for centre, reach in zip(centres, halves)]
    finite = [window[np.isfinite(window)] for window in windows]
    return Series(series.steps[centres], np.array([middle(part) if part.size else np.nan for part in finite]))


def _power_of_2(at_least: float) -> int:
    return 2 ** max(0, math.ceil(math.log2(at_least)))


def points(series: Series) -> dict[str, list[Any]]:
    """Returns the x and y values of a line, with gaps for values that are not finite."""
    return {"x": series.steps.tolist(), "y": [_short(value) for value in series.values.tolist()]}


def _short(value: float) -> float | None:
    """Rounds to seven digits, more than a screen can resolve."""
    return float(f"{value:.7g}") if math.isfinite(value) else None


def _layer_figures(runs: Sequence[RunLog]) -> list[dict[str, Any]]:
    """Returns the figures of the router's losses by layer, separately for each run."""
    figures = []
    for index, run in enumerate(runs):
        of_run = f" ({run_names(runs)[index]})" if len(runs) > 1 else ""
        for name, table in run.per_layer.items():
            words = name.replace("_", " ")
            title = f"{_capital(words)} by layer{of_run}"
            frame = _frame(Figure(f"layers-{name}-{index}", "Router", title, words, ()))
            figures.append(layer_table_figure(table, frame))
    return figures


def layer_table_figure(table: LayerTable, frame: dict[str, Any], *, bound: Series | None = None) -> dict[str, Any]:
    """Draws a table by layer: lines for few layers, with a dotted line for `bound`, or a heat map for many.

    frame: common fields of the figure.
    """
    means, steps = table.means(), _centres(table)
    if len(table.layers) > MAX_LINES_OF_LAYERS:
        rows = [[_short(value) for value in row] for row in means.T.tolist()]
        heat = {"x": steps.tolist(), "y": table.layers, "z": rows}
        return {**frame, "axis": "layer", "unit": frame["axis"], "heat": True, "log": None, "traces": [heat]}
    lines = [
        {**points(Series(steps, means[:, row])), "name": f"layer {layer}", "color": row, "mode": "lines"}
        for row, layer in enumerate(table.layers)
    ]
    if bound is not None:
        limit = {"name": "capacity factor", "color": len(lines), "mode": "lines", "dash": "dot"}
        lines.append({**points(thinned(bound)), **limit})
    return {**frame, "log": False, "traces": lines}


def _centres(table: LayerTable) -> np.ndarray:
    return (np.array(table.first_steps) + np.array(table.last_steps)) / 2


def expert_loads(run: RunLog) -> dict[str, Any] | None:
    """Returns each expert's load relative to an even share, for the heat maps, or None without experts in the log.

    shares: [layers, experts] of each bin, as 16-bit integers in base64. units: value of the integer 1 in each bin.
    """
    table = run.expert_load
    if not table.sums:
        return None
    means = np.nan_to_num(table.means(), posinf=0.0)
    totals = means.sum(axis=-1, keepdims=True)
    shares = means * means.shape[-1] / np.where(totals == 0, 1, totals)
    units = np.maximum(shares.max(axis=(1, 2)), 1.0) / 65535
    packed = np.round(shares / units[:, None, None]).astype("<u2")
    return {
        "layers": table.layers,
        "num_experts": means.shape[-1],
        "first": list(table.first_steps),
        "last": list(table.last_steps),
        "units": units.tolist(),
        "shares": [base64.b64encode(bin_shares.tobytes()).decode("ascii") for bin_shares in packed],
    }
