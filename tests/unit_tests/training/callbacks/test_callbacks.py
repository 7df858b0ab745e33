"""Tests of a run's logs: training line, validation line, steps.jsonl and progress bar."""

import io
import json
import math
import re
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from megatron.core.datasets.padding import PaddingCount
from megatron.training.callbacks import CallbackList, RankTimes, RunStart
from megatron.training.callbacks.console import (
    CompactLines,
    ConsoleLog,
    ProgressBar,
    format_evaluation_line,
    format_training_line,
    perplexity,
)
from megatron.training.callbacks.run_files import JsonlLog, ProgressFile, RunFile, keep_lines_until, last_stretch
from megatron.training.callbacks.tensorboard import TensorBoardLog, evaluation_scalars
from megatron.training.command_line.config_builder import run_config_of
from megatron.training.compute.flops import num_floating_point_operations
from megatron.training.config import LoggingConfig
from tests.unit_tests.training.flag_models import model_of_flags
from tests.unit_tests.training.small_reports import EVALUATION, STEP


def test_training_line_has_the_fields_that_parsers_of_megatron_logs_expect() -> None:
    line = format_training_line([STEP, replace(STEP, iteration=4, losses={"lm loss": 3.0, "z_loss": 0.75})], 100)
    expected = (
        r" \[[-\d]+ [:\d]+\] iteration +4/ +100 \| consumed samples: +24 \| "
        r"elapsed time per iteration \(ms\): 500\.0 \| learning rate: 3\.000000E-04 \| global batch size: +8 \| "
        r"lm loss: 2\.500000E\+00 \| z_loss: 5\.000000E-01 \| loss scale: 1\.0 \| grad norm: 1\.235 \| "
        r"number of skipped iterations: +0 \| number of nan iterations: +0 \|"
    )
    assert re.fullmatch(expected, line)
    line = format_training_line([replace(STEP, decoupled_learning_rate=5e-4)], 100)
    assert "| learning rate: 3.000000E-04 | decoupled learning rate: 5.000000E-04 | global batch" in line


# Regular expressions with which users' scripts parse a log.
USERS_PATTERNS = {
    r"iteration\s+(\d+)/\s*\d+": "4",
    r"consumed samples:\s+(\d+)": "24",
    r"elapsed time per iteration \(ms\): ([\d.]+)": "500.0",
    r"learning rate: ([\d.]+E[+-]\d+)": "3.000000E-04",
    r"global batch size:\s+(\d+)": "8",
    r"lm loss: ([\d.]+E[+-]\d+) \|": "2.000000E+00",
    r"loss scale: ([\d.]+)": "1.0",
    r"grad norm: ([\d.]+)": "1.235",
    r"number of skipped iterations:\s+(\d+)": "0",
    r"number of nan iterations:\s+(\d+)": "0",
}
PATTERNS_OF_FLAGS = {
    r"num zeros: (\d+)": "7",
    r"params norm: ([\d.]+)": "12.500",
    r"throughput per GPU \(TFLOP/s/GPU\): ([\d.]+)": "150.0",
    r"MFU \(%\): ([\d.]+)": "45.0",
}


@pytest.mark.parametrize(
    ("fields", "patterns"),
    [
        ({}, USERS_PATTERNS),
        (
            {"num_zeros": 7, "params_norm": 12.5, "tflops": 200.0, "mfu": 0.6, "notes": ("a note",)},
            USERS_PATTERNS | PATTERNS_OF_FLAGS,
        ),
    ],
)
def test_patterns_that_users_have_find_every_number(fields: dict[str, Any], patterns: dict[str, str]) -> None:
    lines: list[str] = []
    log = ConsoleLog(2, write=lines.append)
    # Throughput is averaged over the interval, so a slow step has a larger weight.
    slow = {name: fields[name] / 2 for name in ("tflops", "mfu") if name in fields}
    log.on_step_end(replace(STEP, **slow))
    log.on_step_end(replace(STEP, iteration=4, **fields))
    found = {pattern: re.findall(pattern, lines[0]) for pattern in patterns}
    assert found == {pattern: [value] for pattern, value in patterns.items()}
    assert tuple(lines[1:]) == fields.get("notes", ())


