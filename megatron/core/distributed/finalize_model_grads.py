"""finalize_model_grads: what happens to gradients between the last backward and the optimizer.

How they are reduced is the wrapper's work.
"""

from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from megatron.core.distributed.plain_data_parallel import PlainDataParallel
from megatron.core.distributed.replica_checks import check_grads
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
    Raises NonFiniteGradientError on all ranks, before any gradient is reduced, where the chunks ask for the check and
    any rank's gradient is NaN or infinite.
    """
    groups = pg_collection or existing_process_groups()
    chunks = [_checked(chunk, num_tokens, pp_group=groups.pp) for chunk in model]
    # Before the sums, after which every rank has the same NaN and nobody can tell whose it was.
    _check_for_nan([chunk for chunk in chunks if chunk.check_for_nan_in_grad])
    for chunk in chunks:
        # Also for one rank: parameters that were not used get their zeros here.
        chunk.finish_grad_sync()
        chunk.reduce_partial_grads(groups.tp)
    _divide_by_tokens([chunk for chunk in chunks if chunk.calculate_per_token_loss], num_tokens, pp_group=groups.pp)
    for chunk in chunks:
        inner = unwrap_model(chunk)
        if isinstance(inner, FinalizesStep):
            # Routers of tensor-parallel ranks see parts of the sequence each.
            inner.finalize_step(groups.tp_dp_cp or chunk.group)
    # After all of them: the two stages have the tied weight in different chunks, and between them wait for others.
    for chunk in chunks:
        chunk.reduce_shared_grads(groups.embd)


def _checked(
    chunk: nn.Module, num_tokens: torch.Tensor | None, *, pp_group: dist.ProcessGroup | None
) -> PlainDataParallel:
    if not isinstance(chunk, PlainDataParallel):
        raise ValueError(f"model chunk is a {type(chunk).__name__}: must be wrapped in PlainDataParallel")
    counts_tokens = group_rank(pp_group) == group_size(pp_group) - 1
    # Either mistake would train with gradients that are wrong by a factor, without an error.
    if counts_tokens and chunk.calculate_per_token_loss != (num_tokens is not None):
        raise ValueError(
            f"calculate_per_token_loss is {chunk.calculate_per_token_loss} and num_tokens is {num_tokens}: "
            "the number of tokens must be given with per-token loss, and only then"
        )
    return chunk


def _check_for_nan(chunks: list[PlainDataParallel]) -> None:
    """Looks at the gradients of all chunks at once: the result costs a read of the device and a wait for all ranks."""
    if not chunks:
        return
    for chunk in chunks:
        chunk.fill_missing_grads()
    grads = (named for chunk in chunks for named in chunk.named_main_grads())
    check_grads(grads, None if chunks[0].group is None else dist.group.WORLD, device=chunks[0].device)


def _divide_by_tokens(
    chunks: list[PlainDataParallel], num_tokens: torch.Tensor | None, *, pp_group: dist.ProcessGroup | None
) -> None:
    if not chunks:
        return
    total = _total_tokens(num_tokens, chunks[0], pp_group=pp_group)
    for chunk in chunks:
        chunk.scale_gradients(1.0 / total)


def _total_tokens(
    num_tokens: torch.Tensor | None, chunk: PlainDataParallel, *, pp_group: dist.ProcessGroup | None
) -> torch.Tensor:
    # fp64, for models in fp64 and for counts beyond 2^24; a copy, since the schedule's own count is reported too.
    if num_tokens is None:
        total = torch.zeros((), dtype=torch.float64, device=chunk.device)
    else:
        total = num_tokens.detach().to(torch.float64, copy=True)
    if group_size(chunk.group) > 1:
        dist.all_reduce(total, group=chunk.group)
    if group_size(pp_group) > 1:
        # The losses, and so the tokens, are the last stage's.
        dist.broadcast(total, group=pp_group, group_src=group_size(pp_group) - 1)
    # A step in which every token was masked has zero gradients, not NaN.
    return total.clamp_(min=1)
