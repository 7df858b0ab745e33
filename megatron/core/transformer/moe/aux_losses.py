"""Auxiliary losses of the router, and the other mechanisms that balance expert loads.

The losses come first: their selection, formulas and gradients, and the recorder that logging reads. The update of the
routing bias and random logits for benchmarks, which need no loss, follow. The router itself is in router.py.

T tokens, E experts, K top-k, S positions, B sequences, L layers.

[Note: auxiliary losses in backward]
An auxiliary loss belongs to a layer deep inside the model, and pipeline stages before the last never see the main loss.
It is therefore not added to the main loss. Instead, `attach` connects it to an activation of the layer in the autograd
graph. When backward reaches that activation, the loss receives the gradient `backward_scale`, the factor by which the
schedule also scales the main loss (number of microbatches, loss scale). The forward values are unchanged.

[Note: recomputed layers]
With activation recompute, the forward of a layer runs a second time during backward. Its losses must be attached again,
but sums and counts are recorded only once. The global-batch loss depends on the counts accumulated so far, which by
then include later microbatches. The average of the first forward is therefore remembered for the second one; see
[Note: values of a forward] in tensor_parallel/random.py.

[Note: groups of counts]
Tokens per expert are counted on each rank and summed over one of three groups. `tp_cp`: ranks that hold parts of the
same sequences, for the losses of a micro-batch and of its sequences. `tp_dp_cp`: all ranks of the global batch, for the
global-batch loss. The group passed to `finalize_step`: all ranks that process different tokens, for the routing bias.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.autograd import PlainFunction
from megatron.core.config_field import require_defaults
from megatron.core.device import default_device
from megatron.core.device.torch_internals import current_backward_id
from megatron.core.process_groups_config import ProcessGroupCollection, group_size
from megatron.core.tensor_parallel.kept_dtypes import KeepsDtypes, mark_kept_dtype
from megatron.core.tensor_parallel.random import is_recomputing, remembered
from megatron.core.transformer.moe.loss_tracker import LossRecorder, default_tracker
from megatron.core.transformer.transformer_config import TransformerConfig

# Names in the log.
LOAD_BALANCING_LOSS = "load_balancing_loss"
SEQ_LOAD_BALANCING_LOSS = "seq_load_balancing_loss"
GLOBAL_LOAD_BALANCING_LOSS = "global_load_balancing_loss"
Z_LOSS = "z_loss"
_ROUTER_LOSSES = (LOAD_BALANCING_LOSS, SEQ_LOAD_BALANCING_LOSS, GLOBAL_LOAD_BALANCING_LOSS, Z_LOSS)
_NOT_FUSED = "the loss is computed with torch operators"
MTP_LOSS = "mtp_{} loss"  # the loss of one depth of multi-token prediction


# --- Losses of one micro-batch ---


class BalancingLoss(NamedTuple):
    """One load-balancing loss. name: its name in the log. value: scalar that includes the coefficient."""

    name: str
    value: Tensor
    coefficient: float


@dataclass(frozen=True)
class Routed:
    """Routing of one micro-batch. Its T = S x B tokens are ordered by position, then by sequence.

    logits: [T, E], fp32 or fp64. scores: [T, E], same dtype, the normalized scores if the route computed them. indices:
    [T, K], int64. group: `tp_cp`, the ranks that process the other positions of the micro-batch. average_counts: see
    AuxLossRecorder.average_counts. valid: [T], bool, tokens included in the losses; None means all.
    """

    logits: Tensor
    scores: Tensor | None
    indices: Tensor
    num_sequences: int
    group: dist.ProcessGroup | None
    average_counts: Callable[[Tensor, int | Tensor], Tensor]
    valid: Tensor | None = None

    @functools.cached_property
    def tokens_per_expert(self) -> Tensor:
        """Number of assignments to each expert: [E], int64, computed once."""
        return count_tokens(self.indices, self.logits.shape[-1], valid=self.valid)

    @property
    def padding_mask(self) -> Tensor | None:
        """Tokens that the losses exclude: [T], bool; None means none."""
        return None if self.valid is None else ~self.valid

    @functools.cached_property
    def num_tokens(self) -> Tensor | int:
        """Number of tokens in the losses of all ranks of the group, at least 1: an int, or a scalar, int64."""
        if self.num_valid is None:
            return len(self.logits) * group_size(self.group)
        return summed_counts(self.num_valid, self.group).clamp(min=1)

    @functools.cached_property
    def num_valid(self) -> Tensor | None:
        """Number of tokens included in the losses: scalar, int64, on the device; None means all."""
        return None if self.valid is None else self.valid.sum()


class LoadBalancing:
    """Computes the load-balancing losses that a configuration enables."""

    def __init__(self, config: TransformerConfig, normalised_scores: Callable[[Tensor], Tensor]) -> None:
        """Selects the enabled losses.

        normalised_scores: maps logits [T, E] to scores of the same shape that sum to one per token.
        """
        assert config.num_moe_experts is not None
        self.num_experts, self.topk = config.num_moe_experts, config.moe_router_topk
        self.normalised_scores = normalised_scores
        # Gradients of the losses flow to the scores. A routing bias or expert groups can make the actual choice differ
        # from the top-k of the scores, so the losses count the top-k choice of the scores.
        self.counts_actual_choice = not config.moe_router_enable_expert_bias and config.moe_router_num_groups is None
        kinds = (
            ("aux_loss", LOAD_BALANCING_LOSS, self._of_microbatch),
            ("seq_aux_loss", SEQ_LOAD_BALANCING_LOSS, self._of_sequences),
            ("global_aux_loss", GLOBAL_LOAD_BALANCING_LOSS, self._of_global_batch),
        )
        coefficients = [(name, config.aux_loss_coefficient(kind), loss) for kind, name, loss in kinds]
        self.wanted = [(name, coefficient, loss) for name, coefficient, loss in coefficients if coefficient > 0]

    def losses(self, routed: Routed) -> list[BalancingLoss]:
        """Computes this rank's share of each enabled loss of one micro-batch. Collective over routed.group."""
        if not self.wanted:
            return []
        # Over all experts, unlike the routing weights, because experts that were not chosen need a gradient too.
        scores = self.normalised_scores(routed.logits) if routed.scores is None else routed.scores
        if not self.counts_actual_choice:
            routed = replace(routed, indices=scores.topk(self.topk, dim=-1).indices)
        return [
            BalancingLoss(name, loss(scores, routed, coefficient=coefficient), coefficient)
            for name, coefficient, loss in self.wanted
        ]

    def _of_microbatch(self, scores: Tensor, routed: Routed, *, coefficient: float) -> Tensor:
        counts = summed_counts(routed.tokens_per_expert, routed.group)
        return self._switch_loss(
            scores, counts, routed.num_tokens, coefficient=coefficient, padding_mask=routed.padding_mask
        )

    def _of_sequences(self, scores: Tensor, routed: Routed, *, coefficient: float) -> Tensor:
        """Averages the losses of the sequences. Treats each (sequence, expert) pair as a separate expert."""
        num_sequences = routed.num_sequences
        sequence = torch.arange(len(scores), device=scores.device).remainder(num_sequences).unsqueeze(1)  # [T, 1]
        pairs = num_sequences * self.num_experts
        counts = count_tokens(sequence * self.num_experts + routed.indices, pairs, valid=routed.valid)  # [B * E]
        counts = summed_counts(counts, routed.group)
        if routed.valid is None:
            by_sequence = scores.view(-1, len(counts))  # [S, B * E]
            length = len(by_sequence) * group_size(routed.group)
            return self._switch_loss(by_sequence, counts, length, coefficient=coefficient) / num_sequences
        # Sequences can have different numbers of tokens, so each has its own factor. A sequence of padding alone is not
        # data: it has no loss, and the mean does not count it.
        valid = routed.valid.view(-1, num_sequences)  # [S, B]
        lengths = summed_counts(valid.sum(dim=0), routed.group)
        num_real = (lengths > 0).sum().clamp(min=1).to(scores.dtype)
        lengths = lengths.clamp(min=1).to(scores.dtype)
        means = (scores.view(-1, num_sequences, self.num_experts) * valid.unsqueeze(-1)).sum(dim=0)  # [B, E]
        products = (means * counts.view(num_sequences, -1)).sum(dim=1) / lengths.square()
        return products.sum() * (self.num_experts * coefficient) / (self.topk * num_real)

    def _of_global_batch(self, scores: Tensor, routed: Routed, *, coefficient: float) -> Tensor:
        counts = routed.average_counts(routed.tokens_per_expert, routed.num_tokens * self.topk)
        return self._switch_loss(
            scores,
            counts.to(scores.dtype),
            routed.num_tokens,
            coefficient=coefficient,
            padding_mask=routed.padding_mask,
        )

    def _switch_loss(
        self,
        scores: Tensor,
        counts: Tensor,
        num_tokens: int | Tensor,
        *,
        coefficient: float,
        padding_mask: Tensor | None = None,
    ) -> Tensor:
        return switch_load_balancing_loss_func(
            scores, counts, num_tokens, self.topk, self.num_experts, coefficient, padding_mask=padding_mask
        )


