"""Defines which tokens are padding, for everything that counts tokens, and counts them in batches.

[Note: padding is not data]
A token is padding if the padding mask of its data set says so: the pair PREFIX_padding_mask.bin/.idx, which
preprocess_data.py writes, or "padding_mask" in the samples of a script. Ids are never compared, because the id that
fills a packed document may be the end-of-document token, and prompts, which have no loss, are data. Everything that
counts tokens leaves padding out:

- losses: the loss mask is 0 where the input or the label is padding; also for multi-token prediction
- routers: losses, loads, expert biases, the Sinkhorn balance, and the capacity of experts, in training and evaluation
- reports: tokens, tokens per second, operations and their share of the peak

Samples are counted whole, so schedules, which are functions of the number of samples, do not depend on padding.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from megatron.core.datasets.indexed_dataset import DataError, IndexedDataset, open_token_mask

PADDING_MASK = "padding_mask"


@runtime_checkable
class MarksPadding(Protocol):
    """Interface of data sets and iterators that know whether their samples contain a padding_mask."""

    @property
    def has_padding_mask(self) -> bool: ...


def marks_padding(source: Any) -> bool:
    """Returns whether the samples of a data set, or the batches of an iterator, contain a padding_mask.

    Objects without the attribute has_padding_mask have none.
    """
    return isinstance(source, MarksPadding) and source.has_padding_mask


def padding_mask_prefix(path_prefix: str) -> str:
    """Returns the prefix of the padding-mask files for the tokens at `path_prefix`."""
    return path_prefix + "_padding_mask"


def open_padding_mask(path_prefix: str | None, lengths: np.ndarray, *, mmap: bool) -> IndexedDataset | None:
    """Opens the padding masks of the tokens at `path_prefix`, or returns None if there are none.

    A mask has one uint8 per token: 1 for padding, otherwise 0. Arguments and errors as for open_loss_mask.
    """
    if path_prefix is None:
        return None
    return open_token_mask(padding_mask_prefix(path_prefix), path_prefix, lengths, mmap=mmap, kind="padding masks")


def check_padding_mask(mask: np.ndarray, where: str) -> None:
    """Raises DataError if a padding mask contains values other than 0 and 1. mask: [S], uint8."""
    if mask.max(initial=0) > 1:
        raise DataError(f"the padding mask of {where} contains {int(mask.max())}: must be 0 or 1")


def exclude_padding(sample: dict[str, Tensor], padding: np.ndarray) -> None:
    """Adds padding_mask, [S], bool, to a sample, and sets its loss_mask to 0 where the input or label is padding.

    padding: [S + 1], bool, of the sample's inputs and the token that follows.
    """
    sample[PADDING_MASK] = torch.from_numpy(padding[:-1].copy())
    sample["loss_mask"].masked_fill_(torch.from_numpy(padding[:-1] | padding[1:]), 0.0)


@dataclass(frozen=True)
class PaddingCount:
    """Padding of whole samples.

    tokens: number of padding tokens. squares: sum over samples of S^2 - n^2 for n tokens that are not padding, to which
    the omitted operations of attention scores are proportional.
    """

    tokens: int = 0
    squares: int = 0

    def __add__(self, other: "PaddingCount") -> "PaddingCount":
        return PaddingCount(self.tokens + other.tokens, self.squares + other.squares)


NO_PADDING = PaddingCount()


def count_padding_sync(batch: Any) -> PaddingCount:
    """Counts the padding of a batch of whole samples. NOTE: reads the device if the script's mask is not on the CPU.

    batch: any object. Only a dict can contain a padding_mask: [B, S], bool.
    """
    mask = batch.get(PADDING_MASK) if isinstance(batch, dict) else None
    if mask is None:
        return NO_PADDING
    length = mask.shape[-1]
    padded = mask.sum(dim=-1).reshape(-1).tolist()
    return PaddingCount(sum(padded), sum(length * length - (length - one) ** 2 for one in padded))
