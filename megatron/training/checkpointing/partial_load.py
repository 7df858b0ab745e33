"""How a load bridges differences between the run's model and the checkpoint's: new parts, tied weights, other keys.

Everything else that differs is refused in run_values.py; what is loaded, and when, is loading.py's.
"""

import argparse
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor, VerifiedCheckpoint
from megatron.core.dist_checkpointing.errors import every_rank
from megatron.core.group_collectives import all_ranks_agree, gather_objects
from megatron.core.optimizer.state_dict import is_state, parameter_key
from megatron.core.transformer.lora import is_adapter
from megatron.training.callbacks.lines import print_rank_0
from megatron.training.checkpointing.run_values import begins_adapters, check_adapters, check_same_model

_EXPERTS, _DENSE = ".mlp.experts.", ".mlp."
_ROUTER = ".mlp.router."
# What the dense model says nothing of: taken as the run has it.
_OF_EXPERTS = ("num_experts", "moe_layer_freq", "moe_ffn_hidden_size")
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
FLAG = "untie_embeddings_and_output_weights"
_MAX_NAMED = 8


# New parts: experts and adapters.


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


# Tied weights.


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


# Other keys.


class Strictness(enum.Enum):
    """The values of --dist-ckpt-strictness."""

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    LOG_UNEXPECTED = "log_unexpected"
    LOG_ALL = "log_all"
    RAISE_UNEXPECTED = "raise_unexpected"
    RAISE_ALL = "raise_all"
    IGNORE_ALL = "ignore_all"

    @property
    def lets_lack(self) -> bool:
        """Whether a load goes on where the checkpoint lacks a key."""
        return self in (Strictness.LOG_UNEXPECTED, Strictness.LOG_ALL, Strictness.IGNORE_ALL)

    @property
    def looks_for_unused(self) -> bool:
        """Whether keys that nobody wants are of interest."""
        return self in (Strictness.LOG_ALL, Strictness.RAISE_ALL)


def lacking_keys(
    wanted: Sequence[ShardedTensor], checkpoint: VerifiedCheckpoint, *, strictness: Strictness
) -> set[str]:
    """Keys that any rank wants and the checkpoint lacks, where the load goes on without them, and says so. Collective.

    wanted: any shape and dtype. Empty where it must not go on: the load then refuses by name.
    """
    if not strictness.lets_lack:
        return set()
    lacking = _of_all_ranks(tensor.key for tensor in wanted if tensor.key not in checkpoint.tensors)
    if lacking and strictness is not Strictness.IGNORE_ALL:
        print_rank_0(f"The checkpoint lacks {_named(lacking)}: these keep the values that the run began with.")
    return lacking


def check_unused(
    wanted: Sequence[ShardedTensor], checkpoint: VerifiedCheckpoint, *, strictness: Strictness, optimizer: bool
) -> None:
    """Says, or refuses by ValueError, what is stored and wanted by no rank. Collective.

    wanted: any shape and dtype. optimizer: whether its state is among them; else it is left out on purpose.
    """
    if not strictness.looks_for_unused:
        return
    left_out = ("rng.",) if optimizer else ("rng.", "optimizer.")
    stored = {key for key in checkpoint.tensors if not key.startswith(left_out)}
    unused = stored - _of_all_ranks(tensor.key for tensor in wanted)
    if unused and strictness is Strictness.RAISE_ALL:
        raise ValueError(
            f"--dist-ckpt-strictness is raise_all: nothing in this run takes {_named(unused)} of the checkpoint"
        )
    if unused:
        print_rank_0(f"Nothing in this run takes {_named(unused)} of the checkpoint.")


def _of_all_ranks(keys: Iterable[str]) -> set[str]:
    return set().union(*gather_objects(set(keys), every_rank(None)))


def _named(keys: set[str]) -> str:
    names = sorted(keys)
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
