"""Batch sizes of a run."""

import pytest

from megatron.core import num_microbatches_calculator as calculator


@pytest.fixture(autouse=True)
def forget():
    yield
    calculator.destroy_num_microbatches_calculator()


def test_microbatches_times_ranks_make_the_global_batch():
    calculator.init_num_microbatches_calculator(0, None, 24, 2, 3)
    calculator.update_num_microbatches(480)
    assert calculator.get_num_microbatches() == 4
    assert calculator.get_current_global_batch_size() == 24


def test_sizes_that_do_not_divide_are_all_named():
    with pytest.raises(ValueError, match=r"global_batch_size is 25.*micro_batch_size \(2\) x data_parallel_size \(3\)"):
        calculator.init_num_microbatches_calculator(0, None, 25, 2, 3)
    with pytest.raises(ValueError, match="micro_batch_size is 0"):
        calculator.init_num_microbatches_calculator(0, None, 24, 0, 3)
    with pytest.raises(ValueError, match="rampup_batch_size"):
        calculator.init_num_microbatches_calculator(0, [1, 2, 3], 24, 2, 3)


def test_sizes_are_set_once_and_asked_for_afterwards():
    with pytest.raises(RuntimeError, match="has not been called"):
        calculator.get_num_microbatches()
    calculator.init_num_microbatches_calculator(0, None, 4, 2, 1)
    with pytest.raises(RuntimeError, match="already set"):
        calculator.init_num_microbatches_calculator(0, None, 4, 1, 1)
