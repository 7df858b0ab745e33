"""RouterReplay: records the experts that routers choose, and forces them in other forward passes.

One use is training with the routing that another program, such as the one that generated the tokens, computed for the
same tokens. Only the choice is replayed; the weights are computed from the current scores. Routers with
moe_enable_routing_replay have one RouterReplay each. The file written by --record-routing contains token counts, not
choices.

    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    model(tokens)
    chosen = RouterReplay.get_recorded_data()          # [T, K] of each router, in the order of the layers
    RouterReplay.set_replay_data(chosen)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    loss = model(tokens)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
    loss.backward()                                    # recomputed layers choose what their forward chose

A recomputed layer always repeats the choice of its own forward, which is stored with that forward (see [Note: values of
a forward] in tensor_parallel/random.py). Forwards and backwards may therefore run in any order, and forwards without a
backward leave nothing behind.
"""

import weakref
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron.core.tensor_parallel.random import remembered

# (scores [T, E]) -> the K highest scores and their indices, as torch.topk returns them.
Choose = Callable[[Tensor], tuple[Tensor, Tensor]]


class RouterReplayAction(Enum):
    """Action of a router on its choice of experts: record it, or replay an earlier one."""

    RECORD = "record"
    REPLAY_FORWARD = "replay_forward"
    REPLAY_BACKWARD = "replay_backward"


class RouterReplay:
    """Records and replays the expert choices of one router.

    RECORD routes normally and records the choice of the last forward. REPLAY_FORWARD uses the target indices.
    REPLAY_BACKWARD, which scripts set around backward, permits only recomputed forwards. None routes normally. The
    static methods act on all instances of the process, in the order in which they were created.
    """

    def __init__(self) -> None:
        self.router_replay_action: RouterReplayAction | None = None
        self.recorded_topk_idx: Tensor | None = None
        self.target_topk_idx: Tensor | None = None
        _references().append(weakref.ref(self, _references().remove))

    def __reduce__(self) -> Any:
        """Makes deepcopy and pickle create a new instance without choices."""
        return RouterReplay, ()

    # All instances

    @staticmethod
    def instances() -> "list[RouterReplay]":
        """Returns the live instances, in creation order."""
        alive = (reference() for reference in _references())
        return [instance for instance in alive if instance is not None]

    @staticmethod
    def set_global_router_replay_action(router_replay_action: RouterReplayAction) -> None:
        """Sets the action of all instances."""
        for instance in RouterReplay.instances():
            instance.set_router_replay_action(router_replay_action)

    @staticmethod
    def clear_global_router_replay_action() -> None:
        """Makes all routers route normally."""
        for instance in RouterReplay.instances():
            instance.clear_router_replay_action()

    @staticmethod
    def set_replay_data(all_layers_topk_indices: Sequence[Tensor]) -> None:
        """Sets the target indices of all instances.

        all_layers_topk_indices: one tensor [T, K], integer, for each instance, in creation order. Raises ValueError if
        the number of tensors differs from the number of instances.
        """
        instances = RouterReplay.instances()
        if len(all_layers_topk_indices) != len(instances):
            raise ValueError(
                f"all_layers_topk_indices has {len(all_layers_topk_indices)} tensors: must contain one for each of the "
                f"{len(instances)} routers of this process"
            )
        for instance, indices in zip(instances, all_layers_topk_indices, strict=True):
            instance.set_target_indices(indices)

    @staticmethod
    def get_recorded_data() -> list[Tensor | None]:
        """Returns the recorded indices of all instances: [T, K], int64, on the device, or None if there are none."""
        return [instance.get_recorded_indices() for instance in RouterReplay.instances()]

    @staticmethod
    def clear_global_indices() -> None:
        """Clears the recorded and target indices of all instances."""
        for instance in RouterReplay.instances():
            instance.clear_indices()

    # One instance

    def set_router_replay_action(self, router_replay_action: RouterReplayAction) -> None:
        """Sets the action; raises ValueError unless it is a RouterReplayAction."""
        if not isinstance(router_replay_action, RouterReplayAction):
            actions = ", ".join(map(str, RouterReplayAction))
            raise ValueError(f"router_replay_action is {router_replay_action!r}: must be one of {actions}")
        self.router_replay_action = router_replay_action

    def clear_router_replay_action(self) -> None:
        """Makes the router route normally."""
        self.router_replay_action = None

    def record_indices(self, topk_indices: Tensor) -> None:
        """Records a choice, replacing the previous one; topk_indices: [T, K], int64, on the device."""
        self.recorded_topk_idx = topk_indices

    def get_recorded_indices(self) -> Tensor | None:
        """Returns the most recently recorded choice: [T, K], int64, on the device, or None."""
        return self.recorded_topk_idx

    def set_target_indices(self, topk_indices: Tensor) -> None:
        """Sets the choice to replay.

        topk_indices: [T, K], any integer dtype, on any device. Raises ValueError for other shapes or dtypes.
        """
        if topk_indices.dim() != 2 or topk_indices.is_floating_point() or topk_indices.is_complex():
            raise ValueError(
                f"topk_indices has shape {list(topk_indices.shape)} and dtype {topk_indices.dtype}: must be the "
                "experts of each token, [T, K], of an integer dtype"
            )
        self.target_topk_idx = topk_indices

    def clear_indices(self) -> None:
        """Clears the recorded and target indices. Forwards whose backward is still to come keep their choice."""
        self.recorded_topk_idx = self.target_topk_idx = None

    def get_replay_topk(self, scores: Tensor, choose: Choose) -> tuple[Tensor, Tensor]:
        """Chooses experts according to the action, or as in its first run if recomputed; scores: [T, E], fp32 or fp64.

        choose: computes the normal choice, such as top-k. Returns the scores of the chosen experts [T, K], same dtype,
        and their indices [T, K], int64. Raises ValueError if the indices to replay are missing or have a different
        number of tokens, and for a new forward under REPLAY_BACKWARD.
        """
        indices = remembered(lambda: self._chosen(scores, choose), key=self)
        return scores.gather(1, indices), indices

    def _chosen(self, scores: Tensor, choose: Choose) -> Tensor:
        action = self.router_replay_action
        if action is RouterReplayAction.REPLAY_BACKWARD:
            raise ValueError(
                "router_replay_action is REPLAY_BACKWARD in a forward that recomputes no earlier one: set RECORD or "
                "REPLAY_FORWARD before a new forward, and recompute layers with recompute_granularity or "
                "tensor_parallel.checkpoint"
            )
        if action is RouterReplayAction.REPLAY_FORWARD:
            return self._targets_of(scores)
        _, indices = choose(scores)
        if action is RouterReplayAction.RECORD:
            # A copy, because the script may change what it has recorded before backward.
            self.record_indices(indices.clone())
        return indices

    def _targets_of(self, scores: Tensor) -> Tensor:
        if self.target_topk_idx is None:
            raise ValueError(
                "router_replay_action is REPLAY_FORWARD, but there are no target indices: call set_replay_data first"
            )
        if len(self.target_topk_idx) != len(scores):
            raise ValueError(
                f"the target indices cover {len(self.target_topk_idx)} tokens: must cover the {len(scores)} tokens "
                "that this router routes"
            )
        # A copy, because the script may write the targets of the next micro-batch to the same tensor before backward.
        return self.target_topk_idx.to(scores.device, dtype=torch.int64, copy=True)


@cache
def _references() -> "list[weakref.ref[RouterReplay]]":
    """Returns the process-wide list of weak references to instances, to which each instance adds itself."""
    return []
