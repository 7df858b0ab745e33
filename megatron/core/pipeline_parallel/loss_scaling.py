"""What a microbatch's loss is divided by before backward, so that tokens weigh as the flags say on every layout.

Gradients are averaged over the data- and context-parallel ranks later; with per-token loss they are summed, and
divided by all tokens in finalize_model_grads.
"""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron.core.process_groups_config import group_size


@dataclass(frozen=True, kw_only=True)
class MicrobatchLoss:
    """A microbatch's loss as backward takes it: [], any float dtype.

    num_tokens: [], the tokens that finalize_model_grads will divide by; None without per-token loss. report: name to
    a tensor [] or [2] (sum, count), for the log.
    """

    loss: Tensor
    num_tokens: Tensor | None
    report: dict[str, Tensor]


def scaled_loss(
    returned: tuple[Any, ...],
    *,
    per_token: bool,
    num_microbatches: int,
    cp_group: dist.ProcessGroup | None,
) -> MicrobatchLoss:
    """Scales what a loss function returned. Collective over cp_group, where it has more than one rank.

    returned: (summed loss, number of tokens, report), over this rank's part of the sequences; or (loss, report) with
    this rank's share in the mean loss of the whole sequences. Tensors [], on the device.
    """
    ranks = group_size(cp_group)
    if len(returned) == 2:
        loss, report = returned
        # The mean over ranks that follows shall give the sum of the shares.
        return MicrobatchLoss(loss=loss * ranks / num_microbatches, num_tokens=None, report=report)
    loss, num_tokens, report = returned
    if per_token:
        return MicrobatchLoss(loss=loss, num_tokens=num_tokens, report=report)
    if ranks > 1:
        # Of all parts together: parts with fewer tokens would weigh more if each took its own mean. A copy, since
        # the loss function reports its count too.
        num_tokens = num_tokens.detach().clone()
        dist.all_reduce(num_tokens, group=cp_group)
        loss = loss * ranks
    # A microbatch in which every token is masked has zero gradients, not NaN.
    return MicrobatchLoss(loss=loss / num_tokens.clamp(min=1) / num_microbatches, num_tokens=None, report=report)
