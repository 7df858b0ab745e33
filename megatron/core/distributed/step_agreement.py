"""StepAgreement: what the ranks of a stage tell each other at the end of an iteration. Moves no gradients."""

from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.profiler import record_function

from megatron.core.agreement import RemoteRankError
from megatron.core.distributed.ledger import Ledger
from megatron.core.group_collectives import gather_objects, message_device
from megatron.core.process_groups_config import group_size


@dataclass(frozen=True)
class Verdict:
    """What ends an iteration, of one rank or of all; late: of each bucket group, by its number."""

    is_aborted: bool
    is_non_finite: bool
    is_reordered: bool
    late: list[bool]


class StepAgreement:
    """stage_group: the ranks that agree. pp_group: those that must stop together where a gradient is not finite. None
    of either is this rank alone. stage_host, pp_host: the same ranks, where these can send from the host; without them,
    each step reads a GPU. ledger: where launches were noted, which are compared on the way.
    """

    def __init__(
        self,
        stage_group: dist.ProcessGroup | None,
        *,
        pp_group: dist.ProcessGroup | None,
        stage_host: dist.ProcessGroup | None,
        pp_host: dist.ProcessGroup | None,
        ledger: Ledger,
    ) -> None:
        self._stage_group, self._ledger = stage_group, ledger
        self._stage_messages, self._pp_messages = stage_host or stage_group, pp_host or pp_group
        self._message_device = message_device([self._stage_messages, self._pp_messages])

    @record_function("StepAgreement.agree_sync")
    def agree_sync(self, local: Verdict, *, of_all_stages: bool) -> Verdict:
        """What holds on any rank of the stage. Collective; raises CollectiveMismatchError on all ranks of the stage.

        of_all_stages: that a gradient is not finite holds if it does on any stage; must be the same on all stages.
        """
        if group_size(self._stage_messages) == group_size(self._pp_messages) == 1:
            # Nothing to send, and so nothing that a graph could not hold.
            return local
        flags = [local.is_aborted, local.is_non_finite, local.is_reordered, *local.late]
        numbers = torch.tensor([*self._ledger.agreement(), *flags], dtype=torch.int64, device=self._message_device)
        if group_size(self._stage_messages) > 1:
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._stage_messages)
        if group_size(self._pp_messages) > 1 and of_all_stages:
            # The other stages have nothing else that tells them, and would wait for this one.
            is_non_finite = numbers[3:4]  # a view
            dist.all_reduce(is_non_finite, op=dist.ReduceOp.MAX, group=self._pp_messages)
        # NOTE: reads the device once a step, where messages cannot be sent from the host.
        highest, negated_lowest, aborted, non_finite, reordered, *late = numbers.tolist()
        self._ledger.check_agreed([highest, negated_lowest])
        return Verdict(bool(aborted), bool(non_finite), bool(reordered), [bool(flag) for flag in late])

    @record_function("StepAgreement.highest_sync")
    def highest_sync(self, number: int) -> int:
        """The highest of all ranks of all stages. Collective."""
        highest = torch.tensor(number, dtype=torch.int64, device=self._message_device)
        for group in (self._stage_messages, self._pp_messages):
            if group_size(group) > 1:
                dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        # NOTE: reads the device once a step, where messages cannot be sent from the host.
        return int(highest)

    @record_function("StepAgreement.first_ranks_order_sync")
    def first_ranks_order_sync(self, order: list[int]) -> list[int]:
        """The order of bucket groups, by number, that the stage's first rank gives. Collective."""
        numbers = torch.tensor(order, dtype=torch.int64, device=self._message_device)
        if group_size(self._stage_messages) > 1:
            dist.broadcast(numbers, group=self._stage_messages, group_src=0)
        # NOTE: reads what was sent, in the few steps that change the order.
        return numbers.tolist()

    def tell_reason(self, reason: str) -> None:
        """Lets the other ranks raise why this one broke the iteration off. Collective: they, too, tell or raise."""
        gather_objects(reason, self._stage_group)

    def raise_broken_off(self, problem: str | None) -> NoReturn:
        """Raises ValueError with this rank's own problem, or RemoteRankError with that of another. Collective."""
        problems = gather_objects(problem, self._stage_group)
        if problem is not None:
            raise ValueError(problem)
        rank, reason = next((rank, reason) for rank, reason in enumerate(problems) if reason is not None)
        raise RemoteRankError(
            f"rank {rank} of the stage broke the iteration off: {reason}. Its gradients are dropped on all ranks: "
            "call reset_iteration() and go on"
        )
