"""Methods marked as parts run as the layer's runner decides."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.transformer.module import (
    Float16Module,
    LayerParts,
    MegatronModule,
    convert_module_to_dtype_except_fp32_marked,
    mark_keep_in_fp32,
    part,
)
from tests.unit_tests.core.models.small_models import small_config


class Layer(MegatronModule):
    @part("mlp")
    def compute(self, x: Tensor, *, factor: float) -> Tensor:
        """Multiplies x by the factor. x: [T], fp32."""
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
    assert layer.compute.__name__ == "compute" and layer.compute.__doc__ == "Multiplies x by the factor. x: [T], fp32."


@pytest.mark.parametrize("name", ["mpl", "attn_norm"])
def test_a_name_that_is_no_part_or_needs_a_release_is_refused_when_the_class_is_defined(name: str) -> None:
    with pytest.raises(ValueError, match=f"part is '{name}': must be one of attn, .*shared_experts"):
        part(name)


def test_marked_tensors_keep_fp32_in_a_half_precision_model() -> None:
    for convert in (
        lambda module: Float16Module(small_config(bf16=True, params_dtype=torch.bfloat16), module).module,
        lambda module: convert_module_to_dtype_except_fp32_marked(module, torch.bfloat16),
    ):
        module = torch.nn.Linear(2, 2)
        assert mark_keep_in_fp32(module.bias) is module.bias
        module = convert(module)
        assert (module.weight.dtype, module.bias.dtype) == (torch.bfloat16, torch.float32)


def test_outputs_may_stay_in_half_precision_and_calls_reach_the_wrapped_module() -> None:
    class Inner(torch.nn.Linear):
        def set_input_tensor(self, tensor: Any) -> None:
            self.given = tensor

        def sharded_state_dict(self, prefix: str = "", *args: Any) -> Any:
            return prefix, args

    wrapped = Float16Module(small_config(bf16=True, params_dtype=torch.bfloat16), Inner(2, 2))
    assert wrapped(torch.ones(2)).dtype == torch.float32
    assert wrapped(torch.ones(2), fp32_output=False).dtype == torch.bfloat16
    wrapped.set_input_tensor(3)
    assert wrapped.module.given == 3 and wrapped.sharded_state_dict("a.", (), None) == ("a.", ((), None))
