"""PackedParams: gathers the weights of experts in 8 bits (--fp8-param-gather).

Each rank quantizes its shard of a bucket, the ranks gather packed rows (format.py of block_scaled), and each rank
decodes the shards of the other ranks into its parameters. Experts that quantize these again obtain the same numbers as
without the flag, because the scales are powers of two. A rank's own shard keeps the rounded masters, so that replicas
differ until DistributedDataParallel.restore_params gathers them as they are, before a checkpoint for example.

A square block must not extend over two shards, since its scale depends on all of its elements.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron.core.block_scaled.format import SquareBlocks
from megatron.core.block_scaled.operators import dequantize_rows, quantize_weight
from megatron.core.distributed.layout import ParamRange, Span
from megatron.core.process_groups_config import group_rank, group_size
from megatron.core.tensor_parallel.param_attributes import square_blocks_of


class _Piece(NamedTuple):
    """A range of a weight in one shard, and the place of its packed rows in the message of the shard."""

    part: ParamRange
    blocks: SquareBlocks
    place: slice

    def rows_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns the rows of the range: [N] -> [rows, width], a view."""
        return self.part.view_of(flat).view(-1, self.blocks.width)

    def packed_of(self, shard: torch.Tensor) -> torch.Tensor:
        """Returns the packed rows: [bytes of a shard] -> [rows, row_bytes(width)], uint8, a view."""
        return shard[self.place].view(-1, self.blocks.form.row_bytes(self.blocks.width))


class PackedParams:
    """Builds and decodes the message in which a bucket's weights are gathered: `message`, a gather, then `unpack`.

    It has equal parts for all ranks, each as long as the largest shard.
    """

    def __init__(self, ranges: list[ParamRange], *, group: dist.ProcessGroup | None, numel: int) -> None:
        """Computes the places of all shards' weights in the message.

        ranges: the bucket's weights, with which modules compute in 8 bits. numel: elements of the bucket. Raises
        ValueError, on all ranks, if a shard ends within a square block.
        """
        self._rank, ranks = group_rank(group), group_size(group)
        size = numel // ranks
        self._shards = [_pieces(ranges, Span(rank * size, size), rank=rank) for rank in range(ranks)]
        self._shard_bytes = max(pieces[-1].place.stop if pieces else 0 for pieces in self._shards)
        self._message: torch.Tensor | None = None

    @torch.no_grad()
    def message(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns the message, which contains this rank's shard: [ranks * bytes of a shard], uint8.

        flat: the bucket's parameters, [N], bf16 or fp32.
        """
        shards = torch.empty(len(self._shards), self._shard_bytes, dtype=torch.uint8, device=flat.device)
        self._message = shards
        for piece in self._shards[self._rank]:
            rows, packed = piece.rows_of(flat), piece.packed_of(shards[self._rank])
            for some in _by_matrix(piece):
                matrices = rows[some].view(-1, min(some.stop - some.start, piece.blocks.height), rows.shape[1])
                quantize_weight(matrices, piece.blocks.form, out=packed[some].view(*matrices.shape[:2], -1))
        return shards.view(-1)

    @torch.no_grad()
    def unpack(self, flat: torch.Tensor) -> None:
        """Decodes the gathered parameters of the other ranks, and frees the message. flat: [N], bf16 or fp32."""
        if self._message is None:
            return
        shards, self._message = self._message, None
        for rank, (shard, pieces) in enumerate(zip(shards, self._shards, strict=True)):
            for piece in pieces if rank != self._rank else ():
                dequantize_rows(piece.packed_of(shard), piece.blocks.form, out=piece.rows_of(flat))


def _pieces(ranges: list[ParamRange], shard: Span, *, rank: int) -> list[_Piece]:
    """Returns the ranges of weights in a shard of a bucket, with their places in the shard's message."""
    pieces, first = list[_Piece](), 0
    for whole in ranges:
        span = whole.span.intersection(shard)
        if span.numel:
            part = ParamRange(whole.name, whole.param, span, whole.start + span.start - whole.span.start)
            blocks = square_blocks_of(part.param)
            _check_cuts(part, blocks, rank=rank)
            num_bytes = span.numel // blocks.width * blocks.form.row_bytes(blocks.width)
            pieces.append(_Piece(part, blocks, slice(first, first + num_bytes)))
            first += num_bytes
    return pieces


def _by_matrix(piece: _Piece) -> list[slice]:
    """Splits the rows of a piece into the end of a matrix, whole matrices, and the start of one, where it has them."""
    height, first = piece.blocks.height, piece.part.start // piece.blocks.width
    count = piece.part.span.numel // piece.blocks.width
    head = min(-first % height, count)
    cuts = (0, head, count - (count - head) % height, count)
    return [slice(start, end) for start, end in zip(cuts, cuts[1:], strict=False) if end > start]


def _check_cuts(part: ParamRange, blocks: SquareBlocks, *, rank: int) -> None:
    matrix, step = blocks.height * blocks.width, blocks.form.block * blocks.width
    where = f"at a multiple of {step} elements, the rows of a square block" if step < matrix else "at its beginning"
    for cut in (part.start, part.start + part.span.numel):
        if cut % matrix % step:
            raise ValueError(
                f"fp8_param_gather (--fp8-param-gather) is True, but the shard of rank {rank} begins or ends at "
                f"element {cut % matrix} of a matrix of {part.name}, [{blocks.height}, {blocks.width}], and must do so "
                f"{where}: use another number of data-parallel ranks of the experts, other buckets "
                "(--ddp-bucket-size, --ddp-num-buckets), or omit it"
            )
