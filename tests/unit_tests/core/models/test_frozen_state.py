"""State that training updates without a gradient stops with its module: routing biases, clipped projections."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from tests.unit_tests.core.models.small_models import small_batch, small_config, small_model
from tests.unit_tests.core.optimizer.reference import wrap

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
    "experts alone frozen": (SIGMOID, lambda name: ".mlp.experts." not in name),
    "router and embedding frozen": (SOFTPLUS, lambda name: "router" not in name and "embedding" not in name),
    "first attention frozen": ({**PLAIN, **CLIP}, lambda name: "layers.0.self_attention" not in name),
}


def torch_steps(model: GPTModel, run: torch.nn.Module) -> None:
    """Takes steps as a custom training loop with torch's optimizer does."""
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


def megatron_steps(run: torch.nn.Module, **settings: Any) -> None:
    """Takes steps with an optimizer of get_megatron_optimizer, with weight decay."""
    sharded = {"use_distributed_optimizer": True} if settings.get("use_distributed_optimizer") else {}
    wrapped = wrap(run, overlap=sharded)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, weight_decay=0.1, **settings), [wrapped])
    tokens, positions, labels = small_batch()
    for _ in range(3):
        optimizer.zero_grad()
        wrapped(tokens, positions, None, labels=labels).mean().backward()
        finalize_model_grads([wrapped])
        optimizer.step()


def frozen_model(fields: dict[str, Any], is_trained: Trained, *, in_half: bool) -> tuple[GPTModel, torch.nn.Module]:
    """Returns a model in which only some parameters are trained, and what runs it."""
    model = small_model(small_config(**fields, bf16=in_half), share_embeddings_and_output_weights=False)
    for key, param in model.named_parameters():
        param.requires_grad_(is_trained(key))
    return model, Float16Module(model.config, model) if in_half else model


RUNS: dict[str, dict[str, Any]] = {
    "torch": {},
    "torch, bf16": {},
    "adam": {},
    "adam, bf16": {"bf16": True},
    "sharded, bf16": {"bf16": True, "use_distributed_optimizer": True},
    "muon": {"optimizer": "muon"},
    "sgd": {"optimizer": "sgd"},
}


def clips_frozen(name: str) -> bool:
    return "attention frozen" in name


@pytest.mark.parametrize(
    ("name", "how"),
    [(name, how) for name in CASES for how in RUNS if how.startswith("torch") or not clips_frozen(name)],
)
def test_what_belongs_to_a_frozen_module_keeps_its_bits(name: str, how: str) -> None:
    fields, is_trained = CASES[name]
    model, run = frozen_model(fields, is_trained, in_half=how.endswith("bf16"))
    trained = {key for key, _ in model.named_parameters() if is_trained(key)}
    before = {key: value.clone() for key, value in model.state_dict().items()}
    if how.startswith("torch"):
        torch_steps(model, run)
    else:
        megatron_steps(run, **RUNS[how])
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    # A bias is trained with the weight of its router.
    with_biases = trained | {key.replace("router.weight", "router.expert_bias") for key in trained}
    assert changed <= with_biases
    assert {key for key in changed if "expert_bias" in key} == {
        key for key in before if "expert_bias" in key and key in with_biases
    }
    assert any(key in trained for key in changed)


@pytest.mark.parametrize("name", [name for name in CASES if clips_frozen(name)])
def test_an_optimizer_that_would_clip_a_frozen_projection_is_refused(name: str) -> None:
    _, run = frozen_model(*CASES[name], in_half=False)
    with pytest.raises(ValueError, match="qk_clip is True and a projection of shape .* is frozen"):
        megatron_steps(run)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_router_that_is_frozen_and_thawed_between_steps_moves_only_while_it_is_trained(steps: int) -> None:
    """The loads of frozen steps are dropped, so that a thawed router does not catch up on them."""
    model, run = frozen_model(SIGMOID, lambda name: True, in_half=False)
    router, found = model.decoder.layers[0].mlp.router, []
    for trains in (True, False, True):
        router.weight.requires_grad_(trains)
        before = router.expert_bias.clone()
        for _ in range(steps):
            run(*small_batch()[:2], None, labels=small_batch()[2]).mean().backward()
            model.finalize_step(None)
        found.append(round((router.expert_bias - before).abs().max().item(), 6))
    assert found == [1e-3 * steps, 0.0, 1e-3 * steps]
