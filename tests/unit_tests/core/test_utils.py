"""Helper functions that scripts import by name, applied to wrapped models."""

import logging
from importlib import metadata

import pytest
import torch
from torch import nn

from megatron.core.parallel_state import get_process_groups, initialize_model_parallel
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import (
    divide,
    ensure_divisibility,
    get_attr_wrapped_model,
    get_model_config,
    get_pg_rank,
    get_pg_size,
    get_tensor_model_parallel_group_if_none,
    is_te_min_version,
    is_torch_min_version,
    log_single_rank,
    make_viewless_tensor,
    unwrap_model,
)
from tests.unit_tests.core.fake_world import fake_world
from tests.unit_tests.core.models.small_models import small_config
from tests.unit_tests.core.optimizer.reference import wrap


class ModelWithAPartNamedModule(nn.Module):
    """A user's model with a submodule called `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.config = small_config(bf16=True, params_dtype=torch.bfloat16)
        self.module = nn.Linear(2, 2)


def test_wrappers_are_taken_off_and_parts_of_the_model_are_not() -> None:
    model = ModelWithAPartNamedModule()
    wrapped = wrap(Float16Module(model.config, model))
    assert unwrap_model(wrapped) is model and unwrap_model(model) is model
    assert unwrap_model([wrapped, model]) == [model, model]
    assert get_model_config(wrapped) is model.config


def test_attributes_are_found_through_wrappers() -> None:
    model = ModelWithAPartNamedModule()
    vars(model).update(pre_process=True, hint=None)
    wrapped = Float16Module(model.config, model)
    assert get_attr_wrapped_model(wrapped, "pre_process") is True
    assert get_attr_wrapped_model(wrapped, "pre_process", return_model_obj=True) is model
    assert get_attr_wrapped_model(wrapped, "hint", return_model_obj=True) is model
    assert get_attr_wrapped_model(wrapped, "hint", allow_none=False, return_model_obj=True) is None
    assert get_attr_wrapped_model(wrapped, "weight") is None
    with pytest.raises(ValueError, match="got a list of models"):
        get_attr_wrapped_model([wrapped], "config")  # type: ignore[arg-type]


def test_callers_may_name_the_wrappers_to_take_off() -> None:
    model = ModelWithAPartNamedModule()
    wrapped = wrap(Float16Module(model.config, model))
    assert unwrap_model([wrapped], (type(wrapped),)) == [wrapped.module]
    assert unwrap_model(wrapped, (type(wrapped), Float16Module)) is model
    assert unwrap_model(model, nn.Linear) is model


def test_versions_are_compared_by_their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.0+cpu")
    assert is_torch_min_version("2.9") and not is_torch_min_version("2.11")
    assert is_torch_min_version("2.10.0") and not is_torch_min_version("2.10.0+cpu", check_equality=False)
    assert not is_te_min_version("0.1")
    monkeypatch.setattr(metadata, "version", lambda name: {"transformer_engine": "1.13.0"}[name])
    assert is_te_min_version("1.9.0.dev0") and is_te_min_version("1.13.0") and not is_te_min_version("2.0.0")
    assert not is_te_min_version("1.13.0", check_equality=False)


def test_groups_that_are_left_out_are_of_one_rank_or_those_of_parallel_state() -> None:
    assert (get_pg_size(), get_pg_rank(), get_tensor_model_parallel_group_if_none(None)) == (1, 0, None)
    with fake_world(1, 4):
        with pytest.raises(RuntimeError, match="call initialize_model_parallel"):
            get_tensor_model_parallel_group_if_none(None)
        assert get_tensor_model_parallel_group_if_none(None, check_initialized=False) is None
        initialize_model_parallel(4, expert_tensor_parallel_size=2)
        groups = get_process_groups()
        assert get_tensor_model_parallel_group_if_none(None) is groups.tp
        assert get_tensor_model_parallel_group_if_none(None, is_expert=True) is groups.expt_tp
        assert get_tensor_model_parallel_group_if_none(groups.dp, is_expert=True) is groups.dp
        assert (get_pg_size(groups.tp), get_pg_rank(groups.tp), get_pg_size(), get_pg_rank()) == (4, 1, 1, 0)


def test_one_rank_logs(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("one rank")
    log_single_rank(logger, logging.WARNING, "%d of %s", 1, "all", rank=3)
    with fake_world(1, 4):
        log_single_rank(logger, logging.WARNING, "rank 0")
        log_single_rank(logger, logging.WARNING, "rank 1", rank=1)
    assert [record.getMessage() for record in caplog.records] == ["1 of all", "rank 1"]


def test_viewless_tensors_share_memory_and_gradients_but_not_the_base() -> None:
    base = torch.arange(6.0, requires_grad=True)
    whole = base * 1
    view = whole.view(2, 3)
    kept = make_viewless_tensor(view, requires_grad=True, keep_graph=True)
    assert kept._base is None and kept.data_ptr() == whole.data_ptr() and kept.shape == (2, 3)
    (kept * 2).sum().backward()
    assert torch.equal(base.grad, torch.full((6,), 2.0))
    leaf = make_viewless_tensor(view, requires_grad=True, keep_graph=False)
    assert leaf._base is None and leaf.is_leaf and leaf.requires_grad and torch.equal(leaf, view)
    assert make_viewless_tensor(whole, requires_grad=True, keep_graph=True) is whole


@pytest.mark.parametrize("denominator", [0, -2, 4])
def test_only_exact_quotients_are_given(denominator: int) -> None:
    assert divide(6, 2) == 3
    with pytest.raises(AssertionError):
        ensure_divisibility(6, denominator)
    with pytest.raises(ValueError, match=f"6 is not divisible by {denominator}"):
        divide(6, denominator)


def test_the_state_of_wrappers_is_the_models_also_where_they_are_part_of_another_module() -> None:
    model = ModelWithAPartNamedModule()
    wrapped = wrap(Float16Module(model.config, model))
    for kept in (wrapped.state_dict(), wrapped.state_dict_for_save_checkpoint(), wrapped.module.state_dict()):
        assert list(kept) == ["module.weight", "module.bias"]
    assert list(wrapped.state_dict(prefix="of.")) == ["of.module.weight", "of.module.bias"]
    weight = torch.ones(2, 2)
    wrapped.load_state_dict({"module.weight": weight, "module.bias": weight[0]})
    assert torch.equal(model.module.weight.float(), weight)
    outer = nn.ModuleList([wrapped])
    outer.load_state_dict({name: torch.zeros_like(value) for name, value in outer.state_dict().items()})
    assert not model.module.weight.any()
