"""Settings of DistributedFusedAdam for dtypes, memory and rates, and checks that they are consistent.

This file reads no tensor values and launches no collectives.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.optimizer.adam import Masters, StateForm

# Types of the argument `params` of torch.optim.Optimizer.
Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]]
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# Integer dtypes in which parameters may be sent as raw bits, as in apex.
_RAW_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, kw_only=True)
class AdamMemory:
    """Storage and communication settings of a set of parameters, their gradients and states.

    Fields are named as in DistributedFusedAdam. grad_sync_dtype: None means `dtype`. param_sync_dtype: None means the
    parameters' dtype, and an integer dtype sends the raw bits.
    """

    dtype: torch.dtype = torch.float32
    grad_sync_dtype: torch.dtype | None = None
    param_sync_dtype: torch.dtype | None = None
    contiguous_param_buffer: bool = True
    contiguous_grad_buffer: bool = False
    store_params: bool = True
    store_param_remainders: bool = False
    with_scaled_states: bool = False

    def check(self) -> None:
        """Raises ValueError if the settings contradict each other."""
        for name in ("dtype", "grad_sync_dtype", "param_sync_dtype"):
            value = vars(self)[name]
            allowed = _DTYPES + _RAW_DTYPES if name == "param_sync_dtype" else _DTYPES
            if value is not None and value not in allowed:
                raise ValueError(f"{name} is {value}: must be one of {_names(allowed)}")
        check_switches(
            **{field.name: vars(self)[field.name] for field in dataclasses.fields(self) if field.type is bool}
        )
        if self.store_params and self.store_param_remainders:
            raise ValueError(
                "store_params and store_param_remainders are both True: masters are stored either whole or as "
                "remainders of bf16 parameters, so set only one of them"
            )
        if self.store_param_remainders and self.dtype != torch.float32:
            raise ValueError(
                f"store_param_remainders is True with dtype {self.dtype}: remainders extend bf16 parameters to fp32, "
                "so dtype must be torch.float32"
            )
        if self.store_param_remainders and self._sync_dtype not in (None, torch.bfloat16):
            raise ValueError(
                f"store_param_remainders is True with param_sync_dtype {self.param_sync_dtype}: the parameters are the "
                "upper halves of the masters, so param_sync_dtype must be torch.bfloat16 or None"
            )
        self._check_scales()

    def _check_scales(self) -> None:
        if self.with_scaled_states and self.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"with_scaled_states is True with dtype {self.dtype}: only 16-bit states have scales, so dtype must be "
                "torch.float16 or torch.bfloat16"
            )
        if self.with_scaled_states and not self.store_params:
            raise ValueError("with_scaled_states is True and store_params is False: scaled states require store_params")

    def replaced(self, values: Mapping[str, Any]) -> "AdamMemory":
        """Returns a copy in which some fields are replaced.

        Raises TypeError for unknown names, and the same errors as `check`.
        """
        unknown = sorted(set(values) - set(vars(self)))
        if unknown:
            raise TypeError(
                f"unknown memory settings of a parameter: {', '.join(unknown)}; must be among {', '.join(vars(self))}"
            )
        changed = dataclasses.replace(self, **values)
        changed.check()
        return changed

    def check_param(self, name: str, param: nn.Parameter) -> None:
        """Raises ValueError if a parameter is incompatible with these settings."""
        if param.is_meta or isinstance(param.detach(), DTensor):
            what = "on the meta device" if param.is_meta else "a DTensor"
            raise ValueError(f"{name} is {what}: must be a full tensor with allocated memory, identical on all ranks")
        if param.dtype not in _DTYPES:
            raise ValueError(f"{name} is {param.dtype}: must be one of {_names(_DTYPES)}")
        if self.store_param_remainders and param.dtype != torch.bfloat16:
            raise ValueError(f"{name} is {param.dtype} with store_param_remainders: must be torch.bfloat16")
        given, sync = self.param_sync_dtype, self._sync_dtype
        if given in _RAW_DTYPES and given.itemsize > param.dtype.itemsize:
            raise ValueError(
                f"{name} is {param.dtype} and param_sync_dtype {given}, which has more bytes: must have at most "
                f"{param.dtype.itemsize}, because integers carry the raw bits of parameters"
            )
        if not self.store_params and sync not in (None, param.dtype):
            raise ValueError(
                f"{name} is {param.dtype}, but param_sync_dtype is {sync} and store_params is False: parameters "
                "without masters must be gathered in their dtype. Leave param_sync_dtype unset, or set store_params"
            )

    def grad_dtype(self, param: nn.Parameter) -> torch.dtype:
        """Returns the dtype in which a parameter's gradients are accumulated and reduced."""
        return self.grad_sync_dtype or self._state_dtype(param)

    @property
    def is_flat(self) -> bool:
        """Whether parameters become views of a flat tensor; required for parameters without masters."""
        return self.contiguous_param_buffer or not self.store_params

    def comm_dtype(self, param: nn.Parameter) -> torch.dtype:
        """Returns the all-gather dtype of a parameter."""
        return self._sync_dtype or param.dtype

    @property
    def raw_dtype(self) -> torch.dtype | None:
        """Integer dtype in which raw parameter bits are gathered; None if parameters are gathered as numbers."""
        # Neither NCCL nor gloo sends int16. A gather only copies bits, so bytes work for every integer dtype.
        return torch.uint8 if self.param_sync_dtype in _RAW_DTYPES else None

    @property
    def _sync_dtype(self) -> torch.dtype | None:
        return None if self.raw_dtype is not None else self.param_sync_dtype

    def form(self, param: nn.Parameter) -> StateForm:
        """Returns the storage form of a buffer's states. param: any parameter of the buffer."""
        return StateForm(self._state_dtype(param), self._masters(param), self.with_scaled_states)

    def is_plain(self, param: nn.Parameter) -> bool:
        """Returns whether a parameter's buffer is updated in place, with fp32 (or fp64) states and gradients."""
        form = self.form(param)
        dtypes = {param.dtype, form.dtype, self.grad_dtype(param)}
        return form.masters is Masters.NONE and dtypes in ({torch.float32}, {torch.float64})

    def _masters(self, param: nn.Parameter) -> Masters:
        if self.store_param_remainders:
            return Masters.REMAINDERS
        # A copy would store the same values twice.
        is_same = (
            self.is_flat
            and self.comm_dtype(param) == param.dtype == self._state_dtype(param)
            and not self.with_scaled_states
        )
        return Masters.NONE if is_same or not self.store_params else Masters.COPY

    def _state_dtype(self, param: nn.Parameter) -> torch.dtype:
        # Narrower states would lose the precision of fp64 parameters.
        return torch.float64 if param.dtype == torch.float64 else self.dtype


