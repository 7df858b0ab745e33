"""Pretrains a GPT: builds the model, reads batches and computes the loss. megatron.training implements the rest.

torchrun --nproc-per-node 2 pretrain_gpt.py --num-layers 4 --hidden-size 256 ... (--help lists the flags)
"""

import sys
from collections.abc import Iterator
from functools import partial

import torch

from megatron.core.datasets.blended_megatron_dataset_builder import Datasets
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.data_iterators import build_train_valid_test_datasets
from megatron.core.device import default_device
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.planner import print_plan
from megatron.training import get_args, get_timers, get_tokenizer, pretrain
from megatron.training.command_line.config_builder import config_from_args
from megatron.training.errors import exit_on_user_error
from megatron.training.gpt_builder import build_gpt
from megatron.training.utils import get_batch_on_this_cp_rank


def model_provider(pre_process: bool = True, post_process: bool = True, *, vp_stage: int | None = None) -> GPTModel:
    """Builds a part of the GPT model that the command line describes.

    pre_process: whether to include the embedding. post_process: whether to include the output layer. vp_stage: index of
    the model chunk.
    """
    return build_gpt(get_args(), pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)


def get_batch(data_iterator: Iterator[dict[str, torch.Tensor]] | None, device: torch.device) -> dict[str, torch.Tensor]:
    """Returns the next microbatch on `device`: tokens, labels, position_ids [B, S] int64, loss_mask [B, S] fp32.

    With --reset-attention-mask, also returns attention_mask [B, 1, S, S] bool, or cu_seqlens [n + 1] int32 on the CPU.
    Data with padding has padding_mask [B, S] bool.
    With --context-parallel-size, returns this rank's part of each sequence. Returns {} on stages that read no batches.
    """
    if data_iterator is None:
        return {}
    batch = get_batch_on_this_cp_rank(next(data_iterator))
    # Kernels are launched with the lengths between boundaries, which would have to be read back from a GPU.
    return {key: value if key == "cu_seqlens" else value.to(device, non_blocking=True) for key, value in batch.items()}


def loss_func(
    loss_mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sums per-token losses. Returns the sum [], the number of tokens [], and "lm loss" [2] (sum, count) to log.

    loss_mask: [B, S], fp32. output: per-token losses, [B, S], fp32.
    """
    mask = loss_mask.view(-1)
    loss = torch.sum(output.float().view(-1) * mask)
    num_tokens = mask.sum()
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens])}


def forward_step(
    data_iterator: Iterator[dict[str, torch.Tensor]] | None, model: torch.nn.Module
) -> tuple[torch.Tensor, partial[tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]]:
    """Runs forward of one microbatch. Returns per-token losses, [B, S], fp32, and the function that sums them.

    Stages before the last return hidden states [S, B, H] in the parameters' dtype, and their function is not called.
    """
    with get_timers()("batch-generator", log_level=2):
        batch = get_batch(data_iterator, default_device())
    borders = batch.get("cu_seqlens")
    # Passed only if given, because a model of a script may not accept it.
    padding = {"padding_mask": batch["padding_mask"]} if "padding_mask" in batch else {}
    losses = model(
        batch.get("tokens"),
        batch.get("position_ids"),
        batch.get("attention_mask"),
        labels=batch.get("labels"),
        loss_mask=batch.get("loss_mask"),
        packed_seq_params=None if borders is None else PackedSeqParams(cu_seqlens_q=borders),
        **padding,
    )
    return losses, partial(loss_func, batch.get("loss_mask", torch.empty(0)))


def train_valid_test_datasets_provider(train_valid_test_num_samples: list[int]) -> Datasets:
    """Builds the train, valid and test datasets of --data-path, or of synthetic tokens under --mock-data."""
    args = get_args()
    return build_train_valid_test_datasets(
        config_from_args(DataConfig, args), get_tokenizer(), sizes=train_valid_test_num_samples, seed=args.seed
    )


def main(argv: list[str] | None = None) -> None:
    """Trains with the command line `argv`, which defaults to sys.argv. After an error, exits with a non-zero status."""
    with exit_on_user_error():
        pretrain(
            train_valid_test_datasets_provider,
            model_provider,
            ModelType.encoder_or_decoder,
            forward_step,
            argv=argv,
            print_plan=print_plan,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
