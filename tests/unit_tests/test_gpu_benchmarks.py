"""GPU benchmarks: sections run with small sizes on a CPU, sides that fail become lines, deadlines are kept, and targets
fail when they should.
"""

import gc
import importlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.checks import block_scaled, ceilings, new_kernels, paged_products, stack48, steps
from benchmarks.gpu.checks.device_events import Span
from benchmarks.gpu.checks.predicted import Prediction
from benchmarks.gpu.checks.profiles import Work, rows_of, work_of_kernels
from benchmarks.gpu.checks.reporting import DRY_RUN, NEEDS_GPU
from benchmarks.gpu.checks.side_workers import Line, Outcome, Send, Task, run_in_turn
from benchmarks.gpu.evidence import read
from benchmarks.gpu.gemm_beside_stash import Beside
from benchmarks.gpu.graph_step import Case, free_memory, measured_rounds, started_side, tables_of, warm_up
from benchmarks.gpu.protocol import INCOMPLETE
from benchmarks.gpu.record import Target
from benchmarks.gpu.results_tables import tables
from benchmarks.gpu.shapes import (
    CAPACITY,
    DROPLESS,
    GRAPHED,
    HEADLINE,
    PAGED,
    PLAIN,
    RANKS,
    ROUTINGS,
    SHAPES,
    SMALL,
    STATIC,
    sides_of,
)
from megatron.training.command_line.yaml_config import plain_values
from tests.harness import launch_on_ranks, run_on_ranks

PROGRAMS = {
    "stash_copy": "benchmarks.gpu.stash_copy --plot {out}/stash_copy_gpu.svg --small --rounds 2",
    "gemm_beside_stash": "benchmarks.gpu.gemm_beside_stash --plot {out}/gemm_beside_stash_gpu.svg --small --rounds 2",
    "stash_step": "benchmarks.stash_step --device cpu --rounds 1 --layers 3 --tokens 64 --hidden 32 --ffn 16",
}
RESULT = "RESULT "  # begins a line of results
SPILL, FEWER_PAGES = "graph + stash, spill", steps.FEWER_PAGES


