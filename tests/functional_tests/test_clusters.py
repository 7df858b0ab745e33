"""Slurm and Kubernetes jobs that are told to end save, are requeued, continue, and are not requeued when finished."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from examples import attempt
from megatron.tools.ports import free_port
from tests.counts import soak_only
from tests.functional_tests import cluster, doomed_program, stub_launcher, stub_rank
from tests.functional_tests.cluster import Job, Pod, Receivers, container_variables
from tests.functional_tests.doomed_program import attempt_name
from tests.functional_tests.expectations import assert_same_checkpoint, assert_same_steps
from tests.functional_tests.launch import ROOT, Run, left_of, read_log, run_program

LAST, STOPPED_AT = 9, 5
SCRIPTS = ["examples/slurm.sh", "examples/models/slurm.sh"]
MANIFESTS = ["examples/kubernetes.yaml", "examples/models/kubernetes.yaml"]
KILL_WAIT = 30  # Slurm's default KillWait: seconds between SIGTERM at the time limit and SIGKILL
# Overrides the script's flags: a tiny model on two ranks.
TINY = """
    --expert-model-parallel-size 2 --num-layers 1 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2
    --num-experts 4 --moe-ffn-hidden-size 32 --seq-length 32 --max-position-embeddings 32 --global-batch-size 4
    --train-iters 6 --log-interval 1 --eval-iters 0 --hidden-dropout 0.1 --deterministic-mode
