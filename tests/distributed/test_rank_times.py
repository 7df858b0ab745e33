"""A slow rank shows in the log although all ranks wait for it in every step."""

import time

import pretrain_gpt
from megatron.training.training import train_step
from tests.distributed.tiny_runs import started_run
from tests.harness import run_on_ranks

ARGV = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 60 --num-layers 1 --hidden-size 16 "
    "--num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 --micro-batch-size 1 --global-batch-size 3 "
    "--train-iters 2 --lr 0.1 --eval-iters 0 --log-interval 2 --timing-log-level 1"
).split()
DELAY = 0.3


def _late_forward_step(data_iterator, model):
    if pretrain_gpt.get_args().rank == 1:
        time.sleep(DELAY)
    return pretrain_gpt.forward_step(data_iterator, model)


def _two_steps():
    with started_run(ARGV, forward_step=_late_forward_step) as run:
        return [run.measured(train_step(run)[0]) for _ in range(2)]


def test_a_late_rank_is_named_and_the_waiting_of_the_others_is_not_their_work() -> None:
    for first, second in run_on_ranks(_two_steps, 3):
        assert first.timers is None and first.seconds > DELAY
        times = second.rank_times
        assert times.max_rank == 1 and times.max_ms >= 1000 * DELAY
        assert times.min_ms < 1000 * min(first.seconds, second.seconds)
        assert second.timers.keys() == {
            *("forward-backward", "all-grads-sync", "optimizer"),
            *("optimizer-clip-main-grad", "optimizer-count-zeros", "optimizer-inner-step"),
        }
        assert any("slowest: rank 1, " in note for note in second.notes)
