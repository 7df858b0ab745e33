"""Functions that combine several element-wise steps, under the names of Megatron's fused functions."""
