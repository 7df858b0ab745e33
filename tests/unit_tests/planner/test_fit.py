"""The line of a plan about whether it fits its device, and the flags that make it fit."""

import html
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

import pretrain_gpt
from megatron.planner.fit import Change, Fit, changes_of, fit_of
from megatron.training.arguments import read_run_config
from megatron.training.compute.devices import FILE_VARIABLE, NAME_VARIABLE, planned_device
from megatron.training.config import RunConfig
from tests.counts import soak_only
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.unit_tests.planner.plans import planned

GIB = 2**30
ALWAYS = {"global-batch-size": 8}
ZERO_1, ZERO_2 = ("--use-distributed-optimizer",), ("--optimizer", "distributed_fused_adam", "--overlap-grad-reduce")

# Prints the plan for a device of `memory` bytes, like the command line, and returns the line about the fit.
Verdict = Callable[..., str]


def words_of(base: str, flags: Flags, *, ranks: int) -> list[str]:
    return [*command_line({**read_bases()[base], **ALWAYS, **flags}), "--dry-run", "--world-size", str(ranks)]


def arguments(base: str, flags: Flags, *, ranks: int) -> RunConfig:
    return read_run_config(words_of(base, flags, ranks=ranks))


def peak(base: str, flags: Flags, *, ranks: int) -> int:
    return max(stage.memory.peak for stage in planned(base, {**ALWAYS, **flags}, ranks=ranks)[0].stages)


@pytest.fixture
def verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Verdict:
    def said(base: str, flags: Flags, *, ranks: int, memory: int, further: tuple[str, ...] = ()) -> str:
        entry = {**asdict(planned_device({})), "memory_gib": memory / GIB}
        (tmp_path / "devices.yaml").write_text(yaml.safe_dump({entry.pop("name") + " mine": entry}))
        monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "devices.yaml"))
        monkeypatch.setenv(NAME_VARIABLE, "H100 mine")
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        pretrain_gpt.main([*words_of(base, flags, ranks=ranks), "--tensorboard-dir", str(tmp_path), *further])
        out = capsys.readouterr().out
        (line,) = [one for one in out.splitlines() if one.startswith(("fits ", "does NOT fit "))]
        return line

    return said


def document(folder: Path) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads((folder / "plan.json").read_text())["fit"]
    return found


def shown(folder: Path) -> str:
    """Returns the notice of the page as displayed text."""
    text = re.search(r'<p class="notice (good|bad)">(.*?)</p>', (folder / "plan.html").read_text(), flags=re.DOTALL)
    assert text is not None
    words = html.unescape(re.sub("<[^>]*>", "", text[2])).split()
    return f"{text[1]}: {' '.join(words)}"


def suggestion(line: str) -> tuple[tuple[str, ...], float]:
    found = re.search(r"; fits with (.*?) \(([\d.]+) GiB", line)
    assert found is not None, line
    return tuple(found[1].split()), float(found[2])


def needed(line: str) -> float:
    found = re.search(r": ([\d.]+) of [\d.]+ GiB per rank", line)
    assert found is not None, line
    return float(found[1])


def test_a_plan_with_room_fits_on_the_console_in_the_file_and_on_the_page(verdict: Verdict, tmp_path: Path) -> None:
    line = verdict("dense", {}, ranks=2, memory=2 * GIB)
    size = peak("dense", {}, ranks=2)
    assert line == f"fits H100 mine: {size / GIB:.4f} of 2.0 GiB per rank"
    found = document(tmp_path)
    assert found["line"] == line and found["fits"] and (found["peak"], found["memory"]) == (size, 2 * GIB)
    assert shown(tmp_path) == f"good: {line}"


def test_a_tight_fit_is_reported(verdict: Verdict) -> None:
    line = verdict("dense", {}, ranks=2, memory=int(peak("dense", {}, ranks=2) * 1.05))
    assert line.endswith("GiB per rank (less than 10% left for the CUDA context and the allocator)"), line


# Flags, and a change with which they fit. A plan may suggest a different change, which must fit, too.
WIDE = {"hidden-size": 128, "overlap-grad-reduce": True}
LONG = {"seq-length": 256, "max-position-embeddings": 256, "use-distributed-optimizer": True}
NEEDS = {
    "replicas": ("dense", WIDE, {"use-distributed-optimizer": True}),
    "sharded states": (
        "dense",
        LONG,
        {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1},
    ),
    "experts": (
        "moe",
        LONG | {"moe-token-dispatcher-type": "alltoall"},
        {"recompute-granularity": "selective", "recompute-modules": ["layernorm", "moe"]},
    ),
    "parts": (
        "dense",
        LONG | {"recompute-granularity": "selective", "recompute-modules": "layernorm"},
        {"recompute-modules": ["layernorm", "mlp"]},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name if name != "parts" else soak_only(name) for name in NEEDS])
