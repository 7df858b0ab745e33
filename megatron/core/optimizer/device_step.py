"""A step that the device decides by itself, so that a graph can hold it, and what the host reads of it afterwards.

The host's own decision is in MegatronOptimizer.step; the two come to the same bits.
"""

from dataclasses import dataclass

import torch

from megatron.core.optimizer.clip_grads import clip_coefficient_on_device
from megatron.core.optimizer.update_rules import GradScale


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of a step. is_void: the caller said so, and nothing else counts."""

    is_void: bool
    found_inf: bool
    grad_norm: float
    num_zeros: float


@dataclass(frozen=True)
class DeviceStep:
    """What a step has left on the device for the host; each replay of a graph with it leaves that anew.

    outcome: [4], fp64, on the device: the numbers of a StepOutcome, in that order.
    """

    outcome: torch.Tensor

    def read_sync(self) -> StepOutcome:
        """NOTE: waits until the device has done the step."""
        is_void, found_inf, grad_norm, num_zeros = self.outcome.tolist()
        return StepOutcome(bool(is_void), bool(found_inf), grad_norm, num_zeros)


@dataclass(frozen=True)
class Decision:
    """Whether and how a step updates. is_void, found_inf: [], bool. grad_norm, divisor: [], fp64. All on the device."""

    is_void: torch.Tensor
    found_inf: torch.Tensor
    grad_norm: torch.Tensor
    divisor: torch.Tensor

    @property
    def scale(self) -> GradScale:
        """The GradScale for update rules."""
        return GradScale(self.divisor.float(), skip=(self.is_void | self.found_inf).float())

    def for_host(self, num_zeros: torch.Tensor | None) -> DeviceStep:
        """What the host is to learn; num_zeros: [], int64, None where they are not counted."""
        zeros = torch.zeros_like(self.grad_norm) if num_zeros is None else num_zeros.double()
        return DeviceStep(torch.stack([self.is_void.double(), self.found_inf.double(), self.grad_norm, zeros]))


def decide(
    total_norm: torch.Tensor, *, loss_scale: torch.Tensor, void: torch.Tensor | None, clip_grad: float
) -> Decision:
    """From the norm of scaled gradients, [], fp64, and their scale, [], fp64, on one device; reads neither.

    void: the step is void where any of it is above 0: any shape, any dtype. clip_grad: 0 does not clip.
    """
    # Rounded as read_norm_sync rounds it.
    scaled_norm = total_norm.float()
    found_inf = torch.isfinite(scaled_norm).logical_not()
    is_void = torch.zeros_like(found_inf) if void is None else (void > 0).any()
    grad_norm = scaled_norm.double() / loss_scale
    coefficient = clip_coefficient_on_device(clip_grad, grad_norm) if clip_grad else torch.ones_like(grad_norm)
    return Decision(is_void, found_inf, grad_norm, divisor=loss_scale / coefficient)
