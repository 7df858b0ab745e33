"""compare_runs.py: the first difference between runs, its field, and its size."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron.tools import compare_runs
from megatron.tools.report_figures import run_names
from megatron.tools.run_log import read_run


def write_run(folder: Path, steps: range, *, flags: dict | None = None, **changed: dict[int, object]) -> Path:
    """Writes a log with values that depend only on the step. changed: value by step for each overridden field."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for step in steps:
        record = {"iteration": step, "lm_loss": 5 + 1 / step, "grad_norm": 1 / step, "learning_rate": 1e-3 * step}
        record |= {"consumed_samples": 4 * step, "skipped": False, "seconds": len(folder.name) / step}
        record |= {name: values[step] for name, values in changed.items() if step in values}
        lines.append(json.dumps(record))
    (folder / "steps.jsonl").write_text("\n".join(lines) + '\n{"iteration": 99, "lm_l')
    if flags is not None:
        (folder / "run.json").write_text(json.dumps({"flags": flags, "environment": {"torch": "2.13"}}))
    return folder


@pytest.mark.parametrize(
    "changed, rtol, status, expected",
    [
        ({}, 0, 0, ["All 20 common steps are bitwise equal"]),
        (
            {"lm_loss": {7: 5.2, 9: 5.5}, "grad_norm": {7: 1.0}, "seconds": {1: 99.0}},
            0,
            1,
            [
                "diverge at iteration 7, first in lm_loss; the 6 common steps before it",
                "grad_norm: 0.142857",
                "2 of 20",
            ],
        ),
        ({"lm_loss": {8: 1.0}, "learning_rate": {8: 0.5}}, 0, 1, ["diverge at iteration 8, first in learning_rate"]),
        ({"lm_loss": {8: 5.125 * (1 + 1e-9)}}, 1e-6, 0, ["diverge at iteration 8", "1.00e-09"]),
        ({"lm_loss": {8: 5.125 * (1 + 1e-5)}}, 1e-6, 1, ["1.00e-05"]),
        ({"lm_loss": {8: "NaN"}}, 1e6, 1, ["lm_loss: 5.125 | nan (relative inf)"]),
        (
            {"grad_norm": {8: "Infinity"}, "z_loss": {3: 1.0}},
            1e6,
            1,
            ["Fields only in B: z_loss", "first in grad_norm"],
        ),
    ],
)
def test_runs_part_where_the_first_number_differs(tmp_path: Path, capsys, changed, rtol, status, expected) -> None:
    a = write_run(tmp_path / "one", range(1, 21))
    b = write_run(tmp_path / "another", range(1, 21), **changed)
    assert compare_runs.main([str(a), str(b), "--rtol", str(rtol)]) == status
    printed = capsys.readouterr().out
    assert [text for text in expected if text not in printed] == [], printed


def test_common_steps_count_and_the_others_are_named(tmp_path: Path, capsys) -> None:
    nan = {"lm_loss": {5: "NaN"}}
    a = write_run(tmp_path / "a", range(1, 11), flags={"seed": 1, "lr": 0.1}, **nan)
    b = write_run(tmp_path / "b", range(3, 31), flags={"seed": 1, "lr": 0.2, "new": None}, **nan)
    assert compare_runs.main([str(a), str(b)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "All 8 common steps" in printed and "Only in A: 2 steps (1 to 2) Only in B: 20 steps (11 to 30)" in printed
    assert "flags lr 0.1 0.2" in printed and "flags new not set None" in printed and "torch" not in printed
    assert compare_runs.main([str(a), str(write_run(tmp_path / "c", range(40, 45)))]) == 1
    assert "The logs have no step in common" in capsys.readouterr().out
    assert compare_runs.main([str(a), str(tmp_path)]) == 2
    assert "contains 3 runs: give one of" in capsys.readouterr().err


def test_a_step_logged_twice_counts_as_it_was_last(tmp_path: Path) -> None:
    path = write_run(tmp_path, range(1, 7)) / "steps.jsonl"
    path.write_text(path.read_text().rpartition("\n")[0] + '\n{"iteration": 3, "lm_loss": 1.5}\nnonsense\n[1]\n')
    run = read_run(path)
    assert run.steps.tolist() == [1, 2, 3, 4, 5, 6] and run.series["lm_loss"].values[2] == 1.5
    assert run.num_unreadable == 2


def test_a_console_log_of_megatron_is_a_log_too(tmp_path: Path, capsys) -> None:
    text = "".join(
        f" [2026-01-01 00:00:00] iteration {n:8}/      20 | consumed samples: {4 * n:12} | elapsed time per iteration"
        f" (ms): 13.5 | throughput per GPU (TFLOP/s/GPU): 3.1 | learning rate: {1e-3 * n:.6E} | global batch size: 4 | "
        f"lm loss: {5 + 1 / n:.6E} | mtp_1 loss: {math.nan:.6E} | "
        f"loss scale: 1.0 | grad norm: {1 / n:.3f} | number of nan iterations:   0 |\n"
        for n in range(1, 6)
    )
    validation = " validation loss at iteration 5 on test set | lm loss value: 5.1E+00 | lm loss PPL: 1.6E+02 |\n"
    (tmp_path / "m.log").write_text(f"using world size: 1\n{text}{validation}")
    run = read_run(tmp_path / "m.log")
    assert run.steps.tolist() == [1, 2, 3, 4, 5] and run.series["test_loss"].values.tolist() == [5.1]
    assert np.isnan(run.series["mtp_1_loss"].values).all() and run.series["seconds"].values[0] == 0.0135
    assert run_names([run, replace(run, path=tmp_path / "n.log")]) == ["m.log", "n.log"]
    ours = write_run(tmp_path / "ours", range(1, 6))
    assert compare_runs.main([str(ours), str(tmp_path / "m.log"), "--rtol", "3e-3"]) == 0
    assert "first in lm_loss" in capsys.readouterr().out
