"""Token data on disk, and the samples, batches and iterators made from it; tokenizers are megatron.core.tokenizers'."""
