"""Tied weights of a stage that holds both ends of the model, in different chunks.

Such a stage owns the weight, in the chunk with the embedding, and has a copy of it. On other stages, follow_owner of
megatron.core.distributed does the same between two ranks.
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

from torch import nn

from megatron.core.tensor_parallel.param_attributes import has_followed, mark_followed, param_facts

_Item = TypeVar("_Item")


def owners_and_copies(weights: Iterable[tuple[nn.Parameter, _Item]]) -> tuple[list[_Item], list[_Item]]:
    """Returns what belongs to tied weights that this stage owns, and to its copies, each in the given order.

    weights: parameters, each with an object. The two lists correspond if the stage holds both ends of the model.
    """
    tied = [(param_facts(param), item) for param, item in weights]
    owners = [item for facts, item in tied if facts.shared_embedding and not facts.shared]
    return owners, [item for facts, item in tied if facts.shared]


def follow_owner_on_stage(chunks: Sequence[nn.Module]) -> None:
    """Copies values and requires_grad of a tied weight from the chunk that owns it to the chunk with its copy.

    chunks: all chunks of the stage. Raises ValueError if shapes or dtypes differ. Does nothing for other stages.
    """
    named = [one for chunk in chunks for one in chunk.named_parameters()]
    owners, copies = owners_and_copies((param, (name, param)) for name, param in named)
    pairs = zip(owners, copies, strict=True) if owners and copies else ()
    for (name, owner), (copy_name, copy) in pairs:
        if (owner.shape, owner.dtype) != (copy.shape, copy.dtype):
            raise ValueError(
                f"tied weight {name} is {owner.dtype} of shape {list(owner.shape)} and {copy_name} is {copy.dtype} of "
                f"shape {list(copy.shape)}: must be identical"
            )
        copy.requires_grad_(owner.requires_grad)
        copy.data.copy_(owner.data)
        mark_followed(copy)


def follow_owner_once(chunks: Sequence[nn.Module]) -> None:
    """Calls follow_owner_on_stage, unless this was done for the copies of these chunks."""
    if any(param_facts(param).shared and not has_followed(param) for chunk in chunks for param in chunk.parameters()):
        follow_owner_on_stage(chunks)
