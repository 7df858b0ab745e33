"""Trains the training program on modelled GPUs in many configurations, called rows.

    PYTHONPATH=. .venv/bin/python -m tests.device_model.rows [--waits] [--flags "FURTHER FLAGS"] [PART OF A NAME ...]

prints the alarms of the named rows, or of all rows. --waits also prints where the host waits in the last step.

Most rows are configurations of the capture table in docs/cuda_graphs.md, captured as whole steps ("full: ...") or as
parts of layers ("local: ..."), or eager ("eager: ...") where a whole step cannot be captured. The others are cases of
the gate (tools/gate/cases.py) for features that the table lacks: FSDP2, ZeRO-2, offloading, updates in backward, and
overflows of the stash. "pages, ..." is the row of the rest of the name, with experts that compute in pages, "8 bits,
..." with rows that are stored in 8 bits, and "8-bit experts, ..." with experts that compute in 8 bits.
"""

import argparse
import importlib
import shlex
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

from megatron.tools.capture_configurations import CONFIGURATIONS
from megatron.tools.gate.cases import CASES, PRETRAIN, RUN, TAPES, Case
from tests.device_model.host import on_modelled_gpus

if TYPE_CHECKING:
    from tests.device_model.device import Device

FULL = ["--cuda-graph-impl", "full_iteration", "--cuda-graph-warmup-steps", "1"]
LOCAL = ["--cuda-graph-impl", "local", "--cuda-graph-warmup-steps", "1", "--cuda-graph-modules"]
# With graphs: a warm-up step, the capture with the first replay, and a second replay.
NUM_STEPS = 3
# Rows that also train with experts in the pages of the stash, which is not the default on a GPU.
IN_PAGES = ["--moe-paged-stash-compute", "pages"]
ALSO_IN_PAGES = (
    "step graph: few pages",
    "layer graphs: pages",
    "local: stash that spills to the host",
    "stash: spills to the host",
    "full: stash in a pipeline",
    "full: stash over ranks, ZeRO-1, passes in turns",
)
PAGED = "pages, "  # prefix of these rows
# A row that also trains with a stash of 8 bits.
IN_8_BITS, ALSO_IN_8_BITS = ["--bf16", "--moe-paged-stash-dtype", "mxfp8"], "stash: pp vpp, prefetch"
ENCODED = "8 bits, "
# Rows whose experts also compute in 8 bits: eager with copies of rows, and with both kinds of graphs.
BY_8_BITS = ["--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"]
ALSO_BY_8_BITS = ("stash: pp vpp, prefetch", "full: stash", "local: stash")
QUANTIZED = "8-bit experts, "
# Prefixes of the rows from the capture table.
CAPTURED = ("full: ", "local: ", "eager: ")
# Subjects of the gate whose cases are rows, except for cases that read files.
SUBJECTS = ("ddp", "ZeRO-1", "ZeRO-2", "FSDP2", "in backward", "offload", "stash", "static", "fp16", "recompute")
# Subjects whose cases train with graphs after two eager steps. The gate replaces the graphs by tapes.
SUBJECTS_OF_GRAPHS = ("step graph", "layer graphs")


@dataclass(frozen=True)
class Row:
    """A training run: its command line, number of ranks, and number of steps."""

    argv: tuple[str, ...]
    ranks: int
    num_steps: int = NUM_STEPS

    def without_graphs(self) -> "Row":
        """Returns the same run without CUDA graphs, whose flags are last on the command line."""
        return replace(self, argv=self.argv[: self.argv.index("--cuda-graph-impl")])


@dataclass
class Modelled:
    """A rank's record of a run on the modelled device.

    losses: losses of each step. waits, waits_of_last_step: how often the host waited, by operator and line.
    stash_events: events caused by a lack of pages, named as in StashReport.rungs. num_captures: number of captures,
    including graphs that were dropped. failure: why there is no graph. error: the error that ended the run.
    """

    name: str
    losses: list[str] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    waits: dict[str, int] = field(default_factory=dict)
    waits_of_last_step: dict[str, int] = field(default_factory=dict)
    stash_events: set[str] = field(default_factory=set)
    num_captures: int = 0
    num_graphs: int = 0
    failure: str | None = None
    num_launches: int = 0
    seconds: float = 0.0
    error: str | None = None


