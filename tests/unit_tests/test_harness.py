"""The test harness: return values, failures, hangs and isolation of rank functions. Tests no megatron code."""

import os
import random
import signal
import time

import pytest
import torch
import torch.distributed as dist

from megatron.core.group_collectives import RemoteRankError, all_ranks_agree
from tests.harness import launch_on_ranks, run_on_ranks

UNTOUCHED: list[int] = []


def _sum_over_ranks(start: torch.Tensor) -> torch.Tensor:
    total = start + dist.get_rank()
    dist.all_reduce(total)
    return total


def _environment() -> tuple[str, ...]:
    return tuple(os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS"))


def _fail_on_rank_1_while_others_wait() -> None:
    if dist.get_rank() == 1:
        raise ValueError("num_layers is -1: must be at least 1")
    dist.barrier()


def _fail_in_agreement_on_rank_1() -> None:
    with all_ranks_agree():
        if dist.get_rank() == 1:
            raise ValueError("no such file")


def _leave_a_child(outlives: bool) -> int:
    """Forks a process outside the rank's process group, which the harness kills. Returns its process id."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.write(tell, b"1")
        if outlives:
            signal.pause()
        os._exit(0)
    # Otherwise the rank's group may be killed before the child has left it.
    os.read(told, 1)
    return child


def _wait_forever_on_rank_0() -> None:
    if dist.get_rank() == 0:
        print("about to wait", flush=True)
        time.sleep(1000)


def _die_on_rank_0() -> None:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def _exit_with(code: int) -> None:
    raise SystemExit(code)


def _disturb_and_draw() -> tuple[int, float, float, bool]:
    seen = (len(UNTOUCHED), random.random(), float(torch.rand(())), torch.are_deterministic_algorithms_enabled())
    UNTOUCHED.append(1)
    torch.use_deterministic_algorithms(True)
    return seen


def _unpicklable() -> object:
    return lambda: None


@pytest.mark.parametrize("world_size", [1, 3])
def test_values_come_back_in_rank_order(world_size: int) -> None:
    expected = 2.0 * world_size + sum(range(world_size))
    for value in run_on_ranks(_sum_over_ranks, world_size, torch.full((2,), 2.0)):
        assert torch.equal(value, torch.full((2,), expected))


def test_ranks_see_the_environment_of_torchrun() -> None:
    assert run_on_ranks(_environment, 2, backend=None) == [("0", "0", "2", "1"), ("1", "1", "2", "1")]


def test_the_failing_rank_is_named_and_others_do_not_hang() -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match="num_layers is -1") as raised:
        run_on_ranks(_fail_on_rank_1_while_others_wait, 2)
    assert "rank 1 of 2:\nTraceback" in raised.value.__notes__[0]
    assert time.monotonic() - start < 30


def test_the_cause_is_raised_rather_than_its_echo_on_other_ranks() -> None:
    with pytest.raises(ValueError, match="no such file"):
        run_on_ranks(_fail_in_agreement_on_rank_1, 3)
    errors = [type(outcome.error) for outcome in launch_on_ranks(_fail_in_agreement_on_rank_1, 3)]
    assert errors == [RemoteRankError, ValueError, RemoteRankError]


def _die_on_rank_1_while_others_wait() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def test_a_rank_that_died_is_named_rather_than_those_that_lost_it() -> None:
    with pytest.raises(ChildProcessError, match="rank 1 died without a result, exit code 7"):
        run_on_ranks(_die_on_rank_1_while_others_wait, 3)


def _all_but_the_last_wait_in_a_sum() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(1000)
    _sum_over_ranks(torch.ones(1))


@pytest.mark.slow
def test_all_ranks_of_a_hang_are_named_with_their_stacks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TimeoutError, match="ranks 0, 1, 2 of 3 did not end within the timeout"):
        run_on_ranks(_all_but_the_last_wait_in_a_sum, 3, timeout=2)
    written = capsys.readouterr().err
    assert all(f"--- rank {rank}" in written for rank in range(3)) and written.count("_all_but_the_last") == 3


@pytest.mark.slow
def test_a_rank_that_hangs_ends_at_the_timeout_with_its_stack() -> None:
    outcomes = launch_on_ranks(_wait_forever_on_rank_0, 2, timeout=2)
    assert [outcome.exit_code for outcome in outcomes] == [1, 0]
    assert isinstance(outcomes[0].error, TimeoutError)
    assert outcomes[0].stdout == "about to wait\n"
    assert "_wait_forever_on_rank_0" in outcomes[0].stderr


def test_a_rank_that_is_killed_is_reported() -> None:
    with pytest.raises(ChildProcessError, match="rank 0 died"):
        run_on_ranks(_die_on_rank_0, 2)


@pytest.mark.parametrize("outlives", [True, False])
def test_a_process_that_outlives_the_ranks_is_told(outlives: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.harness.OUTLIVED_SECONDS", 0.2 if outlives else 10.0)
    (outcome,) = launch_on_ranks(_leave_a_child, 1, outlives)
    assert outcome.outlived == outlives
    if outlives:
        os.kill(outcome.value, signal.SIGKILL)


def test_exit_codes_are_outcomes() -> None:
    assert [outcome.exit_code for outcome in launch_on_ranks(_exit_with, 2, 3)] == [3, 3]
    assert run_on_ranks(_exit_with, 1, 0) == [None]


def test_nothing_is_left_over_from_the_job_before() -> None:
    first, second = (run_on_ranks(_disturb_and_draw, 2) for _ in range(2))
    assert first == second
    assert first[0][0] == 0 and first[0][3] is False


def test_a_value_that_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="pickle"):
        run_on_ranks(_unpicklable, 1)


def test_processes_see_the_environment_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANDOM_WORD", "pear")
    assert run_on_ranks(os.getenv, 1, "RANDOM_WORD") == ["pear"]
