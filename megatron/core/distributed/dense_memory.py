"""Parameters in the order in which their elements lie in memory: plain, channels_last, transposed.

Flat buffers hold this order, so that a layout is neither lost nor paid for with a copy. What is stored in checkpoints
is the logical order, see flat_ranges.py of dist_checkpointing.
"""

import torch
from torch import nn

from megatron.core.dist_checkpointing.logical import LogicalPiece, identity_piece


def memory_order(tensor: torch.Tensor) -> list[int]:
    """The dimensions of a tensor, any shape and dtype, from that which moves farthest in memory to the nearest."""
    # A dimension of one element moves nowhere, whatever its stride says.
    return sorted(range(tensor.dim()), key=lambda dim: (tensor.shape[dim] > 1, -tensor.stride()[dim]))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether each element of a tensor, any shape and dtype, has a place of its own, with no gaps between them."""
    expected = 1
    for dim in reversed(memory_order(tensor)):
        if tensor.shape[dim] > 1:
            if tensor.stride(dim) != expected:
                return False
            expected *= tensor.shape[dim]
    return True


def check_dense(name: str, param: nn.Parameter) -> None:
    """Raises ValueError for a parameter whose memory cannot become a range of a flat buffer."""
    if param.numel() and not is_dense(param):
        raise ValueError(
            f"{name} has shape {tuple(param.shape)} and strides {param.stride()}: must be dense and without "
            "overlaps (contiguous, channels_last, transposed); make it so with .data = .data.contiguous()"
        )


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of a dense copy in the same order of memory: any shape and dtype."""
    # A dimension of one element moves nowhere: what its stride says is kept for who looks at it.
    strides, step = list(tensor.stride()), 1
    for dim in reversed(memory_order(tensor)):
        if tensor.shape[dim] > 1:
            strides[dim] = step
            step *= tensor.shape[dim]
    return tuple(strides)


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor, any shape and dtype, as its memory has it: [numel], the same dtype, a view.

    What is written there does not count as a change of the tensor, as of its `_version`.
    """
    return tensor.data.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def shaped_view(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[numel], any dtype, contiguous, as a tensor of the shape and order of memory of `like`: a view."""
    return flat.as_strided(like.shape, dense_strides(like), flat.storage_offset())


def in_order_of(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`values`, any layout, the shape of `like`, in the order of the memory of `like`: [numel], same dtype.

    A view where the two have one order, else a copy.
    """
    return values.permute(memory_order(like)).reshape(-1)


def memory_piece(key: str, param: torch.Tensor) -> LogicalPiece:
    """How a parameter's memory, any shape, dense layout and dtype, maps to the tensor stored under `key`."""
    piece = identity_piece(key, tuple(param.shape))
    return LogicalPiece(
        key, piece.shape, dense_strides(param), 0, global_shape=piece.global_shape, global_offset=piece.global_offset
    )
