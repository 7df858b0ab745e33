"""Tokenizers with a common interface. This module only re-exports."""

from megatron.core.tokenizers.build import TokenizerConfig, build_tokenizer
from megatron.core.tokenizers.megatron_tokenizer import MegatronTokenizer
from megatron.core.tokenizers.tokenizer import Tokenizer, vocab_size_with_padding

__all__ = ["MegatronTokenizer", "Tokenizer", "TokenizerConfig", "build_tokenizer", "vocab_size_with_padding"]
