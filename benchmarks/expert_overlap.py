"""Measures what --overlap-moe-expert-parallel-comm and the queue of weight gradients hide of the exchanges of rows.

    python benchmarks/expert_overlap.py [--rounds 6] [--only LAYOUT ...] [--experts KIND ...] [--json FILE]

Every rank has one link, whose messages take given seconds; see [Note: one link] and [Note: time of a rank] in
one_link.py. A message takes a share of the shortest segment: attention and router, or the experts, of a layer's
forward, whichever takes fewer CPU seconds (mean over ranks, measured first). The last setting gives the link a
bandwidth instead, at which rows take as long, so that row counts take almost nothing.

The layouts are 2 ranks without a pipeline, and 4 ranks with 1F1B or the interleaved schedule and 2 stages; experts are
distributed over 2 ranks. Experts are dropless, or have buffers of a fixed size and padded rows, as on a GPU, or also a
paged stash or recomputed layers. The sides step in turns, in processes of their own. Reports, as medians over the
rounds:

- exposed: seconds that ranks wait for messages inside pairs, over the seconds in the same passes of the sequential
  side. For the side without pairs, the waits in all passes are compared.
- time: seconds of forward and backward over those of the sequential side.
- The same in real time, in the last column. It depends on the cores: a rank that waits leaves its core to other ranks.
- unpaired: the share of forwards without a pair, and the share that the warm-up of the schedule implies.
- cpu: CPU seconds of a whole training step over those of the sequential side, without the link (cpu x; net x is the
  ratio of peak memory).
"""

import argparse
import json
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from benchmarks.gpu.record import Target, report_targets  # noqa: E402
from benchmarks.one_link import Clock, CpuClock, LinkTransport, OneLink, WallClock, patch_counts_and_stages  # noqa: E402
from benchmarks.sides import Measurement, Side, context, print_table, run_measured_rounds, start_side  # noqa: E402
from benchmarks.train_step import build_run  # noqa: E402
from megatron.core.device.torch_internals import is_in_backward  # noqa: E402
from megatron.core.pipeline_parallel.runner import ScheduleRunner  # noqa: E402
from megatron.core.pipeline_parallel.schedule import (  # noqa: E402
    Action,
    ActionKind,
    Pair,
    Pipeline,
    Schedule,
    forwards_ahead,
    stage_orders,
)
from megatron.core.transformer.moe.dispatch_static import (  # noqa: E402
    MoEStaticAlltoAllTokenDispatcher,
    padded_rank_rows,
)
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402
from megatron.training.training import run_step  # noqa: E402

NUM_MICROBATCHES, MICRO_BATCH = 8, 2
# train_step.py's model with short sequences. Routing is nearly balanced, as a trained router's.
BASE_FLAGS = (
    *("--seq-length", "128", "--micro-batch-size", str(MICRO_BATCH)),
    *("--global-batch-size", str(2 * MICRO_BATCH * NUM_MICROBATCHES)),
    *("--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall"),
    "--moe-router-force-load-balancing",
)


@dataclass(frozen=True)
class Layout:
    """Number of ranks, pipeline stages and chunks per stage. The experts are distributed over 2 ranks."""

    ranks: int
    stages: int = 1
    chunks: int = 1

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of the pipeline."""
        stages = ("--pipeline-model-parallel-size", str(self.stages)) * (self.stages > 1)
        return (*stages, *("--num-virtual-stages-per-pipeline-rank", str(self.chunks)) * (self.chunks > 1))


LAYOUTS = {
    "no pipeline": Layout(2),
    "1F1B": Layout(4, 2),
    "interleaved": Layout(4, 2, 2),
}
STATIC = ("--moe-expert-rank-capacity-factor", "1.5")
EXPERTS: dict[str, tuple[str, ...]] = {
    "dropless": (),
    "static": STATIC,
    "stash": (*STATIC, "--moe-paged-stash"),
    "recomputed": (*STATIC, "--recompute-granularity", "selective", "--recompute-modules", "moe"),
}
SEQUENTIAL, QUEUE_ALONE = "sequential", "experts' weight gradients"
PAIRS = "--overlap-moe-expert-parallel-comm"
SIDES: dict[str, tuple[str, ...]] = {
    SEQUENTIAL: (),
    "pairs": (PAIRS,),
    "pairs, weight gradients": (PAIRS, "--delay-wgrad-compute"),
    QUEUE_ALONE: ("--overlap-dispatch-backward-with-experts-wgrad",),
}
PARTS = "attention", "experts"


@dataclass(frozen=True)
class Unit:
    """Seconds of two segments of a layer's forward, and bytes of the largest message: the unit of settings."""

    attention: float = 0.0
    experts: float = 0.0
    num_bytes: int = 1


