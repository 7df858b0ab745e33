"""FsdpIteration: where an iteration of gradients is that torch's fully_shard reduces, and the checks at its end."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.core.device import default_device
from megatron.core.distributed.fsdp_hand_out import ShardHandOut
from megatron.core.distributed.grad_checks import GradChecks
from megatron.core.distributed.iteration_phase import Phase
from megatron.core.distributed.replica_checks import raise_non_finite
from megatron.core.distributed.sharded_flat_buffer import ShardedFlatBuffer
from megatron.core.distributed.stage_groups import stage_group_of
from megatron.core.group_collectives import message_device
from megatron.core.process_groups_config import ProcessGroupCollection, group_size


class FsdpIteration:
    """Begins with the wrapper's zero_grad_buffer, ends with finish_grad_sync; then an optimizer may step.

    To the optimizer it is what LaunchOrder is for the other wrapper. checks: None: nobody looks at gradients.
    """

    def __init__(
        self,
        buffers: Sequence[ShardedFlatBuffer],
        checks: GradChecks | None,
        *,
        groups: ProcessGroupCollection,
        hand_out: ShardHandOut,
    ) -> None:
        self.has_optimizer, self._hand_out = False, hand_out
        self._buffers, self._checks, self._groups = buffers, checks, groups
        self._phase = Phase.COLLECTING

    def begin(self) -> None:
        """Forgets all gradients."""
        self._phase = Phase.COLLECTING
        for buffer in self._buffers:
            buffer.zero_grads()
        self._hand_out.begin()

    def finish(self) -> None:
        """Makes sure that all gradients are in their places, reduced and, if that is checked, finite. Collective."""
        if self._phase in (Phase.FINISHED, Phase.STEPPED):
            return
        left = [name for buffer in self._buffers for name in buffer.unreduced()]
        if left:
            raise RuntimeError(
                f"finish_grad_sync: gradients of {left[0]} and {len(left) - 1} more were not reduced, as the "
                "last backward was in no_sync: leave the last microbatch out of it, or call reset_iteration"
            )
        for buffer in self._buffers:
            buffer.attach_grads()
        if self._checks is not None:
            self._check_sync(self._checks)
        self._phase = Phase.FINISHED
        for group in self._hand_out.groups:
            self._hand_out.reduced(group)

    def step(self) -> None:
        """Says that the optimizer is about to update; raises RuntimeError where gradients came and `finish` did not."""
        if self._phase is Phase.COLLECTING:
            left = [name for buffer in self._buffers for name in buffer.unreduced()]
            if left or any(buffer.grad_data.count_nonzero() for buffer in self._buffers if not self._is_on_gpu(buffer)):
                raise RuntimeError("the optimizer steps without finish_grad_sync: call it after the last microbatch")
        self._phase = Phase.STEPPED

    def _check_sync(self, checks: GradChecks) -> None:
        # NOTE: reads the device, once a step.
        for buffer in self._buffers:
            checks.measure([(entry.name, entry.main_grad) for entry in buffer.entries])
        found = checks.non_finite_sync()
        groups = [stage_group_of(self._groups), self._groups.pp]
        if self._is_any_sync(bool(found)):
            raise_non_finite(found, groups)

    def _is_any_sync(self, here: bool) -> bool:
        """Whether it is so on any rank of the model. Collective."""
        group = stage_group_of(self._groups)
        if group_size(group) == 1:
            return here
        flag = torch.tensor(int(here), device=message_device([group]))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        return bool(flag.item())

    def _is_on_gpu(self, buffer: ShardedFlatBuffer) -> bool:
        return buffer.grad_data.device != torch.device("cpu") or default_device().type != "cpu"
