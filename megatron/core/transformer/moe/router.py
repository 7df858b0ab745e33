"""The router: scores every expert for every token, chooses K of them, and weighs the choice.

From top to bottom: the router with its weights and bias, then the routes, which are pure functions from logits to the
choice. Losses and everything else that keeps loads even are in aux_losses.py.

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
from megatron.core.transformer.moe.aux_losses import (
    Z_LOSS,
    AuxLossRecorder,
    LoadBalancing,
    Routed,
    get_updated_expert_bias,
    with_even_loads,
    z_loss_func,
)
from megatron.core.transformer.moe.paged_stash.operator_library import operator
from megatron.core.transformer.recompute import Drawing
from megatron.core.transformer.transformer_config import TransformerConfig


class Choice(NamedTuple):
    """A route's result: weights [T, K], the logits' dtype, and expert indices [T, K], int64.

    scores: [T, E], the weights' dtype: the scores of all experts, normalised, if the route computes them too.
    """

    weights: Tensor
    indices: Tensor
    scores: Tensor | None = None


# (logits [T, E], expert bias [E] or None) -> the choice.
Route = Callable[[Tensor, Tensor | None], Choice]
# The launcher, which has the operator's name.
_LAUNCHERS: tuple[Callable[..., Any], ...] = ()
if importlib.util.find_spec("triton") is not None:
    from megatron.core.transformer.moe import triton_router

    _LAUNCHERS = (triton_router.choice_grad,)
# (scores [T, E]) -> the K highest scores and their indices, as torch.topk returns them.
_Choose = Callable[[Tensor], tuple[Tensor, Tensor]]
# Avoids a division by zero for a token whose scores are all zero.
_EPSILON = 1e-20
_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class Router(MegatronModule, Drawing):
    """Scores every expert for every token; subclasses choose experts by the scores.

    weight: [E, H]. bias: [E], learned and added to the logits, with add_bias_linear; else None.
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
        """Whether the router multiplies tokens with random numbers (moe_input_jitter_eps)."""
        return self.jitter_eps > 0

    def init_methods(self) -> dict[str, InitMethod]:
        """Returns the init methods of this module's own parameters, by name."""
        return {"weight": self.init_method, **({} if self.bias is None else {"bias": ConstantInit(0)})}

    def gating(self, tokens: Tensor) -> Tensor:
        """Computes the logits; tokens: [T, H], parameter dtype.

        Returns [T, E] in moe_router_dtype if that is set, else fp32 (fp64 in fp64 models).
        """
        if self.dtype is not None:
            return _LinearIn.apply(tokens, self.weight, self.bias, self.dtype)
        logits = F.linear(tokens, self.weight, self.bias)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    @abstractmethod
    def routing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Chooses K experts for each token; logits: [S, B, E] or [T, E], fp32 or fp64.

        Returns weights [T, K], same dtype, and expert indices [T, K], int64.
        """

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Routes tokens; hidden_states: [S, B, H] or [T, H], parameter dtype.

        Returns weights [T, K], fp32 (fp64 in fp64 models), and expert indices [T, K], int64.
        """
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        if self.training and self.jitter_eps > 0:
            tokens = tokens * torch.empty_like(tokens).uniform_(1 - self.jitter_eps, 1 + self.jitter_eps)
        weights, indices = self.routing(self.gating(tokens).view(*hidden_states.shape[:-1], self.num_experts))
        # The experts apply the weights in fp32 (fp64 in fp64 models), whatever the precision of the routing.
        return weights.to(torch.promote_types(self.weight.dtype, torch.float32)), indices


