"""Makes the tokenizer that a TokenizerConfig asks for."""

from megatron.core.tokenizers.byte_level_tokenizer import ByteLevelTokenizer
from megatron.core.tokenizers.hugging_face_tokenizer import HuggingFaceTokenizer
from megatron.core.tokenizers.null_tokenizer import NullTokenizer
from megatron.core.tokenizers.tokenizer import Tokenizer
from megatron.core.tokenizers.tokenizer_config import AVAILABLE, TokenizerConfig


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Raises ValueError or OSError where the type, its file or a given vocab_size is not right.

    A failure may be this rank's alone (a file that only some nodes have): call it inside `all_ranks_agree`.
    """
    tokenizer = _build(config)
    if config.vocab_size is not None and config.vocab_size != tokenizer.vocab_size:
        raise ValueError(
            f"--vocab-size is {config.vocab_size}: {tokenizer.name} has {tokenizer.vocab_size} ids; leave the flag out"
        )
    return tokenizer


def _build(config: TokenizerConfig) -> Tokenizer:
    if config.tokenizer_type == "ByteLevelTokenizer":
        return ByteLevelTokenizer()
    if config.tokenizer_type == "NullTokenizer":
        assert config.vocab_size is not None, "validate_needs asks for it"
        return NullTokenizer(config.vocab_size, config.null_tokenizer_eod_id)
    if config.tokenizer_type == "HuggingFaceTokenizer":
        assert config.tokenizer_model is not None, "validate_needs asks for it"
        return HuggingFaceTokenizer(config.tokenizer_model)
    raise ValueError(f"--tokenizer-type is {config.tokenizer_type}: must be one of {', '.join(AVAILABLE)}")
