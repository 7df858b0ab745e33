"""The launch budget: operators that launch kernels, per layer and step, by phase and by kind, as they are today.

An increase of any kind fails the test, which names the operators. A decrease fails it too, until the table is lowered,
so that the saving cannot be lost. `PYTHONPATH=. .venv/bin/python tests/distributed/launch_budget.py operators` prints
all operators; the notes of that file say which operators count. The numbers are valid for the pinned torch: another
version may split operators differently.
"""

import functools
from collections import Counter
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest

from megatron.core.transformer.moe import dispatch_static
from megatron.core.transformer.moe.static_rows import StaticOrder
from tests.distributed.expert_layers import KINDS, build_layer, rank_inputs
from tests.distributed.launch_budget import (
    BACKWARD,
    ELSEWHERE,
    FORWARD,
    SETTINGS,
    Launched,
    StepLaunches,
    Table,
    by_kind,
    by_phase,
    count,
    of_moe,
    operators_of,
    recorded_launches,
)


@dataclass(frozen=True)
class Budget:
    """Launches (forward, backward) of a layer, by phase and by kind, and of a step of two layers, by phase."""

    layer: Table
    kinds: Table
    step: Table


BUDGETS = {
    "dense": Budget(
        layer={
            "norms": (18, 30),
            "attention": (4, 6),
            "dense layer": (6, 19),
            "gradient buffers": (0, 6),
            "optimizer": (4, 0),
            "residuals": (2, 0),
        },
        kinds={
            "elementwise": (16, 27),
            "copies": (10, 22),
            "products": (5, 11),
            "own kernels": (1, 1),
            "reductions": (2, 0),
        },
        step={
            "norms": (45, 74),
            "attention": (8, 12),
            "loss": (31, 13),
            "dense layer": (12, 38),
            "optimizer": (21, 0),
            "gradient buffers": (3, 17),
            "router losses": (14, 0),
            "checks": (9, 5),
            "gradient norm": (9, 0),
            "embedding, output layer": (5, 3),
            "report": (6, 0),
            "residuals": (4, 0),
            "embedding": (1, 0),
        },
    ),
    "static experts": Budget(
        layer={
            "norms": (18, 30),
            "attention": (4, 6),
            "router losses": (10, 3),
            "experts": (5, 5),
            "router": (6, 4),
            "demand": (6, 0),
            "gradient buffers": (0, 5),
            "checks": (4, 0),
            "dispatch": (2, 2),
            "optimizer": (4, 0),
            "residuals": (2, 1),
            "combine": (1, 1),
            "order_by_expert": (1, 0),
        },
        kinds={
            "elementwise": (27, 21),
            "copies": (11, 17),
            "own kernels": (8, 10),
            "products": (4, 9),
            "reductions": (6, 0),
            "fills": (4, 0),
            "sorts, scans": (2, 0),
            "indexing": (1, 0),
        },
        step={
            "norms": (45, 74),
            "attention": (8, 12),
            "loss": (31, 13),
            "router losses": (34, 6),
            "experts": (12, 10),
            "checks": (17, 5),
            "optimizer": (21, 0),
            "router": (12, 8),
            "gradient buffers": (3, 15),
            "report": (18, 0),
            "demand": (12, 0),
            "gradient norm": (9, 0),
            "dispatch": (4, 4),
            "embedding, output layer": (5, 3),
            "residuals": (4, 2),
            "combine": (2, 2),
            "order_by_expert": (2, 0),
            "embedding": (1, 0),
        },
    ),
    "static experts, stash": Budget(
        layer={
            "norms": (18, 30),
            "attention": (4, 6),
            "router losses": (10, 3),
            "experts": (5, 5),
            "router": (6, 4),
            "stash": (1, 2),
            "demand": (6, 0),
            "gradient buffers": (0, 5),
            "checks": (4, 0),
            "dispatch": (2, 2),
            "optimizer": (4, 0),
            "residuals": (2, 1),
            "combine": (1, 1),
            "order_by_expert": (1, 0),
        },
        kinds={
            "elementwise": (27, 21),
            "copies": (11, 17),
            "own kernels": (9, 12),
            "products": (4, 9),
            "reductions": (6, 0),
            "fills": (4, 0),
            "sorts, scans": (2, 0),
            "indexing": (1, 0),
        },
        step={
            "norms": (45, 74),
            "attention": (8, 12),
            "loss": (31, 13),
            "router losses": (34, 6),
            "experts": (12, 10),
            "checks": (17, 5),
            "optimizer": (21, 0),
            "router": (12, 8),
            "stash": (12, 2),
            "gradient buffers": (3, 15),
            "report": (18, 0),
            "demand": (12, 0),
            "gradient norm": (9, 0),
            "dispatch": (4, 4),
            "embedding, output layer": (5, 3),
            "residuals": (4, 2),
            "combine": (2, 2),
            "order_by_expert": (2, 0),
            "embedding": (1, 0),
        },
    ),
    "static experts, stash of copies": Budget(
        layer={
            "norms": (18, 30),
            "attention": (4, 6),
            "router losses": (10, 3),
            "experts": (5, 5),
            "router": (6, 4),
            "stash": (2, 3),
            "demand": (6, 0),
            "gradient buffers": (0, 5),
            "checks": (4, 0),
            "dispatch": (2, 2),
            "optimizer": (4, 0),
            "residuals": (2, 1),
            "combine": (1, 1),
            "order_by_expert": (1, 0),
        },
        kinds={
            "elementwise": (27, 21),
            "copies": (11, 17),
            "own kernels": (10, 13),
            "products": (4, 9),
            "reductions": (6, 0),
            "fills": (4, 0),
            "sorts, scans": (2, 0),
            "indexing": (1, 0),
        },
        step={
            "norms": (45, 74),
            "attention": (8, 12),
            "loss": (31, 13),
            "router losses": (34, 6),
            "experts": (12, 10),
            "checks": (17, 5),
            "optimizer": (21, 0),
            "router": (12, 8),
            "stash": (13, 3),
            "gradient buffers": (3, 15),
            "report": (18, 0),
            "demand": (12, 0),
            "gradient norm": (9, 0),
            "dispatch": (4, 4),
            "embedding, output layer": (5, 3),
            "residuals": (4, 2),
            "combine": (2, 2),
            "order_by_expert": (2, 0),
            "embedding": (1, 0),
        },
    ),
    "experts in 8 bits": Budget(
        layer={
            "norms": (18, 30),
            "experts": (8, 12),
            "attention": (4, 6),
            "router losses": (10, 3),
            "router": (6, 4),
            "demand": (7, 0),
            "gradient buffers": (0, 5),
            "checks": (4, 0),
            "dispatch": (2, 2),
            "optimizer": (4, 0),
            "residuals": (2, 1),
            "combine": (1, 1),
            "order_by_expert": (1, 0),
        },
        kinds={
            "elementwise": (28, 21),
            "copies": (11, 17),
            "own kernels": (11, 17),
            "products": (4, 9),
            "reductions": (6, 0),
            "fills": (4, 0),
            "sorts, scans": (2, 0),
            "indexing": (1, 0),
        },
        step={
            "norms": (45, 74),
            "loss": (31, 13),
            "experts": (18, 24),
            "router losses": (34, 6),
            "checks": (17, 5),
            "optimizer": (21, 0),
            "attention": (8, 12),
            "router": (12, 8),
            "gradient buffers": (3, 15),
            "report": (18, 0),
            "demand": (14, 0),
            "gradient norm": (9, 0),
            "dispatch": (4, 4),
            "embedding, output layer": (5, 3),
            "residuals": (4, 2),
            "combine": (2, 2),
            "order_by_expert": (2, 0),
            "embedding": (1, 0),
        },
    ),
    "static experts, two expert ranks": Budget(
        layer={
            "norms": (18, 30),
            "attention": (4, 6),
            "demand": (17, 0),
            "dispatch": (9, 6),
            "router losses": (10, 3),
            "experts": (5, 5),
            "router": (6, 5),
            "gradient buffers": (0, 10),
            "combine": (3, 3),
            "optimizer": (3, 0),
            "checks": (2, 0),
            "order_by_expert": (2, 0),
            "residuals": (2, 0),
        },
        kinds={
            "elementwise": (34, 26),
            "copies": (11, 17),
            "own kernels": (13, 13),
            "products": (4, 9),
            "reductions": (8, 0),
            "collectives": (4, 3),
            "fills": (4, 0),
            "sorts, scans": (2, 0),
            "indexing": (1, 0),
        },
        step={
            "norms": (45, 74),
            "attention": (8, 12),
            "loss": (31, 13),
            "router losses": (34, 6),
            "gradient buffers": (10, 27),
            "demand": (34, 0),
            "dispatch": (18, 12),
            "experts": (12, 10),
            "checks": (17, 5),
            "gradient norm": (22, 0),
            "router": (12, 10),
            "report": (19, 0),
            "optimizer": (17, 0),
            "combine": (6, 6),
            "embedding, output layer": (5, 3),
            "order_by_expert": (4, 0),
            "residuals": (4, 0),
            "embedding": (1, 0),
        },
    ),
}
# An expert layer without its stash; the goal is 40 launches in forward and 16 in backward on one rank.
EXPERT_LAYER = {
    "static experts": (31, 15),
    "static experts, stash": (31, 15),
    "static experts, stash of copies": (31, 15),
    "experts in 8 bits": (35, 22),
    "static experts, two expert ranks": (52, 22),
}
# Most launches of a layer whose experts compute in 8 bits, relative to bf16. The weights are quantized in each step,
# which has one microbatch here.
MOST_IN_8_BITS = 1.3
counts = functools.cache(lambda name: count(SETTINGS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_layers_and_steps_launch_what_their_budget_says(name: str) -> None:
    found: StepLaunches = counts(name)
    budget = BUDGETS[name]
    assert ELSEWHERE not in by_phase(found.step), operators_of(found.step)
    for part, allowed, table in (
        ("a layer, by phase", budget.layer, by_phase(found.layer)),
        ("a layer, by kind", budget.kinds, by_kind(found.layer)),
        ("a step, by phase", budget.step, by_phase(found.step)),
    ):
        changes = differences(allowed, table)
        more = [change for change, grows in changes.items() if grows]
        assert not more, f"{name}: {part}: more launches than budgeted: {more}\n{operators_of(found.layer)}"
        assert not changes, f"{name}: {part}: fewer launches, so lower the budget: {[*changes]}"


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERT_LAYER)
def test_an_expert_layer_launches_what_its_budget_says(name: str) -> None:
    assert of_moe(by_phase(counts(name).layer)) == EXPERT_LAYER[name]


def test_budgets_of_experts_in_8_bits_are_near_those_in_bf16() -> None:
    in_bf16, in_8_bits = (EXPERT_LAYER[name] for name in ("static experts", "experts in 8 bits"))
    assert sum(in_8_bits) <= MOST_IN_8_BITS * sum(in_bf16)


def differences(budget: Table, found: Table) -> dict[str, bool]:
    """Returns each difference from a budget, mapped to whether the number of launches grows."""
    changes = {}
    for name in budget | found:
        for side, direction in enumerate((FORWARD, BACKWARD)):
            allowed, number = budget.get(name, (0, 0))[side], found.get(name, (0, 0))[side]
            if allowed != number:
                changes[f"{name}, {direction}: {allowed} -> {number}"] = number > allowed
    return changes


def launched_by_layer() -> Counter[Launched]:
    """Counts the launches of a static expert layer alone, forward and backward."""
    layer = build_layer(**KINDS["static"])
    x, upstream = rank_inputs(0)
    with recorded_launches() as found:
        layer(x.requires_grad_())[0].backward(upstream)
    return Counter(found)


def test_an_operator_more_is_counted_in_its_phase_and_views_are_not() -> None:
    order_by_expert = dispatch_static.order_by_expert

    def with_more(*args: Any, **named: Any) -> StaticOrder:
        order = order_by_expert(*args, **named)
        return order._replace(slot_of_row=order.slot_of_row.view(1, -1).squeeze(0).neg().neg())

    before = by_phase(launched_by_layer())
    with mock.patch.object(dispatch_static, "order_by_expert", with_more):
        after = by_phase(launched_by_layer())
    forward, backward = before["dispatch"]
    assert after == before | {"dispatch": (forward + 2, backward)}


def test_gradients_count_in_the_phase_of_what_they_are_gradients_of() -> None:
    operators = {
        (launched.phase, launched.operator) for launched in launched_by_layer() if launched.direction == BACKWARD
    }
    assert {
        ("router", "aten::_softmax_backward_data"),
        ("experts", "paged_stash::grouped_gemm_weight_grad"),
        ("dispatch", "static_rows::sum_rows"),
        ("combine", "static_rows::gather_rows"),
    } <= operators


def test_a_budget_tells_growth_from_shrinking() -> None:
    assert differences({"router": (8, 9)}, {"router": (7, 9), "stash": (0, 1)}) == {
        "router, forward: 8 -> 7": False,
        "stash, backward: 0 -> 1": True,
    }
