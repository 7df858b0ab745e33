"""Handles checkpoints of a deliberately different model: new experts or adapters, tied weights, other keys.

run_values.py rejects all other differences, and loading.py performs the load.
"""

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
from megatron.training.checkpointing.run_values import check_adapters, check_same_model
from megatron.training.config import RunConfig

_EXPERTS, _DENSE = ".mlp.experts.", ".mlp."
_ROUTER = ".mlp.router."
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
FLAG = "untie_embeddings_and_output_weights"
_MAX_NAMED = 8


# Section: new experts and adapters.


@dataclass(frozen=True)
class PartialLoadPlan:
    """The parts of a model that its checkpoint lacks by design.

    experts: whether experts are initialized from the checkpoint's dense layers. adapters: whether adapters keep their
    initial values.
    """

    experts: bool
    adapters: bool

    @classmethod
    def of(cls, run_config: RunConfig, stored: Mapping[str, Any], *, may_upcycle: bool) -> "PartialLoadPlan":
        """Compares a run with a checkpoint that was saved with the arguments `stored`.

        may_upcycle: whether experts may be initialized from a dense checkpoint. Raises ValueError if the two models
        differ in any other way.
        """
        transformer = run_config.transformer
        experts = may_upcycle and transformer.num_moe_experts is not None and stored.get("num_experts") is None
        if experts:
            check_upcycling(run_config, stored)
        else:
            check_same_model(run_config.values, stored)
        check_adapters(run_config.values, stored)
        return cls(experts, adapters=transformer.lora_rank is not None and stored.get("lora_rank") is None)

    def check_position(self, *, restored: bool) -> None:
        """Raises ValueError if the run restores its position although its adapters are new."""
        if self.adapters and restored:
            raise ValueError("the checkpoint lacks the adapters of --lora-rank: add --finetune to start with new ones")

    def substitute(
        self, wanted: Sequence[ShardedTensor], checkpoint: VerifiedCheckpoint
    ) -> tuple[Sequence[ShardedTensor], Callable[[], None]]:
        """Returns the tensors to load instead of `wanted`, and a function to call after the load.

        wanted: any shape and dtype.
        """
        if self.adapters:
            wanted = [tensor for tensor in wanted if not is_adapter(tensor.key)]
        return from_dense(wanted, checkpoint) if self.experts else (wanted, lambda: None)


def check_upcycling(run_config: RunConfig, stored: Mapping[str, Any]) -> None:
    """Raises ValueError if experts cannot be initialized from the dense layers, or if the models differ otherwise."""
    transformer = run_config.transformer
    width, dense = transformer.moe_ffn_hidden_size, stored["ffn_hidden_size"]
    if width != dense:
        raise ValueError(
            f"--moe-use-upcycling: --moe-ffn-hidden-size is {width} and the dense checkpoint's --ffn-hidden-size is "
            f"{dense}: must be equal, because each expert starts as the dense layer"
        )
    if transformer.moe_shared_expert_intermediate_size is not None:
        raise ValueError(
            "--moe-use-upcycling: --moe-shared-expert-intermediate-size is "
            f"{transformer.moe_shared_expert_intermediate_size}: must be left out, because a dense checkpoint has no "
            "shared expert"
        )
    # Compared as the dense model, which has none of the other arguments of experts and routers.
    check_same_model({**run_config.values, "num_experts": None}, stored)


def from_dense(
    wanted: Sequence[ShardedTensor], checkpoint: VerifiedCheckpoint
) -> tuple[list[ShardedTensor], Callable[[], None]]:
    """Returns the dense tensors to load instead of experts, and a function that fills all experts after the load.

    Implements sparse upcycling (Komatsuzaki et al., 2023): each expert starts as a copy of the feed-forward layer that
    it replaces. This rank's experts, [E, *], any dtype, are filled from the dense tensor, [*]. Routers keep their
    initial values. Other tensors are loaded unchanged. The two layouts may differ, because only the keys of logical
    tensors matter.
    """
    available: list[ShardedTensor] = []
    copied: list[torch.Tensor] = []
    for tensor in wanted:
        dense = tensor.key.replace(_EXPERTS, _DENSE)
        if tensor.key in checkpoint.tensors or (dense == tensor.key and _ROUTER not in tensor.key):
            available.append(tensor)
        elif dense != tensor.key and len(tensor.data):
            # Reads the first expert and copies it to the others, so that the dense layer is read only once.
            first = ShardedTensor.at(
                dense,
                tensor.data[0],
                tensor.global_shape[1:],
                tensor.global_offset[1:],
                allow_cast=tensor.allow_cast,
            )
            available.append(first)
            copied.append(tensor.data)

    def fill() -> None:
        for experts in copied:
            experts[1:] = experts[0]

    return available, fill


# Section: tied weights.


