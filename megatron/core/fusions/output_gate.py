"""Output gate of attention, context * sigmoid(gate), which saves only its inputs for backward."""

from typing import Any

import torch
from torch import Tensor

from megatron.core.autograd import PlainFunction, first_order


def apply_output_gate(context: Tensor, gate: Tensor) -> Tensor:
    """Multiplies attention's output by the sigmoid of the gate; context: [S, B, N * E]; gate: [S, B, G, N / G, E].

    Returns [S, B, N * E]; all one float dtype. Half-precision inputs are computed in fp32 and rounded once.
    """
    gated: Tensor = _OutputGate.apply(context, gate)
    return gated


class _OutputGate(PlainFunction):
    """Autograd function that saves context and gate.

    Saving gate costs no memory, because it is a part of the projection, which the values keep alive anyway.
    """

    @staticmethod
    def forward(ctx: Any, context: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(context, gate)
        return (context.reshape(gate.shape) * _sigmoid(gate)).to(context.dtype).view(context.shape)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        context, gate = ctx.saved_tensors
        open_share = _sigmoid(gate)
        pull = grad.reshape(gate.shape) * open_share
        # d sigmoid = sigmoid (1 - sigmoid)
        grad_gate = (pull * context.reshape(gate.shape) * (1 - open_share)).to(gate.dtype)
        return pull.to(context.dtype).view(context.shape), grad_gate


def _sigmoid(gate: Tensor) -> Tensor:
    return gate.to(torch.promote_types(gate.dtype, torch.float32)).sigmoid()
