"""The trials themselves: what crashes, hangs, takes memory, lies or dies is a failure, and the rest goes on."""

import random
import sys
import time
from collections import Counter

from megatron.training.errors import exit_on_user_error
from tests.fuzz import kinds, trials
from tests.fuzz.index_files import IndexFuzzer
from tests.fuzz.trials import Tally, Verdict, judged
from tests.harness import RankOutcome, run_on_ranks


class Faulty:
    """Trials of which some fail, by their number."""

    def draw(self, rng, folder):
        (folder / "file").touch()
        self.number = getattr(self, "number", -1) + 1
        return self.number

    def judge(self, case, folder):
        assert (folder / "file").exists()
        return judged(lambda: FAULTS.get(case, lambda: None)(), folder)


def refuse():
    with exit_on_user_error():
        raise ValueError("--lr is 0: must be more")


def hang():
    while True:
        time.sleep(0.01)


FAULTS = {
    1: refuse,
    2: lambda: 1 / 0,
    3: hang,
    4: lambda: bytearray(2 * trials.LIMIT_BYTES),
    5: lambda: sys.exit(1),  # without a word
    6: lambda: print("error: a\nerror: b", file=sys.stderr) or sys.exit(2),
    7: lambda: sys.exit(3),
}


def try_faulty(numbers):
    trials.LIMIT_SECONDS = 0.5
    trials.limit_memory()
    return trials.try_all(Faulty(), seed=0, numbers=numbers)


def test_what_crashes_hangs_takes_memory_or_ends_without_a_word_is_a_failure():
    tally = run_on_ranks(try_faulty, 1, range(9), backend=None)[0]
    assert tally.verdicts == {Verdict.RIGHT: 2, Verdict.REFUSED: 1}
    errors = {
        2: "ZeroDivisionError",
        3: "Hang: not done",
        4: "MemoryError",
        5: "exit code 1",
        6: "exit code 2",
        7: "exit code 3",
    }
    assert tally.failures.keys() == errors.keys()
    assert all(error in tally.failures[number] for number, error in errors.items())


def test_a_process_that_dies_is_a_failure_of_its_trial_and_the_next_ones_are_tried(monkeypatch):
    begun = []

    def launch(fn, _, kind, seed, numbers, *args, **options):
        begun.append(numbers)
        if len(begun) == 1:
            return [RankOutcome(0, error=ChildProcessError("killed"), stderr="trial 0\ntrial 1\nterminate called\n")]
        return [RankOutcome(0, value=Tally(Counter({Verdict.RIGHT: len(numbers)})))]

    monkeypatch.setattr(kinds, "launch_on_ranks", launch)
    tally = kinds.try_apart("idx", seed=0, numbers=range(5))
    assert begun == [range(5), range(2, 5)] and tally.verdicts.total() == 3
    assert "killed" in tally.failures[1] and "terminate called" in tally.failures[1]


def test_a_trial_depends_on_seed_and_number_alone(tmp_path):
    def drawn(seed, number):
        folder = tmp_path / f"{seed} {number} {len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        return str(IndexFuzzer().draw(random.Random(f"{seed} {number}"), folder))

    assert drawn(1, 7) == drawn(1, 7) and len({drawn(1, 7), drawn(1, 8), drawn(2, 7)}) == 3
