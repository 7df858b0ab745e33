"""Makes the tokenizer that a TokenizerConfig asks for."""

from megatron.core.tokenizers.base_tokenizer import BaseTokenizer
from megatron.core.tokenizers.byte_level_tokenizer import ByteLevelTokenizer
from megatron.core.tokenizers.gpt2_bpe_tokenizer import GPT2BPETokenizer
from megatron.core.tokenizers.hugging_face_tokenizer import HuggingFaceTokenizer
from megatron.core.tokenizers.null_tokenizer import NullTokenizer
from megatron.core.tokenizers.sentencepiece_tokenizer import Llama2Tokenizer, SentencePieceTokenizer
from megatron.core.tokenizers.tik_tokenizer import TikTokenizer
from megatron.core.tokenizers.tokenizer_config import AVAILABLE, TokenizerConfig


def build_tokenizer(config: TokenizerConfig) -> BaseTokenizer:
    """Raises ValueError or OSError where the type, its file or a given vocab_size, which the model has, is not right.

    A failure may be this rank's alone (a file that only some nodes have): call it inside `all_ranks_agree`.
    """
    tokenizer = _build(config)
    if config.vocab_size is not None and config.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"--vocab-size is {config.vocab_size}: {tokenizer.name} has {tokenizer.vocab_size} ids; give at least as "
            "many, or leave the flag out"
        )
    return tokenizer


def _build(config: TokenizerConfig) -> BaseTokenizer:
    if config.tokenizer_type not in AVAILABLE:
        raise ValueError(f"--tokenizer-type is {config.tokenizer_type}: must be one of {', '.join(AVAILABLE)}")
    # validate_needs asks for what each type needs.
    model = config.tokenizer_model or ""
    match config.tokenizer_type:
        case "ByteLevelTokenizer":
            return ByteLevelTokenizer()
        case "GPT2BPETokenizer":
            return GPT2BPETokenizer(config.vocab_file or "", config.merge_file or "")
        case "HuggingFaceTokenizer":
            return HuggingFaceTokenizer(model)
        case "Llama2Tokenizer":
            return Llama2Tokenizer(model)
        case "NullTokenizer":
            return NullTokenizer(config.vocab_size or 0, config.null_tokenizer_eod_id)
        case "TikTokenizer":
            return TikTokenizer(model, config.vocab_size)
        case kind:
            return SentencePieceTokenizer(model, kind=kind)
