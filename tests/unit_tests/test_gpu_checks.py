"""The runner of `make gpu`: outcomes of checks, result files after a kill, and each check's entry and time limit.

Runners are separate processes, because they adopt orphans and wait for all of their children.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.gpu.checks.device_events import Span, busy_microseconds, longest_gaps
from benchmarks.gpu.journal import Journal, Record, Verdict, Where
from benchmarks.gpu.registry import CALL_SECONDS, CHECKS, EACH, NUM_CALLS, Check, State
from benchmarks.gpu.results_page import page, state_of
from tests.gpu.test_replays_on_gpu import is_forbidden
from tests.harness import run_on_ranks
from tests.structure.measure import ROOT

GRACE = 0.4
START = """
import sys
from benchmarks.gpu import process_tree, run_all
from benchmarks.gpu.registry import Check
process_tree.GRACE_SECONDS, process_tree.LEAVE_SECONDS = {grace}, {grace}
run_all.LEAST_SECONDS = 2 * {grace}
run_all.main([
    Check(name, call, "part", "", words, limit, "", is_elastic=name == "elastic")
    for name, call, words, limit in {checks!r}
])
"""
# Name, call, command and limit.
Fake = tuple[str, int, str, float]


def runner_of(checks: Sequence[Fake], folder: Path, *options: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", START.format(grace=GRACE, checks=list(checks)), "--dry-run", "--out", str(folder)]
    return subprocess.Popen(
        [*words, *options], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ
    )


def run(checks: Sequence[Fake], folder: Path, *options: str) -> tuple[int, list[Record]]:
    """Runs checks to the end, and returns the exit status and the records of the results file."""
    process = runner_of(checks, folder, *options)
    output, _ = process.communicate(timeout=60)
    records = Journal(folder).read()
    assert len(records) == len((folder / "checks.jsonl").read_text().splitlines()), output
    return process.returncode, records


def program(folder: Path, name: str, text: str) -> str:
    """Writes a Python program with this text, and returns the command that runs it."""
    path = folder / f"{name}.py"
    path.write_text(text)
    return f"{sys.executable} -X faulthandler {path}"


def until(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition was never met"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def pids_in(path: Path) -> list[int]:
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def test_limits_of_a_call_sum_up_to_nine_minutes_and_parts_come_in_order() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    for call in range(1, NUM_CALLS + 1):
        assert 0.8 * CALL_SECONDS <= sum(check.limit for check in CHECKS if check.call == call) <= CALL_SECONDS
    calls = [check.call or NUM_CALLS + 1 for check in CHECKS]
    assert calls == sorted(calls)
    names = " ".join(check.name for check in CHECKS)
    first = "environment launch_threads pinned_access capture_streams nccl_in_capture kernels_pages"
    assert names.startswith(first)
    steps = "stash_late_streams eager_steps full_graph module_order forced_growth"
    assert f"{steps} copy_points products product_beside_copies sanitizer_memcheck" in names


def test_each_kernel_that_is_launched_has_a_small_case() -> None:
    launched = {
        line.removeprefix("def ").partition("(")[0]
        for path in (ROOT / "megatron").rglob("triton_*.py")
        for line in path.read_text().splitlines()
        if line.startswith("def ") and line.partition("(")[0].endswith("_kernel")
    }
    assert launched == {kernel for check in CHECKS if check.part == EACH for kernel in check.kernels}


def collected(selections: Sequence[Sequence[str]]) -> list[int]:
    class Count:
        def pytest_collection_finish(self, session: pytest.Session) -> None:
            counts.append(len(session.items))

    counts: list[int] = []
    for selection in selections:
        assert pytest.main(["-q", "--collect-only", "-p", "no:cacheprovider", *selection], plugins=[Count()]) == 0
    return counts


@pytest.mark.slow
def test_each_check_that_runs_tests_finds_some() -> None:
    commands = {check.name: check.command(Path(), is_dry=False) for check in CHECKS}
    marker = "benchmarks.gpu.checks.pytest_run"
    selections = {name: words[words.index(marker) + 1 :] for name, words in commands.items() if marker in words}
    (counts,) = run_on_ranks(collected, 1, list(selections.values()), backend=None)
    found = dict(zip(selections, counts, strict=True))
    assert all(found.values()) and all(found[check.name] <= 8 for check in CHECKS if check.name.startswith("kernels"))


def test_the_runner_works_where_torch_does_not() -> None:
    code = "import sys; sys.modules['torch'] = None; import benchmarks.gpu.run_all"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_each_end_has_its_verdict_and_output_and_numbers_are_kept(tmp_path: Path) -> None:
    numbers = program(
        tmp_path, "numbers", """print("seen"); print('RESULT {"x": 2}'); print('RESULT {"y": 3, "x": 1}')"""
    )
    checks = [
        ("good", 1, numbers, 9),
        ("bad", 1, "false", 9),
        ("unable", 1, f"{sys.executable} -c exit(77)", 9),
        ("needy", 2, f"{sys.executable} -c exit(76)", 9),
        ("crashed", 2, program(tmp_path, "crashed", "import os; os.kill(os.getpid(), 11)"), 9),
        ("endless", 3, "tail -f /dev/null", GRACE),
    ]
    status, records = run(checks, tmp_path)
    assert status == 1
    assert {record.check: record.verdict.value for record in records} == {
        "good": "passed",
        "bad": "failed",
        "unable": "not checked here",
        "needy": "needs a GPU",
        "crashed": "failed",
        "endless": "timed out",
    }
    assert [record.exit_status for record in records] == [0, 1, 77, 76, -11, -2]
    assert records[0].output == ["seen"] and records[0].results == {"x": 1, "y": 3}
    assert not (tmp_path / "running.json").exists()


OUTCOMES = """
import pytest
def test_passes(): pass
def test_fails(): assert 1 == 2
def test_skips(): pytest.skip("why")
"""


@pytest.mark.slow
def test_a_check_that_runs_tests_reports_their_outcomes(tmp_path: Path) -> None:
    (tmp_path / "test_outcomes.py").write_text(OUTCOMES)
    run_tests = f"python benchmarks.gpu.checks.pytest_run --rootdir {ROOT} {tmp_path}/test_outcomes.py"
    _, (everything, skipped) = run([("all", 1, run_tests, 60), ("skipped", 1, f"{run_tests} -k skips", 60)], tmp_path)
    assert (everything.verdict, skipped.verdict) == (Verdict.FAILED, Verdict.NEEDS_GPU)
    counts = {name: everything.results[name] for name in ("passed", "failed", "skipped")}
    assert counts == {"passed": 1, "failed": 1, "skipped": 1}
    ((name, text),) = everything.results["failures"].items()
    assert name.endswith("test_fails") and "assert 1 == 2" in text


STUBBORN = """
import os, signal, subprocess, sys, time
folder = sys.argv[1]
rank = '''
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
if os.fork():
    os._exit(0)  # the grandchild belongs to nobody
os.setsid()
open(sys.argv[1] + "/pids", "a").write(f"{os.getpid()} ")
time.sleep(600)
'''
for environment in (None, {}):
    subprocess.Popen([sys.executable, "-c", rank, folder], start_new_session=True, env=environment).wait()
