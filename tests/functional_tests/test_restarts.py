"""Runs whose ranks or launchers are killed end with the losses of an undisturbed run."""

import json
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron.tools.ports import free_port
from tests.counts import long_count
from tests.functional_tests import doomed_program
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.functional_tests.doomed_program import IN_A_SAVE, attempt_name
from tests.functional_tests.expectations import assert_same_steps
from tests.functional_tests.launch import ROOT, Run, read_log, run_program

STEPS, RANKS = 12, 2
FLAGS: Flags = {
    **read_bases()["dense"],
    "hidden-dropout": 0.1,
    "train-iters": STEPS,
    "save-interval": 2,
    "eval-iters": 0,
    "eval-interval": None,
    "distributed-timeout-minutes": 1,
}
PROGRAM = f"{doomed_program.__name__}:main"


def _attempt(flags: Flags, restarts: int, folder: Path, *, faults: dict[str, list], ranks: int = RANKS) -> Run:
    """Starts the ranks as torchrun does after this number of restarts."""
    env = {"FAULTS": json.dumps(faults), "TORCHELASTIC_RESTART_COUNT": str(restarts)}
    stops = any("SIGSTOP" in fault for attempt, fault in faults.items() if attempt == attempt_name(restarts=restarts))
    # A stopped rank never ends by itself. The others end almost simultaneously, so a short grace period is enough.
    grace = 1 if stops else 20
    return run_program(command_line(flags), ranks, folder=folder, program=PROGRAM, env=env, grace=grace)


