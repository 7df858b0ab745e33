"""Memory order of dense parameters: contiguous, channels_last or transposed.

Flat buffers store elements in this order, so that parameters keep their layouts without copies. Checkpoints store the
logical order; see logical_tensors.py.
"""

from collections.abc import Iterable

import torch
from torch import nn

from megatron.core.device.torch_internals import DisableTorchFunctionSubclass


def memory_order(tensor: torch.Tensor) -> list[int]:
    """Returns the dimensions of a tensor, sorted from the largest to the smallest stride.

    tensor: any shape and dtype.
    """
    # The stride of a dimension of size 1 has no meaning.
    return sorted(range(tensor.dim()), key=lambda dim: (tensor.shape[dim] > 1, -tensor.stride()[dim]))


def is_dense(tensor: torch.Tensor) -> bool:
    """Returns whether the elements of a tensor fill its memory without gaps or overlaps.

    tensor: any shape and dtype.
    """
    expected = 1
    for dim in reversed(memory_order(tensor)):
        if tensor.shape[dim] > 1:
            if tensor.stride(dim) != expected:
                return False
            expected *= tensor.shape[dim]
    return True


def check_dense(name: str, param: nn.Parameter) -> None:
    """Raises ValueError if a parameter is not dense. Flat buffers can store only dense parameters."""
    if param.numel() and not is_dense(param):
        raise ValueError(
            f"{name} has shape {tuple(param.shape)} and strides {param.stride()}: must be dense and without "
            "overlaps (contiguous, channels_last, transposed); convert it with param.data = param.data.contiguous()"
        )


def check_apart(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises ValueError if a tensor that requires grad shares memory with a different tensor in `named`.

    The sharing would be lost when a parameter is moved into a flat buffer or sharded. named: pairs of a name and a
    tensor of any shape and dtype, on any device.
    """
    # Tensor subclasses may forbid reading values, but addresses are allowed.
    with DisableTorchFunctionSubclass():
        _check_apart(named)


def _check_apart(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    # Tensors without elements and meta tensors have no memory.
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
            if (tensor.requires_grad or other.requires_grad) and _share_bytes(tensor, other):
                raise ValueError(
                    f"{name} and {other_name} share memory, and would no longer share it in training: must be one "
                    "nn.Parameter under both names (b.weight = a.weight), or have separate memory (param.data = "
                    "param.data.clone())"
                )


def _end(tensor: torch.Tensor) -> int:
    """Returns the address just past the last element in memory."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr() + reach * tensor.element_size()


def _share_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two tensors with overlapping address ranges share at least one byte.

    Different columns of one matrix, for example, share none. Allocates one byte of host memory for each byte that the
    two ranges span.
    """
    first = min(one.data_ptr(), other.data_ptr())
    taken = torch.zeros(max(_end(one), _end(other)) - first, dtype=torch.bool, device="cpu")
    _bytes_of(taken, one, start=one.data_ptr() - first).fill_(True)
    return bool(_bytes_of(taken, other, start=other.data_ptr() - first).any())


def _bytes_of(memory: torch.Tensor, tensor: torch.Tensor, *, start: int) -> torch.Tensor:
    size = tensor.element_size()
    return memory.as_strided((*tensor.shape, size), (*(stride * size for stride in tensor.stride()), 1), start)


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the strides of a dense copy of `tensor` with the same memory order.

    tensor: any shape and dtype.
    """
    # Strides of dimensions of size 1 are kept, so that the copy reports the same strides.
    strides, step = list(tensor.stride()), 1
    for dim in reversed(memory_order(tensor)):
        if tensor.shape[dim] > 1:
            strides[dim] = step
            step *= tensor.shape[dim]
    return tuple(strides)


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a 1-D view of a dense tensor, in memory order.

    tensor: any shape and dtype. Returns [numel], same dtype. Writes to the view do not change the tensor's `_version`.
    """
    return tensor.data.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def shaped_view(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns a view of `flat` with the shape and memory order of `like`.

    flat: [numel], any dtype, contiguous.
    """
    return flat.as_strided(like.shape, dense_strides(like), flat.storage_offset())


def in_order_of(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Flattens `values` in the memory order of `like`.

    values: the shape of `like`, any dtype and layout. Returns [numel], same dtype: a view if both tensors have the same
    memory order, otherwise a copy.
    """
    return values.permute(memory_order(like)).reshape(-1)
