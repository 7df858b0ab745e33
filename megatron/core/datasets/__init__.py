"""Token data on disk, and the samples, batches and iterators built from it. Tokenizers are in core/tokenizers."""
