"""The router, which scores every expert for every token, chooses K experts, and computes their weights.

The router with its weights and bias comes first. The routes, which are pure functions from logits to a choice of
experts, follow. Losses and the other mechanisms that balance loads are in aux_losses.py.

T tokens, H hidden, E experts, K top-k, G groups of experts.
"""

import importlib.util
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core.autograd import PlainFunction, first_order
from megatron.core.model_parallel_config import ConstantInit, InitMethod
from megatron.core.operator_library import operator
from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection, group_size
from megatron.core.tensor_parallel.kept_dtypes import mark_kept_dtype
from megatron.core.tensor_parallel.layers import (
    device_for_buffers,
    empty_parameter,
    initialize_weight,
    zero_parameter,
)
from megatron.core.tensor_parallel.param_attributes import mark_partial_gradient
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.aux_losses import (
    Z_LOSS,
    AuxLossRecorder,
    LoadBalancing,
    Routed,
    count_tokens,
    get_updated_expert_bias,
    summed_counts,
    with_even_loads,
    z_loss_func,
)
from megatron.core.transformer.moe.permutation import Routing
from megatron.core.transformer.moe.router_replay import Choose, RouterReplay
from megatron.core.transformer.recompute import Drawing
from megatron.core.transformer.transformer_config import TransformerConfig


class Choice(NamedTuple):
    """Result of a route.

    weights: [T, K], the logits' dtype. indices: [T, K], int64, the chosen experts. scores: [T, E], the weights' dtype,
    the normalized scores of all experts, or None if the route does not compute them.
    """

    weights: Tensor
    indices: Tensor
    scores: Tensor | None = None


# (logits [T, E], expert bias [E] or None) -> the choice. Sinkhorn's route also takes `valid`: [T], bool, the tokens to
# balance.
Route = Callable[..., Choice]
# Launcher, which has the operator's name.
_LAUNCHERS: tuple[Callable[..., Any], ...] = ()
if importlib.util.find_spec("triton") is not None:
    from megatron.core.transformer.moe import triton_router

    _LAUNCHERS = (triton_router.choice_grad,)
