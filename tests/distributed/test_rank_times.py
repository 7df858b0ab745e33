"""Checks that the log shows a slow rank although all ranks wait for it in every step, on a clock under test control."""

import os
from unittest.mock import patch

import pytest
import torch.distributed as dist

import pretrain_gpt
from megatron.training.training import run_step
from tests.distributed.tiny_runs import started_run
from tests.harness import run_on_ranks

ARGV = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 60 --num-layers 1 --hidden-size 16 "
    "--num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 --micro-batch-size 1 --global-batch-size 3 "
    "--train-iters 2 --lr 0.1 --eval-iters 0 --log-interval 2 --timing-log-level 1"
).split()
WORK, LATE_WORK, WAITING = 0.125, 0.375, 0.25  # seconds
TICK = 2.0**-20  # seconds per read of the clock: a timer that measured nothing is not shown


def _two_steps():
    late, now, owed, reduce = os.environ["RANK"] == "1", [0.0], [0.0], dist.all_reduce

    def clock():
        now[0] += TICK
        return now[0]

    def forward_step(data_iterator, model):
        now[0] += LATE_WORK if late else WORK
        owed[0] = 0.0 if late else WAITING
        return pretrain_gpt.forward_step(data_iterator, model)

    def all_reduce(*args, **kwargs):
        # The first collective waits for the late rank, so afterwards all ranks are at the same time.
        now[0], owed[0] = now[0] + owed[0], 0.0
        return reduce(*args, **kwargs)

    with (
        patch("time.perf_counter", clock),
        patch.object(dist, "all_reduce", all_reduce),
        started_run(ARGV, forward_step=forward_step) as run,
    ):
        return [run.measured(run_step(run)[0]) for _ in range(2)]


@pytest.mark.slow
def test_a_late_rank_is_named_and_the_waiting_of_the_others_is_not_their_work() -> None:
    for first, second in run_on_ranks(_two_steps, 3):
        assert first.timers is None and first.seconds >= WORK + WAITING
        times = second.rank_times
        assert (times.max_rank, times.max_ms) == (1, pytest.approx(1000 * LATE_WORK, rel=1e-3))
        assert times.min_rank != 1 and times.min_ms == pytest.approx(1000 * WORK, rel=1e-3)
        assert second.timers.keys() == {
            *("forward-backward", "all-grads-sync", "optimizer"),
            *("optimizer-clip-main-grad", "optimizer-count-zeros", "optimizer-inner-step"),
        }
        assert any("slowest: rank 1, " in note for note in second.notes)