def check_group(values: Mapping[str, Any]) -> None:
    """Raises ValueError for invalid hyperparameters of a parameter group."""
    lr = values["lr"]
    # The value of a tensor would have to be read from the device.
    if isinstance(lr, torch.Tensor):
        _check(lr.numel() == 1, "lr", value=lr, wanted="a number, or a tensor with one element")
    else:
        _check(_is_at_least_zero(lr), "lr", value=lr, wanted="a number, at least 0")
    check_switches(bias_correction=values["bias_correction"])
    betas = values["betas"]
    is_pair = isinstance(betas, (tuple, list)) and len(betas) == 2
    _check(
        is_pair and all(_is_at_least_zero(beta) and beta < 1 for beta in betas),
        "betas",
        value=betas,
        wanted="two numbers in [0, 1)",
    )
    _check(_is_at_least_zero(values["eps"]), "eps", value=values["eps"], wanted="a number, at least 0")
    for name in ("amsgrad", "maximize"):
        _check(not values.get(name), name, value=values.get(name), wanted="False, or omitted")
    decay = values["weight_decay"]
    _check(_is_at_least_zero(decay), "weight_decay", value=decay, wanted="a number, at least 0")


def _check(holds: bool, name: str, *, value: object, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value!r}: must be {wanted}")


