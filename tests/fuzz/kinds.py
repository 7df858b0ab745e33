"""The kinds of fuzzed inputs by name, tried in processes of their own."""

import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.fuzz.checkpoints import CheckpointFuzzer
from tests.fuzz.flags import FlagFuzzer
from tests.fuzz.index_files import IndexCacheFuzzer, IndexFuzzer
from tests.fuzz.legacy_files import LegacyFuzzer
from tests.fuzz.trials import Fuzzer, Tally, limit_memory, try_all
from tests.fuzz.yaml_files import YamlFuzzer
from tests.harness import launch_on_ranks

KINDS: dict[str, Callable[[Path], Fuzzer]] = {
    "flags": lambda _: FlagFuzzer(),
    "yaml": lambda _: YamlFuzzer(),
    "idx": lambda _: IndexFuzzer(),
    "cache": lambda _: IndexCacheFuzzer(),
    "checkpoints": CheckpointFuzzer,
    "legacy": LegacyFuzzer,
}
# Trials of one process: torch leaves some threads of each run behind.
_TRIALS_AT_ONCE = 100
_PATIENCE_SECONDS = 300.0
# What a launcher sets, as the harness does: a trial is a process that nobody launched.
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def try_apart(kind: str, *, seed: int, numbers: range, most_failures: int = 3) -> Tally:
    """As try_all, in processes whose memory is limited; one that dies or hangs is a failure of the trial it was at."""
    whole, first = Tally(), numbers.start
    with tempfile.TemporaryDirectory(prefix="fuzz-shared-") as shared:
        while first < numbers.stop and len(whole.failures) < most_failures:
            part = range(first, min(first + _TRIALS_AT_ONCE, numbers.stop))
            tally, first = _try_in_process(kind, seed, numbers=part, shared=Path(shared))
            whole.verdicts += tally.verdicts
            whole.failures |= tally.failures
    return whole


def _try_in_process(kind: str, seed: int, *, numbers: range, shared: Path) -> tuple[Tally, int]:
    """What became of the trials, and with which to go on."""
    outcome = launch_on_ranks(_try_some, 1, kind, seed, numbers, shared, backend=None, timeout=_PATIENCE_SECONDS)[0]
    if outcome.value is not None:
        return outcome.value, numbers.stop
    begun = re.findall(r"^trial (\d+)$", outcome.stderr, re.MULTILINE)
    last = int(begun[-1]) if begun else numbers.stop - 1
    return Tally(failures={last: f"{outcome.error!r}\n{outcome.stderr[-3000:]}"}), last + 1


def _try_some(kind: str, seed: int, numbers: range, shared: Path) -> Tally:
    for name in _LAUNCHER:
        os.environ.pop(name, None)
    fuzzer = KINDS[kind](shared)
    limit_memory()
    return try_all(fuzzer, seed=seed, numbers=numbers)
