"""Provides the tokens that follow each token of a micro-batch, as inputs and labels of multi-token prediction.

Shapes: B micro-batch size; S tokens of each sequence on this rank, in C chunks of W = S / C tokens.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.core.group_collectives import all_gather_rows
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import group_rank, group_size
from megatron.core.transformer.context_parallel import chunks_of_rank


@dataclass(frozen=True)
class FutureToken:
    """The token at a fixed distance ahead of each token, with its position, label and loss weight.

    tokens, positions, labels: [B, S], int64. weights: [B, S], fp32, weight of the label's loss; 0 if the label does not
    exist or belongs to a different document, and on padding. padding: [B, S], bool, True where either of the two tokens
    is padding; None without padding.
    """

    tokens: Tensor
    positions: Tensor
    labels: Tensor
    weights: Tensor
    padding: Tensor | None = None


@dataclass(frozen=True)
class FutureTokens:
    """Tokens up to num_ahead positions ahead of this rank's tokens of a micro-batch.

    input_ids, position_ids, labels: [B, S], int64. loss_mask: [B, S], float; None means all ones. padding_mask: [B, S],
    bool; None means no padding. packed_seq_params, attention_mask: document boundaries, as for GPTModel. cp_group:
    ranks over which sequences are split; calls are collective over this group. Raises ValueError if chunks are shorter
    than num_ahead.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    loss_mask: Tensor | None
    num_ahead: int
    packed_seq_params: PackedSeqParams | None = None
    attention_mask: Tensor | None = None
    cp_group: dist.ProcessGroup | None = None
    padding_mask: Tensor | None = None

    def ahead(self, distance: int) -> FutureToken:
        """Returns the tokens `distance` positions ahead. distance: from 1 to num_ahead."""
        tokens, positions, labels, mask = (self._at(extended, distance) for extended in self._extended)
        weights = torch.where(self._is_in_document(distance) & (labels >= 0), mask, 0)
        padding = self.padding_mask
        if padding is not None:
            padding = padding | self._at(self._with_following(padding), distance)
            weights = weights.masked_fill(padding, 0)
        return FutureToken(tokens, positions, labels.clamp(min=0), weights, padding)

    @cached_property
    def _extended(self) -> tuple[Tensor, ...]:
        # fp32 in every model, because half precision cannot represent large token counts.
        mask = torch.ones_like(self.labels) if self.loss_mask is None else self.loss_mask
        mask = mask.to(torch.float32)
        return tuple(self._with_following(t) for t in (self.input_ids, self.position_ids, self.labels, mask))

    @property
    def _chunks(self) -> list[slice]:
        ranks = group_size(self.cp_group)
        return chunks_of_rank(self.input_ids.shape[1] * ranks, size=ranks, rank=group_rank(self.cp_group))

    def _with_following(self, own: Tensor) -> Tensor:
        """Appends the first num_ahead tokens of the next chunk to each chunk: [B, S] -> [B, C, W + num_ahead]."""
        chunks = own.unflatten(1, (len(self._chunks), -1))
        if len(self._chunks) > 1 and chunks.shape[2] < self.num_ahead:
            raise ValueError(
                f"mtp_num_layers is {self.num_ahead} and context-parallel ranks have chunks of {chunks.shape[2]} "
                "tokens: must be at most the chunk size; use longer sequences or fewer ranks"
            )
        firsts = F.pad(chunks, (0, self.num_ahead - chunks.shape[2]))[..., : self.num_ahead]
        if group_size(self.cp_group) == 1:
            return torch.cat([chunks, torch.zeros_like(firsts)], dim=2)
        # Rank r holds chunks r and 2 * ranks - 1 - r.
        everyone = all_gather_rows(firsts.unsqueeze(0).contiguous(), self.cp_group).wait()  # [ranks, B, 2, num_ahead]
        in_order = torch.cat([everyone[:, :, 0], everyone[:, :, 1].flip(0)])
        in_order = torch.cat([in_order, torch.zeros_like(in_order[:1])])
        rank, ranks = group_rank(self.cp_group), group_size(self.cp_group)
        following = torch.stack([in_order[rank + 1], in_order[2 * ranks - rank]], dim=1)
        return torch.cat([chunks, following], dim=2)

    def _at(self, extended: Tensor, distance: int) -> Tensor:
        return extended[..., distance : extended.shape[2] - self.num_ahead + distance].flatten(1)

    def _is_in_document(self, distance: int) -> Tensor:
        """Returns whether the token at this distance belongs to the same document: [B, S] or [1, S], bool."""
        device, length = self.input_ids.device, self.input_ids.shape[1] * group_size(self.cp_group)
        # Positions in the whole sequence: [1, S].
        here = torch.cat([torch.arange(c.start, c.stop, device=device) for c in self._chunks]).unsqueeze(0)
        there = here + distance
        found = there < length
        if self.packed_seq_params is not None:
            # A token's segment is the number of segments that end at or before it, over the sequences of a batch.
            firsts = torch.arange(len(self.input_ids), device=device).unsqueeze(1) * length
            ends = self.packed_seq_params.borders_on(device)[1:]
            segments = [torch.bucketize(firsts + places, ends, right=True) for places in (here, there)]
            found = found & (segments[0] == segments[1])
        if self.attention_mask is not None:
            # [B or 1, S, S], True where forbidden. A token attends only to earlier tokens of its document.
            mask = self.attention_mask.expand(*self.attention_mask.shape[:-2], length, length)
            forbidden = mask.reshape(-1, length, length).diagonal(-distance, dim1=1, dim2=2)
            found = found & ~F.pad(forbidden, (0, distance), value=True)[:, :length]
        return found
