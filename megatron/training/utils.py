"""Provides helpers that scripts written for Megatron-LM import from this module. Do not add others."""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.utils import Blend
from megatron.core.device import default_device
from megatron.core.group_collectives import is_fake, message_device
from megatron.core.optimizer.clip_grads import GradStats
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.parallel_state import (
    existing_process_groups,
    get_data_parallel_group,
    get_model_parallel_group,
    is_pipeline_first_stage,
    is_pipeline_last_stage,
)
from megatron.core.process_groups_config import group_rank, group_size
from megatron.core.transformer.context_parallel import slice_batch
from megatron.core.utils import unwrap_model
from megatron.training.callbacks.lines import print_rank_0
from megatron.training.command_line.config_builder import config_from_args

__all__ = [
    "average_losses_across_data_parallel_group",
    "calc_params_l2_norm",
    "get_batch_on_this_cp_rank",
    "get_batch_on_this_tp_rank",
    "get_blend_and_blend_per_split",
    "get_ltor_masks_and_position_ids",
    "is_first_or_last_pipeline_stage",
    "is_last_rank",
    "is_rank0",
    "logical_and_across_model_parallel_group",
    "print_rank_0",
    "print_rank_last",
    "reduce_max_stat_across_model_parallel_group",
    "unwrap_model",
]

# Keys that get_batch_on_this_tp_rank always returns.
_BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def is_rank0() -> bool:
    """Returns whether this is the first rank or the only process."""
    return not dist.is_initialized() or dist.get_rank() == 0


def is_last_rank() -> bool:
    """Returns whether this is the last rank or the only process."""
    return not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1


def print_rank_last(message: str) -> None:
    """Prints the message on the last rank only, and flushes the output."""
    if is_last_rank():
        print(message, flush=True)


def is_first_or_last_pipeline_stage(vp_stage: int | None) -> bool:
    """Returns whether this rank, or one of its model chunks, reads tokens or computes the loss.

    vp_stage: index of the chunk; None means any of the rank's chunks.
    """
    any_chunk = vp_stage is None
    return is_pipeline_first_stage(any_chunk, vp_stage) or is_pipeline_last_stage(any_chunk, vp_stage)


def get_batch_on_this_tp_rank(data_iterator: Iterator[Any] | None, mtp_on_this_rank: bool = False) -> dict[str, Any]:
    """Reads a microbatch on the first tensor-parallel rank and sends it to the others. Collective over these ranks.

    data_iterator: read on the first rank only, so it may be None on other ranks. Returns all items of the batch on this
    process's device: tokens, labels and position_ids [B, S] int64, loss_mask [B, S] fp32, attention_mask [B, 1, S, S]
    bool, each None if the data lacks it, and any other items of the data. cu_seqlens remains on the CPU.
    mtp_on_this_rank: no effect, because tokens and labels are returned on both the first and the last stage. Raises
    ValueError on every rank if the first rank has no iterator.
    """
    group = existing_process_groups().tp
    # A group of one rank, or the fake group of a dry run, has no one to send to.
    is_alone = group_size(group) == 1 or is_fake(group)
    batch = dict(next(data_iterator)) if data_iterator is not None and (is_alone or group_rank(group) == 0) else None
    if is_alone and batch is not None:
        # Kernels are launched with the lengths between boundaries, which would have to be read back from a GPU.
        received = {key: value if key == "cu_seqlens" else _on_device(value) for key, value in batch.items()}
    else:
        received = _received_from_first(batch, group)
    return dict.fromkeys(_BATCH_KEYS) | received


def _on_device(value: Any) -> Any:
    return value.to(default_device(), non_blocking=True) if isinstance(value, torch.Tensor) else value


