"""Parameters in the order in which their elements lie in memory: plain, channels_last, transposed.

Flat buffers hold this order, so that a layout is neither lost nor paid for with a copy. What is stored in checkpoints
is the logical order, see logical_tensors.py.
"""

from collections.abc import Iterable

import torch
from torch import nn


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


def check_apart(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises ValueError where a parameter that requires grad shares elements with another of these tensors.

    named: tensors of any shape and dtype, on any device, with their names. Moved into a flat buffer, or sharded, a
    parameter would share its elements no more.
    """
    # Addresses may be read of parameters whose values may not.
    with torch._C.DisableTorchFunctionSubclass():
        _check_apart(named)


def _check_apart(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    # Without elements, or on no device, it has no memory.
    held = [
        (name, tensor)
        for name, tensor in named
        if tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_meta)
        and tensor.numel()
        and tensor.data_ptr()
    ]
    held.sort(key=lambda item: (str(item[1].device), item[1].data_ptr()))
    for place, (name, tensor) in enumerate(held):
        for other_name, other in held[place + 1 :]:
            if other.device != tensor.device or other.data_ptr() >= _end(tensor):
                break
            if (tensor.requires_grad or other.requires_grad) and _have_common(tensor, other):
                raise ValueError(
                    f"{name} and {other_name} share memory, and would not once they are trained here: must be one "
                    "nn.Parameter under both names (b.weight = a.weight), or have memory of their own "
                    "(.data = .data.clone())"
                )


def _end(tensor: torch.Tensor) -> int:
    """The address behind the last element in memory; a number, as data_ptr gives the first one's."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr() + reach * tensor.element_size()


def _have_common(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors whose ranges of memory overlap, any shapes and dtypes, have a byte in common.

    Not so where each has other columns of one matrix. Takes a byte of the host for each byte of the two ranges.
    """
    first = min(one.data_ptr(), other.data_ptr())
    taken = torch.zeros(max(_end(one), _end(other)) - first, dtype=torch.bool, device="cpu")
    _bytes_of(taken, one, start=one.data_ptr() - first).fill_(True)
    return bool(_bytes_of(taken, other, start=other.data_ptr() - first).any())


def _bytes_of(memory: torch.Tensor, tensor: torch.Tensor, *, start: int) -> torch.Tensor:
    size = tensor.element_size()
    return memory.as_strided((*tensor.shape, size), (*(stride * size for stride in tensor.stride()), 1), start)


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
