"""Helpers that scripts written for Megatron-LM import from here. Nothing else belongs in this file."""

import argparse

import torch
import torch.distributed as dist

from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.utils import Blend
from megatron.core.parallel_state import existing_process_groups, get_data_parallel_group
from megatron.core.transformer.context_parallel import slice_batch
from megatron.training.command_line.config_builder import config_from_args


def get_ltor_masks_and_position_ids(
    data: torch.Tensor,
    eod_token: int,
    reset_position_ids: bool,
    reset_attention_mask: bool,
    eod_mask_loss: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns attention_mask, loss_mask and position_ids of a batch, for scripts whose data has tokens only.

    data: [B, S], int64, any device. Returns tensors on the same device: [B or 1, 1, S, S], bool, True where attention
    is forbidden; [B, S], fp32, 0 for eod_token if eod_mask_loss; [B, S], int64. eod_token ends a document.
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
    """Returns this rank's tokens of a batch: [B, S / size, ...] for tensors [B, S, ...], any dtype and device.

    cu_seqlens keep the boundaries of whole samples. cp_group: None for parallel_state's. Raises ValueError for masks.
    """
    return slice_batch(batch, existing_process_groups().cp if cp_group is None else cp_group)


def average_losses_across_data_parallel_group(losses: list[torch.Tensor]) -> torch.Tensor:
    """Returns the mean of each loss over the ranks: [number of losses], dtype of `losses`. Collective.

    losses: [] or [1] each, any dtype, any device.
    """
    averaged = torch.cat([loss.detach().reshape(1) for loss in losses])
    group = get_data_parallel_group()
    dist.all_reduce(averaged, group=group)
    return averaged / dist.get_world_size(group)


def get_blend_and_blend_per_split(args: argparse.Namespace) -> tuple[Blend | None, list[Blend | None] | None]:
    """Returns the fields blend and blend_per_split of dataset configurations from the flags that name data."""
    config = config_from_args(DataConfig, args)
    return config.read_blend(), config.blend_per_split()
