"""KeepsDtypes: base class of modules whose parameters and buffers can be excluded from casts of the model.

[Note: kept dtypes] Statistics that add up small steps, such as routing biases, sums and counts, stop changing in half
precision, and rotary tables lose the position. A marked tensor never has less precision than its mark: bfloat16(),
half() and to(dtype) of a model leave it as it is, double() widens it, and a later float() returns to the mark. The mark
follows the tensor to other devices, through copies, to_empty(), and state dicts that are assigned.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


def mark_kept_dtype(tensor: Tensor) -> Tensor:
    """Excludes a parameter or buffer, any shape and dtype, from casts to less precision than it has. Returns it."""
    vars(tensor).update(kept_dtype=tensor.dtype)
    return tensor


def mark_keep_in_fp32(tensor: Tensor) -> Tensor:
    """Excludes a parameter or buffer, any shape and dtype, from half-precision casts of the model, and returns it."""
    vars(tensor).update(kept_dtype=torch.float32)
    return tensor


def kept_dtype(tensor: Tensor) -> torch.dtype | None:
    """Returns the least dtype of a marked parameter or buffer, any shape, or None without a mark."""
    dtype: torch.dtype | None = vars(tensor).get("kept_dtype")
    return dtype


def cast_unless_kept(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts a floating-point tensor, any shape, to `dtype` or to its mark, whichever is more precise."""
    return tensor.to(dtype_after_cast(tensor, dtype)) if tensor.is_floating_point() else tensor


def dtype_after_cast(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of a parameter or buffer, any shape, after a cast of its model to `dtype`."""
    kept = kept_dtype(tensor)
    return dtype if kept is None else _wider(kept, dtype)


class KeepsDtypes(nn.Module):
    """A module whose casts respect the marks of its tensors and those of its submodules. See [Note: kept dtypes]."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # torch calls this method for each cast, move and to_empty(), and passes `fn` on to the submodules.
        if isinstance(fn, _Keeping):
            return super()._apply(fn, recurse)
        marks = [(inside, name, kept_dtype(param)) for inside in self.modules() for name, param in _own_tensors(inside)]
        applied = super()._apply(_Keeping(fn, self), recurse)
        # A move to or from the meta device replaces parameters, without their marks.
        for inside, name, kept in marks:
            if kept is not None:
                vars(dict(_own_tensors(inside))[name]).update(kept_dtype=kept)
        return applied

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *args: Any) -> None:
        marks = {name: kept_dtype(tensor) for name, tensor in _own_tensors(self)}
        # Otherwise values are copied, and the destination keeps its dtype.
        if local_metadata.get("assign_to_params_buffers", False):
            for inner, module in self.named_modules(prefix=prefix.removesuffix("."), remove_duplicate=False):
                for name, tensor in _own_tensors(module):
                    key = f"{inner}.{name}" if inner else name
                    if kept_dtype(tensor) is not None and isinstance(state_dict.get(key), Tensor):
                        state_dict[key] = _as_kept(tensor, state_dict[key])
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        for name, loaded in _own_tensors(self):
            if (kept := marks.get(name)) is not None:
                vars(loaded).update(kept_dtype=kept)


def _as_kept(tensor: Tensor, given: Tensor) -> Tensor:
    """Returns `given` as a replacement of a marked parameter or buffer of the same shape, with the mark."""
    kept = vars(tensor)["kept_dtype"]
    given = given.to(_wider(kept, given.dtype))
    if not isinstance(given, nn.Parameter):
        # A new object, because the mark must not be on a tensor of the caller.
        is_param = isinstance(tensor, nn.Parameter)
        given = nn.Parameter(given.detach(), tensor.requires_grad) if is_param else given.detach()
    vars(given).update(kept_dtype=kept)
    return given


def _wider(kept: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """Returns the narrowest dtype with the precision of both."""
    # torch does not promote 8-bit floats.
    if dtype.is_floating_point and dtype.itemsize == 1:
        return kept
    return dtype if kept.is_floating_point and kept.itemsize == 1 else torch.promote_types(kept, dtype)


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters and buffers of a module, without those of its submodules."""
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


class _Keeping:
    """A conversion of tensors that respects their marks."""

    def __init__(self, convert: Callable[[Tensor], Tensor], module: nn.Module) -> None:
        self._convert = convert
        # Gradients have no marks of their own, and must have the dtype of their parameter.
        params = [param for param in module.parameters() if param.grad is not None]
        self._of_grads = {id(param.grad): kept_dtype(param) for param in params}

    def __call__(self, tensor: Tensor) -> Tensor:
        converted = self._convert(tensor)
        kept = self._of_grads.get(id(tensor), kept_dtype(tensor))
        if kept is None:
            return converted
        # nn.Module.type() also converts integers.
        dtype = _wider(kept, converted.dtype) if kept.is_floating_point else kept
        if dtype != converted.dtype:
            # From the values before the conversion, which has rounded them.
            converted = tensor.to(converted.device, dtype)
        if kept_dtype(tensor) is not None:
            vars(converted).update(kept_dtype=kept)
        return converted