open(folder + "/pids", "a").write(f"{os.getpid()} ")
try:
    time.sleep(float(sys.argv[2]))
except KeyboardInterrupt:
    open(folder + "/interrupted", "w").close()
    raise
"""


@pytest.mark.parametrize("outlived", [False, True])
def test_descendants_in_sessions_of_their_own_end_with_their_check(tmp_path: Path, outlived: bool) -> None:
    command = f"{program(tmp_path, 'stubborn', STUBBORN)} {tmp_path} {0 if outlived else 600}"
    status, (record,) = run([("stubborn", 1, command, 60 if outlived else 3 + GRACE)], tmp_path)
    pids = pids_in(tmp_path / "pids")
    assert len(pids) == 3 and not any(map(is_alive, pids))
    assert record.orphans == 2
    # SIGINT was sent first, and Python printed the traceback.
    assert (tmp_path / "interrupted").exists() is not outlived
    assert any("time.sleep(float" in line for line in record.output) is not outlived
    assert (record.verdict, status) == ((Verdict.PASSED, 0) if outlived else (Verdict.TIMED_OUT, 1))


HANGING_RANK = """
import faulthandler, os, signal, subprocess, sys, time
rank = '''
import faulthandler, os, signal, time
faulthandler.register(signal.SIGUSR1)
print("ready", flush=True)
def waits_for_another_rank():
    time.sleep(600)
waits_for_another_rank()
'''
with open(sys.argv[1] + "/rank.stderr", "w") as errors:
    process = subprocess.Popen([sys.executable, "-c", rank], start_new_session=True, stderr=errors)