def test_suggested_flags_make_the_plan_fit(name: str, verdict: Verdict, tmp_path: Path) -> None:
    base, flags, change = NEEDS[name]
    before, after = (peak(base, one, ranks=4) for one in (flags, {**flags, **change}))
    memory = (before + after) // 2
    line = verdict(base, flags, ranks=4, memory=memory)
    assert line.startswith("does NOT fit H100 mine: ") and needed(line) == pytest.approx(before / GIB, abs=1e-4)
    words, told = suggestion(line)
    assert document(tmp_path)["line"] == line and shown(tmp_path) == f"bad: {line}"
    assert document(tmp_path)["change"]["words"] == list(words)
    again = verdict(base, flags, ranks=4, memory=memory, further=words)
    assert again.startswith("fits ") and needed(again) == told, again


@pytest.mark.slow
def test_a_plan_that_never_fits_names_the_smallest_change(verdict: Verdict, tmp_path: Path) -> None:
    line = verdict("dense", {}, ranks=2, memory=GIB // 10_000)
    found = re.search(
        r"; even with (.*), the smallest option found, it needs ([\d.]+) GiB: use more GPUs or a larger --tensor", line
    )
    assert found is not None and line.endswith("(tools/plan_layout.py FLAGS --gpus N finds a layout)"), line
    words = tuple(found[1].split())
    again = verdict("dense", {}, ranks=2, memory=GIB, further=words)
    assert needed(again) == float(found[2]) < needed(line)


def test_given_flags_are_not_suggested() -> None:
    plain, one, two = (
        [" ".join(words) for words in changes_of(arguments("dense", flags, ranks=2))]
        for flags in ({}, {"use-distributed-optimizer": True}, {"optimizer": "distributed_fused_adam"})
    )
    assert plain[:2] == [" ".join(ZERO_1), " ".join(ZERO_2)]
    assert one[0] == " ".join(ZERO_2) and not any(ZERO_1[0] in words for words in one)
    assert not any(ZERO_1[0] in words or ZERO_2[1] in words for words in two)
    # One rank cannot shard, full recompute leaves nothing to add, and an evaluation saves nothing for backward.
    full = {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
    assert list(changes_of(arguments("dense", full, ranks=1))) == [("--optimizer-cpu-offload",)]
    assert list(changes_of(arguments("dense", {"skip-train": True, "load": "nowhere"}, ranks=2))) == []


def test_a_stash_is_suggested_and_given_recompute_modules_are_kept() -> None:
    flags = {"recompute-granularity": "selective", "recompute-modules": "core_attn"}
    every = list(changes_of(arguments("moe", flags, ranks=1)))
    assert ("--moe-expert-rank-capacity-factor", "2", "--moe-paged-stash") in every
    modules = [words[words.index("--recompute-modules") + 1] for words in every if "--recompute-modules" in words]
    assert modules and set(modules) == {"core_attn"}
    assert not any("full" in words for words in every)


def test_the_fullest_stage_is_named_where_stages_differ() -> None:
    plan, _ = planned("dense", {**ALWAYS, "pipeline-model-parallel-size": 2}, ranks=4)
    peaks = [stage.memory.peak for stage in plan.stages]
    assert peaks[0] != peaks[1]
    fit, stage = fit_of(plan, planned_device({})), plan.stages[peaks.index(max(peaks))]
    assert fit.line.endswith(f"GiB per rank, most on stage {stage.stage} (rank {stage.rank})") and fit.fits


def test_a_plan_is_compared_with_the_chosen_device() -> None:
    plan, _ = planned("dense", ALWAYS)
    lines = [fit_of(plan, planned_device({NAME_VARIABLE: name})).line for name in ("H100", "H200", "A100")]
    memory = [planned_device({NAME_VARIABLE: name}).memory_gib for name in ("H100", "H200", "A100")]
    assert [re.sub(r" [\d.]+ of", " X of", line) for line in lines] == [
        f"fits {name}: X of {size:.1f} GiB per rank"
        for name, size in zip(("H100", "H200", "A100"), memory, strict=True)
    ]


def test_a_line_has_sizes_change_and_advice() -> None:
    fit = Fit("H100", int(79.6 * GIB), int(95.8 * GIB), change=Change(ZERO_1, int(61.2 * GIB)))
    assert fit.line == (
        "does NOT fit H100: 95.8 of 79.6 GiB per rank; fits with --use-distributed-optimizer (61.2 GiB)"
    )
    close = Fit("H100", int(79.6 * GIB), int(95.8 * GIB), change=Change(ZERO_1, int(75 * GIB)))
    assert close.line.endswith("(75.0 GiB, less than 10% left for the CUDA context and the allocator)")
    nothing = Fit("H100", int(79.6 * GIB), int(95.8 * GIB), advice="use more GPUs")
    assert nothing.line.endswith("; no flag lowers it without changing the training result: use more GPUs")
