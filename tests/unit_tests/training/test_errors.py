"""User errors end a run with one line, and bugs with a traceback."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch

from megatron.core.group_collectives import RemoteRankError
from megatron.training.command_line.errors import CommandLineError
from megatron.training.errors import exit_on_user_error
from megatron.training.step.step_runner import ExpertOverflowError

ROOT = Path(__file__).resolve().parents[3]


def fail_with(error: BaseException) -> None:
    raise error


def fail_again(error: Exception) -> None:
    """Raises an error like all_ranks_agree on the rank that failed."""
    try:
        fail_with(error)
    except ValueError as caught:
        kept = caught
    raise kept


@pytest.mark.parametrize(
    ("fail", "code", "said"),
    [
        (lambda: fail_with(ValueError("--lr is 0:\nmust be more")), 1, "error: --lr is 0:\nmust be more\n"),
        (lambda: fail_again(ValueError("lost")), 1, "error: lost\n"),
        (lambda: fail_with(CommandLineError("--lrr is unknown")), 2, "error: --lrr is unknown\n"),
        (lambda: fail_with(RemoteRankError("rank 1: no")), 1, "error: rank 1: no\n"),
        (lambda: fail_with(ExpertOverflowError("no room")), 1, "error: no room\n"),
        (
            lambda: fail_with(KeyboardInterrupt()),
            130,
            "interrupted: continue a run that had --save from its last checkpoint with --load\n",
        ),
        (lambda: open("/nothing/here"), 1, "error: [Errno 2] No such file or directory: '/nothing/here'\n"),
        (
            lambda: fail_with(RuntimeError("[/pytorch/gloo/transport/tcp/pair.cc:1] Connection closed by peer [::1]")),
            1,
            "error: the connection to another rank was lost: that rank has ended; its own messages name the cause\n",
        ),
    ],
    ids=["value", "raised again", "flag", "other rank", "overflow", "Ctrl-C", "file", "lost rank"],
)
def test_a_mistake_becomes_one_message(
    fail: Callable[[], None], code: int, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank, prefix in ((None, ""), ("3", "[rank 3] ")):
        monkeypatch.delenv("RANK", raising=False) if rank is None else monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as caught, exit_on_user_error():
            fail()
        assert caught.value.code == code
        assert capsys.readouterr().err == prefix + said


@pytest.mark.parametrize(
    "ask",
    [
        lambda: torch.empty(1 << 50),
        lambda: torch.empty(1 << 40, 1 << 40),
        lambda: numpy.zeros(1 << 50),
        lambda: bytearray(1 << 50),
        lambda: fail_with(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB\nand more")),
    ],
    ids=["torch", "no such size", "numpy", "Python", "GPU"],
)
def test_too_little_memory_is_one_line_that_says_where(
    ask: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught, exit_on_user_error():
        ask()
    said = capsys.readouterr().err
    assert caught.value.code == 1 and said.count("\n") == 1
    assert said.startswith("error: out of memory in ") and "(test_errors.py:" in said and "use more ranks" in said


@pytest.mark.parametrize(
    "bug",
    [
        lambda: int("x"),
        lambda: numpy.concatenate([numpy.zeros((1, 2)), numpy.zeros((1, 3))]),
        lambda: torch.Generator(device="no device"),
        lambda: torch.zeros(2) @ torch.zeros(3),
        lambda: fail_with(RuntimeError("a kernel failed")),
        lambda: fail_with(TypeError("no")),
        lambda: fail_with(AssertionError("broken")),
    ],
    ids=["int", "numpy", "library in Python", "torch", "runtime", "type", "assert"],
)
def test_a_bug_keeps_its_traceback(bug: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((ValueError, RuntimeError, TypeError, AssertionError)), exit_on_user_error():
        bug()
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_a_reader_that_leaves_is_one_line() -> None:
    # A separate process, because the user also sees output that Python prints when it exits.
    script = "from megatron.training.errors import exit_on_user_error\nwith exit_on_user_error():\n"
    script += "    while True: print('line', flush=True)"
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, text=True, stdout=pipe, stderr=pipe)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait(60) == 1
    written = process.stderr.read()
    assert written.startswith("error: the reader of the output pipe has closed it") and written.count("\n") == 1
