"""Box arithmetic against marks in a small array."""

import numpy
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.boxes import Box, disjoint_parts, intersection, subtract, whole


@st.composite
def box_lists(draw, max_boxes=6):
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    boxes = []
    for _ in range(draw(st.integers(0, max_boxes))):
        ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
        boxes.append(Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends)))
    return shape, boxes


def count(shape, boxes):
    marks = numpy.zeros(shape, dtype=int)
    for box in boxes:
        marks[box.relative_to(whole(shape))] += 1
    return marks


@given(box_lists())
def test_disjoint_parts_cover_the_union_once(case):
    shape, boxes = case
    parts = disjoint_parts(boxes)
    assert (count(shape, [part for _, part in parts]) == (count(shape, boxes) > 0)).all()
    assert all(part.is_inside(boxes[index]) for index, part in parts)


@given(box_lists(max_boxes=2).filter(lambda case: len(case[1]) == 2))
def test_intersection_and_difference_share_a_box_out(case):
    shape, (a, b) = case
    common = intersection(a, b)
    rest = subtract(a, b)
    assert (count(shape, rest + ([common] if common else [])) == count(shape, [a])).all()
    assert len(rest) <= max(1, 2 * len(shape))
    assert (common is None) == (not (count(shape, [a]) * count(shape, [b])).any())


def test_equal_boxes_give_one_part():
    box = Box((1, 0), (2, 3))
    assert disjoint_parts([box, box, box]) == [(0, box)]
