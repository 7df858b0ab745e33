"""Functions of mixture-of-experts layers under Megatron's names, for scripts and custom layers.

They work on dense tables [T, E], whereas the layers here work on indices [T, K]. Functions that the layers share are
defined in the files that use them: routes in router.py, losses in aux_losses.py, capacities in permutation.py.

T tokens, H hidden, E experts, K top-k, R rows.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.autograd import PlainFunction
from megatron.core.config_field import require_defaults
from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection, group_size
from megatron.core.transformer.moe.aux_losses import (
    MoEAuxLossAutoScaler,
    get_updated_expert_bias,
    summed_counts,
    switch_load_balancing_loss_func,
    with_even_loads,
    z_loss_func,
)
from megatron.core.transformer.moe.loss_tracker import default_tracker
from megatron.core.transformer.moe.permutation import get_capacity, kept_slots
from megatron.core.transformer.moe.router import (
    RouterGatingLinearFunction,
    build_route,
    group_limited_topk,
    normalised_scores,
    router_gating_linear,
    sinkhorn,
)
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.router_config import RouterConfig, validate_router

__all__ = [
    "MoEAuxLossAutoScaler",
    "RandomSTE",
    "RandomSTEShared",
    "RouterGatingLinearFunction",
    "apply_biased_logits",
    "apply_random_logits",
    "apply_router_token_dropping",
    "clear_aux_losses_tracker",
    "compute_routing_scores_for_aux_loss",
    "get_capacity",
    "get_default_pg_collection",
    "get_moe_layer_wise_logging_tracker",
    "get_tokens_per_expert_and_token_count",
    "get_updated_expert_bias",
    "group_limited_topk",
    "maybe_move_tensor_to_cpu_sync",
    "pad_routing_map",
    "permute",
    "qb_dual_update",
    "reduce_aux_losses_tracker_across_ranks",
    "router_gating_linear",
    "save_to_aux_losses_tracker",
    "sinkhorn",
    "sort_chunks_by_idxs",
    "switch_load_balancing_loss_func",
    "topk_routing_with_score_function",
    "track_moe_metrics",
    "unpermute",
    "z_loss_func",
]

_NOT_FUSED = "there is no fused kernel for this function, and torch operators compute the same result"


# --- Routing ---


def topk_routing_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    expert_bias: Tensor | None = None,
    fused: bool = False,
    router_replay: RouterReplay | None = None,
    dense_output: bool = False,
    precomputed_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Routes every token; returns the weights and the choice as tables.

    logits: [T, E], any float dtype; expert_bias: [E], fp32, only with sigmoid and sqrtsoftplus. fused: must be False.
    router_replay: records or forces the choice. precomputed_indices: [T, K], integer, the choice to use instead of the
    top-k of the scores. Returns weights [T, E], the logits' dtype, zero where not chosen, and the routing map [T, E],
    bool; with dense_output the weights [T, K] and the indices [T, K], int64. Raises ValueError for settings that a
    router's configuration would reject.
    """
    require_defaults("topk_routing_with_score_function", _NOT_FUSED, fused=(fused, False))
    settings = RouterConfig(
        moe_router_topk=topk,
        moe_router_num_groups=num_groups,
        moe_router_group_topk=group_topk,
        moe_router_topk_scaling_factor=scaling_factor,
        moe_router_score_function=score_function,
        moe_router_enable_expert_bias=expert_bias is not None,
    )
    validate_router(settings, num_experts=logits.shape[-1])
    choose = None
    if precomputed_indices is not None:
        if precomputed_indices.shape != (len(logits), topk):
            raise ValueError(
                f"precomputed_indices has shape {list(precomputed_indices.shape)}: must be {topk} experts for each "
                f"of the {len(logits)} tokens"
            )
        choose = partial(_choose_given, indices=precomputed_indices.long())
    route = build_route(
        topk,
        pre_softmax=use_pre_softmax,
        num_groups=num_groups,
        group_topk=group_topk,
        scaling_factor=scaling_factor,
        score_function=score_function,
        replay=router_replay,
        choose=choose,
    )
    weights, indices, _ = route(logits.to(torch.promote_types(logits.dtype, torch.float32)), expert_bias)
    weights = weights.to(logits.dtype)
    if dense_output:
        return weights, indices
    table = torch.zeros_like(logits).scatter(1, indices, weights)
    return table, torch.zeros_like(logits, dtype=torch.bool).scatter(1, indices, True)


def _choose_given(scores: Tensor, *, indices: Tensor) -> tuple[Tensor, Tensor]:
    return scores.gather(1, indices), indices


