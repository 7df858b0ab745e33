"""Names of dispatchers under the path Megatron users import them from; the code is in dispatch.py and dispatch_*.py."""

from megatron.core.transformer.moe.dispatch import MoETokenDispatcher
from megatron.core.transformer.moe.dispatch_allgather import MoEAllGatherTokenDispatcher
from megatron.core.transformer.moe.dispatch_alltoall import MoEAlltoAllTokenDispatcher

__all__ = ["MoEAllGatherTokenDispatcher", "MoEAlltoAllTokenDispatcher", "MoETokenDispatcher"]
