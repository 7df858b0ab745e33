"""Tests that docs/tour.md lists each function on the path from a batch to its loss."""

from tests.distributed.batch_walk import trace_batch
from tests.distributed.walks import lines
from tests.structure.tour import differences


def test_the_tour_lists_each_function_from_a_batch_to_its_loss():
    """Compares the page with `PYTHONPATH=. python tests/distributed/print_walk.py batch`, which prints its lines."""
    missing = differences("A batch to its loss", lines(trace_batch()))
    assert not missing, missing
