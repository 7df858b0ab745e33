"""The router: its weights, bias and losses; what becomes of logits is in routing.py, balance in load_balancing.py."""

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.core.model_parallel_config import ConstantInit, InitMethod
from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection, group_size
from megatron.core.tensor_parallel.layers import (
    device_for_buffers,
    empty_parameter,
    initialize_weight,
    zero_parameter,
)
from megatron.core.tensor_parallel.param_attributes import mark_partial_gradient
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.aux_losses import Z_LOSS, AuxLossRecorder, z_loss_func
from megatron.core.transformer.moe.load_balancing import (
    LoadBalancing,
    Routed,
    get_updated_expert_bias,
    with_even_loads,
)
from megatron.core.transformer.moe.routing import Route, build_route, build_sinkhorn_routes
from megatron.core.transformer.recompute import Drawing
from megatron.core.transformer.transformer_config import TransformerConfig

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class Router(MegatronModule, Drawing):
    """Scores every expert for every token; a subclass turns scores into choices.

    bias: [E], of the scores, learned, where linear layers have biases (add_bias_linear); else None.
    """

    bias: nn.Parameter | None

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None) -> None:
        super().__init__(config)
        assert config.num_moe_experts is not None and config.init_method is not None
        self.num_experts, self.init_method = config.num_moe_experts, config.init_method
        self.weight = empty_parameter(self.num_experts, config.hidden_size, config=config)
        self.register_parameter("bias", None)
        if config.add_bias_linear:
            self.bias = zero_parameter(self.num_experts, config=config)
        # Under sequence parallelism each rank routes its part of the sequence.
        for parameter in self.parameters():
            mark_partial_gradient(parameter, partial=config.sequence_parallel)
        initialize_weight(self.weight, self.init_method, config=config)
        self.dtype = None if config.moe_router_dtype is None else _DTYPES[config.moe_router_dtype]
        self.jitter_eps = config.moe_input_jitter_eps or 0.0

    @property
    def draws_numbers(self) -> bool:
        """Whether tokens are jittered."""
        return self.jitter_eps > 0

    def init_methods(self) -> dict[str, InitMethod]:
        """How the random parameters start, by name."""
        return {"weight": self.init_method, **({} if self.bias is None else {"bias": ConstantInit(0)})}

    def gating(self, tokens: Tensor) -> Tensor:
        """Scores; tokens: [T, H], parameter dtype -> [T, E], fp32 (fp64 in fp64 models), or moe_router_dtype."""
        if self.dtype is not None:
            return _LinearIn.apply(tokens, self.weight, self.bias, self.dtype)
        logits = F.linear(tokens, self.weight, self.bias)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    @abstractmethod
    def routing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits: [S, B, E] or [T, E], fp32 or fp64 -> weights [T, K], same dtype, and expert indices [T, K], int64."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """hidden_states: [S, B, H] or [T, H], parameter dtype -> weights [T, K], fp32 (fp64 in fp64 models), and expert
        indices [T, K], int64.
        """
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        if self.training and self.jitter_eps > 0:
            tokens = tokens * torch.empty_like(tokens).uniform_(1 - self.jitter_eps, 1 + self.jitter_eps)
        weights, indices = self.routing(self.gating(tokens).view(*hidden_states.shape[:-1], self.num_experts))
        # Experts multiply in fp32, or fp64 in fp64 models, in whatever precision the routing was.
        return weights.to(torch.promote_types(self.weight.dtype, torch.float32)), indices


class TopKRouter(Router):
    """The K best experts of each token, weighted by their scores; which way is decided by the configuration.

    expert_bias: [E], fp32, moved by the end of each step so that experts with few tokens are chosen more; None without
    moe_router_enable_expert_bias.
    """

    expert_bias: Tensor | None

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None) -> None:
        super().__init__(config, pg_collection)
        self.topk = config.moe_router_topk
        groups = pg_collection or existing_process_groups()
        # The ranks that have parts of the same sequences. Their shares of a loss add up: over tensor-parallel ranks
        # when the router's gradients are summed, over context-parallel ones in a mean, which their number makes a sum.
        self.sequence_group, self.num_shares = groups.tp_cp, group_size(groups.tp_cp)
        self.num_averaged = group_size(groups.cp)
        self.training_route, self.evaluation_route = _build_routes(config)
        self.balancing = LoadBalancing(config)
        self.z_loss_coeff = config.moe_z_loss_coeff or 0.0
        self.forces_balance = config.moe_router_force_load_balancing
        bias = None
        if config.moe_router_enable_expert_bias:
            # fp32 in any model: steps of 1e-3 would be lost in half precision.
            bias = torch.zeros(self.num_experts, dtype=torch.float32, device=device_for_buffers(self.weight))
        self.register_buffer("expert_bias", bias)
        self._groups = groups
        self.set_layer_number(1)

    def set_layer_number(self, layer_number: int) -> None:
        """Gives the router a recorder of its own, so that a layer works outside a model; the model replaces it."""
        own = AuxLossRecorder(
            num_layers=layer_number,
            device=device_for_buffers(self.weight),
            num_experts=self.num_experts,
            groups=self._groups,
        )
        self.report_to(own, layer_number=layer_number)

    def report_to(self, recorder: AuxLossRecorder, *, layer_number: int, runs_again: bool = True) -> None:
        """Hands the losses and counts of this router to the model's recorder; layer_number: from 1.

        runs_again: whether the router may have a second forward, for its backward.
        """
        self.aux_losses, self.layer_number, self.runs_again = recorder, layer_number, runs_again
        if self.expert_bias is not None:
            recorder.update_bias_with(self.update_expert_bias, layer_number=layer_number)

    def keep_passes(self) -> None:
        """Has the recorder keep the tokens of each microbatch from now on, of what is learned from."""
        self.aux_losses.keep_passes()

    def update_expert_bias(self, tokens_per_expert: Tensor) -> None:
        """Moves the bias by one step, in place; tokens_per_expert: [E], int64, of the whole step over all ranks."""
        assert self.expert_bias is not None
        rate = self.config.moe_router_bias_update_rate
        self.expert_bias.copy_(get_updated_expert_bias(tokens_per_expert, self.expert_bias, rate))

    def routing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits: [S, B, E] or [T, E], fp32 or fp64 -> weights [T, K], same dtype, and expert indices [T, K], int64.

        Without sequences told apart, [T, E] is one sequence.
        """
        num_sequences = logits.shape[1] if logits.dim() == 3 else 1
        logits = logits.flatten(0, -2)
        if self.forces_balance:
            logits = with_even_loads(logits, seed=self.layer_number)
        # Losses and counts are for what a step learns: evaluation neither adds nor records them.
        learning = self.training and torch.is_grad_enabled()
        if learning and self.z_loss_coeff > 0:
            logits = self._add_z_loss(logits)  # the same values, one more edge to backward
        route = self.training_route if self.training else self.evaluation_route
        weights, indices = route(logits, self.expert_bias)
        if learning:
            routed = Routed(logits, indices, num_sequences, self.sequence_group, self._average_counts)
            weights = self._add_balancing_losses(weights, routed)
            self.aux_losses.count_tokens(routed.tokens_per_expert, layer_number=self.layer_number)
        return weights, indices

    def _add_z_loss(self, logits: Tensor) -> Tensor:
        loss = z_loss_func(logits, self.z_loss_coeff) / self.num_shares
        return self._add_loss(logits, loss, name=Z_LOSS, coeff=self.z_loss_coeff)

    def _add_balancing_losses(self, weights: Tensor, routed: Routed) -> Tensor:
        for name, loss, coeff in self.balancing.losses(routed):
            weights = self._add_loss(weights, loss, name=name, coeff=coeff)
        return weights

    def _average_counts(self, tokens_per_expert: Tensor) -> Tensor:
        return self.aux_losses.average_counts(
            tokens_per_expert, layer_number=self.layer_number, runs_again=self.runs_again
        )

    def _add_loss(self, activation: Tensor, loss: Tensor, *, name: str, coeff: float) -> Tensor:
        """activation: [T, E] or [T, K], float; loss: [], this rank's share. Returns the same, with an edge to it."""
        # The log has the mean over ranks.
        self.aux_losses.record(name, loss / coeff * self.num_shares, layer_number=self.layer_number)
        if self.config.calculate_per_token_loss:
            # The main loss is then a sum over tokens that is divided by their number at the end of the step.
            loss = loss * (len(activation) * self.num_shares)
        else:
            loss = loss * self.num_averaged
        return self.aux_losses.attach(activation, loss)


def _build_routes(config: TransformerConfig) -> tuple[Route, Route]:
    """For training and for evaluation."""
    if config.uses_sinkhorn:
        return build_sinkhorn_routes(config.moe_router_topk)
    route = build_route(
        config.moe_router_topk,
        pre_softmax=config.moe_router_pre_softmax,
        num_groups=config.moe_router_num_groups,
        group_topk=config.moe_router_group_topk,
        group_score=config.moe_router_group_score,
        scaling_factor=config.moe_router_topk_scaling_factor,
        score_function=config.moe_router_score_function,
    )
    return route, route


class _LinearIn(torch.autograd.Function):
    """tokens @ weight.T + bias in another dtype, forward and backward; keeps tokens and weight in their own."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return F.linear(tokens.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        tokens, weight = ctx.saved_tensors
        grad_tokens = (grad @ weight.to(grad.dtype)).to(tokens.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = (grad.t() @ tokens.to(grad.dtype)).to(weight.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = grad.sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return grad_tokens, grad_weight, grad_bias, None