def switch_load_balancing_loss_func(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int | Tensor,
    topk: int,
    num_experts: int,
    moe_aux_loss_coeff: float,
    fused: bool = False,
    padding_mask: Tensor | None = None,
) -> Tensor:
    """Computes coeff * E * sum over experts of (share of the assignments) * (mean probability).

    probs: [T, E], softmax over all experts, fp32 or fp64; tokens_per_expert: [E], any integer or float dtype.
    total_num_tokens: an int, or a scalar on the device. fused: must be False. padding_mask: [T], bool, True for tokens
    whose probs are ignored; the counts passed in must exclude them as well. Returns a scalar of the probs' dtype, which
    equals `coeff` when tokens and probabilities are spread evenly. If several ranks share the tokens, each rank passes
    the probs of its tokens with the tokens_per_expert and total_num_tokens of all ranks, and the ranks' results sum to
    the loss.
    """
    if fused:
        require_defaults("switch_load_balancing_loss_func", _NOT_FUSED, fused=(fused, False))
    if padding_mask is not None:
        probs = probs.masked_fill(padding_mask.reshape(-1, 1), 0)
    denominator = topk * total_num_tokens * total_num_tokens
    if isinstance(denominator, Tensor):
        # A number divided by an integer tensor would be fp32 in fp64 models too.
        denominator = denominator.to(probs.dtype)
    factor = num_experts * moe_aux_loss_coeff / denominator
    return (probs.sum(dim=0) * tokens_per_expert).sum() * factor


