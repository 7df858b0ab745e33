"""Custom training loops end their steps for the routers, and a loop that does not is told once."""

import re
import warnings
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.graphs.tape import TapeGraphs
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from tests.unit_tests.core.models.custom_models import BIASED, EXPERTS, Around, Layers, Loads, build
from tests.unit_tests.core.models.small_models import small_batch, small_config, small_model
from tests.unit_tests.core.optimizer.reference import wrap

ROOT = Path(__file__).resolve().parents[4]
GLOBAL = {**EXPERTS, "moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.1}


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


CUSTOM: dict[str, Callable[[], nn.Module]] = {
    "layers": Layers,
    "three layers": lambda: Layers(depth=3),
    "a shared recorder": lambda: Layers(share=True),
    "a model inside": Around,
    "two models inside": lambda: Around(count=2),
    "layers and a model": lambda: nn.ModuleList([Layers(), Around()]),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "adam": {},
    "sharded": {"use_distributed_optimizer": True},
    "muon": {"optimizer": "muon"},
}


def loss_of_step(model: nn.Module, wrapped: nn.Module, step: int) -> Tensor:
    losses = [part(step) for part in model] if isinstance(model, nn.ModuleList) else [wrapped(step)]
    return torch.stack(losses).sum()


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", CUSTOM)
def test_finalize_model_grads_ends_the_steps_of_custom_models(name: str, settings: str) -> None:
    """No part of a custom model's class knows of routers. Two micro-batches a step, and an evaluation in between."""
    model = CUSTOM[name]()
    loads = Loads(model)
    sharded = {name: value for name, value in SETTINGS[settings].items() if name == "use_distributed_optimizer"}
    wrapped = wrap(model, overlap=sharded)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, **SETTINGS[settings]), [wrapped])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            optimizer.zero_grad()
            for number in range(2):
                loss_of_step(model, wrapped, 2 * step + number).backward()
            finalize_model_grads([wrapped])
            optimizer.step()
            loads.end_step()
            with torch.no_grad():
                loss_of_step(model, wrapped, 9)
    loads.check()


@pytest.mark.parametrize("kind", ["torch", "megatron"])
@pytest.mark.parametrize("name", CUSTOM)
def test_a_loop_of_a_custom_model_is_told_once_for_all_its_routers(name: str, kind: str) -> None:
    model = CUSTOM[name]()
    wrapped: Any = model if kind == "torch" else wrap(model)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if kind == "megatron":
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3), [wrapped])
    with pytest.warns(UserWarning, match=r"router\.aux_losses\.finalize_step\(None\)") as told:
        for step in range(4):
            optimizer.zero_grad()
            loss_of_step(model, wrapped, step).backward()
            if kind == "megatron":
                wrapped.finish_grad_sync()
            optimizer.step()
    assert len(told) == 1


def blocks_of(page: str) -> list[str]:
    """Returns the Python code of a page, block by block."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)


def test_the_loop_of_the_library_page_moves_the_bias() -> None:
    code = blocks_of("library.md")[0]
    changes = {
        "moe_aux_loss_coeff=0.01": 'moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True',
        "range(50)": "range(3)",
        "optimizer = torch": "loads = Loads(model)\noptimizer = torch",
        "    optimizer.zero_grad()": "    optimizer.zero_grad()\n    loads.end_step()",
    }
    for old, new in changes.items():
        assert code.count(old) == 1
        code = code.replace(old, new)
    names: dict[str, Any] = {"Loads": Loads}
    exec(code, names)
    names["loads"].check()


def test_the_loop_of_the_page_of_data_parallelism_moves_the_bias() -> None:
    model = Layers()
    loads, optimizer = Loads(model), torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        for param in model.parameters():
            param.grad = param.main_grad
        optimizer.step()
        loads.end_step()

    names = {
        "DistributedDataParallel": DistributedDataParallel,
        "DistributedDataParallelConfig": DistributedDataParallelConfig,
        "ModelParallelConfig": ModelParallelConfig,
        "finalize_model_grads": finalize_model_grads,
        "module": model,
        "data": [[0, 1], [2, 3, 4], [5]],
        "loss_of": lambda ddp, batch: ddp(batch),
        "step": step,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(blocks_of("data_parallel.md")[0], names)
    loads.check()


@pytest.mark.parametrize("warmup", [1, 9], ids=["captured", "eager"])
def test_the_loop_of_the_page_of_graphs_moves_the_bias(warmup: int) -> None:
    """Replays run no hooks, so the loads of all steps are counted in a second model that repeats the loop eagerly."""
    capacity = {"moe_expert_capacity_factor": 2.0, "moe_pad_expert_input_to_capacity": True}

    def run(num_eager: int, count: bool) -> tuple[GPTModel, Loads | None]:
        config = small_config(**BIASED, **capacity, deterministic_mode=True)
        model = small_model(config, share_embeddings_and_output_weights=False)
        loads = Loads(model) if count else None
        wrapped = wrap(model, deterministic_mode=True)
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2), [wrapped])
        config.grad_scale_func = optimizer.scale_loss

        def forward_step(batches: Iterator[Any], chunk: nn.Module) -> Any:
            tokens, positions, labels = next(batches)
            losses = chunk(tokens, positions, None, labels=labels)
            return losses, lambda values: (values.mean(), {"loss": values.mean().detach()})

        (block,) = blocks_of("cuda_graphs.md")
        block = block.replace("warmup_steps=3", f"warmup_steps={num_eager}, device=TapeGraphs()")
        if count:
            block = block.replace("    optimizer.step()", "    optimizer.step()\n    loads.end_step()")
        names = {
            "TapeGraphs": TapeGraphs,
            "chunks": [wrapped],
            "steps": 4,
            "forward_step": forward_step,
            "batches": repeat(small_batch()),
            "seq_length": 16,
            "micro_batch_size": 2,
            "optimizer": optimizer,
            "loads": loads,
        }
        exec(block, names)
        assert names["passes"].num_graphs == (num_eager < 4)  # type: ignore[attr-defined]
        return model, loads

    expected, loads = run(9, True)
    assert loads is not None
    loads.check()
    found, _ = run(warmup, False)
    for (name, value), same in zip(found.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(value, same), name


def test_the_replay_loop_of_the_page_of_experts_runs() -> None:
    (block,) = blocks_of("moe.md")
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
