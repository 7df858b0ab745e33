"""Base class of modules with a configuration, and the wrapper that runs a model in half precision."""

from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.tensor_parallel.copies import CopiedWithGroups
from megatron.core.transformer.layer_parts import LayerParts
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import ModelWrapper


class MegatronModule(CopiedWithGroups):
    """An nn.Module with the configuration that it was built from."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        # Inside a transformer block, those of its layer: see layer_arrangement.py.
        self.parts = LayerParts()


class Float16Module(ModelWrapper):
    """Runs a model in bf16 or fp16: casts its parameters once, floating inputs on the way in, outputs to fp32."""

    def __init__(self, config: TransformerConfig, module: nn.Module, *, post_process: bool = True) -> None:
        """post_process: False for a part whose outputs go to the next pipeline stage, as they are."""
        super().__init__(module)
        self.config, self.dtype = config, half_dtype(config)
        self._output_dtype = torch.float32 if post_process else self.dtype
        # Buffers keep their dtype: rotary tables and router statistics are fp32 in any model.
        for parameter in module.parameters():
            parameter.data = cast_floating(parameter.data, self.dtype)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Arguments as the module's; floating tensors are cast. Returns its outputs, floating ones cast to fp32."""
        args = tuple(cast_floating(value, self.dtype) for value in args)
        kwargs = {name: cast_floating(value, self.dtype) for name, value in kwargs.items()}
        outputs = self.module(*args, **kwargs)
        # fp32 outputs: what follows (losses, sums over ranks) is not to lose digits.
        if isinstance(outputs, tuple):
            return tuple(cast_floating(value, self._output_dtype) for value in outputs)
        return cast_floating(outputs, self._output_dtype)


def half_dtype(config: TransformerConfig) -> torch.dtype:
    """The half-precision dtype that the flags choose; raises ValueError where neither is set."""
    if config.bf16 == config.fp16:
        raise ValueError(f"bf16 is {config.bf16} and fp16 is {config.fp16}: exactly one must be set")
    return torch.bfloat16 if config.bf16 else torch.float16


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """A floating tensor in `dtype`; anything else as it is. value: any shape -> same shape."""
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
