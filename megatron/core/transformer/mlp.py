"""The dense feed-forward layer, also used as one expert of SequentialMLP; grouped experts are in moe/experts.py."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.activations import QUICK_GELU_GAIN, quick_gelu
from megatron.core.config_field import require_defaults
from megatron.core.fusions.gated_sigmoid import GatedSigmoid
from megatron.core.logical_tensors import LogicalPiece
from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection, group_rank, group_size, or_alone
from megatron.core.tensor_parallel.param_attributes import param_facts, set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

# (x [*, F_in], bias=[F_in] or None, scale=weight per row [*, 1] or None) -> [*, F], x's dtype
Activation = Callable[..., Tensor]


@dataclass
class MLPSubmodules:
    """Specs of the two projections, and of a module that replaces the activation function, built from config.

    activation_func: takes fc1's output with its bias, [*, F] or, gated, [*, 2F], and returns [*, F]; None means the
    configured function.
    """

    linear_fc1: Any = None
    linear_fc2: Any = None
    activation_func: Any = None


class MLP(MegatronModule):
    """Computes fc2(activation(fc1(x))). With a gated activation, fc1's rows are gate then up, on each rank its part of
    both.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        is_expert: bool = False,
        input_size: int | None = None,
        ffn_hidden_size: int | None = None,
        tp_group: ProcessGroup | None = None,
        name: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """Builds the projections and chooses the activation.

        is_expert: whether each token has a weight, and the ranks are the expert-tensor group. tp_group: the ranks;
        takes precedence over pg_collection. If both are None, the groups of parallel_state are used, if there are any.
        name: accepted without effect.
        """
        super().__init__(config)
        self.ffn_hidden_size = ffn_hidden_size or config.ffn_hidden_size or 4 * config.hidden_size
        self.activation_func = None
        if submodules.activation_func is not None:
            self.activation_func = build_module(submodules.activation_func, config=config)
        self.activation = build_activation(config) if self.activation_func is None else self._by_module
        groups = pg_collection or existing_process_groups()
        self.tp_group = tp_group or or_alone(groups.expt_tp if is_expert else groups.tp)
        shared: dict[str, Any] = {
            "config": config,
            "bias": config.add_bias_linear,
            "skip_bias_add": True,
            "is_expert": is_expert,
            "tp_group": self.tp_group,
        }
        self.linear_fc1 = build_module(
            submodules.linear_fc1,
            input_size or config.hidden_size,
            self.ffn_hidden_size * (2 if config.gated_linear_unit else 1),
            init_method=config.init_method,
            gather_output=False,
            tp_comm_buffer_name="fc1",
            **shared,
        )
        # Found by name, once, because a conversion replaces the parameters by tensors of files, which lack these
        # attributes. The first matrix of an adapter has no rows of gate and up.
        self._gated_names = [
            name
            for name, param in self.linear_fc1.named_parameters()
            if config.gated_linear_unit and param_facts(param).tensor_model_parallel
        ]
        for name in self._gated_names:
            set_tensor_model_parallel_attributes(self.linear_fc1.get_parameter(name), True, 0, 2)
        self.linear_fc2 = build_module(
            submodules.linear_fc2,
            self.ffn_hidden_size,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            tp_comm_buffer_name="fc2",
            **shared,
        )

    @classmethod
    def as_mlp_submodule(
        cls,
        submodules: MLPSubmodules,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None,
        is_mtp_layer: bool,
        is_expert: bool = False,
        input_size: int | None = None,
        ffn_hidden_size: int | None = None,
        name: str | None = None,
    ) -> Self:
        """Builds the feed-forward part of a layer, for specs that are functools.partial(MLP.as_mlp_submodule, specs).

        is_mtp_layer: ignored, because layers that predict further tokens have the same feed-forward part.
        """
        return cls(config, submodules, is_expert, input_size, ffn_hidden_size, name=name, pg_collection=pg_collection)

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the layer; hidden_states: [*, H], parameter dtype; per_token_scale: [*], fp32 or parameter dtype, or
        None.

        Returns [*, H], same dtype, and the bias that is still to be added: [H] (scaled per token: [*, H]), or None.
        kwargs: arguments that callers pass to feed-forward layers of any kind. padding_mask has no effect, because
        padding is computed like other tokens; all others must be None.
        """
        if kwargs:
            why = "a dense layer does not use it"
            require_defaults(
                "MLP.forward", why, **{name: (value, None) for name, value in kwargs.items() if name != "padding_mask"}
            )
        scale = None if per_token_scale is None else per_token_scale.unsqueeze(-1)
        intermediate, bias = self.linear_fc1(hidden_states)  # [*, F] or, gated, [*, 2F]
        output, output_bias = self.linear_fc2(self.activation(intermediate, bias=bias, scale=scale))
        # act * scale went through fc2; the bias that comes after it is scaled here.
        if output_bias is not None and scale is not None:
            output_bias = (output_bias * scale).to(output.dtype)
        return output, output_bias

    def _by_module(self, x: Tensor, *, bias: Tensor | None, scale: Tensor | None) -> Tensor:
        assert self.activation_func is not None
        return _scaled(self.activation_func(x if bias is None else x + bias), scale)

    def logical_pieces(self, prefix: str) -> dict[str, list[LogicalPiece]]:
        """Describes a gated linear_fc1 as two tensors, gate and up: [F, H], and [F] of the bias; F over all ranks."""
        shapes = {name: tuple(self.linear_fc1.get_parameter(name).shape) for name in self._gated_names}
        return {
            f"linear_fc1.{name}": gate_up_pieces(f"{prefix}linear_fc1.{name}", shape, group=self.tp_group)
            for name, shape in shapes.items()
        }


def gate_up_pieces(key: str, shape: tuple[int, ...], *, group: ProcessGroup | None = None) -> list[LogicalPiece]:
    """Returns the first and second half of a [2F, H] or [2F] tensor, as `<key>.gate` and `<key>.up`.

    group: ranks that hold other rows of both; None means this rank alone.
    """
    half = (shape[0] // 2, *shape[1:])
    row = shape[1] if len(shape) == 2 else 1
    stride = (row, 1)[-len(shape) :] if len(shape) == 2 else (1,)
    whole = (half[0] * group_size(group), *half[1:])
    place = (half[0] * group_rank(group), *(0,) * (len(half) - 1))
    return [
        LogicalPiece(f"{key}.{name}", half, stride, offset, whole, place)
        for name, offset in (("gate", 0), ("up", half[0] * row))
    ]


def build_activation(config: TransformerConfig) -> Activation:
    """Builds the configured activation, chosen once."""
    function = config.activation_func
    clamp, offset = config.activation_func_clamp_value, config.glu_linear_offset

    def plain(x: Tensor, *, bias: Tensor | None, scale: Tensor | None) -> Tensor:
        return _scaled(function(x if bias is None else x + bias), scale)

    def gated(x: Tensor, *, bias: Tensor | None, scale: Tensor | None) -> Tensor:
        gate, up = (x if bias is None else x + bias).chunk(2, dim=-1)
        if clamp is not None:
            gate, up = gate.clamp(max=clamp), up.clamp(min=-clamp, max=clamp)
        return _scaled(function(gate) * (up + offset if offset else up), scale)

    if not config.gated_linear_unit:
        return plain
    # The common choices have their own function; others save the tensors that torch saves for them.
    gains = {F.silu: 1.0, quick_gelu: QUICK_GELU_GAIN}
    if function not in gains:
        return gated
    unit = GatedSigmoid(gains[function], clamp, offset)

    def fused(x: Tensor, *, bias: Tensor | None, scale: Tensor | None) -> Tensor:
        return unit(x if bias is None else x + bias, scale)

    return fused


def _scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    # Routing weights are fp32, so the product is rounded back to the activations' dtype.
    return x if scale is None else (x * scale).to(x.dtype)