def test_skipped_steps_are_counted_but_not_averaged() -> None:
    skipped = replace(STEP, losses={"lm loss": math.inf, "z_loss": 1.0}, skipped=True, nan=True)
    line = format_training_line([skipped, STEP, skipped], 100)
    assert "lm loss: 2.000000E+00" in line
    assert re.search(r"skipped iterations: +2 \| number of nan iterations: +2", line)
    assert "lm loss" not in format_training_line([skipped], 100)
    # A script may report a value only at some steps.
    rare = replace(STEP, losses={"lm loss": 4.0, "reward": 1.0})
    assert "lm loss: 3.000000E+00 | reward: 1.000000E+00 |" in format_training_line([rare, STEP], 100)


def test_validation_line_has_loss_and_perplexity() -> None:
    line = format_evaluation_line(EVALUATION)
    assert line == " validation loss at iteration 4 | lm loss value: 1.500000E+00 | lm loss PPL: 4.481689E+00 | "
    ours = format_evaluation_line(replace(EVALUATION, losses={"lm loss": 1.5, "accuracy": 0.5}))
    assert "lm loss PPL: 4.481689E+00 | accuracy value: 5.000000E-01 | " in ours and "accuracy PPL" not in ours
    final = format_evaluation_line(replace(EVALUATION, split="test", final=True))
    assert "validation loss at iteration 4 on test set |" in final


def test_a_loss_of_nan_has_a_perplexity_of_nan() -> None:
    report = replace(EVALUATION, losses={"lm loss": math.nan})
    assert "lm loss PPL: NAN |" in format_evaluation_line(report)
    assert CompactLines(micro_batch_size=1).evaluation(report) == "validation at step 4: loss nan, perplexity nan"
    scalars = evaluation_scalars(report, LoggingConfig(log_validation_ppl_to_tensorboard=True))
    assert math.isnan(scalars["lm loss validation ppl"])
    assert perplexity(math.inf) == perplexity(21.0) == math.exp(20.0)


def test_console_prints_one_line_an_interval_and_the_rest_at_the_end() -> None:
    lines: list[str] = []
    log = ConsoleLog(2, write=lines.append)
    log.on_train_start(RunStart(iteration=0, train_iters=5))
    for iteration in range(1, 6):
        log.on_step_end(replace(STEP, iteration=iteration))
    log.on_train_end()
    log.on_run_end()
    assert [int(found[1]) for line in lines if (found := re.search(r"iteration +(\d+)/", line))] == [2, 4, 5]


@pytest.mark.parametrize("iteration", [3, 4])
def test_console_forgets_the_steps_of_an_interval_that_a_run_goes_back_from(iteration: int) -> None:
    lines: list[str] = []
    log = ConsoleLog(3, write=lines.append)
    log.on_train_start(RunStart(iteration=3, train_iters=6))
    for step in (4, 5):
        log.on_step_end(replace(STEP, iteration=step, losses={"lm loss": 100.0}, skipped=True))
    log.on_rewind(iteration)
    for step in range(iteration + 1, 7):
        log.on_step_end(replace(STEP, iteration=step))
    [line] = lines
    assert "lm loss: 2.000000E+00 |" in line and re.search(r"skipped iterations: +0 \|", line)


def test_resume_drops_lines_past_its_start_and_a_line_cut_short(tmp_path: Path) -> None:
    for start, end, torn in ((0, 4, b'{"iteration": 1, "lm_lo'), (2, 3, b"5\n\xff\0\n{}")):
        log = CallbackList((JsonlLog(tmp_path),))
        log.on_train_start(RunStart(iteration=start, train_iters=9))
        for iteration in range(start + 1, end + 1):
            log.on_step_end(replace(STEP, iteration=iteration, learning_rate=0.1 + start))
        log.on_evaluation_end(replace(EVALUATION, iteration=end, losses={"lm loss": 1.5, "my value": 2.0}))
        log.on_run_end()
        with (tmp_path / "steps.jsonl").open("ab") as stream:
            stream.write(torn)
    keep_lines_until(tmp_path / "steps.jsonl", 3)
    text = (tmp_path / "steps.jsonl").read_text()
    # Only the final newline may be missing.
    (tmp_path / "steps.jsonl").write_text(text.rstrip("\n"))
    keep_lines_until(tmp_path / "steps.jsonl", 3)
    assert (tmp_path / "steps.jsonl").read_text() == text
    records = [json.loads(line) for line in text.splitlines()]
    assert [record["iteration"] for record in records] == [1, 2, 3, 3]
    assert [record["learning_rate"] for record in records[:3]] == [0.1, 0.1, 2.1]
    assert records[3] == {"iteration": 3, "validation_loss": 1.5, "validation_my_value": 2.0}
    assert records[0]["lm_loss"] == 2.0 and records[0]["tokens_per_second"] == 1024.0


