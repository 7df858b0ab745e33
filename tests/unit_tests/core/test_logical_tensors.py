"""Boxes compared with counts in a small array, logical pieces of modules, and flat ranges of random parameters."""

import math
from random import Random

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.dist_checkpointing import sharded_tensors
from megatron.core.dist_checkpointing.mapping import range_tensors
from megatron.core.logical_tensors import (
    Box,
    LogicalPiece,
    disjoint_parts,
    identity_piece,
    intersection,
    model_logical_pieces,
    range_views,
    subtract,
    whole,
)

# Boxes.


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
    # A stacked tensor [experts, rows, columns]: some ranks shard by rows and others by columns.
    rows = [Box((expert, 4 * row, 0), (1, 4, 4096)) for expert in range(100) for row in range(100)]
    columns = [Box((expert, 0, 40 * column), (1, 400, 40)) for expert in range(100, 200) for column in range(102)]
    rest = [Box((expert, 0, 4080), (1, 400, 16)) for expert in range(100, 200)]
    boxes = rows + columns + rest + [Box((0, 0, 0), (1, 400, 4096))]
    parts = disjoint_parts(boxes)
    assert sum(part.volume for _, part in parts) == 200 * 400 * 4096
    assert len(parts) == len(boxes) - 100  # the box of the first expert contains the hundred shards of that expert


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


# Logical pieces.


class GatedMLP(torch.nn.Module):
    """A module whose fc1 stores gate rows followed by up rows."""

    def __init__(self):
        super().__init__()
        self.fc1 = torch.nn.Linear(3, 8, bias=False)
        self.fc2 = torch.nn.Linear(4, 3)

    def logical_pieces(self, prefix):
        names = [f"{prefix}fc1.weight.{part}" for part in ("gate", "up")]
        return {"fc1.weight": [LogicalPiece(n, (4, 3), (3, 1), i * 12, (4, 3), (0, 0)) for i, n in enumerate(names)]}


class Stack(torch.nn.Module):
    """Two gated experts whose gates are stored as one stacked tensor. Overrides the experts' logical pieces."""

    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList([GatedMLP(), GatedMLP()])

    def logical_pieces(self, prefix):
        return {
            f"experts.{e}.fc1.weight": [LogicalPiece(f"{prefix}gate", (1, 4, 3), (12, 3, 1), 0, (2, 4, 3), (e, 0, 0))]
            for e in range(2)
        }


