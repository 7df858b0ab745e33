"""Which experts each token goes to, with which weight; the losses' formulas are in aux_losses.py."""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.model_parallel_config import InitMethod
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import empty_parameter, initialize_weight
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.aux_losses import (
    LOAD_BALANCING_LOSS,
    Z_LOSS,
    AuxLossRecorder,
    switch_load_balancing_loss_func,
    z_loss_func,
)
from megatron.core.transformer.transformer_config import TransformerConfig


class Router(ABC, MegatronModule):
    """Scores every expert for every token; a subclass turns scores into choices."""

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None) -> None:
        super().__init__(config)
        assert config.num_moe_experts is not None and config.init_method is not None
        self.num_experts, self.init_method = config.num_moe_experts, config.init_method
        self.weight = empty_parameter(self.num_experts, config.hidden_size, config=config)
        initialize_weight(self.weight, self.init_method, config=config)

    def init_methods(self) -> dict[str, InitMethod]:
        """How the random parameters start, by name."""
        return {"weight": self.init_method}

    def gating(self, tokens: Tensor) -> Tensor:
        """Scores; tokens: [T, H], parameter dtype -> [T, E], fp32 (fp64 in fp64 models)."""
        logits = F.linear(tokens, self.weight)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    @abstractmethod
    def routing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits: [T, E], fp32 or fp64 -> weights [T, K], same dtype, and expert indices [T, K], int64."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """hidden_states: [*, H], parameter dtype -> weights [T, K], fp32 (fp64), and expert indices [T, K], int64."""
        return self.routing(self.gating(hidden_states.reshape(-1, hidden_states.shape[-1])))


class TopKRouter(Router):
    """The K experts with the highest scores, weighted by a softmax over those K."""

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None) -> None:
        super().__init__(config, pg_collection)
        self.topk = config.moe_router_topk
        self.aux_loss_coeff = config.aux_loss_coefficient("aux_loss")
        self.z_loss_coeff = config.moe_z_loss_coeff or 0.0
        # A recorder of its own, so that a layer works outside a model; the model replaces it.
        self.report_to(AuxLossRecorder(num_layers=1, device=self.weight.device), layer_number=1)

    def report_to(self, recorder: AuxLossRecorder, *, layer_number: int) -> None:
        """Hands the losses of this router to the model's recorder; layer_number: from 1."""
        self.aux_losses, self.layer_number = recorder, layer_number

    def routing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits: [T, E], fp32 or fp64 -> weights [T, K], same dtype, and expert indices [T, K], int64."""
        # Losses are for the router's gradient: evaluation neither adds nor records them.
        with_losses = self.training and torch.is_grad_enabled()
        if with_losses and self.z_loss_coeff > 0:
            logits = self._add_z_loss(logits)  # the same values, one more edge to backward
        weights, indices = topk_routing(logits, self.topk)
        if with_losses and self.aux_loss_coeff > 0:
            weights = self._add_load_balancing_loss(weights, logits=logits, indices=indices)
        return weights, indices

    def _add_z_loss(self, logits: Tensor) -> Tensor:
        loss = z_loss_func(logits, self.z_loss_coeff)
        return self._add_loss(logits, loss, name=Z_LOSS, coeff=self.z_loss_coeff, num_tokens=logits.shape[0])

    def _add_load_balancing_loss(self, weights: Tensor, *, logits: Tensor, indices: Tensor) -> Tensor:
        loss = switch_load_balancing_loss_func(
            # Over all experts, unlike the weights: an expert that is not chosen must feel the loss too.
            logits.softmax(dim=-1),
            count_tokens(indices, self.num_experts),
            total_num_tokens=logits.shape[0],
            topk=self.topk,
            num_experts=self.num_experts,
            moe_aux_loss_coeff=self.aux_loss_coeff,
        )
        return self._add_loss(
            weights, loss, name=LOAD_BALANCING_LOSS, coeff=self.aux_loss_coeff, num_tokens=logits.shape[0]
        )

    def _add_loss(self, activation: Tensor, loss: Tensor, *, name: str, coeff: float, num_tokens: int) -> Tensor:
        self.aux_losses.record(name, loss / coeff, layer_number=self.layer_number)
        if self.config.calculate_per_token_loss:
            # The main loss is then a sum over tokens that is divided by their number at the end of the step.
            loss = loss * num_tokens
        return self.aux_losses.attach(activation, loss)


def topk_routing(logits: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """logits: [T, E], fp32 or fp64 -> softmax over the chosen K [T, K], same dtype, and indices [T, K], int64."""
    # Softmax after the choice: the K weights of a token sum to one.
    scores, indices = torch.topk(logits, k=topk, dim=-1)
    return scores.softmax(dim=-1), indices


def topk_routing_with_score_function(logits: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """topk_routing as dense tables: logits [T, E], any float dtype -> weights [T, E], same dtype, map [T, E], bool."""
    weights, indices = topk_routing(logits.to(torch.promote_types(logits.dtype, torch.float32)), topk)
    table = torch.zeros_like(logits).scatter(1, indices, weights.to(logits.dtype))
    return table, torch.zeros_like(logits, dtype=torch.bool).scatter(1, indices, True)


def count_tokens(expert_indices: Tensor, num_experts: int) -> Tensor:
    """Assignments of each expert; expert_indices: [T, K], int64 -> [E], int64, on the same device, without a sync."""
    # Not bincount, which reads the largest index on the host.
    experts = torch.arange(num_experts, device=expert_indices.device)
    return (expert_indices.reshape(-1, 1) == experts).sum(dim=0)
