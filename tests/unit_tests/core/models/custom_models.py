"""Custom models with routers, and a count of the choices that move their biases. Contains no tests."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router import TopKRouter
from tests.unit_tests.core.models.small_models import LLAMA_LIKE, small_batch, small_config, small_model
from tests.unit_tests.core.transformer.moe.small_experts import moe_layer

EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_grouped_gemm": True,
    **LLAMA_LIKE,
}
BIASED = {**EXPERTS, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}


def build(fields: dict[str, Any]) -> GPTModel:
    return small_model(small_config(**fields), share_embeddings_and_output_weights=False)


class Loads:
    """Counts the choices of routers from their inputs, and computes their biases after each step in plain Python."""

    def __init__(self, model: nn.Module) -> None:
        self.routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
        self.counts = [[0] * router.num_experts for router in self.routers]
        self.biases = [[0.0] * router.num_experts for router in self.routers]
        for number, router in enumerate(self.routers):
            router.register_forward_pre_hook(self._counter(number))

    def _counter(self, number: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def count(router: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if not router.training or not torch.is_grad_enabled():
                return
            scores = (inputs[0].detach().reshape(-1, inputs[0].shape[-1]) @ router.weight.detach().t()).sigmoid()
            for row in scores.double().tolist():
                biased = [score + bias for score, bias in zip(row, self.biases[number], strict=True)]
                for expert in sorted(range(len(row)), key=lambda expert: -biased[expert])[: router.topk]:
                    self.counts[number][expert] += 1

        return count

    def end_step(self) -> None:
        for counts, bias in zip(self.counts, self.biases, strict=True):
            mean = sum(counts) / len(counts)
            for expert, found in enumerate(counts):
                bias[expert] += 1e-3 * ((found < mean) - (found > mean))
                counts[expert] = 0

    def check(self) -> None:
        assert any(any(bias) for bias in self.biases)
        for router, bias in zip(self.routers, self.biases, strict=True):
            assert router.expert_bias.tolist() == pytest.approx(bias, abs=1e-7)


class Layers(nn.Module):
    """A custom model of expert layers without finalize_step, whose routers have a recorder each or share one."""

    def __init__(self, *, depth: int = 2, share: bool = False) -> None:
        super().__init__()
        torch.manual_seed(4)
        fields = {name: BIASED[name] for name in BIASED if name not in ("num_moe_experts", "moe_grouped_gemm")}
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(32), "experts": moe_layer(grouped=True, **fields)})
            for _ in range(depth)
        )
        if share:
            self.last = self.blocks[-1].experts.router
            self.last.set_layer_number(depth)
            for number, block in enumerate(self.blocks[:-1], 1):
                block.experts.router.report_to(self.last.aux_losses, layer_number=number)

    def forward(self, step: int) -> Tensor:
        hidden = torch.randn(6, 3, 32, generator=torch.Generator().manual_seed(step))
        for block in self.blocks:
            hidden = hidden + block.experts(block.norm(hidden))[0]
        return hidden.square().mean()


class Around(nn.Module):
    """A custom model with GPTModels inside."""

    def __init__(self, *, count: int = 1) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({str(number): build(BIASED) for number in range(count)})
        self.again = self.parts["0"]

    def forward(self, step: int) -> Tensor:
        tokens, positions, labels = small_batch()
        losses = [part(tokens.roll(step, 1), positions, None, labels=labels) for part in self.parts.values()]
        return torch.stack(losses).mean()
