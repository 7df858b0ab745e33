"""Traces the path of a batch: the functions that a training step enters, from run_step to the loss. Holds no tests.

`trace_batch` trains a dense GPT of two layers on one rank with mock data, in fp32, without optional features. After two
warm-up steps it records each function of megatron and pretrain_gpt.py that the third step enters until the loss is
computed.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

import pretrain_gpt
from megatron.training.training import run_step
from tests.distributed.tiny_runs import started_run
from tests.distributed.walks import ROOT, Entered, traced
from tests.harness import run_on_ranks

COMMAND_LINE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --swiglu "
    "--disable-bias-linear --normalization RMSNorm --position-embedding-type rope --micro-batch-size 2 "
    "--global-batch-size 2 --train-iters 10 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 100"
)


def trace_batch() -> list[Entered]:
    """Returns the functions that a step enters until the loss of its only microbatch is computed."""
    return run_on_ranks(_batch_on_rank, 1)[0]


def _batch_on_rank() -> list[Entered]:
    lengths: list[int] = []
    entered: list[Entered] = []

    def forward_step(data_iterator: Iterator[dict[str, Tensor]] | None, model: nn.Module) -> Any:
        output, loss_func = pretrain_gpt.forward_step(data_iterator, model)

        def loss(*args: Any) -> Any:
            result = loss_func(*args)
            lengths.append(len(entered))
            return result

        return output, loss

    with started_run(COMMAND_LINE.split(), forward_step=forward_step) as run:
        run_step(run)
        run_step(run)
        lengths.clear()
        with traced([ROOT / "megatron", ROOT / "pretrain_gpt.py"]) as entered:
            run_step(run)
    return entered[: lengths[0]]
