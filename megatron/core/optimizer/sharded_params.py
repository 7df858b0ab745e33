"""ShardedParams: which parameters an optimizer has, and those of them that lie in buffers, in segments.

What is sent when is the launch order's; where gradients come from, grad_intake.py's.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.consistency import bits_sync
from megatron.core.distributed.launch_order import ChunkSync, LaunchOrder
from megatron.core.distributed.synced_group import ParamState
from megatron.core.distributed.transient_grads import TransientGroup
from megatron.core.group_collectives import gather_objects
from megatron.core.optimizer.adam_segments import AdamRun, Segment, SegmentPlan
from megatron.core.optimizer.awaited_params import mark_arrived, mark_awaited
from megatron.core.optimizer.flat_adam import GradUse
from megatron.core.optimizer.fused_adam_settings import AdamMemory
from megatron.core.optimizer.state_dict import OwnedRange


class ShardedParams:
    """names, keys: of every parameter, its name for messages and the place of its parameter group. groups_of: of those
    that were taken over, the buckets that have parts of them. memory: of those that are taken over without being asked
    for. is_captured: nothing may be allocated later than with the first gradients.
    """

    def __init__(self, plan: SegmentPlan, order: LaunchOrder, *, memory: AdamMemory, is_captured: bool) -> None:
        self._plan, self._order, self._memory, self._is_captured = plan, order, memory, is_captured
        self._segments: list[Segment] = []
        self.names: dict[nn.Parameter, str] = {}
        self.keys: dict[nn.Parameter, int] = {}
        self.groups_of: dict[nn.Parameter, list[TransientGroup]] = {}
        self._versions: dict[nn.Parameter, int] = {}
        # Those whose first gradient came before they were taken over, in that order.
        self._arrived: dict[nn.Parameter, None] = {}

    @property
    def groups(self) -> list[TransientGroup]:
        """All buckets."""
        return [group for segment in self._segments for group in segment.groups]

    @property
    def runs(self) -> list[AdamRun]:
        """All that this rank owns; see move_in."""
        return [run for segment in self._segments for run in segment.runs]

    @property
    def sums(self) -> list[torch.Tensor]:
        """The summed gradients of all that this rank owns: [n] each, any float dtype, views."""
        return [run.grad for run in self.runs]

    def sums_of(self, params: Iterable[nn.Parameter]) -> list[torch.Tensor]:
        """Returns the reduced gradients, [n] each, of some parameters, any shape and dtype.

        Raises ValueError for a parameter that is not here.
        """
        wanted = set(self.check_own(params))
        found = ((run, member) for run in self.runs for member in run.members if member.param in wanted)
        return [member.view_of(run.grad) for run, member in found]

    @property
    def grad_use(self) -> GradUse:
        """How an update treats the gradients that it divides; the same for all buckets and on all ranks."""
        is_plain = all(segment.is_plain for segment in self._segments)
        return GradUse.DIVIDE if is_plain else GradUse.READ

    @property
    def waiting(self) -> list[nn.Parameter]:
        """Parameters that require grad, any shapes and dtypes, and were not taken over yet."""
        return [param for param in self.names if param.requires_grad and param not in self.groups_of]

    @property
    def order(self) -> list[list[int]]:
        """The parameters of each segment by their numbers, in the order of their places."""
        index = {param: place for place, param in enumerate(self.names)}
        return [[index[param] for param in segment.params] for segment in self._segments]

    def in_order(self, order: Sequence[Sequence[int]]) -> list[list[nn.Parameter]]:
        """Returns parameters, any shapes and dtypes, in the given order; nothing if other parameters are trained."""
        params = list(self.names)
        trained = {place for place, param in enumerate(params) if param.requires_grad}
        is_fitting = {place for places in order for place in places} == trained
        return [[params[place] for place in places] for places in order] if is_fitting else []

    @property
    def without_state(self) -> frozenset[int]:
        """The numbers of parameters that nobody steps."""
        return frozenset(place for place, param in enumerate(self.names) if param not in self.groups_of)

    def owned_ranges(self) -> list[OwnedRange]:
        """Returns the parameter ranges whose state this rank keeps."""
        index = {param: place for place, param in enumerate(self.names)}
        return [
            OwnedRange(index[part.param], part.param, part.start, part.span.numel, run.state, part.span.start)
            for run in self.runs
            for part in run.members
        ]

    def standing_grad(self, param: nn.Parameter) -> torch.Tensor:
        """The memory of a parameter's gradients: [*its shape], the dtype that they are sent in.

        Raises ValueError where it does not stand.
        """
        segment = next(segment for segment in self._segments if any(param is own for own in segment.params))
        if not segment.memory.contiguous_grad_buffer:
            raise ValueError(
                f"grad_buffer_view of {self.names[param]}: contiguous_grad_buffer is False, so that gradients have no "
                "standing memory; must be True"
            )
        return next(buffer.entry_of[param].main_grad for buffer in segment.buffers if param in buffer.entry_of)

    def check_own(self, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """The parameters, any shapes and dtypes, as a list; raises ValueError for one that it does not have."""
        given = list(params)
        for place, param in enumerate(given):
            if param not in self.names:
                raise ValueError(f"parameter {place} of those given is not in param_groups: must be the optimizer's")
        return given

    def note_arrival(self, param: nn.Parameter) -> None:
        """Records that a parameter, any shape and dtype, that was not taken over has a gradient."""
        self._arrived[param] = None

    def forget_arrivals(self) -> None:
        """Drops the records of these gradients."""
        self._arrived.clear()

    def take_over_rest(self) -> None:
        """Takes over the remaining trained parameters, in the order of their first gradients. Collective."""
        waiting = self.waiting
        if waiting:
            arrived = self._agreed_order([*self._arrived])
            self._arrived.clear()
            came = set(arrived)
            # Places go from the last to the first.
            self.take_over([*(param for param in waiting if param not in came), *reversed(arrived)], self._memory)
        if self._is_captured:
            # Else when states are first used, and whole gradients are gone.
            self.move_in()

    def take_over(self, params: Sequence[nn.Parameter], memory: AdamMemory) -> None:
        """Moves parameters into a segment of their own, which are not in any yet, in the order of their places.

        Collective; raises ValueError on all ranks where these do not give the same.
        """
        if self._plan.grid.ranks is None and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                "the optimizer was built before torch.distributed was initialised: call init_process_group first, or "
                "this rank would train alone"
            )
        self._check_equal([str(memory), *(_describe(self.names[param], param) for param in params)])
        self._check_equal([f"{self.names[param]} with bits {bits_sync(param):08x}" for param in params])
        for param in params:
            memory.check_param(self.names[param], param)
        if not params:
            return
        name = f"segment {len(self._segments)}"
        named = [(self.names[param], param) for param in params]
        segment = Segment(named, self.keys, memory=memory, plan=self._plan, name=name)
        self._segments.append(segment)
        # Of parameters without elements, nothing is in any bucket.
        self.groups_of.update((param, []) for param in params)
        for param, group in segment.groups_of():
            self.groups_of[param].append(group)
            group.on_arrival = partial(self._mark_arrived, group)
        self.note_versions()
        self._order.go_on()
        self._order.attach(ChunkSync(segment.groups, nn.ParameterList(params), self._find_moved, _nothing))

    def move_in(self) -> None:
        """Lets all that were taken over have their places and states, which they else have when `runs` is asked for."""
        for segment in self._segments:
            segment.move_in()

    def take_changes(self) -> None:
        """Before an update: lets masters follow what others have written to parameters, as `load_state_dict` does.

        Told by torch's own count of changes, which the host reads.
        """
        changed = {param for param in self.groups_of if param._version != self._versions[param]}
        if changed:
            for run in self.runs:
                if any(member.param in changed for member in run.members):
                    run.take_changes()
            self.note_versions()

    def note_versions(self) -> None:
        """The parameters are as the masters have them."""
        self._versions = {param: param._version for param in self.groups_of}

    def mark_awaited(self) -> None:
        """Lets reads of all parameters raise until their gathers, which are due, have come."""
        mark_awaited(param for param, groups in self.groups_of.items() if any(group.is_awaited for group in groups))

    def _mark_arrived(self, group: TransientGroup) -> None:
        states = (ParamState.ARRIVED, ParamState.CURRENT)
        own = [entry.param for entry in group.entries]
        mark_arrived(param for param in own if all(part.param_state in states for part in self.groups_of[param]))

    def _agreed_order(self, params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """The first rank's order of the same parameters. Collective."""
        places = {param: place for place, param in enumerate(self.names)}
        by_place = list(self.names)
        orders = gather_objects([places[param] for param in params], self._plan.grid.ranks)
        # Ranks may have come to some of them only.
        everywhere = dict.fromkeys(place for order in orders for place in order)
        return [by_place[place] for place in everywhere]

    def _check_equal(self, own: list[str]) -> None:
        ranks = gather_objects(own, self._plan.grid.ranks)
        for rank, other in enumerate(ranks):
            if other == ranks[0]:
                continue
            pairs = zip([*ranks[0], "nothing"], [*other, "nothing"])
            first, here = next(pair for pair in pairs if pair[0] != pair[1])
            raise ValueError(
                f"ranks differ in what they give the optimizer: rank 0 has {first}, rank {rank} has {here}; must be "
                "the same, with the same values (seed ranks alike, or broadcast the model from one)"
            )

    def _find_moved(self) -> str | None:
        """Describes a change that would make an update miss the parameters; None without one."""
        frozen = next((param for param in self.groups_of if not param.requires_grad), None)
        if frozen is not None:
            return (
                f"{self.names[frozen]} was frozen after the optimizer took it over: must stay as it is, or be frozen "
                "after release() and before another optimizer is built"
            )
        for segment in self._segments:
            for place in segment.find_moved():
                return (
                    f"{self.names[place]} was moved, converted or given other data after the optimizer took it over: "
                    "copy into it (.data.copy_), or build the optimizer when the model is where it stays"
                )
        return None


def _describe(name: str, param: nn.Parameter) -> str:
    return f"{name} of shape {tuple(param.shape)}, strides {param.stride()} and {param.dtype}"


def _nothing() -> None:
    """Drops nothing when an order begins anew: the optimizer's zero_grad drops gradients that were not taken."""
