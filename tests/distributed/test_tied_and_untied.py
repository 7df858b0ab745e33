"""Loads between tied and untied vocabulary weights: one weight becomes two, and two equal weights become one.

test_any_layout_to_any covers random layouts.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron.core.dist_checkpointing import model_logical_pieces
from megatron.training.run import TrainingRun
from tests.distributed.tiny_runs import OVERLAPPED_SMALL_BUCKETS, started_run, train_steps
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.harness import run_on_ranks

RANKS, STEPS = 2, 2
FLAGS: Flags = {
    **read_bases()["dense"],
    **OVERLAPPED_SMALL_BUCKETS,
    "bf16": True,
    "eval-interval": None,
    "train-iters": 2 * STEPS,
}
STAGES: Flags = {"pipeline-model-parallel-size": 2}
UNTIED: Flags = {"untie-embeddings-and-output-weights": True}
OUTPUT = "output_layer.weight"


def _steps(flags: Flags, number: int, *, change: Callable[[TrainingRun], None] | None = None) -> list[dict[str, Any]]:
    """Trains `number` steps and returns their reports; saves a checkpoint if the flags ask for one."""
    with started_run(command_line({**FLAGS, **flags})) as run:
        reports = train_steps(run, number)
        if change is not None:
            change(run)
        run.save_checkpoint()
        return reports


def _scale_state(kind: str, run: TrainingRun) -> None:
    """Changes the output layer's optimizer state so that it differs from the embedding's."""
    assert run.optimizer is not None
    pieces = {name: held for chunk in run.model for name, held in model_logical_pieces(chunk).items()}
    for tensor in run.optimizer.sharded_state(pieces):
        if tensor.key == f"optimizer.{kind}.{OUTPUT}":
            tensor.data.mul_(2)


def _refusal(flags: Flags) -> str:
    try:
        _steps(flags, 0)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def _split_and_join(folder: Path) -> None:
    one, two, parted, moments = (str(folder / name) for name in ("one", "two", "parted", "moments"))
    _steps({"save": one}, STEPS)
    whole = _steps({"load": one}, STEPS)
    _steps({**UNTIED, "load": one, "save": two}, 0)
    # Merging the weights restores the original weight, also on pipeline stages, which have a copy of it.
    assert _steps({"load": two}, STEPS) == whole
    split, staged = (_steps({**UNTIED, "load": one, **more}, STEPS) for more in ({}, STAGES))
    assert split[0]["losses"] == whole[0]["losses"] and split[1]["losses"] != whole[1]["losses"]
    assert staged[1]["losses"] == pytest.approx(split[1]["losses"], rel=1e-2)
    _steps({**UNTIED, "load": two, "save": parted}, 1)
    for more in ({}, {"finetune": True}, STAGES):
        said = _refusal({"load": parted, **more})
        assert "--untie-embeddings-and-output-weights is off here but on in the checkpoint" in said, said
        assert f"{OUTPUT} differs from embedding.word_embeddings.weight" in said and "--no-load-optim" not in said, said
    # Equal weights with different optimizer states.
    _steps({**UNTIED, "load": two, "save": moments}, 0, change=partial(_scale_state, "exp_avg_sq"))
    said = _refusal({"load": moments})
    assert f"optimizer.exp_avg_sq.{OUTPUT} differs" in said and "--no-load-optim" in said, said
    assert _refusal({"load": moments, "no-load-optim": True, "override-opt-param-scheduler": True}) == ""


@pytest.mark.slow
def test_a_tied_weight_is_split_and_joined_and_what_was_trained_apart_is_not(tmp_path: Path) -> None:
    run_on_ranks(_split_and_join, RANKS, tmp_path)
