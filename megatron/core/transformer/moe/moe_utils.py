"""Names of mixture-of-experts layers under the path Megatron users import them from; the code is beside this file."""

from megatron.core.transformer.moe.aux_losses import switch_load_balancing_loss_func, z_loss_func
from megatron.core.transformer.moe.capacity import get_capacity
from megatron.core.transformer.moe.router import topk_routing_with_score_function

__all__ = ["get_capacity", "switch_load_balancing_loss_func", "topk_routing_with_score_function", "z_loss_func"]
