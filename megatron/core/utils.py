"""Helpers that Megatron users import from this path. Other helpers do not belong in this file."""

import logging
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.profiler import record_function
from torch.torch_version import TorchVersion

from megatron.core.autograd import PlainFunction
from megatron.core.parallel_state import get_expert_tensor_parallel_group, get_tensor_model_parallel_group
from megatron.core.process_groups_config import group_rank, group_size


class ModelWrapper(nn.Module):
    """Base class of wrappers such as DDP, which run a module but are not part of the model.

    State dicts use the parameter names of the wrapped model.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the state dict of the model: tensors of any shape and dtype, by name.

        If an outer module collects its state dict, the names include that module's prefix and `module`.
        """
        # An outer module passes the destination, and later loads these entries under the name `module`.
        is_part = bool(args) or kwargs.get("destination") is not None
        return super().state_dict(*args, **kwargs) if is_part else self.module.state_dict(**kwargs)

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> Any:
        """Returns the result of `state_dict`. Megatron scripts call this name."""
        return self.state_dict(prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Loads a state dict of the model: tensors of any shape and dtype. Further arguments are passed to torch."""
        return self.module.load_state_dict(state_dict, *args, **kwargs)


class NotDivisibleError(ValueError, AssertionError):
    """Raised if a division has a remainder. It is also an AssertionError, which Megatron raises and scripts catch."""


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raises NotDivisibleError unless `numerator` is divisible by `denominator`."""
    if denominator <= 0 or numerator % denominator:
        raise NotDivisibleError(f"{numerator} is not divisible by {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """Returns numerator / denominator as an integer. Raises NotDivisibleError if there is a remainder."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def is_torch_min_version(version: str, check_equality: bool = True) -> bool:
    """Returns whether the torch version is at least `version`, or greater than it if check_equality is False."""
    return _is_min_version(torch.__version__, version, check_equality)


def is_te_min_version(version: str, check_equality: bool = True) -> bool:
    """Returns whether Transformer Engine is installed and its version is at least `version`.

    check_equality: as in is_torch_min_version.
    """
    try:
        installed = metadata.version("transformer_engine")
    except metadata.PackageNotFoundError:
        return False
    return _is_min_version(installed, version, check_equality)


def _is_min_version(installed: str, version: str, check_equality: bool) -> bool:
    # Torch compares versions by their components, so 2.10 is above 2.9.
    found = TorchVersion(installed)
    return bool(found >= version if check_equality else found > version)


def get_pg_size(group: ProcessGroup | None = None) -> int:
    """Returns the number of ranks in `group`, or 1 for None or if torch.distributed is not initialized."""
    return group_size(group) if dist.is_initialized() else 1


def get_pg_rank(group: ProcessGroup | None = None) -> int:
    """Returns the index of this rank in `group`, or 0 for None or if torch.distributed is not initialized."""
    return group_rank(group) if dist.is_initialized() else 0


def get_tensor_model_parallel_group_if_none(
    tp_group: ProcessGroup | None, is_expert: bool = False, check_initialized: bool = True
) -> ProcessGroup | None:
    """Returns `tp_group`, or parallel_state's tensor-parallel group if it is None.

    is_expert: returns the expert-tensor-parallel group instead. check_initialized: raises RuntimeError if the group
    does not exist, instead of returning None. Returns `tp_group` if torch.distributed is not initialized.
    """
    if tp_group is not None or not dist.is_initialized():
        return tp_group
    get_group = get_expert_tensor_parallel_group if is_expert else get_tensor_model_parallel_group
    return get_group(check_initialized=check_initialized)


def log_single_rank(logger: logging.Logger, level: int, msg: object, *args: Any, rank: int = 0, **kwargs: Any) -> None:
    """Logs only on global rank `rank`, or always if torch.distributed is not initialized. args: as in Logger.log."""
    if not dist.is_initialized() or dist.get_rank() == rank:
        logger.log(level, msg, *args, **kwargs)


def make_viewless_tensor(inp: Tensor, requires_grad: bool, keep_graph: bool) -> Tensor:
    """Returns a tensor that shares the memory of `inp` but is not a view, so that the base of `inp` can be freed.

    inp: any shape, any dtype; returned unchanged if it is not a view. keep_graph: whether gradients flow to `inp`; if
    False, the result is a leaf with requires_grad.
    """
    if inp._base is None:
        return inp
    if keep_graph:
        viewless: Tensor = _Viewless.apply(inp, requires_grad)
        return viewless
    return _without_base(inp, requires_grad)


class _Viewless(PlainFunction):
    @staticmethod
    def forward(ctx: Any, inp: Tensor, requires_grad: bool) -> Tensor:
        return _without_base(inp, requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _without_base(inp: Tensor, requires_grad: bool) -> Tensor:
    out = torch.empty((1,), dtype=inp.dtype, device=inp.device, requires_grad=requires_grad)
    out.data = inp.data
    return out


def unwrap_model(
    model: nn.Module | list[nn.Module], module_instances: type[nn.Module] | tuple[type[nn.Module], ...] | None = None
) -> Any:
    """Returns the model, or each model of a list, without its wrappers.

    module_instances: wrapper classes, which store the model as `module`; None means ModelWrapper and torch's
    DistributedDataParallel.
    """
    if isinstance(model, list):
        return [unwrap_model(chunk, module_instances) for chunk in model]
    # Tested by class, because a user's model may have a submodule named `module`.
    inner: Any = model
    while isinstance(inner, module_instances or (ModelWrapper, TorchDistributedDataParallel)):
        inner = inner.module
    return inner


def get_attr_wrapped_model(model: nn.Module, attr: str, allow_none: bool = True, return_model_obj: bool = False) -> Any:
    """Returns the attribute `attr` of the outermost wrapper or model that defines it, or None if it is not found.

    allow_none: whether an attribute value of None is accepted. return_model_obj: returns the wrapper or model that
    defines the attribute instead. Raises ValueError for a list of models.
    """
    if isinstance(model, list):
        raise ValueError("get_attr_wrapped_model got a list of models: must be a single model")
    holder: Any = model
    while not hasattr(holder, attr) or (not allow_none and getattr(holder, attr) is None):
        if not isinstance(holder, (ModelWrapper, TorchDistributedDataParallel)):
            return None
        holder = holder.module
    return holder if return_model_obj else getattr(holder, attr)


def get_model_config(model: nn.Module) -> Any:
    """Returns the `config` of a wrapped model."""
    return unwrap_model(model).config


class StragglerDetector:
    """Marks parts of a forward step in torch profiler traces, with the interface that Megatron-LM scripts use.

    Use `with stimer(bdata=True):` around reading a batch and `with stimer:` around the model. --log-straggler does not
    require these marks, so scripts may omit them.
    """

    def __init__(self) -> None:
        self._next = "forward"
        self._open: list[record_function] = []

    def __call__(self, bdata: bool = False) -> "StragglerDetector":
        """Sets the name of the next range. bdata: whether the range covers reading a batch."""
        self._next = "batch" if bdata else "forward"
        return self

    def __enter__(self) -> "StragglerDetector":
        self._open.append(record_function(self._next))
        self._open[-1].__enter__()
        self._next = "forward"
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.pop().__exit__(*error)