def test_step_lines_hold_what_a_step_knows_and_nothing_else(tmp_path: Path) -> None:
    log = JsonlLog(tmp_path)
    log.on_train_start(RunStart(iteration=0, train_iters=9))
    log.on_step_end(STEP)
    times = RankTimes(min_ms=1.0, min_rank=3, max_ms=2.0, max_rank=0)
    log.on_step_end(replace(STEP, memory={"rss": 5}, timers={"optimizer": math.nan}, rank_times=times, mfu=0.5))
    log.on_run_end()
    plain, full = (json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines())
    assert {name: full[name] for name in full.keys() - plain.keys()} == {
        "memory": {"rss": 5},
        "timers": {"optimizer": "NaN"},
        "rank_times": {"min_ms": 1.0, "min_rank": 3, "max_ms": 2.0, "max_rank": 0},
        "mfu": 0.5,
    }


def test_step_lines_name_padding_from_the_first_step_that_has_some(tmp_path: Path) -> None:
    log = JsonlLog(tmp_path)
    log.on_train_start(RunStart(iteration=0, train_iters=9))
    some = PaddingCount(12, 300)
    log.on_step_end(STEP)
    log.on_step_end(replace(STEP, tokens=500, padding=some, consumed_padding=some))
    log.on_step_end(replace(STEP, consumed_padding=some))
    log.on_run_end()
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    found = [(line.get("padding_tokens"), line.get("consumed_padding_tokens")) for line in lines]
    assert found == [(None, None), (12, 12), (0, 12)]
    assert [line["tokens_per_second"] for line in lines] == [1024.0, 1000.0, 1024.0]


def test_progress_counts_tokens_and_operations_without_padding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    args = model_of_flags("")[0]
    args.consumed_train_samples, samples = 16, 10**8
    log = ProgressFile(tmp_path, run_config_of(args))
    log.on_train_start(RunStart(iteration=2, train_iters=9, consumed_padding=PaddingCount(5, 100)))
    # A quarter of the samples is padding.
    padding = PaddingCount(samples // 4 * args.seq_length, samples // 4 * args.seq_length**2)
    log.on_step_end(replace(STEP, consumed_samples=samples, consumed_padding=padding))
    log.on_save(3)
    log.on_run_end()
    line = (tmp_path / "progress.txt").read_text().splitlines()[-1]
    tokens, flops = 0.75 * samples * args.seq_length, 0.75 * num_floating_point_operations(args, samples)
    assert f"Floating-point operations: {flops:.2e}" in line
    assert f"Tokens (in billions): {tokens / 1e9:.2f}" in line


def test_run_file_lists_every_start_until_a_run_begins_anew(tmp_path: Path) -> None:
    record = {"environment": {"host": "here"}, "flags": {"lr": 1}}
    starts = []
    for iteration in (0, 4, 6, 0):
        RunFile(tmp_path, record=record).on_train_start(RunStart(iteration=iteration, train_iters=9))
        written = json.loads((tmp_path / "run.json").read_text())
        starts.append([start["iteration"] for start in written["starts"]])
        assert written["flags"] == {"lr": 1} and written["started"] == written["starts"][-1]["started"]
    assert starts == [[0], [0, 4], [0, 4, 6], [0]]


def test_a_reader_of_the_run_file_sees_all_of_the_old_one_while_another_start_is_written(tmp_path: Path) -> None:
    record = {"environment": {"host": "here"}, "flags": {"lr": 1}}
    RunFile(tmp_path, record=record).on_train_start(RunStart(iteration=0, train_iters=9))
    before = (tmp_path / "run.json").read_bytes()
    with (tmp_path / "run.json").open("rb") as reader:
        RunFile(tmp_path, record=record).on_train_start(RunStart(iteration=4, train_iters=9))
        assert reader.read() == before != (tmp_path / "run.json").read_bytes()


def test_cumulative_throughput_counts_from_the_first_job_on_as_many_devices() -> None:
    lines = [
        "2026-01-01 00:00:00\tJob ID: 1\t# GPUs: 8\tStarting job",
        "2026-01-02 00:00:00\tJob ID: 1\t# GPUs: 8\tSaved checkpoint\tFloating-point operations: 1.50e+20",
        "something that a user noted",
        "2026-01-03 00:00:00\tJob ID: 2\t# GPUs: 16\tStarting job",
        "2026-01-04 00:00:00\tJob ID: 3\t# GPUs: 16\tStarting job",
    ]
    stretch = last_stretch("\n".join(lines), 16)
    assert stretch is not None and (stretch.start.day, stretch.flops) == (3, 1.5e20)
    assert last_stretch("\n".join(lines), 8) is None


def test_not_a_number_is_valid_json_for_strict_readers(tmp_path: Path) -> None:
    log = JsonlLog(tmp_path)
    log.on_train_start(RunStart(iteration=0, train_iters=9))
    log.on_step_end(replace(STEP, losses={"lm loss": math.nan}, grad_norm=math.inf, nan=True))
    log.on_run_end()
    record = json.loads((tmp_path / "steps.jsonl").read_text(), parse_constant=pytest.fail)
    assert record["lm_loss"] == "NaN" and record["grad_norm"] == "Infinity"


def test_lines_wait_for_room_on_a_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, limits = tmp_path / "steps.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    log = JsonlLog(tmp_path)
    log.on_train_start(RunStart(iteration=0, train_iters=9))
    log.on_step_end(replace(STEP, iteration=1))
    # The limit is reached in the middle of the next line, as when a disk becomes full.
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, limits[1]))
    try:
        for iteration in (2, 3):
            log.on_step_end(replace(STEP, iteration=iteration))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert capsys.readouterr().out.count(f"WARNING: cannot write {path}: [Errno 27]") == 1
    log.on_step_end(replace(STEP, iteration=4))
    log.on_run_end()
    assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]


