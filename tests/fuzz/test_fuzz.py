"""Fuzzed inputs end right or are refused by name: never a traceback, a hang, or more memory than there is."""

import pytest

from tests.counts import long_count
from tests.fuzz.kinds import try_apart
from tests.fuzz.trials import Verdict

# 1,000 together; under `make soak` 10,000 of flags, of YAML, of indices and of checkpoints.
COUNTS = {
    "flags": (90, 10_000),
    "yaml": (200, 10_000),
    "idx": (460, 8_000),
    "cache": (50, 2_000),
    "checkpoints": (170, 9_000),
    "legacy": (30, 1_000),
}
# Of a hundred trials, this many at least get to the end: the others stop where the first check is.
LEAST_RIGHT = {"flags": 20, "yaml": 8, "idx": 20, "cache": 100, "checkpoints": 40, "legacy": 20}


@pytest.mark.parametrize("kind", list(COUNTS))
def test_every_input_is_used_right_or_refused_by_name(kind: str) -> None:
    usual, soak = COUNTS[kind]
    tally = try_apart(kind, seed=0, numbers=range(count := long_count(usual, soak=soak)))
    assert not tally.failures, f"python -m tests.fuzz {kind!r} --only NUMBER repeats one: {tally}"
    assert tally.verdicts[Verdict.RIGHT] >= count * LEAST_RIGHT[kind] // 100, tally
    assert tally.verdicts.total() == count
