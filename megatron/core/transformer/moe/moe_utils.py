"""Names of mixture-of-experts layers under the path Megatron users import them from; the code is beside this file."""

from megatron.core.transformer.moe.aux_losses import switch_load_balancing_loss_func, z_loss_func
from megatron.core.transformer.moe.capacity import get_capacity
from megatron.core.transformer.moe.load_balancing import get_updated_expert_bias
from megatron.core.transformer.moe.routing import sinkhorn
from megatron.core.transformer.moe.routing_map import permute, topk_routing_with_score_function, unpermute

__all__ = [
    "get_capacity",
    "get_updated_expert_bias",
    "permute",
    "sinkhorn",
    "switch_load_balancing_loss_func",
    "topk_routing_with_score_function",
    "unpermute",
    "z_loss_func",
]
