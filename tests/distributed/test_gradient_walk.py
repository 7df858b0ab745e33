"""Checks that the path from a gradient to an updated parameter enters no more files and classes than it does today."""

import pytest

from tests.distributed.gradient_walk import report, trace_walk
from tests.distributed.walks import paths, public_classes
from tests.structure.tour import differences, listed_nouns

# Number of files that a step enters, of public classes that own an entered function, and of nouns. A class and its base
# count as one noun, and records are listed separately. Lower the numbers when the code shrinks; an increase needs a
# reason.
FILES, FILES_WITH_WRAPPING_AND_SAVING, PUBLIC_CLASSES, NOUNS = 19, 27, 22, 19


@pytest.fixture(scope="module")
def walk():
    """Returns the trace of the first rank."""
    return trace_walk()[0]


def test_a_step_enters_no_more_files_than_before(walk):
    entered, with_wrapping = paths(walk.step), paths([*walk.step, *walk.around])
    assert len(entered) <= FILES and len(with_wrapping) <= FILES_WITH_WRAPPING_AND_SAVING, report(walk)


def test_the_tour_lists_each_function_that_a_step_enters(walk):
    """Checks docs/tour.md. `PYTHONPATH=. python tests/distributed/print_walk.py gradient` prints its lines."""
    missing = differences("A gradient to an updated parameter", walk.lines())
    assert not missing, missing


def test_the_tour_lists_the_nouns_and_records_that_a_step_meets(walk):
    """Checks the two lists of docs/tour.md, in which a class and its base class count as one noun."""
    nouns = listed_nouns("Nouns on the way of a gradient")
    records = listed_nouns("Records on the way of a gradient")
    listed = sorted(name for row in [*nouns, *records] for name in row)
    assert listed == sorted(public_classes(walk.step))
    assert len(nouns) <= NOUNS and len(listed) <= PUBLIC_CLASSES


def test_the_walk_leads_from_the_gradient_to_the_gather(walk):
    lines = walk.lines()
    landmarks = ["zero_grad_buffer", "finalize_model_grads", "MegatronOptimizer.step", "DistributedOptimizer._update"]
    first = [next(index for index, line in enumerate(lines) if line.endswith(name)) for name in landmarks]
    assert first == sorted(first) and len(lines) == len(set(lines))
