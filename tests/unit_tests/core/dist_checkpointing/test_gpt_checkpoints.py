"""Checkpoints of GPT models: the stored tensors do not depend on the implementation of the model."""

import pytest
import torch

from megatron.core.dist_checkpointing import ShardedTensor, list_tensors, load_items, model_sharded_tensors, save_items
from tests.unit_tests.core.models.small_models import LLAMA_LIKE, small_config, small_model

EXPERTS = {**LLAMA_LIKE, "num_query_groups": 2, "num_moe_experts": 4}


def perturbed(model):
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("adapters", [{}, {"lora_rank": 4}])
@pytest.mark.parametrize("grouped", [False, True])
def test_experts_of_one_implementation_load_into_the_other(tmp_path, grouped, adapters):
    saved = perturbed(small_model(small_config(**EXPERTS, **adapters, moe_grouped_gemm=grouped)))
    save_items(model_sharded_tensors(saved), tmp_path / "c", common={})
    loaded = small_model(small_config(**EXPERTS, **adapters, moe_grouped_gemm=not grouped))
    load_items(model_sharded_tensors(loaded), tmp_path / "c")
    save_items(model_sharded_tensors(loaded), tmp_path / "again", common={})
    wanted, stored = (
        {key: torch.zeros(shape) for key, (shape, _) in list_tensors(tmp_path / "c").items()} for _ in "ab"
    )
    for tensors, name in ((wanted, "c"), (stored, "again")):
        load_items(as_boxes(tensors), tmp_path / name)
    assert wanted.keys() == list_tensors(tmp_path / "again").keys()
    assert all(torch.equal(stored[key], value) and value.any() for key, value in wanted.items())


def as_boxes(tensors):
    return [ShardedTensor.whole(key, tensor) for key, tensor in tensors.items()]


def test_keys_and_shapes_are_logical(tmp_path):
    save_items(model_sharded_tensors(small_model(small_config(**EXPERTS))), tmp_path / "c", common={})
    shapes = {key: shape for key, (shape, _) in list_tensors(tmp_path / "c").items() if "layers.0" in key}
    hidden, ffn, head = 32, 48, 8
    layer = "decoder.layers.0."
    assert shapes[layer + "self_attention.linear_qkv.weight.q"] == (2, 2, head, hidden)
    assert shapes[layer + "self_attention.linear_qkv.weight.k"] == (2, head, hidden)
    assert shapes[layer + "mlp.experts.linear_fc1.weight.gate"] == (4, ffn, hidden)
    assert shapes[layer + "mlp.experts.linear_fc1.weight.up"] == (4, ffn, hidden)
    assert shapes[layer + "mlp.experts.linear_fc2.weight"] == (4, hidden, ffn)
