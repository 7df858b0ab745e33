"""A run under torchrun that gets a signal, and goes on later as if nothing had happened."""

import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.functional_tests.case import Flags, command_line, read_bases
from tests.functional_tests.expectations import assert_same_checkpoint, assert_same_steps
from tests.functional_tests.launch import read_log, run_program, signal_ranks, torchrun

STEPS = 60  # some seconds: the signal comes long before the end
FLAGS: Flags = {"train-iters": STEPS, "eval-interval": STEPS, "hidden-dropout": 0.1}


def _wait_for_steps(folder: Path, count: int, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 120
    while len(read_log(folder)) < count:
        written = (folder / "output.txt").read_text(errors="replace")
        assert process.poll() is None and time.monotonic() < deadline, f"{count} steps did not come\n{written}"
        time.sleep(0.05)


def _interrupt(argv: list[str], folder: Path, signal_number: int, *, after_steps: int) -> None:
    """Runs on two processes until `after_steps` steps are logged, then signals every process at once."""
    folder.mkdir()
    process = torchrun([*argv, "--tensorboard-dir", str(folder)], 2, cwd=folder)
    try:
        _wait_for_steps(folder, after_steps, process)
        signal_ranks(process, signal_number)
        process.wait(60)
    finally:
        if process.poll() is None:
            signal_ranks(process, signal.SIGKILL)
            process.wait()
    assert len(read_log(folder)) < STEPS, "the run was over before the signal"


@pytest.mark.slow
@pytest.mark.parametrize("base", ["dense", "moe"])
@pytest.mark.parametrize(
    ("signal_number", "flags"),
    [(signal.SIGTERM, {"exit-signal-handler": True}), (signal.SIGKILL, {"save-interval": 4})],
    ids=["SIGTERM", "SIGKILL"],
)
def test_a_signalled_run_goes_on_bit_for_bit(base: str, signal_number: int, flags: Flags, tmp_path: Path) -> None:
    shared = {**read_bases()[base], **FLAGS}
    whole = run_program(command_line({**shared, "save": tmp_path / "whole/saved"}), 2, folder=tmp_path / "whole")
    assert whole.exit_codes == [0, 0], whole.written()

    saved = tmp_path / "saved"
    argv = command_line({**shared, **flags, "save": saved, "load": saved})
    _interrupt(argv, tmp_path / "parts", signal_number, after_steps=10)
    assert int((saved / "latest_checkpointed_iteration.txt").read_text()) >= 4
    rest = run_program(argv, 2, folder=tmp_path / "parts")

    assert rest.exit_codes == [0, 0], rest.written()
    assert_same_steps(rest, whole)
    last = f"iter_{STEPS:07d}"
    assert_same_checkpoint(saved / last, tmp_path / "whole/saved" / last)
