"""Losses that hang inside the model: their formulas, their way into backward, and what a step's record keeps of them.

Which router adds which loss is in router.py and load_balancing.py; the loss scale comes from the training schedule.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.device import default_device
from megatron.core.process_groups_config import ProcessGroupCollection, group_size
from megatron.core.transformer.recompute import Recorder

LOAD_BALANCING_LOSS = "load_balancing_loss"
SEQ_LOAD_BALANCING_LOSS = "seq_load_balancing_loss"
GLOBAL_LOAD_BALANCING_LOSS = "global_load_balancing_loss"
Z_LOSS = "z_loss"
MTP_LOSS = "mtp_{} loss"  # of one depth of multi-token prediction


def switch_load_balancing_loss_func(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int,
    topk: int,
    num_experts: int,
    moe_aux_loss_coeff: float,
) -> Tensor:
    """coeff * E * sum over experts of (share of the assignments) * (mean probability).

    probs: [T, E], softmax over all experts, fp32 or more; tokens_per_expert: [E], any integer or float dtype.
    Returns a scalar of the probs' dtype; it is `coeff` when tokens and probabilities are spread evenly. Where ranks
    share the tokens, each with its own probs, tokens_per_expert and total_num_tokens of all: shares that sum to it.
    """
    factor = num_experts * moe_aux_loss_coeff / (topk * total_num_tokens * total_num_tokens)
    return (probs.sum(dim=0) * tokens_per_expert).sum() * factor


def z_loss_func(logits: Tensor, z_loss_coeff: float) -> Tensor:
    """coeff * mean(logsumexp(logits)^2); logits: [T, E], fp32 or more. Returns a scalar of the same dtype."""
    return torch.logsumexp(logits, dim=-1).square().mean() * z_loss_coeff


@dataclass(frozen=True)
class LayerTotals:
    """Records of a model's layers in a step, on the device, in the order of layers.

    losses: [names, L, 2], fp64: sum and count of each layer. tokens_per_expert: [L, E], int64.
    """

    names: tuple[str, ...]
    losses: Tensor
    tokens_per_expert: Tensor

    def plus(self, other: "LayerTotals") -> "LayerTotals":
        """The two added up: of chunks with other layers of the same model."""
        return LayerTotals(self.names, self.losses + other.losses, self.tokens_per_expert + other.tokens_per_expert)


class AuxLossRecorder(Recorder, nn.Module):
    """One per model chunk: the factor of auxiliary gradients, and what its routers count in a step, on the device.

    Losses are kept until they are taken, tokens per expert until `finalize_step`.
    groups: tp_dp_cp are the ranks whose tokens `average_counts` counts, tp_cp those that share a micro-batch.
    """

    backward_scale: Tensor
    sums: Tensor
    counts: Tensor
    tokens_per_expert: Tensor
    global_tokens_per_expert: Tensor
    num_microbatches: Tensor

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
        """dtype: of the sums of losses. more_names: of losses that are not the routers'."""
        super().__init__()
        device = device or default_device()
        self.names = (LOAD_BALANCING_LOSS, SEQ_LOAD_BALANCING_LOSS, GLOBAL_LOAD_BALANCING_LOSS, Z_LOSS, *more_names)
        self.groups = groups or ProcessGroupCollection()
        # Of each layer, one a microbatch, for the second forward of those whose backward is still to come.
        self._averages: defaultdict[int, deque[Tensor]] = defaultdict(deque)
        self._bias_updates: dict[int, Callable[[Tensor], None]] = {}
        self._passes: dict[int, list[Tensor]] | None = None  # tokens per expert of each, by layer
        self._recording = True
        losses = torch.zeros(len(self.names), num_layers, dtype=dtype, device=device)
        tokens = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=device)
        buffers = {
            "backward_scale": torch.ones((), dtype=torch.float64, device=device),
            "sums": losses,
            "counts": losses.clone(),
            "tokens_per_expert": tokens,
            "global_tokens_per_expert": tokens.clone(),
            "num_microbatches": torch.zeros(num_layers, dtype=torch.int64, device=device),
        }
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=False)

    def set_backward_scale(self, scale: Tensor) -> None:
        """Sets what auxiliary gradients are multiplied with from now on; scale: scalar or [1], any float dtype."""
        # In place: graphs that were recorded before still read this tensor. Not copy_: fill_ takes a number of the host
        # along with its launch, where a copy from pageable memory would wait for the device.
        self.backward_scale.fill_(scale.detach().reshape(()))

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Stops recording inside the block, where a layer's forward is recomputed for its backward.

        Losses are still attached. The first forward must run with gradients enabled, or its losses count nowhere.
        """
        recorded, self._recording = self._recording, False
        try:
            yield
        finally:
            self._recording = recorded

    def attach(self, activation: Tensor, loss: Tensor) -> Tensor:
        """`activation`, through which backward also reaches `loss`, with a gradient of the backward scale.

        activation: any shape, float; loss: scalar, float. Returns the activation's shape and dtype.
        """
        return _AttachLoss.apply(activation, loss, self.backward_scale)

    def record(self, name: str, value: Tensor, *, layer_number: int, count: Tensor | int = 1) -> None:
        """Adds one microbatch's value, or a sum of `count`; both scalar, float, on the device; layer_number: from 1."""
        if not self._recording:
            return
        row = self.names.index(name)  # sums and counts are [names, layers]
        self.sums[row, layer_number - 1] += value.detach()
        self.counts[row, layer_number - 1] += count

    def count_tokens(self, tokens_per_expert: Tensor, *, layer_number: int) -> None:
        """Adds one microbatch's tokens; tokens_per_expert: [E], int64, on the device; layer_number: from 1."""
        if not self._recording:
            return
        self.tokens_per_expert[layer_number - 1] += tokens_per_expert
        if self._passes is not None:
            self._passes.setdefault(layer_number, []).append(tokens_per_expert)

    def keep_passes(self) -> None:
        """Starts to record the tokens of each microbatch separately, until they are taken."""
        self._passes = {}

    def take_passes(self) -> dict[int, list[Tensor]]:
        """Returns and clears the counts of `count_tokens`: layer number -> [E], int64, of each microbatch, in order."""
        passes = self._passes or {}
        self._forget_passes()
        return passes

    def average_counts(self, tokens_per_expert: Tensor, *, layer_number: int, runs_again: bool = True) -> Tensor:
        """The mean of `tokens_per_expert`, [E], int64, over the micro-batches of all ranks so far. Collective.

        Returns [E], fp64; when a layer runs again in backward, what its first forward had: by then later microbatches
        of a pipeline have been counted. layer_number: from 1. runs_again: False where none does, and nothing is kept.
        """
        layer, averages = layer_number - 1, self._averages[layer_number]
        if self._recording:
            self.global_tokens_per_expert[layer] += summed_counts(tokens_per_expert, self.groups.tp_dp_cp)
            self.num_microbatches[layer] += group_size(self.groups.tp_dp_cp) // group_size(self.groups.tp_cp)
            average = self.global_tokens_per_expert[layer].double() / self.num_microbatches[layer]
            if runs_again:
                averages.append(average)
            return average
        # Microbatches go through backward in the order in which they went through forward.
        return averages.popleft()

    def update_bias_with(self, update: Callable[[Tensor], None], *, layer_number: int) -> None:
        """Has `update` called at the end of each step with the layer's tokens per expert over all ranks, [E], int64."""
        self._bias_updates[layer_number] = update

    def finalize_step(self, group: dist.ProcessGroup | None) -> None:
        """Ends a step, after its last microbatch: moves the biases, forgets the tokens. Collective.

        group: all ranks that see different tokens, which count together; None for this rank alone.
        """
        if self._bias_updates:
            totals = summed_counts(self.tokens_per_expert, group)
            for layer_number, update in self._bias_updates.items():
                update(totals[layer_number - 1])
        self._forget_tokens()

    def forget_step(self) -> None:
        """Drops what a step recorded that is run again, or given up: it counts nowhere."""
        self._forget_losses()
        self._forget_tokens()
        self._forget_passes()

    def layer_totals(self) -> LayerTotals:
        """Returns this rank's records by layer, since losses were last taken and the last step ended."""
        losses = torch.stack([self.sums.double(), self.counts.double()], dim=2)  # [names, L, 2]
        return LayerTotals(self.names, losses, self.tokens_per_expert)

    def load_totals(self) -> LayerTotals:
        """Returns this rank's tokens by layer, without losses."""
        return LayerTotals((), self.sums.new_zeros(0, len(self.tokens_per_expert), 2).double(), self.tokens_per_expert)

    def take_totals(self) -> dict[str, Tensor]:
        """Each loss's (sum, count) over layers and microbatches since the last call: [2], fp64, on the device."""
        # [names, 2]; fp64, because these are summed over ranks next.
        totals = torch.stack([self.sums.double().sum(dim=1), self.counts.double().sum(dim=1)], dim=1)
        self._forget_losses()
        return dict(zip(self.names, totals.unbind(), strict=True))

    def _forget_passes(self) -> None:
        if self._passes is not None:
            self._passes = {}

    def _forget_losses(self) -> None:
        self.sums.zero_()
        self.counts.zero_()

    def _forget_tokens(self) -> None:
        for tokens in (self.tokens_per_expert, self.global_tokens_per_expert, self.num_microbatches):
            tokens.zero_()
        self._averages.clear()


def summed_counts(tokens: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Over the ranks, a copy; tokens: any shape, int64. Whole numbers: the same sum in any order. Collective."""
    total = tokens.clone()
    if group_size(group) > 1:
        dist.all_reduce(total, group=group)
    return total


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        # Not save_for_backward: the schedule writes the scale between forward and backward.
        ctx.scale, ctx.loss_dtype = scale, loss.dtype
        # A view: the loss adds nothing to the activation, only an edge to the graph.
        return activation.view_as(activation)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        # A copy: gradients are accumulated in place, and the scale is shared by all layers.
        return grad, ctx.scale.to(ctx.loss_dtype, copy=True), None
