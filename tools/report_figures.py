"""What the report draws, as plotly figures in plain dicts: a table of figures, and how a field becomes lines.

The page around them is report_page.html; reading files is run_log.py's.
"""

import base64
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tools.run_log import LOG_NAME, LayerTable, RunLog, Series

MAX_POINTS = 1200  # of a line: more than the pixels it is drawn on
MEDIAN_POINTS = 300
SMOOTHED_FROM = 60  # steps from which on a noisy line gets its running median
MAX_LINES_OF_LAYERS = 8  # more layers are drawn as a heat map
PERPLEXITY_LIMIT = 20.0  # as in the log: exp of at most this
DASHES = ("solid", "dash", "dot", "dashdot")
MAX_DASHED_FIELDS = 3
GIB = 1 / 2**30


@dataclass(frozen=True)
class Figure:
    """One diagram. fields: (name in the log, label); a name that ends in a slash stands for all that start so.

    axis: title and unit. scale: what a logged value is multiplied by. noisy: drawn pale below its running median.
    mean: the strong line is the mean instead: of counts that are mostly 0 the median says nothing.
    from_zero: the axis begins at 0. steps: the value jumps from one step to another and is not between.
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
        "Mean over tokens. Crosses: steps that updated nothing. Of a long run the first 1% may be above the axis.",
        noisy=True,
    ),
    Figure(
        *("perplexity", "Loss", "Perplexity", "perplexity (tokens)"),
        (("lm_loss", "training"), ("validation_loss", "validation"), ("test_loss", "test")),
        "exp(loss): between how many tokens the model is undecided.",
        log=True,
        noisy=True,
    ),
    Figure(
        *("learning-rate", "Optimizer", "Learning rate", "learning rate"),
        (("learning_rate", "learning rate"), ("decoupled_learning_rate", "of embeddings and output")),
        "The rate that the step used.",
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
        *("params-norm", "Optimizer", "Norm of the parameters", "2-norm"),
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
        "Factor on the loss in fp16. Crosses are skipped steps.",
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
        "Tokens of the global batch over the time of the step.",
        noisy=True,
    ),
    Figure(
        *("step-time", "Speed", "Time of a step", "seconds"),
        (("seconds", "step"),),
        "Data, forward, backward, update; without evaluation and saving.",
        noisy=True,
    ),
    Figure(
        *("tflops", "Speed", "Arithmetic rate", "TFLOP/s per device"),
        (("tflops", "TFLOP/s"),),
        "Operations of the model, without recomputation.",
        noisy=True,
    ),
    Figure(
        *("mfu", "Speed", "Model FLOPs utilisation", "% of the device's peak"),
        (("mfu", "MFU"),),
        scale=100.0,
        noisy=True,
    ),
    Figure(
        *("timers", "Speed", "Parts of a step", "milliseconds per step"),
        (("timers/", ""),),
        "The slowest process of each part; parts inside others are counted in both.",
        from_zero=True,
    ),
    Figure(
        *("rank-times", "Speed", "Fastest and slowest process", "milliseconds per step"),
        (("rank_times/max_ms", "slowest"), ("rank_times/min_ms", "fastest")),
        "Work; waits for gradients are left out.",
    ),
    Figure(
        *("hidden-share", "Communication", "Communication hidden under backward", "% of what fits"),
        (("overlap/hidden_share", "hidden"),),
        "Time of reductions before backward ended, over what there could have been. Of the first process.",
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
        "Of the first process. Exposed: something waited for it; hidden: it was under way beside other work.",
        from_zero=True,
        occurring=True,
        stacked=True,
    ),
    Figure(
        *("memory", "Memory", "Memory in use", "GiB"),
        (("memory/", ""),),
        "Of the first process, after the step. max and peak: the most so far.",
        scale=GIB,
        from_zero=True,
    ),
    Figure(
        *("capacity-factor", "Expert memory", "Room that expert buffers needed", "multiple of the balanced case"),
        (("stash/capacity_factor_needed", "needed"), ("stash/capacity_factor", "given")),
        "The least --moe-expert-rank-capacity-factor that would have done for each step.",
        noisy=True,
        steps=True,
    ),
    Figure(
        *("pool-factor", "Expert memory", "Pages that the step needed", "multiple of the balanced peak"),
        (("stash/pool_factor_needed", "needed"), ("stash/pool_factor", "given")),
        "The least --moe-paged-stash-buffer-size-factor-cuda with which nothing is spilled or computed again.",
        noisy=True,
        steps=True,
    ),
    Figure(
        *("stash-pages", "Expert memory", "Pages held", "pages"),
        (
            ("stash/device_high_water", "device, most held"),
            ("stash/device_pages", "device, there are"),
            ("stash/host_high_water", "host, most held"),
            ("stash/host_pages", "host, there are"),
        ),
        "Of the process whose pool was fullest, in its fullest step since the last log line.",
        from_zero=True,
    ),
    Figure(
        *("rungs", "Expert memory", "Where pages or rows were lacking", "count per step"),
        (
            ("stash/rungs/spilled_pages", "pages spilled to the host"),
            ("stash/rungs/dropped_act", "act computed again"),
            ("stash/rungs/dropped_gate_up", "gate_up computed again"),
            ("stash/rungs/void_steps", "step run again"),
        ),
        "Pages, tensors and runs of each step, over all processes; of a long run the mean, pale the most and the "
        "least. What never happened has no line.",
        from_zero=True,
        noisy=True,
        mean=True,
        steps=True,
        occurring=True,
    ),
    Figure(
        *("stash-tails", "Expert memory", "Bytes of pages that no row fills", "% of the pages given out"),
        (("stash/tail_share", "tails"),),
        "A tensor's last page is filled in part; smaller pages waste less.",
        scale=100.0,
        from_zero=True,
    ),
)
# Fields that a figure shows in another way, or that are no quantities.
SHOWN = ("iteration", "skipped", "consumed_samples", "rank_times/", "overlap/", "stash/")


def make_figures(runs: Sequence[RunLog]) -> list[dict[str, Any]]:
    """Every figure that at least one run has numbers for, in the order of the page."""
    found = [_draw(figure, runs) for figure in _figures_for(runs)]
    found += _layer_figures(runs)
    return [figure for figure in found if figure["traces"]]


def _figures_for(runs: Sequence[RunLog]) -> Iterator[Figure]:
    """The table, without what is constant by default, and a figure for each field that no figure shows."""
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
            # Several runs: a colour for each run, a dash for each field; of many fields dashes look alike.
            of_fields = len(runs) == 1 or len(fields) > MAX_DASHED_FIELDS
            color, number = (place, index) if of_fields else (index, place)
            style = {"name": prefix + label, "color": color, "dash": DASHES[number % len(DASHES)]}
            traces += _lines(_values(figure, run.series[name]), style=style, figure=figure)
        if figure.id in ("loss", "loss-scale"):
            traces += _skipped(figure, run, style={"name": f"{prefix}skipped", "color": index if prefix else 3})
    # One line alone has to say which of them it is.
    named = len(figure.fields) > 1 or figure.fields[0][0].endswith("/")
    options = {
        "named": named,
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
    """Least and most of a long run without the first hundredth of its steps, whose fall would leave no room."""
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
    """A name for each run: the shortest ends of their folders that tell them apart."""
    # A console log is one file of its folder, a steps.jsonl stands for all of it.
    paths = [run.path.absolute() for run in runs]
    parts = [(path.parent if path.name == LOG_NAME else path).parts for path in paths]
    # One name alone is often just "checkpoints".
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
    """A line; a noisy one of many steps pale, below its running median or mean, which alone is in the legend."""
    thin = thinned(series)
    mode = "lines+markers" if len(thin.steps) <= 40 else "lines"
    if not figure.noisy or len(series.steps) < SMOOTHED_FROM:
        return [{**style, **points(thin), "mode": mode}]
    middle = smoothed(series, np.mean if figure.mean else np.median)
    pale = {**style, **points(thin), "mode": "lines", "pale": True, "dash": "solid"}
    return [pale, {**style, **points(middle), "mode": "lines"}]


def _skipped(figure: Figure, run: RunLog, *, style: dict[str, Any]) -> list[dict[str, Any]]:
    """A cross at each step that updated nothing or whose loss is no number, at the last value before it."""
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
    """At most MAX_POINTS points: of each stretch of steps the smallest and the largest value, so that spikes stay.

    Stretches are a power of 2 long and begin where they did: more steps change the last one, until there are twice as
    many.
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
    """The middle of about the 25th part of the steps around each of up to MEDIAN_POINTS steps.

    middle: np.median, which spikes do not move, or np.mean. As for `thinned`, more steps change the last values alone.
    """
    num_steps = len(series.steps)
    stride = _power_of_2(num_steps / MEDIAN_POINTS)
    half = 5 * stride if stride > 1 else max(2, _power_of_2(num_steps / 64))
    centres = np.unique([*range(0, num_steps, stride), num_steps - 1])
    # Shorter at the ends, and there as long on both sides as can be: no shift where the line falls.
    halves = np.maximum(np.minimum(half, np.minimum(centres, num_steps - 1 - centres)), half // 4)
    windows = [series.values[max(0, centre - reach) : centre + reach + 1] for centre, reach in zip(centres, halves)]
    finite = [window[np.isfinite(window)] for window in windows]
    return Series(series.steps[centres], np.array([middle(part) if part.size else np.nan for part in finite]))


def _power_of_2(at_least: float) -> int:
    return 2 ** max(0, math.ceil(math.log2(at_least)))


def points(series: Series) -> dict[str, list[Any]]:
    """x and y of a line; a gap where the value is not finite. series: steps [n] int64, values [n] float64."""
    return {"x": series.steps.tolist(), "y": [_short(value) for value in series.values.tolist()]}


def _short(value: float) -> float | None:
    """Seven digits, more than a screen can show."""
    return float(f"{value:.7g}") if math.isfinite(value) else None


def _layer_figures(runs: Sequence[RunLog]) -> list[dict[str, Any]]:
    """Losses of the router by layer, of each run by itself: few layers as lines, many as a heat map."""
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
    """Few layers as lines, with a dotted one at the bound, many as a heat map. frame: what every figure has."""
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
    """Tokens of each expert over those of an even share, for the heat maps; None without experts in the log.

    `shares` has [layers, experts] of each bin as 16-bit numbers in base64, `units` what 1 stands for in it.
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