@dataclass(frozen=True)
class Setting:
    """Messages of a step. share: seconds of a message over those of the shorter segment. clock: None without a link."""

    clock: type[Clock] | None
    share: float = 0.0
    has_bandwidth: bool = False

    def __str__(self) -> str:
        return f"{'real time, ' * (self.clock is WallClock)}{'bytes' if self.has_bandwidth else 'latency'} {self.share}"


WITHOUT_LINK = Setting(None)
# The ratio of CPU seconds is near 1 and has a narrow target, so it is measured twice per round.
SETTINGS = (
    WITHOUT_LINK,
    *(Setting(CpuClock, share) for share in (0.5, 1.0)),
    WITHOUT_LINK,
    Setting(CpuClock, 1.0, has_bandwidth=True),
    Setting(WallClock, 1.0),
)
SHOWN = [str(setting) for setting in SETTINGS if setting != WITHOUT_LINK]


@dataclass
class StepFigures:
    """Seconds of one rank in one step. in_pairs: of the waits for messages in passes that have a pair with the flags.

    exposed: of all waits for messages. uneven: of the waits for launches of other ranks, before messages begin.
    seconds: of forward and backward, with all waits. segments: of each forward of a layer, by part. most_bytes: of a
    message. num_alone, num_forwards: forwards without a pair, and all.
    """

    in_pairs: float = 0.0
    exposed: float = 0.0
    uneven: float = 0.0
    seconds: float = 0.0
    segments: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    most_bytes: int = 0
    num_alone: int = 0
    num_forwards: int = 0


def main() -> None:
    """Measures all layouts and kinds of experts, and prints the tables and the targets."""
    options = parse_options()
    os.environ["OMP_NUM_THREADS"] = "1"
    figures: dict[str, Any] = {}
    targets: list[Target] = []
    for layout in options.only:
        for kind in options.experts:
            name = f"{layout}, {kind}"
            figures[name] = measure(name, LAYOUTS[layout], EXPERTS[kind], options)
            targets += targets_of(name, kind, figures[name])
    print()
    holds = report_targets(targets)
    if options.json is not None:
        record = {"figures": figures, "targets": [asdict(target) for target in targets], **context()}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(not holds)


