"""MessageRecorder: every message of a step as it passes torch's dispatcher, in a plan as in a run.

What a message is for say the code's own trace names, which pass the dispatcher as well: trace_range looks for dispatch
modes such as this one. Sums and gathers that collectives.py makes of smaller messages, for want of good ones on CPUs or
for the order of its sums, count as what they are, so that the same comes out on every device.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.planner.traffic import Traffic, merged

FORWARD, BACKWARD, PIPELINE, REDUCE, GATHER, OPTIMIZER, AGREEMENT, STATISTICS, OTHER = (
    "forward",
    "backward",
    "pipeline",
    "grad reduce",
    "param gather",
    "optimizer",
    "agreement",
    "statistics",
    "other",
)
# The innermost of these that is open says what a message is for.
_PHASES = {
    "ScheduleRunner._forward": FORWARD,
    "ScheduleRunner._backward": BACKWARD,
    "P2PCommunicator.post": PIPELINE,
    "_ParamAndGradBucketGroup.launch_gathers": GATHER,
    "FSDP::all_gather": GATHER,
    "FSDP::post_backward_reduce": REDUCE,
    "_ParamAndGradBucketGroup.launch_reductions": REDUCE,
    "_ParamAndGradBucketGroup.complete_reductions": REDUCE,
    "finalize_model_grads": REDUCE,
    "MegatronOptimizer.step": OPTIMIZER,
    "Iteration.agree_sync": AGREEMENT,
    "Iteration.highest_sync": AGREEMENT,
    "Iteration.first_ranks_order_sync": AGREEMENT,
    "StatisticsExchange.reduce_sync": STATISTICS,
}
# Messages inside of these are parts of one collective.
_WHOLE = {
    "gather_shards_": "all-gather",
    "_OrderedReduceScatter": "reduce-scatter",
    "_OrderedReduceScatter._send": "reduce-scatter",
}
_BEGINNINGS = {"gather_shards_", "_OrderedReduceScatter"}
_OPERATIONS = {
    "allreduce_": "all-reduce",
    "allgather_": "all-gather",
    "_allgather_base_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "reduce_scatter_": "reduce-scatter",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "alltoall_base_": "all-to-all",
    "alltoall_": "all-to-all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "receive",
}
# Their payload is what goes in, of the others what comes out or is there both before and after.
_BY_INPUT = {"reduce-scatter", "all-to-all"}
# Names of groups of the same ranks: the first that fits, by what the message is for.
_OF_MODEL = "tp cp pp ep expt_tp tp_cp tp_ep embd dp dp_cp expt_dp tp_dp tp_dp_cp mp tp_ep_pp".split()
_OF_DATA = (
    "dp dp_cp expt_dp intra_dp_cp intra_expt_dp inter_dist_opt intra_dist_opt tp cp pp embd tp_cp tp_dp_cp mp "
    "tp_ep_pp tp_dp ep expt_tp tp_ep"
).split()
_SHORT = {"expt_tp": "etp", "expt_dp": "edp", "tp_dp_cp": "stage"}


class MessageRecorder(TorchDispatchMode):
    """Notes the messages of this thread while it is the innermost mode; they are sent as ever.

    groups: this rank's, which give messages their groups' names.
    """

    def __init__(self, groups: ProcessGroupCollection) -> None:
        super().__init__()
        self._groups = {name: _ranks(group) for name, group in vars(groups).items() if group is not None}
        self._names: list[str] = []
        self._messages: list[Traffic] = []
        self._is_begun = False  # the collective under way has been counted
        self._is_slice_begun = False  # likewise a slice of it
        self._known: dict[tuple[str, str], tuple[str, int]] = {}

    def take(self) -> tuple[Traffic, ...]:
        """Returns the messages sent since the last call."""
        messages, self._messages = self._messages, []
        return merged(messages)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Records collectives and trace names, and runs every operator unchanged."""
        if func.namespace == "profiler":
            self._follow(func, args)
        elif func.namespace == "c10d":
            self._note(str(func._schema.name).removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))

    def _follow(self, func: Any, args: Sequence[Any]) -> None:
        if "enter" in func._schema.name:
            # What torch names itself has the module behind it, in brackets.
            name = str(args[0]).partition(" (")[0]
            self._names.append(name)
            self._is_begun = self._is_begun and name not in _BEGINNINGS
            self._is_slice_begun = self._is_slice_begun and name != "_OrderedReduceScatter._send"
        elif self._names:
            self._names.pop()

    def _note(self, name: str, args: Sequence[Any]) -> None:
        if name not in _OPERATIONS:
            return  # barriers and the like
        operation = _OPERATIONS[name]
        count, num_bytes = 1, _bytes_of(args[1] if operation in _BY_INPUT else args[0])
        whole = _WHOLE.get(self._names[-1]) if self._names else None
        if whole is not None:
            # Later slices of a sum are sent where it is waited for.
            count = int(not self._is_begun and not _BEGINNINGS.isdisjoint(self._names))
            if whole == "reduce-scatter" and args[3] and not self._is_slice_begun:
                # One message for each other rank: what stays here is as much.
                num_bytes *= 2
            self._is_begun = self._is_slice_begun = True
            operation = whole
        phase = next((_PHASES[one] for one in reversed(self._names) if one in _PHASES), OTHER)
        group, size = self._name_of(_group_in(args), phase)
        self._messages.append(Traffic(group, size, operation, phase, count, num_bytes))

    def _name_of(self, group: dist.ProcessGroup, phase: str) -> tuple[str, int]:
        """The name of a group in a phase, and its size."""
        key = (group.group_name, phase)
        if key not in self._known:
            ranks = _ranks(group)
            order = _OF_MODEL if phase in (FORWARD, BACKWARD, PIPELINE) else _OF_DATA
            found = next((name for name in order if self._groups.get(name) == ranks), "world")
            is_world = len(ranks) == dist.get_world_size() and phase in (STATISTICS, OTHER)
            self._known[key] = "world" if is_world else _SHORT.get(found, found), len(ranks)
        return self._known[key]


def ranks_by_name(groups: ProcessGroupCollection, links: Iterable[Traffic]) -> dict[str, tuple[int, ...]]:
    """The ranks of the groups that messages name."""
    own = {_SHORT.get(name, name): _ranks(group) for name, group in vars(groups).items() if group is not None}
    own["world"] = tuple(range(dist.get_world_size()))
    return {name: own[name] for name in sorted({one.group for one in links})}


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _group_in(args: Iterable[Any]) -> dist.ProcessGroup:
    boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
    return dist.ProcessGroup.unbox(boxed)


def _bytes_of(tensors: Any) -> int:
    return tensors.nbytes if isinstance(tensors, Tensor) else sum(map(_bytes_of, tensors))
