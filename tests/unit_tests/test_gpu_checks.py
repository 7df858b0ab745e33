"""The runner of `make gpu`: outcomes of checks, results after a kill, time limits, and digests of the checks' code.

Runners are separate processes, because they adopt orphans and wait for all of their children.
"""

import ast
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.gpu.checks.device_events import Span, busy_microseconds, longest_gaps
from benchmarks.gpu.journal import Journal, Record, Verdict
from benchmarks.gpu.registry import CALL_SECONDS, CHECKS, END_SECONDS, START_SECONDS
from benchmarks.gpu.run_all import LOG_BYTES, schedule
from benchmarks.source import CodeBase
from tests.gpu.test_replays_on_gpu import is_forbidden
from tests.harness import run_on_ranks
from tests.structure.measure import ROOT

GRACE = 0.4
START = """
from benchmarks.gpu import process_tree, run_all
from benchmarks.gpu.registry import Check
process_tree.GRACE_SECONDS = run_all.GRACE_SECONDS = run_all.LEAVE_SECONDS = {grace}
run_all.LEAST_SECONDS = run_all.END_SECONDS = 2 * {grace}
checks = [
    Check(name, call, "", words, limit, expected=expected) for name, call, words, limit, expected in {checks!r}
]
run_all.main(checks, preload={preload!r})
"""


class Fake(NamedTuple):
    """A check that a test writes."""

    name: str
    words: str
    call: str = "A"
    limit: float = 9.0
    expected: float = 0.1


