"""finalize_model_grads: what happens to gradients between the last backward and the optimizer.

How they are reduced over data-parallel ranks is the wrapper's work.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from megatron.core.distributed.collectives import all_reduce_, rank_ordered_all_reduce_
from megatron.core.distributed.data_parallel_base import _BaseDataParallel, require_wrapped
from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection, group_rank, group_size
from megatron.core.tensor_parallel.param_attributes import param_facts
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
    pg_collection: the groups of this rank; None: those that the chunks were wrapped with.
    Raises what finish_grad_sync does, and ValueError for a chunk that is not wrapped and where num_tokens does not go
    with calculate_per_token_loss.
    """
    chunks = [require_wrapped(chunk) for chunk in model]
    groups = pg_collection or (chunks[0].pg_collection if chunks else existing_process_groups())
    for chunk in chunks:
        _check_num_tokens(chunk, num_tokens, pp_group=groups.pp)
    for chunk in chunks:
        chunk.finish_grad_sync()
    complete_model_grads(chunks, num_tokens, groups=groups)
    end_model_step(chunks, groups)


def complete_model_grads(
    chunks: Sequence[_BaseDataParallel], num_tokens: torch.Tensor | None, *, groups: ProcessGroupCollection
) -> None:
    """Completes gradients after finish_grad_sync without waiting for the device. Collective.

    num_tokens: as for finalize_model_grads, [], integer or floating point.
    """
    for chunk in chunks:
        _reduce_partial_grads(chunk, groups.tp)
    _divide_by_tokens(
        [chunk for chunk in chunks if chunk.config.calculate_per_token_loss], num_tokens, pp_group=groups.pp
    )
    # After all of them: the two stages have the tied weight in different chunks, and between them wait for others.
    for chunk in chunks:
        _reduce_shared_grads(chunk, groups.embd)
    for chunk in chunks:
        chunk.notify_grads_final()


def end_model_step(chunks: Sequence[_BaseDataParallel], groups: ProcessGroupCollection) -> None:
    """Lets models change that do so by themselves once a step. Collective."""
    for chunk in chunks:
        inner = unwrap_model(chunk)
        if isinstance(inner, FinalizesStep):
            # Routers of tensor-parallel ranks see parts of the sequence each.
            inner.finalize_step(groups.tp_dp_cp or chunk.pg_collection.dp_cp)


def _check_num_tokens(
    chunk: _BaseDataParallel, num_tokens: torch.Tensor | None, *, pp_group: dist.ProcessGroup | None
) -> None:
    counts_tokens = group_rank(pp_group) == group_size(pp_group) - 1
    per_token = chunk.config.calculate_per_token_loss
    # Either mistake would train with gradients that are wrong by a factor, without an error.
    if counts_tokens and per_token != (num_tokens is not None):
        raise ValueError(
            f"calculate_per_token_loss is {per_token} and num_tokens is {num_tokens}: "
            "the number of tokens must be given with per-token loss, and only then"
        )


def _reduce_partial_grads(chunk: _BaseDataParallel, group: dist.ProcessGroup | None) -> None:
    """Sums over the tensor-parallel `group` the gradients of which each rank has a part.

    Those are marked sequence_parallel: of norms and biases that see a part of the tokens or heads.
    """
    if group_size(group) == 1:
        return
    for buffer in chunk.all_buffers:
        slots = [slot for slot in buffer.slots if param_facts(slot.param).sequence_parallel]
        # The ranks of the group have the same layout, and own the same shards.
        parts = [part for slot in slots for part in buffer.owned_grads(slot)]
        if parts:
            # One message: they are many and small.
            flat = torch.cat(parts)
            (rank_ordered_all_reduce_ if chunk.config.deterministic_mode else all_reduce_)(flat, group)
            for part, total in zip(parts, flat.split([part.numel() for part in parts])):
                part.copy_(total)
        for slot in slots:
            slot.copy_from_comm()


def _reduce_shared_grads(chunk: _BaseDataParallel, group: dist.ProcessGroup | None) -> None:
    """Sums over the `group` of first and last stage the gradient of a weight that both have.

    A sum of two numbers is the same in any order, so the copies stay equal to the last bit.
    """
    if group_size(group) == 1:
        return
    for buffer in chunk.all_buffers:
        for slot in buffer.slots:
            if param_facts(slot.param).shared_embedding:
                for part in buffer.owned_grads(slot):
                    dist.all_reduce(part, group=group)
                slot.copy_from_comm()


def _divide_by_tokens(
    chunks: list[_BaseDataParallel], num_tokens: torch.Tensor | None, *, pp_group: dist.ProcessGroup | None
) -> None:
    if not chunks:
        return
    total = _total_tokens(num_tokens, chunks[0], pp_group=pp_group)
    for chunk in chunks:
        chunk.scale_gradients(1.0 / total)


def _total_tokens(
    num_tokens: torch.Tensor | None, chunk: _BaseDataParallel, *, pp_group: dist.ProcessGroup | None
) -> torch.Tensor:
    # fp64, for models in fp64 and for counts beyond 2^24; a copy, since the schedule's own count is reported too.
    if num_tokens is None:
        total = torch.zeros((), dtype=torch.float64, device=chunk.device)
    else:
        total = num_tokens.detach().to(torch.float64, copy=True)
    if group_size(chunk.pg_collection.dp_cp) > 1:
        dist.all_reduce(total, group=chunk.pg_collection.dp_cp)
    if group_size(pp_group) > 1:
        # The losses, and so the tokens, are the last stage's.
        dist.broadcast(total, group=pp_group, group_src=group_size(pp_group) - 1)
    # A step in which every token was masked has zero gradients, not NaN.
    return total.clamp_(min=1)
