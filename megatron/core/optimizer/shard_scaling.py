"""ShardScaling: what reduced gradients are divided by, their norm, and whether any is not finite; all on the device.

The factors of unscaling and clipping wait here for the pass that an update makes anyway.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.core.optimizer.clip_grads import clip_coefficient_on_device, total_norm
from megatron.core.optimizer.update_rules import GradScale
from megatron.core.process_groups_config import group_size


class ShardScaling:
    """shards: the ranks that own other elements; None is this rank alone. device: of the gradients."""

    def __init__(self, shards: dist.ProcessGroup | None, device: torch.device) -> None:
        self._shards = shards
        # Gradients count as what lies in the shards over this: [], fp64 for factors that are multiplied one by one.
        self._divisor = torch.ones((), dtype=torch.float64, device=device)
        # Known to the host, so that gradients which nobody scales go through no division.
        self._is_scaled = False

    def reset(self) -> None:
        """Gradients count as they are."""
        if self._is_scaled:
            self._divisor.fill_(1.0)
            self._is_scaled = False

    def divide(self, by: torch.Tensor) -> None:
        """Divides all gradients; by: [], any float dtype, on the device."""
        self._divisor.mul_(by)
        self._is_scaled = True

    def clip(self, max_norm: float, norm: torch.Tensor, *, some: Sequence[torch.Tensor] | None) -> None:
        """Scales gradients of `norm`, [], to one of at most max_norm. some: [n] each, any float dtype, these alone and
        at once; None: all.
        """
        coefficient = clip_coefficient_on_device(max_norm, norm.double())
        if some is None:
            self.divide(torch.ones_like(coefficient) / coefficient)
        elif some:
            torch._foreach_mul_(list(some), coefficient)

    def fold(self, grads: Sequence[torch.Tensor]) -> None:
        """Divides the gradients themselves, [n] each, any float dtype, for others to be added as they are."""
        if self._is_scaled:
            for grad in grads:
                grad.div_(self._divisor)
            self.reset()

    def norm(self, grads: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        """Norm over all ranks: [], fp32; grads: [n] each, any float dtype, what this rank owns. Collective."""
        if isinstance(norm_type, bool) or not norm_type > 0:
            raise ValueError(f"norm_type is {norm_type!r}: must be a number above 0, or infinity")
        # A rank that owns nothing joins the sums on the device that the others' are on.
        owned = [*grads] or [self._divisor.new_empty(0)]
        total = total_norm(owned, norm_type, groups=[self._shards], accumulate_in=torch.float32)
        return (total / self._divisor).float()

    def any_not_finite(self, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """1 where a gradient of any rank is NaN or infinite, else 0: [], fp32. Collective.

        grads: [n] each, any float dtype, what this rank owns.
        """
        # The ends of a range are not finite if anything in it is not; no tensor of flags is made.
        ends = [end for grad in grads if grad.numel() for end in torch.aminmax(grad)]
        found = torch.zeros((), dtype=torch.float32, device=self._divisor.device)
        if ends:
            found = torch.stack([end.double() for end in ends]).isfinite().all().logical_not().float()
        if group_size(self._shards) > 1:
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._shards)
        return found

    def scale(self, amp_scale: torch.Tensor | None, found_inf: torch.Tensor | None) -> GradScale:
        """What an update divides by, and whether it is skipped; gradients count as divided by it from now on.

        amp_scale: [], a loss scale that is still in the gradients. found_inf: [], above 0 to skip. Any float dtypes and
        devices; None: nothing of the kind.
        """
        device = self._divisor.device
        if amp_scale is not None:
            self.divide(amp_scale.to(device))
        skip = None if found_inf is None else (found_inf.to(device) > 0).float()
        return GradScale(self._divisor.float() if self._is_scaled else 1.0, skip)

    def note_divided(self, skip: torch.Tensor | None) -> None:
        """Says that an update has divided the gradients themselves, unless it was skipped; skip: [], fp32, or None,
        see GradScale.
        """
        if skip is None:
            self.reset()
        else:
            self._divisor.copy_(torch.where(skip == 0, 1.0, self._divisor))
