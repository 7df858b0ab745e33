"""finalize_model_grads: what happens to gradients between the last backward and the optimizer.

How they are reduced is the wrapper's work.
"""

from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from megatron.core.distributed.plain_data_parallel import PlainDataParallel
from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection, group_rank, group_size
from megatron.core.utils import unwrap_model


@runtime_checkable
class FinalizesStep(Protocol):
    """A model that changes by itself once a step, as routers with an expert bias do."""

    def finalize_step(self, group: dist.ProcessGroup | None) -> None:
        """After gradients are reduced, before the optimizer; also of steps that the optimizer skips.

        group: all ranks that see different tokens.
        """
        ...


@record_function("finalize_model_grads")
def finalize_model_grads(
    model: list[nn.Module],
    num_tokens: torch.Tensor | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> None:
    """Reduces the gradients of all chunks over their data-parallel groups and ends the models' step. Collective.

    num_tokens: None for the mean over ranks. With calculate_per_token_loss, [], integer or floating point, the tokens
    in the losses that this rank summed: the sum over ranks is divided by the tokens of all (1 if there are none).
    Stages before the last, which sum no losses, may leave it None.
    pg_collection: the groups of this rank; None: those of parallel_state, if there are any.
    """
    groups = pg_collection or existing_process_groups()
    pp_group = groups.pp
    counts_tokens = group_rank(pp_group) == group_size(pp_group) - 1
    for chunk in model:
        if not isinstance(chunk, PlainDataParallel):
            raise ValueError(f"model chunk is a {type(chunk).__name__}: must be wrapped in PlainDataParallel")
        # Either mistake would train with gradients that are wrong by a factor, without an error.
        if counts_tokens and chunk.calculate_per_token_loss != (num_tokens is not None):
            raise ValueError(
                f"calculate_per_token_loss is {chunk.calculate_per_token_loss} and num_tokens is {num_tokens}: "
                "the number of tokens must be given with per-token loss, and only then"
            )
        # Also for one rank: parameters that were not used get their zeros here.
        chunk.finish_grad_sync()
        chunk.reduce_partial_grads(groups.tp)
        if chunk.calculate_per_token_loss:
            total = _total_tokens(num_tokens, chunk, pp_group=pp_group)
            chunk.scale_gradients(1.0 / total)
        inner = unwrap_model(chunk)
        if isinstance(inner, FinalizesStep):
            # Routers of tensor-parallel ranks see parts of the sequence each.
            inner.finalize_step(groups.tp_dp_cp or chunk.group)
    # After all of them: the two stages have the tied weight in different chunks, and between them wait for others.
    for chunk in model:
        assert isinstance(chunk, PlainDataParallel), "checked above"
        chunk.reduce_shared_grads(groups.embd)


def _total_tokens(
    num_tokens: torch.Tensor | None, chunk: PlainDataParallel, *, pp_group: dist.ProcessGroup | None
) -> torch.Tensor:
    # fp64, for models in fp64 and for counts beyond 2^24; a copy, since the schedule's own count is reported too.
    if num_tokens is None:
        total = torch.zeros((), dtype=torch.float64, device=chunk.grad_buffers[0].storage.device)
    else:
        total = num_tokens.detach().to(torch.float64, copy=True)
    if group_size(chunk.group) > 1:
        dist.all_reduce(total, group=chunk.group)
    if group_size(pp_group) > 1:
        # The losses, and so the tokens, are the last stage's.
        dist.broadcast(total, group=pp_group, group_src=group_size(pp_group) - 1)
    # A step in which every token was masked has zero gradients, not NaN.
    return total.clamp_(min=1)
