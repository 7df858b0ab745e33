"""Helpers that Megatron users import from this path. Other helpers do not belong in this file."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.profiler import record_function


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
