"""LargestLogits: the largest score of each attention head on this rank, recorded by attention and read by
optimizers.
"""

import torch
from torch import Tensor


class LargestLogits:
    """The largest scaled score of each query head since the last reset.

    values: [N], fp64, this rank's heads, -inf before the first score; None until a tensor or `on` determines the
    device. It is changed in place, so that CUDA graphs may write it.
    """

    def __init__(self, num_heads: int) -> None:
        self.num_heads = num_heads
        self.values: Tensor | None = None

    def on(self, device: torch.device) -> Tensor:
        """Returns the values on a device, where they are kept from now on: [N], fp64."""
        if self.values is None or self.values.device != device:
            self.values = torch.full((self.num_heads,), -torch.inf, dtype=torch.float64, device=device)
        return self.values

    def note(self, scores: Tensor, *, scale: float, first_head: int = 0) -> None:
        """Records the largest scores of heads from first_head on; scores: [n], fp32 or fp64, before scaling."""
        own = self.on(scores.device)[first_head : first_head + len(scores)]
        own.copy_(torch.maximum(own, scores.to(own.dtype) * scale))

    def reset(self) -> None:
        """Clears all scores."""
        if self.values is not None:
            self.values.fill_(-torch.inf)
