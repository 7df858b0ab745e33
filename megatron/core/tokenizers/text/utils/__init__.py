"""Megatron Core's import path of build_tokenizer(args)."""
