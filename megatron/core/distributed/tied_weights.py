"""A weight that the first and the last stage both have: the copy starts as its owner, and trains if its owner does.

Their gradients are summed in finalize_model_grads.py; which weights these are is the model's matter.
"""

import torch.distributed as dist
from torch import nn

from megatron.core.group_collectives import gather_objects
from megatron.core.process_groups_config import group_size
from megatron.core.tensor_parallel.param_attributes import param_facts


def follow_owner(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Gives a tied weight on the last stage the values and the requires_grad that it has on the first, its owner.

    Collective over `group`, the first and last stage, for modules that have such a weight; others send nothing. To
    freeze the word embeddings is thus to freeze the one weight, as in a model on one rank, where its copy has no name
    of its own. Raises ValueError on both stages if the two have other shapes or dtypes.
    """
    for name, param in module.named_parameters():
        if not param_facts(param).shared_embedding:
            continue
        if group_size(group) == 1:
            continue
        owner, copy = gather_objects((param.requires_grad, tuple(param.shape), param.dtype), group)
        if owner[1:] != copy[1:]:
            raise ValueError(
                f"tied weight {name} is {owner[2]} of shape {list(owner[1])} on the first stage and {copy[2]} of "
                f"shape {list(copy[1])} on the last: must be the same"
            )
        param.requires_grad_(owner[0])
        # Also where both drew from one seed: a script may seed each stage by itself, or load weights into one alone.
        dist.broadcast(param.data, group=group, group_src=0)
