"""docs/tour.md lists each function on the ways of a token and of an activation, and they stay as short as they are."""

import pytest

from tests.distributed.token_walk import Buffers, report, trace_activation, trace_token, without_activation
from tests.distributed.walks import lines, paths
from tests.structure.tour import differences

# Files of megatron.core that are entered. Lower them with the code; a new file on a way needs a reason.
FILES = {Buffers.DYNAMIC: 15, Buffers.STATIC: 17, Buffers.STASH: 24}
FILES_OF_ACTIVATION = 8


@pytest.fixture(scope="module")
def tokens():
    """What the first rank enters, by kind of buffers."""
    return {buffers: trace_token(buffers)[0] for buffers in Buffers}


@pytest.fixture(scope="module")
def activation():
    return trace_activation()


@pytest.mark.parametrize("buffers", Buffers)
def test_a_token_enters_no_more_files_than_before(tokens, buffers):
    assert len(paths(tokens[buffers])) <= FILES[buffers], report(buffers.value, tokens[buffers])


def test_a_saved_activation_enters_no_more_files_than_before(activation):
    assert len(paths(activation)) <= FILES_OF_ACTIVATION, report("saved activation", activation)


def test_the_tour_lists_each_function_that_a_token_enters(tokens):
    """`PYTHONPATH=. python tests/distributed/print_walk.py token` prints the lines of the page."""
    missing = differences("A token through an expert layer and back", lines(tokens[Buffers.DYNAMIC]))
    assert not missing, missing


def test_the_tour_lists_each_function_that_a_token_enters_with_a_stash(tokens):
    """`PYTHONPATH=. python tests/distributed/print_walk.py stash` prints the lines of the page."""
    missing = differences("A token through static buffers and the stash", without_activation(tokens[Buffers.STASH]))
    assert not missing, missing


def test_the_tour_lists_each_function_that_a_saved_activation_enters(activation):
    """`PYTHONPATH=. python tests/distributed/print_walk.py activation` prints the lines of the page."""
    missing = differences("A saved activation into pages and back", lines(activation))
    assert not missing, missing
