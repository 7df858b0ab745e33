"""Small expert layers, their weights in checkpoint format, and skewed routing. Contains no tests."""

from typing import Any

import torch
from torch import Tensor

from megatron.core.activations import quick_gelu
from megatron.core.logical_tensors import LogicalPiece, model_logical_pieces
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import build_module
from tests.unit_tests.core.models.small_models import LLAMA_LIKE, small_config

EXPERTS = 4
GPT_OSS: dict[str, Any] = {
    "add_bias_linear": True,
    "activation_func": quick_gelu,
    "activation_func_clamp_value": 1.0,
    "glu_linear_offset": 1.0,
}


def moe_layer(*, grouped: bool, **fields: Any) -> MoELayer:
    """Builds a layer of four experts with random weights."""
    config = small_config(num_moe_experts=EXPERTS, moe_grouped_gemm=grouped, **{**LLAMA_LIKE, **fields})
    return build_module(get_mlp_module_spec(False, EXPERTS, grouped), config=config)


def window_of(piece: LogicalPiece) -> tuple[slice, ...]:
    """Returns the slices of the stored tensor that a piece of a parameter contains."""
    return tuple(slice(start, start + size) for start, size in zip(piece.global_offset, piece.shape, strict=True))


def stacked_over_experts(layer: MoELayer, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors of any shapes in checkpoint format, stacked over the experts. tensors: by parameter name."""
    wholes: dict[str, Tensor] = {}
    for name, pieces in model_logical_pieces(layer).items():
        for piece in pieces if name in tensors else ():
            whole = wholes.setdefault(piece.key, torch.zeros(piece.global_shape, dtype=tensors[name].dtype))
            whole[window_of(piece)] = piece.view_of(tensors[name])
    return wholes


def expert_matrices(layer: MoELayer) -> dict[str, Tensor]:
    """Returns the stacked matrices under their checkpoint names, fp64: [E, F, H] and [E, H, F]."""
    exact = {name: parameter.detach().double() for name, parameter in layer.named_parameters()}
    return {key.removeprefix("experts."): value for key, value in stacked_over_experts(layer, exact).items()}


def copy_weights(source: MoELayer, target: MoELayer) -> None:
    """Copies all weights, including adapters, between layers with different parameter layouts."""
    wholes = stacked_over_experts(source, {name: param.detach() for name, param in source.named_parameters()})
    parameters = dict(target.named_parameters())
    for name, pieces in model_logical_pieces(target).items():
        for piece in pieces:
            piece.view_of(parameters[name].data).copy_(wholes[piece.key][window_of(piece)])


def lopsided(layer: MoELayer, routing: str) -> None:
    """Skews the router's weights: with `one` all tokens choose expert 2 first, with `starved` none chooses expert 0."""
    with torch.no_grad():
        if routing == "one":
            layer.router.weight[2] = 50 * layer.router.weight[2].abs()
        elif routing == "starved":
            layer.router.weight[0] = -50 * layer.router.weight[0].abs()
