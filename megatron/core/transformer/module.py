"""The base class of layers, the runners of their named parts, and the wrapper that runs a model in half precision."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter
from types import MethodType
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from megatron.core.tensor_parallel.copies import CopiedWithGroups
from megatron.core.tensor_parallel.kept_dtypes import KeepsDtypes, cast_unless_kept
from megatron.core.tensor_parallel.kept_dtypes import mark_keep_in_fp32 as mark_keep_in_fp32  # at its path in Megatron
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import ModelWrapper

# Run(function, *args, **kwargs) returns function(*args, **kwargs).
Run = Callable[..., Any]
# RunAndRelease(function, *args) returns (function(*args), release). The caller calls release(result), where result is a
# tensor computed from the output through which all of its gradients flow. The output must not be read afterwards.
RunAndRelease = Callable[..., tuple[Any, Callable[[Tensor], None]]]


def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns function(*args, **kwargs). This is the default Run of a part."""
    return function(*args, **kwargs)


def run_and_keep(function: Callable[..., Any], *args: Any) -> tuple[Any, Callable[[Tensor], None]]:
    """Returns function(*args) and a release that does nothing, so the output is freed like any other tensor.

    This is the default RunAndRelease of a part. args: tensors of any shape and dtype, or other objects.
    """
    return function(*args), _release_nothing


@dataclass(frozen=True)
class LayerParts:
    """The runners of a layer's named parts, which run a part directly, recomputed, offloaded, or from CUDA graphs.

    The names match --recompute-modules, --offload-modules and --cuda-graph-modules. A layer calls its parts through
    these runners, either explicitly or by the decorator `part`. layer_arrangement.py chooses the runners, except for
    CUDA graphs, which cuda_graphs.py installs.

    attn: the whole attention layer. mla_up_proj: the up projections of latent attention, inside qkv_linear. mlp: the
    whole feed-forward layer, dense or with experts. moe_preprocess: the router and the part of dispatch before rows are
    sent. moe_router: the router alone, inside moe_preprocess. expert_fc1, moe_act: of grouped experts, only the
    saving of tensors: the input and the low-rank product of fc1; gate_up, the weights and the low-rank product of fc2.
    """

    attn_norm: RunAndRelease = run_and_keep
    attn: Run = run
    qkv_linear: Run = run
    mla_up_proj: RunAndRelease = run_and_keep
    core_attn: Run = run
    attn_proj: Run = run
    mlp_norm: RunAndRelease = run_and_keep
    mlp: Run = run
    moe_preprocess: Run = run
    moe_router: Run = run
    experts: Run = run
    expert_fc1: Run = run
    moe_act: Run = run
    shared_experts: Run = run


def _release_nothing(consumed: Tensor) -> None:
    pass


_Layer = TypeVar("_Layer", bound="MegatronModule")
_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")
_Method = Callable[Concatenate[_Layer, _Args], _Result]