process.wait()
"""


def test_ranks_that_hang_show_their_stacks_though_they_write_to_files(tmp_path: Path) -> None:
    command = f"{program(tmp_path, 'hanging', HANGING_RANK)} {tmp_path}"
    _, (record,) = run([("hanging", 1, command, 2 + GRACE)], tmp_path)
    assert record.verdict is Verdict.TIMED_OUT
    assert any("waits_for_another_rank" in line for line in record.output), record.output


def test_a_check_shows_the_stacks_of_all_threads_when_it_is_interrupted(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(
        "import threading, time\n"
        "def in_a_thread(): time.sleep(600)\n"
        "threading.Thread(target=in_a_thread, daemon=True).start()\n"
        "time.sleep(600)\n"
    )
    command = f"env PYTHONPATH={tmp_path}:{ROOT} {sys.executable} -m benchmarks.gpu.checks.launch hangs"
    _, (record,) = run([("hangs", 1, command, 2 + GRACE)], tmp_path)
    text = "\n".join(record.output)
    assert "in_a_thread" in text and "KeyboardInterrupt" in text


SLOW = "import os, sys, time; open(sys.argv[1], 'a').write(f'{os.getpid()} '); time.sleep(0.15)"


@pytest.fixture
def four(tmp_path: Path) -> list[Fake]:
    slow = program(tmp_path, "slow", SLOW)
    return [(name, 1 + place // 2, f"{slow} {tmp_path}/ran.{name}", 9) for place, name in enumerate("abcd")]


@pytest.mark.parametrize("moment", ["a runs", "c runs", "b has ended"])
def test_a_runner_that_is_killed_anywhere_leaves_whole_lines_and_is_resumed(
    tmp_path: Path, four: list[Fake], moment: str
) -> None:
    name, running = moment[0], tmp_path / "running.json"
    process = runner_of(four, tmp_path)
    if moment.endswith("runs"):
        until(lambda: pids_in(tmp_path / f"ran.{name}"))
        assert json.loads(running.read_text())["check"] == name
    else:
        until(lambda: any(record.check == name for record in Journal(tmp_path).read()))
    process.kill()
    process.communicate()
    # The program is killed together with its runner.
    until(lambda: not any(is_alive(pid) for _, _, words, _ in four for pid in pids_in(Path(words.split()[-1]))))
    path = tmp_path / "checks.jsonl"
    ended = [json.loads(line)["check"] for line in path.read_text().splitlines()] if path.exists() else []
    assert ended == list("abcd")[: len(ended)]
    with open(path, "a") as stream:
        stream.write('{"check": "torn')
    status, records = run(four, tmp_path, "--resume")
    assert status == 0
    assert [record.check for record in records if record.verdict is Verdict.PASSED] == list("abcd")
    assert all(len(pids_in(tmp_path / f"ran.{one}")) == 1 for one in ended)


def test_orphans_of_a_killed_runner_end_when_the_next_one_starts(tmp_path: Path) -> None:
    command = f"{program(tmp_path, 'stubborn', STUBBORN)} {tmp_path} 600"
    process = runner_of([("stubborn", 1, command, 60)], tmp_path)
    until(lambda: len(pids_in(tmp_path / "pids")) == 3)
    process.kill()
    process.communicate()
    pids = pids_in(tmp_path / "pids")
    until(lambda: sum(map(is_alive, pids)) == 2)  # the program is killed together with its runner
    status, records = run([("next", 1, "true", 9)], tmp_path, "--resume")
    verdicts = [(record.check, record.verdict.value) for record in records]
    assert verdicts == [("stubborn", "interrupted"), ("next", "passed")]
    assert records[0].orphans == 1 and status == 0
    # The remaining process has no marker variable and no parent, so the runner cannot attribute it to a check.
    (unmarked,) = filter(is_alive, pids)
    os.kill(unmarked, signal.SIGKILL)


def test_a_runner_that_is_told_to_end_ends_its_check_and_says_so(tmp_path: Path) -> None:
    command = f"{program(tmp_path, 'stubborn', STUBBORN)} {tmp_path} 600"
    process = runner_of([("stubborn", 1, command, 60), ("next", 1, "true", 9)], tmp_path)
    until(lambda: len(pids_in(tmp_path / "pids")) == 3)
    process.terminate()
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 1, output
    assert not any(map(is_alive, pids_in(tmp_path / "pids")))
    assert [(record.check, record.verdict.value) for record in Journal(tmp_path).read()] == [
        ("stubborn", "interrupted")
    ]


def test_a_call_that_runs_out_of_time_leaves_the_rest_to_the_next_one(tmp_path: Path, four: list[Fake]) -> None:
    status, records = run(four, tmp_path, "--call", "1", "--minutes", "0")
    assert status == 1 and {record.verdict for record in records} == {Verdict.NO_TIME}
    status, records = run(four, tmp_path, "--call", "2", "--resume")
    assert status == 0
    assert [(record.check, record.verdict.value) for record in records[2:]] == [(name, "passed") for name in "abcd"]
    # No check is left to run, unless source files have changed.
    assert len(run(four, tmp_path, "--resume")[1]) == len(records)
    path = tmp_path / "checks.jsonl"
    path.write_text(path.read_text().replace(records[-1].where.files, "0123456789abcdef"))
    assert len(run(four, tmp_path, "--resume")[1]) == len(records) + 4


def test_a_check_that_failed_before_makes_a_resumed_run_fail_too(tmp_path: Path) -> None:
    checks = [("good", 1, "true", 1.0), ("bad", 1, "false", 1.0)]
    status, records = run(checks, tmp_path)
    assert status == 1 and [record.verdict.value for record in records] == ["passed", "failed"]
    status, records = run(checks, tmp_path, "--resume")
    assert status == 1 and len(records) == 2


def test_an_elastic_check_takes_what_earlier_ones_left_but_nothing_of_later_ones(tmp_path: Path) -> None:
    checks = [("quick", 1, "true", 1.0), ("elastic", 1, "sleep 600", 2.0), ("last", 1, "sleep 0.1", 1.5)]
    _, records = run(checks, tmp_path, "--minutes", str(5 / 60))
    assert [record.verdict.value for record in records] == ["passed", "timed out", "passed"]
    assert records[1].seconds > 2.5


@pytest.mark.slow
def test_a_gpu_that_torch_does_not_see_passes_no_check(tmp_path: Path) -> None:
    """Only dry runs may use a CPU instead of a GPU."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho NVIDIA H200\n")
    tool.chmod(0o755)
    words = [sys.executable, "benchmarks/gpu/run_all.py", "--out", str(tmp_path), "--only", "capture_streams"]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, timeout=60, check=False)
    (record,) = Journal(tmp_path).read()
    assert (record.verdict, record.where.device) == (Verdict.NEEDS_GPU, "NVIDIA H200")
    assert ran.returncode == 1


