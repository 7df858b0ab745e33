"""The regression gate: verdicts on two runs, command lines of cases, failed jobs, and two end-to-end cases."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.tools import same_losses
from megatron.tools.gate import cases as gate_cases
from megatron.tools.gate import jobs, worker
from megatron.tools.gate import verdict as judging
from megatron.tools.gate.cases import CASES, Case, cases_named
from megatron.tools.gate.verdict import Left, Verdict, compare, digests_of, judge, judge_new, read_log

Change = Callable[[list[dict[str, Any]]], None]


@pytest.fixture(autouse=True)
def _without_renames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes renames and new cases of the current change, so that they do not affect the logs in this file."""
    monkeypatch.setattr(judging, "RENAMES", ())
    monkeypatch.setattr(judging, "CHECKPOINT_RENAMES", ())
    monkeypatch.setattr(gate_cases, "NEW_CASES", frozenset())


def _lines() -> list[dict[str, Any]]:
    """Returns a log of four steps and an evaluation."""
    steps = [
        {
            "iteration": step,
            "lm_loss": 5 + 1 / step,
            "grad_norm": 1 / step,
            "skipped": False,
            "seconds": 0.25,
            "expert_load": {"1": [7, step], "2": [step, 7]},
            "memory": {"rss": 1000 + step},
        }
        for step in range(1, 5)
    ]
    return [*steps, {"iteration": 4, "validation_loss": 4.25}]


def _write(folder: Path, lines: list[dict[str, Any]], *, codes: list[list[int]] | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "result.json").write_text(json.dumps({"exit_codes": codes or [[0, 0]], "seconds": 1.5}))
    return folder


def _verdict_after(tmp_path: Path, change: Change) -> Verdict:
    lines = _lines()
    change(lines)
    return judge(_write(tmp_path / "base", _lines()), _write(tmp_path / "head", lines))


def _set(line: int, **values: Any) -> Change:
    return lambda lines: lines[line].update(values)


def _drop(name: str) -> Change:
    def change(lines: list[dict[str, Any]]) -> None:
        for line in lines:
            line.pop(name, None)

    return change


def test_equal_runs_are_the_same_whatever_their_times_and_memory(tmp_path: Path) -> None:
    verdict = _verdict_after(tmp_path, _set(1, seconds=9.0, memory={"rss": 5}))
    assert verdict == Verdict(True, "same: 4 steps, 6 fields, 0 saved entries")


