"""A NaN on one rank ends all ranks with one line that locates it. The run resumes from the last good checkpoint."""

import re
from pathlib import Path

import pytest

from tests.functional_tests import poisoned_program
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.functional_tests.expectations import assert_same_checkpoint, assert_same_steps
from tests.functional_tests.launch import run_program
from tests.functional_tests.poisoned_program import MICROBATCH, NUM_MICROBATCHES, PARAMETER, RANK, STEP

RANKS, STEPS = 3, 4
FLAGS: Flags = {
    "micro-batch-size": 1,
    "global-batch-size": RANKS * NUM_MICROBATCHES,
    "train-iters": STEPS,
    "save-interval": STEP - 1,
    "eval-iters": 0,
}
# Losses are checked first. If they are finite, fp32 and bf16 gradients are checked before the sum over ranks, which
# would hide the rank. In fp16, gradients may overflow, and the step is skipped.
WHERE_GRADIENT = rf"not finite on rank {RANK}: {re.escape(PARAMETER)}\. "
WHERE_LOSS = rf"not finite at iteration {STEP}: rank {RANK}: microbatch {MICROBATCH} \(lm loss is nan\)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bases", "program", "where"),
    [
        (["moe"], "nan_in_gradient", WHERE_GRADIENT),
        (["dense"], "nan_in_loss", WHERE_LOSS),
        (["dense", "fp16"], "nan_in_loss", WHERE_LOSS),
    ],
    ids=["gradient", "loss", "fp16 loss"],
)
def test_a_nan_ends_every_rank_and_costs_no_saved_step(
    bases: list[str], program: str, where: str, tmp_path: Path
) -> None:
    flags: Flags = {name: value for base in bases for name, value in read_bases()[base].items()} | FLAGS
    saved = tmp_path / "saved"
    argv = command_line({**flags, "save": saved, "load": saved})
    poisoned = run_program(argv, RANKS, folder=tmp_path, program=f"{poisoned_program.__name__}:{program}")

    assert poisoned.exit_codes == [1] * RANKS, poisoned.written()
    for outcome in poisoned.outcomes:
        assert len(re.findall(where, outcome.stderr)) == 1, poisoned.written()
        assert "Traceback" not in outcome.stderr, poisoned.written()
    assert max(poisoned.steps) == STEP - 1
    assert sorted(path.name for path in saved.glob("iter_*")) == [f"iter_{STEP - 1:07d}"]

    # The rest can equal a run without the NaN only if the checkpoint from before the NaN is intact.
    rest = run_program(argv, RANKS, folder=tmp_path)
    whole = run_program(command_line({**flags, "save": tmp_path / "whole"}), RANKS, folder=tmp_path / "whole")
    assert_same_steps(rest, whole)
    assert_same_checkpoint(saved / f"iter_{STEPS:07d}", tmp_path / "whole" / f"iter_{STEPS:07d}")
