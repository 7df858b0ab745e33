"""Document boundaries of packed microbatches. Attention within documents is in transformer/."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(kw_only=True)
class PackedSeqParams:
    """Segments of the B * S tokens of a microbatch, sample by sample. A token attends only within its segment.

    cu_seqlens_q: [n + 1], int32, on the CPU: 0 and the end of each segment, up to B * S. The end of every sample is
    also the end of a segment. Hidden states keep their shape [S, B, H]. cu_seqlens_kv, max_seqlen_kv: equal to the
    queries' values in self-attention, which is the default. max_seqlen_q: length of the longest segment, computed by
    default. segment_lengths: lengths of the non-empty segments, in order.
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
            raise ValueError(f"qkv_format is {self.qkv_format!r}: must be 'thd', with borders in cu_seqlens_q")
        # NOTE: read once per microbatch. If the borders were on a GPU, the host would wait here.
        borders = self.cu_seqlens_q.tolist()
        if self.cu_seqlens_kv is None:
            self.cu_seqlens_kv = self.cu_seqlens_q
        elif self.cu_seqlens_kv.tolist() != borders:
            raise ValueError("cu_seqlens_kv differs from cu_seqlens_q: self-attention requires identical borders")
        lengths = [end - start for start, end in zip(borders, borders[1:], strict=False)]
        if not lengths or borders[0] != 0 or min(lengths) < 0:
            raise ValueError(f"cu_seqlens_q is {borders}: must start at 0 and increase")
        self.segment_lengths = [length for length in lengths if length]
        if self.max_seqlen_q is None:
            self.max_seqlen_q = max(lengths)
        # If the value were too small, a kernel would silently skip tokens.
        if self.max_seqlen_q < max(lengths):
            raise ValueError(
                f"max_seqlen_q is {self.max_seqlen_q}: must be the length of the longest segment, {max(lengths)}"
            )
        if self.max_seqlen_kv is None:
            self.max_seqlen_kv = self.max_seqlen_q

    @property
    def longest(self) -> int:
        """Number of tokens in the longest segment."""
        assert self.max_seqlen_q is not None
        return self.max_seqlen_q

    def require_samples(self, batch: int, seq_length: int) -> None:
        """Raises ValueError unless the segments exactly fill each of `batch` samples of `seq_length` tokens."""
        position = 0
        for length in self.segment_lengths:
            if position % seq_length + length > seq_length:
                raise ValueError(
                    f"cu_seqlens_q contains a segment from token {position} to {position + length}: must not cross the "
                    f"end of a sample, and all samples have {seq_length} tokens"
                )
            position += length
        if position != batch * seq_length:
            raise ValueError(
                f"cu_seqlens_q ends at {position}: must end at micro-batch {batch} x sequence {seq_length}"
            )

    def borders_on(self, device: torch.device) -> Tensor:
        """Returns a copy of cu_seqlens_q on `device`: [n + 1], int32. The copy is reused by all layers."""
        if self._device_borders is None or self._device_borders.device != device:
            self._device_borders = self.cu_seqlens_q.to(device=device, dtype=torch.int32, non_blocking=True)
        return self._device_borders