ONE_BIT_MORE = 5 + 1 / 3 + 2**-50
DIFFERENCES: dict[str, tuple[Change, str]] = {
    "one bit": (_set(2, lm_loss=ONE_BIT_MORE), "differs from iteration 3: lm_loss (lm_loss: 5.3333"),
    "nested": (_set(1, expert_load={"1": [7, 2], "2": [3, 7]}), "differs from iteration 2: expert_load/2 "),
    "sign of zero": (_set(0, grad_norm=-0.0), "differs from iteration 1: grad_norm"),
    "not a number": (_set(0, grad_norm=float("nan")), "differs from iteration 1: grad_norm"),
    "type": (_set(3, skipped=0), "differs from iteration 4: skipped (skipped: false -> 0)"),
    "evaluation": (_set(4, validation_loss=4.5), "differs from iteration 4: validation_loss"),
    "field lost": (_drop("grad_norm"), "logged only in base: grad_norm"),
    "field added": (_set(2, num_zeros=3), "logged only in head: num_zeros"),
    "field lost in a step": (lambda lines: lines[1].pop("grad_norm"), "differs from iteration 2: grad_norm"),
    "steps lost": (lambda lines: lines.__delitem__(slice(3, 5)), "different number of steps: 4 in base, 3 in head"),
    "evaluation twice": (lambda lines: lines.append(dict(lines[4])), "logged at other iterations"),
    "everything lost": (lambda lines: lines.clear(), "no steps logged: 4 in base, 0 in head"),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_is_named_with_its_first_iteration(tmp_path: Path, name: str) -> None:
    change, expected = DIFFERENCES[name]
    verdict = _verdict_after(tmp_path, change)
    assert not verdict.is_same
    assert expected in verdict.text


def test_a_renamed_field_is_compared_under_its_new_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rename(lines: list[dict[str, Any]]) -> None:
        for line in lines[:4]:
            line["gradient_norm"] = line.pop("grad_norm")
            line["load"] = line.pop("expert_load")

    assert not _verdict_after(tmp_path / "without", rename).is_same
    monkeypatch.setattr(judging, "RENAMES", (("grad_norm", "gradient_norm"), ("expert_load/", "load/")))
    assert _verdict_after(tmp_path / "with", rename).is_same


def test_a_new_field_may_be_in_the_head_alone_and_is_compared_once_both_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(lines: list[dict[str, Any]]) -> None:
        for line in lines[:4]:
            line["news"] = 1

    assert "logged only in head: news" in _verdict_after(tmp_path / "without", add).text
    monkeypatch.setattr(judging, "NEW_FIELDS", {"news", "grad_norm"})
    assert _verdict_after(tmp_path / "with", add).is_same
    assert "differs from" in _verdict_after(tmp_path / "other", _set(1, grad_norm=0.123)).text
    assert "logged only in base: grad_norm" in _verdict_after(tmp_path / "lost", _drop("grad_norm")).text


def test_a_new_entry_may_be_saved_by_the_head_alone_and_is_compared_once_both_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = {"lm_loss": [(1, "5.0")]}

    def verdict(before: dict[str, str], after: dict[str, str]) -> Verdict:
        return judging.compare(judging.Left(log, before), judging.Left(log, after))

    assert "saved only in head: order" in verdict({"weight": "a"}, {"weight": "a", "order": "b"}).text
    monkeypatch.setattr(judging, "NEW_ENTRIES", {"order", "weight"})
    assert verdict({"weight": "a"}, {"weight": "a", "order": "b"}).is_same
    assert "checkpoint differs: weight" in verdict({"weight": "a"}, {"weight": "c", "order": "b"}).text
    assert "saved only in base: weight" in verdict({"weight": "a"}, {"order": "b"}).text


def test_a_failing_rank_is_named_with_its_own_error(tmp_path: Path) -> None:
    base, head = _write(tmp_path / "base", _lines()), _write(tmp_path / "head", _lines(), codes=[[0, 0], [1, 1]])
    (head / "rank0.txt").write_text("step 1\nRemoteRankError: rank 1 failed\n")
    (head / "rank1.txt").write_text('  File "x.py", line 3, in error\nValueError: rows is 3: must be even\n  step 2\n')
    assert judge(base, head) == Verdict(
        False, "fails in head: rank 1: ValueError: rows is 3: must be even", is_failure=True
    )
    assert judge(head, base).text.startswith("fails in base: ")
    assert judge_new(base, head).text.startswith("new in head, and fails: rank 1")
    assert judge_new(head, base) == Verdict(True, "new in head, runs: 4 steps, not compared")
    assert "the base can also run it" in judge_new(base, base).text


def test_flags_that_the_base_does_not_know_are_a_failure_that_says_so(tmp_path: Path) -> None:
    base, head = _write(tmp_path / "base", [], codes=[[2]]), _write(tmp_path / "head", _lines())
    (base / "rank0.txt").write_text("[rank 0] error: unknown flag --new\n")
    verdict = judge(base, head)
    assert not verdict.is_same
    assert "unknown flag --new" in verdict.text and "NEW_CASES" in verdict.text


def test_a_case_that_was_not_run_is_a_failure(tmp_path: Path) -> None:
    assert (
        judge(tmp_path / "base", tmp_path / "head").text
        == "fails in base: it did not run; fails in head: it did not run"
    )


def test_final_checkpoints_are_compared_entry_by_entry() -> None:
    log = {"lm_loss": [(1, "5.0")]}
    saved = {"weight": "a", "moment": "b"}
    assert compare(Left(log, saved), Left(log, dict(saved))).is_same
    changed = compare(Left(log, saved), Left(log, {**saved, "moment": "c"}))
    assert changed == Verdict(False, "the final checkpoint differs: moment")
    dropped = compare(Left(log, saved), Left(log, {"weight": "a"}))
    assert dropped == Verdict(False, "saved only in base: moment")


def test_every_excluded_field_has_a_reason_and_is_not_read(tmp_path: Path) -> None:
    assert all(judging.EXCLUDED.values()) and all(judging.EXCLUDED_OF_CHECKPOINTS.values())
    assert set(read_log(_write(tmp_path / "run", _lines()) / "steps.jsonl")) == {
        "lm_loss",
        "grad_norm",
        "skipped",
        "expert_load/1",
        "expert_load/2",
        "validation_loss",
    }


def test_a_run_that_skips_every_step_compares_nothing(tmp_path: Path) -> None:
    lines = [{**line, "skipped": True} if "skipped" in line else line for line in _lines()]
    verdict = judge(_write(tmp_path / "base", lines), _write(tmp_path / "head", lines))
    assert verdict == Verdict(False, "all steps are skipped in base, so no update is compared")


def test_objects_of_checkpoints_are_compared_by_value(tmp_path: Path) -> None:
    for name, rate in (("one", 0.1), ("same", 0.1), ("other", 0.2)):
        dcp.save({"weight": torch.ones(2), "groups": [{"lr": rate}]}, checkpoint_id=tmp_path / name, no_dist=True)
    one, same, other = (digests_of(tmp_path / name) for name in ("one", "same", "other"))
    assert one == same and {key for key in one if one[key] != other[key]} == {"groups.0.lr"}


def test_two_names_of_the_base_are_not_renamed_to_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "RENAMES", (("grad_norm", "lm_loss"),))
    with pytest.raises(ValueError, match="the base has both grad_norm and lm_loss"):
        _verdict_after(tmp_path, _drop("grad_norm"))


