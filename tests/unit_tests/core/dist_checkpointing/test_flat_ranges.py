"""Random parameters, cut anywhere into ranges: their boxes hold every stored element once, and the right one."""

import math
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.dist_checkpointing import LogicalPiece
from megatron.core.dist_checkpointing.boxes import Box, whole
from megatron.core.dist_checkpointing.flat_ranges import range_tensors, range_views
from megatron.core.dist_checkpointing.logical import identity_piece


def _any_parameter(random: Random) -> tuple[int, list[LogicalPiece]]:
    """Elements of a parameter as our modules store one, and its pieces."""
    kind = random.choice(["as it is", "gated", "grouped", "experts", "padded", "scalar"])
    a, b, c, d = (random.randint(1, 5) for _ in range(4))
    if kind == "as it is":
        shape = tuple(random.randint(0, 4) for _ in range(random.randint(1, 4)))
        return math.prod(shape), [identity_piece("k", shape)]
    if kind == "gated":
        return 2 * a * b, [LogicalPiece(f"k{i}", (a, b), (b, 1), i * a * b, (a, b), (0, 0)) for i in range(2)]
    if kind == "grouped":
        # a groups of b queries, one key and one value, of c rows and d columns.
        head, group = c * d, (b + 2) * c * d
        q = LogicalPiece("q", (a, b, c, d), (group, head, d, 1), 0, (a, b, c, d), (0, 0, 0, 0))
        k, v = (
            LogicalPiece(n, (a, c, d), (group, d, 1), (b + i) * head, (a, c, d), (0, 0, 0))
            for i, n in ((0, "k"), (1, "v"))
        )
        return a * group, [q, k, v]
    if kind == "experts":
        # a experts, transposed, gate beside up; the stored tensors have one expert more before them.
        strides, stored = (2 * b * c, 1, 2 * b), (a + 1, b, c)
        return 2 * a * b * c, [LogicalPiece(f"k{i}", (a, b, c), strides, i * b, stored, (1, 0, 0)) for i in range(2)]
    if kind == "padded":
        # b rows of padding; the rank may have nothing else.
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
        # Inside something larger, as a shard is.
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
        # Sums: an element that two boxes hold would be twice what it is.
        assert torch.equal(stored[piece.key][window], piece.view_of(parameter))
        assert stored[piece.key].sum() == piece.view_of(parameter).sum()
        piece.view_of(covered).fill_(1)
    assert torch.equal(loaded[3 : 3 + numel], covered) and loaded[:3].sum() == loaded[3 + numel :].sum() == 0


def test_a_window_that_is_in_no_order_of_memory_is_refused() -> None:
    # Rows 3 apart, columns 2 apart: each row starts inside the one before.
    with pytest.raises(ValueError, match="logical piece k: no order of dimensions"):
        range_views([LogicalPiece("k", (2, 3), (3, 2), 0, (2, 3), (0, 0))], torch.zeros(8), start=0)
