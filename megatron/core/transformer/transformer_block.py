"""A stack of transformer layers and the norm after the last; embeddings and output layer belong to the model."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.layer_arrangement import arrange_layers
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.rope import RotaryTable
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class TransformerBlockSubmodules:
    """Specs of the layers, one each, and of the norm after the last (None: no norm)."""

    layer_specs: list[ModuleSpec] = field(default_factory=list)
    layer_norm: Any = None


class TransformerBlock(MegatronModule):
    """The layers of one model chunk."""

    def __init__(
        self,
        config: TransformerConfig,
        spec: TransformerBlockSubmodules,
        *,
        post_layer_norm: bool = True,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """post_layer_norm: apply the norm after the last layer."""
        super().__init__(config)
        if len(spec.layer_specs) != get_num_layers_to_build(config):
            raise ValueError(
                f"the block's spec has {len(spec.layer_specs)} layers: must have {get_num_layers_to_build(config)} "
                "(num_layers)"
            )
        # Layers are numbered over the whole model, whichever part of it this block is.
        offset = get_transformer_layer_offset(config)
        self.layers = nn.ModuleList(
            build_module(layer, config=config, layer_number=offset + index + 1, pg_collection=pg_collection)
            for index, layer in enumerate(spec.layer_specs)
        )
        has_experts = [any(isinstance(module, MoELayer) for module in layer.modules()) for layer in self.layers]
        self.arrangement = arrange_layers(self.layers, config, has_experts=has_experts)
        self.final_layernorm = None
        if post_layer_norm and spec.layer_norm is not None:
            self.final_layernorm = build_module(
                spec.layer_norm, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotary_pos_emb: RotaryTable | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """hidden_states: [S, B, H], parameter dtype; attention_mask: bool, True where attention is forbidden, or None.
        Returns [S, B, H], same dtype.
        """
        self.arrangement.begin()
        for segment in self.arrangement.segments:
            layers = partial(self._run_layers, layers=segment.layers)
            hidden_states = segment.run(
                layers, hidden_states, attention_mask, rotary_pos_emb, packed_seq_params=packed_seq_params
            )
        return hidden_states if self.final_layernorm is None else self.final_layernorm(hidden_states)

    def _run_layers(self, hidden_states: Tensor, *context: Any, layers: range, **packing: Any) -> Tensor:
        for index in layers:
            hidden_states = self.layers[index](hidden_states, *context, **packing)
        return hidden_states


def get_num_layers_to_build(config: TransformerConfig) -> int:
    """Layers of this rank's model chunk."""
    return config.num_layers


def get_transformer_layer_offset(config: TransformerConfig) -> int:
    """Layers of the model before this rank's first."""
    return 0
