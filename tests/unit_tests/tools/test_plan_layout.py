"""The layout advisor on tiny models: its proposals run, fit and are optimal, and impossible requests are reported."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pretrain_gpt
from megatron.tools import plan_layout
from tests.harness import ROOT

TINY = "--model-scale tiny --seq-length 64 --global-batch-size 32".split()


def _found(capsys: pytest.CaptureFixture[str], tmp_path: Path, *words: str) -> tuple[str, dict[str, Any]]:
    path = tmp_path / "found.json"
    plan_layout.main([*words, *TINY, "--json", str(path)])
    printed = capsys.readouterr()
    # Printed before any result, because the search may take minutes.
    assert re.match(r" +0 s: 0 of [1-9]\d* layouts compared\n", printed.err)
    return printed.out, json.loads(path.read_text())


# Fixed flags that limit the number of layouts, and so the time of the test.
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
GIVEN = {
    "llama3.2-1b": "--num-virtual-stages-per-pipeline-rank 2",
    "deepseek-v3": f"--expert-model-parallel-size 2 --use-distributed-optimizer {RECOMPUTED}",
}
SHARED = "--micro-batch-size 1 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"


@pytest.mark.slow
def test_the_program_needs_no_installation(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    program = [sys.executable, str(ROOT / "tools" / "plan_layout.py"), "--gpus", "0"]
    ended = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (2, "error: --gpus is 0: must be at least 1\n")


@pytest.mark.slow
@pytest.mark.parametrize(("model", "top"), [("llama3.2-1b", 2), ("deepseek-v3", 1)])
def test_printed_flags_keep_what_was_given_are_planned_unchanged_and_hold_what_was_said(
    model: str, top: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = [*SHARED.split(), *GIVEN[model].split()]
    text, found = _found(
        capsys, tmp_path, "--model", model, "--gpus", "8", "--memory", "100MB", "--top", str(top), *given
    )
    assert found["fitting"] > len(found["layouts"]) > 1
    assert [one["difference"] for one in found["dry_runs"]] == [0] * top
    assert max(map(len, text.splitlines())) <= 100
    assert all(one["bytes"] < one["peak"] <= 100_000_000 for one in found["dry_runs"])
    printed = re.findall(r"^\d+\. pretrain_gpt\.py (.*)$", text.replace(" \\\n   ", ""), re.MULTILINE)
    assert len(printed) == top
    for line, layout in zip(printed, found["layouts"]):
        assert line.replace("'", "") == " ".join(layout["words"])
        pretrain_gpt.main([*layout["words"], "--dry-run", "--world-size", "8"])
        assert "plan of 8 ranks" in capsys.readouterr().out
    for one in found["layouts"]:
        assert all(one["words"].count(word) == 1 for word in given if word.startswith("--"))
        assert "--num-virtual-stages-per-pipeline-rank" not in given or one["layers"] == [1, 1, 1, 1]
        assert "--use-distributed-optimizer" not in given or "distributed_fused_adam" not in one["words"]


@pytest.mark.slow
def test_no_layout_of_the_table_is_beaten_by_another(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--model", "llama3.2-1b", "--gpus", "2", "--memory", "3MB", "--keep-free", "1", "--micro-batch-size", "1"]
    text, found = _found(capsys, tmp_path, *words, "--top", "1")
    # With no memory kept free, temporary memory of passes makes some layouts exceed the limit.
    over = [one["layout"] for one in found["dry_runs"] if one["peak"] > 3_000_000]
    assert over and re.findall(r"^(\d+)\. does not fit: stage", text, re.MULTILINE) == list(map(str, over))
    assert not set(map(str, over)) & set(re.findall(r"^(\d+)\. pretrain_gpt", text, re.MULTILINE))
    layouts = found["layouts"]
    assert all(one["bytes"] <= 3_000_000 for one in layouts)
    assert [one["seconds"] for one in layouts] == sorted(one["seconds"] for one in layouts)
    for one in layouts:
        assert not any(
            other["bytes"] < one["bytes"] * 0.99 and other["seconds"] < one["seconds"] * 0.99 for other in layouts
        )


@pytest.mark.slow
def test_where_nothing_fits_the_nearest_layout_says_what_it_lacks_whatever_the_memory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_PLAN_DEVICE", "A100")
    path = tmp_path / "found.json"
    words = ["--model", "llama3.2-1b", "--gpus", "2", "--micro-batch-size", "1", *TINY, "--json", str(path)]
    words += RECOMPUTED.split()
    found = []
    for memory in (2_000, 100_000):
        with pytest.raises(SystemExit) as end:
            plan_layout.main([*words, "--memory", f"{memory // 1000}KB", "--keep-free", "1KB"])
        assert end.value.code == 1
        nearest, text = json.loads(path.read_text())["nearest"], capsys.readouterr().out
        assert " layouts of 2 x A100 compared" in text
        over = nearest["bytes"] - memory + 1000
        assert f"no layout fits: the smallest one requires {over:,} bytes" in text
        assert "--tensor-model-parallel-size 2" in text or "--pipeline-model-parallel-size 2" in text
        found.append(nearest["words"])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "llama3.2-1b"], "missing --gpus: give the number of ranks of the run"),
        (
            ["--model", "llama3.2-1b", "--gpus", "8", "--memory", "80"],
            "--memory is 80, .* add the unit, for example 80GB",
        ),
        (
            ["--model", "llama3.2-1b", "--gpus", "8", "--world-size=8"],
            "--world-size applies to .* plan of a single layout.* --gpus",
        ),
        (["--model", "llama3.2-1b", "--gpus", "8", "--json", "absent/x.json"], "--json is absent/x.json: its folder"),
        (
            ["--model", "llama3.2-1b", "--gpus", "8", "--micro-batch-size", "3"],
            "--global-batch-size is 32: must be a multiple of --micro-batch-size .3",
        ),
        (
            ["--model", "mixtral-8x7", "--gpus", "8"],
            "--model is mixtral-8x7: unknown model; did you mean mixtral-8x7b?",
        ),
        (["--model", "llama3.2-1b", "--gpus", "8", "--memory", "80 apples"], "--memory is '80 apples': must be"),
        (["--model", "llama3.2-1b", "--gpus", "0"], "--gpus is 0: must be at least 1"),
        (
            ["--model", "llama3.2-1b", "--gpus", "8", "--device", "H10"],
            "--device is H10: unknown device; did you mean H100",
        ),
        (
            ["--model", "llama3.2-1b", "--gpus", "8", "--tensor-model-parallel-size", "3"],
            "no layout uses 8 GPUs: .* given sizes: tensor 3",
        ),
        (
            ["--model", "llama3.2-1b", "--gpus", "8", "--num-virtual-stages-per-pipeline-rank", "2"],
            "--num-virtual-stages-per-pipeline-rank is given: give --pipeline-model-parallel-size as well",
        ),
        (["--model", "llama3.2-1b", "--gpus", "8", "--optimizer", "muon"], "--optimizer is muon: .* must be one of"),
    ],
)
def test_mistakes_are_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        plan_layout.main([*words, *TINY])
    assert end.value.code == 2
    assert re.search(message, capsys.readouterr().err)