def run_program(words: list[str]) -> None:
    """Runs the program of a command line in this process. words: its module and arguments."""
    module = importlib.import_module(words[0])
    with patch.object(sys, "argv", words):
        module.main()


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder with the results of a dry run of every program."""
    folder = tmp_path_factory.mktemp("results")
    for name, command in PROGRAMS.items():
        words = f"{command} --json {{out}}/{name}_gpu.json".format(out=folder).split()
        (outcome,) = launch_on_ranks(run_program, 1, words, backend=None)
        assert outcome.exit_code == 0, outcome.stdout + outcome.stderr
    return folder


def record_of(folder: Path, name: str) -> dict:
    return json.loads((folder / f"{name}_gpu.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_program_records_where_it_ran(dry_run: Path, name: str) -> None:
    assert {"date", "device", "torch", "commit"} <= record_of(dry_run, name).keys()


@pytest.mark.slow
def test_a_dry_run_draws_plots_and_fills_the_tables(dry_run: Path) -> None:
    plots = [ElementTree.parse(path).getroot() for path in dry_run.glob("*.svg")]
    assert len(plots) == 2 and all(len(plot) > 3 for plot in plots)
    assert all(f"\n## {name}\n" in tables(dry_run, read(dry_run)) for name in [*PROGRAMS][:2])


# Sections.


def lines_of(section: Callable[[], None], *words: str, is_dry: bool = True) -> tuple[int, list[Line]]:
    """Runs a section in this process with small sizes, and returns its exit status and its lines."""
    text = io.StringIO()
    with (
        patch.object(sys, "argv", ["section", *words, "--small", "--seconds", "300"]),
        patch.dict(os.environ, {DRY_RUN: "1" if is_dry else ""}),
        redirect_stdout(text),
    ):
        try:
            section()
        except SystemExit as end:
            status = end.code
    lines = [line.removeprefix(RESULT) for line in text.getvalue().splitlines() if line.startswith(RESULT)]
    return int(status or 0), [json.loads(line) for line in lines]


def merged(lines: list[Line]) -> dict[str, Line]:
    """Merges the lines of each side."""
    found: dict[str, Line] = {}
    for line in lines:
        found.setdefault(line.get("side", ""), {}).update(line)
    return found


def lines_of_rank(section: Callable[[], None], *words: str, is_dry: bool = True) -> tuple[int, list[Line]]:
    (result,) = run_on_ranks(partial(lines_of, section, *words, is_dry=is_dry), 1, backend=None)
    return result


@pytest.mark.slow
def test_a_section_of_steps_reports_every_side_with_its_memory_and_profile() -> None:
    status, lines = lines_of_rank(steps.main, "4096")
    sides = merged(lines)
    assert status == 0 and sides.keys() - {""} == {turn.side for turn in steps.SECTIONS["4096"].turns}
    for name, side in sides.items():
        if name:
            assert {"rounds_ms", "ms", "tokens_s", "flops", "tflop_s", "build_seconds", "graph_gib"} <= side.keys()
            assert (side.get("predicted_bytes", 0) > 0) == (name != PLAIN)
            assert side.get("graphs", 0) == ("graph" in name)
    assert sides[FEWER_PAGES]["recomputed"] > 0
    assert sides[HEADLINE]["recomputed"] == sides[PAGED]["recomputed"] == sides[PAGED]["discarded"] == 0
    assert sides[HEADLINE]["kernels"][0]["us"] > 0 and sides[DROPLESS]["functions"][0]["calls"] > 0
    assert sides[HEADLINE]["flops"] == sides[PLAIN]["flops"] and sides[HEADLINE]["discarded"] == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="checks what happens without a GPU")
def test_a_section_without_a_gpu_says_so() -> None:
    status, lines = lines_of_rank(steps.main, "deepseek", is_dry=False)
    assert status == NEEDS_GPU and not any("ms" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("section", [ceilings, new_kernels])
def test_sections_of_single_kernels_report_every_side(section) -> None:
    status, lines = lines_of_rank(section.main)
    sides = merged(lines)
    assert status == 0 and all("gb_s" in side or "tflop_s" in side or "us" in side for side in sides.values())
    assert len(sides) == {ceilings: 10, new_kernels: len(new_kernels.KERNELS)}[section]


@pytest.mark.slow
def test_each_side_of_8_bit_rows_reports_its_ratio_to_the_work_that_it_replaces() -> None:
    status, lines = lines_of_rank(block_scaled.main, "--rounds", "4")
    sides = merged(lines)
    assert status == 0 and sides.keys() == block_scaled.SIDES.keys()
    assert all(side["rate_x"] > 0 and side["us"] > 0 and side["other_us"] > 0 for side in sides.values())
    # Encoded rows of 64 and 96 elements, and rows of bf16.
    assert all(sides[name]["bytes"] == 96 * (80 + 112) for name in ("stash", "stash, host pages"))
    assert sides["stash"]["other_bytes"] == 96 * 2 * (64 + 96)
    assert all(sides[name]["arithmetic"] == "DEQUANTIZED" for name in ("forward", "grad_x"))


def test_a_product_of_8_bit_rows_that_is_wrong_is_found() -> None:
    def wrong(*_: object, **named: Tensor) -> Tensor:
        return torch.zeros_like(named["out"])

    with patch.object(block_scaled, "multiply", wrong), pytest.raises(AssertionError, match="forward: a distance of"):
        block_scaled.product(block_scaled.SMALL, torch.device("cpu"), name="forward")


@pytest.mark.slow
def test_kernels_in_pages_are_compared_with_contiguous_ones_bit_by_bit() -> None:
    status, lines = lines_of_rank(paged_products.main, "--rounds", "4")
    line = merged(lines)["small"]
    assert status == 0 and all({f"{name}_x", f"{name}_paged_ms"} <= line.keys() for name in paged_products.KERNELS)
    assert line["plan_us"] > 0 and line["release_us"] > 0


def test_descriptors_are_measured_alone() -> None:
    status, lines = lines_of_rank(paged_products.main, "--rounds", "4", "--descriptors")
    line = merged(lines)["small"]
    assert status == 0 and "fc1_descriptors_x" in line and "fc1_x" not in line


def wrong_in_pages(kernel: Callable, one: paged_products.Operands, side: str) -> list:
    results = kernel(one, side)
    if side == "paged":
        results = [one.compared(result).add_(1) for result in results]
    return results


@pytest.mark.parametrize("name", paged_products.KERNELS)
def test_a_kernel_whose_results_in_pages_differ_is_found(name: str) -> None:
    one = paged_products.Operands(paged_products.SMALL["small"], torch.device("cpu"))
    for before, kernel in paged_products.KERNELS.items():
        paged_products.check_bits(one, before, kernel)
        if before == name:
            with pytest.raises(AssertionError, match=f"{name}: results with pages differ"):
                paged_products.check_bits(one, name, partial(wrong_in_pages, kernel))
            return


def test_the_default_on_a_gpu_depends_on_the_ratios_of_every_shape() -> None:
    fast = dict.fromkeys(paged_products.SHAPES, {"fc1_x": 1.03, "weight_grad_x": 1.05, "added_grad_x": 0.9})
    assert all(target.holds for target in paged_products.targets_of(fast))
    for name, ratio in (("fc1_x", 1.04), ("weight_grad_x", 1.06), ("added_grad_x", 1.06)):
        slow = {**fast, "DeepSeek-V3": {**fast["DeepSeek-V3"], name: ratio}}
        (missed,) = (target for target in paged_products.targets_of(slow) if not target.holds)
        assert missed.name.startswith(f"DeepSeek-V3: {name.removesuffix('_x')} ")
    assert not any(target.holds for target in paged_products.targets_of({}))


def test_expected_seconds_of_a_call_leave_room_for_the_other_sections() -> None:
    expected = {name: section.expected for name, section in steps.SECTIONS.items()}
    assert expected["short"] <= 80 and expected["4096"] <= 97 and expected["deepseek"] <= 30
    assert expected["local"] <= 30 and stack48.SECTION.expected <= 130


@pytest.mark.slow
def test_importing_the_sections_does_not_use_cuda() -> None:
    names = [
        f"benchmarks.gpu.checks.{name}"
        for name in ("block_scaled", "ceilings", "paged_products", "steps", "stack48", "new_kernels")
    ]
    code = f"""
