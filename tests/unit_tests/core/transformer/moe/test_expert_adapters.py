"""Adapters of grouped experts compute what those of sequential experts do, and are stored under the same names."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.activations import quick_gelu
from megatron.core.dist_checkpointing import model_logical_pieces
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec
from megatron.core.models.gpt.lora_specs import with_adapters
from megatron.core.transformer.lora import freeze_all_but_adapters
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import build_module
from tests.unit_tests.core.models.small_models import LLAMA_LIKE, gradients, small_config
from tests.unit_tests.core.transformer.moe.test_moe_layer import lopsided

EXPERTS = 4
GPT_OSS: dict[str, Any] = {
    "add_bias_linear": True,
    "activation_func": quick_gelu,
    "activation_func_clamp_value": 1.0,
    "glu_linear_offset": 1.0,
}
KINDS: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "act again": {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
    "static": {"moe_expert_rank_capacity_factor": 4.0},
}


def adapted_layer(*, grouped: bool, targets: list[str], **fields: Any) -> MoELayer:
    """Its adapters alone are trained, and add something."""
    adapters = {"lora_rank": 4, "lora_alpha": 6.0, "lora_target_modules": targets}
    experts = {"num_moe_experts": EXPERTS, "moe_grouped_gemm": grouped}
    config = small_config(**{**LLAMA_LIKE, **experts, **adapters, **fields})
    layer: MoELayer = build_module(with_adapters(get_mlp_module_spec(EXPERTS, grouped), targets), config=config)
    for name, parameter in layer.named_parameters():
        if "bias" in name or "lora_b" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    freeze_all_but_adapters(layer)
    return layer


def stored(layer: MoELayer, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by parameters' names, of any shapes, as a checkpoint has them: stacked over the experts."""
    wholes: dict[str, Tensor] = {}
    for name, pieces in model_logical_pieces(layer).items():
        for piece in pieces if name in tensors else ():
            whole = wholes.setdefault(piece.key, torch.zeros(piece.global_shape, dtype=tensors[name].dtype))
            box = tuple(slice(start, start + size) for start, size in zip(piece.global_offset, piece.shape))
            whole[box] = piece.view_of(tensors[name])
    return wholes


def copy_stored(source: MoELayer, target: MoELayer) -> None:
    """All weights, the adapters' among them; target: with grouped experts."""
    wholes = stored(source, {name: parameter.detach() for name, parameter in source.named_parameters()})
    parameters = dict(target.named_parameters())
    for name, pieces in model_logical_pieces(target).items():
        for piece in pieces:
            piece.view_of(parameters[name].data).copy_(wholes[piece.key])


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
    copy_stored(sequential, grouped)
    found = []
    for layer in (sequential, grouped):
        x = torch.rand(6, 2, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        x = x.to(dtype).requires_grad_()
        output = layer(x)[0]
        output.square().sum().backward()
        assert x.grad is not None
        found.append({"output": output.detach(), "x": x.grad, **stored(layer, gradients(layer))})
    assert found[0].keys() == found[1].keys()
    # Of fc1 gate and up apart.
    assert len(found[0]) == 2 + 3 * ("linear_fc1" in targets) + 2 * ("linear_fc2" in targets)
    tolerance = 1e-10 if dtype == torch.float64 else 5e-5
    for key, expected in found[0].items():
        assert (found[1][key] - expected).norm() <= tolerance * expected.norm(), key
