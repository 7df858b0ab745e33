"""TRAPS B31: a rank that fails or hangs ends all other ranks, which report the rank and its failure."""

import re
import time
from pathlib import Path

import pytest

from tests.counts import soak_only
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.functional_tests.faulty_program import FAULTY_RANK, MESSAGE
from tests.functional_tests.launch import left_of, run_program, torchrun

RANKS = 3
FLAGS: Flags = {
    **read_bases()["dense"],
    "global-batch-size": 6,
    "eval-iters": 0,
    "eval-interval": None,
    "data-cache-path": ".",
}
SECONDS = 40  # limit for a run, in which a minute of the timeout lasts doomed_program.TIMEOUT_SECONDS
HANGS: Flags = {"distributed-timeout-minutes": 1}
# 30 minutes last 120 s here, so the timeout of all other cases is longer than SECONDS.
FLAGS["distributed-timeout-minutes"] = 30
KILLED = r"rank {} ended or hangs without a message \(killed\?\); this rank was in \w+"
WAITED = r"rank 1 ended or hangs without a message \(killed\?\); ranks 0, 2 waited in all_reduce number "
WAITED += r"\d+ of group world \(ranks 0, 1, 2\); this rank was in all_reduce of _sum_sync"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "code", "said", "faulty"),
    [
        ("exception", 1, rf"rank 1 failed: RuntimeError: {MESSAGE}; this rank was in \w+ of \w+", FAULTY_RANK),
        ("killed", 1, KILLED.format(FAULTY_RANK), FAULTY_RANK),
        ("chain", 1, KILLED.format(RANKS - 1), RANKS - 1),
        ("hang", 1, WAITED, FAULTY_RANK),
        ("settings", 2, "ranks were started differently: on rank 1 --lr is 0.5, not 0.01, as on rank 0, 2", None),
    ],
)
def test_b31_a_rank_that_fails_ends_and_is_named_by_all_others(
    fault: str, code: int, said: str, faulty: int | None, tmp_path: Path
) -> None:
    flags = {**FLAGS, **(HANGS if fault == "hang" else {})}
    started = time.monotonic()
    program = "tests.functional_tests.faulty_program:main"
    run = run_program(command_line(flags), RANKS, folder=tmp_path, program=program, env={"FAULT": fault}, grace=12)
    assert time.monotonic() - started < SECONDS, run.written()
    for outcome in run.outcomes:
        if outcome.rank == faulty:
            # The rank ended by itself. Otherwise the harness would have killed it.
            assert outcome.exit_code != 0 and not isinstance(outcome.error, TimeoutError), run.written()
            continue
        assert outcome.exit_code == code, run.written()
        lines = re.findall(rf"^\[rank {outcome.rank}\] error: {said}", outcome.stderr, re.MULTILINE)
        assert len(lines) == 1 and "Traceback" not in outcome.stderr, run.written()


# torchrun reports an exception and a death in the same way. The test above covers the reports of the other ranks.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "cause"), [("exception", f"RuntimeError: {MESSAGE}"), soak_only("killed", "SIGKILL")]
)
def test_torchrun_names_the_rank_and_leaves_no_process(fault: str, cause: str, tmp_path: Path) -> None:
    script = "tests/functional_tests/faulty_program.py"
    flags = {**FLAGS, "global-batch-size": 4}
    mark = {"FAULT": fault, "RUN_OF_THE_TEST": str(tmp_path)}
    process = torchrun(command_line(flags), 2, cwd=tmp_path, script=script, env=mark)
    process.wait(60)
    written = (tmp_path / "output.txt").read_text()
    assert process.returncode != 0
    assert re.search(rf"rank *: {FAULTY_RANK} ", written) and cause in written, written
    assert left_of(f"RUN_OF_THE_TEST={tmp_path}") == []