@cache
def all_rows() -> Mapping[str, Row]:
    """Returns all rows by name."""
    rows = {}
    for name, one in CONFIGURATIONS.items():
        if one.needs_gpu:
            continue  # symmetric memory and DeepEP, which the model does not implement
        if one.is_whole:
            rows[f"full: {name}"] = Row((*one.argv, *FULL), one.ranks)
        if one.modules:
            rows[f"local: {name}"] = Row((*one.argv, *LOCAL, *one.modules.split()), one.ranks)
        if not one.is_whole and "--optimizer-cuda-graph" not in one.argv:
            # These models' tensors are smaller than the default minimum, so nothing would be offloaded.
            moves = "offload" in " ".join(one.argv)
            rows[f"eager: {name}"] = Row((*one.argv, *["--min-offloaded-tensor-size", "64"] * moves), one.ranks)
    for case in CASES:
        if case.program in (PRETRAIN, TAPES) and "{" not in case.flags:
            if case.name.startswith(SUBJECTS):
                rows[case.name] = _row_of_case(case, NUM_STEPS)
            elif case.name.startswith(SUBJECTS_OF_GRAPHS):
                rows[case.name] = _row_of_case(case, NUM_STEPS + 1)
    for name in ALSO_IN_PAGES:
        rows[f"{PAGED}{name}"] = replace(rows[name], argv=(*IN_PAGES, *rows[name].argv))
    for name in ALSO_BY_8_BITS:
        rows[f"{QUANTIZED}{name}"] = replace(rows[name], argv=(*BY_8_BITS, *rows[name].argv))
    quantized = rows[f"{QUANTIZED}full: stash"]
    rows[f"{PAGED}{QUANTIZED}full: stash"] = replace(quantized, argv=(*IN_PAGES, *quantized.argv))
    encoded = rows[ALSO_IN_8_BITS]
    rows[f"{ENCODED}{ALSO_IN_8_BITS}"] = replace(encoded, argv=(*IN_8_BITS, *encoded.argv))
    return rows


def _row_of_case(case: Case, num_steps: int) -> Row:
    return Row(tuple(shlex.split(f"{RUN} {case.flags} --eval-iters 0")), case.ranks, num_steps)


def train(rows: Sequence[tuple[str, Row]]) -> list[Modelled]:
    """Trains rows one after the other on this rank, and returns a record of each."""
    # Imported here because a process that only starts others must not load the model.
    from tests.device_model.cuda_api import install

    device = install()
    return [_trained(device, name, row) for name, row in rows]


def _trained(device: "Device", name: str, row: Row) -> Modelled:
    from tests.device_model.project import begin_run

    record = Modelled(name)
    begin_run(device)
    launches, captures, began = device.num_launches, device.num_captures, time.monotonic()
    try:
        _train(device, row, record)
    except Exception as error:
        if row.ranks > 1:
            raise  # the other ranks are waiting for this one
        record.error = f"{type(error).__name__}: {error}"
    device.raise_callback_error()
    record.alarms = [f"{count} x {alarm}" for alarm, count in device.alarms.found.items()]
    record.kinds = sorted(kind.name for kind in device.alarms.kinds())
    record.waits = dict(device.host_wait_sites)
    record.num_captures = device.num_captures - captures
    record.num_launches, record.seconds = device.num_launches - launches, time.monotonic() - began
    return record


def _train(device: "Device", row: Row, record: Modelled) -> None:
    from megatron.training.training import run_step
    from tests.distributed.tiny_runs import started_run

    with started_run(row.argv) as run:
        for _ in range(row.num_steps):
            before = Counter(device.host_wait_sites)
            report = run.measured(run_step(run)[0])
            record.losses.append(repr(report.losses))
            if report.stash is not None:
                record.stash_events |= report.stash.rungs.keys()
            record.waits_of_last_step = dict(device.host_wait_sites - before)
        graph = run.steps.graph
        if graph is not None:
            record.num_graphs, record.failure = graph.num_graphs, graph.failure
            graph.drop_graphs()


def main() -> None:
    """Trains the named rows, or all rows, and prints the model's alarms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--waits", action="store_true")
    parser.add_argument("--flags", default="")
    options = parser.parse_args()
    rows = {
        name: row
        for name, row in all_rows().items()
        if not options.names or any(part in name for part in options.names)
    }
    if not rows:
        parser.error(f"no row has {' or '.join(map(repr, options.names))} in its name")
    wrong = []
    for name, row in rows.items():
        row = Row((*row.argv, *shlex.split(options.flags)), row.ranks, row.num_steps)
        try:
            results = on_modelled_gpus(train, row.ranks, [(name, row)])
        except Exception as error:
            print(f"{name}: ERROR {error}", flush=True)
            wrong.append(name)
            continue
        for rank, (record,) in enumerate(results):
            print(
                f"{name} [{rank}]: {record.seconds:.1f} s, {record.num_launches} launches, {record.num_graphs} graphs, "
                f"{record.error or record.failure or ''} {record.losses[-1:]}",
                flush=True,
            )
            for alarm in record.alarms:
                print(f"    {alarm}")
            for wait, count in record.waits_of_last_step.items() if options.waits else ():
                print(f"    waits {count} x {wait}", flush=True)
            if record.alarms or record.error or record.failure:
                wrong.append(name)
    print(f"{len(rows)} rows, {len(set(wrong))} of them with alarms or errors {list(dict.fromkeys(wrong)) or ''}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    # Imported by its full name, so that the ranks can unpickle `train`.
    importlib.import_module("tests.device_model.rows").main()
