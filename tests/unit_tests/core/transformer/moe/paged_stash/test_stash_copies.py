"""Copies of models that contain a stash, and the state that a stash keeps between steps."""

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from megatron.core.transformer.moe.paged_stash import Counter, PagedStash, stash_order
from megatron.core.transformer.moe.paged_stash import stash as stash_file
from tests.unit_tests.core.transformer.moe.paged_stash.expert_models import (
    LIVE,
    C,
    MarkedExperts,
    Model,
    assert_same,
    gradients,
    inputs,
    is_empty_sync,
    loss_of,
    make_stash,
)


class Holder(nn.Module):
    """A model that contains the stash of its layers."""

    def __init__(self, stash: PagedStash) -> None:
        super().__init__()
        self.stash = stash
        self.weight = nn.Parameter(torch.linspace(-1, 1, C * 4).view(C, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [C, 4], fp32. Returns [C, 4], fp32."""
        for number in range(2):
            with self.stash.context(str(number), LIVE, max_rows=C):
                x = x.exp() * self.weight
        return x


def _average(model: nn.Module) -> nn.Module:
    averaged: nn.Module = AveragedModel(model).module
    return averaged


def _gradient(model: Holder) -> torch.Tensor:
    model(torch.full((C, 4), 0.5, requires_grad=True))[:LIVE].sum().backward()
    assert model.weight.grad is not None
    return model.weight.grad[:LIVE]


@pytest.mark.parametrize("copied", [copy.deepcopy, _average, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_has_a_stash_of_the_same_settings_and_its_own_pages(copied: Callable[[Any], Any]) -> None:
    stash = make_stash(90, 5, prefetch_groups=2, reserved_share=0.5)
    model = Holder(stash)
    under_way = model(torch.full((C, 4), 0.5, requires_grad=True))
    held = stash.pool.occupancy_sync()
    other = copied(copied(model))
    assert "_unbound" in other.stash.__dict__, "a copy that does not train allocates no memory"
    with torch.no_grad():
        other(torch.ones(C, 4))
    assert "_unbound" in other.stash.__dict__ and stash.pool.occupancy_sync() == held
    expected = _gradient(other)
    assert other.stash.pool is not stash.pool and other.stash.pool.layout == stash.pool.layout
    assert other.stash.reserved_share == 0.5 and is_empty_sync(other.stash)
    assert other.stash.pool.occupancy_sync().counters[Counter.PLANNED_PAGES] > 0
    under_way[:LIVE].sum().backward()
    assert_same([model.weight.grad[:LIVE]], [expected])
    assert is_empty_sync(stash)


def test_names_that_are_new_in_each_step_leave_no_records_behind() -> None:
    stash = make_stash()
    model, expected = Model(stash.context, kind=MarkedExperts), gradients(Model(None, kind=MarkedExperts))
    for step in range(6):
        for number, layer in enumerate(model.layers):
            vars(layer)["name"] = f"{number} of step {step}"
        assert_same(gradients(model), expected)
        stash.reset()
    records = [stash._max_bytes, stash._reserve._pages, stash._reserve._stashed, stash._reserve._droppable]
    assert [len(record) for record in records] == [3, 3, 3, 3] and len(stash._groups) == 0


def test_a_stash_that_is_never_reset_keeps_records_of_a_bounded_number_of_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stash_order, "MAX_EVENTS", 16)
    monkeypatch.setattr(stash_file, "_MAX_FORWARDS", 8)
    stash = make_stash()
    model, expected = Model(stash.context, kind=MarkedExperts), gradients(Model(None, kind=MarkedExperts))
    sizes = set()
    for step in range(12):
        for number, layer in enumerate(model.layers):
            vars(layer)["name"] = f"{number} of step {step}" if step % 2 else str(number)
        assert_same(gradients(model), expected)
        gc.collect()
        assert len(stash._groups) == 0 and is_empty_sync(stash)
        order = vars(stash.order)
        records = [stash._instances, stash._max_bytes, stash._reserve._pages, stash._reserve._droppable]
        records += [order["_seen"], order["_forwards"], order["_waiting"]]
        sizes.add(tuple(map(len, records)))
        assert max(map(len, records)) <= 16
    # Groups of several pending steps are distinct.
    waiting = [loss_of(model(*inputs())) for _ in range(3)]
    for loss in waiting:
        model.zero_grad()
        loss.backward()
        assert_same([one.grad for one in model.parameters()], expected[2:])
    assert len(sizes) < 10
    stash.reset()
    model.zero_grad()
    assert_same(gradients(model), expected)
    stash.reset()
    assert len(stash.order.events) == 6
