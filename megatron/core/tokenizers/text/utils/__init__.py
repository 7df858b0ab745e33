"""Megatron Core's import path for build_tokenizer(args)."""