def z_loss_func(logits: Tensor, z_loss_coeff: float, padding_mask: Tensor | None = None) -> Tensor:
    """Computes coeff * mean(logsumexp(logits)^2); logits: [T, E], fp32 or fp64. Returns a scalar of the same dtype.

    padding_mask: [T], bool, True for tokens excluded from the mean. The result is 0 if all are excluded.
    """
    squares = torch.logsumexp(logits, dim=-1).square()
    if padding_mask is None:
        return squares.mean() * z_loss_coeff
    valid = ~padding_mask.reshape(-1)
    return squares.masked_fill(~valid, 0).sum() / valid.sum().clamp(min=1) * z_loss_coeff


def count_tokens(expert_indices: Tensor, num_experts: int, *, valid: Tensor | None = None) -> Tensor:
    """Counts the assignments to each expert, without a host sync.

    expert_indices: [T, K], int64. valid: [T], bool, tokens to count; None means all. Returns [E], int64, on the same
    device.
    """
    slots = expert_indices.reshape(-1)
    ones = torch.ones_like(slots) if valid is None else valid.unsqueeze(1).expand_as(expert_indices).reshape(-1).long()
    # bincount would read the largest index on the host. Integer sums do not depend on the order.
    return slots.new_zeros(num_experts).scatter_add_(0, slots, ones)


