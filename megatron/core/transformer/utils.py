"""Re-exports attention_mask_func under the path from which attention layers written for Megatron-LM import it."""

from megatron.core.fusions.fused_softmax import attention_mask_func

__all__ = ["attention_mask_func"]
