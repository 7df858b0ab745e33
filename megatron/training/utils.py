"""The few helpers that Megatron users import from here by name; nothing else belongs in this file."""

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
    """attention_mask, loss_mask and position_ids of a batch, for scripts whose data is tokens alone.

    data: [B, S], int64, any device, as the results. Returns [B or 1, 1, S, S] bool, True where attention is forbidden;
    [B, S] fp32, 0 where the token is eod_token under eod_mask_loss; [B, S] int64. An eod ends its document.
    """
    places = torch.arange(data.shape[1], device=data.device)
    behind_eod = torch.zeros_like(data, dtype=torch.bool)
    behind_eod[:, 1:] = data[:, :-1] == eod_token
    starts = torch.where(behind_eod, places, 0).cummax(dim=1).values  # of each token's document
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
    """This rank's tokens of a batch; tensors [B, S, ...], any dtype and device -> [B, S / size, ...].

    cu_seqlens stay those of whole samples. cp_group: None is parallel_state's. Raises ValueError for masks.
    """
    return slice_batch(batch, existing_process_groups().cp if cp_group is None else cp_group)


def average_losses_across_data_parallel_group(losses: list[torch.Tensor]) -> torch.Tensor:
    """[number of losses], dtype of `losses` ([] or [1], any device): the mean of each over the ranks. Collective."""
    averaged = torch.cat([loss.detach().reshape(1) for loss in losses])
    group = get_data_parallel_group()
    dist.all_reduce(averaged, group=group)
    return averaged / dist.get_world_size(group)


def get_blend_and_blend_per_split(args: argparse.Namespace) -> tuple[Blend | None, list[Blend | None] | None]:
    """What the flags that name data say, as the fields blend and blend_per_split of dataset configurations take it."""
    config = config_from_args(DataConfig, args)
    return config.read_blend(), config.blend_per_split()