def _is_at_least_zero(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype) for dtype in dtypes)


def as_params(params: nn.Parameter | Iterable[nn.Parameter]) -> Iterable[nn.Parameter]:
    """Wraps a single parameter in a list; returns an iterable of parameters unchanged."""
    # Iterating over a single parameter would yield its rows.
    return [params] if isinstance(params, nn.Parameter) else params


def check_scalars(*, amsgrad: bool, bucket_cap_mb: float, pipeline_size: int) -> None:
    """Raises ValueError if amsgrad is set, or if bucket_cap_mb or pipeline_size is invalid."""
    if amsgrad:
        raise ValueError("amsgrad is True: must be False, because DistributedFusedAdam does not implement it")
    if (
        isinstance(bucket_cap_mb, bool)
        or not isinstance(bucket_cap_mb, (int, float))
        or not 0 < bucket_cap_mb < math.inf
    ):
        raise ValueError(f"bucket_cap_mb is {bucket_cap_mb!r}: must be a finite number of MiB above 0")
    if isinstance(pipeline_size, bool) or not isinstance(pipeline_size, int) or pipeline_size < 1:
        raise ValueError(f"pipeline_size is {pipeline_size!r}: must be a number of buckets, at least 1")


def check_switches(**values: object) -> None:
    """Raises ValueError if a keyword argument is neither True nor False."""
    for name, value in values.items():
        _check(isinstance(value, bool), name, value=value, wanted="True or False")


def check_debug(debug: bool, *, overlap_param_sync: bool) -> None:
    """Raises ValueError if `debug` would have no effect."""
    if debug and not overlap_param_sync:
        raise ValueError("debug is True: requires overlap_param_sync, without which parameters are never stale")


def check_capturable(capturable: bool, memory: AdamMemory) -> None:
    """Raises ValueError for state forms that cannot be captured in a CUDA graph."""
    for name in ("store_param_remainders", "with_scaled_states"):
        if capturable and vars(memory)[name]:
            raise ValueError(f"capturable and {name} are both True: set only one of them")


def as_groups(params: Params) -> list[dict[str, Any]]:
    """Builds parameter groups like torch.optim.Optimizer.

    Raises TypeError if params is a tensor or a module, and ValueError if it is empty or a group lacks its parameters.
    """
    if isinstance(params, (torch.Tensor, nn.Module)):
        raise TypeError(
            f"params is a {type(params).__name__}: must be parameters (model.parameters()), or groups of them"
        )
    given: list[Any] = list(params)
    if not given:
        raise ValueError("params is empty: must contain parameters, or groups of them")
    # Lists, because an iterator can be read only once.
    groups = given if isinstance(given[0], dict) else [{"params": given}]
    for place, group in enumerate(groups):
        if "params" not in group:
            raise ValueError(f"group {place} of params has {', '.join(group)}: must contain its parameters as params")
    return [{**group, "params": _as_list(group["params"])} for group in groups]


def _as_list(params: torch.Tensor | Iterable[Any]) -> list[Any]:
    return [params] if isinstance(params, torch.Tensor) else list(params)


def common_device(groups: Sequence[dict[str, Any]], device: torch.device | None) -> torch.device:
    """Returns the given device, or the device of the first parameter if none is given.

    A device without an index, such as "cuda", also selects the first parameter's device if both have the same type.
    """
    first = next((param for group in groups for param in group["params"]), None)
    if first is None:
        return device or torch.device("cpu")
    found: torch.device = (first[1] if isinstance(first, tuple) else first).device
    if device is None or (device.index is None and device.type == found.type):
        return found
    return device
