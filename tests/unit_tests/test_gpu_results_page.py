"""docs/gpu_results.md and the README's state of GPUs: what records and causes say about claims, and times of steps."""

import json
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.evidence import (
    EVIDENCE,
    JOURNAL,
    Cause,
    Claim,
    Evidence,
    Item,
    Outcome,
    Rerun,
    read,
    runs_of,
)
from benchmarks.gpu.journal import Verdict
from benchmarks.gpu.protocol import INCOMPLETE
from benchmarks.gpu.registry import CHECKS
from benchmarks.gpu.results_page import PAGE, PLAIN_HAS_LESS, README, RESULTS, STAND_INS, TABLES, main, page, readme
from benchmarks.gpu.results_tables import tables
from tests.structure.measure import ROOT

MOST_WORDS = 2100
OLD, NEW = "aaaaaaaaaaaa", "bbbbbbbbbbbb"
TEST = "tests/gpu/test_rings.py::test_rings[1]"
CLAIM = Claim("rings keep all pages", "Stash", (Item("small", None), Item("tests", "*test_rings.py*")))


def lines_of(
    check: str, verdict: str | None, *results: dict, commit: str = OLD, is_dry: bool = False, status: int = 1
) -> str:
    """Returns the journal's lines of one execution. verdict: None if its runner was killed."""
    where = {"date": "2026-12-01", "device": "NVIDIA H200", "torch": "2.13.0", "commit": commit, "dry_run": is_dry}
    known = {"check": check, "run": uuid.uuid4().hex, "where": where, "time": "2026-12-01T10:00:00"}
    lines = [{"kind": "result", "side": one.get("side"), "results": one, **known} for one in results]
    end = {"kind": "verdict", "verdict": verdict, "exit_status": status, **known}
    return "".join(json.dumps(one) + "\n" for one in [*lines, *([end] if verdict else [])])


def passed(check: str, commit: str = OLD) -> str:
    return lines_of(check, "passed", commit=commit, status=0)


def failed(check: str, *tests: str, **kwargs: Any) -> str:
    return lines_of(check, "failed", {"failures": dict.fromkeys(tests, "E  1 == 2")}, **kwargs)


def cause(kind: str = "test", *, rerun: str | None = None, pattern: str | None = None) -> Cause:
    again = Rerun(rerun, "the case", "2026-12-02", "cccccccccccc") if rerun else None
    return Cause((Item("small", None), Item("tests", pattern)), (OLD[:8],), kind, "it sorted ids", again)


def evidence(folder: Path, lines: Sequence[str], *causes: Cause, shapes: Sequence[str] = ()) -> Evidence:
    (folder / JOURNAL).write_text("".join(lines))
    return Evidence(
        runs_of(folder / JOURNAL),
        [CLAIM],
        causes,
        tests_of_unlisted_runs={"tests": [TEST.partition("[")[0]]},
        headlines=shapes,
        numbers={"ceilings": "Ceilings"},
    )


def outcome(folder: Path, lines: Sequence[str], *causes: Cause) -> Outcome:
    return evidence(folder, lines, *causes).decide(CLAIM).outcome


def test_page_tables_and_readme_are_what_the_program_writes() -> None:
    found, hint = read(RESULTS), "run benchmarks/gpu/results_page.py"
    assert PAGE.read_text(encoding="utf-8") == page(found), hint
    assert TABLES.read_text(encoding="utf-8") == tables(RESULTS, found), hint
    assert README.read_text(encoding="utf-8") == readme(README.read_text(encoding="utf-8"), found), hint


def test_a_page_with_all_sections_is_short(tmp_path: Path) -> None:
    assert len(PAGE.read_text(encoding="utf-8").split()) <= MOST_WORDS
    (tmp_path / JOURNAL).write_text((RESULTS / JOURNAL).read_text() + "".join(run_of_call_a()))
    assert len(page(read(tmp_path)).split()) <= MOST_WORDS


