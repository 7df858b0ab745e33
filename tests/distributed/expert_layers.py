"""Expert layers over several ranks in fp64, with the inputs, outputs and gradients of each rank. Holds no tests."""

from typing import Any

import torch
from torch import Tensor

from megatron.core.logical_tensors import model_logical_pieces
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec
from megatron.core.process_groups_config import ProcessGroupCollection, group_size
from megatron.core.transformer.initialization import deferred_initialization, initialize_parameters
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import build_module
from tests.unit_tests.core.models.small_models import LLAMA_LIKE, small_config
from tests.unit_tests.core.transformer.moe.small_experts import GPT_OSS, window_of

EXPERTS, HIDDEN, SEQUENCE, BATCH = 4, 32, 3, 2
KINDS: dict[str, dict[str, Any]] = {
    "grouped": {"moe_grouped_gemm": True},
    "sequential": {"moe_grouped_gemm": False},
    "biases": {"moe_grouped_gemm": False, "add_bias_linear": True},
    "static": {"moe_grouped_gemm": True, "moe_expert_rank_capacity_factor": 8.0},
    "grouped biases": {"moe_grouped_gemm": True, **GPT_OSS},
    "static biases": {"moe_grouped_gemm": True, "moe_expert_rank_capacity_factor": 8.0, **GPT_OSS},
    "shared": {"moe_grouped_gemm": True, "moe_shared_expert_intermediate_size": 16},
}
ALLTOALL = {"moe_token_dispatcher_type": "alltoall"}
DISPATCHERS = ({"moe_token_dispatcher_type": "allgather"}, ALLTOALL)


def build_layer(groups: ProcessGroupCollection | None = None, **fields: Any) -> MoELayer:
    """Builds a layer whose full weights depend only on a seed, not on the layout."""
    groups = groups or ProcessGroupCollection()
    config = small_config(
        num_moe_experts=EXPERTS,
        params_dtype=torch.float64,
        expert_model_parallel_size=group_size(groups.ep),
        expert_tensor_parallel_size=group_size(groups.expt_tp),
        **{**LLAMA_LIKE, **fields},
    )
    spec = get_mlp_module_spec(False, EXPERTS, config.moe_grouped_gemm)
    with deferred_initialization(config):
        layer = build_module(spec, config=config, pg_collection=groups)
    initialize_parameters(layer, seed=5)
    _fill_biases(layer)
    return layer


def _fill_biases(layer: MoELayer) -> None:
    """Replaces zero biases with random values seeded by the stored name, so that adding a bias twice is detected."""
    parameters = dict(layer.named_parameters())
    for name, pieces in model_logical_pieces(layer).items():
        for piece in pieces if "bias" in name else []:
            generator = torch.Generator().manual_seed(sum(map(ord, piece.key)))
            whole = torch.randn(piece.global_shape, dtype=torch.float64, generator=generator)
            piece.view_of(parameters[name].data).copy_(whole[window_of(piece)])


def rank_inputs(rank: int, *, is_empty: bool = False) -> tuple[Tensor, Tensor]:
    """Returns a rank's tokens and its output gradient, [S, B, H] each, with S = 0 if `is_empty`."""
    generator = torch.Generator().manual_seed(rank)
    shape = (0 if is_empty else SEQUENCE, BATCH, HIDDEN)
    return (
        torch.rand(shape, dtype=torch.float64, generator=generator),
        torch.randn(shape, dtype=torch.float64, generator=generator),
    )


def run_layer(layer: MoELayer, x: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Returns the output, the gradient of the input, and the gradients of this rank's parameters by name."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    output, _ = layer(x)
    output.backward(upstream)
    return output.detach(), x.grad, {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
