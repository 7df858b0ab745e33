"""Adapters in one process: effect, adapted layers and trained parameters. test_lora_parity tests layouts."""

from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing import model_logical_pieces
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.lora import LoRAColumnParallelLinear, freeze_all_but_adapters, is_adapter
from megatron.core.transformer.lora_config import ADAPTED_LINEARS
from tests.unit_tests.core.models.small_models import LATENT, LLAMA_LIKE, gradients, loss_of, small_config, small_model

SCALE = 4.0


LATENT_KEYS = ["linear_kv_down_proj", "linear_kv_up_proj", "linear_proj"]
LOW_QUERIES = ["linear_q_down_proj", "linear_q_up_proj"]
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "latent": {**LATENT, "lora_target_modules": [*LOW_QUERIES, *LATENT_KEYS]},
    "latent, whole queries": {**LATENT, "q_lora_rank": None, "lora_target_modules": ["linear_q_proj", *LATENT_KEYS]},
}


def build(**fields: Any) -> GPTModel:
    adapters = {"lora_rank": 2, "lora_alpha": 2 * SCALE}
    config = small_config(**{**LLAMA_LIKE, **adapters, "params_dtype": torch.float64, **fields})
    model = small_model(config)
    freeze_all_but_adapters(model)
    return model


def test_a_new_adapter_adds_nothing() -> None:
    model = build()
    plain = small_model(small_config(params_dtype=torch.float64, **LLAMA_LIKE))
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if not is_adapter(name)})
    assert torch.equal(loss_of(model), loss_of(plain))


@pytest.mark.parametrize("kind", MODELS)
def test_it_adds_what_its_product_says(kind: str) -> None:
    model = build(**MODELS[kind])
    without = {name: value for name, value in MODELS[kind].items() if name != "lora_target_modules"}
    plain = small_model(small_config(**{**LLAMA_LIKE, "params_dtype": torch.float64, **without}))
    merged = dict(model.state_dict())
    adapted = [name for name in merged if name.endswith("lora_b")]
    assert len(adapted) == 2 * len(MODELS[kind].get("lora_target_modules", ADAPTED_LINEARS))
    for name in adapted:
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


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"lora_target_modules": ["linear_kv_up_proj", "linear_fc1"]},
            "contains linear_kv_up_proj, .* linear_qkv linear_proj",
        ),
        (
            {**LATENT, "lora_target_modules": ["linear_qkv"]},
            "contains linear_qkv, .* linear_q_down_proj linear_q_up_proj",
        ),
        (
            {**MODELS["latent"], "q_lora_rank": None},
            "contains linear_q_down_proj linear_q_up_proj, .* linear_q_proj linear_kv",
        ),
    ],
)
def test_layers_that_the_model_has_not_are_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"lora_target_modules {words}"):
        build(**fields)


def test_gate_and_up_of_an_adapter_are_stored_apart() -> None:
    pieces = model_logical_pieces(build())
    fc1 = "decoder.layers.0.mlp.linear_fc1."
    assert [piece.key for piece in pieces[fc1 + "lora_b"]] == [fc1 + "lora_b.gate", fc1 + "lora_b.up"]
    assert [piece.key for piece in pieces[fc1 + "lora_a"]] == [fc1 + "lora_a"]