""".split()


def stub_job(
    folder: Path,
    script: str = SCRIPTS[0],
    *words: str,
    stop_at: int | None = STOPPED_AT,
    saves: bool = False,
    save_seconds: float = 0.2,
    launcher: str = f"{sys.executable} -SE {stub_launcher.__file__}",
    **how: object,
) -> Job:
    """Returns a job, by default on two nodes, whose ranks are stubs."""
    stub = {"train_iters": LAST, "stop_at": stop_at, "saves": saves, "save_seconds": save_seconds}
    env = {"STUB": json.dumps(stub), "SCALE": "tiny", "OUT": str(folder), **dict(how.pop("env", {}))}  # type: ignore[call-overload]
    program = Path(stub_rank.__file__)
    return Job(script, [*words, "--save", str(folder / "saved")], folder, program, env=env, launcher=launcher, **how)  # type: ignore[arg-type]


def saved_iteration(folder: Path) -> int:
    return attempt.progress(folder)[0]


# LEADERS and ALL differ only in the other processes of a task, so one script is enough to test both.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "receivers"),
    [(SCRIPTS[0], Receivers.LEADERS), (SCRIPTS[0], Receivers.ALL), (SCRIPTS[1], Receivers.LEADERS)],
)
def test_a_slurm_job_saves_at_its_time_limit_and_is_requeued_until_it_is_finished(
    script: str, receivers: Receivers, tmp_path: Path
) -> None:
    job = stub_job(tmp_path, script, *(["pretrain", "mixtral-8x7b"] if script == SCRIPTS[1] else []))
    job.start()
    job.wait_for_moment()
    job.reach_time_limit(receivers)
    assert left_of(job.mark) == []
    assert job.wait() == attempt.CONTINUE and job.requeues == 1, job.output
    assert saved_iteration(tmp_path / "saved") == STOPPED_AT and job.output.count("has saved") == 2
    job.start()
    assert job.wait() == 0 and job.requeues == 1, job.output
    assert saved_iteration(tmp_path / "saved") == LAST
    assert left_of(job.mark) == []


@pytest.mark.slow
def test_a_cancelled_slurm_job_saves_and_is_not_requeued(tmp_path: Path) -> None:
    job = stub_job(tmp_path)
    job.start()
    job.wait_for_moment()
    job.cancel()
    job.wait()
    assert left_of(job.mark) == []
    assert job.requeues == 0 and saved_iteration(tmp_path / "saved") == STOPPED_AT, job.output


@pytest.mark.slow
def test_a_slurm_job_whose_node_fails_is_requeued_by_slurm_and_goes_on(tmp_path: Path) -> None:
    job = stub_job(tmp_path, saves=True)
    job.start()
    job.wait_for_moment()
    assert job.fail_node(1), "--requeue is missing"
    assert left_of(job.mark) == [] and saved_iteration(tmp_path / "saved") == STOPPED_AT - 1
    job.start()
    assert job.wait() == 0 and job.requeues == 0, job.output
    assert saved_iteration(tmp_path / "saved") == LAST


@pytest.mark.slow
def test_a_save_that_outlasts_the_time_limit_is_killed_and_not_requeued(tmp_path: Path) -> None:
    # The 120 s of --signal last 1.2 s here, which is too short for the save.
    job = stub_job(tmp_path, save_seconds=cluster.SECONDS, seconds_per_second=0.01)
    job.start()
    job.wait_for_moment()
    job.reach_time_limit(Receivers.LEADERS)
    assert job.wait() != 0 and left_of(job.mark) == []
    assert job.requeues == 0 and saved_iteration(tmp_path / "saved") == 0


# test_a_real_job_ends_in_a_step_and_goes_on_bit_for_bit covers a save that ends in time.
@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "saved"), [("1", 0), soak_only("20", STOPPED_AT)])
def test_torchrun_kills_a_save_after_the_shutdown_timeout(seconds: str, saved: int, tmp_path: Path) -> None:
    job = stub_job(
        tmp_path,
        save_seconds=2.5,
        launcher=sys.executable,
        nodes=1,
        env={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": seconds},
    )
    job.start()
    job.wait_for_moment()
    job.reach_time_limit(Receivers.LEADERS)
    assert left_of(job.mark) == []
    assert saved_iteration(tmp_path / "saved") == saved and job.requeues == (saved > 0), job.output


@pytest.mark.slow
def test_continue_hands_a_signal_on_and_exports_nothing_then(tmp_path: Path) -> None:
    hub, tracker = tmp_path / "hub", tmp_path / "converted/latest_checkpointed_iteration.txt"
    hub.mkdir()
    (hub / "config.json").touch()
    tracker.parent.mkdir()
    tracker.touch()
    env = {"STEPS": "train export", "SLURM_NODEID": "0", "GPUS": "1"}
    job = stub_job(tmp_path, "examples/models/continue.sh", "mixtral-8x7b", str(hub), nodes=1, env=env)
    job.start()
    job.wait_for_moment()
    assert job.process is not None
    # The signal is sent only to the shell.
    job.process.terminate()
    assert job.wait() == 1 and left_of(job.mark) == [], job.output
    assert saved_iteration(tmp_path / "saved") == STOPPED_AT and "Converting the checkpoint for" not in job.output


@pytest.mark.slow
def test_a_pod_that_is_evicted_ends_both_and_both_are_run_again(tmp_path: Path) -> None:
    """Evicts one of two pods. Without attempt.py, torchrun on the other node would wait 300 s and then end with 0."""
    # The save lasts long enough for attempt.py to see the ranks.
    stub = {"train_iters": LAST, "stop_at": STOPPED_AT, "saves": False, "save_seconds": 2 * attempt.POLL_SECONDS}
    replaced = {"moe-0.moe": "127.0.0.1", "29500": str(free_port()), "--nproc-per-node 4": "--nproc-per-node 1"}
    pods = [
        Pod(MANIFESTS[0], index, tmp_path, Path(stub_rank.__file__), replaced, {"STUB": json.dumps(stub)})
        for index in range(2)
    ]
    cluster.make_pipe(tmp_path / "moment")
    for pod in pods:
        pod.start()
    cluster.read_moment(tmp_path / "moment", pods[1].process)
    assert pods[1].process is not None
    pods[1].process.terminate()
    try:
        codes = [pod.wait() for pod in pods]
    finally:
        left = left_of(f"{cluster.JOB}={tmp_path}")
    assert left == []
    assert codes == [attempt.CONTINUE] * 2, (tmp_path / "pod0.txt").read_text()
    assert not pods[0].counts_as_failure(codes[0], evicted=False) and saved_iteration(tmp_path / "moe") == STOPPED_AT
    for pod in pods:
        pod.start()
    assert [pod.wait() for pod in pods] == [0, 0], (tmp_path / "pod0.txt").read_text()
    assert pods[0].counts_as_failure(1, evicted=False) and not pods[0].counts_as_failure(1, evicted=True)


@pytest.mark.slow
def test_a_real_job_ends_in_a_step_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Runs two nodes with one torchrun and one rank each. Every process of the step receives the signal."""
    saved = tmp_path / "saved"
    words = [*TINY, "--save", str(saved), "--load", str(saved), "--tensorboard-dir", str(tmp_path)]
    faults = {attempt_name(): [1, 3, "SIGTERM", cluster.MOMENT]}
    job = Job(SCRIPTS[0], words, tmp_path, Path(doomed_program.__file__), env={"FAULTS": json.dumps(faults)})
    job.start()
    job.wait_for_moment()
    job.reach_time_limit(Receivers.ALL)
    assert left_of(job.mark) == []
    assert job.wait() == attempt.CONTINUE and job.requeues == 1, job.output
    page = (ROOT / "docs" / "example_slurm.md").read_text(encoding="utf-8").replace("/checkpoints/moe", str(saved))
    for line in ("  exiting at iteration 3: the exit signal", job.output.splitlines()[-1]):
        assert f"\n{line}\n" in page and f"\n{line}\n" in job.output
    assert saved_iteration(saved) == 3

    command = (tmp_path / "command").read_text()
    argv = command.splitlines()[command.splitlines().index(doomed_program.__file__) + 1 :]
    rest = run_program(argv, 2, folder=tmp_path)
    assert rest.exit_codes == [0, 0], rest.written()
    # The folder of --load is empty, as at the first start.
    whole_argv = [word.replace(str(saved), str(tmp_path / "whole/saved")) for word in argv]
    whole = run_program(whole_argv, 2, folder=tmp_path / "whole")
    assert whole.exit_codes == [0, 0], whole.written()
    assert_same_steps(Run([], read_log(tmp_path)), whole)
    assert_same_checkpoint(saved / "iter_0000006", tmp_path / "whole/saved/iter_0000006")


