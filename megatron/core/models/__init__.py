"""Models built from the modules of megatron/core/transformer."""
