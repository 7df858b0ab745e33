"""The path under which Megatron Core has tokenizers of text; ours are in megatron.core.tokenizers."""
