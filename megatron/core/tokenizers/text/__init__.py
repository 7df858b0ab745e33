"""Megatron Core's import path for text tokenizers. The implementations are in megatron.core.tokenizers."""
