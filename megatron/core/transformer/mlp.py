"""The dense feed-forward layer, which SequentialMLP also uses as an expert. Grouped experts are in moe/experts.py."""

from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.config_field import require_defaults
from megatron.core.fusions.gated_activation import GatedActivation, scaled
from megatron.core.logical_tensors import LogicalPiece
from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection, group_rank, group_size, or_alone
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.tensor_parallel.param_attributes import param_facts, set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class MLPSubmodules:
    """Specs of the two projections, and of an optional module in place of the configured activation function.

    activation_func: built from the config; maps fc1's output plus bias, [*, F] or [*, 2F] if gated, to [*, F]. None
    means the configured function.
    """

    linear_fc1: Any = None
    linear_fc2: Any = None
    activation_func: Any = None


class MLP(MegatronModule):
    """Computes fc2(activation(fc1(x))).

    With a gated activation, the rows of fc1 are this rank's rows of the gate, followed by its rows of up.
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

        is_expert: whether this is an expert, split over the expert-tensor group, with a weight per token. tp_group:
        ranks over which the layer is split; takes precedence over pg_collection. If both are None, uses the groups of
        parallel_state, if they exist. name: accepted without effect.
        """
        super().__init__(config)
        self.ffn_hidden_size = ffn_hidden_size or config.ffn_hidden_size
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
        # Stored by name, because a conversion replaces the parameters with tensors of files, which lack these
        # attributes. Replicated parameters, such as the first matrix of an adapter, have no gate and up rows.
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
        """Builds an MLP. Specs of the form functools.partial(MLP.as_mlp_submodule, submodules) call this constructor.

        is_mtp_layer: ignored, because multi-token prediction layers have the same feed-forward part.
        """
        return cls(config, submodules, is_expert, input_size, ffn_hidden_size, name=name, pg_collection=pg_collection)

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Computes the layer. Returns [*, H], same dtype, and the bias that the caller must add, or None.

        hidden_states: [*, H], parameter dtype. per_token_scale: [*], fp32 or parameter dtype, or None. The returned
        bias is [H], or [*, H] if scaled per token. kwargs: arguments that callers pass to every kind of feed-forward
        layer. padding_mask has no effect, because padding is computed like other tokens. All others must be None.
        """
        if kwargs:
            why = "a dense layer does not use it"
            require_defaults(
                "MLP.forward", why, **{name: (value, None) for name, value in kwargs.items() if name != "padding_mask"}
            )
        intermediate, bias = self.linear_fc1(hidden_states)  # [*, F] or, gated, [*, 2F]
        if bias is not None:
            intermediate = intermediate + bias
        if self._activates_in_fc2:
            # The activation's result is not saved for backward, see tensor_parallel/activated_product.py.
            output, output_bias = self.linear_fc2(intermediate, activation=self.activation, scale=per_token_scale)
        else:
            output, output_bias = self.linear_fc2(self.activation(intermediate, per_token_scale))
        # The activations were scaled before fc2. The output bias still has to be scaled.
        if output_bias is not None and per_token_scale is not None:
            output_bias = (output_bias * per_token_scale.unsqueeze(-1)).to(output.dtype)
        return output, output_bias

    @property
    def _activates_in_fc2(self) -> bool:
        # Other linear layers, such as those with an adapter, multiply their input alone.
        its_forward = getattr(self.linear_fc2.forward, "__func__", None)
        return its_forward is RowParallelLinear.forward and isinstance(self.activation, GatedActivation)

    def _by_module(self, x: Tensor, scale: Tensor | None) -> Tensor:
        assert self.activation_func is not None
        return scaled(self.activation_func(x), scale)

    def logical_pieces(self, prefix: str) -> dict[str, list[LogicalPiece]]:
        """Describes a gated linear_fc1 as stored tensors over all ranks, gate and up: [F, H], or [F] for a bias."""
        shapes = {name: tuple(self.linear_fc1.get_parameter(name).shape) for name in self._gated_names}
        return {
            f"linear_fc1.{name}": gate_up_pieces(f"{prefix}linear_fc1.{name}", shape, group=self.tp_group)
            for name, shape in shapes.items()
        }


def gate_up_pieces(key: str, shape: tuple[int, ...], *, group: ProcessGroup | None = None) -> list[LogicalPiece]:
    """Describes the halves of a [2F, H] or [2F] tensor as pieces of the stored tensors `<key>.gate` and `<key>.up`.

    group: ranks over which the rows of both are split; None means this rank alone.
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


def build_activation(config: TransformerConfig) -> GatedActivation:
    """Returns the configured activation."""
    return GatedActivation(
        config.activation_func,
        config.gated_linear_unit,
        clamp=config.activation_func_clamp_value,
        offset=config.glu_linear_offset,
    )