import importlib, torch
def refuse(*args, **kwargs): raise AssertionError("CUDA is used on import")
for name in ("_lazy_init", "is_available", "device_count", "current_device"):
    setattr(torch.cuda, name, refuse)
for name in {names}: importlib.import_module(name)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# Sides.


def shortest_sides() -> list[tuple[str, dict[str, int], int]]:
    """Runs one step of each side. Returns names, counters and the number of tensors that the side has left."""
    torch.set_num_threads(1)
    case = Case("small", SMALL, "skewed")
    found = []
    for name, side in case.sides.items():
        before = num_tensors()
        counters = run_side(case, side)
        free_memory(torch.device("cpu"))
        found.append((name, counters, num_tensors() - before))
    return found


def run_side(case, side) -> dict[str, int]:
    with started_side(case, side) as stepper:
        warm_up(stepper)
        (measured,) = measured_rounds(stepper, rounds=1, steps=1)
        return measured.counters


def num_tensors() -> int:
    return sum(issubclass(type(one), Tensor) for one in gc.get_objects())


@pytest.mark.slow
def test_all_sides_run_in_one_process_and_leave_no_tensors_and_small_pools_spill_or_recompute() -> None:
    (found,) = run_on_ranks(shortest_sides, 1, backend=None)
    assert [name for name, _, _ in found] == [*sides_of(ROUTINGS["skewed"])]
    # The first one may leave the random states of generators.
    assert all(left <= 4 for _, _, left in found), found
    counters = {name: counts for name, counts, _ in found}
    assert counters[SPILL]["host_pages"] > 0 and counters[FEWER_PAGES]["recomputed"] > 0
    assert not any(counts.get("discarded") for counts in counters.values())


@pytest.mark.parametrize("routing", ROUTINGS)
def test_forced_choices_bring_the_rows_that_were_asked_for(routing: str) -> None:
    shape, forced = SMALL, ROUTINGS[routing]
    tables = tables_of(Case("small", shape, routing), torch.device("cpu"))
    assert (tables.sort(dim=-1).values.diff(dim=-1) > 0).all()  # no token has the same expert twice
    own = (tables < shape.num_own).sum(dim=(2, 3)) * RANKS / (shape.seq * shape.topk)  # per turn and layer
    assert (own <= CAPACITY).all() and abs(own.mean() - forced.mean) < 0.1
    assert (own == 1).all() if routing == "balanced" else own.std() > 0.1
    assert len({tuple(turn.flatten().tolist()) for turn in tables}) == len(tables)


