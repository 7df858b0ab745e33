"""Constant and increasing global batch sizes of a run, and their numbers of microbatches."""

import random
from dataclasses import fields
from fractions import Fraction

import pytest

from megatron.core import num_microbatches_calculator as calculator
from megatron.core.datasets.padding import NO_PADDING
from megatron.core.num_microbatches_calculator import build_batch_schedule, parse_step_schedule, ramp_up
from megatron.training.checkpointing.train_state import TrainState
from megatron.training.run import TrainingRun


@pytest.fixture(autouse=True)
def forget():
    yield
    calculator.destroy_num_microbatches_calculator()


def test_microbatches_times_ranks_make_the_global_batch():
    calculator.init_num_microbatches_calculator(0, None, 24, 2, 3)
    calculator.update_num_microbatches(480)
    assert calculator.get_num_microbatches() == 4
    assert calculator.get_current_global_batch_size() == 24


def naive_ramp(consumed, start, increment, samples, final):
    count = (final - start) // increment
    if not count or consumed > samples:
        return final
    return start + increment * min(count, int(Fraction(consumed) * count / samples) if samples else count)


@pytest.mark.parametrize("seed", range(200))
def test_a_ramp_gives_each_step_the_naive_size_and_counts_steps_as_a_loop_does(seed):
    rng = random.Random(seed)
    per_round, start, count = rng.choice([1, 2, 6]), rng.randint(1, 9), rng.randint(0, 7)
    increment, samples = rng.randint(1, 9), rng.randint(0, 400)
    ramp, wanted = [start * per_round, increment * per_round, samples], (start + increment * count) * per_round
    calculator.init_num_microbatches_calculator(0, ramp, wanted, per_round, 1)
    schedule, consumed, limit = ramp_up(ramp, wanted), 0, rng.randint(1, 900)
    for step in range(40):
        assert schedule.samples_after(step) == consumed
        calculator.update_num_microbatches(consumed)
        size = calculator.get_current_global_batch_size()
        assert size == naive_ramp(consumed, *ramp, wanted) == calculator.get_num_microbatches() * per_round
        if consumed <= limit < consumed + size:
            assert schedule.iterations_within(limit) == step
            # Remaining steps from an arbitrary point of the ramp-up on.
            passed = rng.randint(0, step)
            assert schedule.iterations_within(limit, consumed=schedule.samples_after(passed)) == step - passed
        consumed += size
    calculator.destroy_num_microbatches_calculator()


def test_a_run_moves_to_the_batch_size_of_its_next_step():
    batches = calculator.init_num_microbatches_calculator(0, [2, 2, 6], 6, 1, 2)
    parts = {field.name: None for field in fields(TrainingRun)}
    run = TrainingRun(**{**parts, "batches": batches, "state": TrainState()})
    sizes = []
    for _ in range(4):
        run.count_step(updated=True, nan=False, padding=NO_PADDING)
        sizes.append(calculator.get_current_global_batch_size())
        assert sizes[-1] == run.global_batch_size and calculator.get_num_microbatches() == run.num_microbatches
    assert sizes == [2, 4, 6, 6]


def test_steps_change_at_their_thresholds_in_tokens():
    schedule = parse_step_schedule("0:2 70:4 0.1K:8", seq_length=10)
    sizes, consumed = [], 0
    for _ in range(5):
        sizes.append(schedule.size_at(consumed))
        consumed += sizes[-1]
    assert sizes == [2, 2, 2, 2, 4] and schedule.starts == (0, 7, 10)
    assert parse_step_schedule("0:1 60B:2", seq_length=4096).starts[1] == 14_648_437


# Megatron-LM's parser by hand: each threshold counts tokens, and starts at tokens // seq_length samples.
@pytest.mark.parametrize(
    "schedule, seq_length, starts, sizes",
    [
        ("0:2 256:4", 32, (0, 8), (2, 4)),
        ("0:2,256:4", 32, (0, 8), (2, 4)),
        ("0:2, 0.256K:4", 32, (0, 8), (2, 4)),
        ("  0:2\t256:4,\n512:8 ", 32, (0, 8, 16), (2, 4, 8)),
        ("0:2 287:4", 32, (0, 8), (2, 4)),
        ("0:2 288:4", 32, (0, 9), (2, 4)),
        ("0K:8,1k:4", 64, (0, 15), (8, 4)),
        ("0:768 1.5M:1536 2b:3072", 4096, (0, 366, 488281), (768, 1536, 3072)),
        ("0:1 1T:2", 8192, (0, 122070312), (1, 2)),
        ("0:1 12345678901234567:2", 1, (0, 12345678901234567), (1, 2)),
        ("0:4", 2048, (0,), (4,)),
    ],
)
def test_thresholds_count_tokens_with_or_without_a_suffix(schedule, seq_length, starts, sizes):
    found = parse_step_schedule(schedule, seq_length=seq_length)
    assert (found.starts, found.sizes) == (starts, sizes)