def test_a_named_check_runs_though_it_has_a_verdict(tmp_path: Path, four: list[Fake]) -> None:
    run(four, tmp_path, "--call", "1")
    _, records = run(four, tmp_path, "--only", "b", "--resume")
    assert [record.check for record in records] == ["a", "b", "b"]


@pytest.mark.soak
def test_a_dry_run_of_all_checks_succeeds_on_a_cpu(tmp_path: Path) -> None:
    """In `make test`, the tests above run other checks, and test_gpu_benchmarks.py runs small benchmarks."""
    words = [sys.executable, "benchmarks/gpu/run_all.py", "--dry-run", "--out", str(tmp_path)]
    ran = subprocess.run([*words, "--minutes", "30"], cwd=ROOT, capture_output=True, text=True, timeout=1800)
    records = Journal(tmp_path).read()
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert [record.check for record in records] == [check.name for check in CHECKS if check.call is not None]
    assert not any(record.orphans for record in records)
    stand_ins = {record.check for record in records if record.verdict is Verdict.PASSED}
    tests = {check.name for check in CHECKS if "pytest_run" in check.words or "sanitize" in check.words}
    assert stand_ins == {record.check for record in records} - tests - {"environment"}


def record_of(check: Check, verdict: Verdict, *, dry_run: bool = False) -> Record:
    where = Where("2026-12-01", "NVIDIA H200", "2.11.0", "c0ffee", "f", dry_run)
    points = [{"rows": 64, "rate_x": 0.5}, {"rows": 128, "rate_x": 0.75, "error": "a | b"}]
    results = {"copy_gb_s": 4321.0, "points": points, "gaps": ["9 us after a"], "failures": {"test_it": "trace\nE   1"}}
    return Record(check.name, verdict, where, results=results)


