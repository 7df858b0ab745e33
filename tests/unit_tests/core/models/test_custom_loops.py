"""Custom training loops end their steps for the routers, and a loop that does not is told once."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from tests.unit_tests.core.models.small_models import LLAMA_LIKE, small_batch, small_config, small_model
from tests.unit_tests.core.optimizer.reference import wrap

ROOT = Path(__file__).resolve().parents[4]
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_grouped_gemm": True,
    **LLAMA_LIKE,
}
BIASED = {**EXPERTS, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
GLOBAL = {**EXPERTS, "moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.1}


def build(fields: dict[str, Any]) -> GPTModel:
    return small_model(small_config(**fields), share_embeddings_and_output_weights=False)


def loss_of(model: torch.nn.Module) -> torch.Tensor:
    tokens, positions, labels = small_batch()
    loss: torch.Tensor = model(tokens, positions, None, labels=labels).mean()
    return loss


def torch_loop(model: GPTModel, *, ends: bool, microbatches: int = 1, steps: int = 4) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        for _ in range(microbatches):
            loss_of(model).backward()
        optimizer.step()
        if ends:
            model.finalize_step(None)
        optimizer.zero_grad()


def two_optimizers(model: GPTModel, *, ends: bool) -> None:
    params = list(model.parameters())
    optimizers = torch.optim.AdamW(params[:3], lr=1e-3), torch.optim.SGD(params[3:], lr=1e-3)
    for _ in range(3):
        loss_of(model).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if ends:
            model.finalize_step(None)


def megatron_loop(model: GPTModel, *, ends: bool) -> None:
    wrapped = wrap(model)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3), [wrapped])
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(wrapped).backward()
        if ends:
            finalize_model_grads([wrapped])
        else:
            wrapped.finish_grad_sync()
        optimizer.step()


LOOPS: dict[str, Callable[..., None]] = {
    "torch": torch_loop,
    "accumulation": lambda model, ends: torch_loop(model, ends=ends, microbatches=3),
    "two optimizers": two_optimizers,
    "megatron": megatron_loop,
}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("fields", [BIASED, GLOBAL], ids=["bias", "global loss"])
def test_a_loop_that_forgets_the_end_of_a_step_is_told_once(fields: dict[str, Any], name: str) -> None:
    with pytest.warns(UserWarning, match=r"require model\.finalize_step\(None\) after each step") as told:
        LOOPS[name](build(fields), ends=False)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = build(fields)
        LOOPS[name](model, ends=True)
    assert not model.aux_losses.tokens_per_expert.any() and not model.aux_losses.global_tokens_per_expert.any()
    assert "moe_router_enable_expert_bias" not in fields or model.decoder.layers[0].mlp.router.expert_bias.any()


@pytest.mark.parametrize("fields", [EXPERTS, {**EXPERTS, "moe_aux_loss_coeff": 0.1}, {}], ids=["none", "aux", "dense"])
def test_a_model_whose_steps_need_no_end_is_told_nothing(fields: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_loop(build(fields), ends=False)


def test_evaluation_and_other_models_do_not_count_as_steps() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, other = build(BIASED), torch.nn.Linear(2, 2)
        torch_loop(model, ends=True)
        model.eval()
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        for _ in range(3):
            loss_of(model)
            other(torch.ones(2)).sum().backward()
            optimizer.step()


def test_a_model_beside_another_one_and_frozen_routers_are_told_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, other = build(BIASED), torch.nn.Linear(2, 2)
        beside, own = torch.optim.SGD(other.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            for _ in range(3):  # the other model takes a step for each micro-batch
                loss_of(model).backward()
                other(torch.ones(2)).sum().backward()
                beside.step()
            model.finalize_step(None)
            own.step()
        adapters = build({**BIASED, "lora_rank": 4})
        for name, param in adapters.named_parameters():
            param.requires_grad_("lora_" in name)
        torch_loop(adapters, ends=False)


def test_the_replay_loop_of_the_page_of_experts_runs() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "moe.md").read_text(encoding="utf-8"), re.DOTALL)
    again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    found = []
    for fields in ({}, again):
        model = build({**BIASED, **fields, "moe_enable_routing_replay": True, "params_dtype": torch.float64})
        names = {
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "batches": [small_batch()] * 3,
            "torch": torch,
            "RouterReplay": RouterReplay,
            "RouterReplayAction": RouterReplayAction,
        }
        exec(block, names)
        RouterReplay.clear_global_router_replay_action()
        found.append((names["loss"].item(), model.decoder.layers[0].mlp.router.expert_bias.clone()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)
    assert torch.equal(found[0][1], found[1][1]) and found[0][1].any()