class OperatorBytes(TorchDispatchMode):
    """Sums the bytes of arguments of operators on rows, in which only live rows of buffers count."""

    def __init__(self, *, capacity: int, live: int) -> None:
        super().__init__()
        self.capacity, self.live = capacity, live
        self.bytes: dict[str, int] = {}
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if str(func.namespace) in ("activation", "static_rows", "paged_stash"):
            name = str(func).split(".")[1]
            if (kwargs or {}).get("needed") is not None:
                name += ", if needed"  # a recomputation, of tensors that have pages here
            tensors = [one for one in (*args, *(kwargs or {}).values(), result) if isinstance(one, Tensor)]
            self.counts[name] = self.counts.get(name, 0) + 1
            self.bytes[name] = self.bytes.get(name, 0) + sum(map(self._live_bytes, tensors))
        return result

    def _live_bytes(self, tensor: Tensor) -> int:
        is_buffer = tensor.shape[0] == self.capacity
        return tensor.nbytes * self.live // self.capacity if is_buffer else tensor.nbytes


def recorded_operators(shape, side: str) -> tuple[dict[str, int], dict[str, int]]:
    """Runs a step and returns the bytes and the number of calls of operators on rows."""
    live = shape.seq * shape.topk
    recorded = OperatorBytes(capacity=int(CAPACITY * live), live=live)
    case = Case("recorded", shape, "balanced")
    with started_side(case, case.sides[side]) as stepper:
        stepper.step()
        with torch.autograd.set_multithreading_enabled(False), recorded:
            stepper.step()
    return recorded.bytes, recorded.counts


@pytest.mark.slow
def test_the_work_of_kernels_is_that_of_the_operators_of_a_step() -> None:
    shape, side = replace(SMALL, layers=3), "eager static + stash"
    ((num_bytes, counts),) = run_on_ranks(partial(recorded_operators, shape, side), 1, backend=None)
    work = work_of_kernels(shape, sides_of(ROUTINGS["balanced"])[side])
    passes, live, element = shape.layers * shape.microbatches, shape.seq * shape.topk, 4
    # Operators read each row of tokens at most once, but an argument has all of them.
    unread = (
        passes * (2 * (RANKS * shape.seq - live) * shape.hidden + (RANKS * shape.seq * shape.topk - live)) * element
    )
    assert work["gather_kernel"].num_bytes == pytest.approx(num_bytes["gather_rows"] - unread, rel=0.01)
    assert work["sum_kernel"].num_bytes == pytest.approx(num_bytes["sum_rows"], rel=0.01)
    assert work["act_kernel"].num_bytes == pytest.approx(num_bytes["gated_activation"], rel=0.01)
    assert work["act_gradient_kernel"].num_bytes == pytest.approx(num_bytes["gated_activation_backward"], rel=0.01)
    copied = live * ((shape.hidden + 2 * shape.ffn) * element + 4)
    assert counts["stash"] == counts["restore"] == (shape.layers - 1) * shape.microbatches
    assert work["copy_kernel"].num_bytes == 2 * 2 * copied * counts["stash"]


def test_a_kernel_of_known_work_has_rates_and_the_longest_comes_first() -> None:
    launches = [Span("short", 0, 1), Span("act_kernel", 1, 11), Span("act_kernel", 20, 30)]
    rows = rows_of(launches, {"act_kernel": Work(num_bytes=4e7, flops=2e8)})
    assert rows[0] == {"kernel": "act_kernel", "count": 2, "us": 20, "gb_s": 2000, "tflop_s": 10}
    assert rows[1] == {"kernel": "short", "count": 1, "us": 1}


# Children.


def good(send: Send) -> None:
    send(process=os.getpid())
    send(ms=1.0)


def bad(send: Send, *, error: BaseException) -> None:
    send(started=True)
    raise error


def hang(send: Send) -> None:
    send(started=True)
    time.sleep(600)