def test_evidence_names_checks_and_kernels_that_exist() -> None:
    found = read(RESULTS)
    names = {check.name for check in CHECKS} | {run.check for run in found.runs}
    used = {item.check for one in [*found.claims, *found.causes] for item in one.items} | {*found.measurements}
    assert used - names == set()
    launched = [
        text.removeprefix("def ").partition("(")[0]
        for path in (ROOT / "megatron").rglob("triton_*.py")
        for text in path.read_text().splitlines()
        if text.startswith("def ") and text.partition("(")[0].endswith("_kernel")
    ]
    assert sorted(launched) == sorted(kernel for claim in found.claims for kernel in claim.kernels)


def test_the_newest_run_that_covers_a_claim_decides(tmp_path: Path) -> None:
    other = failed("tests", "tests/gpu/test_other.py::test_it", commit=NEW)
    assert outcome(tmp_path, []) is Outcome.NOT_YET
    assert outcome(tmp_path, [passed("small")]) is Outcome.PASSED
    assert outcome(tmp_path, [passed("small"), failed("tests", TEST, commit=NEW)]) is Outcome.FAILED
    assert outcome(tmp_path, [failed("small", TEST), passed("tests", NEW)]) is Outcome.PASSED
    assert outcome(tmp_path, [failed("small", TEST), other]) is Outcome.PASSED
    assert outcome(tmp_path, [passed("small"), lines_of("small", "timed out")]) is Outcome.TIMED_OUT
    # A dry run, a killed runner, a missing tool and a lack of time decide nothing.
    ignored = [failed("small", TEST, is_dry=True), lines_of("small", None, {"passed": 1})]
    ignored += [lines_of("small", verdict) for verdict in ("not checked here", "not run: no time left", "interrupted")]
    assert outcome(tmp_path, ignored) is Outcome.NOT_YET
    assert outcome(tmp_path, [passed("small"), *ignored]) is Outcome.PASSED


@pytest.mark.parametrize("ran", [passed("tests"), failed("tests", "tests/gpu/test_other.py::test_it")])
def test_a_run_that_lists_no_tests_shows_nothing_about_tests_that_it_did_not_contain(tmp_path: Path, ran: str) -> None:
    found = evidence(tmp_path, [ran])
    never = Claim("pages are never lost", "Stash", (Item("tests", "*test_that_never_existed*"),))
    assert (found.decide(CLAIM).outcome, found.decide(never).outcome) == (Outcome.PASSED, Outcome.NOT_YET)
    # What did not come to its end is open for all tests that the check may have.
    assert evidence(tmp_path, [lines_of("tests", "timed out")]).decide(never).outcome is Outcome.TIMED_OUT


def test_old_runs_contained_what_claims_take_from_them() -> None:
    found = read(RESULTS)
    for check, tests in found.tests_of_unlisted_runs.items():
        for claim in found.claims:
            for item in claim.items:
                assert item.check != check or any(item.matches(test) for test in (None, *tests)), item


def test_a_run_of_tests_that_crashed_passes_none_of_them(tmp_path: Path) -> None:
    assert outcome(tmp_path, [failed("tests", "tests/gpu/test_other.py::test_it", status=-11)]) is Outcome.FAILED
    assert outcome(tmp_path, [lines_of("small", "failed")]) is Outcome.FAILED


@pytest.mark.parametrize(
    ("kind", "rerun", "expected"),
    [
        ("test", "passed", Outcome.RERUN),
        ("test", None, Outcome.TEST_WRONG),
        ("test", "failed", Outcome.FAILED),
        ("code", "passed", Outcome.RERUN),
        ("code", None, Outcome.FAILED),
        ("machine", "partly", Outcome.PARTLY),
    ],
)
def test_a_cause_changes_the_verdict_only_of_its_runs(tmp_path: Path, kind: str, rerun: str, expected: Outcome) -> None:
    known = cause(kind, rerun=rerun)
    assert outcome(tmp_path, [failed("small", TEST)], known) is expected
    assert outcome(tmp_path, [failed("small", TEST, commit=NEW)], known) is Outcome.FAILED
    # One of two failures has no cause.
    one = cause(kind, rerun=rerun, pattern="*[[]1[]]")
    two = failed("tests", TEST, TEST.replace("1", "2"))
    assert outcome(tmp_path, [two], one) is Outcome.FAILED
    assert outcome(tmp_path, [lines_of("small", "timed out")], known) in (expected, Outcome.TIMED_OUT)


