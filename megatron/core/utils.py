"""The few helpers that Megatron users import from here by name; nothing else belongs in this file."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel


class ModelWrapper(nn.Module):
    """Base class of modules that run another, their `module`, and are not part of the model themselves.

    Their state is the model's, under the model's names.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's: tensors of any shape and dtype by name; as a part of another module, with that one's names."""
        # A module that has this one as a part loads it by the name `module`, and hands over where to write.
        is_part = bool(args) or kwargs.get("destination") is not None
        return super().state_dict(*args, **kwargs) if is_part else self.module.state_dict(**kwargs)

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> Any:
        """As `state_dict`."""
        return self.state_dict(prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Loads what the model's own state_dict gave, tensors of any shape and dtype; the rest is torch's."""
        return self.module.load_state_dict(state_dict, *args, **kwargs)


def divide(numerator: int, denominator: int) -> int:
    """Exact quotient; raises ValueError where there is a remainder."""
    if denominator <= 0 or numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")
    return numerator // denominator


def unwrap_model(model: nn.Module | list[nn.Module]) -> Any:
    """The model, or each of a list, without the ModelWrappers and torch's DistributedDataParallel around it."""
    if isinstance(model, list):
        return [unwrap_model(chunk) for chunk in model]
    # By class: a user's model may call one of its own parts `module`.
    while isinstance(model, (ModelWrapper, TorchDistributedDataParallel)):
        model = model.module
    return model


def get_attr_wrapped_model(
    model: nn.Module, attr: str, *, allow_none: bool = True, return_model_obj: bool = False
) -> Any:
    """`attr` of a wrapped model: of the outermost of wrappers and model that has it; None where none has.

    allow_none: a value of None counts as having it. return_model_obj: give what has it instead of the value.
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
    """The `config` of a model, looked up through its wrappers."""
    return unwrap_model(model).config
