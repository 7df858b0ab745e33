"""What a run's model has and the checkpoint's has not, on purpose: experts made of dense layers, adapters.

Everything else that differs is refused in checkpoint_args.py.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.dist_checkpointing import ShardedTensor, VerifiedCheckpoint
from megatron.core.transformer.lora import is_adapter
from megatron.training.checkpoint_args import begins_adapters, check_adapters, check_same_model
from megatron.training.upcycling import check_upcycling, from_dense, is_upcycling


@dataclass(frozen=True)
class NewParts:
    """experts: are made of the checkpoint's dense layers. adapters: keep the values that the run began with."""

    experts: bool
    adapters: bool

    @classmethod
    def of(cls, args: argparse.Namespace, stored: Mapping[str, Any], *, may_upcycle: bool) -> "NewParts":
        """Returns the new parts of a run that loads a checkpoint saved with the arguments `stored`.

        may_upcycle: where the checkpoint has no experts. Raises ValueError where the two models differ in anything
        else.
        """
        experts = may_upcycle and is_upcycling(args, stored)
        (check_upcycling if experts else check_same_model)(args, stored)
        check_adapters(args, stored)
        return cls(experts, begins_adapters(args, stored))

    def check_position(self, *, taken: bool) -> None:
        """Raises ValueError where the run is to go on with its data and optimizer, as if nothing were new."""
        if self.adapters and taken:
            raise ValueError("the checkpoint has no adapters, which --lora-rank asks for: add --finetune to begin them")

    def loadable(
        self, wanted: Sequence[ShardedTensor], checkpoint: VerifiedCheckpoint
    ) -> tuple[Sequence[ShardedTensor], Callable[[], None]]:
        """Returns the tensors to load in place of `wanted`, any shape and dtype, and what to call after that."""
        if self.adapters:
            wanted = [tensor for tensor in wanted if not is_adapter(tensor.key)]
        return from_dense(wanted, checkpoint) if self.experts else (wanted, _nothing_more)


def _nothing_more() -> None:
    pass