def runner_of(
    checks: Sequence[Fake], folder: Path, *options: str, preload: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """Starts a runner of checks whose modules are in the folder."""
    rows = [(one.name, one.call, one.words, one.limit, one.expected) for one in checks]
    start = START.format(grace=GRACE, checks=rows, preload=list(preload))
    words = [sys.executable, "-c", start, "--dry-run", "--out", str(folder / "out"), *options]
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"}
    return subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def run(checks: Sequence[Fake], folder: Path, *options: str, preload: Sequence[str] = ()) -> tuple[int, list[Record]]:
    """Runs checks to the end, and returns the exit status and all records."""
    process = runner_of(checks, folder, *options, preload=preload)
    output, _ = process.communicate(timeout=60)
    for line in (folder / "out" / "checks.jsonl").read_text().splitlines():
        assert json.loads(line)["kind"] in ("result", "verdict"), output
    return process.returncode, Journal(folder / "out").read()


def module(folder: Path, name: str, main: str, *, top: str = "import os, signal, subprocess, sys, time") -> str:
    """Writes a module with this main function, and returns its name."""
    (folder / f"{name}.py").write_text(f"{top}\n\ndef main():\n{textwrap.indent(textwrap.dedent(main), '    ')}\n")
    return name


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


def test_expected_seconds_of_a_call_fit_into_its_limit_and_have_reasons() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    for call, seconds in CALL_SECONDS.items():
        own = [check for check in CHECKS if check.call == call]
        assert START_SECONDS + sum(check.expected for check in own) + END_SECONDS <= 0.95 * seconds
        assert all(check.reason and check.expected < check.limit for check in own)
        printed = schedule(CHECKS, call)
        assert all(f"{check.expected:6.0f} s  {check.name}: {check.reason}" in printed for check in own)
    names = " ".join(check.name for check in CHECKS if check.call)
    measured = "ceilings paged_products qwen_short qwen_4096 stack48 deepseek local_graphs kernels_of_later_issues"
    assert names == f"captured_pair {measured} replays kernels block_scaled experts_in_8_bits"


def test_each_kernel_that_is_launched_has_a_small_case() -> None:
    launched = {
        line.removeprefix("def ").partition("(")[0]
        for path in (ROOT / "megatron").rglob("triton_*.py")
        for line in path.read_text().splitlines()
        if line.startswith("def ") and line.partition("(")[0].endswith("_kernel")
    }
    assert launched == set(next(check.kernels for check in CHECKS if check.name == "kernels"))


def test_the_module_of_each_check_has_a_main_function() -> None:
    paths = {ROOT / f"{check.module.replace('.', '/')}.py" for check in CHECKS}
    found = {
        path: {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
        for path in paths
        if path.exists()
    }
    assert len(found) >= 18 and all("main" in names for names in found.values())


def collected(selections: Sequence[Sequence[str]]) -> list[list[str]]:
    class Names:
        def pytest_collection_finish(self, session: pytest.Session) -> None:
            found.append([item.name for item in session.items])

    found: list[list[str]] = []
    for selection in selections:
        assert pytest.main(["-q", "--collect-only", "-p", "no:cacheprovider", *selection], plugins=[Names()]) == 0
    return found


@pytest.mark.slow
def test_each_check_that_runs_tests_finds_some() -> None:
    selections = {
        check.name: check.arguments(Path(), seconds=1, is_dry=False)
        for check in CHECKS
        if check.module.endswith("pytest_run")
    }
    (names,) = run_on_ranks(collected, 1, list(selections.values()), backend=None)
    found = dict(zip(selections, names, strict=True))
    assert all(found.values())
    sizes = {name: len(found[name]) for name in ("stash_late_streams", "replays", "kernels")}
    assert sizes == {"stash_late_streams": 7, "replays": 9, "kernels": 34}


def test_the_runner_works_where_torch_does_not() -> None:
    code = "import sys; sys.modules['torch'] = None; import benchmarks.gpu.run_all"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_each_end_has_its_verdict_and_results_of_sides_are_kept_apart(tmp_path: Path) -> None:
    numbers = """
    print("seen")
    for results in ('{"x": 2}', '{"side": "graph", "ms": 5}', '{"side": "stash", "ms": 6}', '{"y": 3, "x": 1}'):
        print('RESULT ' + results)
    """
    bodies = {
        "good": numbers,
        "bad": "sys.exit(1)",
        "said": "sys.exit('no such pages')",
        "short": "sys.exit(75)",
        "unable": "sys.exit(77)",
        "needy": "sys.exit(76)",
        "crashed": "os.kill(os.getpid(), signal.SIGSEGV)",
        "raised": "raise MemoryError('131 GiB')",
        "endless": "time.sleep(600)",
    }
    checks = [Fake(name, module(tmp_path, name, body)) for name, body in bodies.items()]
    checks += [Fake("absent", "benchmarks.gpu.checks.no_such_check", "B")]
    checks[-2] = checks[-2]._replace(limit=GRACE)
    status, records = run(checks, tmp_path)
    assert status == 1
    assert {record.check: (record.verdict.value, record.exit_status) for record in records} == {
        "good": ("passed", 0),
        "bad": ("failed", 1),
        "said": ("failed", 1),
        "short": ("incomplete: some sides were not started", 75),
        "unable": ("not checked here", 77),
        "needy": ("needs a GPU", 76),
        "crashed": ("failed", -11),
        "raised": ("failed", 1),
        "endless": ("timed out", -2),
        "absent": ("failed", 1),
    }
    assert records[0].output == ["seen"] and records[0].results == {"x": 1, "y": 3}
    assert records[0].sides == {"graph": {"ms": 5}, "stash": {"ms": 6}}
    assert {record.check: record.results["error"] for record in records if record.verdict.is_failure} == {
        "bad": "exit status 1",
        "said": "no such pages",
        "short": "no time was left for some sides",
        "crashed": "ended by SIGSEGV",
        "raised": "MemoryError: 131 GiB",
        "endless": "did not end in 0 s",
        "absent": "ModuleNotFoundError: No module named 'benchmarks.gpu.checks.no_such_check'",
    }
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["checks.jsonl", "output.log"]


OUTCOMES = """
import pytest
def test_passes(): pass
def test_fails(): assert 1 == 2
def test_skips(): pytest.skip("why")
"""


@pytest.mark.slow
def test_a_check_that_runs_tests_reports_their_outcomes(tmp_path: Path) -> None:
    (tmp_path / "test_outcomes.py").write_text(OUTCOMES)
    run_tests = f"benchmarks.gpu.checks.pytest_run --rootdir {ROOT} {tmp_path}/test_outcomes.py"
    checks = [Fake("all", run_tests, limit=60), Fake("skipped", f"{run_tests} -k skips", limit=60)]
    _, (everything, skipped) = run(checks, tmp_path)
    assert (everything.verdict, skipped.verdict) == (Verdict.FAILED, Verdict.NEEDS_GPU)
    counts = {name: everything.results[name] for name in ("passed", "failed", "skipped")}
    assert counts == {"passed": 1, "failed": 1, "skipped": 1}
    outcomes = {name.rpartition("::test_")[2]: values["outcome"] for name, values in everything.sides.items()}
    assert outcomes == {"passes": "passed", "fails": "failed", "skips": "skipped"}
    ((name, text),) = everything.results["failures"].items()
    assert name.endswith("test_fails") and "assert 1 == 2" in text


DEAF_RANK = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
if os.fork():
    os._exit(0)  # the grandchild belongs to nobody
os.setsid()
open(sys.argv[1] + "/pids", "a").write(f"{os.getpid()} ")
time.sleep(600)
"""
STUBBORN = f"""
folder = sys.argv[1]
for environment in (None, {{}}):
    words = [sys.executable, "-c", {DEAF_RANK!r}, folder]
    subprocess.Popen(words, start_new_session=True, env=environment).wait()
open(folder + "/pids", "a").write(str(os.getpid()) + " ")
try:
    time.sleep(float(sys.argv[2]))
except KeyboardInterrupt:
    open(folder + "/interrupted", "w").close()
    raise
"""


@pytest.mark.parametrize("outlived", [False, True])
def test_descendants_in_sessions_of_their_own_end_with_their_check(tmp_path: Path, outlived: bool) -> None:
    words = f"{module(tmp_path, 'stubborn', STUBBORN)} {tmp_path} {0 if outlived else 600}"
    status, (record,) = run([Fake("stubborn", words, limit=60 if outlived else 3 + GRACE)], tmp_path)
    pids = pids_in(tmp_path / "pids")
    assert len(pids) == 3 and not any(map(is_alive, pids))
    assert record.orphans == 2
    # SIGINT was sent first, and Python printed the traceback.
    assert (tmp_path / "interrupted").exists() is not outlived
    assert any("time.sleep(float" in line for line in record.output) is not outlived
    assert (record.verdict, status) == ((Verdict.PASSED, 0) if outlived else (Verdict.TIMED_OUT, 1))


HANGING_RANK = """
import faulthandler, os, signal, time
faulthandler.register(signal.SIGUSR1)
def waits_for_another_rank():
    time.sleep(600)
waits_for_another_rank()
"""
HANGING = f"""
with open(sys.argv[1] + "/rank.stderr", "w") as errors:
    process = subprocess.Popen([sys.executable, "-c", {HANGING_RANK!r}], start_new_session=True, stderr=errors)
process.wait()
"""


def test_ranks_that_hang_show_their_stacks_though_they_write_to_files(tmp_path: Path) -> None:
    words = f"{module(tmp_path, 'hanging', HANGING)} {tmp_path}"
    _, (record,) = run([Fake("hanging", words, limit=2 + GRACE)], tmp_path)
    assert record.verdict is Verdict.TIMED_OUT
    assert any("waits_for_another_rank" in line for line in record.output), record.output


def test_a_check_shows_the_stacks_of_all_threads_when_it_is_interrupted(tmp_path: Path) -> None:
    top = "import threading, time\ndef in_a_thread(): time.sleep(600)"
    body = "threading.Thread(target=in_a_thread, daemon=True).start()\ntime.sleep(600)"
    _, (record,) = run([Fake("hangs", module(tmp_path, "hangs", body, top=top), limit=1 + GRACE)], tmp_path)
    text = "\n".join(record.output)
    assert "in_a_thread" in text and "KeyboardInterrupt" in text


# Reports, and notes on the disk what it has reported.
STEADY = """
open(f"{sys.argv[1]}/pids", "a").write(f"{os.getpid()} ")
for number in range(3):
    time.sleep(0.02)
    token = f"{sys.argv[2]}.{os.getpid()}.{number}"
    sys.stdout.write("\\nRESULT " + json.dumps({"side": token, "ms": number}) + "\\n")
    with open(f"{sys.argv[1]}/reported", "a") as stream:
        stream.write(f"{token} ")
"""


def test_kills_at_twelve_moments_lose_no_reported_result_and_a_resumed_run_completes(tmp_path: Path) -> None:
    """Kills the runner or the check, and resumes. Killed checks fail, all others pass once."""
    words = module(tmp_path, "steady", STEADY, top="import json, os, sys, time")
    checks = [Fake(f"c{number}", f"{words} {tmp_path} c{number}") for number in range(14)]
    moments, killed = random.Random(52), set()
    for number in range(12):
        process = runner_of(checks, tmp_path, "--resume")
        until(lambda: (tmp_path / "out" / "output.log").exists())
        time.sleep(moments.uniform(0, 0.5))
        *_, last = [0, *pids_in(tmp_path / "pids")]
        if number % 4 == 3 and is_alive(last):
            killed.add(last)
            os.kill(last, signal.SIGKILL)
            time.sleep(0.1)
        process.kill()
        process.communicate()
        until(lambda: not any(map(is_alive, pids_in(tmp_path / "pids"))))
    with open(tmp_path / "out" / "checks.jsonl", "a") as stream:
        stream.write('{"kind": "torn')
    _, records = run(checks, tmp_path, "--resume")
    written = {side for record in records for side in record.sides}
    assert set((tmp_path / "reported").read_text().split()) <= written
    final = [record for record in records if record.is_final]
    assert sorted(record.check for record in final) == sorted(check.name for check in checks)
    for record in final:
        assert record.verdict is (Verdict.PASSED if len(record.sides) == 3 else Verdict.FAILED)
    assert sum(record.verdict is Verdict.FAILED for record in final) <= len(killed)


def test_orphans_of_a_killed_runner_end_when_the_next_one_starts(tmp_path: Path) -> None:
    words = f"{module(tmp_path, 'stubborn', STUBBORN)} {tmp_path} 600"
    process = runner_of([Fake("stubborn", words, limit=60)], tmp_path)
    until(lambda: len(pids_in(tmp_path / "pids")) == 3)
    process.kill()
    process.communicate()
    pids = pids_in(tmp_path / "pids")
    until(lambda: sum(map(is_alive, pids)) == 2)  # the check is killed together with its runner
    status, records = run([Fake("next", module(tmp_path, "next_one", "pass"))], tmp_path, "--resume")
    verdicts = [(record.check, record.verdict.value) for record in records]
    assert verdicts == [("stubborn", "interrupted"), ("next", "passed")]
    assert records[0].orphans == 1 and status == 0
    # The remaining process has no marker variable and no parent, so the runner cannot attribute it to a check.
    (unmarked,) = filter(is_alive, pids)
    os.kill(unmarked, signal.SIGKILL)


def test_a_runner_that_is_told_to_end_ends_its_check_and_says_so(tmp_path: Path) -> None:
    words = f"{module(tmp_path, 'stubborn', STUBBORN)} {tmp_path} 600"
    process = runner_of([Fake("stubborn", words, limit=60), Fake("next", words)], tmp_path)
    until(lambda: len(pids_in(tmp_path / "pids")) == 3)
    process.terminate()
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 1, output
    assert not any(map(is_alive, pids_in(tmp_path / "pids")))
    (record,) = Journal(tmp_path / "out").read()
    assert (record.check, record.verdict.value) == ("stubborn", "interrupted")
    assert record.results == {"error": "the runner was interrupted"}


def test_a_server_that_ends_costs_one_check(tmp_path: Path) -> None:
    checks = [
        Fake("killer", module(tmp_path, "killer", "os.kill(os.getppid(), signal.SIGKILL); time.sleep(600)")),
        Fake("next", module(tmp_path, "next_one", "pass")),
    ]
    _, records = run(checks, tmp_path)
    assert [(record.check, record.verdict.value) for record in records] == [("killer", "failed"), ("next", "passed")]
    assert records[0].results == {"error": "its server ended, and the check with it"}


# What an import does, and how many processes then import the module.
IMPORTS = {
    "works": ("pass", 1),
    "crashes": ("os.abort()", 3),
    "fails": ("raise OSError('libcuda.so.1')", 3),
    "uses the GPU": ("kept, sys.modules['__main__']._USED_BY_CUDA = open(__file__), __file__", 3),
}


@pytest.mark.parametrize("name", IMPORTS)
def test_checks_are_forks_of_a_server_that_has_tried_the_imports_once(tmp_path: Path, name: str) -> None:
    text, count = IMPORTS[name]
    note = f"open('{tmp_path}/imports', 'a').write(f'{{os.getpid()}} ')"
    (tmp_path / "slow.py").write_text(f"import os, sys\n{note}\n{text}\n")
    checks = [Fake(name, module(tmp_path, name, "import slow")) for name in ("one", "two")]
    _, records = run(checks, tmp_path, preload=["slow"])
    assert len(pids_in(tmp_path / "imports")) == count
    errors = {"crashes": "ended by SIGABRT", "fails": "OSError: libcuda.so.1"}
    assert [record.results.get("error") for record in records] == [errors.get(name)] * 2


def test_a_call_that_runs_out_of_time_leaves_the_rest_to_the_next_run(tmp_path: Path) -> None:
    body = "open(sys.argv[1], 'a').write('ran ')"
    checks = [
        Fake(name, f"{module(tmp_path, 'slow', body)} {tmp_path}/{name}", call) for name, call in zip("abc", "AAB")
    ]
    status, records = run(checks, tmp_path, "--call", "A", "--seconds", "0")
    assert status == 1 and [record.verdict for record in records] == [Verdict.NO_TIME] * 2
    assert run(checks, tmp_path, "--resume")[0] == 0
    records = run(checks, tmp_path, "--resume")[1]
    assert [(record.check, record.verdict.value) for record in records[2:]] == [(name, "passed") for name in "abc"]
    # A named check runs although it has a verdict.
    assert len(run(checks, tmp_path, "--only", "b", "--resume")[1]) == len(records) + 1
    path = tmp_path / "out" / "checks.jsonl"
    path.write_text(path.read_text().replace(records[-1].where.code, "0123456789abcdef"))
    run(checks, tmp_path, "--resume")
    assert [(tmp_path / name).read_text().count("ran") for name in "abc"] == [1, 2, 2]


def test_a_check_that_failed_before_makes_a_resumed_run_fail_too(tmp_path: Path) -> None:
    checks = [Fake("good", module(tmp_path, "good", "pass")), Fake("bad", module(tmp_path, "bad", "sys.exit(1)"))]
    status, records = run(checks, tmp_path)
    assert status == 1 and [record.verdict.value for record in records] == ["passed", "failed"]
    status, records = run(checks, tmp_path, "--resume")
    assert status == 1 and len(records) == 2


def test_a_check_that_had_no_time_for_some_sides_is_a_failure_and_is_resumed(tmp_path: Path) -> None:
    body = "sys.exit(0 if os.path.exists(sys.argv[1]) else 75)"
    checks = [Fake("short", f"{module(tmp_path, 'short', body)} {tmp_path}/time")]
    assert run(checks, tmp_path)[0] == 1
    (tmp_path / "time").touch()
    status, records = run(checks, tmp_path, "--resume")
    assert status == 0 and [one.verdict for one in records] == [Verdict.INCOMPLETE, Verdict.PASSED]


def test_a_check_may_use_time_that_is_left_over_but_not_what_later_ones_need(tmp_path: Path) -> None:
    endless = module(tmp_path, "endless", "time.sleep(600)")
    checks = [
        Fake("first", endless, limit=1 + GRACE),
        Fake("second", endless, limit=60),
        Fake("last", module(tmp_path, "quick", "time.sleep(0.3)"), expected=2),
    ]
    began = time.monotonic()
    _, records = run(checks, tmp_path, "--call", "A", "--seconds", "8")
    assert time.monotonic() - began < 8
    assert [record.verdict.value for record in records] == ["timed out", "timed out", "passed"]
    # 2 s for the last check, the first check's time and the start of Python are not available.
    assert records[0].seconds < 1 + 3 * GRACE and 2 < records[1].seconds < 8 - 2 - 1


def test_output_is_shortened_and_too_many_files_are_an_error(tmp_path: Path) -> None:
    talks = "print('first'); print('x' * (1 << 20)); print('last')"
    writes = "for number in range(6): open(f'{sys.argv[1]}/{number}', 'w')"
    checks = [
        Fake("talks", module(tmp_path, "talks", talks)),
        Fake("writes", f"{module(tmp_path, 'writes', writes)} {{out}}", "B"),
    ]
    status, _ = run(checks, tmp_path, "--call", "A")
    text = (tmp_path / "out" / "output.log").read_text()
    assert status == 0 and len(text) < LOG_BYTES + 100 and "first" in text and "last" in text
    status, records = run(checks, tmp_path, "--call", "B")
    assert status == 1 and records[-1].verdict is Verdict.PASSED


@pytest.mark.slow
def test_a_gpu_that_torch_does_not_see_passes_no_check(tmp_path: Path) -> None:
    """Only dry runs may use a CPU instead of a GPU."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho NVIDIA H200\n")
    tool.chmod(0o755)
    words = [sys.executable, "benchmarks/gpu/run_all.py", "--out", str(tmp_path), "--only", "capture_streams"]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, timeout=120, check=False)
    (record,) = Journal(tmp_path).read()
    assert (record.verdict, record.where.device) == (Verdict.NEEDS_GPU, "NVIDIA H200")
    assert ran.returncode == 1