def test_a_wrong_test_is_named_in_the_row_of_its_claim(tmp_path: Path) -> None:
    rerun = page(evidence(tmp_path, [failed("small", TEST)], cause(rerun="passed")))
    row = "| rings keep all pages | passed when rerun (the case, cccccccc) | failed at aaaaaaaa; "
    assert (
        f"{row}**the test was wrong**: it sorted ids |" in rerun
        and "**failed**" not in rerun
        and "1 of 1 claims" in rerun
    )
    later = page(evidence(tmp_path, [failed("small", TEST), passed("tests", NEW)], cause()))
    assert "| rings keep all pages | passed (`tests`, bbbbbbbb) | failed at aaaaaaaa; **the test was wrong**" in later
    unknown = page(evidence(tmp_path, [failed("small", TEST)]))
    assert (
        "| **failed** (`small`, aaaaaaaa) |" in unknown and f"- Failed: rings keep all pages (`{TEST}`).\n" in unknown
    )


def test_a_check_without_a_claim_has_a_row(tmp_path: Path) -> None:
    assert "| `unheard_of` | **failed** (`unheard_of`, aaaaaaaa) |" in page(
        evidence(tmp_path, [lines_of("unheard_of", "failed")])
    )


def test_damaged_and_foreign_lines_are_skipped(tmp_path: Path) -> None:
    whole = passed("small")
    assert len(evidence(tmp_path, ["{", "\n", "[1]\n", "{}\n", whole, whole[:-9]]).runs) == 1


def side(name: str, shape: str, ms: float) -> dict[str, Any]:
    return {"side": name, "shape": shape, "ms": ms, "tokens_s": 1e6 / ms, "mfu": 30 / ms, "reserved_gib": 24.25}


SHAPES = {
    "qwen_short": "Qwen3-30B-A3B, short",
    "qwen_4096": "Qwen3-30B-A3B",
    "stack48": "Qwen3-30B-A3B, one rank of EP 8",
    "deepseek": "DeepSeek-V3",
    "local_graphs": "Qwen3-30B-A3B, short",
}


def run_of_call_a() -> list[str]:
    """Returns made-up lines of each section of call A."""
    times = {"plain PyTorch": 160.0, "eager dropless": 400.0, "graph": 75.0, "graph + stash, optimizer": 80.0}
    names = {"stack48": [*times][1:], "deepseek": [*times][1::2], "local_graphs": ["eager static"]}
    times |= {"eager static": 480.0}
    sides = {
        check: [side(name, shape, times[name]) for name in names.get(check, times)] for check, shape in SHAPES.items()
    }
    missed = {"name": "time of the stash", "measured": 0.5, "limit": 0.4, "is_least": False, "holds": False}
    met = {"name": "reserved bytes", "measured": 1.01, "limit": 1.05, "is_least": False, "holds": True}
    ceilings = [{"side": "copy", "gb_s": 4100.0}, {"side": "aten operator", "host_us": 4.0, "us": 4.5}]
    name = "void at::native::copy_kernel_{}<float, Loader<4>>(int, float*)"
    kernels = [{"kernel": name.format(n), "count": n, "us": 9e3 - n, "gb_s": 100.0 * n} for n in range(30)]
    profile = {"side": "graph", "phase": "profile", "kernels": kernels, "busy_ms": 70.0, "span_ms": 74.0}
    full = {"side": "static", "shape": SHAPES["stack48"], "error": "OutOfMemoryError: 2 | 1", "out_of_memory": True}
    late = {"side": "local graphs", "shape": SHAPES["local_graphs"], "skipped": "not started: 3 s left"}
    warm = [{"side": name, "shape": SHAPES["local_graphs"], "phase": "warm-up"} for name in ("graph", "static")]
    broken = {"side": "static", "shape": SHAPES["deepseek"], "error": "TritonError: a | b"}
    return [
        lines_of("ceilings", "failed", *ceilings, {"side": "graph node", "error": "x"}, commit=NEW),
        lines_of("qwen_short", "failed", {"shape": SHAPES["qwen_short"]}, *sides["qwen_short"], commit=NEW),
        lines_of("qwen_short", "failed", {"shape": SHAPES["qwen_short"], "targets": [missed, met]}, commit=NEW),
        lines_of("qwen_4096", "passed", *sides["qwen_4096"], profile, commit=NEW, status=0),
        lines_of("stack48", "passed", *sides["stack48"], {**full, "predicted_gib": 150.2}, commit=NEW, status=0),
        lines_of("deepseek", "timed out", *sides["deepseek"], broken, commit=NEW),
        lines_of("local_graphs", None, *sides["local_graphs"], late, *warm, commit=NEW),
    ]


