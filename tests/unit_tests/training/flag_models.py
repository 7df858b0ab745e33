"""A small model described by command-line flags. Contains no tests."""

import argparse

from megatron.core.models.gpt import GPTModel
from megatron.training.arguments import parse_args, validate_args
from megatron.training.gpt_builder import build_gpt

DENSE = (
    "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 2 --train-iters 1 --lr 1 --mock-data --attention-dropout 0.1 --vocab-size 100"
)


def model_of_flags(flags: str) -> tuple[argparse.Namespace, GPTModel]:
    """Returns the arguments of the small model with these flags, and the model."""
    args = validate_args(parse_args(argv=f"{DENSE} {flags}".split()))
    args.unpadded_vocab_size, args.padded_vocab_size = 100, 128
    return args, build_gpt(args)
