"""A dense checkpoint as the start of a model with experts: each expert begins as the feed-forward layer it replaces.

After Komatsuzaki et al., Sparse Upcycling (2023). Reads by the keys of canonical checkpoints, so any layout starts from
any; what else a load takes is checkpointing.py's.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatron.core.dist_checkpointing import ShardedTensor, VerifiedCheckpoint
from megatron.training.checkpoint_args import check_same_model

_EXPERTS, _DENSE = ".mlp.experts.", ".mlp."
_ROUTER = ".mlp.router."
# What the dense model says nothing of: taken as the run has it.
_OF_EXPERTS = ("num_experts", "moe_layer_freq", "moe_ffn_hidden_size")


def is_upcycling(args: argparse.Namespace, stored: Mapping[str, Any]) -> bool:
    """Whether a run with these arguments has experts, and the one with the arguments `stored` had none."""
    return args.num_experts is not None and stored.get("num_experts") is None


def check_upcycling(args: argparse.Namespace, stored: Mapping[str, Any]) -> None:
    """Raises ValueError where experts cannot begin as the layers of the dense model, or the rest is another model's."""
    width, dense = args.moe_ffn_hidden_size or args.ffn_hidden_size, stored["ffn_hidden_size"]
    if width != dense:
        raise ValueError(
            f"--moe-use-upcycling: --moe-ffn-hidden-size is {width} and the dense checkpoint's --ffn-hidden-size is "
            f"{dense}: must be equal, each expert begins as the dense layer"
        )
    if args.moe_shared_expert_intermediate_size is not None:
        raise ValueError(
            "--moe-use-upcycling: --moe-shared-expert-intermediate-size is "
            f"{args.moe_shared_expert_intermediate_size}: must be left out, nothing in a dense checkpoint becomes a "
            "shared expert"
        )
    check_same_model(argparse.Namespace(**{**vars(args), **{name: stored.get(name) for name in _OF_EXPERTS}}), stored)


def from_dense(
    wanted: Sequence[ShardedTensor], checkpoint: VerifiedCheckpoint
) -> tuple[list[ShardedTensor], Callable[[], None]]:
    """What to load in place of `wanted`, any shape and dtype, and what to call after that to fill the rest of it.

    Of experts, [E, *], those of this rank are filled from the dense tensor, [*]. Routers keep the values that the run
    began with. A key that is neither is wanted as it is.
    """
    taken: list[ShardedTensor] = []
    copied: list[torch.Tensor] = []
    for tensor in wanted:
        dense = tensor.key.replace(_EXPERTS, _DENSE)
        if tensor.key in checkpoint.tensors or (dense == tensor.key and _ROUTER not in tensor.key):
            taken.append(tensor)
        elif dense != tensor.key and len(tensor.data):
            # The first is read, the others are its copies: one read however many experts there are.
            first = ShardedTensor(
                dense,
                tensor.data[0],
                tensor.global_shape[1:],
                tensor.global_offset[1:],
                allow_cast=tensor.allow_cast,
            )
            taken.append(first)
            copied.append(tensor.data)

    def fill() -> None:
        for experts in copied:
            experts[1:] = experts[0]

    return taken, fill