def test_times_of_steps_are_on_the_page_and_in_the_readme(tmp_path: Path) -> None:
    shapes = [SHAPES["qwen_short"], SHAPES["stack48"]]
    assert "**not yet** timed" in page(evidence(tmp_path, [passed("small")], shapes=shapes))
    found = evidence(tmp_path, run_of_call_a(), shapes=shapes)
    text = page(found)
    row = "| graph + stash, optimizer | 80.0 | 12,500 | 37.5% | 24.2 | 0.50 |"
    assert text.count(row) == 2  # where plain PyTorch was measured too
    assert all(f"| {name} | eager" in text for name in ("DeepSeek-V3", "Qwen3-30B-A3B, short (local_graphs)"))
    assert "not yet** timed" not in text and "Ceilings: copy 4,100 GB/s; aten operator 4.5 us." in text
    assert "Failed: graph node." in text
    assert "|  | static | out of memory (predicted 150 GiB) |" in text
    assert "|  | static | failed: TritonError: a / b |" in text
    assert "| Qwen3-30B-A3B, short: time of the stash | 0.5 | <= 0.4 | **no** |" in text
    assert "device was busy for 70.0 of 74.0 ms" in text and "| `copy_kernel_3` | 3 | 8,997 | 300 |  |" in text
    assert "copy_kernel_4" not in text and "copy_kernel_29" in tables(tmp_path, found)


def test_the_page_and_the_readme_say_once_that_other_ranks_are_stand_ins(tmp_path: Path) -> None:
    eager = evidence(tmp_path, [lines_of("qwen_short", "passed", side("eager", SHAPES["qwen_short"], 417.0))])
    assert readme_of(eager).count(f"{STAND_INS}.") == one_line(page(eager)).count(f"{STAND_INS}.") == 1
    both = evidence(tmp_path, run_of_call_a(), shapes=[SHAPES["qwen_short"], SHAPES["stack48"]])
    sentence = f"{STAND_INS}{PLAIN_HAS_LESS}."
    assert readme_of(both).count(sentence) == one_line(page(both)).count(sentence) == 1
    assert "stand-ins" not in page(evidence(tmp_path, [passed("small")]))


def one_line(text: str) -> str:
    return " ".join(text.replace("\n> ", " ").split())


def readme_of(found: Evidence) -> str:
    names = ("status", "throughput", "libraries")
    return one_line(readme("".join(f"<!-- gpu:{name} --><!-- /gpu:{name} -->" for name in names), found))


def test_code_that_no_gpu_has_run_is_named_until_one_has(tmp_path: Path) -> None:
    assert "\nPrepared launches and RoPE kernels have not run on a GPU yet.\n" in page(read(RESULTS))
    heads = "tests/gpu/test_kernels_against_reference.py::test_normalized_and_rotated_heads[1]"
    (tmp_path / JOURNAL).write_text(lines_of("kernels", "passed", {"side": heads, "outcome": "passed"}, status=0))
    assert "\nPrepared launches have not run on a GPU yet.\n" in page(read(tmp_path))


def test_the_page_of_another_folder_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["results_page.py", str(tmp_path)])
    with pytest.raises(SystemExit):
        main()
    assert "has no checks.jsonl" in capsys.readouterr().err
    (tmp_path / JOURNAL).write_text("".join(run_of_call_a()))
    main()
    assert capsys.readouterr().out == page(read(tmp_path)) and [*tmp_path.iterdir()] == [tmp_path / JOURNAL]


