"""Methods that are parts of their layer run as the layer's parts decide."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.transformer.module import LayerParts, MegatronModule, part
from tests.unit_tests.core.models.small_models import small_config


class Layer(MegatronModule):
    @part("mlp")
    def compute(self, x: Tensor, *, factor: float) -> Tensor:
        """Multiplies x: [T], fp32."""
        return x * factor


def test_a_part_is_called_by_the_layers_runner_with_the_bound_method_and_its_arguments() -> None:
    layer, calls = Layer(small_config()), []

    def runner(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls.append((function, args, kwargs))
        return function(*args, **kwargs)

    x = torch.ones(3)
    assert torch.equal(layer.compute(x, factor=2.0), 2 * x) and calls == []
    layer.parts = replace(LayerParts(), mlp=runner)
    assert torch.equal(layer.compute(x, factor=3.0), 3 * x)
    ((function, args, kwargs),) = calls
    assert function.__self__ is layer and args == (x,) and kwargs == {"factor": 3.0}
    assert layer.compute.__name__ == "compute" and layer.compute.__doc__ == "Multiplies x: [T], fp32."


@pytest.mark.parametrize("name", ["mpl", "moe_act"])
def test_a_name_that_is_no_part_or_needs_a_release_is_refused_when_the_class_is_defined(name: str) -> None:
    with pytest.raises(ValueError, match=f"part is '{name}': must be one of attn, .*shared_experts"):
        part(name)
