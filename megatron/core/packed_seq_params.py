"""Borders of the documents that are packed into a micro-batch; what attention does with them is not here."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(kw_only=True)
class PackedSeqParams:
    """Segments of a micro-batch's B * S tokens, counted sample after sample; a token attends within its segment.

    cu_seqlens_q: [n + 1], int32, on the CPU: 0, the end of each segment, B * S. Every sample's end is a border. Tokens
    stay where they are, in [S, B, H]: nothing is removed or moved.
    cu_seqlens_kv, max_seqlen_kv: those of the queries, as self-attention has no others; unset: taken from there.
    max_seqlen_q: length of the longest segment; unset: counted.
    segment_lengths: of every segment with tokens, in order.
    """

    qkv_format: str = "thd"
    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    segment_lengths: list[int] = field(init=False)
    _device_borders: Tensor | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        if self.qkv_format != "thd":
            raise ValueError(f"qkv_format is {self.qkv_format!r}: must be 'thd', borders by cu_seqlens_q")
        # NOTE: read once per micro-batch; borders on a GPU would make the host wait here.
        borders = self.cu_seqlens_q.tolist()
        if self.cu_seqlens_kv is None:
            self.cu_seqlens_kv = self.cu_seqlens_q
        elif self.cu_seqlens_kv.tolist() != borders:
            raise ValueError("cu_seqlens_kv differs from cu_seqlens_q: self-attention has one set of borders")
        lengths = [end - start for start, end in zip(borders, borders[1:], strict=False)]
        if not lengths or borders[0] != 0 or min(lengths) < 0:
            raise ValueError(f"cu_seqlens_q is {borders}: must start at 0 and ascend")
        self.segment_lengths = [length for length in lengths if length]
        if self.max_seqlen_q is None:
            self.max_seqlen_q = max(lengths)
        # A kernel told too little would leave out the rest without a word.
        if self.max_seqlen_q < max(lengths):
            raise ValueError(f"max_seqlen_q is {self.max_seqlen_q}: must be the longest segment's {max(lengths)}")
        if self.max_seqlen_kv is None:
            self.max_seqlen_kv = self.max_seqlen_q

    @property
    def longest(self) -> int:
        """Tokens of the longest segment."""
        assert self.max_seqlen_q is not None
        return self.max_seqlen_q

    def require_samples(self, batch: int, seq_length: int) -> None:
        """Raises ValueError unless the borders cut up `batch` samples of `seq_length` tokens each."""
        position = 0
        for length in self.segment_lengths:
            if position % seq_length + length > seq_length:
                raise ValueError(
                    f"cu_seqlens_q has a segment from token {position} to {position + length}: "
                    f"must end with its sample, all of which have {seq_length} tokens"
                )
            position += length
        if position != batch * seq_length:
            raise ValueError(
                f"cu_seqlens_q ends at {position}: must end at micro-batch {batch} x sequence {seq_length}"
            )

    def borders_on(self, device: torch.device) -> Tensor:
        """cu_seqlens_q: [n + 1], int32, on `device`; copied once, for all layers."""
        if self._device_borders is None or self._device_borders.device != device:
            self._device_borders = self.cu_seqlens_q.to(device=device, dtype=torch.int32, non_blocking=True)
        return self._device_borders