def test_sizes_are_rounded_down_only_where_asked():
    settings = {"rampup_batch_size": [4, 1, 20], "global_batch_size": 7, "micro_batch_size": 2, "data_parallel_size": 2}
    with pytest.raises(
        ValueError, match=r"rampup_batch_size: the batch size becomes 5: must be a multiple of micro_batch_size \(2\)"
    ):
        calculator.init_num_microbatches_calculator(0, **settings)
    batches = calculator.init_num_microbatches_calculator(0, **settings, decrease_batch_size_if_needed=True)
    calculator.update_num_microbatches(20)
    assert calculator.get_current_global_batch_size() == 7
    assert batches.running.size_at(20) == 4 and calculator.get_num_microbatches() == 1


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"rampup_batch_size": [2, 2, 9], "step_batch_size_schedule": "0:8"}, "both given"),
        (
            {"rampup_batch_size": [3, 2, 9]},
            "START plus a multiple of INCREMENT must equal global_batch_size, which is 8",
        ),
        ({"rampup_batch_size": [2, 0, 9]}, "START and INCREMENT must be at least 1"),
        ({"step_batch_size_schedule": "0:2 5:4", "seq_length": 1}, "global_batch_size is 8: must be omitted"),
        ({"step_batch_size_schedule": "0:2;5:8", "seq_length": 1}, "must be THRESHOLD:BATCH_SIZE pairs"),
        (
            {"step_batch_size_schedule": "0:2 5:4 5:8", "seq_length": 1},
            r"thresholds must start at 0 and increase.*\[0, 5, 5\]",
        ),
        (
            {"step_batch_size_schedule": "0:2 16:8", "seq_length": 32},
            r"in samples of seq_length \(32\) they are \[0, 0\]",
        ),
        ({"step_batch_size_schedule": "0:2 5:8"}, "seq_length is None: must be set, because thresholds count tokens"),
        (
            {"step_batch_size_schedule": "0:2 1.5:8", "seq_length": 1},
            "threshold 1.5 has no unit: must be an integer number of tokens",
        ),
        ({"step_batch_size_schedule": "0:0 1:8", "seq_length": 1}, "at least 1"),
    ],
)
def test_schedules_that_cannot_be_followed_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        build_batch_schedule(8, **settings)


def test_sizes_that_do_not_divide_are_all_named():
    with pytest.raises(ValueError, match=r"global_batch_size is 25.*micro_batch_size \(2\) x data-parallel size \(3\)"):
        calculator.init_num_microbatches_calculator(0, None, 25, 2, 3)
    with pytest.raises(ValueError, match="micro_batch_size is 0"):
        calculator.init_num_microbatches_calculator(0, None, 24, 0, 3)


def test_sizes_are_set_once_and_asked_for_afterwards():
    with pytest.raises(RuntimeError, match="has not been called"):
        calculator.get_num_microbatches()
    calculator.init_num_microbatches_calculator(0, None, 4, 2, 1)
    with pytest.raises(RuntimeError, match="already set"):
        calculator.init_num_microbatches_calculator(0, None, 4, 1, 1)


def test_sizes_can_be_replaced_during_a_run():
    calculator.init_num_microbatches_calculator(rank=0, global_batch_size=8, micro_batch_size=2, data_parallel_size=1)
    calculator.update_num_microbatches(80)
    assert calculator.get_num_microbatches() == 4
    calculator.destroy_num_microbatches_calculator()
    calculator.init_num_microbatches_calculator(0, [4, 4, 16], 12, 4, 1)
    assert calculator.get_num_microbatches() == 1
    calculator.destroy_num_microbatches_calculator()
    calculator.init_num_microbatches_calculator(0, None, None, 2, 1, False, "0:2 64:8", 16)
    calculator.update_num_microbatches(4)
    assert calculator.get_num_microbatches() == 4


@pytest.mark.parametrize("missing", ["global_batch_size", "micro_batch_size", "data_parallel_size"])
def test_sizes_that_are_left_out_are_named(missing):
    sizes = {"global_batch_size": 4, "micro_batch_size": 2, "data_parallel_size": 1}
    with pytest.raises(ValueError, match=f"{missing} is None"):
        calculator.init_num_microbatches_calculator(0, **{**sizes, missing: None})
