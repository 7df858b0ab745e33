"""The fuzzing engine finds each kind of failure, shrinks it, and reproduces it from its blob."""

import os
import re
import sys
import time
from functools import partial

import pytest

from megatron.training.errors import exit_on_user_error
from tests.fuzz import judging
from tests.fuzz.engine import fuzz, reproduce
from tests.fuzz.judging import Verdict, judged
from tests.harness import run_on_ranks


class NumberFuzzer:
    """Draws numbers below 1,000 and writes them to a file. The program calls `fault` for numbers from 10 on."""

    def __init__(self, _shared, *, fault):
        self._fault = fault

    def draw(self, choices, folder):
        number = choices.below(1000)
        (folder / "file").write_text(str(number))
        return number

    def check(self, case, folder):
        assert (folder / "file").read_text() == str(case)
        return judged(self._fault if case >= 10 else lambda: None, folder)


def refuse():
    with exit_on_user_error():
        raise ValueError("--lr is 0: must be more")


def divide_by_zero():
    1 / 0  # noqa: B018


def die():
    os.write(2, b"terminate called\n")
    os._exit(3)


def end(status, *lines):
    print(*lines, sep="\n", file=sys.stderr)
    sys.exit(status)


RATE, SEED = "error: --lr is 0: must be more", "error: --seed is -1: must not be negative"


def verdict_under_limits(fault, limits, folder):
    """Judges `fault` as the engine judges an example, with limits that are short enough for a test."""
    judging.LIMIT_SECONDS, judging.LIMIT_BYTES = limits
    judging.limit_memory()
    with judging.time_limit():
        return judged(fault, folder)


def hang():
    while True:
        time.sleep(0.01)


def take_memory():
    bytearray(2 << 30)


@pytest.mark.parametrize(
    "fault, error",
    [
        (divide_by_zero, "ZeroDivisionError"),
        (partial(end, 1), "exit code 1"),
        (partial(end, 1, RATE, SEED), "exit code 1"),
        (partial(end, 2, RATE, RATE), "AssertionError: error: --lr is 0"),
        (partial(end, 2, "usage: pretrain_gpt.py"), "exit code 2"),
        (partial(end, 3), "exit code 3"),
    ],
    ids=["crash", "no error", "two errors of a run", "a mistake told twice", "no mistake told", "unknown status"],
)
def test_a_failure_is_shrunk_and_its_blob_reproduces_it(fault, error):
    factory = partial(NumberFuzzer, fault=fault)
    (report,) = fuzz(factory, count=100).failures
    assert error in report and re.search(r"input: 10\n", report), report
    (repeated,) = reproduce(factory, blob=report.rpartition("--reproduce ")[2]).failures
    assert error in repeated and re.search(r"input: 10\n", repeated), repeated


def test_a_process_that_dies_is_a_failure_of_the_example_it_was_at():
    tally = fuzz(partial(NumberFuzzer, fault=die), count=100)
    (report,) = tally.failures
    number = re.search(r"exit code 3.*\n(\d+)\nterminate called", report)
    assert number is not None and int(number[1]) >= 10, report


@pytest.mark.parametrize("refusal", [refuse, partial(end, 2, RATE, SEED)], ids=["one mistake", "two mistakes"])
def test_a_refusal_is_no_failure_and_every_example_has_a_verdict(refusal):
    tally = fuzz(partial(NumberFuzzer, fault=refusal), count=100)
    assert not tally.failures and tally.verdicts.total() == 100
    assert tally.verdicts[Verdict.REFUSED] > 50 and tally.verdicts[Verdict.RIGHT] > 0


@pytest.mark.parametrize("fault, error", [(hang, "hangs: not done after 0.2 s"), (take_memory, None)])
def test_hangs_and_huge_allocations_are_errors(tmp_path, fault, error):
    with pytest.raises((TimeoutError, MemoryError), match=error):
        run_on_ranks(verdict_under_limits, 1, fault, (0.2, 1 << 30), tmp_path, backend=None)


def test_examples_depend_on_the_seed_and_not_on_the_environment(monkeypatch):
    def drawn(seed):
        return str(fuzz(partial(NumberFuzzer, fault=die), count=1000, seed=seed))

    first = drawn(1)
    monkeypatch.setenv("CI", "" if "CI" in os.environ else "true")
    assert first == drawn(1) != drawn(2)
