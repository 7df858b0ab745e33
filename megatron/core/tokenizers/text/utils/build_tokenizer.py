"""build_tokenizer(args), with which recent Megatron-LM scripts build the tokenizer that the command line selects."""

import argparse
import dataclasses

from megatron.core.tokenizers import build
from megatron.core.tokenizers.tokenizer import BaseTokenizer


def build_tokenizer(args: argparse.Namespace) -> BaseTokenizer:
    """Builds the tokenizer that the parsed arguments select; see TokenizerConfig.

    get_tokenizer() returns the existing tokenizer of a run instead. Raises ValueError or OSError for an invalid type,
    file or vocab_size.
    """
    names = {field.name for field in dataclasses.fields(build.TokenizerConfig)}
    return build.build_tokenizer(
        build.TokenizerConfig(**{name: value for name, value in vars(args).items() if name in names})
    )