class Tying(enum.Enum):
    """Conversion between tied and untied vocabulary weights during a load.

    SPLIT: both weights of the run, and their optimizer states, start from the checkpoint's single weight and its state.
    The stored moments belong to the sum of two gradients. The first moment moves each weight as it would have moved the
    tied weight. The second moment is too large for either weight alone, which makes the first updates smaller; fresh
    moments would make them larger. JOIN: the run's single weight starts from the checkpoint's two weights, which must
    be equal.
    """

    SAME = "same"
    SPLIT = "split"
    JOIN = "join"

    @classmethod
    def between(cls, stored: Mapping[str, Any], here: Mapping[str, Any]) -> "Tying":
        """Returns the conversion that a load requires, given the arguments of the checkpoint and of the run."""
        if FLAG not in stored or FLAG not in here or bool(stored[FLAG]) == bool(here[FLAG]):
            return cls.SAME
        return cls.SPLIT if here[FLAG] else cls.JOIN

    def stored_key(self, key: str) -> str:
        """Maps the key of a parameter or optimizer state from the run to the checkpoint."""
        is_output = (parameter_key(key) if is_state(key) else key) == OUTPUT
        return key.removesuffix(OUTPUT) + EMBEDDING if self is Tying.SPLIT and is_output else key

    def with_stored_keys(self, tensors: Sequence[ShardedTensor]) -> list[ShardedTensor]:
        """Returns `tensors` under the checkpoint's keys. tensors: any shape and dtype."""
        return [replace(tensor, key=self.stored_key(tensor.key)) for tensor in tensors]


def require_same_two(tensors: Sequence[ShardedTensor], checkpoint: VerifiedCheckpoint) -> None:
    """Raises ValueError on every rank unless the checkpoint's two weights are equal in the boxes of `tensors`.

    Collective. tensors: tensors that a run with tied weights loads, any shape and dtype. Each rank compares the boxes
    that it loads.
    """
    stored = checkpoint.tensors
    pairs = []
    for tensor in tensors:
        output = tensor.key.removesuffix(EMBEDDING) + OUTPUT
        # If only one weight has optimizer state, the other weight was frozen. The state is then not loaded.
        if tensor.key.endswith(EMBEDDING) and tensor.key in stored and output in stored:
            pairs.append(tuple(_empty(tensor, key, checkpoint=checkpoint) for key in (tensor.key, output)))
    dist_checkpointing.load_items([box for pair in pairs for box in pair], checkpoint)
    with all_ranks_agree():
        for one, other in pairs:
            if not torch.equal(one.data, other.data):
                without = "; --no-load-optim or --finetune load only the weights" if is_state(one.key) else ""
                raise ValueError(
                    "--untie-embeddings-and-output-weights is off here but on in the checkpoint, where "
                    f"{other.key} differs from {one.key}: a tied weight cannot start from both; add the "
                    f"flag{without}"
                )


def _empty(tensor: ShardedTensor, key: str, *, checkpoint: VerifiedCheckpoint) -> ShardedTensor:
    dtype = checkpoint.tensors[key][1]
    return tensor.with_data(key, torch.empty_like(tensor.data, dtype=dtype, device="cpu"))


# Section: keys that exist only in the run or only in the checkpoint.


class Strictness(enum.Enum):
    """Values of --dist-ckpt-strictness.

    As in Megatron, a key is unexpected if the checkpoint lacks it, and missing if the run does not request it.
    """

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    LOG_UNEXPECTED = "log_unexpected"
    LOG_ALL = "log_all"
    RAISE_UNEXPECTED = "raise_unexpected"
    RAISE_ALL = "raise_all"
    IGNORE_ALL = "ignore_all"

    @property
    def tolerates_lacking(self) -> bool:
        """Whether a load continues if the checkpoint lacks a key."""
        return self in (Strictness.LOG_UNEXPECTED, Strictness.LOG_ALL, Strictness.IGNORE_ALL)

    @property
    def checks_unused(self) -> bool:
        """Whether unused keys of the checkpoint are reported."""
        return self in (Strictness.LOG_ALL, Strictness.RAISE_ALL)


def lacking_keys(
    wanted: Sequence[ShardedTensor], checkpoint: VerifiedCheckpoint, *, strictness: Strictness
) -> set[str]:
    """Reports and returns the requested keys that the checkpoint lacks and the load may skip. Collective.

    wanted: requested tensors, any shape and dtype. Returns an empty set if no key may be skipped, so that the load
    fails and names the missing keys.
    """
    if not strictness.tolerates_lacking:
        return set()
    lacking = _of_all_ranks(tensor.key for tensor in wanted if tensor.key not in checkpoint.tensors)
    if lacking and strictness is not Strictness.IGNORE_ALL:
        print_rank_0(f"The checkpoint lacks {_named(lacking)}, which keep their initial values.")
    return lacking


def check_unused(
    wanted: Sequence[ShardedTensor], checkpoint: VerifiedCheckpoint, *, strictness: Strictness, optimizer: bool
) -> None:
    """Reports checkpoint keys that no rank requests, or raises ValueError, depending on the strictness. Collective.

    wanted: requested tensors, any shape and dtype. optimizer: whether `wanted` includes optimizer state. Otherwise
    stored optimizer state is ignored.
    """
    if not strictness.checks_unused:
        return
    left_out = ("rng.",) if optimizer else ("rng.", "optimizer.")
    stored = {key for key in checkpoint.tensors if not key.startswith(left_out)}
    unused = stored - _of_all_ranks(tensor.key for tensor in wanted)
    if unused and strictness is Strictness.RAISE_ALL:
        raise ValueError(
            f"--dist-ckpt-strictness is raise_all: this run does not use {_named(unused)} of the checkpoint"
        )
    if unused:
        print_rank_0(f"This run does not use {_named(unused)} of the checkpoint.")


def _of_all_ranks(keys: Iterable[str]) -> set[str]:
    return set().union(*gather_objects(set(keys), every_rank(None)))


def _named(keys: set[str]) -> str:
    names = sorted(keys)
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
