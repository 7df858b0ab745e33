"""Adapters of one process: what they add, which layers have them, and what is trained; layouts in test_lora_parity."""

from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing import model_logical_pieces
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.lora import LoRAColumnParallelLinear, freeze_all_but_adapters, is_adapter
from tests.unit_tests.core.models.small_models import LLAMA_LIKE, gradients, loss_of, small_config, small_model

SCALE = 4.0


def build(**fields: Any) -> GPTModel:
    config = small_config(lora_rank=2, lora_alpha=2 * SCALE, params_dtype=torch.float64, **LLAMA_LIKE, **fields)
    model = small_model(config)
    freeze_all_but_adapters(model)
    return model


def test_a_new_adapter_adds_nothing() -> None:
    model = build()
    plain = small_model(small_config(params_dtype=torch.float64, **LLAMA_LIKE))
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if not is_adapter(name)})
    assert torch.equal(loss_of(model), loss_of(plain))


def test_it_adds_what_its_product_says() -> None:
    model = build()
    plain = small_model(small_config(params_dtype=torch.float64, **LLAMA_LIKE))
    merged = dict(model.state_dict())
    for name in [name for name in merged if name.endswith("lora_b")]:
        torch.nn.init.normal_(merged[name], std=0.1)
        prefix = name.removesuffix("lora_b")
        merged[prefix + "weight"] = merged[prefix + "weight"] + SCALE * merged[name] @ merged[prefix + "lora_a"]
    plain.load_state_dict({name: value for name, value in merged.items() if not is_adapter(name)})
    torch.testing.assert_close(loss_of(model), loss_of(plain), rtol=1e-12, atol=0)


@pytest.mark.parametrize("granularity", [None, "full"])
def test_adapters_alone_are_trained(granularity: str | None) -> None:
    again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    model = build(**(again if granularity else {}))
    loss_of(model).backward()
    trained = gradients(model)
    assert trained.keys() == {name for name, _ in model.named_parameters() if is_adapter(name)}
    assert len(trained) == 2 * 4 * 2
    assert all(grad.any() for name, grad in trained.items() if name.endswith("lora_b"))


def test_the_layers_that_were_chosen_have_them() -> None:
    model = build(lora_target_modules=["linear_qkv"])
    adapted = [name for name, module in model.named_modules() if isinstance(module, LoRAColumnParallelLinear)]
    assert adapted == [f"decoder.layers.{index}.self_attention.linear_qkv" for index in range(2)]


def test_gate_and_up_of_an_adapter_are_stored_apart() -> None:
    pieces = model_logical_pieces(build())
    fc1 = "decoder.layers.0.mlp.linear_fc1."
    assert [piece.key for piece in pieces[fc1 + "lora_b"]] == [fc1 + "lora_b.gate", fc1 + "lora_b.up"]
    assert [piece.key for piece in pieces[fc1 + "lora_a"]] == [fc1 + "lora_a"]
