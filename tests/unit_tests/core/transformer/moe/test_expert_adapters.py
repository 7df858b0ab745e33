"""Adapters of grouped experts agree with those of sequential experts, and are stored under the same names."""

from typing import Any

import pytest
import torch

from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec, with_adapters
from megatron.core.transformer.lora import freeze_all_but_adapters
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import build_module
from tests.unit_tests.core.models.small_models import LLAMA_LIKE, gradients, small_config
from tests.unit_tests.core.transformer.moe.small_experts import (
    EXPERTS,
    GPT_OSS,
    copy_weights,
    lopsided,
    stacked_over_experts,
)

KINDS: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"moe_expert_rank_capacity_factor": 4.0},
}


def adapted_layer(*, grouped: bool, targets: list[str], **fields: Any) -> MoELayer:
    """Builds a layer of which only the adapters are trained. Adapters have nonzero effect."""
    adapters = {"lora_rank": 4, "lora_alpha": 6.0, "lora_target_modules": targets}
    experts = {"num_moe_experts": EXPERTS, "moe_grouped_gemm": grouped}
    config = small_config(**{**LLAMA_LIKE, **experts, **adapters, **fields})
    layer: MoELayer = build_module(with_adapters(get_mlp_module_spec(False, EXPERTS, grouped), targets), config=config)
    for name, parameter in layer.named_parameters():
        if "bias" in name or "lora_b" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    freeze_all_but_adapters(layer)
    return layer


@pytest.mark.parametrize("routing", ["balanced", "one", "starved"])
@pytest.mark.parametrize("targets", [["linear_fc1", "linear_fc2"], ["linear_fc1"], ["linear_fc2"]])
@pytest.mark.parametrize("model", [{}, GPT_OSS], ids=["llama", "gpt-oss"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_and_gradients_are_those_of_sequential_experts(
    dtype: torch.dtype, kind: str, model: dict[str, Any], targets: list[str], routing: str
) -> None:
    torch.manual_seed(1)
    fields = {**model, "params_dtype": dtype}
    sequential = adapted_layer(grouped=False, targets=targets, **fields)
    grouped = adapted_layer(grouped=True, targets=targets, **fields, **KINDS[kind])
    lopsided(sequential, routing)
    copy_weights(sequential, grouped)
    found = []
    for layer in (sequential, grouped):
        x = torch.rand(6, 2, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        x = x.to(dtype).requires_grad_()
        output = layer(x)[0]
        output.square().sum().backward()
        assert x.grad is not None
        found.append({"output": output.detach(), "x": x.grad, **stacked_over_experts(layer, gradients(layer))})
    assert found[0].keys() == found[1].keys()
    # fc1 stores gate and up separately.
    assert len(found[0]) == 2 + 3 * ("linear_fc1" in targets) + 2 * ("linear_fc2" in targets)
    tolerance = 1e-10 if dtype == torch.float64 else 5e-5
    for key, expected in found[0].items():
        assert (found[1][key] - expected).norm() <= tolerance * expected.norm(), key


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_scale_takes_effect(kind: str) -> None:
    layer = adapted_layer(grouped=True, targets=["linear_fc1", "linear_fc2"], **KINDS[kind])
    x = torch.rand(6, 2, 32, generator=torch.Generator().manual_seed(2))
    before = layer(x)[0]
    for adapter in (layer.experts.linear_fc1, layer.experts.linear_fc2):
        adapter.scale = 0.0
    assert not torch.equal(layer(x)[0], before)


@pytest.mark.parametrize("order", [True, False])
def test_a_forward_of_its_own_receives_what_it_takes(order: bool) -> None:
    layer = adapted_layer(grouped=True, targets=["linear_fc1"], **KINDS["static"])
    x = torch.rand(6, 2, 32, generator=torch.Generator().manual_seed(2))
    expected, shapes, forward = layer(x)[0], list[torch.Size](), layer.experts.forward

    def wrapped(*args: Any, **named: Any) -> Any:
        shapes.append(args[0].shape)
        return forward(*args, **named)

    layer.experts.forward = wrapped if order else lambda rows, counts, probs: wrapped(rows, counts, probs)
    torch.testing.assert_close(layer(x)[0], expected)
    assert (shapes[0] == x.view(-1, 32).shape) == order