def part(name: str) -> Callable[[_Method[_Layer, _Args, _Result]], _Method[_Layer, _Args, _Result]]:
    """Decorates a method as the part `name` of its layer, so that each call goes through this runner of `self.parts`.

    name: a LayerParts field of type Run. A RunAndRelease must be called explicitly, because its caller must call
    `release`. Raises ValueError for any other name when the class is defined.
    """
    runs = [one.name for one in fields(LayerParts) if one.default is run]
    if name not in runs:
        raise ValueError(f"part is {name!r}: must be one of {', '.join(runs)}")
    runner_of = attrgetter(name)

    def decorate(method: _Method[_Layer, _Args, _Result]) -> _Method[_Layer, _Args, _Result]:
        @functools.wraps(method)
        def run_part(self: _Layer, *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
            result: _Result = runner_of(self.parts)(MethodType(method, self), *args, **kwargs)
            return result

        return run_part

    return decorate


class MegatronModule(CopiedWithGroups):
    """An nn.Module that stores the configuration from which it was built.

    has_experts: whether this is a mixture-of-experts layer, whose parts are recomputed and captured separately.
    """

    has_experts: ClassVar[bool] = False

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        # Default runners. A transformer block replaces them with the runners that layer_arrangement.py chooses.
        self.parts = LayerParts()

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Returns `state_dict`, tensors of any shape and dtype. Scripts of Megatron call this method by its name."""
        state: dict[str, Any] = self.state_dict(prefix=prefix, keep_vars=keep_vars)
        return state


class GraphableMegatronModule(MegatronModule):
    """A module with hidden states [S, B, H] as input, whose parts may run as CUDA graphs.

    cuda_graphs.py creates the graphs of all modules of a model chunk together.
    """

    def __init__(self, config: TransformerConfig, vp_stage: int | None = None) -> None:
        """Stores the arguments. vp_stage: index of the model chunk in its pipeline stage; None means the only chunk."""
        super().__init__(config)
        self.vp_stage = vp_stage


def to_residual(hidden_states: Tensor, config: TransformerConfig) -> Tensor:
    """Casts hidden states, [*, H], any float dtype, to config.hidden_dtype if fp32_residual_connection is set."""
    return hidden_states.to(config.hidden_dtype) if config.fp32_residual_connection else hidden_states


def is_expert_layer(module: nn.Module) -> bool:
    """Returns whether a module is a mixture-of-experts layer, of this project or user-defined."""
    return isinstance(module, MegatronModule) and module.has_experts


class Float16Module(ModelWrapper, KeepsDtypes):
    """Runs a model in bf16 or fp16. Casts parameters once, and casts inputs to half precision and outputs to fp32."""

    def __init__(self, config: TransformerConfig, module: nn.Module, *, post_process: bool = True) -> None:
        """Casts the parameters of the model. post_process: False keeps outputs in half precision for the next stage."""
        super().__init__(module)
        self.config, self.dtype = config, half_dtype(config)
        keeps_fp32 = post_process or config.fp32_residual_connection
        self._output_dtype = torch.float32 if keeps_fp32 else self.dtype
        # Buffers keep their dtype, because rotary tables and router statistics are fp32 in every model.
        for parameter in module.parameters():
            parameter.data = cast_unless_kept(parameter, self.dtype).detach()

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Passes the stage's input to the module. input_tensor: any shape, float dtype, or a list of such tensors."""
        model: Any = self.module
        model.set_input_tensor(input_tensor)

    def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> Any:
        """Returns the sharded state dict of the wrapped module: tensors of any shape and dtype."""
        model: Any = self.module
        return model.sharded_state_dict(prefix, *args, **kwargs)

    def forward(self, *inputs: Any, fp32_output: bool = True, **kwargs: Any) -> Any:
        """Runs the module with floating-point arguments cast to half precision, and casts its floating-point outputs.

        Outputs are fp32 on the last stage and with fp32_residual_connection, otherwise half precision. fp32_output:
        False returns them without a cast.
        """
        args = tuple(cast_floating(value, self.dtype) for value in inputs)
        kwargs = {name: cast_floating(value, self.dtype) for name, value in kwargs.items()}
        outputs = self.module(*args, **kwargs)
        if not fp32_output:
            return outputs
        # fp32, because losses and sums over ranks are computed from the outputs.
        if isinstance(outputs, tuple):
            return tuple(cast_floating(value, self._output_dtype) for value in outputs)
        return cast_floating(outputs, self._output_dtype)


def half_dtype(config: TransformerConfig) -> torch.dtype:
    """Returns bf16 or fp16, as configured. Raises ValueError unless exactly one of them is set."""
    if config.bf16 == config.fp16:
        raise ValueError(f"bf16 is {config.bf16} and fp16 is {config.fp16}: exactly one must be set")
    return torch.bfloat16 if config.bf16 else torch.float16


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Casts a floating-point tensor, any shape, to `dtype`. Returns other values unchanged."""
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def convert_module_to_dtype_except_fp32_marked(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Casts all floating-point parameters and buffers except those marked by mark_keep_in_fp32. Returns the module."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = cast_unless_kept(tensor, dtype).detach()
    return module
