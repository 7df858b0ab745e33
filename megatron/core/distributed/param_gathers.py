"""ParamGathers: when the parameters of which groups are gathered, in one order on all ranks.

The reductions of gradients have theirs in launch_order.py, which comes to one sequence with this.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from megatron.core.distributed.bucket_observer import Observers, Traffic
from megatron.core.distributed.synced_group import ParamState, SyncedGroup


class ParamGathers(ABC):
    """The gathers of the groups in `gather_order`, about the order in which forward needs their parameters."""

    def __init__(self) -> None:
        self.observers = Observers()

    @property
    @abstractmethod
    def gather_order(self) -> list[SyncedGroup]:
        """All groups; the same order on all ranks."""

    def mark_stale(self, groups: Sequence[SyncedGroup]) -> None:
        """Marks groups as stale after owners have updated their shards, so that they are gathered before use.

        Called for the same groups on all ranks.
        """
        if not all_current(groups):
            self.finish_param_sync(groups)
        for group in groups:
            if group.is_sharded:
                group.param_state = ParamState.STALE
                for observer in self.observers:
                    observer.gather_due(group)

    def start_param_sync(self, groups: Sequence[SyncedGroup], *, again: bool = False) -> None:
        """Launches the gathers of stale parameters; if all groups are current, or `again`, of all. Collective."""
        if again or all_current(groups):
            self.mark_stale(groups)
        for group in self.gather_order:
            if group in groups:
                self._launch_gathers(up_to=group)

    def finish_param_sync(self, groups: Sequence[SyncedGroup]) -> None:
        """Launches what is left of the gathers and waits for them. Collective."""
        for group in self.gather_order:
            if group in groups:
                self.need(group, prefetch=False)
                group.param_state = ParamState.CURRENT

    def need(self, group: SyncedGroup, *, prefetch: bool) -> None:
        """Waits until a group's parameters may be read; prefetch: launches the gather of the next group as well."""
        if group.param_state in (ParamState.CURRENT, ParamState.ARRIVED):
            group.arrival.wait()
            return
        self._launch_gathers(up_to=group)
        if prefetch:
            self.prefetch()
        if group.param_state is ParamState.IN_FLIGHT:
            self._wait_for_gather(group)

    def prefetch(self) -> None:
        """Launches the next gather that is due, if there is one."""
        following = next((group for group in self.gather_order if group.param_state is ParamState.STALE), None)
        if following is not None:
            self._launch_gather(following)

    def _launch_gathers(self, *, up_to: SyncedGroup | None = None) -> None:
        for group in self.gather_order:
            if group.param_state is ParamState.STALE:
                self._launch_gather(group)
            if group is up_to:
                return

    def _launch_gather(self, group: SyncedGroup) -> None:
        with self.observers.launching(Traffic.GATHER, group):
            group.launch_gathers()

    def _wait_if_skipped(self, group: SyncedGroup) -> None:
        """Waits for the gather of modules that forward skipped: the optimizer is about to write to its destination."""
        if group.param_state is ParamState.IN_FLIGHT:
            self._wait_for_gather(group)

    def _wait_for_gather(self, group: SyncedGroup) -> None:
        with self.observers.waiting(Traffic.GATHER, group):
            group.complete_gathers()


def all_current(groups: Iterable[SyncedGroup]) -> bool:
    """Whether all ranks have the parameters of all these groups; the same on all ranks."""
    return all(group.param_state is ParamState.CURRENT for group in groups)
