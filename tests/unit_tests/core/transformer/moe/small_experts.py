"""Small layers of experts: their weights as a checkpoint has them, routing that is bent. Holds no tests."""

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
    """A layer of four experts with random weights from torch's generator."""
    config = small_config(num_moe_experts=EXPERTS, moe_grouped_gemm=grouped, **{**LLAMA_LIKE, **fields})
    return build_module(get_mlp_module_spec(False, EXPERTS, grouped), config=config)


def window_of(piece: LogicalPiece) -> tuple[slice, ...]:
    """The window of the stored tensor that a piece of a parameter holds."""
    return tuple(slice(start, start + size) for start, size in zip(piece.global_offset, piece.shape, strict=True))


def stacked_over_experts(layer: MoELayer, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by parameters' names, of any shapes, as a checkpoint has them: stacked over the experts."""
    wholes: dict[str, Tensor] = {}
    for name, pieces in model_logical_pieces(layer).items():
        for piece in pieces if name in tensors else ():
            whole = wholes.setdefault(piece.key, torch.zeros(piece.global_shape, dtype=tensors[name].dtype))
            whole[window_of(piece)] = piece.view_of(tensors[name])
    return wholes


def expert_matrices(layer: MoELayer) -> dict[str, Tensor]:
    """The stacked matrices as a checkpoint names them, fp64: [E, F, H] and [E, H, F]."""
    exact = {name: parameter.detach().double() for name, parameter in layer.named_parameters()}
    return {key.removeprefix("experts."): value for key, value in stacked_over_experts(layer, exact).items()}


def copy_weights(source: MoELayer, target: MoELayer) -> None:
    """Copies all weights between layers whose parameters are laid out differently, those of adapters too."""
    wholes = stacked_over_experts(source, {name: param.detach() for name, param in source.named_parameters()})
    parameters = dict(target.named_parameters())
    for name, pieces in model_logical_pieces(target).items():
        for piece in pieces:
            piece.view_of(parameters[name].data).copy_(wholes[piece.key][window_of(piece)])


def lopsided(layer: MoELayer, routing: str) -> None:
    """Bends the router's weights: `one` makes expert 2 every token's first choice, `starved` leaves expert 0 none."""
    with torch.no_grad():
        if routing == "one":
            layer.router.weight[2] = 50 * layer.router.weight[2].abs()
        elif routing == "starved":
            layer.router.weight[0] = -50 * layer.router.weight[0].abs()
