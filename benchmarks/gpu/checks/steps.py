"""Measures training steps of one shape: time, memory and MFU of each side, and what bounds a step.

    python -m benchmarks.gpu.checks.steps short [--seconds N] [--small]

short: Qwen3-30B-A3B with short sequences, where the host is the limit. 4096: the same layers with 4096 tokens.
deepseek: layers of DeepSeek-V3. local: graphs of attention and MoE layers instead of a graph of the whole step.

Sides run one after another; see side_workers.py. Each side sends a line after its warm-up, one after each round of
steps, one with its figures, and one with its profile if it has one:

ms, spread       median time of a step; largest distance of a round's median from it, relative
tokens_s         tokens of this rank per second
tflop_s, mfu     FLOPs of this rank as the training log counts them, per second, and relative to the peak in bf16
reserved_gib     reserved memory of steady steps, and allocated memory; see [Note: steady memory]
graph_gib        part of the reserved memory that belongs to graphs
predicted_gib    peak that the planner predicts for the same flags; reserved_x: reserved relative to it
warm_up_gib      reserved memory during the warm-up and the capture

The headline, a graph of the whole step with a stash and with the optimizer, comes first, because it matters most if
time runs out. Its stash copies rows. In the side "pages" experts compute in the pages of the stash, and a step may
take hardly longer than that of the graph without a stash.

Expected seconds on an H200, from measured eager steps (dropless 417 ms, static 734 ms for `short`) and estimates of
the others. The first side of a process includes 4 s for the CUDA context. A build takes 3 to 5 s, because weights,
gradients and states of 0.5 G parameters are initialized. Triton compiles each kernel once: 14 s for the headline of
`short`, 4 s for DeepSeek-V3's widths, and nothing otherwise. Then follow 4 + 1 + 9 steps, and a capture of 2 s.

short     headline 30, plain 6, dropless 14, static 15 + 2 for its host profile, graph 13: 80 s
4096      headline 17 + 12 for its kernel table, plain 9, dropless 14 + 2 for its host profile, graph 13, in pages 14,
          60% of the pages 16: 97 s
deepseek  headline 18, dropless 12: 30 s. There are no optimizer states, and steps take 0.16 s.
local     static 14, local graphs 12: 26 s. Two rounds of two steps, of 0.7 s without graphs.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from functools import partial

from benchmarks.gpu.checks.predicted import Prediction, Predictions
from benchmarks.gpu.checks.profiles import host_profile, kernel_table, work_of_kernels
from benchmarks.gpu.checks.reporting import checked_device, report
from benchmarks.gpu.checks.side_workers import Line, Outcome, Send, Task, error_of, exit_status, run_in_turn
from benchmarks.gpu.graph_step import (
    Case,
    Stepper,
    Steps,
    free_memory,
    graph_bytes,
    measured_rounds,
    started_side,
    warm_up,
)
from benchmarks.gpu.record import Target, figures_of_target
from benchmarks.gpu.shapes import (
    BALANCED,
    CAPACITY,
    DROPLESS,
    GRAPHED,
    HEADLINE,
    PAGED,
    PLAIN,
    PREFETCH,
    SHAPES,
    SMALL,
    STATIC,
)
from megatron.core.device import default_device, device_name
from megatron.training.compute.devices import peak_bf16_tflops

GIB = 2**30
PREDICTION_SECONDS = 15.0
PREDICTED_WITHIN = 0.05
LESS_THAN_STATIC = 0.95
# Of plain PyTorch's time.
SHORT_TIME, LONG_TIME = 0.35, 0.9
PAGED_TIME = 1.01  # of the time of the graph without a stash
FEWER_PAGES, LOCAL = "graph + stash, 60% of pages", "local graphs"


class Profile(Enum):
    """Profile of one step after a side's measurement."""

    HOST = "functions of the host"
    KERNELS = "kernels of the device"


@dataclass(frozen=True)
class Turn:
    """A side's turn in a section. expected: seconds on an H200. may_not_fit: running out of memory is no failure."""

    side: str
    expected: float
    profile: Profile | None = None
    may_not_fit: bool = False