def summed_counts(tokens: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sums token counts over the group's ranks; tokens: any shape, int64. Collective.

    With a single rank it returns its input. See [Note: groups of counts] for the groups in use.
    """
    if group_size(group) == 1:
        return tokens
    total = tokens.clone()
    # Integer sums do not depend on the order.
    dist.all_reduce(total, group=group)
    return total


# --- The record of one step ---


@dataclass(frozen=True)
class LayerTotals:
    """Losses and expert loads of a model's layers in one step, on the device, in layer order.

    losses: [names, L, 2], fp64: sum and count of each layer. tokens_per_expert: [L, E], int64.
    """

    names: tuple[str, ...]
    losses: Tensor
    tokens_per_expert: Tensor

    def plus(self, other: "LayerTotals") -> "LayerTotals":
        """Returns the sum of these totals and the totals of a different chunk of the same model."""
        return LayerTotals(self.names, self.losses + other.losses, self.tokens_per_expert + other.tokens_per_expert)


class AuxLossRecorder(LossRecorder, KeepsDtypes):
    """Records a model chunk's auxiliary losses and expert loads during a step, and scales the losses' gradients.

    The routers of a model chunk share one recorder, whose tensors are on the device. Losses accumulate until
    `take_totals`, tokens per expert until `finalize_step`. groups: see [Note: groups of counts].
    """

    backward_scale: Tensor
    sums: Tensor
    counts: Tensor
    tokens_per_expert: Tensor
    global_tokens_per_expert: Tensor

    def __init__(
        self,
        num_layers: int,
        device: torch.device | None = None,
        *,
        num_experts: int = 0,
        dtype: torch.dtype = torch.float32,
        groups: ProcessGroupCollection | None = None,
        more_names: Sequence[str] = (),
    ) -> None:
        """Allocates the sums and counts on the device.

        dtype: dtype of the loss sums. more_names: names of losses recorded by modules other than routers.
        """
        super().__init__()
        device = device or default_device()
        self.names = (*_ROUTER_LOSSES, *more_names)
        self.groups = groups or ProcessGroupCollection()
        self._bias_updates: dict[int, Callable[[Tensor], None]] = {}
        # Optimizers that have stepped since the first counts of the step, and whether a loop was told to end its steps.
        self._has_counts, self._updated_by, self._has_warned = False, set[int](), False
        # By layer number. Weak, because routers reference their recorder.
        self._routers: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        self.has_received_padding = False  # whether any router has received a padding mask
        self._averages_steps = False  # whether any router uses the loss of the global batch
        self._passes: dict[int, list[Tensor]] | None = None  # tokens per expert of each microbatch, by layer
        self.recorded_names: set[str] = set()  # since the recorder was created
        default_tracker().watch(self)
        losses = torch.zeros(len(self.names), num_layers, dtype=dtype, device=device)
        tokens = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=device)
        buffers = {
            "backward_scale": torch.ones((), dtype=torch.float64, device=device),
            "sums": losses,
            "counts": losses.clone(),
            "tokens_per_expert": tokens,
            "global_tokens_per_expert": tokens.clone(),
        }
        for name, buffer in buffers.items():
            self.register_buffer(name, mark_kept_dtype(buffer), persistent=False)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for deep copies and pickles, in which routers are not registered."""
        return {**vars(self), "_routers": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._routers = weakref.WeakValueDictionary()
        # The tracker would otherwise count the losses of the original twice.
        self.forget_losses()
        self.recorded_names = set()
        default_tracker().watch(self)

    # Into backward

    def set_backward_scale(self, scale: Tensor) -> None:
        """Sets the gradient scale of auxiliary losses for later backward passes.

        scale: scalar or [1], any float dtype.
        """
        # In place, since captured graphs read this tensor. fill_ passes a host number as a kernel argument, while copy_
        # from pageable memory would synchronize with the device.
        self.backward_scale.fill_(scale.detach().reshape(()))
        default_tracker().scale = self.backward_scale  # for losses that MoEAuxLossAutoScaler attaches

    def attach(self, activation: Tensor, loss: Tensor) -> Tensor:
        """Returns `activation` with an edge through which backward also reaches `loss`.

        activation: any shape, float; loss: scalar, float. Returns the activation's shape and dtype. The loss receives
        the backward scale as its gradient. See [Note: auxiliary losses in backward].
        """
        return _AttachLoss.apply(activation, loss, self.backward_scale)

    # In forward

    def record(self, name: str, value: Tensor, *, layer_number: int, count: Tensor | int = 1) -> None:
        """Adds one microbatch's value, or a sum of `count` values, to a loss of a layer.

        value: scalar, float, on the device. count: an int, or a scalar on the device. layer_number: from 1.
        """
        if current_backward_id() != -1 and is_recomputing():
            return
        row = self.names.index(name)  # sums and counts are [names, layers]
        self.recorded_names.add(name)
        # An in-place += on an indexed entry would copy the sums onto themselves.
        self.sums[row, layer_number - 1].add_(value.detach())
        self.counts[row, layer_number - 1].add_(count)

    def record_tokens(
        self, tokens_per_expert: Tensor, *, layer_number: int, count_in_trace: Callable[[], Tensor] | None = None
    ) -> None:
        """Adds one microbatch's token counts; tokens_per_expert: [E], int64, on the device; layer_number: from 1.

        count_in_trace: computes the counts to record for the microbatch itself, [E], int64; None means
        tokens_per_expert.
        """
        if current_backward_id() != -1 and is_recomputing():
            return
        self._has_counts = True
        self.tokens_per_expert[layer_number - 1].add_(tokens_per_expert)
        if self._passes is not None:
            rows = tokens_per_expert if count_in_trace is None else count_in_trace()
            self._passes.setdefault(layer_number, []).append(rows)

    def average_counts(self, tokens_per_expert: Tensor, num_assigned: int | Tensor, *, layer_number: int) -> Tensor:
        """Returns the counts over all ranks in the step so far, scaled to the size of this micro-batch. Collective.

        tokens_per_expert: [E], int64, this rank's counts. num_assigned: their sum over all ranks that process parts of
        the micro-batch, at least 1: an int, or a scalar on the device. layer_number: from 1. Returns [E], fp64. The
        shares n_e / (K T) of the experts are thus ratios of sums, also if micro-batches have different numbers of
        tokens. A recomputed forward gets the result of its first run.
        """
        return remembered(
            lambda: self._averaged(tokens_per_expert, num_assigned, self.global_tokens_per_expert[layer_number - 1]),
            key=(self, layer_number),
        )

    def _averaged(self, tokens_per_expert: Tensor, num_assigned: int | Tensor, totals: Tensor) -> Tensor:
        self._averages_steps = True
        totals.add_(summed_counts(tokens_per_expert, self.groups.tp_dp_cp))
        # With equal micro-batches, the divisor is exactly their number.
        return totals.double() / (totals.sum().clamp(min=1).double() / num_assigned)

    def keep_passes(self) -> None:
        """Starts recording the tokens of each microbatch separately, in addition to their sum."""
        self._passes = {}

    # Between steps

    def take_passes(self) -> dict[int, list[Tensor]]:
        """Returns the token counts of each microbatch and clears them.

        The result contains, for each layer number, one tensor [E], int64, per microbatch, in order.
        """
        passes = self._passes or {}
        self._forget_passes()
        return passes

    @property
    def ignores_padding(self) -> bool:
        """Whether the routers have never received a padding mask. False without routers."""
        return bool(self._routers) and not self.has_received_padding

    def watch_router(self, router: nn.Module, *, layer_number: int) -> None:
        """Registers the router of a layer, whose updates by an optimizer count as steps; layer_number: from 1."""
        self._routers[layer_number] = router

    def update_bias_with(self, update: Callable[[Tensor], None], *, layer_number: int) -> None:
        """Registers `update`, which each `finalize_step` calls with the layer's tokens per expert over all ranks.

        update: receives [E], int64. layer_number: from 1.
        """
        self._bias_updates[layer_number] = update

    def note_update(self, optimizer: object) -> None:
        """Warns once if an optimizer updates a second time although no step was ended since its first update.

        Without finalize_step routing biases never change, and the global-batch loss averages over the whole run.
        """
        if self._has_warned or not (self._has_counts and self._needs_end) or not self._is_updated_by(optimizer):
            return
        if id(optimizer) in self._updated_by:
            self._has_warned = True
            default_tracker().warn_of_missing_end(optimizer)
        self._updated_by.add(id(optimizer))

    def _is_updated_by(self, optimizer: object) -> bool:
        """Returns whether an optimizer updates a router. The model reports only its own ones that are not torch's."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            return True
        routers = self._routers.values()
        weights = {id(weight) for router in routers for weight in router.parameters() if weight.requires_grad}
        return any(id(param) in weights for group in optimizer.param_groups for param in group["params"])

    @property
    def _needs_end(self) -> bool:
        return bool(self._bias_updates) or self._averages_steps

    def finalize_step(self, group: dist.ProcessGroup | None) -> None:
        """Ends a step after its last microbatch: updates the routing biases and clears the token counts. Collective.

        group: all ranks that process different tokens, whose counts are summed; None means this rank only.
        """
        if self._bias_updates:
            totals = summed_counts(self.tokens_per_expert, group)
            for layer_number, update in self._bias_updates.items():
                update(totals[layer_number - 1])
        self._forget_tokens()

    def forget_step(self) -> None:
        """Clears the records of a discarded step."""
        self.forget_losses()
        self._forget_tokens()
        self._forget_passes()

    def layer_totals(self) -> LayerTotals:
        """Returns this rank's records by layer: losses since the last take_totals, token counts of the current step."""
        losses = torch.stack([self.sums.double(), self.counts.double()], dim=2)  # [names, L, 2]
        return LayerTotals(self.names, losses, self.tokens_per_expert)

    def load_totals(self) -> LayerTotals:
        """Returns this rank's tokens per expert by layer, without losses."""
        return LayerTotals((), self.sums.new_zeros(0, len(self.tokens_per_expert), 2).double(), self.tokens_per_expert)

    def take_totals(self) -> dict[str, Tensor]:
        """Returns and clears each loss's sum and count over layers and microbatches: [2], fp64, on the device."""
        # [names, 2], in fp64 because the totals are summed over ranks next.
        totals = torch.stack([self.sums.double().sum(dim=1), self.counts.double().sum(dim=1)], dim=1)
        self.forget_losses()
        return dict(zip(self.names, totals.unbind(), strict=True))

    def _forget_passes(self) -> None:
        if self._passes is not None:
            self._passes = {}

    def layer_losses(self) -> dict[str, Tensor]:
        """Returns views of the sums of the recorded router losses by name: [L], the recorder's dtype."""
        rows = {name: self.sums[self.names.index(name)] for name in sorted(self.recorded_names)}
        return {name: row for name, row in rows.items() if name in _ROUTER_LOSSES}

    def forget_losses(self) -> None:
        """Sets all sums and counts of losses to zero."""
        self.sums.zero_()
        self.counts.zero_()

    def _forget_tokens(self) -> None:
        self.tokens_per_expert.zero_()
        self.global_tokens_per_expert.zero_()
        self._has_counts = False
        self._updated_by.clear()


class _AttachLoss(PlainFunction):
    @staticmethod
    def forward(ctx: Any, activation: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        # save_for_backward would reject the scale, because the schedule writes it between forward and backward.
        ctx.scale, ctx.loss_dtype = scale, loss.dtype
        # A view, because only the graph changes, not the activation.
        return activation.view_as(activation)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        # A copy, because gradients are accumulated in place and all layers share the scale.
        return grad, ctx.scale.to(ctx.loss_dtype, copy=True), None


class MoEAuxLossAutoScaler(PlainFunction):
    """Attaches an auxiliary loss of a custom module: output = MoEAuxLossAutoScaler.apply(output, aux_loss).

    The loss receives the gradient factor last set in this process by the schedule or set_loss_scale; the default is 1.
    See [Note: auxiliary losses in backward].
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, aux_loss: Tensor) -> Tensor:
        """Returns `output` unchanged and saves aux_loss for backward; output, aux_loss: any shape, float."""
        ctx.save_for_backward(aux_loss)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        """Returns grad_output unchanged, and the gradient factor as the gradient of aux_loss.

        grad_output: any shape, float.
        """
        (aux_loss,) = ctx.saved_tensors
        scale, grad = default_tracker().scale, torch.ones_like(aux_loss)
        return grad_output, grad if scale is None else grad * scale.to(grad.device, grad.dtype)

    @staticmethod
    def set_loss_scale(scale: Tensor) -> None:
        """Sets the gradient factor of all auxiliary losses of this process, including the built-in routers' losses.

        scale: scalar or [1], any float dtype. The schedules of megatron.core.pipeline_parallel set it for each
        microbatch.
        """
        default_tracker().set_scale(scale)


# --- Balanced loads without a loss ---


def get_updated_expert_bias(
    tokens_per_expert: Tensor,
    expert_bias: Tensor,
    expert_bias_update_rate: float,
    tp_dp_cp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Returns the routing bias after a step: raised for experts below the mean token count, lowered above it.

    tokens_per_expert: [*, E], integer or float, summed over the global batch, or, with tp_dp_cp_group, this rank's
    share of the sum; expert_bias: [*, E], fp32. tp_dp_cp_group: the ranks to sum over; None means that the counts are
    already summed. Returns [*, E], fp32. An entry changes by expert_bias_update_rate, or not at all if its count equals
    the mean.
    """
    with torch.no_grad():
        tokens_per_expert = summed_counts(tokens_per_expert, tp_dp_cp_group)
        # Compares E times the counts with their sum, in integers, so that an expert with exactly the mean is unchanged.
        missing = tokens_per_expert.sum(dim=-1, keepdim=True) - tokens_per_expert.shape[-1] * tokens_per_expert
        return expert_bias + missing.sign() * expert_bias_update_rate


def with_even_loads(logits: Tensor, *, seed: int) -> Tensor:
    """Replaces the logits with uniform noise and passes gradients through to them.

    logits: [T, E], fp32 or fp64. Returns [T, E], same dtype. The noise is a hash of `seed` and the position. It uses no
    random generator and is identical in every step and on every device.
    """
    mask = 0xFFFFFFFF
    numbers = torch.arange(logits.numel(), device=logits.device) + (seed * 0x9E3779B9 & mask)
    for _ in range(2):
        # An integer hash, which maps neighbors to unrelated numbers.
        numbers = ((numbers ^ (numbers >> 16)) * 0x45D9F3B) & mask
    noise = ((numbers ^ (numbers >> 16)).double() / mask).view_as(logits).to(logits.dtype)
    return _StraightThrough.apply(logits, noise)


class _StraightThrough(PlainFunction):
    """Returns `noise` in forward, and passes its gradient to `logits` in backward."""

    @staticmethod
    def forward(ctx: object, logits: Tensor, noise: Tensor) -> Tensor:
        return noise.view_as(noise)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