class TopKRouter(Router):
    """Chooses the K best experts of each token and weighs them by their scores, in the way the configuration selects.

    expert_bias: [E], fp32, added to the scores for the choice only. At the end of each step it is raised for experts
    with few tokens and lowered for those with many. None without moe_router_enable_expert_bias.
    """

    expert_bias: Tensor | None

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None) -> None:
        super().__init__(config, pg_collection)
        self.topk = config.moe_router_topk
        groups = pg_collection or existing_process_groups()
        # Ranks of sequence_group, the tp_cp group, hold parts of the same sequences. Each computes a share of a loss,
        # and the gradients of the shares must be summed. Tensor-parallel ranks do sum the router's gradients. Context-
        # parallel ranks average them together with data-parallel ones, so _add_loss multiplies a share by the number of
        # context-parallel ranks, num_averaged. Over data-parallel ranks the average is correct.
        self.sequence_group, self.num_shares = groups.tp_cp, group_size(groups.tp_cp)
        self.num_averaged = group_size(groups.cp)
        self.balancing = LoadBalancing(
            config, partial(normalised_scores, score_function=config.moe_router_score_function)
        )
        self.training_route, self.evaluation_route = _build_routes(config, has_losses=bool(self.balancing.wanted))
        self.z_loss_coeff = config.moe_z_loss_coeff or 0.0
        self.forces_balance = config.moe_router_force_load_balancing
        bias = None
        if config.moe_router_enable_expert_bias:
            # fp32 in any model, because half precision would round away updates of 1e-3.
            bias = torch.zeros(self.num_experts, dtype=torch.float32, device=device_for_buffers(self.weight))
        self.register_buffer("expert_bias", bias)
        self._groups = groups
        self.set_layer_number(1)

    def set_layer_number(self, layer_number: int) -> None:
        """Creates a recorder for this router alone, so that a layer works outside a model; a model replaces it."""
        own = AuxLossRecorder(
            num_layers=layer_number,
            device=device_for_buffers(self.weight),
            num_experts=self.num_experts,
            groups=self._groups,
        )
        self.report_to(own, layer_number=layer_number)

    def report_to(self, recorder: AuxLossRecorder, *, layer_number: int, runs_again: bool = True) -> None:
        """Sets the recorder of losses and counts; layer_number: from 1.

        runs_again: whether activation recompute may run the router's forward a second time.
        """
        self.aux_losses, self.layer_number, self.runs_again = recorder, layer_number, runs_again
        if self.expert_bias is not None:
            recorder.update_bias_with(self.update_expert_bias, layer_number=layer_number)

    def keep_passes(self) -> None:
        """Makes the recorder also record the tokens of each training microbatch separately from now on."""
        self.aux_losses.keep_passes()

    def update_expert_bias(self, tokens_per_expert: Tensor) -> None:
        """Updates the bias in place; tokens_per_expert: [E], int64, summed over the whole step and all ranks."""
        assert self.expert_bias is not None
        rate = self.config.moe_router_bias_update_rate
        self.expert_bias.copy_(get_updated_expert_bias(tokens_per_expert, self.expert_bias, rate))

    def routing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Chooses experts, and in training attaches losses and records loads.

        logits: [S, B, E] or [T, E], fp32 or fp64; [T, E] counts as one sequence. Returns weights [T, K], same dtype,
        and expert indices [T, K], int64.
        """
        num_sequences = logits.shape[1] if logits.dim() == 3 else 1
        logits = logits.flatten(0, -2)
        if self.forces_balance:
            logits = with_even_loads(logits, seed=self.layer_number)
        # Evaluation adds no losses and records no counts.
        learning = self.training and torch.is_grad_enabled()
        if learning and self.z_loss_coeff > 0:
            logits = self._add_z_loss(logits)  # the values are unchanged; backward also reaches the loss
        route = self.training_route if self.training else self.evaluation_route
        weights, indices, scores = route(logits, self.expert_bias)
        if learning:
            routed = Routed(logits, scores, indices, num_sequences, self.sequence_group, self._average_counts)
            weights = self._add_balancing_losses(weights, routed)
            self.aux_losses.record_tokens(routed.tokens_per_expert, layer_number=self.layer_number)
        return weights, indices

    def _add_z_loss(self, logits: Tensor) -> Tensor:
        loss = z_loss_func(logits, self.z_loss_coeff)
        loss = loss if self.num_shares == 1 else loss / self.num_shares
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
        """Records a loss and attaches it; activation: [T, E] or [T, K], float; loss: [], this rank's share.

        Returns the activation, through which backward also reaches the loss.
        """
        # The log averages over ranks, so a share is scaled to a whole loss.
        self.aux_losses.record(name, _times(loss / coeff, self.num_shares), layer_number=self.layer_number)
        if self.config.calculate_per_token_loss:
            # The main loss is then a sum over tokens, and gradients are divided by their number at the end of the step.
            loss = loss * (len(activation) * self.num_shares)
        else:
            loss = _times(loss, self.num_averaged)
        return self.aux_losses.attach(activation, loss)


def _times(loss: Tensor, factor: int) -> Tensor:
    # A product with 1 would launch kernels forward and backward.
    return loss if factor == 1 else loss * factor


class _LinearIn(torch.autograd.Function):
    """Computes tokens @ weight.T + bias in `dtype`; saves tokens and weight for backward in their own dtypes."""

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


# --- Routes: from logits to experts and weights ---


def _softmax_of_chosen(logits: Tensor, expert_bias: Tensor | None, *, choose: _Choose) -> Choice:
    """Weighs by a softmax over the chosen experts, so that the K weights of a token sum to one."""
    assert expert_bias is None, "RouterConfig refuses a bias for softmax scores"
    chosen, indices = choose(logits)
    return Choice(chosen.softmax(dim=-1), indices)


def _softmax_of_chosen_and_all(logits: Tensor, expert_bias: Tensor | None, *, choose: _Choose) -> Choice:
    """Weighs as _softmax_of_chosen does, and scores all experts for the balancing losses."""
    assert expert_bias is None, "RouterConfig refuses a bias for softmax scores"
    return Choice(*_ChosenAndAll.apply(logits, choose))


def _build_routes(config: TransformerConfig, *, has_losses: bool) -> tuple[Route, Route]:
    """Returns the routes for training and for evaluation; has_losses: whether training adds balancing losses."""
    if config.uses_sinkhorn:
        return build_sinkhorn_routes(config.moe_router_topk)
    build = partial(
        build_route,
        config.moe_router_topk,
        pre_softmax=config.moe_router_pre_softmax,
        num_groups=config.moe_router_num_groups,
        group_topk=config.moe_router_group_topk,
        group_score=config.moe_router_group_score,
        scaling_factor=config.moe_router_topk_scaling_factor,
        score_function=config.moe_router_score_function,
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
) -> Route:
    """Builds the route that the options describe, so that no option is tested in forward.

    softmax_of_chosen: the route of softmax scores without pre_softmax.
    """
    choose: _Choose = partial(torch.topk, k=topk, dim=-1)
    if num_groups is not None and group_topk is not None:
        counted = 1 if group_score == "max" else topk // group_topk
        choose = partial(
            group_limited_topk, topk=topk, num_groups=num_groups, group_topk=group_topk, scores_per_group=counted
        )
    if score_function == "softmax" and not pre_softmax:
        route: Route = partial(softmax_of_chosen, choose=choose)
    else:
        # Softmax scores are used as they are; they sum to one over all experts. Others are normalised over the chosen.
        share = score_function != "softmax" and topk > 1
        route = partial(
            _scores_of_chosen,
            score=_SCORES[score_function],
            choose=choose,
            finish=_normalised if share else _unchanged,
        )
    return route if scaling_factor is None else partial(_scaled, route=route, factor=scaling_factor)


def build_sinkhorn_routes(topk: int) -> tuple[Route, Route]:
    """Builds the route for training, which balances each micro-batch, and the route for evaluation, which does not."""
    score = _SCORES["sigmoid" if topk == 1 else "softmax"]
    plain: _Choose = partial(torch.topk, k=topk, dim=-1)
    evaluation = partial(_scores_of_chosen, score=score, choose=plain, finish=_unchanged)
    return partial(_sinkhorn_route, score=score, choose=plain), evaluation


def group_limited_topk(
    scores: Tensor, *, topk: int, num_groups: int, group_topk: int, scores_per_group: int
) -> tuple[Tensor, Tensor]:
    """Chooses the K best experts within the group_topk best groups of each token.

    A group is ranked by the sum of its scores_per_group best scores. scores: [T, E], fp32 or fp64; a group is E / G
    consecutive experts. Returns the scores of the chosen [T, K], same dtype, and their indices [T, K], int64.
    """
    by_group = scores.unflatten(-1, (num_groups, -1))  # [T, G, E / G]
    group_scores = by_group.topk(scores_per_group, dim=-1).values.sum(dim=-1)  # [T, G]
    allowed = torch.zeros_like(group_scores, dtype=torch.bool)
    allowed.scatter_(1, group_scores.topk(group_topk, dim=-1).indices, True)
    return torch.topk(by_group.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(1), k=topk, dim=-1)


def normalised_scores(logits: Tensor, score_function: str) -> Tensor:
    """Scores all experts so that the scores of a token sum to one, for the balancing losses.

    logits: [T, E], fp32 or fp64. Returns [T, E], same dtype.
    """
    scores = _SCORES[score_function](logits)
    return scores if score_function == "softmax" else _normalised(scores)


def sinkhorn(cost: Tensor, tol: float = 1e-4, *, max_iterations: int = 50) -> Tensor:
    """Scales rows and columns of exp(cost) in turn until the experts share the tokens evenly.

    cost: [T, E], fp32 or fp64. Returns [T, E], same dtype: rows sum to 1 / T, columns to about 1 / E. Once the factors
    of the columns change by less than `tol` on average, all factors are frozen; the device decides this without a sync.
    """
    num_tokens, num_experts = cost.shape
    # Subtracting the maximum scales a row, which cancels out, and keeps exp from overflowing.
    matrix = (cost - cost.amax(dim=1, keepdim=True)).exp()
    columns = cost.new_ones(num_experts)
    rows, done = cost.new_zeros(num_tokens), torch.zeros((), dtype=torch.bool, device=cost.device)
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
    choose: _Choose,
    finish: Callable[[Tensor], Tensor],
) -> Choice:
    scores = score(logits)
    # The bias affects the choice, never the weights.
    _, indices = choose(scores if expert_bias is None else scores + expert_bias)
    return Choice(finish(scores.gather(1, indices)), indices)


def _sinkhorn_route(
    logits: Tensor, expert_bias: Tensor | None, *, score: Callable[[Tensor], Tensor], choose: _Choose
) -> Choice:
    assert expert_bias is None, "RouterConfig refuses a bias for softmax scores"
    with torch.no_grad():
        _, indices = choose(sinkhorn(logits))
    return Choice(score(logits).gather(1, indices), indices)


def _scaled(logits: Tensor, expert_bias: Tensor | None, *, route: Route, factor: float) -> Choice:
    choice = route(logits, expert_bias)
    return choice._replace(weights=choice.weights * factor)


def _sqrt_softplus(logits: Tensor) -> Tensor:
    # The square root has an infinite slope where softplus is zero, and the gradient would be NaN.
    return F.softplus(logits).clamp_min(torch.finfo(logits.dtype).tiny).sqrt()


def _normalised(scores: Tensor) -> Tensor:
    """Divides scores by their sum: scores of the chosen experts in a route, of all experts for balancing losses."""
    return scores / (scores.sum(dim=-1, keepdim=True) + _EPSILON)


def _unchanged(scores: Tensor) -> Tensor:
    return scores


def _inverse(sums: Tensor, count: int) -> Tensor:
    return 1 / (count * (sums + 1e-8))


_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": partial(torch.softmax, dim=-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": _sqrt_softplus,
}


# --- The gradient of both softmaxes, as ops.choice_grad ---


class _ChosenAndAll(torch.autograd.Function):
    """Chooses experts; returns the softmax over the chosen, their indices, and the softmax over all.

    One node for both softmaxes, since their gradients of the logits are then one kernel, without a sum after it.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, choose: _Choose) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # which would fill one for the indices
        chosen, indices = choose(logits)
        weights, scores = chosen.softmax(dim=-1), logits.softmax(dim=-1)
        ctx.save_for_backward(weights, indices, scores)
        ctx.mark_non_differentiable(indices)
        return weights, indices, scores

    @staticmethod
    @once_differentiable
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
    """Computes the gradient of logits from those of two softmaxes, over the chosen experts and over all.

    grad_weights, weights: [T, K], fp32 or fp64; indices: [T, K], int64, distinct for a token; grad_scores, scores:
    [T, E], same dtype, of any strides. Returns [T, E], same dtype.
    """
    of_chosen = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
    of_all = torch._softmax_backward_data(grad_scores, scores, -1, scores.dtype)
    return torch.zeros_like(scores).scatter_(1, indices, of_chosen).add_(of_all)