def parse_options() -> argparse.Namespace:
    """Parses the command line of this benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="counted rounds per side (default: 6)")
    parser.add_argument("--only", nargs="+", default=[*LAYOUTS], choices=[*LAYOUTS], help="layouts (default: all)")
    parser.add_argument("--experts", nargs="+", default=[*EXPERTS], choices=[*EXPERTS], help="kinds (default: all)")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parser.parse_args()


def measure(name: str, layout: Layout, experts: tuple[str, ...], options: argparse.Namespace) -> dict[str, Any]:
    """Measures the sides of a layout with one kind of experts; prints and returns the figures."""
    flags = (*BASE_FLAGS, *layout.flags, *experts)
    sides = [start_side(side, partial(build, *flags, *more), ranks=layout.ranks) for side, more in SIDES.items()]
    unit = unit_of(sides[0])
    print(f"\n{name}: forward of a layer, attention and router {1e3 * unit.attention:.1f} ms, ", end="")
    print(f"experts {1e3 * unit.experts:.1f} ms")
    rounds = run_measured_rounds(
        sides, rounds=options.rounds, measure=lambda side: [side.measure(1, setting, unit) for setting in SETTINGS]
    )
    measured = {name: _by_setting(some) for name, some in rounds.items()}
    without_link = {name: some[str(WITHOUT_LINK)] for name, some in measured.items()}
    found: dict[str, Any] = {"unit": asdict(unit), "without the link": print_table(without_link, base=SEQUENTIAL)}
    for side in SIDES:
        found[side] = compare(side, measured)
        found[side]["warm-up"] = share_of_warm_up(layout.stages, layout.chunks)
        found[side]["cpu"] = found["without the link"][side]["cpu x"]
    _print_waits(found)
    return found


def _by_setting(rounds: list[list[Measurement]]) -> dict[str, list[Measurement]]:
    found = defaultdict(list)
    for measurements in rounds:
        for setting, measurement in zip(SETTINGS, measurements, strict=True):
            found[str(setting)].append(measurement)
    return found


def unit_of(side: Side) -> Unit:
    """Measures segments and messages of the sequential side, after a step that warms up."""
    for _ in range(3):
        ranks = side.measure(1, Setting(CpuClock, 0.0), Unit()).results
    steps: list[StepFigures] = [rank[0] for rank in ranks]
    attention, experts = (statistics.mean(statistics.median(step.segments[part]) for step in steps) for part in PARTS)
    return Unit(attention, experts, max(step.most_bytes for step in steps))


def compare(side: str, measured: Mapping[str, Mapping[str, list[Measurement]]]) -> dict[str, Any]:
    """Returns a side's figures relative to the sequential side: medians over the rounds, by setting."""
    found: dict[str, Any] = {}
    has_pairs = side != QUEUE_ALONE
    for setting in SHOWN:
        rounds = defaultdict(list)
        for ours, base in zip(measured[side][setting], measured[SEQUENTIAL][setting], strict=True):
            own: list[StepFigures] = [rank[0] for rank in ours.results]
            other: list[StepFigures] = [rank[0] for rank in base.results]
            seconds = sum(rank.seconds for rank in own)
            rounds["exposed"].append(_waited(own, in_pairs=has_pairs) / _waited(other, in_pairs=has_pairs))
            rounds["time"].append(max(rank.seconds for rank in own) / max(rank.seconds for rank in other))
            rounds["exposed of time"].append(_waited(own, in_pairs=False) / seconds)
            rounds["uneven of time"].append(sum(rank.uneven for rank in own) / seconds)
        found[setting] = {name: statistics.median(values) for name, values in rounds.items()}
    last: list[StepFigures] = [rank[0] for rank in measured[side][SHOWN[0]][-1].results]
    found["unpaired"] = sum(rank.num_alone for rank in last) / sum(rank.num_forwards for rank in last)
    return found


def _waited(ranks: list[StepFigures], *, in_pairs: bool) -> float:
    return sum(rank.in_pairs if in_pairs else rank.exposed for rank in ranks)


def _print_waits(found: Mapping[str, Any]) -> None:
    print("exposed / time, relative to the sequential side, with messages as long as a share of the shorter segment:")
    print(f"{'':28}" + "".join(f"{setting:>24}" for setting in SHOWN))
    for side in SIDES:
        cells = [f"{found[side][setting]['exposed']:.3f} / {found[side][setting]['time']:.3f}" for setting in SHOWN]
        unpaired = f"forwards without a pair {found[side]['unpaired']:.3f}"
        print(f"{side:28}" + "".join(f"{cell:>24}" for cell in cells) + f"   {unpaired}")


def targets_of(name: str, kind: str, found: Mapping[str, Any]) -> list[Target]:
    """Returns the targets of a layout with one kind of experts."""
    targets = []
    for side in [side for side in SIDES if side != SEQUENTIAL]:
        figures = found[side]
        targets.append(Target(f"{name}, {side}: cpu without the link", figures["cpu"], 1.03))
        if side == QUEUE_ALONE:
            continue
        targets.append(Target(f"{name}, {side}: unpaired", figures["unpaired"], figures["warm-up"]))
        for setting in SETTINGS:
            # The backward of a recomputed layer has four messages, and the forward two parts to cover them.
            if setting.clock is CpuClock and kind != "recomputed":
                exposed = figures[str(setting)]["exposed"]
                targets.append(Target(f"{name}, {side}: exposed, {setting}", exposed, 0.15))
    return targets


def share_of_warm_up(stages: int, chunks: int) -> float:
    """Returns the share of forwards that the warm-up of all stages runs without a pair."""
    ahead = [forwards_ahead(stage, Pipeline(stages, chunks), paired=True) for stage in range(stages)]
    return sum(ahead) / (stages * chunks * NUM_MICROBATCHES)


