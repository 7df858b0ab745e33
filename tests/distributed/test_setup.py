"""Checks what setup_run builds from a script's model and from a checkpoint, in one rank's process."""

from pathlib import Path
from typing import Any

from megatron.core.optimizer import ParamGroupOverride, ParamKey
from megatron.training.training import run_step
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
        before = (run.config.values["iteration"], run.config.values["consumed_train_samples"])
        run_step(run)
        run_step(run)
        run.save_checkpoint()
    with started_run([*argv, "--load", folder]) as run:
        return (
            run.global_batch_size,
            before,
            (run.config.values["iteration"], run.config.values["consumed_train_samples"]),
        )


def test_a_run_in_samples_resumes_with_other_batches_for_the_samples_that_are_left(tmp_path: Path) -> None:
    in_samples = {"train-iters": None, "lr-warmup-iters": None, "train-samples": 24}
    argv = command_line({**read_bases()["dense"], **FLAGS, **in_samples})
    # Two steps of 4 samples, then the remaining 16 samples in batches of 4, 2 and 6.
    assert run_on_ranks(_ends_after_a_resume, 1, argv, str(tmp_path)) == [[6, 10, 4]]


def _ends_after_a_resume(argv: list[str], folder: str) -> list[int]:
    _resume(argv, folder)
    ends = []
    for batch in ("4", "2", "6"):
        with started_run([*argv, "--load", folder, "--global-batch-size", batch]) as run:
            assert run.config.values["train_iters"] == run.train_iters
            ends.append(run.train_iters)
    return ends


def test_overrides_of_a_script_reach_the_optimizer_and_may_change_when_it_resumes(tmp_path: Path) -> None:
    argv = command_line({**read_bases()["llama"], **FLAGS, "decoupled-lr": 0.5})
    assert run_on_ranks(_rates_across_a_resume, 1, argv, str(tmp_path)) == [([0.005, 0.25, 0.01], [0.01, 0.5, 0.03])]


def _rates_across_a_resume(argv: list[str], folder: str) -> tuple[list[float], list[float]]:
    norms = ParamKey(name="*layernorm.weight")
    seen = []
    for where, factor in (("--save", 2.0), ("--load", 3.0)):
        with started_run([*argv, where, folder], config_overrides={norms: ParamGroupOverride(lr_mult=factor)}) as run:
            run_step(run)
            seen.append([group["lr"] for group in run.optimizer.param_groups if group["params"]])
            run.save_checkpoint()
    return seen[0], seen[1]
