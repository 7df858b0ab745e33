"""Keys that a run and its checkpoint do not share, and what --dist-ckpt-strictness makes of them.

Megatron's words: a key is unexpected where the checkpoint lacks it, missing where nobody in the run wants it.
"""

import enum
from collections.abc import Iterable, Sequence

from megatron.core.dist_checkpointing import ShardedTensor, VerifiedCheckpoint
from megatron.core.dist_checkpointing.group_errors import every_rank
from megatron.core.group_collectives import gather_objects
from megatron.training.callbacks.lines import print_rank_0

_MAX_NAMED = 8


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
