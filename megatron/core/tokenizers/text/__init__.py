"""Megatron Core's import path of text tokenizers; ours are in megatron.core.tokenizers."""