# Avoids a division by zero for a token whose scores are all zero.
_EPSILON = 1e-20
_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class Router(MegatronModule, Drawing):
    """Base class of routers. Scores every expert for every token; subclasses choose experts by the scores.

    weight: [E, H]. bias: [E], learned and added to the logits, with add_bias_linear; else None. layer_number: from 1.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        is_mtp_layer: bool = False,
    ) -> None:
        """Allocates the weight and the bias.

        pg_collection: the groups of this rank; None means the groups of parallel_state, if they exist. is_mtp_layer:
        whether the layer belongs to multi-token prediction. It is unused, because a model assigns a distinct number to
        each layer.
        """
        super().__init__(config)
        assert config.num_moe_experts is not None and config.init_method is not None
        self.num_experts, self.init_method = config.num_moe_experts, config.init_method
        self.is_mtp_layer, self.layer_number = is_mtp_layer, 1
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
        """Whether the router multiplies tokens by random numbers (moe_input_jitter_eps)."""
        return self.jitter_eps > 0

    def init_methods(self) -> dict[str, InitMethod]:
        """Returns the init method of each parameter by name."""
        return {"weight": self.init_method, **({} if self.bias is None else {"bias": ConstantInit(0)})}

    def reset_parameters(self) -> None:
        """Reinitialises the weight and sets the bias to zero."""
        for name, init_method in self.init_methods().items():
            initialize_weight(self.get_parameter(name), init_method, config=self.config)

    def set_layer_number(self, layer_number: int) -> None:
        """Sets the layer number. Layers are numbered from 1."""
        self.layer_number = layer_number

    def gating(self, input: Tensor) -> Tensor:
        """Computes the logits; input: [*, H], parameter dtype.

        Returns [*, E] in moe_router_dtype if that is set, else fp32 (fp64 in fp64 models).
        """
        if self.dtype is not None:
            return router_gating_linear(input, self.weight, self.bias, self.dtype)
        logits = F.linear(input, self.weight, self.bias)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    @abstractmethod
    def routing(self, logits: Tensor) -> Any:
        """Chooses experts for each token; logits: [S, B, E] or [T, E], fp32 or fp64.

        Returns a Routing, or weights [T, E], float, and the choice [T, E], bool.
        """

    def forward(self, input: Tensor) -> Any:
        """Routes tokens; input: [S, B, H] or [T, H], parameter dtype. Returns the result of `routing`."""
        tokens = input.reshape(-1, input.shape[-1])
        return self.routing(self.gating(tokens).view(*input.shape[:-1], self.num_experts))


class TopKRouter(Router):
    """Chooses the K experts with the highest scores for each token, and computes their weights from the scores.

    expert_bias: [E], fp32, added to the scores for the choice only. At the end of each step it is raised for experts
    with few tokens and lowered for experts with many. None without moe_router_enable_expert_bias.
    """

    expert_bias: Tensor | None

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        is_mtp_layer: bool = False,
    ) -> None:
        """Builds the routing functions and auxiliary losses that the configuration selects. Arguments as in Router."""
        super().__init__(config, pg_collection, is_mtp_layer)
        self.topk = config.moe_router_topk
        groups = pg_collection or existing_process_groups()
        # Ranks of sequence_group, the tp_cp group, process parts of the same sequences. Each computes its share of a
        # loss, and the gradients of the shares must be summed. Tensor-parallel ranks do sum the router's gradients.
        # Context-parallel ranks average them together with data-parallel ranks, so a share is multiplied by
        # num_averaged, the number of context-parallel ranks, when it is attached. Over data-parallel ranks the average
        # is correct.
        self.sequence_group, self.num_shares = groups.tp_cp, group_size(groups.tp_cp)
        self.num_averaged = group_size(groups.cp)
        self.balancing = LoadBalancing(
            config, partial(normalised_scores, score_function=config.moe_router_score_function)
        )
        self.router_replay = RouterReplay() if config.moe_enable_routing_replay else None
        self.training_route, self.evaluation_route = _build_routes(
            config, has_losses=self.is_aux_loss_enabled(), replay=self.router_replay
        )
        self.z_loss_coeff = config.moe_z_loss_coeff or 0.0
        self.has_capacity = config.moe_expert_capacity_factor is not None
        self.forces_balance = config.moe_router_force_load_balancing
        bias = None
        if config.moe_router_enable_expert_bias:
            # fp32 in any model, because half precision would round away updates of 1e-3.
            zeros = torch.zeros(self.num_experts, dtype=torch.float32, device=device_for_buffers(self.weight))
            bias = mark_kept_dtype(zeros)
        self.register_buffer("expert_bias", bias)
        self._groups = groups
        self.set_layer_number(1)

    def set_layer_number(self, layer_number: int) -> None:
        """Sets the layer number and creates a recorder for this router, which a model replaces with a shared one."""
        own = AuxLossRecorder(
            num_layers=layer_number,
            device=device_for_buffers(self.weight),
            num_experts=self.num_experts,
            groups=self._groups,
        )
        self.report_to(own, layer_number=layer_number)

    def report_to(self, recorder: AuxLossRecorder, *, layer_number: int) -> None:
        """Sets the recorder for losses and counts; layer_number: from 1."""
        self.aux_losses, self.layer_number = recorder, layer_number
        recorder.watch_router(self, layer_number=layer_number)
        if self.expert_bias is not None:
            recorder.update_bias_with(self.update_expert_bias, layer_number=layer_number)

    def keep_passes(self) -> None:
        """Starts recording the token counts of each training microbatch separately, in addition to their sum."""
        self.aux_losses.keep_passes()

    def update_expert_bias(self, tokens_per_expert: Tensor) -> None:
        """Updates the bias in place; tokens_per_expert: [E], int64, summed over the whole step and all ranks.

        The bias belongs to the router, so a router whose weight is frozen keeps it.
        """
        assert self.expert_bias is not None
        if not self.weight.requires_grad:
            return
        rate = self.config.moe_router_bias_update_rate
        self.expert_bias.copy_(get_updated_expert_bias(tokens_per_expert, self.expert_bias, rate))

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> Routing:
        """Routes tokens; input: [S, B, H] or [T, H], parameter dtype.

        padding_mask: [S, B] or [T], bool, or None: True for tokens that losses and loads ignore. Returns a Routing with
        weights in fp32 (fp64 in fp64 models), which unpacks as weights and choice, both [T, E].
        """
        tokens = self.apply_input_jitter(input.reshape(-1, input.shape[-1]))
        logits = self.gating(tokens).view(*input.shape[:-1], self.num_experts)
        routing = self.routing(logits) if padding_mask is None else self.routing(logits, padding_mask)
        if not isinstance(routing, Routing):
            # A subclass may return tables.
            routing = Routing.of(*routing, num_experts=self.num_experts)
        # The experts apply the weights in fp32 (fp64 in fp64 models), regardless of the precision of the routing.
        weights = routing.weights.to(torch.promote_types(self.weight.dtype, torch.float32))
        return Routing(weights, routing.indices, self.num_experts, routing.has_absent)

    def apply_input_jitter(self, input: Tensor) -> Tensor:
        """Multiplies tokens by uniform noise between 1 - eps and 1 + eps during training.

        input: any shape, float. eps is moe_input_jitter_eps.
        """
        if not self.training or self.jitter_eps == 0:
            return input
        return input * torch.empty_like(input).uniform_(1 - self.jitter_eps, 1 + self.jitter_eps)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> Routing:
        """Chooses experts. During training it also attaches losses and records loads.

        logits: [S, B, E] or [T, E], fp32 or fp64; [T, E] is treated as one sequence. padding_mask: see forward. Returns
        a Routing with weights [T, K], same dtype.
        """
        num_sequences = logits.shape[1] if logits.dim() == 3 else 1
        valid = None
        if padding_mask is not None:
            valid, self.aux_losses.has_received_padding = _valid_tokens(padding_mask, logits), True
        logits = logits.flatten(0, -2)
        if self.forces_balance:
            logits = with_even_loads(logits, seed=self.layer_number)
        # Evaluation adds no losses and records no counts.
        learning = self.training and torch.is_grad_enabled()
        if learning:
            logits = self._with_z_loss(logits, valid)  # the values are unchanged; backward also reaches the loss
        route = self.training_route if self.training else self.evaluation_route
        # Sinkhorn is the only route in which tokens influence each other.
        known = {"valid": valid} if valid is not None and self.training and self.config.uses_sinkhorn else {}
        weights, indices, scores = route(logits, self.expert_bias, **known)
        if learning:
            routed = Routed(logits, scores, indices, num_sequences, self.sequence_group, self._average_counts, valid)
            weights = self._add_balancing_losses(weights, routed)
            # Experts compute padding too, unless they have a capacity, so it occupies rows in a routing trace.
            in_trace = None if valid is None or self.has_capacity else partial(count_tokens, indices, self.num_experts)
            self.aux_losses.record_tokens(
                routed.tokens_per_expert, layer_number=self.layer_number, count_in_trace=in_trace
            )
        return Routing(weights, indices, self.num_experts)

    # Losses

    def is_aux_loss_enabled(self) -> bool:
        """Returns whether training adds any load-balancing loss."""
        return bool(self.balancing.wanted)

    def _with_z_loss(self, logits: Tensor, valid: Tensor | None) -> Tensor:
        if self.z_loss_coeff == 0:
            return logits
        loss = z_loss_func(logits, self.z_loss_coeff, None if valid is None else ~valid)
        num_valid = None
        if valid is not None:
            # Ranks can differ in their number of unpadded tokens, so a rank's mean is weighted by that number.
            num_valid = valid.sum()
            loss = loss * num_valid / summed_counts(num_valid, self.sequence_group).clamp(min=1)
        elif self.num_shares > 1:
            loss = loss / self.num_shares
        return self.attach_and_log_load_balancing_loss(
            logits,
            self.z_loss_coeff,
            loss,
            Z_LOSS,
            self.sequence_group,
            valid_token_count=num_valid,
        )

    def _add_balancing_losses(self, weights: Tensor, routed: Routed) -> Tensor:
        for name, loss, coeff in self.balancing.losses(routed):
            weights = self.attach_and_log_load_balancing_loss(
                weights, coeff, loss, name, self.sequence_group, valid_token_count=routed.num_valid
            )
        return weights

    def _average_counts(self, tokens_per_expert: Tensor, num_assigned: int | Tensor) -> Tensor:
        return self.aux_losses.average_counts(tokens_per_expert, num_assigned, layer_number=self.layer_number)

    def attach_and_log_load_balancing_loss(
        self,
        activation: Tensor,
        aux_loss_coeff: float,
        aux_loss: Tensor,
        aux_loss_name: str,
        reduce_group: ProcessGroup | None,
        needs_dp_avg: bool = True,
        valid_token_count: Tensor | int | None = None,
    ) -> Tensor:
        """Records an auxiliary loss and attaches it to an activation.

        activation: [T, E] or [T, K], float. aux_loss: scalar, float, this rank's share of the loss, including the
        coefficient. aux_loss_name: one of the recorder's names. reduce_group: the ranks whose shares sum to the loss.
        needs_dp_avg: has no effect, because the log always averages over ranks, which does not change equal values.
        valid_token_count: number of unpadded tokens in the activation, as a scalar tensor, int64, if ranks differ; None
        means all. Returns the activation, through which backward also reaches the loss. Collective with
        calculate_per_token_loss if valid_token_count is a tensor.
        """
        num_shares = group_size(reduce_group)
        # The log averages over ranks, so a share is scaled up to a whole loss.
        self.aux_losses.record(
            aux_loss_name, _times(aux_loss / aux_loss_coeff, num_shares), layer_number=self.layer_number
        )
        if self.config.calculate_per_token_loss:
            # The main loss is then a sum over tokens, and gradients are divided by the number of tokens at the end of
            # the step. num_tokens is the number over the ranks of the group, each of which has a share.
            if isinstance(valid_token_count, Tensor):
                count: Tensor | int = summed_counts(valid_token_count, reduce_group)
            else:
                count = (len(activation) if valid_token_count is None else valid_token_count) * num_shares
            aux_loss = aux_loss * count
        else:
            aux_loss = _times(aux_loss, self.num_averaged)
        return self.aux_losses.attach(activation, aux_loss)


def _valid_tokens(padding_mask: Tensor, logits: Tensor) -> Tensor:
    """Returns the tokens that are not padding: [T], bool; padding_mask: [S, B] or [T], bool."""
    if padding_mask.numel() != logits[..., 0].numel() or padding_mask.dtype is not torch.bool:
        raise ValueError(
            f"padding_mask has shape {list(padding_mask.shape)} and dtype {padding_mask.dtype}: must be bool, with "
            f"one entry for each token of {list(logits.shape[:-1])}"
        )
    return ~padding_mask.reshape(-1)


def _times(loss: Tensor, factor: int) -> Tensor:
    # Multiplying by 1 would launch kernels in forward and backward.
    return loss if factor == 1 else loss * factor


class RouterGatingLinearFunction(PlainFunction):
    """Computes inp @ weight.T + bias in router_dtype; saves inp and weight for backward in their original dtypes."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, weight: Tensor, bias: Tensor | None, router_dtype: torch.dtype) -> Tensor:
        """Computes the logits [*, E], router_dtype; inp: [*, H]; weight: [E, H]; bias: [E] or None, all float."""
        ctx.save_for_backward(inp, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return F.linear(inp.to(router_dtype), weight.to(router_dtype), None if bias is None else bias.to(router_dtype))

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """Returns the gradients of inp, weight and bias, in their dtypes; grad_output: [*, E], float."""
        inp, weight = ctx.saved_tensors
        grad = grad_output
        grad_inp = (grad @ weight.to(grad.dtype)).to(inp.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = grad_bias = None
        if ctx.needs_input_grad[1]:
            grad_weight = (grad.flatten(0, -2).t() @ inp.flatten(0, -2).to(grad.dtype)).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.flatten(0, -2).sum(0).to(ctx.bias_dtype)
        return grad_inp, grad_weight, grad_bias, None


def router_gating_linear(inp: Tensor, weight: Tensor, bias: Tensor | None, router_dtype: torch.dtype) -> Tensor:
    """Returns inp @ weight.T + bias, computed in router_dtype: [*, E].

    inp: [*, H]; weight: [E, H]; bias: [E] or None; all float.
    """
    return RouterGatingLinearFunction.apply(inp, weight, bias, router_dtype)


# --- Routes: from logits to experts and weights ---


def _softmax_of_chosen(logits: Tensor, expert_bias: Tensor | None, *, choose: Choose) -> Choice:
    """Computes weights with a softmax over the chosen experts, so that the K weights of a token sum to one."""
    assert expert_bias is None, "RouterConfig rejects a bias for softmax scores"
    chosen, indices = choose(logits)
    return Choice(chosen.softmax(dim=-1), indices)


def _softmax_of_chosen_and_all(logits: Tensor, expert_bias: Tensor | None, *, choose: Choose) -> Choice:
    """Computes weights as _softmax_of_chosen does, and scores all experts for the balancing losses."""
    assert expert_bias is None, "RouterConfig rejects a bias for softmax scores"
    return Choice(*_ChosenAndAll.apply(logits, choose))


def _build_routes(config: TransformerConfig, *, has_losses: bool, replay: RouterReplay | None) -> tuple[Route, Route]:
    """Builds the routes for training and for evaluation; has_losses: whether training adds balancing losses."""
    if config.uses_sinkhorn:
        return build_sinkhorn_routes(config.moe_router_topk, replay=replay)
    build = partial(
        build_route,
        config.moe_router_topk,
        pre_softmax=config.moe_router_pre_softmax,
        num_groups=config.moe_router_num_groups,
        group_topk=config.moe_router_group_topk,
        group_score=config.moe_router_group_score,
        scaling_factor=config.moe_router_topk_scaling_factor,
        score_function=config.moe_router_score_function,
        replay=replay,
    )
    return build(softmax_of_chosen=_softmax_of_chosen_and_all if has_losses else _softmax_of_chosen), build()


def build_route(
    topk: int,
    *,
    pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    group_score: str = "sum",
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    softmax_of_chosen: Callable[..., Choice] = _softmax_of_chosen,
    replay: RouterReplay | None = None,
    choose: Choose | None = None,
) -> Route:
    """Builds the route for these options. Options are checked here, not in forward.

    softmax_of_chosen: the route for softmax scores without pre_softmax. replay: records or forces the choice. choose:
    replaces top-k.
    """
    if choose is None:
        choose = partial(torch.topk, k=topk, dim=-1)
        if num_groups is not None and group_topk is not None:
            counted = 1 if group_score == "max" else topk // group_topk
            choose = partial(
                _best_of_groups, topk=topk, num_groups=num_groups, group_topk=group_topk, scores_per_group=counted
            )
    choose = _replayed(choose, replay)
    if score_function == "softmax" and not pre_softmax:
        route: Route = partial(softmax_of_chosen, choose=choose)
    else:
        # Softmax scores are used unchanged, since they sum to one over all experts. Other scores are normalized over
        # the chosen experts.
        share = score_function != "softmax" and topk > 1
        route = partial(
            _scores_of_chosen,
            score=_SCORES[score_function],
            choose=choose,
            finish=_normalised if share else _unchanged,
        )
    return route if scaling_factor is None else partial(_scaled, route=route, factor=scaling_factor)


def _replayed(choose: Choose, replay: RouterReplay | None) -> Choose:
    return choose if replay is None else partial(replay.get_replay_topk, choose=choose)


def build_sinkhorn_routes(topk: int, *, replay: RouterReplay | None = None) -> tuple[Route, Route]:
    """Builds the training route, which balances each micro-batch, and the evaluation route, which does not."""
    score = _SCORES["sigmoid" if topk == 1 else "softmax"]
    plain = _replayed(partial(torch.topk, k=topk, dim=-1), replay)
    evaluation = partial(_scores_of_chosen, score=score, choose=plain, finish=_unchanged)
    return partial(_sinkhorn_route, score=score, choose=plain), evaluation


def group_limited_topk(
    scores: Tensor,
    topk: int,
    num_tokens: int,
    num_experts: int,
    num_groups: int,
    group_topk: int,
    *,
    scores_per_group: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Chooses the K best experts within the group_topk best groups of each token.

    A group is ranked by the sum of its scores_per_group best scores; None means topk // group_topk. scores: [T, E],
    fp32 or fp64, where T is num_tokens and E is num_experts; a group is E / G consecutive experts. Returns the scores
    of the chosen experts [T, K], same dtype, and their indices [T, K], int64. Raises ValueError if scores has a
    different shape.
    """
    if scores.shape != (num_tokens, num_experts):
        raise ValueError(
            f"scores has shape {list(scores.shape)}: must be num_tokens ({num_tokens}) by num_experts ({num_experts})"
        )
    counted = topk // group_topk if scores_per_group is None else scores_per_group
    return _best_of_groups(scores, topk=topk, num_groups=num_groups, group_topk=group_topk, scores_per_group=counted)


def _best_of_groups(
    scores: Tensor, *, topk: int, num_groups: int, group_topk: int, scores_per_group: int
) -> tuple[Tensor, Tensor]:
    by_group = scores.unflatten(-1, (num_groups, -1))  # [T, G, E / G]
    group_scores = by_group.topk(scores_per_group, dim=-1).values.sum(dim=-1)  # [T, G]
    allowed = torch.zeros_like(group_scores, dtype=torch.bool)
    allowed.scatter_(1, group_scores.topk(group_topk, dim=-1).indices, True)
    return torch.topk(by_group.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(1), k=topk, dim=-1)


def normalised_scores(logits: Tensor, score_function: str) -> Tensor:
    """Computes scores of all experts that sum to one per token, for the balancing losses.

    logits: [T, E], fp32 or fp64. Returns [T, E], same dtype.
    """
    scores = _SCORES[score_function](logits)
    return scores if score_function == "softmax" else _normalised(scores)


def sinkhorn(cost: Tensor, tol: float = 1e-4, *, max_iterations: int = 50, valid: Tensor | None = None) -> Tensor:
    """Alternately scales rows and columns of exp(cost) until the experts share the tokens evenly.

    cost: [T, E], fp32 or fp64. valid: [T], bool, the T tokens to balance; None means all. Rows of other tokens are 0.
    Returns [T, E], same dtype: rows sum to 1 / T, columns to about 1 / E. Once the factors of the columns change by
    less than `tol` on average, all factors are frozen; the device decides this without a sync.
    """
    num_tokens: Tensor | int = len(cost)
    num_experts = cost.shape[1]
    # Subtracting the maximum scales a row, which cancels out, and keeps exp from overflowing.
    matrix = (cost - cost.amax(dim=1, keepdim=True)).exp()
    if valid is not None:
        matrix, num_tokens = matrix.masked_fill(~valid.unsqueeze(1), 0), valid.sum().clamp(min=1)
    columns = cost.new_ones(num_experts)
    rows, done = cost.new_zeros(len(cost)), torch.zeros((), dtype=torch.bool, device=cost.device)
    for _ in range(max_iterations):
        new_rows = _inverse(matrix @ columns, num_tokens)
        new_columns = _inverse(new_rows @ matrix, num_experts)
        error = (new_columns - columns).abs().mean()
        rows, columns = torch.where(done, rows, new_rows), torch.where(done, columns, new_columns)
        done = done | (error <= tol)
    return columns * matrix * rows.unsqueeze(1)


def _scores_of_chosen(
    logits: Tensor,
    expert_bias: Tensor | None,
    *,
    score: Callable[[Tensor], Tensor],
    choose: Choose,
    finish: Callable[[Tensor], Tensor],
) -> Choice:
    scores = score(logits)
    # The bias affects the choice, never the weights.
    _, indices = choose(scores if expert_bias is None else scores + expert_bias)
    return Choice(finish(scores.gather(1, indices)), indices)


def _sinkhorn_route(
    logits: Tensor,
    expert_bias: Tensor | None,
    *,
    score: Callable[[Tensor], Tensor],
    choose: Choose,
    valid: Tensor | None = None,
) -> Choice:
    assert expert_bias is None, "RouterConfig rejects a bias for softmax scores"
    # valid: [T], bool, the tokens to balance; None means all. Padding gets experts without changing those of others.
    with torch.no_grad():
        shares = sinkhorn(logits, valid=valid)
        if valid is not None:
            # Padding would otherwise choose the first experts, because its shares are all 0.
            shares = torch.where(valid.unsqueeze(1), shares, logits.softmax(dim=-1))
        _, indices = choose(shares)
    return Choice(score(logits).gather(1, indices), indices)


def _scaled(logits: Tensor, expert_bias: Tensor | None, *, route: Route, factor: float) -> Choice:
    choice = route(logits, expert_bias)
    return choice._replace(weights=choice.weights * factor)


def _sqrt_softplus(logits: Tensor) -> Tensor:
    # The square root has an infinite slope where softplus is zero, and the gradient would be NaN.
    return F.softplus(logits).clamp_min(torch.finfo(logits.dtype).tiny).sqrt()


def _normalised(scores: Tensor) -> Tensor:
    """Divides each token's scores by their sum. Routes pass chosen experts only, balancing losses all experts."""
    return scores / (scores.sum(dim=-1, keepdim=True) + _EPSILON)


def _unchanged(scores: Tensor) -> Tensor:
    return scores


def _inverse(sums: Tensor, count: Tensor | int) -> Tensor:
    return 1 / (count * (sums + 1e-8))


_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": partial(torch.softmax, dim=-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": _sqrt_softplus,
}


# --- The gradient of both softmaxes, as ops.choice_grad ---


class _ChosenAndAll(PlainFunction):
    """Chooses experts; returns the softmax over the chosen experts, their indices, and the softmax over all experts.

    One autograd node computes both softmaxes, so that one kernel computes their gradient without a separate sum.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, choose: Choose) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # avoids a zero-filled gradient for the indices
        chosen, indices = choose(logits)
        weights, scores = chosen.softmax(dim=-1), logits.softmax(dim=-1)
        ctx.save_for_backward(weights, indices, scores)
        ctx.mark_non_differentiable(indices)
        return weights, indices, scores

    @staticmethod
    @first_order
    def backward(
        ctx: Any, grad_weights: Tensor | None, _: None, grad_scores: Tensor | None
    ) -> tuple[Tensor | None, None]:
        weights, indices, scores = ctx.saved_tensors
        grad_weights = torch.zeros_like(weights) if grad_weights is None else grad_weights
        grad_scores = torch.zeros_like(scores) if grad_scores is None else grad_scores
        return ops.choice_grad(grad_weights, weights, indices, grad_scores=grad_scores, scores=scores), None


ops = torch.ops.router


def _like_scores(
    grad_weights: Tensor, weights: Tensor, indices: Tensor, *, grad_scores: Tensor, scores: Tensor
) -> Tensor:
    return torch.empty_like(scores)


@operator(
    "router",
    "(Tensor grad_weights, Tensor weights, Tensor indices, *, Tensor grad_scores, Tensor scores) -> Tensor",
    cuda=_LAUNCHERS,
    fake=_like_scores,
)
def choice_grad(
    grad_weights: Tensor, weights: Tensor, indices: Tensor, *, grad_scores: Tensor, scores: Tensor
) -> Tensor:
    """Computes the gradient of the logits from the gradients of two softmaxes, over the chosen experts and over all.

    grad_weights, weights: [T, K], fp32 or fp64; indices: [T, K], int64, distinct for a token; grad_scores, scores: [T,
    E], same dtype, of any strides. Returns [T, E], same dtype.
    """
    of_chosen = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
    of_all = torch._softmax_backward_data(grad_scores, scores, -1, scores.dtype)
    return torch.zeros_like(scores).scatter_(1, indices, of_chosen).add_(of_all)