def build(*flags: str) -> Callable[[Setting, Unit], StepFigures | None]:
    """Builds a training step whose messages take time."""
    run = build_run(*flags)
    link = OneLink()
    watch = _Watch(link)
    for layer in [part for chunk in run.model for part in chunk.modules() if isinstance(part, TransformerLayer)]:
        dispatcher = layer.mlp.token_dispatcher
        dispatcher.transport = LinkTransport(dispatcher.transport, link, dispatcher.tp_ep_group)
        if isinstance(dispatcher, MoEStaticAlltoAllTokenDispatcher):
            dispatcher.layout = padded_rank_rows
        watch.attach(layer)
    patch_counts_and_stages(link)
    watch.patch_runner()

    def step(setting: Setting, unit: Unit) -> StepFigures | None:
        seconds = setting.share * min(unit.attention, unit.experts)
        if setting.has_bandwidth:
            message = {"seconds_per_byte": seconds / unit.num_bytes}
        else:
            message = {"seconds_per_message": seconds}
        clock = None if setting.clock is None else setting.clock()
        watch.restart(partial(link.restart, clock, **message))
        run_step(run)
        return None if clock is None else watch.figures

    return step


class _Watch:
    """Records the figures of a step."""

    def __init__(self, link: OneLink) -> None:
        self.link, self.figures = link, StepFigures()
        self._paired: set[Action] = set()
        self._restart: Callable[[], None] | None = None
        self._start = 0.0

    @property
    def now(self) -> float:
        """Seconds of this rank; 0 without a clock."""
        return 0.0 if self.link.clock is None else self.link.clock.now()

    def restart(self, restart_link: Callable[[], None]) -> None:
        """Prepares the next step. restart_link: called when its forward and backward begin."""
        self.figures, self._restart = StepFigures(), restart_link

    def attach(self, layer: Any) -> None:
        """Records the segments of a layer's first forward. They are meaningless in passes that take turns."""
        moe = layer.mlp
        for part, first, last in (("attention", layer, moe.router), ("experts", moe.experts, moe.experts)):
            first.register_forward_pre_hook(lambda *_: self._begin_segment())
            last.register_forward_hook(lambda *_, part=part: self._end_segment(part))

    def _begin_segment(self) -> None:
        self._start = self.now

    def _end_segment(self, part: str) -> None:
        if not is_in_backward():
            self.figures.segments[part].append(self.now - self._start)

    def patch_runner(self) -> None:
        """Records the passes of all following steps."""
        run, run_one = ScheduleRunner.run, ScheduleRunner._run

        def run_step_of(runner: ScheduleRunner, steps: Any) -> list[Any]:
            assert self._restart is not None, "a step runs once, without retries"
            self._restart()
            self._restart = None
            self._paired = {action for pair in pairs_of(runner) for action in pair}
            start, link, figures = self.now, self.link, self.figures
            reports = run(runner, steps)
            figures.seconds, figures.exposed, figures.uneven = self.now - start, link.exposed, link.uneven
            figures.most_bytes = link.most_bytes
            return reports

        def run_pass(runner: ScheduleRunner, step: Action | Pair) -> None:
            before = self.link.exposed
            run_one(runner, step)
            if self.link.clock is not None:
                # A thread that has ended cannot be read.
                self.link.clock.now()
            forwards = [action for action in step.passes if action.kind is ActionKind.FORWARD]
            self.figures.num_forwards += len(forwards)
            self.figures.num_alone += 0 if isinstance(step, Pair) else len(forwards)
            if self._paired.issuperset(step.passes):
                self.figures.in_pairs += self.link.exposed - before

        patch.object(ScheduleRunner, "run", run_step_of).start()
        patch.object(ScheduleRunner, "_run", run_pass).start()


def pairs_of(runner: ScheduleRunner) -> list[Pair]:
    """Returns the pairs that the runner's stage has with the flags."""
    stages = Pipeline(runner.communicator.num_stages, len(runner.model))
    order = stage_orders(stages, runner.num_microbatches, Schedule(paired=True))[runner.communicator.stage]
    return [step for step in order if isinstance(step, Pair)]


if __name__ == "__main__":
    main()