@pytest.mark.parametrize("script", SCRIPTS)
def test_torchruns_timeout_is_between_kill_wait_and_the_signal(script: str) -> None:
    text = (ROOT / script).read_text(encoding="utf-8")
    (signal_,) = [line.partition("@")[2] for line in text.splitlines() if line.startswith("#SBATCH --signal=TERM@")]
    (timeout,) = [
        line.partition(":-")[2].rstrip("}") for line in text.splitlines() if "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=" in line
    ]
    assert KILL_WAIT < int(timeout) < int(signal_)


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_kubernetes_waits_longer_than_torchrun(manifest: str) -> None:
    _, job = yaml.safe_load_all((ROOT / manifest).read_text(encoding="utf-8"))
    pod = job["spec"]["template"]["spec"]
    variables = container_variables(pod["containers"][0], index=1)
    timeout, grace = int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]), pod["terminationGracePeriodSeconds"]
    # attempt.py lingers after the end of torchrun.
    assert timeout + attempt.LINGER_SECONDS < grace
    # Kubernetes rejects a podFailurePolicy with any other restart policy.
    assert pod["restartPolicy"] == "Never"


def run_attempt(folder: Path, code: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-SE", str(ROOT / "examples/attempt.py"), str(folder)]
    return subprocess.run(
        [*command, sys.executable, "-SE", "-c", code, *words], capture_output=True, text=True, timeout=60, check=False
    )


def _save(folder: Path, iteration: int) -> str:
    """Returns Python code that writes a checkpoint as a run does."""
    target = folder / f"iter_{iteration:07d}"
    return f"""
import json, pathlib
folder = pathlib.Path({str(target)!r})
folder.mkdir(parents=True)
(folder / "common.json").write_text(json.dumps({{"args": {{"train_iters": {LAST}}}}}))
(folder.parent / "latest_checkpointed_iteration.txt").write_text("{iteration}")
"""


@pytest.mark.parametrize(
    ("code", "expected", "says"),
    [
        (lambda folder: _save(folder, LAST) + "raise SystemExit(1)", 0, "iteration 9 of 9: finished"),
        (lambda folder: _save(folder, 3), attempt.CONTINUE, "another attempt continues from there"),
        (
            lambda _: "raise SystemExit(3)",
            3,
            "has no checkpoint, as at the start: another attempt would make no progress",
        ),
        (lambda _: "pass", 1, "as at the start"),
        (lambda _: "import os; os.kill(os.getpid(), 9)", 137, "the command ended with -9"),
        (lambda _: f"raise SystemExit({attempt.CONTINUE})", 1, "as at the start"),
    ],
    ids=["finished", "further", "failed", "nothing saved", "killed", "a code that means something else"],
)
def test_an_attempt_tells_by_its_exit_code_whether_another_follows(
    code: Callable[[Path], str], expected: int, says: str, tmp_path: Path
) -> None:
    done = run_attempt(tmp_path, code(tmp_path))
    assert done.returncode == expected and says in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("code", "words", "expected"),
    [
        (lambda _: "raise SystemExit(3)", "", 3),
        (lambda _: "pass", "", 0),
        (lambda _: "raise SystemExit(3)", f"--train-iters {2 * LAST}", 3),
        (lambda folder: _save(folder, LAST + 1), f"--train-iters {2 * LAST}", attempt.CONTINUE),
        (lambda folder: _save(folder, LAST - 1), "", attempt.CONTINUE),
        (lambda _: "pass", f"--train-iters={LAST - 2}", 0),
    ],
    ids=["fails", "has nothing to do", "longer, fails", "longer, goes on", "begins again", "shorter"],
)
def test_an_attempt_in_the_folder_of_a_finished_run(
    code: Callable[[Path], str], words: str, expected: int, tmp_path: Path
) -> None:
    exec(_save(tmp_path, LAST), {})
    assert run_attempt(tmp_path, code(tmp_path), *words.split()).returncode == expected


def test_an_attempt_reads_the_last_value_of_a_flag() -> None:
    assert attempt.value_of(["run", "--save", "a", "--lr", "1", "--save=b"], "--save") == "b"
    assert attempt.value_of(["run", "--save-interval", "3"], "--save") is None
