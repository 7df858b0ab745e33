"""The runner of functional cases reads, runs and compares cases of a stand-in program as specified."""

from pathlib import Path
from typing import Any

import pytest

from tests.functional_tests.case import CaseError, command_line, read_bases, read_cases
from tests.functional_tests.expectations import EXPECTATIONS, Runner

BASES = {"small": {"train-iters": 3, "lr": 1.0}, "fast": {"lr": 2.0}}


def check(tmp_path: Path, text: str) -> None:
    """Reads one case from YAML and runs it with the stand-in program."""
    path = tmp_path / "cases.yaml"
    path.write_text(text)
    (case,) = read_cases(path, BASES, set(EXPECTATIONS))
    Runner(case, tmp_path, program="tests.functional_tests.stub_program:main").check()


@pytest.mark.parametrize(
    "text",
    [
        "{name: a, base: small, expect: {steps: 3, loss_below: 0.7, validation_loss_below: 0.6}}",
        "{name: a, base: [small, fast], flags: {train-iters: 4}, processes: 2, expect: {steps: 4, same_as: {}}}",
        "{name: a, base: small, expect: {same_as: {flags: {lr: null}, processes: 2}}}",
        "{name: a, base: small, expect: {close_to: {flags: {lr: 1.001}, rtol: 0.01}}}",
        "{name: a, processes: 2, flags: {lr: wrong}, expect: {failure: {exit_code: 2, error: invalid float}}}",
    ],
)
def test_cases_that_hold(text: str, tmp_path: Path) -> None:
    check(tmp_path, f"- {text}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{name: a, base: small, expect: {steps: 4}}", "logged"),
        ("{name: a, base: small, expect: {loss_below: 0.5}}", "last losses"),
        ("{name: a, base: small, expect: {same_as: {flags: {lr: 1.0000001}}}}", "step 1"),
        ("{name: a, base: small, expect: {close_to: {flags: {lr: 1.1}, rtol: 0.01}}}", "lm_loss of step 1"),
        ("{name: a, processes: 2, flags: {stray-rank: 1}, expect: {steps: 3}}", "stray-rank is wrong"),
        (
            "{name: a, processes: 2, flags: {stray-rank: 1}, expect: {failure: {exit_code: 1, error: x}}}",
            "rank 0: exit 0",
        ),
    ],
)
def test_cases_that_do_not_hold_say_why(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=message):
        check(tmp_path, f"- {text}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a", "must be a list of cases, is dict"),
        ("- [1]", "case 1: must be a mapping with a name"),
        ("- {name: a}", r"case 1 \(a\): needs expect"),
        ("- {name: a, expect: {}}", "needs expect"),
        ("- {name: a, expects: {steps: 1}}", "'expects' is not one of base, corpora, expect"),
        ("- {name: a, expect: {same_as: {flag: {lr: 1}}}}", "same_as: 'flag' is not one of flags, processes"),
        ("- {name: a, expect: {close_to: {flags: {lr: 1}}}}", "close_to has flags: needs rtol"),
        ("- {name: a, expect: {failure: 1}}", "failure is 1: must be a mapping"),
        ("- {name: a, expect: {stepz: 1}}", "expect: 'stepz' is not one of .*close_to, differs_from"),
        ("- {name: a, base: [small, big], expect: {steps: 1}}", "base: 'big' is not one of fast, small"),
        ("- {name: a, processes: 2.5, expect: {steps: 1}}", "processes is 2.5, of type float"),
        ("- {name: a, processes: 9, expect: {steps: 1}}", "must be 1 to 8"),
        ("- {name: a, expect: {steps: 1}}\n- {name: a, expect: {steps: 1}}", "2 cases are named a"),
    ],
)
def test_a_bad_case_is_named(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(CaseError, match=rf"^cases\.yaml.*{message}"):
        check(tmp_path, text)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"bf16": True, "fp16": False, "lr": None}, ["--bf16"]),
        ({"lr": 0.1, "data-path": [1, "a", 2, "b"]}, ["--lr", "0.1", "--data-path", "1", "a", "2", "b"]),
    ],
)
def test_flags_become_words(flags: dict[str, Any], words: list[str]) -> None:
    assert command_line(flags) == words


def test_bases_share_flags_by_anchors() -> None:
    bases = read_bases()
    assert bases["moe"]["hidden-size"] == bases["dense"]["hidden-size"]