# Figures by side, of the sides that were measured.
Figures = Mapping[str, Line]


@dataclass(frozen=True)
class Section:
    """Sides of one shape to measure. targets: computed from the figures and the predicted bytes of each side."""

    shape: str
    turns: Sequence[Turn]
    targets: Callable[[Figures, Mapping[str, int]], list[Target]] = lambda figures, predicted: []
    rounds: int = 3
    steps: int = 3

    @property
    def expected(self) -> float:
        """Expected seconds on an H200."""
        return sum(turn.expected for turn in self.turns)


def time_targets(limit: float, figures: Figures, predicted: Mapping[str, int]) -> list[Target]:
    """Returns the targets of the headline: time relative to plain PyTorch, and memory."""
    return [_time_target(HEADLINE, PLAIN, limit, figures), *memory_targets(figures, predicted)]


def paged_targets(limit: float, figures: Figures, predicted: Mapping[str, int]) -> list[Target]:
    """Returns the targets of the headline, and those of experts in pages: time without a stash, predicted memory."""
    return [
        *time_targets(limit, figures, predicted),
        _time_target(PAGED, GRAPHED, PAGED_TIME, figures),
        _prediction_target(PAGED, figures, predicted),
    ]


def memory_targets(figures: Figures, predicted: Mapping[str, int]) -> list[Target]:
    """Returns the targets of the headline's reserved bytes: as predicted, and less than static buffers need.

    Uses the predicted bytes of static buffers that do not fit.
    """
    reserved = figures.get(HEADLINE, {}).get("reserved_bytes")
    static = figures.get(GRAPHED, {}).get("reserved_bytes", predicted.get(GRAPHED))
    ratio = reserved / static if reserved and static else None
    source = "" if "reserved_bytes" in figures.get(GRAPHED, {}) else ", predicted"
    return [
        _prediction_target(HEADLINE, figures, predicted),
        Target(f"{HEADLINE} / {GRAPHED} (static buffers{source}), reserved bytes", ratio, LESS_THAN_STATIC),
    ]


def _time_target(side: str, other: str, limit: float, figures: Figures) -> Target:
    one, two = (figures.get(name, {}).get("ms") for name in (side, other))
    return Target(f"{side} / {other}, time", one / two if one and two else None, limit)


def _prediction_target(side: str, figures: Figures, predicted: Mapping[str, int]) -> Target:
    reserved = figures.get(side, {}).get("reserved_bytes")
    error = abs(reserved / predicted[side] - 1) if reserved and side in predicted else None
    return Target(f"{side}: reserved bytes against predicted bytes, difference", error, PREDICTED_WITHIN)


SECTIONS = {
    "short": Section(
        "Qwen3-30B-A3B, short",
        [
            Turn(HEADLINE, 30),
            Turn(PLAIN, 6),
            Turn(DROPLESS, 14),
            Turn(STATIC, 17, Profile.HOST),
            Turn(GRAPHED, 13),
        ],
        partial(time_targets, SHORT_TIME),
    ),
    "4096": Section(
        "Qwen3-30B-A3B",
        [
            Turn(HEADLINE, 29, Profile.KERNELS),
            Turn(PLAIN, 9),
            Turn(DROPLESS, 16, Profile.HOST),
            Turn(GRAPHED, 13),
            Turn(PAGED, 14),
            Turn(FEWER_PAGES, 16),
        ],
        partial(paged_targets, LONG_TIME),
    ),
    "deepseek": Section("DeepSeek-V3", [Turn(HEADLINE, 18), Turn(DROPLESS, 12)], memory_targets),
    "local": Section("Qwen3-30B-A3B, short", [Turn(STATIC, 14), Turn(LOCAL, 12)], rounds=2, steps=2),
}


def main(section: Section | None = None) -> None:
    """Measures a section, by default the one named on the command line.

    Exits with status 1 if a side fails or a target is missed, INCOMPLETE if sides were not started and none failed.
    """
    options = parse_options(section)
    chosen = section or SECTIONS[options.section]
    deadline = time.monotonic() + (options.seconds or chosen.expected * 2)
    sys.exit(measure(chosen, deadline=deadline, is_small=options.small))


