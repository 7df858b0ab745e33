"""Comparisons of losses: their gaps, their sides, and the committed results."""

import json
import math
from pathlib import Path

import pytest

from benchmarks import fp8_loss, paired_losses, stash_loss
from benchmarks.paired_losses import CONTROL, FLAGS, Comparison, Gap
from tests.structure.measure import ROOT

COMPARISONS = {"stash_loss": stash_loss.COMPARISON, "fp8_loss": fp8_loss.COMPARISON}
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*_loss_cpu.json"))


def test_the_gap_of_pairs_is_the_mean_of_their_relative_differences_in_percent() -> None:
    gap = Gap.of([1.01, 2.04, 4.12], [1, 2, 4])
    half = 4.303 * 1 / math.sqrt(3)  # 1, 2 and 3 percent have the standard deviation 1
    assert gap == pytest.approx((2, 2 - half, 2 + half))


@pytest.mark.parametrize("name", COMPARISONS)
def test_sides_have_the_flags_of_their_comparison_and_equal_seeds(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison, runs = COMPARISONS[name], []

    def loss(flags: list[str], *, steps: int) -> float:
        runs.append((" ".join(flags), steps))
        return 3.0 + int(flags[-1]) / 8

    monkeypatch.setattr(paired_losses, "prepare", lambda folder: ["--data-path", str(folder)])
    monkeypatch.setattr(paired_losses, "validation_loss", loss)
    written = tmp_path / "losses.json"
    monkeypatch.setattr("sys.argv", [name, "--seeds", "2", "--folder", "text", "--json", str(written)])
    with pytest.raises(SystemExit) as ended:
        paired_losses.run(comparison, "A title.")
    assert ended.value.code == 0
    expected = [
        f"{FLAGS} {comparison.flags} --data-path text {own} --seed {seed}"
        for seed in (1, 2)
        for own in comparison.sides.values()
    ]
    assert sorted((flags.split(), steps) for flags, steps in runs) == sorted(
        (flags.split(), comparison.steps) for flags in expected
    )
    record = json.loads(written.read_text())
    assert record["losses"] == dict.fromkeys(comparison.sides, [3.125, 3.25])
    assert record["gaps"] == {side: dict.fromkeys(Gap._fields, 0.0) for side in [*comparison.sides][1:]}
    judged = [line for line in capsys.readouterr().out.splitlines() if line.startswith("PASS")]
    assert len(judged) == len(comparison.sides) - 2, "all but the reference and the control"


def test_a_side_above_the_target_fails_but_not_the_control(monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = Comparison("", {"plain": "--a", "bad": "--b", CONTROL: "--c"}, 0.5, seeds=2, steps=10)
    losses = {"--a": 2.0, "--b": 2.0, "--c": 2.0}
    monkeypatch.setattr(paired_losses, "prepare", lambda folder: [])
    monkeypatch.setattr(paired_losses, "validation_loss", lambda flags, *, steps: losses[flags[-3]])
    monkeypatch.setattr("sys.argv", ["losses"])
    for side, code in (("--c", 0), ("--b", 1)):
        losses[side] = 2.02
        with pytest.raises(SystemExit) as ended:
            paired_losses.run(comparison, "A title.")
        assert ended.value.code == code


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_committed_results_belong_to_their_losses_and_hold_the_target(path: Path) -> None:
    comparison, record = COMPARISONS[path.stem.removesuffix("_cpu")], json.loads(path.read_text())
    assert record["steps"] == comparison.steps
    assert list(record["losses"]) == list(comparison.sides)
    assert {len(of_side) for of_side in record["losses"].values()} == {comparison.seeds}
    for side, gap in comparison.gaps(record["losses"]).items():
        assert record["gaps"][side] == pytest.approx(gap._asdict())
        assert side == CONTROL or gap.upper <= comparison.target_percent