def compute_routing_scores_for_aux_loss(
    logits: Tensor, topk: int, score_function: str, fused: bool = False, padding_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Computes the scores and their top-k choice, for the balancing losses.

    logits: [T, E], any float dtype. fused: must be False. padding_mask: [T], bool, True for tokens to ignore, whose
    rows are zero in both results. Returns the map of each token's K best experts [T, E], bool, and the scores [T, E],
    fp32 or fp64, which sum to one for each token.
    """
    require_defaults("compute_routing_scores_for_aux_loss", _NOT_FUSED, fused=(fused, False))
    if score_function not in ("softmax", "sigmoid", "sqrtsoftplus"):
        raise ValueError(f"score_function is {score_function!r}: must be softmax, sigmoid or sqrtsoftplus")
    scores = normalised_scores(logits.to(torch.promote_types(logits.dtype, torch.float32)), score_function)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(topk, dim=1).indices, True)
    if padding_mask is not None:
        valid = ~padding_mask.reshape(-1, 1)
        chosen, scores = chosen & valid, scores * valid
    return chosen, scores


def get_tokens_per_expert_and_token_count(
    routing_map: Tensor,
    reduce_group: dist.ProcessGroup | None,
    topk: int | None = None,
    with_padding_mask: bool = False,
) -> tuple[Tensor, Tensor | int, Tensor | int]:
    """Counts the assignments of all ranks to each expert, this rank's tokens, and all ranks' tokens. Collective.

    routing_map: [T, E], bool. with_padding_mask: whether ignored tokens have zero rows in the map. The number of
    remaining tokens is then computed from topk, the number of experts per token. Returns [E], int64, and two token
    counts: ints, or scalars on the device with with_padding_mask.
    """
    own = routing_map.sum(dim=0)
    everywhere = summed_counts(own, reduce_group)
    if not with_padding_mask:
        return everywhere, len(routing_map), len(routing_map) * group_size(reduce_group)
    if topk is None:
        raise ValueError("topk is None: with_padding_mask requires it to count the tokens")
    return everywhere, own.sum() // topk, everywhere.sum() // topk


def apply_router_token_dropping(
    routing_probs: Tensor,
    routing_map: Tensor,
    router_topk: int,
    capacity_factor: float,
    drop_policy: str = "probs",
    pad_to_capacity: bool = False,
) -> tuple[Tensor, Tensor]:
    """Drops the assignments beyond each expert's capacity; returns both tables after dropping.

    routing_probs: [T, E], float; routing_map: [T, E], bool. drop_policy: probs keeps an expert's assignments with the
    largest weights, position keeps its first tokens. pad_to_capacity: whether the map assigns additional tokens, with
    weight 0, so that the number of each expert's tokens equals its capacity, at most T.
    """
    if drop_policy not in ("probs", "position"):
        raise ValueError(f"drop_policy is {drop_policy!r}: must be probs or position")
    num_tokens, num_experts = routing_map.shape
    capacity = min(get_capacity(num_tokens * router_topk, num_experts, capacity_factor), num_tokens)
    # Unchosen slots are ranked after all chosen ones.
    rank = routing_probs.detach() if drop_policy == "probs" else torch.zeros_like(routing_probs)
    rank = rank.masked_fill(~routing_map, -torch.inf)
    experts = torch.arange(num_experts, device=routing_map.device).expand_as(routing_map)
    within = kept_slots(rank, experts, capacity=capacity)
    kept = within & routing_map
    return routing_probs * kept, within if pad_to_capacity else kept


def pad_routing_map(routing_map: Tensor, pad_multiple: int) -> Tensor:
    """Pads each expert's column with its first unassigned tokens until the count is a multiple of pad_multiple.

    routing_map: [T, E], bool or integer. Returns the same shape and dtype. A column without enough unassigned tokens
    selects all tokens.
    """
    if pad_multiple < 1:
        raise ValueError(f"pad_multiple is {pad_multiple}: must be at least 1")
    chosen = routing_map.bool()
    missing = -chosen.sum(dim=0) % pad_multiple  # [E]
    is_added = ~chosen & ((~chosen).cumsum(dim=0) <= missing)
    return (chosen | is_added).to(routing_map.dtype)


def qb_dual_update(scores: Tensor, k: int, beta: Tensor, update_beta: bool = True) -> tuple[Tensor, Tensor]:
    """Performs one step of quantile balancing. Updates the tokens' thresholds, then the experts' thresholds.

    Choosing k experts per token with the largest sum of scores, such that all experts receive equally many tokens, is a
    linear program. Its duals are a threshold alpha for each token and beta for each expert: a token chooses the
    experts with scores - beta > alpha. alpha is the (k + 1)-th largest value of scores - beta over the experts, and
    beta the (T k / E + 1)-th largest value of scores - alpha over the tokens, so that k, or T k / E, values are above
    the threshold.

    scores: [T, E], float; beta: [E], float. update_beta: whether to compute beta as well. Returns alpha [T] and beta
    [E].
    """
    num_tokens, num_experts = scores.shape
    if not 0 < k < num_experts:
        raise ValueError(f"k is {k}: must be at least 1 and below the number of experts ({num_experts})")
    alpha = (scores - beta).topk(k + 1, dim=1).values[:, -1]
    if not update_beta:
        return alpha, beta
    place = min(num_tokens * k // num_experts + 1, num_tokens)
    return alpha, (scores - alpha.unsqueeze(1)).topk(place, dim=0).values[-1]


# --- Rows ---


def permute(
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None = None,
    num_out_tokens: int | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
    tokens_per_expert: Tensor | None = None,
    align_size: int = 0,
    return_batch_invariant_inverse_map: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Copies each token once per assigned expert; the rows are sorted by expert.

    tokens: [T, H], any float dtype; routing_map: [T, E], bool; probs: [T, E], float, or None. Returns rows [R, H],
    their weights [R] or None, and the token of each row [R], int64, all on the device. num_out_tokens: R, if the caller
    knows it. NOTE: without it the host synchronizes with the device to count rows. drop_and_pad: whether each expert
    receives num_out_tokens / E rows: its tokens in their order, then tokens that are not routed to it.
    tokens_per_expert: [E], unused. fused, align_size, return_batch_invariant_inverse_map: must have their defaults.
    """
    require_defaults(
        "permute",
        "rows are copied with torch operators, without padding between experts",
        fused=(fused, False),
        align_size=(align_size, 0),
        return_batch_invariant_inverse_map=(return_batch_invariant_inverse_map, False),
    )
    num_tokens, num_experts = routing_map.shape
    if drop_and_pad:
        if num_out_tokens is None or num_out_tokens % num_experts:
            raise ValueError(
                f"num_out_tokens is {num_out_tokens}: with drop_and_pad it must be a multiple of the {num_experts} "
                "experts"
            )
        slots = _padded_slots(routing_map, capacity=num_out_tokens // num_experts)
    elif num_out_tokens is None:
        slots = _true_positions_sync(routing_map.t().reshape(-1))
    else:
        by_expert = routing_map.t().reshape(-1)  # [E * T]
        slots = by_expert.to(torch.uint8).sort(descending=True, stable=True).indices[:num_out_tokens]
    sorted_indices = slots % num_tokens
    weights = None if probs is None else probs.t().reshape(-1).index_select(0, slots)
    return tokens.index_select(0, sorted_indices), weights, sorted_indices


def unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: torch.Size,
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
    pad_offsets: Tensor | None = None,
    batch_invariant_inverse_map: Tensor | None = None,
) -> Tensor:
    """Sums each token's rows, which are multiplied by their weights if `probs` is given.

    permuted_tokens: [R, H], any float dtype; sorted_indices: [R], int64; restore_shape: (T, H); probs: [T, E], float,
    which requires routing_map: [T, E], bool. drop_and_pad: as in `permute`. Returns [T, H], the rows' dtype. fused,
    pad_offsets, batch_invariant_inverse_map: must have their defaults.
    """
    require_defaults(
        "unpermute",
        "rows are summed with torch operators, without padding between experts",
        fused=(fused, False),
        pad_offsets=(pad_offsets, None),
        batch_invariant_inverse_map=(batch_invariant_inverse_map, None),
    )
    if probs is not None:
        if routing_map is None:
            raise ValueError("probs requires routing_map, which selects the rows' weights")
        _, weights, _ = permute(
            permuted_tokens.new_empty(probs.shape[0], 0),
            routing_map,
            probs,
            len(sorted_indices),
            drop_and_pad=drop_and_pad,
        )
        assert weights is not None
        # fp32 weights would promote half-precision rows, but the sum must keep the rows' dtype, as without weights.
        permuted_tokens = (permuted_tokens * weights.unsqueeze(-1)).to(permuted_tokens.dtype)
    restored = permuted_tokens.new_zeros(restore_shape)
    return restored.index_add(0, sorted_indices, permuted_tokens)


def sort_chunks_by_idxs(
    input: Tensor,
    split_sizes: Tensor | list[int],
    sorted_idxs: Tensor | list[int],
    probs: Tensor | None = None,
    fused: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Splits rows into chunks and reorders the chunks.

    input: [R, *], any dtype; split_sizes: rows of each chunk; sorted_idxs: indices of the chunks in their new order;
    probs: [R], float, or None, reordered in the same way. fused: must be False. Returns the reordered input and probs.
    NOTE: reads sizes and order on the host, which waits for the device if they are on one.
    """
    require_defaults("sort_chunks_by_idxs", _NOT_FUSED, fused=(fused, False))
    sizes, order = _whole_numbers_sync(split_sizes), _whole_numbers_sync(sorted_idxs)
    chunks = input.split(sizes)
    output = torch.cat([chunks[place] for place in order])
    if probs is None:
        return output, None
    weights = probs.split(sizes)
    return output, torch.cat([weights[place] for place in order])


def _padded_slots(routing_map: Tensor, *, capacity: int) -> Tensor:
    """Returns `capacity` slots for each expert, starting with its routed tokens: [E * capacity], int64."""
    num_tokens, num_experts = routing_map.shape
    if capacity > num_tokens:
        raise ValueError(f"num_out_tokens is {capacity} per expert: must be at most the number of tokens, {num_tokens}")
    by_expert = routing_map.t().to(torch.uint8).sort(dim=1, descending=True, stable=True).indices[:, :capacity]
    first = torch.arange(num_experts, device=routing_map.device).unsqueeze(1) * num_tokens
    return (by_expert + first).reshape(-1)


def _true_positions_sync(by_expert: Tensor) -> Tensor:
    # The number of positions is a shape, so the host synchronizes with the device.
    return by_expert.nonzero().view(-1)


def _whole_numbers_sync(numbers: Tensor | list[int]) -> list[int]:
    # Chunk sizes are shapes.
    return [int(number) for number in (numbers.tolist() if isinstance(numbers, Tensor) else numbers)]


def maybe_move_tensor_to_cpu_sync(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Copies a tensor to host memory, as a NumPy array if as_numpy is set; returns other objects unchanged.

    tensor: any shape and dtype. record_stream: whether the allocator must not reuse the tensor's memory before the copy
    has completed. NOTE: synchronizes with the device.
    """
    if not isinstance(tensor, Tensor):
        return tensor
    if tensor.is_cuda:
        if record_stream:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        tensor = tensor.cpu()
    return tensor.detach().numpy() if as_numpy else tensor


# Megatron's name. In this code base, functions that wait for the device have `sync` in their names.
maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu_sync


# --- Losses of all layers ---


def save_to_aux_losses_tracker(
    name: str,
    loss: Tensor,
    layer_number: int | None,
    num_layers: int,
    reduce_group: dist.ProcessGroup | None = None,
    avg_group: dist.ProcessGroup | None = None,
    reduce_group_has_dp: bool = False,
) -> None:
    """Adds a layer's loss to the tracker of this process.

    loss: scalar, float; layer_number: from 1; None saves nothing. reduce_group, avg_group: the ranks over which
    reduce_aux_losses_tracker_across_ranks sums and averages. reduce_group_has_dp: whether reduce_group includes the
    data-parallel ranks; if not, they average the loss as well.
    """
    if layer_number is not None:
        default_tracker().save(
            name,
            loss,
            layer_number,
            num_layers=num_layers,
            reduce_group=reduce_group,
            avg_group=avg_group,
            reduce_group_has_dp=reduce_group_has_dp,
        )


def clear_aux_losses_tracker() -> None:
    """Sets all losses of this process to zero, including those that routers have recorded."""
    default_tracker().clear()


def reduce_aux_losses_tracker_across_ranks(
    track_names: list[str] | None = None, pg_collection: ProcessGroupCollection | None = None
) -> None:
    """Reduces the losses in the tracker over the ranks, and clears them in the routers. Collective.

    track_names: losses to reduce; None means all. All ranks must pass or record the same names.
    """
    default_tracker().reduce(track_names, pg_collection or existing_process_groups())


def get_moe_layer_wise_logging_tracker() -> dict[str, dict[str, Any]]:
    """Returns the losses of this process by name, each as a dict.

    Entries of a dict: values: [L], fp32 or fp64, sums by layer since the last clear; reduce_group, avg_group and
    reduce_group_has_dp: see save_to_aux_losses_tracker. The values of losses that routers recorded are copies.
    """
    return {name: dict(vars(tracked)) for name, tracked in default_tracker().losses().items()}


def track_moe_metrics(
    loss_scale: float,
    iteration: int,
    writer: Any = None,
    wandb_writer: Any = None,
    total_loss_dict: dict[str, Tensor] | None = None,
    per_layer_logging: bool = False,
    force_initialize: bool = False,
    track_names: str | list[str] | None = None,
    num_layers: int | None = None,
    num_moe_layers: int | None = None,
    moe_layer_freq: int | list[int] | None = None,
    mtp_num_layers: int | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> None:
    """Reduces the losses over ranks, logs each loss's mean over the layers, and clears all losses. Collective.

    loss_scale: factor of the sums, such as 1 / number of microbatches. writer: a TensorBoard writer, or None.
    wandb_writer: an object with log(dict, iteration), or None. total_loss_dict: sums by name, scalars, any float dtype,
    to which each mean is added. per_layer_logging: whether to log each layer as well. force_initialize: whether to
    create missing losses of track_names, with num_layers layers, so that pipeline stages without experts can join the
    reduction. num_moe_layers: number of layers by which the sum is divided. None means the number of layers that
    moe_layer_freq (every n-th layer, or a 0 or 1 per layer) selects among num_layers, or all layers without these
    arguments. mtp_num_layers: number of additional layers.
    """
    tracker = default_tracker()
    names = [track_names] if isinstance(track_names, str) else track_names
    if force_initialize:
        if names is None or num_layers is None:
            raise ValueError("force_initialize requires track_names and num_layers")
        for name in names:
            tracker.entry(name, num_layers + (mtp_num_layers or 0))
    tracker.reduce(names, pg_collection or existing_process_groups())
    losses = tracker.losses()
    for name in losses if names is None else names:
        values = losses[name].values * loss_scale
        count = _count_moe_layers(len(values), num_layers, num_moe_layers, moe_layer_freq, mtp_num_layers)
        mean = values.sum() / count
        if total_loss_dict is not None:
            total_loss_dict[name] = total_loss_dict[name] + mean if name in total_loss_dict else mean
        shown = {name: mean}
        if per_layer_logging:
            shown |= {f"moe/{name}_layer_{place}": value for place, value in enumerate(values.unbind())}
        for tag, value in shown.items():
            if writer is not None:
                writer.add_scalar(tag, value, iteration)
            if wandb_writer is not None:
                wandb_writer.log({tag: value}, iteration)
    tracker.clear()


def _count_moe_layers(
    tracked: int,
    num_layers: int | None,
    num_moe_layers: int | None,
    moe_layer_freq: int | list[int] | None,
    mtp_num_layers: int | None,
) -> int:
    if num_moe_layers is not None:
        count = num_moe_layers
    elif moe_layer_freq is None:
        return num_layers + (mtp_num_layers or 0) if num_layers is not None else tracked
    elif isinstance(moe_layer_freq, int):
        count = len(range(0, num_layers if num_layers is not None else tracked, moe_layer_freq))
    else:
        count = sum(moe_layer_freq)
    return count + (mtp_num_layers or 0)


# --- Random logits for benchmarks ---


class RandomSTE(PlainFunction):
    """Replaces logits with noise in forward and passes gradients through to them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        """Returns normal noise from torch's generator, in the shape and dtype of logits: [T, E], float."""
        return torch.randn_like(logits)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        """Passes grad_output through unchanged: [T, E], float."""
        return grad_output


def apply_random_logits(logits: Tensor) -> Tensor:
    """Replaces logits with noise, so that loads are about even, and passes gradients through to them.

    logits: [T, E], float.
    """
    return RandomSTE.apply(logits)


class RandomSTEShared(PlainFunction):
    """Adds the same row of noise to the logits of all tokens and passes gradients through to them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, std: float, layer_number: int | None) -> Tensor:
        """Adds normal numbers with standard deviation std; logits: [T, E], float. Returns the same shape and dtype.

        The noise depends only on layer_number and E, so that all ranks prefer the same experts.
        """
        uniform = with_even_loads(logits.new_zeros(1, logits.shape[-1], dtype=torch.float32), seed=layer_number or 0)
        return logits + (torch.special.ndtri(uniform.clamp(1e-6, 1 - 1e-6)) * std).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        """Passes grad_output through unchanged: [T, E], float."""
        return grad_output, None, None


def apply_biased_logits(logits: Tensor, std: float, layer_number: int | None = None) -> Tensor:
    """Adds a random bias with standard deviation std, identical for all tokens and ranks, so that loads are uneven.

    logits: [T, E], float. layer_number: seed of the bias, so that layers differ. Gradients pass through to the logits.
    """
    return RandomSTEShared.apply(logits, std, layer_number)


def get_default_pg_collection() -> ProcessGroupCollection:
    """Returns the groups of parallel_state, or the groups of a single rank if there are none."""
    return existing_process_groups()
