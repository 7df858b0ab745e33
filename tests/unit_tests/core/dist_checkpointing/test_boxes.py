"""Box arithmetic against marks in a small array."""

import numpy
import pytest
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


@given(box_lists(max_boxes=20))
def test_disjoint_parts_are_those_of_a_comparison_of_all_pairs(case):
    _, boxes = case
    parts = []
    for index in sorted(range(len(boxes)), key=lambda i: -boxes[i].volume):
        rest = [boxes[index]] if boxes[index].volume else []
        for _, taken in parts:
            rest = [part for piece in rest for part in subtract(piece, taken)]
        parts += [(index, part) for part in rest]
    assert disjoint_parts(boxes) == parts


@pytest.mark.slow
def test_twenty_thousand_boxes_of_any_shape_are_no_quadratic_work():
    # Of a stacked tensor [experts, rows, columns]: shards by rows of some ranks and by columns of others.
    rows = [Box((expert, 4 * row, 0), (1, 4, 4096)) for expert in range(100) for row in range(100)]
    columns = [Box((expert, 0, 40 * column), (1, 400, 40)) for expert in range(100, 200) for column in range(102)]
    rest = [Box((expert, 0, 4080), (1, 400, 16)) for expert in range(100, 200)]
    boxes = rows + columns + rest + [Box((0, 0, 0), (1, 400, 4096))]
    parts = disjoint_parts(boxes)
    assert sum(part.volume for _, part in parts) == 200 * 400 * 4096
    assert len(parts) == len(boxes) - 100  # the whole first expert holds its hundred shards


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
