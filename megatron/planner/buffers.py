"""How a rank's parameters lie in flat buffers: buckets and padding, from the buffers of the built model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from megatron.core.distributed.data_parallel_base import _BaseDataParallel


@dataclass(frozen=True)
class BufferLayout:
    """One buffer of a model chunk. kind: dense or expert. param_dtype, grad_dtype: names without "torch.".

    bucket_bytes: of each bucket's gradients, with padding, in the order of the buffer. num_bytes: parameters and
    gradients of the whole buffer, with padding; padding_bytes: of these, what belongs to no parameter. bucket_ends: of
    each bucket the names of the parameters that lie first and last in it.
    """

    chunk: int
    kind: str
    param_dtype: str
    grad_dtype: str
    bucket_bytes: tuple[int, ...]
    num_bytes: int
    padding_bytes: int
    bucket_ends: tuple[tuple[str, str], ...] = ()

    @property
    def padding_share(self) -> float:
        """The share of the buffer that is padding, 0 to 1."""
        return self.padding_bytes / self.num_bytes if self.num_bytes else 0.0


def buffer_layouts(model: Sequence[nn.Module]) -> Iterator[BufferLayout]:
    """The buffers of a rank's wrapped chunks, chunk by chunk; none of modules that hold parameters one by one."""
    for number, chunk in enumerate(model):
        if not isinstance(chunk, _BaseDataParallel):
            continue
        for buffer in chunk.all_buffers:
            padding = buffer.layout.numel - sum(span.numel for span in buffer.layout.spans)
            param_size, grad_size = buffer.param_data.dtype.itemsize, buffer.grad_data.dtype.itemsize
            yield BufferLayout(
                number,
                "expert" if buffer.is_expert else "dense",
                str(buffer.param_data.dtype).removeprefix("torch."),
                str(buffer.grad_data.dtype).removeprefix("torch."),
                tuple(bucket.span.numel * grad_size for bucket in buffer.layout.buckets),
                num_bytes=buffer.layout.numel * (param_size + grad_size),
                padding_bytes=padding * (param_size + grad_size),
                bucket_ends=tuple(
                    (buffer.slots[bucket.params[0]].name, buffer.slots[bucket.params[-1]].name)
                    for bucket in buffer.layout.buckets
                ),
            )
