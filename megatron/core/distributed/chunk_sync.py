"""ChunkSync: what a wrapped model chunk puts under the launch order of its stage. Launches nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from megatron.core.distributed.grad_checks import GradChecks
from megatron.core.distributed.synced_group import SyncedGroup


@dataclass(frozen=True, eq=False)
class ChunkSync:
    """What a DistributedDataParallel puts under a launch order.

    module: the chunk itself. find_problem: what has changed in it so that its buffers are wrong, in words, or None.
    zero_grads: forgets its gradients. checks: look at them before they are reduced; None: nobody does.
    """

    groups: Sequence[SyncedGroup]
    module: nn.Module
    find_problem: Callable[[], str | None]
    zero_grads: Callable[[], None]
    checks: GradChecks | None = None