Undisturbed = Callable[..., Run]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Returns a function that runs flags without a fault. Tests with the same flags share the run."""

    @cache
    def run(words: str, ranks: int) -> Run:
        folder = tmp_path_factory.mktemp("whole")
        whole = run_program(command_line({**json.loads(words), "save": folder / "saved"}), ranks, folder=folder)
        assert whole.exit_codes == [0] * ranks, whole.written()
        return whole

    return lambda flags, *, ranks=RANKS: run(json.dumps(flags), ranks)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(long_count(1, soak=16)))
def test_killed_and_hanging_ranks_change_no_loss(seed: int, tmp_path: Path, undisturbed: Undisturbed) -> None:
    draw = random.Random(seed)
    # After a kill before the first checkpoint, the run starts from scratch.
    steps = sorted(draw.sample(range(2, STEPS - 2), 3))
    kinds = draw.sample(["SIGKILL", "SIGKILL in a save", "SIGSTOP"], 3)
    faults = {
        attempt_name(restarts=attempt): _fault(kind, step, draw=draw)
        for attempt, (step, kind) in enumerate(zip(steps, kinds))
    }
    flags = {**FLAGS, **(read_bases()["moe"] if seed % 2 else {}), "use-distributed-optimizer": True}
    flags |= {name: FLAGS[name] for name in ("train-iters", "eval-iters", "eval-interval")}
    flags["async-save"] = seed % 4 in (0, 3)
    saved = tmp_path / "saved"
    for attempt, kind in enumerate(kinds):
        run = _attempt({**flags, "save": saved}, attempt, tmp_path, faults=faults)
        assert run.exit_codes == [1] * RANKS, run.written()
        assert ("ended inside a save" in run.written()) == (kind == "SIGKILL in a save"), run.written()
    last = _attempt({**flags, "save": saved}, len(faults), tmp_path, faults=faults)
    assert last.exit_codes == [0] * RANKS, last.written()
    assert f"restart {len(faults)}: continuing from --save {saved}" in last.written()
    assert_same_steps(last, undisturbed(flags))


def _fault(kind: str, step: int, *, draw: random.Random) -> list[Any]:
    """Draws a fault on a random rank, in the backward pass of the step or in a file operation of a later save."""
    rank = draw.randrange(RANKS)
    if kind == "SIGKILL in a save":
        # Rank 0 also writes the files that exist once per checkpoint. The operations of later saves are counted, too.
        return [rank, step, "SIGKILL", f"{IN_A_SAVE}{draw.randint(1, 60 if rank == 0 else 20)}"]
    return [rank, step, kind, "self"]


@pytest.mark.slow
def test_a_restart_with_fewer_ranks_keeps_the_global_batch_and_the_order_of_data(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    # --global-batch-size is not given, and its default depends on the number of ranks.
    flags = {**FLAGS, "hidden-dropout": 0.0, "global-batch-size": None, "micro-batch-size": 2, "train-iters": 6}
    saved = tmp_path / "saved"
    first = _attempt({**flags, "save": saved}, 0, tmp_path, faults={attempt_name(): [1, 4, "SIGKILL", "self"]})
    assert first.exit_codes == [1] * RANKS, first.written()
    rest = _attempt({**flags, "save": saved}, 1, tmp_path, faults={}, ranks=1)
    assert rest.exit_codes == [0] and "--global-batch-size 4: as in the checkpoint" in rest.written(), rest.written()
    whole = undisturbed(flags)
    assert rest.steps.keys() == whole.steps.keys()
    for iteration, step in whole.steps.items():
        assert rest.steps[iteration]["lm_loss"] == pytest.approx(step["lm_loss"], rel=1e-5), iteration
        assert rest.steps[iteration]["consumed_samples"] == step["consumed_samples"]


@pytest.mark.slow
def test_a_finetuning_run_restarts_from_its_own_checkpoints(tmp_path: Path) -> None:
    flags = {**FLAGS, "train-iters": 4}
    base = run_program(command_line({**flags, "save": tmp_path / "base"}), 1, folder=tmp_path / "base")
    assert base.exit_codes == [0], base.written()
    flags |= {"load": tmp_path / "base", "finetune": True, "lr": 0.001, "override-opt-param-scheduler": True}
    faults = {attempt_name(restarts=attempt): [0, step, "SIGKILL", "self"] for attempt, step in enumerate((2, 4))}
    tuned = {**flags, "save": tmp_path / "tuned"}
    # The run is killed before its first checkpoint, and after it.
    for attempt, begins in enumerate(
        ("training starts at iteration 0", "training starts at iteration 0", "continuing")
    ):
        run = _attempt(tuned, attempt, tmp_path / "run", faults=faults, ranks=1)
        assert (run.exit_codes == [0]) == (attempt == 2) and begins in run.written(), run.written()
    whole = run_program(command_line({**flags, "save": tmp_path / "whole"}), 1, folder=tmp_path / "whole run")
    assert_same_steps(run, whole)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["setup", "evaluation", 3])
def test_a_sigterm_to_one_rank_saves_and_ends_all_in_order(
    when: str | int, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    # An evaluation has several batches, each of which sends the signal.
    flags = {**FLAGS, "train-iters": 6, "save-interval": None, "eval-interval": 2, "eval-iters": 3}
    # The save of step 3 may still be in progress.
    saving = {"save-interval": 3, "async-save": True} if when == 3 else {}
    saved, faults = tmp_path / "saved", {attempt_name(): [1, when, "SIGTERM", "self"]}
    stoppable = {**flags, **saving, "save": saved, "exit-signal-handler": True}
    stopped = _attempt(stoppable, 0, tmp_path, faults=faults)
    assert stopped.exit_codes == [0] * RANKS, stopped.written()
    last = {"setup": 0, "evaluation": 2, 3: 3}[when]
    assert f"exiting at iteration {last}: the exit signal" in stopped.written()
    assert max(stopped.steps, default=0) == last and len(stopped.validation_losses) == (when == 3)
    rest = _attempt(stoppable, 1, tmp_path, faults={})
    assert rest.exit_codes == [0] * RANKS, rest.written()
    whole = undisturbed(flags)
    assert_same_steps(rest, whole)
    assert rest.validation_losses == whole.validation_losses


@pytest.mark.slow
def test_a_store_that_hangs_with_its_rank_lets_the_others_end(tmp_path: Path) -> None:
    # Without torchrun, rank 0 hosts the store.
    flags = {**FLAGS, "train-iters": 3, "save-interval": None}
    run = _attempt(flags, 0, tmp_path, faults={attempt_name(): [0, 2, "SIGSTOP", "self"]})
    assert run.exit_codes == [1] * RANKS, run.written()
    said = "[rank 1] error: rank 0 or its node hangs: the store there does not answer; this rank was in all_reduce of"
    assert said in run.written(), run.written()


@pytest.mark.slow
def test_the_supervisor_survives_its_launcher_and_ends_what_that_left(tmp_path: Path, undisturbed: Undisturbed) -> None:
    # In the first start, the agent is killed. In the second, the rank is killed, and torchrun itself restarts it.
    faults = {
        attempt_name(): [0, 4, "SIGKILL", "agent"],
        attempt_name(starts=1): [0, 7, "SIGKILL", "self"],
    }
    saved = tmp_path / "saved"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--max-restarts", "1"]
    command += ["--monitor-interval", "0.1", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    command += [str(ROOT / "tests/functional_tests/doomed_program.py"), *command_line({**FLAGS, "save": saved})]
    # Two unrelated processes: one with the mark of a different supervised run, and one without a mark.
    strangers = [
        subprocess.Popen(["sleep", "600"], env={"SUPERVISED_RUN": "another"}),
        subprocess.Popen(["sleep", "600"]),
    ]
    try:
        finished = subprocess.run(
            [sys.executable, str(ROOT / "examples/supervise.py"), *command, "--tensorboard-dir", str(tmp_path)],
            env={
                "PATH": "/usr/bin:/bin",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
                "FAULTS": json.dumps(faults),
            },
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert all(stranger.poll() is None for stranger in strangers)
    finally:
        for stranger in strangers:
            stranger.send_signal(signal.SIGKILL)
            stranger.wait()
    written = finished.stdout + finished.stderr
    assert finished.returncode == 0, written
    assert re.search(r"ended with -9; failures since the last new checkpoint: 1\n", written), written
    assert re.search(r"ending processes of an earlier start: \d+", written), written
    assert len(re.findall(r"\] start \d:", written)) == 2, written
    assert_same_steps(Run([], read_log(tmp_path)), undisturbed(FLAGS, ranks=1))
    # No state file is left that would make a later supervisor end processes of this run.
    assert not list(saved.glob("supervisor.*.json"))


def test_the_supervisor_gives_up_on_a_command_that_gets_no_further(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit(3)", "--save", str(tmp_path / "saved")]
    finished = subprocess.run(
        [sys.executable, str(ROOT / "examples/supervise.py"), "--max-failures", "2", *command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert finished.returncode == 3 and finished.stderr.count("ended with 3") == 2, finished.stderr
    assert "giving up; the last checkpoint is none" in finished.stderr


@pytest.mark.parametrize(
    "words, state, code, said",
    [
        (["--max-failures", "0", "true", "--save", "."], "", 2, "--max-failures is 0: must be 1 or more"),
        (["true", "--save", "/dev/null/x"], "", 1, "--save /dev/null/x cannot be written"),
        (["--", "true", "--save", "."], "[1]", 0, "start 1: true --save ."),
    ],
)
def test_the_supervisor_says_what_is_wrong_with_its_words(
    words: list[str], state: str, code: int, said: str, tmp_path: Path
) -> None:
    (tmp_path / f"supervisor.{socket.gethostname()}.json").write_text(state)
    command = [sys.executable, str(ROOT / "examples/supervise.py"), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert done.returncode == code and said in done.stderr and "Traceback" not in done.stderr
