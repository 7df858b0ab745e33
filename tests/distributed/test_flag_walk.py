"""Tests that docs/tour.md lists each function on the path from a flag of the command line to its use."""

from tests.distributed.flag_walk import trace_flag
from tests.distributed.walks import lines, paths
from tests.structure.tour import differences

MOST_FILES = 10


def test_the_tour_lists_each_function_from_a_flag_to_its_use():
    """Compares the page with `PYTHONPATH=. python tests/distributed/print_walk.py flag`, which prints its lines."""
    holders = trace_flag()
    missing = differences("A flag to its use", lines(holders))
    assert not missing, missing
    assert len(paths(holders)) <= MOST_FILES, paths(holders)