def measure(section: Section, *, deadline: float, is_small: bool) -> int:
    """Measures and reports a section, and returns the exit status."""
    shape = SMALL if is_small else SHAPES[section.shape]
    case = Case(section.shape, shape, BALANCED)
    rounds, steps = (1, 1) if is_small else (section.rounds, section.steps)
    settings = {"capacity": CAPACITY, "prefetched_layers": PREFETCH, "routing": BALANCED}
    report(shape=case.name, sizes=asdict(shape), **settings, expected_seconds=section.expected)
    # Also of static buffers where they are not measured, because memory is compared with them.
    predicted_sides = dict.fromkeys([*(turn.side for turn in section.turns), GRAPHED])
    predictions = Predictions({side: f"{shape.flags} {case.sides[side].flags or ''}" for side in predicted_sides})
    reporter = Reporter(case, predictions)
    tasks = [
        Task(
            turn.side,
            turn.expected,
            partial(measure_side, case, turn, rounds=rounds, steps=steps),
            # The device's profiler slows down later launches of its process.
            is_last_of_process=turn.profile is Profile.KERNELS,
        )
        for turn in section.turns
    ]
    outcomes = run_in_turn(
        tasks,
        deadline=deadline,
        prepare=checked_device,
        clean=lambda: free_memory(default_device()),
        on_line=reporter.report,
    )
    predicted = usable_predictions(reporter.predicted_bytes(predicted_sides), outcomes)
    predictions.leave()
    if all((one.error or "").startswith("SystemExit") for one in outcomes.values()):
        # No child has found a GPU. Ends this process in the same way.
        checked_device()
    # The CPU does not count allocations, and times of tiny steps have no meaning.
    targets = [] if is_small else section.targets(reporter.figures, predicted)
    if targets:
        report(targets=[figures_of_target(target) for target in targets])
    # What could not be measured because a side was not started is not a failure: the next run measures it.
    is_short = any(one.skipped is not None for one in outcomes.values())
    has_missed = any(not one.holds and not (is_short and one.measured is None) for one in targets)
    has_failed = any(map(is_failure, section.turns, outcomes.values()))
    return exit_status(outcomes.values(), has_failed=has_failed or has_missed)


def usable_predictions(predicted: Mapping[str, int], outcomes: Mapping[str, Outcome]) -> dict[str, int]:
    """Returns the predicted bytes by side, without static buffers that had a turn and were not found to be too large.

    Memory is compared with measured static buffers. Predicted ones replace them only if the section does not measure
    them or they do not fit, but not if there was no time for them or they failed.
    """
    static = outcomes.get(GRAPHED)
    is_usable = static is None or is_out_of_memory(static.error or "")
    return {side: one for side, one in predicted.items() if side != GRAPHED or is_usable}


def is_failure(turn: Turn, outcome: Outcome) -> bool:
    """Returns whether a side failed. A side that was not started has not failed."""
    return outcome.error is not None and not (turn.may_not_fit and is_out_of_memory(outcome.error))


def is_out_of_memory(error: str) -> bool:
    """Returns whether an error's text says that the device's memory was exhausted."""
    return "OutOfMemoryError" in error or "out of memory" in error


def measure_side(case: Case, turn: Turn, send: Send, *, rounds: int, steps: int) -> None:
    """Builds a side, warms it up, measures it and profiles it, and sends a line for each."""
    began = time.perf_counter()
    with started_side(case, case.sides[turn.side]) as stepper:
        built = time.perf_counter()
        memory = warm_up(stepper)
        send(
            device=device_name(stepper.device),
            build_seconds=round(built - began, 1),
            warm_up_seconds=round(time.perf_counter() - built, 1),
            warm_up_gib=gib(memory.get("max_reserved")),
            warm_up_allocated_gib=gib(memory.get("max_allocated")),
        )
        found = Steps()
        for found in measured_rounds(stepper, rounds=rounds, steps=steps):
            send(rounds_ms=[[round(1e3 * second, 2) for second in one] for one in found.seconds])
        reserved = found.memory.get("max_reserved")
        send(
            device=device_name(stepper.device),
            ms=round(1e3 * found.median, 2),
            spread=round(found.spread, 3),
            reserved_bytes=reserved,
            reserved_gib=gib(reserved),
            allocated_gib=gib(found.memory.get("max_allocated")),
            **found.counters,
        )
        # Apart from the figures, so that an error in the allocator's snapshot does not void them.
        send(graph_gib=gib(graph_bytes(stepper.device)))
        profile_side(case, turn, stepper, send)


