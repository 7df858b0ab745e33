"""finalize_model_grads: completes gradients between the last backward and the optimizer's step.

The data-parallel wrapper reduces gradients over its ranks. This file adds the sums over other groups and divides by the
number of tokens.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar, cast, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.device.trace_ranges import trace_range
from megatron.core.distributed.collectives import all_reduce_, rank_ordered_all_reduce_
from megatron.core.distributed.data_parallel_base import _BaseDataParallel, require_wrapped
from megatron.core.distributed.layout import ParamSlot
from megatron.core.parallel_state import existing_process_groups
from megatron.core.pipeline_placement import configured_placement
from megatron.core.process_groups_config import ProcessGroupCollection, group_rank, group_size
from megatron.core.tensor_parallel.param_attributes import param_facts
from megatron.core.tensor_parallel.tied_weights import owners_and_copies
from megatron.core.utils import unwrap_model

_Kind = TypeVar("_Kind")


@runtime_checkable
class FinalizesStep(Protocol):
    """A module that updates additional state once per step, such as the expert biases of its routers."""

    def finalize_step(self, group: dist.ProcessGroup | None) -> None:
        """Updates the state; called after gradients are reduced, even if the optimizer skips the step.

        group: all ranks that process different tokens.
        """
        ...


@runtime_checkable
class NotesUpdates(Protocol):
    """A module that notices training loops which never call its finalize_step."""

    def note_update(self, optimizer: object) -> None:
        """Records that an optimizer has updated the parameters."""
        ...


@trace_range("finalize_model_grads")
def finalize_model_grads(
    model: list[nn.Module],
    num_tokens: torch.Tensor | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool = False,
) -> None:
    """Completes the gradients of all chunks and ends the step of their models. Collective.

    Gradients are first reduced over data-parallel groups. num_tokens: None without calculate_per_token_loss, where
    gradients are averaged over ranks. With calculate_per_token_loss, the number of tokens in the losses that this rank
    summed: [], integer or floating point. The gradients, summed over ranks, are then divided by the number of tokens of
    all ranks (at least 1). Stages before the last, which compute no losses, may pass None. pg_collection: this rank's
    groups; None means the groups with which the chunks were wrapped. force_all_reduce: see finish_grad_sync. Raises the
    errors of finish_grad_sync, and ValueError for a chunk that is not wrapped, or if num_tokens is given without
    calculate_per_token_loss or missing with it.
    """
    chunks = [require_wrapped(chunk) for chunk in model]
    groups = pg_collection or (chunks[0].pg_collection if chunks else existing_process_groups())
    for chunk in chunks:
        _check_num_tokens(chunk, num_tokens, pp_group=groups.pp)
    for chunk in chunks:
        chunk.finish_grad_sync(force_all_reduce=force_all_reduce)
    complete_model_grads(chunks, num_tokens, groups=groups)
    end_model_step(chunks, groups)


def complete_model_grads(
    chunks: Sequence[_BaseDataParallel], num_tokens: torch.Tensor | None, *, groups: ProcessGroupCollection
) -> None:
    """Sums gradients over other groups after finish_grad_sync, and divides them by the tokens. Collective.

    Does not wait for the device. num_tokens: as for finalize_model_grads, [], integer or floating point.
    """
    for chunk in chunks:
        _reduce_partial_grads(chunk, groups.tp)
    _divide_by_tokens(
        [chunk for chunk in chunks if chunk.config.calculate_per_token_loss], num_tokens, pp_group=groups.pp
    )
    # After the collectives over other groups, for all chunks. The tied embedding weight is in the first chunk of the
    # first stage and in the last chunk of the last stage. In one loop over chunks, these two stages would launch the
    # sum of its gradient and the other collectives in different orders, which could deadlock.
    _reduce_shared_grads(chunks, groups.embd)
    for chunk in chunks:
        chunk.notify_grads_final()


def end_model_step(chunks: Sequence[_BaseDataParallel], groups: ProcessGroupCollection) -> None:
    """Calls finalize_step of each model, or of the modules in it that define one, such as routers. Collective."""
    for chunk in chunks:
        for module in outermost(unwrap_model(chunk), FinalizesStep):  # type: ignore[type-abstract]  # never called
            # Tensor-parallel ranks are included, because each router processes a part of the sequence.
            module.finalize_step(groups.tp_dp_cp or chunk.pg_collection.dp_cp)


def outermost(module: nn.Module, kind: type[_Kind]) -> list[_Kind]:
    """Returns the module if its class is of this kind, else the outermost modules in it that are, each once."""
    found, waiting = dict[_Kind, None](), [module]
    while waiting:
        one = waiting.pop()
        # By class, because isinstance with a protocol also looks up its attributes, which costs 20 us for each module.
        if issubclass(type(one), kind):
            found[cast(_Kind, one)] = None
        else:
            waiting.extend(one.children())
    return list(found)


def _check_num_tokens(
    chunk: _BaseDataParallel, num_tokens: torch.Tensor | None, *, pp_group: dist.ProcessGroup | None
) -> None:
    counts_tokens = group_rank(pp_group) == _loss_stage(chunk, pp_group)
    per_token = chunk.config.calculate_per_token_loss
    # Either mistake would silently scale gradients by a wrong factor.
    if counts_tokens and per_token != (num_tokens is not None):
        raise ValueError(
            f"calculate_per_token_loss is {per_token} and num_tokens is {num_tokens}: "
            "num_tokens must be given with per-token loss, and must be None without it"
        )


def _reduce_partial_grads(chunk: _BaseDataParallel, group: dist.ProcessGroup | None) -> None:
    """Sums the gradients of parameters marked sequence_parallel over the tensor-parallel `group`.

    These are norms and biases whose gradient on each rank covers only a part of the tokens or heads.
    """
    if group_size(group) == 1:
        return
    for buffer in chunk.all_buffers:
        slots = [slot for slot in buffer.slots if param_facts(slot.param).sequence_parallel]
        # The ranks of the group have the same layout and own the same shards.
        parts = [part for slot in slots for part in buffer.owned_grads(slot)]
        if parts:
            # Sent in one collective, because there are many small gradients.
            flat = torch.cat(parts)
            (rank_ordered_all_reduce_ if chunk.config.deterministic_mode else all_reduce_)(flat, group)
            for part, total in zip(parts, flat.split([part.numel() for part in parts])):
                part.copy_(total)
        for slot in slots:
            slot.copy_from_comm()


def _reduce_shared_grads(chunks: Sequence[_BaseDataParallel], group: dist.ProcessGroup | None) -> None:
    """Sums the gradients of the tied (shared) embedding weights over `group` (embd), the stages of both ends.

    A sum of two numbers is the same in any order, so the copies stay bit-identical.
    """
    # Only in a V are owner and copy in two chunks of one stage.
    if group_size(group) == 1 and (len(chunks) < 2 or not configured_placement(chunks[0].config).is_v):
        return
    tied = [
        (slot, buffer.owned_grads(slot))
        for chunk in chunks
        for buffer in chunk.all_buffers
        for slot in buffer.slots
        if param_facts(slot.param).shared_embedding
    ]
    if group_size(group) > 1:
        for _, parts in tied:
            for part in parts:
                dist.all_reduce(part, group=group)
    else:
        _add_grads_of_ends(tied)
    for slot, _ in tied:
        slot.copy_from_comm()


def _add_grads_of_ends(tied: Sequence[tuple[ParamSlot, Sequence[torch.Tensor]]]) -> None:
    """Sums the gradients of tied weights whose owner and copy are both on this stage, as in a V.

    tied: each weight with this rank's parts of its gradient, [*] each. Raises ValueError if one of two is frozen.
    """
    owners, copies = owners_and_copies((one[0].param, one) for one in tied)
    if len(owners) != len(copies):
        raise ValueError(
            f"{(owners or copies)[0][0].name} is trained, and the weight of this stage that it is tied to is frozen: "
            "requires_grad must be equal when DistributedDataParallel wraps the chunks"
        )
    for (_, of_owner), (_, of_copy) in zip(owners, copies, strict=True):
        for one, other in zip(of_owner, of_copy, strict=True):
            one.add_(other)
            other.copy_(one)


def _divide_by_tokens(
    chunks: list[_BaseDataParallel], num_tokens: torch.Tensor | None, *, pp_group: dist.ProcessGroup | None
) -> None:
    """Divides gradients, which are sums over tokens, by the number of tokens of all ranks.

    gradient_scale (data_parallel_base.py) is 1 for these chunks, because the mean over ranks is replaced by this
    division. is_completed_later (grad_hooks.py) defers hooks on their gradients until it is done.
    """
    if not chunks:
        return
    total = _total_tokens(num_tokens, chunks[0], pp_group=pp_group)
    for chunk in chunks:
        chunk.scale_gradients(1.0 / total)


def _total_tokens(
    num_tokens: torch.Tensor | None, chunk: _BaseDataParallel, *, pp_group: dist.ProcessGroup | None
) -> torch.Tensor:
    # fp64, for models in fp64 and for counts beyond 2^24. A copy, because the schedule also reports num_tokens.
    if num_tokens is None:
        total = torch.zeros((), dtype=torch.float64, device=chunk.device)
    else:
        total = num_tokens.detach().to(torch.float64, copy=True)
    if group_size(chunk.pg_collection.dp_cp) > 1:
        dist.all_reduce(total, group=chunk.pg_collection.dp_cp)
    if group_size(pp_group) > 1:
        # Only one stage computes losses and counts tokens.
        dist.broadcast(total, group=pp_group, group_src=_loss_stage(chunk, pp_group))
    # At least 1, so that a step with only masked tokens has zero gradients, not NaN.
    return total.clamp_(min=1)


def _loss_stage(chunk: _BaseDataParallel, pp_group: dist.ProcessGroup | None) -> int:
    """Returns the stage that computes the loss."""
    num_stages = group_size(pp_group)
    if num_stages == 1:
        return 0
    # A script may use groups with other sizes than the configuration of the model.
    return configured_placement(chunk.config)._replace(num_stages=num_stages).loss_stage
