"""Multi-token prediction: layers after the last that predict tokens further ahead (DeepSeek-V3, section 2.2).

Which tokens those are is future_tokens.py's; the embedding, the output layer and the losses are the model's.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection, or_alone
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.layer_arrangement import arrange_layer
from megatron.core.transformer.module import MegatronModule, Run, is_expert_layer, to_residual
from megatron.core.transformer.norms import Norm
from megatron.core.transformer.recompute import LayerRecompute, Recomputed, plan_recompute
from megatron.core.transformer.rope import RotaryTable
from megatron.core.transformer.spec_utils import ModuleSpec, build_module, build_offering
from megatron.core.transformer.transformer_block import output_of
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer


@dataclass
class MultiTokenPredictionLayerSubmodules:
    """Specs of one depth's parts; names as Megatron-Core's."""

    enorm: Any = Norm
    hnorm: Any = Norm
    eh_proj: Any = ColumnParallelLinear
    transformer_layer: Any = None
    layer_norm: Any = Norm


@dataclass
class MultiTokenPredictionBlockSubmodules:
    """Specs of the layers, one a depth."""

    layer_specs: list[ModuleSpec] = field(default_factory=list)


class MultiTokenPredictionLayer(MegatronModule):
    """norm(layer(W [norm(embedding of the token that is k ahead); norm(hidden states)])), of depth k."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MultiTokenPredictionLayerSubmodules,
        *,
        layer_number: int = 1,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """layer_number: the depth, from 1. pg_collection: None: parallel_state's, if there are any."""
        super().__init__(config)
        assert config.init_method is not None
        groups = pg_collection or existing_process_groups()
        self.layer_number, self.tp_group = layer_number, or_alone(groups.tp)
        norm = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.enorm = build_module(submodules.enorm, **norm)
        self.hnorm = build_module(submodules.hnorm, **norm)
        self.eh_proj = build_module(
            submodules.eh_proj,
            2 * config.hidden_size,
            config.hidden_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            tp_group=self.tp_group,
        )
        # Of the kind of the last layer, where kinds go by number.
        self.transformer_layer: TransformerLayer = build_offering(
            submodules.transformer_layer,
            {"is_mtp_layer": True, "add_layer_offset": False},
            config=config,
            layer_number=config.num_layers,
            pg_collection=groups,
        )
        self.transformer_layer.layer_number = config.num_layers + layer_number
        self.final_layernorm = build_module(submodules.layer_norm, **norm)

    def forward(
        self,
        hidden_states: Tensor,
        embedded: Tensor,
        attention_mask: Tensor | None = None,
        rotary_pos_emb: RotaryTable | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        padding_mask: Tensor | None = None,
    ) -> Tensor:
        """hidden_states: [S, B, H], parameter dtype, of the depth before; embedded: [S, B, H], config.hidden_dtype, of
        the tokens that are `layer_number` places ahead; the rest as TransformerLayer's. Returns [S, B, H], parameter
        dtype. Under sequence parallelism all have this rank's part of the sequence.
        """
        joined = torch.cat([self.enorm(embedded), self.hnorm(hidden_states)], dim=-1)
        projected, _ = self.eh_proj(joined)  # [S, B, H / ranks], of the whole sequence
        projected = gather_from_tensor_model_parallel_region(projected, self.tp_group)
        if self.config.sequence_parallel:
            projected = scatter_to_sequence_parallel_region(projected, self.tp_group)
        padding = {} if padding_mask is None else {"padding_mask": padding_mask}
        output = self.transformer_layer(
            hidden_states=to_residual(projected, self.config),
            attention_mask=attention_mask,
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=packed_seq_params,
            **padding,
        )
        normed: Tensor = self.final_layernorm(output_of(output))
        return normed


class MultiTokenPredictionBlock(MegatronModule):
    """One layer for each token that is predicted beyond the next one, each on top of the one before."""

    def __init__(
        self,
        config: TransformerConfig,
        spec: MultiTokenPredictionBlockSubmodules,
        *,
        layers_before: int,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """layers_before: the transformer layers of the same chunk, which count before these where some are recomputed.
        Raises ValueError where the spec has another number of layers than mtp_num_layers.
        """
        super().__init__(config)
        if len(spec.layer_specs) != config.mtp_num_layers:
            raise ValueError(
                f"the spec of multi-token prediction has {len(spec.layer_specs)} layers: must be mtp_num_layers "
                f"({config.mtp_num_layers})"
            )
        self.layers = nn.ModuleList(
            build_module(layer, config=config, layer_number=depth, pg_collection=pg_collection)
            for depth, layer in enumerate(spec.layer_specs, 1)
        )
        self.runs = self._arranged(layers_before)

    def forward(self, hidden_states: Tensor, embedded: Tensor, *context: Any, depth: int, **packing: Any) -> Tensor:
        """hidden_states, embedded: [S, B, H], as all else as for MultiTokenPredictionLayer.
        Returns the hidden states of one depth, from 1: [S, B, H], parameter dtype.
        """
        output: Tensor = self.runs[depth - 1](self.layers[depth - 1], hidden_states, embedded, *context, **packing)
        return output

    def planned_layers(self) -> Iterator[tuple[TransformerLayer, LayerRecompute]]:
        """Yields the transformer layer of each depth and which of its parts are recomputed."""
        return zip(self._inner_layers, self.plan)

    def recomputed_layers(self) -> list[int]:
        """Numbers in the whole model, from 1, of the layers that run again in backward as a whole."""
        layers = zip(self._inner_layers, self.runs)
        return [layer.layer_number for layer, its in layers if isinstance(its, Recomputed)]

    @property
    def _inner_layers(self) -> list[TransformerLayer]:
        return [layer.transformer_layer for layer in self.layers if isinstance(layer, MultiTokenPredictionLayer)]

    def _arranged(self, layers_before: int) -> list[Run]:
        has_experts = [is_expert_layer(layer.mlp) for layer in self._inner_layers]
        plan = plan_recompute(self.config, [*[False] * layers_before, *has_experts])
        self.plan = plan[layers_before:]
        inner = zip(self._inner_layers, self.layers, self.plan)
        return [arrange_layer(layer, its, inside=outer) for layer, outer, its in inner]