@pytest.mark.parametrize("switches", [{}, {"log_validation_ppl_to_tensorboard": True}])
def test_tensorboard_holds_every_scalar_under_its_tag(tmp_path: Path, switches: dict[str, bool]) -> None:
    flags = {"log_timers_to_tensorboard": True, "log_memory_to_tensorboard": True, **switches}
    log = TensorBoardLog(str(tmp_path), LoggingConfig(tensorboard_log_interval=2, **flags))
    log.on_train_start(RunStart(iteration=0, train_iters=9))
    for iteration in (1, 2, 3, 4):
        measured = {"params_norm": 3.0, "memory": {"max_allocated": 7}, "timers": {"optimizer": 500.0}}
        log.on_step_end(replace(STEP, iteration=iteration, **measured))
    log.on_evaluation_end(replace(EVALUATION, losses={"lm loss": 1.5, "accuracy": 0.5}))
    log.on_run_end()
    events = EventAccumulator(str(tmp_path)).Reload()
    tags = set(events.Tags()["scalars"])
    assert {"lm loss", "z_loss", "learning-rate", "grad-norm", "params-norm", "loss-scale"} <= tags
    assert ("lm loss validation ppl" in tags) == bool(switches) and "accuracy validation ppl" not in tags
    last = {tag: events.Scalars(tag)[-1].value for tag in ("mem-max-allocated-bytes", "optimizer-time")}
    assert last == {"mem-max-allocated-bytes": 7.0, "optimizer-time": 0.5}
    assert [event.step for event in events.Scalars("lm loss")] == [2, 4]


def test_a_full_disk_ends_the_points_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SummaryWriter, "add_scalar", refuse)
    log = TensorBoardLog(str(tmp_path), LoggingConfig())
    log.on_train_start(RunStart(iteration=0, train_iters=9))
    for iteration in (1, 2):
        log.on_step_end(replace(STEP, iteration=iteration))
    log.on_run_end()
    assert capsys.readouterr().out.count(f"WARNING: cannot write to {tmp_path}: [Errno 28]") == 1


@pytest.mark.parametrize("width", [80, 140])
def test_bar_shows_progress_and_lines_scroll_above_it(width: int) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=width)
    bar = ProgressBar(console)
    bar.on_train_start(RunStart(iteration=2, train_iters=4))
    bar.on_step_end(STEP)
    bar.on_evaluation_start(3)
    bar.on_evaluation_end(EVALUATION)
    console.print("a log line", markup=False)
    bar.on_run_end()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert "a log line" in text and "4/4" in text
    assert "loss 2.000  1,024 tokens/s  validation 1.500" in text