def outcomes_of(tasks: list[Task], *, seconds: float = 60, reserved: int = 0) -> tuple[dict[str, Outcome], list]:
    lines: list[tuple[str, Line]] = []
    outcomes = run_in_turn(
        tasks,
        deadline=time.monotonic() + seconds,
        clean=lambda: reserved,
        on_line=lambda side, line: lines.append((side, line)),
    )
    return outcomes, lines


@pytest.mark.parametrize(
    "error", [KeyError("x"), TypeError("x"), torch.OutOfMemoryError("x"), SystemExit(3), KeyboardInterrupt("x")]
)
def test_any_error_of_a_side_is_a_line_and_the_other_sides_go_on(error: BaseException) -> None:
    tasks = [Task("first", 1, good), Task("bad", 1, partial(bad, error=error)), Task("last", 1, good)]
    outcomes, lines = outcomes_of(tasks)
    assert [side for side, _ in lines] == ["first", "first", "bad", "bad", "last", "last"]
    assert lines[3][1] == {"error": f"{type(error).__name__}: {error}"}
    assert outcomes["last"].last == {"ms": 1.0} and outcomes["last"].error is None
    first, last = (outcomes[name].lines[0]["process"] for name in ("first", "last"))
    assert first != last, "a process in which a side failed is not used again"


def test_sides_share_a_process_unless_one_leaves_memory_behind() -> None:
    tasks = [Task(name, 1, good) for name in "abc"]
    for reserved, processes in ((0, 1), (2 << 30, 3)):
        outcomes, _ = outcomes_of(tasks, reserved=reserved)
        assert len({one.lines[0]["process"] for one in outcomes.values()}) == processes
    outcomes, _ = outcomes_of([replace(tasks[0], is_last_of_process=True), *tasks[1:]])
    assert len({one.lines[0]["process"] for one in outcomes.values()}) == 2


def test_a_side_that_hangs_or_dies_costs_its_patience_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.checks.side_workers.PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr("benchmarks.gpu.checks.side_workers.LEAVING_SECONDS", 0.2)
    # Only the side that hangs is given little time: `gc.collect` in a fork of a test run takes a while.
    tasks = [Task("hangs", 0.1, hang), Task("dies", 10, lambda send: os._exit(9)), Task("good", 10, good)]
    began = time.monotonic()
    outcomes, _ = outcomes_of(tasks)
    assert time.monotonic() - began < 30
    assert "without a result" in str(outcomes["hangs"].error) and "exit code 9" in str(outcomes["dies"].error)
    assert outcomes["good"].error is None


def test_no_side_starts_without_the_time_that_it_needs() -> None:
    tasks = [Task("long", 90, good), Task("short", 1, good)]
    outcomes, lines = outcomes_of(tasks, seconds=60)
    assert not outcomes["long"].lines and "90 s expected" in str(outcomes["long"].skipped)
    assert lines[0][0] == "long" and "skipped" in lines[0][1] and outcomes["short"].last == {"ms": 1.0}


def test_tasks_that_were_not_started_make_a_check_incomplete_unless_one_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ceilings, "checked_device", lambda: None)
    long, short, wrong = (
        Task("long", 90, good),
        Task("short", 1, good),
        Task("wrong", 1, partial(bad, error=KeyError())),
    )
    assert ceilings.run_tasks([short], seconds=60) == 0
    assert ceilings.run_tasks([short, long], seconds=60) == INCOMPLETE
    assert ceilings.run_tasks([short, wrong, long], seconds=60) == 1


# Targets.


@pytest.mark.parametrize(
    ("measured", "is_least", "holds"),
    [(0.9, True, True), (0.89, True, False), (0.91, False, False), (None, True, False)],
)
def test_a_target_holds_if_it_was_measured_and_reached(measured: float | None, is_least: bool, holds: bool) -> None:
    assert Target("rate", measured, 0.9, is_least=is_least).holds is holds


