"""Checkpoints of a model whose output layer is its embedding, for one with two weights, and the reverse.

Which tensors are loaded, and when, is checkpointing.py's matter.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor, VerifiedCheckpoint
from megatron.core.group_collectives import all_ranks_agree
from megatron.core.optimizer.state_dict import is_state, parameter_key

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
FLAG = "untie_embeddings_and_output_weights"


class Tying(enum.Enum):
    """What a load does about the two.

    SPLIT: both of the run's weights begin as the checkpoint's one, and so does their optimizer state. Its moments are
    those of the sum of two gradients: the first momentum moves both weights as it would have moved the one, and the
    second moments, too large for each alone, make the first steps shorter. Fresh moments would make them longer.
    JOIN: the run's one weight begins as the checkpoint's two, which must be the same.
    """

    SAME = "same"
    SPLIT = "split"
    JOIN = "join"

    @classmethod
    def between(cls, stored: Mapping[str, Any], here: Mapping[str, Any]) -> "Tying":
        """From the arguments of a checkpoint to those of a run."""
        if FLAG not in stored or FLAG not in here or bool(stored[FLAG]) == bool(here[FLAG]):
            return cls.SAME
        return cls.SPLIT if here[FLAG] else cls.JOIN

    def key_in_checkpoint(self, key: str) -> str:
        """Under which key the checkpoint has a parameter of the run, or a state of one."""
        is_output = (parameter_key(key) if is_state(key) else key) == OUTPUT
        return key.removesuffix(OUTPUT) + EMBEDDING if self is Tying.SPLIT and is_output else key

    def in_checkpoint(self, tensors: Sequence[ShardedTensor]) -> list[ShardedTensor]:
        """`tensors`: any shape and dtype, under the keys that the checkpoint has them by."""
        return [replace(tensor, key=self.key_in_checkpoint(tensor.key)) for tensor in tensors]


def require_same_two(tensors: Sequence[ShardedTensor], checkpoint: VerifiedCheckpoint) -> None:
    """Raises ValueError on every rank unless what the checkpoint has of both weights for `tensors` is the same.

    Collective. tensors: what a run with one weight wants, any shape and dtype; each rank compares its own boxes.
    """
    stored = checkpoint.tensors
    pairs = []
    for tensor in tensors:
        output = tensor.key.removesuffix(EMBEDDING) + OUTPUT
        # What only one of them has is state of a weight whose other half was frozen: nobody takes it.
        if tensor.key.endswith(EMBEDDING) and tensor.key in stored and output in stored:
            pairs.append(tuple(_empty(tensor, key, checkpoint=checkpoint) for key in (tensor.key, output)))
    dist_checkpointing.load([box for pair in pairs for box in pair], checkpoint)
    with all_ranks_agree():
        for one, other in pairs:
            if not torch.equal(one.data, other.data):
                without = "; --no-load-optim or --finetune take the weights alone" if is_state(one.key) else ""
                raise ValueError(
                    f"--untie-embeddings-and-output-weights is off here, on in the checkpoint, and {other.key} there "
                    f"is not {one.key}: one weight cannot begin as both; give the flag{without}"
                )


def _empty(tensor: ShardedTensor, key: str, *, checkpoint: VerifiedCheckpoint) -> ShardedTensor:
    dtype = checkpoint.tensors[key][1]
    return replace(tensor, key=key, data=torch.empty_like(tensor.data, dtype=dtype, device="cpu"))
