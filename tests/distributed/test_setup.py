"""What setup_run makes of a script's model and of a checkpoint, in the process of a rank."""

from pathlib import Path
from typing import Any

from megatron.training.training import train_step
from tests.distributed.tiny_runs import started_run
from tests.functional_tests.case import command_line, read_bases
from tests.harness import run_on_ranks

FLAGS: dict[str, Any] = {"mock-data": True, "eval-iters": 0, "train-iters": 3}


def test_arguments_tell_where_a_resumed_run_starts(tmp_path: Path) -> None:
    argv = command_line({**read_bases()["dense"], **FLAGS})
    batch, before, after = run_on_ranks(_resume, 1, argv, str(tmp_path))[0]
    assert before == (0, 0)
    assert after == (2, 2 * batch)


def _resume(argv: list[str], folder: str) -> tuple[int, tuple[int, int], tuple[int, int]]:
    with started_run([*argv, "--save", folder]) as run:
        before = (run.args.iteration, run.args.consumed_train_samples)
        train_step(run)
        train_step(run)
        run.save_checkpoint()
    with started_run([*argv, "--load", folder]) as run:
        return run.global_batch_size, before, (run.args.iteration, run.args.consumed_train_samples)
