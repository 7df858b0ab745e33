"""TRAPS B9: a tied embedding has a copy on the first and on the last stage, and training keeps them one weight."""

import pytest
import torch
from torch import Tensor

from megatron.core.dist_checkpointing.logical import canonical_name
from megatron.training.training import train_step
from tests.counts import slow
from tests.distributed.parity import FLAGS, fp64_forward_step, fp64_model
from tests.distributed.tiny_runs import started_run
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.harness import run_on_ranks

STEPS = 20
# Adam in fp64, with everything that could pull the copies apart: decay, clipping, a rate of their own.
TRAINING: Flags = {
    **FLAGS,
    "num-layers": 4,
    "global-batch-size": 6,
    "micro-batch-size": 1,
    "train-iters": STEPS,
    "optimizer": "adam",
    "lr": 0.01,
    "clip-grad": 0.5,
    "decoupled-lr": 0.02,
}
TABLES = ("embedding.word_embeddings.weight", "output_layer.weight")


@pytest.mark.parametrize(("stages", "copies"), [(2, 3), slow(4, 3)])
def test_b9_both_copies_stay_bit_equal_and_equal_to_one_process(stages: int, copies: int) -> None:
    argv = command_line({**read_bases()["dense"], **TRAINING})
    [[reference]] = run_on_ranks(_tables, 1, argv)
    layout = ["--pipeline-model-parallel-size", str(stages)]
    tables = run_on_ranks(_tables, stages * copies, [*argv, *layout], timeout=300)
    held = [table for rank in tables for table in rank]
    assert len(held) == 2 * copies
    assert all(torch.equal(table, held[0]) for table in held)
    torch.testing.assert_close(held[0], reference, rtol=0, atol=1e-8 * reference.norm().item())


def _tables(argv: list[str]) -> list[Tensor]:
    """This rank's copies of the vocabulary's table after training."""
    with started_run(argv, forward_step=fp64_forward_step, model_provider=fp64_model) as run:
        start = [p.detach().clone() for chunk in run.model for p in chunk.parameters()]
        for _ in range(STEPS):
            train_step(run)
        assert any(not torch.equal(a, b) for a, b in zip(start, (p for c in run.model for p in c.parameters())))
        named = (item for chunk in run.model for item in chunk.named_parameters())
        return [param.detach().clone() for name, param in named if canonical_name(name) in TABLES]
