"""ScaledReduceScatter: how torch's fully_shard sums gradients where it is to do it as the other modes do."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.distributed.collectives import ReductionPolicy, reduce_bucket_, shard_of
from megatron.core.distributed.fully_shard_state import ReduceScatter


class ScaledReduceScatter(ReduceScatter):
    """Scales what is to be reduced, then sums it by our own collectives; policy: how, see there."""

    def __init__(self, scale: float, policy: ReductionPolicy) -> None:
        self._scale, self._policy = scale, policy

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for what is sent and received: [*size], dtype."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Makes output_tensor, [N], this rank's shard of the sum of input_tensor, [ranks * N]; both the same dtype.

        Overwrites the input. op: torch's choice, always a sum here. On a GPU the current stream waits, not the host.
        """
        if self._scale != 1.0:
            input_tensor.mul_(self._scale)
        reduce_bucket_(input_tensor, group, sharded=True, policy=self._policy).wait()
        output_tensor.copy_(shard_of(input_tensor, group))
