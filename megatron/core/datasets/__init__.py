"""Token data on disk, and the samples, batches and iterators made from it. Tokenizers are in core/tokenizers."""
