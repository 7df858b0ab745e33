"""docs/tour.md lists each function on the paths of a token and an activation, and the paths do not get longer."""

import pytest

from tests.distributed.token_walk import Buffers, report, trace_activation, trace_token, without_activation
from tests.distributed.walks import lines, paths
from tests.structure.tour import differences

# Numbers of files of megatron.core that are entered. Lower them when the code shrinks; a new file needs a reason.
FILES = {Buffers.DYNAMIC: 15, Buffers.STATIC: 17, Buffers.STASH: 26}
FILES_OF_ACTIVATION = 8


@pytest.fixture(scope="module")
def tokens():
    """Returns the functions that the first rank enters, by kind of buffers."""
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
    """Checks docs/tour.md. `PYTHONPATH=. python tests/distributed/print_walk.py token` prints its lines."""
    missing = differences("A token through an expert layer and back", lines(tokens[Buffers.DYNAMIC]))
    assert not missing, missing


def test_the_tour_lists_each_function_that_a_token_enters_with_a_stash(tokens):
    """Checks docs/tour.md. `PYTHONPATH=. python tests/distributed/print_walk.py stash` prints its lines."""
    missing = differences("A token through static buffers and the stash", without_activation(tokens[Buffers.STASH]))
    assert not missing, missing


def test_the_tour_lists_each_function_that_a_saved_activation_enters(activation):
    """Checks docs/tour.md. `PYTHONPATH=. python tests/distributed/print_walk.py activation` prints its lines."""
    missing = differences("A saved activation into pages and back", lines(activation))
    assert not missing, missing