def _received_from_first(batch: dict[str, Any] | None, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Broadcasts a batch from the group's first rank: small values in one broadcast, all tensors in a second one."""
    tensors: dict[str, torch.Tensor] = {}
    if batch is not None:
        # Large elements first, so that each tensor starts at a multiple of its element size.
        on_device = [key for key, value in batch.items() if isinstance(value, torch.Tensor) and key != "cu_seqlens"]
        tensors = {key: batch[key] for key in sorted(on_device, key=lambda key: -batch[key].element_size())}
    layout = [(key, value.shape, value.dtype) for key, value in tensors.items()]
    small = None if batch is None else {key: value for key, value in batch.items() if key not in tensors}
    told: list[Any] = [small, layout]
    if group_size(group) > 1:
        dist.broadcast_object_list(told, group=group, group_src=0, device=message_device([group]))
    small, layout = told
    if small is None:
        raise ValueError(
            "data_iterator is None on the first tensor-parallel rank: it must provide the data; call get_batch on "
            "the first and the last stage only (see is_first_or_last_pipeline_stage)"
        )
    sizes = [shape.numel() * dtype.itemsize for _, shape, dtype in layout]
    message = torch.empty(sum(sizes), dtype=torch.uint8, device=default_device())
    for part, tensor in zip(message.split(sizes), tensors.values()):
        part.copy_(tensor.contiguous().view(-1).view(torch.uint8), non_blocking=True)
    if group_size(group) > 1:
        dist.broadcast(message, group=group, group_src=0)
    parts = zip(layout, message.split(sizes), strict=True)
    return small | {key: part.view(dtype).view(shape) for (key, shape, dtype), part in parts}


def get_ltor_masks_and_position_ids(
    data: torch.Tensor,
    eod_token: int,
    reset_position_ids: bool,
    reset_attention_mask: bool,
    eod_mask_loss: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns attention_mask, loss_mask and position_ids of a batch, for scripts whose data consists of tokens only.

    data: tokens, [B, S], int64, any device. eod_token: token that ends a document. Returns tensors on the same device:
    attention_mask [B or 1, 1, S, S], bool, True where attention is masked; loss_mask [B, S], fp32, 0 for eod_token if
    eod_mask_loss; position_ids [B, S], int64.
    """
    places = torch.arange(data.shape[1], device=data.device)
    after_eod = torch.zeros_like(data, dtype=torch.bool)
    after_eod[:, 1:] = data[:, :-1] == eod_token
    starts = torch.where(after_eod, places, 0).cummax(dim=1).values  # of each token's document
    forbidden = (places[None, :] > places[:, None])[None]
    if reset_attention_mask:
        forbidden = forbidden | (places < starts[:, :, None])
    loss_mask = torch.ones_like(data, dtype=torch.float32)
    if eod_mask_loss:
        loss_mask.masked_fill_(data == eod_token, 0.0)
    position_ids = places - starts if reset_position_ids else places.expand_as(data)
    return forbidden[:, None], loss_mask, position_ids.contiguous()


def get_batch_on_this_cp_rank(
    batch: dict[str, torch.Tensor], cp_group: dist.ProcessGroup | None = None
) -> dict[str, torch.Tensor]:
    """Returns a context-parallel rank's part of a batch: [B, S / size, ...] for tensors [B, S, ...], any dtype, device.

    cu_seqlens is returned unchanged, with the boundaries of whole samples. cp_group: None means parallel_state's group.
    Raises ValueError for attention masks.
    """
    return slice_batch(batch, existing_process_groups().cp if cp_group is None else cp_group)


def average_losses_across_data_parallel_group(losses: list[torch.Tensor]) -> torch.Tensor:
    """Returns the mean of each loss over the data-parallel ranks: [number of losses], dtype of `losses`. Collective.

    losses: [] or [1] each, any dtype, any device.
    """
    averaged = torch.cat([loss.detach().reshape(1) for loss in losses])
    group = get_data_parallel_group()
    dist.all_reduce(averaged, group=group)
    return averaged / dist.get_world_size(group)


def get_blend_and_blend_per_split(args: argparse.Namespace) -> tuple[Blend | None, list[Blend | None] | None]:
    """Converts the data flags to the fields blend and blend_per_split of dataset configurations."""
    config = config_from_args(DataConfig, args)
    return config.read_blend(), config.blend_per_split()


def calc_params_l2_norm(model: nn.Module | Sequence[nn.Module], force_create_fp32_copy: bool = False) -> float:
    """Returns the 2-norm of all parameters, counting each logical element once. Collective over all ranks.

    model: this rank's chunks. force_create_fp32_copy: no effect, because squares are always summed in fp64. Raises
    ValueError for parameters that FSDP2 has sharded; --log-params-norm logs their norm.
    """
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    params = [param for chunk in chunks for param in chunk.parameters()]
    if any(isinstance(param, DTensor) for param in params):
        raise ValueError("the model is sharded by FSDP2, but whole parameters are required: use --log-params-norm")
    stats = GradStats(
        OptimizerConfig(), existing_process_groups(), [], ranges=[], logical_pieces={}, device=default_device()
    )
    return stats.norm_of(params)


def reduce_max_stat_across_model_parallel_group(stat: float | None) -> float | None:
    """Returns the maximum of a statistic over the model-parallel ranks, some of which may lack it. Collective.

    stat: a number, or None if this rank lacks the statistic. Returns None if all ranks lack it.
    """
    value = torch.tensor([-torch.inf if stat is None else stat], dtype=torch.float32, device=default_device())
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=get_model_parallel_group())
    largest = float(value.item())
    return None if largest == -torch.inf else largest


def logical_and_across_model_parallel_group(input: bool) -> bool:
    """Returns whether `input` is true on all model-parallel ranks. Collective over these ranks."""
    value = torch.tensor([int(bool(input))], dtype=torch.int, device=default_device())
    dist.all_reduce(value, op=dist.ReduceOp.MIN, group=get_model_parallel_group())
    return bool(value.item())
