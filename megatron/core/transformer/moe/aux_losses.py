"""Losses that hang inside the model: their formulas, their way into backward, and the record of their values.

Which router adds which loss is in router.py; the step's loss scale comes from the training schedule.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.device import default_device

LOAD_BALANCING_LOSS = "load_balancing_loss"
Z_LOSS = "z_loss"


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
    Returns a scalar of the probs' dtype; it is `coeff` when tokens and probabilities are spread evenly.
    """
    factor = num_experts * moe_aux_loss_coeff / (topk * total_num_tokens * total_num_tokens)
    return (probs.sum(dim=0) * tokens_per_expert).sum() * factor


def z_loss_func(logits: Tensor, z_loss_coeff: float) -> Tensor:
    """coeff * mean(logsumexp(logits)^2); logits: [T, E], fp32 or more. Returns a scalar of the same dtype."""
    return torch.logsumexp(logits, dim=-1).square().mean() * z_loss_coeff


class AuxLossRecorder(nn.Module):
    """One per model chunk: the factor of auxiliary gradients, and sums of the losses per layer, all on the device."""

    backward_scale: Tensor
    sums: Tensor
    counts: Tensor

    def __init__(self, num_layers: int, device: torch.device | None = None) -> None:
        super().__init__()
        device = device or default_device()
        self.names = (LOAD_BALANCING_LOSS, Z_LOSS)
        self._recording = True
        zeros = torch.zeros(len(self.names), num_layers, dtype=torch.float32, device=device)
        self.register_buffer("backward_scale", torch.ones((), dtype=torch.float64, device=device), persistent=False)
        self.register_buffer("sums", zeros, persistent=False)
        self.register_buffer("counts", zeros.clone(), persistent=False)

    def set_backward_scale(self, scale: Tensor) -> None:
        """Sets what auxiliary gradients are multiplied with from now on; scale: scalar or [1], any float dtype."""
        # In place: graphs that were recorded before still read this tensor.
        self.backward_scale.copy_(scale.detach().reshape(()))

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Inside, nothing is recorded: a layer's forward runs a second time, for its backward.

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

    def record(self, name: str, value: Tensor, *, layer_number: int) -> None:
        """Adds one microbatch's value; value: scalar, float, on the device; layer_number: from 1."""
        if not self._recording:
            return
        row = self.names.index(name)  # sums and counts are [names, layers]
        self.sums[row, layer_number - 1] += value.detach()
        self.counts[row, layer_number - 1] += 1

    def take_totals(self) -> dict[str, Tensor]:
        """Each loss's (sum, count) over layers and microbatches since the last call: [2], fp64, on the device."""
        # [names, 2]; fp64, because these are summed over ranks next.
        totals = torch.stack([self.sums.double().sum(dim=1), self.counts.double().sum(dim=1)], dim=1)
        self.sums.zero_()
        self.counts.zero_()
        return dict(zip(self.names, totals.unbind(), strict=True))


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
