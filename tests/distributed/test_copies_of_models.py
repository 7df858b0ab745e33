"""Tests copy.deepcopy and weight averaging (EMA) of models whose layers reference process groups."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.tensor_parallel.param_attributes import param_facts
from tests.harness import run_on_ranks
from tests.unit_tests.core.models.small_models import LATENT, gradients, loss_of, small_config, small_model

EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_grouped_gemm": True, "add_bias_linear": False}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": EXPERTS,
    "latent attention": LATENT,
    "further tokens": {"mtp_num_layers": 1},
    "shared expert": {**EXPERTS, "moe_shared_expert_intermediate_size": 24},
}


def _groups_are_shared(fields: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    experts = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1} if "num_moe_experts" in fields else {}
    parallel_state.initialize_model_parallel(2, **experts)
    model = small_model(small_config(**{**sizes, **experts, **fields}))
    copied = copy.deepcopy(model)
    layers = [model.decoder.layers[0].self_attention.linear_proj, copied.decoder.layers[0].self_attention.linear_proj]
    assert layers[0] is not layers[1] and layers[0].tp_group is layers[1].tp_group is not None
    averaged = AveragedModel(model).module
    named = dict(model.named_parameters())
    for other in (copied, averaged):
        assert list(dict(other.named_parameters())) == list(named)
        for name, param in other.named_parameters():
            assert param is not named[name] and torch.equal(param, named[name]), name
            assert param_facts(param) == param_facts(named[name]), name
    # Gradients of the model, then of the copy, reduced over ranks according to its parameter attributes.
    found = []
    for one in (model, copied):
        wrapped = DistributedDataParallel(one.config, DistributedDataParallelConfig(), one)
        loss = loss_of(wrapped.module)
        loss.backward()
        finalize_model_grads([wrapped])
        found.append([loss.detach(), *(grad.clone() for _, grad in wrapped.named_main_grads())])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_a_copy_of_a_tensor_parallel_model_is_the_same_model_over_the_same_groups(name: str) -> None:
    run_on_ranks(_groups_are_shared, 2, MODELS[name])


def test_a_copy_of_a_part_keeps_ties_and_is_apart_from_the_model() -> None:
    model = small_model(small_config())
    first, second = (layer.mlp for layer in model.decoder.layers)
    second.linear_fc1.weight = first.linear_fc1.weight
    part = copy.deepcopy(nn.ModuleList([first, second]))
    assert part[0].linear_fc1.weight is part[1].linear_fc1.weight is not first.linear_fc1.weight
    with torch.no_grad():
        part[0].linear_fc1.weight.zero_()
    loss_of(model).backward()
    assert first.linear_fc1.weight.any() and gradients(part) == {}
