"""Functions that combine several element-wise steps in one autograd function, under Megatron's names."""
