"""Fuzzed inputs are used correctly or rejected by name, without a traceback, a hang, or excessive memory."""

import pytest

from tests.counts import long_count
from tests.fuzz.engine import fuzz
from tests.fuzz.judging import Verdict
from tests.fuzz.kinds import KINDS

# Number of examples in `make test` and in `make soak`.
COUNTS = {
    "flags": (15, 10_000),
    "yaml": (60, 10_000),
    "idx": (200, 8_000),
    "cache": (25, 2_000),
    "checkpoints": (30, 9_000),
    "legacy": (15, 1_000),
}
# At least this percentage of the inputs must be accepted, since rejected inputs exercise little of the program.
LEAST_RIGHT = {"flags": 20, "yaml": 8, "idx": 20, "cache": 100, "checkpoints": 40, "legacy": 20}


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(COUNTS))
def test_every_input_is_used_right_or_refused_by_name(kind: str) -> None:
    usual, soak = COUNTS[kind]
    tally = fuzz(KINDS[kind], count=(count := long_count(usual, soak=soak)))
    assert not tally.failures, f"python -m tests.fuzz {kind} --reproduce BLOB reproduces a failure: {tally}"
    assert tally.verdicts[Verdict.RIGHT] >= count * LEAST_RIGHT[kind] // 100, tally
    assert tally.verdicts.total() == count
