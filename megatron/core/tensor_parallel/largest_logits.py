"""LargestLogits: the largest score of each attention head, recorded by attention and read by optimizers."""

import torch
from torch import Tensor


class LargestLogits:
    """The largest scaled score of each query head on this rank since the last reset.

    values: [N], fp64, -inf for heads without a score; None until `note` or `on` determines the device. It is updated
    in place, so that CUDA graphs can write to it.
    """

    def __init__(self, num_heads: int) -> None:
        self.num_heads = num_heads
        self.values: Tensor | None = None

    def on(self, device: torch.device) -> Tensor:
        """Returns the values, [N], fp64, allocated on `device`. A change of the device discards them."""
        if self.values is None or self.values.device != device:
            self.values = torch.full((self.num_heads,), -torch.inf, dtype=torch.float64, device=device)
        return self.values

    def note(self, scores: Tensor, *, scale: float, first_head: int = 0) -> None:
        """Updates the values of n heads, from first_head on. scores: [n], fp32 or fp64, not yet scaled."""
        own = self.on(scores.device)[first_head : first_head + len(scores)]
        own.copy_(torch.maximum(own, scores.to(own.dtype) * scale))

    def reset(self) -> None:
        """Resets all values to -inf."""
        if self.values is not None:
            self.values.fill_(-torch.inf)