def profile_side(case: Case, turn: Turn, stepper: Stepper, send: Send) -> None:
    """Sends the profile of a side, or why there is none: a profiler's failure does not void the side's figures."""

    def run() -> None:
        if turn.profile is Profile.KERNELS:
            send(**kernel_table(stepper, work_of_kernels(case.shape, case.sides[turn.side])))
        elif turn.profile is Profile.HOST:
            send(**host_profile(stepper))

    error = error_of(run)
    if error is not None:
        send(profile_error=error)


class Reporter:
    """Reports lines as they arrive, with what follows from them and from the predictions."""

    def __init__(self, case: Case, predictions: Predictions) -> None:
        self.figures: dict[str, Line] = {}
        self._case, self._predictions = case, predictions

    def report(self, side: str, line: Line) -> None:
        """Reports a line of a side, and another one with what follows from it and from the prediction.

        The figures of a side become known to `figures`.
        """
        further: Line = {}
        if "ms" in line:
            line = {**line, "tokens_s": round(1e3 * self._case.shape.tokens / line["ms"], 1)}
        elif "error" in line:
            line = {**line, "out_of_memory": is_out_of_memory(line["error"])}
        # First, because a prediction may be late.
        report(side=side, shape=self._case.name, **line)
        if "ms" in line:
            further = self._rates(side, line)
            self.figures[side] = {**line, **further}
        elif "error" in line:
            further = {} if self._case.sides[side].is_plain else predicted_figures(self._prediction(side))
        if further:
            report(side=side, shape=self._case.name, **further)

    def predicted_bytes(self, sides: Iterable[str]) -> dict[str, int]:
        """Returns the predicted peaks of the sides that could be predicted."""
        found = {side: self._predictions.of(side, seconds=1.0) for side in sides if not self._case.sides[side].is_plain}
        return {side: one.peak_bytes for side, one in found.items() if isinstance(one, Prediction)}

    def _prediction(self, side: str) -> Prediction | str:
        return self._predictions.of(side, seconds=PREDICTION_SECONDS)

    def _rates(self, side: str, line: Line) -> Line:
        seconds, prediction = line["ms"] / 1e3, self._prediction(side)
        # The planner knows the FLOPs of the plain model, but not its memory.
        rates: Line = {} if self._case.sides[side].is_plain else predicted_figures(prediction)
        if isinstance(prediction, Prediction):
            rates["flops"] = prediction.flops
            rates["tflop_s"] = round(prediction.flops / seconds / 1e12, 3)
            peak = peak_bf16_tflops(line["device"])
            if peak is not None:
                rates["mfu"] = round(prediction.flops / seconds / 1e12 / peak, 4)
        if line["reserved_bytes"] and "predicted_bytes" in rates:
            rates["reserved_x"] = round(line["reserved_bytes"] / rates["predicted_bytes"], 3)
        return rates


def predicted_figures(prediction: Prediction | str) -> Line:
    """Returns the predicted memory as values of a line, or why there is none."""
    if isinstance(prediction, str):
        return {"no_prediction": prediction}
    return {"predicted_bytes": prediction.peak_bytes, "predicted_gib": gib(prediction.peak_bytes)}


def gib(num_bytes: int | None) -> float | None:
    """Converts bytes to GiB, rounded. None stays None."""
    return None if num_bytes is None else round(num_bytes / GIB, 3)


def parse_options(section: Section | None) -> argparse.Namespace:
    """Parses the command line of a section. The section is an argument unless it is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    if section is None:
        parser.add_argument("section", choices=[*SECTIONS], help="what to measure")
    parser.add_argument("--seconds", type=float, help="no side starts without its expected seconds left of these")
    parser.add_argument("--small", action="store_true", help="a tiny shape, also on the CPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
