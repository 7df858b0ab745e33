"""Helpers that Megatron users import from here; no others belong in this file."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.profiler import record_function


class ModelWrapper(nn.Module):
    """Base class of wrappers, which run another module and are not part of the model.

    State dicts have the parameter names of the wrapped model.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the state of the model: tensors of any shape and dtype by name.

        Within the state dict of an outer module, names have that module's prefix and include `module`.
        """
        # An outer module passes the destination, and loads this part under the name `module`.
        is_part = bool(args) or kwargs.get("destination") is not None
        return super().state_dict(*args, **kwargs) if is_part else self.module.state_dict(**kwargs)

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> Any:
        """Returns `state_dict`, under the name that Megatron's scripts call."""
        return self.state_dict(prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Loads a state dict of the model: tensors of any shape and dtype. Further arguments are those of torch."""
        return self.module.load_state_dict(state_dict, *args, **kwargs)


def divide(numerator: int, denominator: int) -> int:
    """Returns the exact quotient. Raises ValueError if there is a remainder."""
    if denominator <= 0 or numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")
    return numerator // denominator


def unwrap_model(model: nn.Module | list[nn.Module]) -> Any:
    """Returns the model, or each model of a list, without ModelWrappers and torch's DistributedDataParallel."""
    if isinstance(model, list):
        return [unwrap_model(chunk) for chunk in model]
    # Tested by class, since a user's model may have a part named `module`.
    while isinstance(model, (ModelWrapper, TorchDistributedDataParallel)):
        model = model.module
    return model


def get_attr_wrapped_model(
    model: nn.Module, attr: str, *, allow_none: bool = True, return_model_obj: bool = False
) -> Any:
    """Returns `attr` of the outermost wrapper that has it, or of the model; None if none has it.

    allow_none: whether a value of None counts. return_model_obj: return the object that has the attribute instead.
    Raises ValueError for a list of models.
    """
    if isinstance(model, list):
        raise ValueError("get_attr_wrapped_model was given a list of models: must be one of them")
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
    """Marks the parts of a forward step in traces of torch's profiler, where Megatron-LM's scripts time them.

    `with stimer(bdata=True):` around reading a batch, `with stimer:` around the model. --log-straggler measures the
    ranks' times without these marks, so they need not be in a script.
    """

    def __init__(self) -> None:
        self._next = "forward"
        self._open: list[record_function] = []

    def __call__(self, bdata: bool = False) -> "StragglerDetector":
        """Names the range that is entered next; bdata: it reads a batch."""
        self._next = "batch" if bdata else "forward"
        return self

    def __enter__(self) -> "StragglerDetector":
        self._open.append(record_function(self._next))
        self._open[-1].__enter__()
        self._next = "forward"
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.pop().__exit__(*error)
