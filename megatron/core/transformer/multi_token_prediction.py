"""Multi-token prediction: additional layers that predict tokens further ahead (DeepSeek-V3, section 2.2).

future_tokens.py provides these tokens. The embedding, the output layer and the losses belong to the model.
"""

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
from megatron.core.transformer.recompute import Recomputed, plan_recompute
from megatron.core.transformer.rope import RotaryTable
from megatron.core.transformer.spec_utils import ModuleSpec, build_module, build_offering
from megatron.core.transformer.transformer_block import output_of
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer


@dataclass
class MultiTokenPredictionLayerSubmodules:
    """Specs of the submodules at one prediction depth, named as in Megatron-Core."""

    enorm: Any = Norm
    hnorm: Any = Norm
    eh_proj: Any = ColumnParallelLinear
    transformer_layer: Any = None
    layer_norm: Any = Norm


@dataclass
class MultiTokenPredictionBlockSubmodules:
    """Specs of the layers, one per prediction depth."""

    layer_specs: list[ModuleSpec] = field(default_factory=list)


class MultiTokenPredictionLayer(MegatronModule):
    """Layer of prediction depth k: norm(layer(W [norm(embedding of the token k ahead); norm(hidden states)]))."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MultiTokenPredictionLayerSubmodules,
        *,
        layer_number: int = 1,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """Builds the submodules.

        layer_number: prediction depth, starting at 1. pg_collection: None means the groups of parallel_state, if they
        exist.
        """
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
        # The number of the last layer, so that settings that depend on it are the same.
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
        """Computes the hidden states of this depth: [S, B, H], parameter dtype.

        hidden_states: [S, B, H], parameter dtype, output of the previous depth. embedded: [S, B, H],
        config.hidden_dtype, embeddings of the tokens `layer_number` positions ahead. The other arguments are as in
        TransformerLayer. Under sequence parallelism, S is this rank's part of the sequence.
        """
        joined = torch.cat([self.enorm(embedded), self.hnorm(hidden_states)], dim=-1)
        projected, _ = self.eh_proj(joined)  # [S, B, H / ranks], the whole sequence
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
    """A chain of layers, one for each token predicted beyond the next one."""

    def __init__(
        self,
        config: TransformerConfig,
        spec: MultiTokenPredictionBlockSubmodules,
        *,
        layers_before: int,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """Builds the layers.

        layers_before: number of transformer layers in the same chunk; they take precedence if only the first layers are
        recomputed. Raises ValueError if the spec does not contain mtp_num_layers layers.
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
        """Runs the layer of one depth and returns its hidden states: [S, B, H], parameter dtype.

        hidden_states, embedded: [S, B, H]. depth: starts at 1. The other arguments are as in MultiTokenPredictionLayer.
        """
        output: Tensor = self.runs[depth - 1](self.layers[depth - 1], hidden_states, embedded, *context, **packing)
        return output

    def recomputed_layers(self) -> dict[int, Recomputed]:
        """Maps the number in the model, starting at 1, of each layer that backward recomputes as a whole to its run."""
        layers = zip(self.transformer_layers(), self.runs)
        return {layer.layer_number: its for layer, its in layers if isinstance(its, Recomputed)}

    def transformer_layers(self) -> list[TransformerLayer]:
        """Returns the transformer layer of each depth."""
        return [layer.transformer_layer for layer in self.layers if isinstance(layer, MultiTokenPredictionLayer)]

    def _arranged(self, layers_before: int) -> list[Run]:
        has_experts = [is_expert_layer(layer.mlp) for layer in self.transformer_layers()]
        plan = plan_recompute(self.config, [*[False] * layers_before, *has_experts])
        self.plan = plan[layers_before:]
        inner = zip(self.transformer_layers(), self.layers, self.plan)
        return [arrange_layer(layer, its, inside=outer) for layer, outer, its in inner]