def test_targets_fail_for_slow_steps_unpredicted_memory_and_memory_of_static_buffers() -> None:
    figures = {HEADLINE: {"ms": 30.0, "reserved_bytes": 100}, PLAIN: {"ms": 100.0}, GRAPHED: {"reserved_bytes": 120}}
    predicted = {HEADLINE: 98, GRAPHED: 115}
    short = steps.SECTIONS["short"].targets
    assert all(one.holds for one in short(figures, predicted))
    slow = {**figures, PLAIN: {"ms": 80.0}}
    assert [one.holds for one in short(slow, predicted)] == [False, True, True]
    assert [one.holds for one in short(figures, {HEADLINE: 90})] == [True, False, True]
    assert [one.holds for one in short({**figures, GRAPHED: {"reserved_bytes": 102}}, predicted)] == [True, True, False]
    # Static buffers that do not fit count with their predicted bytes.
    without = {side: line for side, line in figures.items() if side != GRAPHED}
    assert [one.holds for one in short(without, predicted)] == [True, True, True]
    assert [one.holds for one in short(without, {HEADLINE: 98, GRAPHED: 104})] == [True, True, False]
    assert not any(one.holds for one in short({}, {}))


def test_experts_in_pages_may_hardly_be_slower_than_without_a_stash_and_need_the_predicted_memory() -> None:
    figures = {PAGED: {"ms": 101.0, "reserved_bytes": 100}, GRAPHED: {"ms": 100.0}}
    targets = partial(steps.SECTIONS["4096"].targets, predicted={PAGED: 98})
    assert [one.holds for one in targets(figures)[-2:]] == [True, True]
    assert [one.holds for one in targets({**figures, PAGED: {"ms": 102.0, "reserved_bytes": 110}})[-2:]] == [False] * 2


def test_sides_with_a_stash_say_how_they_compute() -> None:
    for name, side in sides_of(ROUTINGS["balanced"]).items():
        ways = [way for way in ("pages", "copies") if f"--moe-paged-stash-compute {way}" in (side.flags or "")]
        assert ways == ([] if not side.has_stash else ["pages"] if name.endswith(", pages") else ["copies"])


def test_the_rank_of_a_whole_model_has_to_reach_its_mfu() -> None:
    for mfu, holds in ((0.37, True), (0.35, False)):
        assert stack48.targets_of({HEADLINE: {"mfu": mfu}}, {})[0].holds is holds


class KnownPredictions:
    """Predictions without a process: 100 GiB and 2e14 FLOPs for each side, 120 GiB for static buffers in a graph."""

    def __init__(self, flags: Iterable[str] = (*sides_of(ROUTINGS["balanced"]),)) -> None:
        self.known = {*flags} - {STATIC}

    def of(self, name: str, *, seconds: float) -> Prediction | str:
        gib = 120 if name == GRAPHED else 100
        return Prediction(gib * steps.GIB, 2e14) if name in self.known else "ValueError: unknown"

    def leave(self) -> None:
        pass


def reported(side: str, line: Line) -> Line:
    reporter = steps.Reporter(Case("shape", SHAPES["Qwen3-30B-A3B"], "balanced"), KnownPredictions())
    with redirect_stdout(io.StringIO()) as text:
        reporter.report(side, line)
    assert (side in reporter.figures) == ("ms" in line)
    lines = [json.loads(one.removeprefix(RESULT)) for one in text.getvalue().splitlines() if one]
    # What was measured does not wait for the prediction.
    assert line.items() <= lines[0].items() and "predicted_bytes" not in lines[0]
    return merged(lines)[side]


def test_figures_of_a_side_have_rates_and_the_predicted_memory() -> None:
    steady = {"ms": 500.0, "device": "NVIDIA H200", "reserved_bytes": 102 * steps.GIB}
    line = reported(HEADLINE, steady)
    assert line["tokens_s"] == 2 * 4096 / 0.5 and line["tflop_s"] == 400
    assert line["mfu"] == pytest.approx(400 / 989.4, abs=1e-4)
    assert line["predicted_gib"] == 100 and line["reserved_x"] == 1.02
    plain = reported(PLAIN, steady)
    assert plain["mfu"] == line["mfu"] and "predicted_gib" not in plain
    without = reported(STATIC, steady)
    assert without["tokens_s"] == line["tokens_s"] and "mfu" not in without and "unknown" in without["no_prediction"]


def test_a_side_without_memory_says_how_much_it_was_predicted_to_need() -> None:
    line = reported(GRAPHED, {"error": "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"})
    assert line["out_of_memory"] and line["predicted_gib"] == 120
    assert not reported(GRAPHED, {"error": "KeyError: 'x'"})["out_of_memory"]