@pytest.mark.soak
def test_a_dry_run_of_both_calls_succeeds_on_a_cpu(tmp_path: Path) -> None:
    """In `make test`, the tests above run other checks, and test_gpu_benchmarks.py runs small benchmarks."""
    words = [sys.executable, "benchmarks/gpu/run_all.py", "--dry-run", "--out", str(tmp_path), "--slowdown", "4"]
    ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=2600)
    records = Journal(tmp_path).read()
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert [record.check for record in records] == [check.name for check in CHECKS if check.call is not None]
    assert not any(record.orphans for record in records)
    stand_ins = {record.check for record in records if record.verdict is Verdict.PASSED}
    tests = {check.name for check in CHECKS if check.module.endswith("pytest_run")}
    assert stand_ins == {record.check for record in records} - tests


BEFORE = {
    "megatron/__init__.py": "",
    "megatron/rows.py": "from megatron import pages\n\ndef half(x):\n    return x // 2\n",
    "megatron/pages.py": "SIZE = 64\nif SIZE < 8:\n    raise ValueError(f'{SIZE} is too small')\n",
    "megatron/other.py": "OTHER = 1\n",
    "benchmarks/copies.py": "import torch\n\ndef main():\n    from megatron.rows import half\n    print(half(4))\n",
    "tests/conftest.py": "SEED = 1\n",
    "tests/gpu/test_rows.py": "from megatron.rows import half\n",
}
AFTER = {
    "a comment and layout": (
        {"megatron/rows.py": "from megatron import pages\n# Why.\ndef half( x ):\n  return x//2"},
        "",
    ),
    "docstrings": (
        {"megatron/rows.py": '"""A."""\nfrom megatron import pages\n\ndef half(x):\n    """B."""\n    return x // 2\n'},
        "",
    ),
    "a message": ({"megatron/pages.py": BEFORE["megatron/pages.py"].replace("is too small", "must be at least 8")}, ""),
    "a file that is not imported": ({"megatron/other.py": "OTHER = 2\n"}, ""),
    "a function": ({"megatron/rows.py": BEFORE["megatron/rows.py"].replace("// 2", "// 3")}, "copies test_rows"),
    "a module of a module": (
        {"megatron/pages.py": BEFORE["megatron/pages.py"].replace("64", "128")},
        "copies test_rows",
    ),
    "the value in a message": (
        {"megatron/pages.py": BEFORE["megatron/pages.py"].replace("{SIZE}", "{SIZE + 1}")},
        "copies test_rows",
    ),
    "a conftest": ({"tests/conftest.py": "SEED = 2\n"}, "test_rows"),
}


@pytest.mark.parametrize("change", AFTER)
def test_a_digest_changes_with_the_code_that_a_check_can_import_and_with_nothing_else(
    tmp_path: Path, change: str
) -> None:
    def digests(base: CodeBase) -> dict[str, str]:
        tests = base.digest("benchmarks.gpu.checks.pytest_run", "tests/gpu/test_rows.py -k half")
        return {"copies": base.digest("benchmarks.copies"), "test_rows": tests}

    def write(files: Mapping[str, str]) -> None:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.example", "-C", str(tmp_path)]
    write(BEFORE)
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "before"]):
        subprocess.run([*git, *words], check=True)
    before = digests(CodeBase.of_tree(tmp_path))
    files, changed = AFTER[change]
    write(files)
    after = digests(CodeBase.of_tree(tmp_path))
    assert {name for name in before if before[name] != after[name]} == set(changed.split())
    assert digests(CodeBase.at_commit("HEAD", tmp_path)) == before


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
