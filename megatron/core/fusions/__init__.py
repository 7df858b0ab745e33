"""Several element-wise steps in one autograd function, under the names Megatron users know."""
