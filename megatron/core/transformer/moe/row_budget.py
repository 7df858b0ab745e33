"""Whether buffers of a fixed size were too small, as a number on the device that no layer reads."""

import torch
from torch import Tensor


class RowBudget:
    """The most rows that any buffer lacked since the last reset: of one layer, or of all layers that share this."""

    def __init__(self, device: torch.device) -> None:
        # Memory that stays in place, as a CUDA graph writes to it.
        self.missing = torch.zeros(1, dtype=torch.int64, device=device)

    def note(self, rows_missing: Tensor) -> None:
        """rows_missing: [1], int64, on the device, 0 or less if all rows had room."""
        torch.maximum(self.missing, rows_missing, out=self.missing)

    def reset(self) -> None:
        """Before a step."""
        self.missing.zero_()
