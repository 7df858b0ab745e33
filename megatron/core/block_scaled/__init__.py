"""Rows of 8-bit floats with a scale for each block. Requires torch, and Triton on GPUs. See docs/block_scaled.md."""