class Wrapper(torch.nn.Module):
    """A wrapper like DDP."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def test_modules_describe_their_parameters_and_others_are_stored_as_they_are():
    pieces = model_logical_pieces(Wrapper(Wrapper(torch.nn.Sequential(GatedMLP(), torch.nn.LayerNorm(3)))))
    assert list(pieces) == ["0.fc1.weight", "0.fc2.weight", "0.fc2.bias", "1.weight", "1.bias"]
    assert [piece.key for piece in pieces["0.fc1.weight"]] == ["0.fc1.weight.gate", "0.fc1.weight.up"]
    assert pieces["0.fc2.weight"] == [identity_piece("0.fc2.weight", (3, 4))]


def test_outer_module_wins_over_inner():
    pieces = model_logical_pieces(torch.nn.ModuleDict({"mlp": Stack()}))
    assert [pieces[f"mlp.experts.{e}.fc1.weight"][0].key for e in range(2)] == ["mlp.gate"] * 2


def test_views_alias_the_parameter_even_inside_a_flat_buffer():
    model = GatedMLP()
    flat = torch.zeros(64)
    parameter_shaped = flat[16:40].view(8, 3)
    gate, up = sharded_tensors(model_logical_pieces(model)["fc1.weight"], parameter_shaped, prefix="m.")
    gate.data.fill_(1)
    up.data.fill_(2)
    assert (gate.key, up.key) == ("m.fc1.weight.gate", "m.fc1.weight.up")
    assert torch.equal(flat[16:40], torch.tensor([1.0] * 12 + [2.0] * 12))
    assert flat[:16].abs().sum() == flat[40:].abs().sum() == 0


def test_tied_parameter_appears_once_under_its_first_name():
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2, bias=False), "b": torch.nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    assert list(model_logical_pieces(model)) == ["a.weight"]


@pytest.mark.parametrize("shape", [(), (0, 3), (3, 0)])
def test_identity_of_small_shapes(shape):
    assert identity_piece("k", shape).view_of(torch.zeros(shape)).shape == shape


def test_wrong_descriptions_are_refused():
    with pytest.raises(ValueError, match="must be inside the logical tensor"):
        LogicalPiece("k", (2, 3), (3, 1), 0, (2, 3), (1, 0))
    with pytest.raises(ValueError, match="contiguous"):
        identity_piece("k", (3, 2)).view_of(torch.zeros(2, 3).t())
    with pytest.raises(ValueError, match="reaches element 5 of a tensor of 4"):
        identity_piece("k", (3, 2)).view_of(torch.zeros(4))
    model = GatedMLP()
    model.logical_pieces = lambda prefix: {"nothing": [identity_piece("x", (1,))]}
    with pytest.raises(ValueError, match="are not in the model: nothing"):
        model_logical_pieces(model)


# Flat ranges.


def _any_parameter(random: Random) -> tuple[int, list[LogicalPiece]]:
    """Draws a parameter's number of elements and its logical pieces, in the layouts that our modules use."""
    kind = random.choice(["as it is", "gated", "grouped", "experts", "padded", "scalar"])
    a, b, c, d = (random.randint(1, 5) for _ in range(4))
    if kind == "as it is":
        shape = tuple(random.randint(0, 4) for _ in range(random.randint(1, 4)))
        return math.prod(shape), [identity_piece("k", shape)]
    if kind == "gated":
        return 2 * a * b, [LogicalPiece(f"k{i}", (a, b), (b, 1), i * a * b, (a, b), (0, 0)) for i in range(2)]
    if kind == "grouped":
        # a groups of b queries, one key and one value, each with c rows and d columns.
        head, group = c * d, (b + 2) * c * d
        q = LogicalPiece("q", (a, b, c, d), (group, head, d, 1), 0, (a, b, c, d), (0, 0, 0, 0))
        k, v = (
            LogicalPiece(n, (a, c, d), (group, d, 1), (b + i) * head, (a, c, d), (0, 0, 0))
            for i, n in ((0, "k"), (1, "v"))
        )
        return a * group, [q, k, v]
    if kind == "experts":
        # a experts, transposed, with gate next to up. The stored tensors contain one more expert before them.
        strides, stored = (2 * b * c, 1, 2 * b), (a + 1, b, c)
        return 2 * a * b * c, [LogicalPiece(f"k{i}", (a, b, c), strides, i * b, stored, (1, 0, 0)) for i in range(2)]
    if kind == "padded":
        # b rows of padding, possibly the only rows of this rank.
        rows = random.choice([0, a])
        return (rows + b) * c, [LogicalPiece("k", (rows, c), (c, 1), 0, (a + d, c), (d if rows else a + d, 0))]
    return 1, [identity_piece("k", ())]


@given(st.integers(0, 2**32))
def test_boxes_of_all_ranks_hold_each_stored_element_once_and_load_in_place(seed: int) -> None:
    random = Random(seed)
    numel, pieces = _any_parameter(random)
    parameter = torch.arange(1, numel + 1)
    stored = {piece.key: torch.zeros(piece.global_shape, dtype=torch.int64) for piece in pieces}
    cuts = sorted([0, numel, *(random.randint(0, numel) for _ in range(random.randint(0, 5)))])
    loaded = torch.zeros(numel + 7, dtype=torch.int64)
    for start, end in zip(cuts, cuts[1:], strict=False):
        # Inside a larger buffer, like a shard.
        flat = torch.zeros(end - start + 9, dtype=torch.int64)[5 : 5 + end - start]
        flat.copy_(parameter[start:end])
        boxes = range_tensors(pieces, flat, start=start)
        assert all(sum(box.key == piece.key for box in boxes) <= max(1, 2 * len(piece.shape) - 1) for piece in pieces)
        for box in boxes:
            assert box.data.numel() > 0
            stored[box.key][box.box.relative_to(whole(box.global_shape))] += box.data
        assert sum(view.numel() for view in range_views(pieces, flat, start=start)) == sum(
            b.data.numel() for b in boxes
        )
        for box in range_tensors(pieces, loaded[3 + start : 3 + end], start=start):
            box.data.fill_(1)
    covered = torch.zeros(numel, dtype=torch.int64)
    for piece in pieces:
        window = Box(piece.global_offset, piece.shape).relative_to(whole(piece.global_shape))
        # Sums detect overlaps: an element in two boxes would count twice.
        assert torch.equal(stored[piece.key][window], piece.view_of(parameter))
        assert stored[piece.key].sum() == piece.view_of(parameter).sum()
        piece.view_of(covered).fill_(1)
    assert torch.equal(loaded[3 : 3 + numel], covered) and loaded[:3].sum() == loaded[3 + numel :].sum() == 0


def test_a_window_that_is_in_no_order_of_memory_is_refused() -> None:
    # Rows 3 apart, columns 2 apart: each row starts inside the previous one.
    with pytest.raises(ValueError, match="logical piece k: no order of dimensions"):
        range_views([LogicalPiece("k", (2, 3), (3, 2), 0, (2, 3), (0, 0))], torch.zeros(8), start=0)
