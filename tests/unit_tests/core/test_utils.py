"""Helper functions that scripts import by name, applied to wrapped models."""

import pytest
import torch
from torch import nn

from megatron.core.transformer.module import Float16Module
from megatron.core.utils import (
    divide,
    ensure_divisibility,
    get_attr_wrapped_model,
    get_model_config,
    unwrap_model,
)
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