def test_a_new_case_is_not_resumed_from_a_base_that_cannot_run_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next(case for case in CASES if case.resume_at is not None)
    tree = jobs.Tree("head", tmp_path, [case])
    assert [job.needs is None for job in jobs.jobs_of(tree, tmp_path, base="base")] == [True, False]
    monkeypatch.setattr(gate_cases, "NEW_CASES", frozenset({case.name}))
    assert [job.needs is None for job in jobs.jobs_of(tree, tmp_path, base="base")] == [True]


def test_corpora_are_written_as_this_projects_reader_reads_them(tmp_path: Path) -> None:
    jobs.write_corpora(tmp_path / "data")
    for name in ("a", "b"):
        corpus = IndexedDataset(str(tmp_path / "data" / name))
        assert len(corpus) == 200 and len(corpus.document_indices) == 201
        assert all(len(tokens) >= 6 and tokens[-1] == 126 and max(tokens[:-1]) < 126 for tokens in corpus)


def test_an_exact_name_chooses_that_case_alone() -> None:
    assert [case.name for case in cases_named("layout: tp sp")] == ["layout: tp sp"]
    assert len(list(cases_named("layout: tp"))) == 1 < len(list(cases_named("layout:")))


def test_a_signal_ends_the_tool_through_its_cleanup() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        before = signal.getsignal(number)
        with pytest.raises(SystemExit) as caught, jobs.ends_on_signals():
            os.kill(os.getpid(), number)
        assert caught.value.code == 128 + number and signal.getsignal(number) is before


NEW_CASES = gate_cases.NEW_CASES  # read before the fixture clears it


def test_cases_have_names_of_their_own() -> None:
    names = [case.name for case in CASES]
    assert set(names) >= NEW_CASES
    assert len(names) == len(set(names))
    assert sum(case.resume_at is not None for case in CASES) >= len(CASES) // 4


def test_a_case_saves_where_it_is_resumed_and_restarts_from_its_own_checkpoint() -> None:
    (line,) = Case("resumed", "--bf16", resume_at=2).command_lines()
    assert line.endswith("--bf16 --tensorboard-dir {folder} --save ckpt --save-interval 2")
    first, second = Case("restarted", "--bf16", restart_at=3).command_lines()
    assert first.endswith("--save ckpt --exit-interval 3") and second.endswith("--save ckpt --load ckpt")
    resumed = Case("resumed", "--bf16", resume_at=2).resumed_command_line(Path("/base/ckpt"))
    assert resumed.endswith("--save ckpt --load /base/ckpt --ckpt-step 2")
    assert Case("script", "plain", program="fused_adam.py").command_lines() == ["plain"]


def test_a_job_that_dies_without_a_result_ends_the_worker(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    dies = {"folder": str(tmp_path / "file" / "case"), "needs": None}
    waits = {"folder": str(tmp_path / "other"), "needs": str(tmp_path / "file" / "case" / "result.json")}
    with pytest.raises(RuntimeError, match="case ended without a result, exit code 1"):
        worker.run_jobs([dies, waits], at_once=2)


def test_a_commit_that_cannot_be_read_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert same_losses.main(["no-such-commit"]) == 2
    assert "cannot read commit no-such-commit" in capsys.readouterr().err


@pytest.mark.slow
def test_a_commit_has_the_numbers_of_these_files_and_a_changed_one_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep, only = tmp_path / "kept", ["--only", "experts, grouped, bf16", "--only", "script: fused Adam, one rank"]
    assert same_losses.main(["HEAD", *only, "--keep", str(keep)]) == 0
    printed = capsys.readouterr().out
    assert "same: 6 steps" in printed and "resumed from the base's step 4" in printed
    assert "2 of 2 cases are equal" in printed
    base, head = (keep / tree / "experts_grouped_bf16" for tree in ("base", "head"))
    log = head / "steps.jsonl"
    log.write_text(log.read_text().replace('"grad_norm": 0', '"grad_norm": 1', 1))
    assert judge(base, head).text.startswith("differs from iteration 1: grad_norm")
    shutil.rmtree(head / "ckpt" / "iter_0000006")
    log.write_text((base / "steps.jsonl").read_text())
    assert "the final checkpoint differs" in judge(base, head).text
