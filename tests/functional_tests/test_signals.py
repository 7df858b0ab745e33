"""Runs under torchrun that a signal ends continue later with identical results, and leave no process behind."""

import json
from pathlib import Path

import pytest

from tests.counts import soak_only
from tests.functional_tests import doomed_program
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.functional_tests.doomed_program import IN_A_SAVE, attempt_name
from tests.functional_tests.expectations import assert_same_checkpoint, assert_same_steps
from tests.functional_tests.launch import left_of, read_log, run_program, torchrun

STEPS, RANKS = 6, 2
# Data workers, and a background save that is in progress whenever the run ends.
BUSY: Flags = {"num-workers": 2, "async-save": True, "save-interval": 1, "eval-iters": 0}
SCRIPT = str(Path(doomed_program.__file__))
# A cluster ends a job by a signal to the launcher, which forwards it to the ranks. In `make test`,
# test_clusters.py::test_a_real_job_ends_in_a_step_and_goes_on_bit_for_bit covers this on two nodes.
TERMINATED = [1, 4, "SIGTERM", "agent"], {"exit-signal-handler": True}
# The launcher ends the other rank. In `make test`, test_restarts.py::test_killed_and_hanging_ranks_change_no_loss kills
# ranks and restarts the runs itself.
KILLED = [1, 4, "SIGKILL", "self"], {"save-interval": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    "base, fault, flags",
    [
        soak_only("moe", *TERMINATED),
        soak_only("dense", *TERMINATED),
        soak_only("moe", *KILLED),
        soak_only("dense", *KILLED),
    ],
)
def test_a_signalled_run_goes_on_bit_for_bit(base: str, fault: list, flags: Flags, tmp_path: Path) -> None:
    shared = {**read_bases()[base], "train-iters": STEPS, "eval-interval": STEPS, "hidden-dropout": 0.1}
    whole = run_program(command_line({**shared, "save": tmp_path / "whole/saved"}), RANKS, folder=tmp_path / "whole")
    assert whole.exit_codes == [0] * RANKS, whole.written()

    saved, parts = tmp_path / "saved", tmp_path / "parts"
    argv = command_line({**shared, **flags, "save": saved, "load": saved})
    parts.mkdir()
    process = torchrun(
        [*argv, "--tensorboard-dir", str(parts)],
        RANKS,
        cwd=parts,
        script=SCRIPT,
        env={"FAULTS": json.dumps({attempt_name(): fault}), "RUN_OF_THE_TEST": str(tmp_path)},
    )
    try:
        process.wait(120)
    finally:
        left = left_of(f"RUN_OF_THE_TEST={tmp_path}")
    assert left == []
    written = (parts / "output.txt").read_text(errors="replace")
    assert 2 <= len({line["iteration"] for line in read_log(parts)}) < STEPS, written
    assert int((saved / "latest_checkpointed_iteration.txt").read_text()) >= 2, written

    rest = run_program(argv, RANKS, folder=parts)
    assert rest.exit_codes == [0] * RANKS, rest.written()
    assert_same_steps(rest, whole)
    last = f"iter_{STEPS:07d}"
    assert_same_checkpoint(saved / last, tmp_path / "whole/saved" / last)


# Soak only. test_torchrun_names_the_rank_and_leaves_no_process and the test above cover errors and signals, and every
# call of run_program, which looks for processes that outlive the ranks, covers the other ends.
@pytest.mark.parametrize(
    ("fault", "flags", "code"),
    [
        soak_only(None, {}, 0),
        soak_only([1, 4, "SIGTERM", "self"], {}, 1),
        soak_only([1, 4, "SIGTERM", "self"], {"exit-signal-handler": True}, 0),
        soak_only([1, 4, "SIGTERM", "agent"], {}, 1),
        soak_only([1, 4, "SIGKILL", "self"], {}, 1),
        soak_only([1, 4, "SIGKILL", f"{IN_A_SAVE}9"], {}, 1),
        soak_only([1, 4, "SIGSTOP", "self"], {"distributed-timeout-minutes": 1}, 1),
    ],
)
def test_no_process_outlives_a_run_with_workers_and_saves(
    fault: list | None, flags: Flags, code: int, tmp_path: Path
) -> None:
    words = {**read_bases()["dense"], **BUSY, "train-iters": STEPS, "eval-interval": None, "save": tmp_path / "saved"}
    env = {"FAULTS": json.dumps({} if fault is None else {attempt_name(): fault}), "RUN_OF_THE_TEST": str(tmp_path)}
    process = torchrun(command_line({**words, **flags}), RANKS, cwd=tmp_path, script=SCRIPT, env=env)
    try:
        process.wait(120)
    finally:
        left = left_of(f"RUN_OF_THE_TEST={tmp_path}")
    assert left == [] and process.returncode == code, (tmp_path / "output.txt").read_text(errors="replace")
