"""Tokenizers behind one small interface; what they need of other libraries stays in their own files."""

from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.tokenizer import Tokenizer, vocab_size_with_padding
from megatron.core.tokenizers.tokenizer_config import TokenizerConfig

__all__ = ["Tokenizer", "TokenizerConfig", "build_tokenizer", "vocab_size_with_padding"]