def test_the_page_says_measured_only_of_what_a_gpu_has_decided(tmp_path: Path) -> None:
    check = next(check for check in CHECKS if check.known is State.MODELLED)
    assert state_of(check, None) == "modelled on a CPU"
    assert state_of(check, record_of(check, Verdict.NEEDS_GPU)) == "modelled on a CPU"
    measured = "2026-12-01, NVIDIA H200, torch 2.11.0, commit c0ffee"
    assert state_of(check, record_of(check, Verdict.PASSED)) == f"passed, {measured}"
    assert state_of(check, record_of(check, Verdict.TIMED_OUT)) == f"**timed out**, {measured}"
    assert state_of(check, record_of(check, Verdict.PASSED, dry_run=True)).startswith("modelled on a CPU (dry run")
    assert "Not yet run" in page(tmp_path)
    Journal(tmp_path).end(record_of(check, Verdict.PASSED, dry_run=True))
    assert "Not yet run" in page(tmp_path) and not any(word in page(tmp_path) for word in ("4321", "9 us", "test_it"))
    Journal(tmp_path).end(record_of(check, Verdict.PASSED))
    text = page(tmp_path)
    assert "Not yet run" not in text and f"passed, {measured}" in text and "| copy_gb_s | 4321 |" in text
    assert "| rows | rate_x | error |" in text and "| 128 | 0.75 | a / b |" in text
    assert "- 9 us after a\n" in text and "| `test_it` | 1 |" in text
    assert all(f"`{one.name}`" in text for one in CHECKS)


def spans(*ends: tuple[str, float, float]) -> Iterator[Span]:
    return (Span(*one) for one in ends)


def test_gaps_of_a_trace_are_those_of_all_streams_together_with_what_the_host_did() -> None:
    launches = [*spans(("a", 0, 10), ("b", 2, 30), ("c", 12, 20), ("d", 40, 50), ("e", 51, 60))]
    host = spans(("step", 0, 90), ("forward", 20, 45), ("aten::mm", 33, 37), ("other", 60, 80))
    long, short = longest_gaps(launches, host, count=5)
    assert (long.microseconds, long.after, long.before, long.host) == (10, "b", "d", ["step", "forward", "aten::mm"])
    assert (short.microseconds, short.after, short.before) == (1, "d", "e")
    assert busy_microseconds(launches) == 49 and longest_gaps([], [], count=3) == []


@pytest.mark.parametrize(
    ("call", "forbidden"),
    [("cudaEventQuery", False), ("cudaGraphLaunch", False), ("cudaMalloc", True), ("cudaStreamSynchronize", True)],
)
def test_replays_may_ask_events_but_not_wait_or_allocate(call: str, forbidden: bool) -> None:
    assert is_forbidden(call) is forbidden
