"""State that training updates without a gradient stops with its module: routing biases, clipped projections."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module
from tests.unit_tests.core.models.small_models import small_batch, small_config, small_model

EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "moe_grouped_gemm": True}
PLAIN = {"gated_linear_unit": True, "add_bias_linear": False, "activation_func": torch.nn.functional.silu}
SIGMOID = {**EXPERTS, **PLAIN, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
SOFTPLUS = {**SIGMOID, "moe_router_score_function": "sqrtsoftplus"}
CLIP = {"qk_clip": True, "qk_clip_threshold": 1e-3}
Trained = Callable[[str], bool]

# Fields of the model, and the parameters that are trained.
CASES: dict[str, tuple[dict[str, Any], Trained]] = {
    "all trained": (SIGMOID, lambda name: True),
    "routers frozen": (SIGMOID, lambda name: "router" not in name),
    "first router frozen": (SIGMOID, lambda name: "layers.0.mlp.router" not in name),
    "routers alone trained": (SIGMOID, lambda name: "router" in name),
    "output layer alone trained": (SIGMOID, lambda name: "output_layer" in name),
    "adapters alone trained": ({**SIGMOID, "lora_rank": 8}, lambda name: "lora_" in name),
    "adapters, sqrtsoftplus": ({**SOFTPLUS, "lora_rank": 8}, lambda name: "lora_" in name),
    "second layer alone trained": (SOFTPLUS, lambda name: "layers.1." in name),
    "a depth of prediction frozen": ({**SIGMOID, "mtp_num_layers": 1}, lambda name: not name.startswith("mtp.")),
    "prediction alone trained": ({**SIGMOID, "mtp_num_layers": 1}, lambda name: name.startswith("mtp.")),
    "clipped attention frozen": ({**SIGMOID, **CLIP}, lambda name: "self_attention" not in name),
    "first attention frozen": ({**PLAIN, **CLIP}, lambda name: "layers.0.self_attention" not in name),
}


def train(model: GPTModel, run: torch.nn.Module) -> None:
    """Takes steps as a custom training loop does."""
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    tokens, positions, labels = small_batch()
    for _ in range(3):
        optimizer.zero_grad()
        run(tokens, positions, None, labels=labels).mean().backward()
        optimizer.step()
        model.finalize_step(None)
        if model.config.qk_clip:
            for layer in model.decoder.layers:
                layer.self_attention.clip_qk()


@pytest.mark.parametrize("in_half", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_what_belongs_to_a_frozen_module_keeps_its_bits(name: str, in_half: bool) -> None:
    fields, is_trained = CASES[name]
    model = small_model(small_config(**fields, bf16=in_half), share_embeddings_and_output_weights=False)
    run = Float16Module(model.config, model) if in_half else model
    trained = {key for key, param in model.named_parameters() if is_trained(key)}
    for key, param in model.named_parameters():
        param.requires_grad_(key in trained)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    train(model, run)
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    # A bias is trained with the weight of its router.
    with_biases = trained | {key.replace("router.weight", "router.expert_bias") for key in trained}
    assert changed <= with_biases
    assert {key for key in changed if "expert_bias" in key} == {
        key for key in before if "expert_bias" in key and key in with_biases
    }
    assert any(key in trained for key in changed)
