"""The way from a gradient to an updated parameter stays as short as it is."""

import pytest

from tests.distributed.gradient_walk import report, trace_walk
from tests.distributed.walks import paths, public_classes

# What a step enters today. Lower them with the code; a new file or class on the way needs a reason.
FILES, FILES_WITH_WRAPPING_AND_SAVING, PUBLIC_CLASSES = 21, 26, 24


@pytest.fixture(scope="module")
def walk():
    """The walk of the first rank."""
    return trace_walk()[0]


def test_a_step_enters_no_more_files_than_before(walk):
    entered, with_wrapping = paths(walk.step), paths([*walk.step, *walk.around])
    assert len(entered) <= FILES and len(with_wrapping) <= FILES_WITH_WRAPPING_AND_SAVING, report(walk)


def test_a_step_meets_no_more_public_classes_than_before(walk):
    classes = public_classes(walk.step)
    assert len(classes) <= PUBLIC_CLASSES, report(walk)


def test_the_walk_leads_from_the_gradient_to_the_gather(walk):
    lines = walk.lines()
    landmarks = ["zero_grad_buffer", "finalize_model_grads", "MegatronOptimizer.step", "DistributedOptimizer._update"]
    first = [next(index for index, line in enumerate(lines) if line.endswith(name)) for name in landmarks]
    assert first == sorted(first) and len(lines) == len(set(lines))
