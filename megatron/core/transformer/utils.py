"""Re-exports attention_mask_func under the import path that attention layers for Megatron-LM use."""

from megatron.core.fusions.fused_softmax import attention_mask_func

__all__ = ["attention_mask_func"]
