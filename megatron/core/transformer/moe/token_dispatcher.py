"""Selects a token dispatcher, and exports the dispatchers under the import path that Megatron users expect.

The dispatchers are implemented in dispatch_*.py, their interface in dispatch.py.
"""

from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection, group_size
from megatron.core.transformer.moe.dispatch import MoETokenDispatcher
from megatron.core.transformer.moe.dispatch_allgather import MoEAllGatherTokenDispatcher
from megatron.core.transformer.moe.dispatch_alltoall import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.moe.dispatch_flex import MoEFlexTokenDispatcher, require_flex_backend
from megatron.core.transformer.moe.dispatch_static import (
    MoEStaticAllGatherTokenDispatcher,
    MoEStaticAlltoAllTokenDispatcher,
)
from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = [
    "MoEAllGatherTokenDispatcher",
    "MoEAlltoAllTokenDispatcher",
    "MoEFlexTokenDispatcher",
    "MoETokenDispatcher",
    "build_token_dispatcher",
]


def build_token_dispatcher(
    experts: range, *, config: TransformerConfig, groups: ProcessGroupCollection
) -> MoETokenDispatcher:
    """Builds the dispatcher that the configuration selects. Collective if its type is flex.

    experts: range of this rank's experts. Raises ValueError if type flex is selected and this machine does not support
    its backend.
    """
    require_flex_backend(config)
    is_static = config.moe_expert_rank_capacity_factor is not None
    kind = config.moe_token_dispatcher_type
    if is_static and group_size(groups.tp_ep) == 1:
        # A single rank sends nothing. Gathering then moves each row once, whereas sending would move it twice.
        kind = "allgather"
    build: Any
    match kind, is_static:
        case "allgather", False:
            build = MoEAllGatherTokenDispatcher
        case "allgather", True:
            build = MoEStaticAllGatherTokenDispatcher
        case "alltoall", False:
            build = MoEAlltoAllTokenDispatcher
        case "alltoall", True:
            build = MoEStaticAlltoAllTokenDispatcher
        case "flex", True:
            build = MoEFlexTokenDispatcher
        case _:
            raise AssertionError(f"moe_token_dispatcher_type is {kind}, which MoEConfig rejects")
    more = {"row_alignment": config.row_alignment} if is_static else {}
    # Any, because the class of type flex is abstract. Its constructor returns a subclass.
    dispatcher: MoETokenDispatcher = build(len(experts), list(experts), config=config, pg_collection=groups, **more)
    return dispatcher