@pytest.mark.parametrize(
    ("headline_ms", "reserved_gib", "static", "status", "failed"),
    [
        (400.0, 102, Outcome(), 0, []),
        (700.0, 102, Outcome(), 1, ["MFU"]),
        (400.0, 110, Outcome(), 1, ["difference"]),
        # Predicted static buffers replace measured ones only where these do not fit.
        (400.0, 102, Outcome(error="KeyError: 'x'"), 1, ["static buffers"]),
        (400.0, 102, Outcome(error="OutOfMemoryError: CUDA out of memory"), 0, []),
        (400.0, 102, Outcome(skipped="not started: 3 s left"), INCOMPLETE, ["static buffers"]),
        (700.0, 102, Outcome(skipped="not started: 3 s left"), 1, ["MFU", "static buffers"]),
    ],
)
def test_the_exit_status_of_a_section_follows_from_its_targets_and_errors(
    headline_ms: float, reserved_gib: int, static: Outcome, status: int, failed: list[str]
) -> None:
    def run(tasks: list[Task], *, on_line: Callable[[str, Line], None], **_: object) -> dict[str, Outcome]:
        figures = {"ms": headline_ms, "device": "NVIDIA H200", "reserved_bytes": reserved_gib * steps.GIB}
        on_line(HEADLINE, figures)
        if static.error is not None:
            on_line(GRAPHED, {"error": static.error})
        elif static.skipped is None:
            on_line(GRAPHED, {**figures, "reserved_bytes": 120 * steps.GIB})
        return {task.name: static if task.name == GRAPHED else Outcome() for task in tasks}

    text = io.StringIO()
    with (
        patch.object(steps, "run_in_turn", run),
        patch.object(steps, "Predictions", KnownPredictions),
        redirect_stdout(text),
    ):
        assert steps.measure(stack48.SECTION, deadline=0, is_small=False) == status
    (targets,) = (line["targets"] for line in map(result_of, text.getvalue().splitlines()) if "targets" in line)
    missed = [target["name"] for target in targets if not target["holds"]]
    assert len(missed) == len(failed) and all(word in name for word, name in zip(failed, missed, strict=True))


def result_of(line: str) -> Line:
    return json.loads(line.removeprefix(RESULT)) if line.startswith(RESULT) else {}


def test_memory_is_compared_with_predicted_static_buffers_where_these_are_not_measured() -> None:
    names: list[str] = []

    def predictions(flags: dict[str, str]) -> KnownPredictions:
        names.extend(flags)
        return KnownPredictions(flags)

    section = steps.SECTIONS["deepseek"]
    with (
        patch.object(steps, "run_in_turn", lambda tasks, **_: {task.name: Outcome() for task in tasks}),
        patch.object(steps, "Predictions", predictions),
    ):
        steps.measure(section, deadline=0, is_small=False)
    assert GRAPHED not in [turn.side for turn in section.turns] and GRAPHED in names


def test_only_a_side_that_may_not_fit_may_run_out_of_memory() -> None:
    full, other = Outcome(error="OutOfMemoryError: CUDA out of memory"), Outcome(error="KeyError: 'x'")
    static = next(turn for turn in stack48.SECTION.turns if turn.side == GRAPHED)
    headline = next(turn for turn in stack48.SECTION.turns if turn.side == HEADLINE)
    assert not steps.is_failure(static, full) and steps.is_failure(static, other) and steps.is_failure(headline, full)
    assert not steps.is_failure(headline, Outcome(skipped="no time"))


def test_the_shape_of_a_rank_is_that_of_the_published_model() -> None:
    shape = SHAPES[stack48.SECTION.shape]
    published = plain_values((Path(__file__).parents[2] / "configs" / "qwen3-30b-a3b.yaml").read_text())
    assert (shape.layers, shape.hidden, shape.num_experts) == (
        published["num_layers"],
        published["hidden_size"],
        published["num_experts"],
    )
    assert (shape.vocab, shape.ffn, shape.num_own) == (published["vocab_size"], published["moe_ffn_hidden_size"], 16)


def test_copies_beside_products_count_as_far_as_they_came() -> None:
    torch.testing.assert_close(Beside(10.0, [2.0, 4.0, 6.0, 9.0, 13.0]).pairs, 4.25)
    assert Beside(10.0, [2.0, 4.0]).pairs == 2.0 and not Beside(10.0, [2.0, 4.0]).is_covered