def test_what_failed_is_listed_as_open(tmp_path: Path) -> None:
    opened = page(evidence(tmp_path, run_of_call_a())).partition("## What is open")[2].partition("## What works")[0]
    assert "- Failed: DeepSeek-V3, static: TritonError: a / b.\n" in opened
    assert "- Not started: Qwen3-30B-A3B, short, local graphs.\n" in opened
    assert "- Target missed: Qwen3-30B-A3B, short: time of the stash.\n" in opened
    assert [name for name in SHAPES if f"Not complete: measurement `{name}`" in opened] == ["deepseek", "local_graphs"]
    assert "reserved bytes" not in opened and "OutOfMemory" not in opened  # met, and allowed


def test_a_measurement_with_sides_that_were_not_started_is_open(tmp_path: Path) -> None:
    late = [{"side": "graph", "shape": SHAPES["stack48"], "skipped": "not started: 3 s left"}]
    target = {"name": "memory", "measured": None, "limit": 0.95, "is_least": False, "holds": False}
    lines = [
        lines_of("stack48", Verdict.INCOMPLETE, *late, {"targets": [target]}, status=INCOMPLETE),
        lines_of(
            "ceilings", Verdict.INCOMPLETE, {"side": "copy", "skipped": "not started: 1 s left"}, status=INCOMPLETE
        ),
        lines_of("small", Verdict.INCOMPLETE, status=INCOMPLETE),
    ]
    found = evidence(tmp_path, lines)
    text = page(found)
    assert found.decide(CLAIM).outcome is Outcome.NOT_YET
    assert all(f"- Not complete: measurement `{name}` at aaaaaaaa.\n" in text for name in ("stack48", "ceilings"))
    assert "| stack48: memory | not measured | <= 0.95 | open |" in text and "Not started: copy." in text
    assert "- Target not measured: stack48: memory.\n" in text and "Target missed" not in text


def test_the_readmes_parts_follow_from_the_evidence(tmp_path: Path) -> None:
    names = ("status", "throughput", "libraries")
    marks = "".join(f"<!-- gpu:{name} -->PREVIOUS<!-- /gpu:{name} -->" for name in names)
    before = readme(f"a {marks} z", evidence(tmp_path, [], shapes=[SHAPES["qwen_short"]]))
    assert "Nothing has run on a GPU yet" in before and "have not been timed" in before.replace("\n> ", " ")
    found = evidence(tmp_path, run_of_call_a(), shapes=[SHAPES["qwen_short"], SHAPES["stack48"]])
    words = " ".join(readme(before, found).replace("\n> ", " ").split())
    rates = "12,500 tokens/s, 38% MFU, 24.2 GiB reserved"
    assert (
        f"{SHAPES['qwen_short']}, with the stash, took 80 ms, 0.50 times the time of plain PyTorch ({rates})." in words
    )
    assert f"one NVIDIA H200: {rates}](docs/gpu_results.md#how-fast)" in words and "DeepSeek" not in words
    assert words.startswith("a ") and words.endswith(" z") and "PREVIOUS" not in words
    assert "have not been timed" not in words
    with pytest.raises(ValueError, match="gpu:status"):
        readme("no marks", found)


def test_a_side_is_replaced_by_its_next_whole_measurement(tmp_path: Path) -> None:
    old, new = ([lines_of("4096", "passed", side("graph", "4096 tokens", ms))] for ms in (90.0, 70.0))
    unfinished = lines_of("4096", None, {"side": "graph", "shape": "4096 tokens", "phase": "warm-up"})
    (ours,) = evidence(tmp_path, [*old, *new, unfinished]).sides()
    assert ours.ms == 70.0
    # Times taken by hand are shown until a check measures the shape.
    (tmp_path / EVIDENCE).write_text((RESULTS / EVIDENCE).read_text())
    assert [one.ms for one in read(tmp_path).sides()] == [417, 480, 734, 70.0]
    evidence(tmp_path, [lines_of("qwen_short", "passed", side("graph", SHAPES["qwen_short"], 70.0))])
    assert [one.ms for one in read(tmp_path).sides()] == [70.0]
