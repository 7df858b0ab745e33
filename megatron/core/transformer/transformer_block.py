"""A stack of transformer layers and the final norm. The embeddings and the output layer belong to the model."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection, group_rank, group_size, require_group_sizes
from megatron.core.transformer.layer_arrangement import arrange_layers
from megatron.core.transformer.module import GraphableMegatronModule, is_expert_layer
from megatron.core.transformer.norms import Norm
from megatron.core.transformer.pipeline_split import layers_per_part
from megatron.core.transformer.rope import RotaryTable
from megatron.core.transformer.spec_utils import ModuleSpec, build_module, build_offering
from megatron.core.transformer.transformer_config import TransformerConfig, require_sizes
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset, part_of_model, require_unset


@dataclass
class TransformerBlockSubmodules:
    """Specs of the layers, one spec per layer, and of the final norm (None: no norm)."""

    layer_specs: list[ModuleSpec] = field(default_factory=list)
    layer_norm: Any = None


class TransformerBlock(GraphableMegatronModule):
    """The transformer layers of one model chunk, and on the last chunk the final norm."""

    def __init__(
        self,
        config: TransformerConfig,
        spec: TransformerBlockSubmodules | ModuleSpec,
        post_layer_norm: bool = True,
        pre_process: bool = True,
        post_process: bool = True,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
    ) -> None:
        """Builds the layers of this chunk.

        spec: specs of all layers of the model, specs of this chunk's layers, or a single spec for every layer.
        post_layer_norm, post_process: both must be True to build the final norm. pre_process: False if the input is
        passed by set_input_tensor. pg_collection: this rank's groups; None means the groups of parallel_state, if they
        exist. vp_stage: index of the chunk in its stage; None means the only chunk. Raises ValueError if the sizes of
        the groups differ from the configuration.
        """
        super().__init__(config, vp_stage)
        spec = block_submodules(spec, config)
        groups = pg_collection or existing_process_groups()
        require_layout(config, groups)
        self.pre_process, self.post_process, self.post_layer_norm = pre_process, post_process, post_layer_norm
        self._input: Tensor | None = None
        pp_rank = group_rank(groups.pp)
        # Layers are numbered over the whole model, not within this block.
        offset = get_transformer_layer_offset(config, vp_stage, pp_rank=pp_rank)
        specs = _specs_of_chunk(
            spec.layer_specs, config, first=offset, count=get_num_layers_to_build(config, vp_stage, pp_rank=pp_rank)
        )
        self.layers = LayerList(
            [
                # Each layer adds the number of layers before this chunk.
                build_offering(
                    layer, {"vp_stage": vp_stage}, config=config, layer_number=index + 1, pg_collection=groups
                )
                for index, layer in enumerate(specs)
            ],
            offset=offset,
        )
        has_experts = [any(map(is_expert_layer, layer.modules())) for layer in self.layers]
        self.arrangement = arrange_layers(self.layers, config, has_experts=has_experts)
        self.final_layernorm = None
        if post_layer_norm and post_process and spec.layer_norm is not None:
            self.final_layernorm = build_module(
                spec.layer_norm, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )

    def forward(
        self,
        hidden_states: Tensor | None,
        attention_mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        rotary_pos_emb: RotaryTable | None = None,
        rotary_pos_cos: Tensor | None = None,
        rotary_pos_sin: Tensor | None = None,
        rotary_pos_cos_sin: Tensor | None = None,
        attention_bias: Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
        sequence_len_offset: Any = None,
        padding_mask: Tensor | None = None,
        extract_layer_indices: set[int] | None = None,
        *,
        inference_params: Any = None,
        dynamic_inference_decode_only: bool | None = None,
    ) -> Tensor:
        """Runs the layers. hidden_states: [S, B, H], config.hidden_dtype, ignored if pre_process is False.

        attention_mask: bool, True where attention is forbidden, or None. padding_mask: see TransformerLayer.forward.
        Returns [S, B, H] in the same dtype, or in the parameter dtype after the final norm. All other arguments except
        rotary_pos_emb and packed_seq_params must be None. Raises ValueError if neither hidden_states nor
        set_input_tensor provides an input.
        """
        others = context, context_mask, rotary_pos_cos, rotary_pos_sin, rotary_pos_cos_sin, attention_bias
        serving = inference_context, sequence_len_offset, inference_params, dynamic_inference_decode_only
        # Counts None in one call instead of a Python test per argument, as in the layers.
        unused = (*others, *serving)
        if unused.count(None) != len(unused) or extract_layer_indices:
            require_unset(
                "TransformerBlock.forward",
                context=context,
                context_mask=context_mask,
                rotary_pos_cos=rotary_pos_cos,
                rotary_pos_sin=rotary_pos_sin,
                rotary_pos_cos_sin=rotary_pos_cos_sin,
                attention_bias=attention_bias,
                inference_context=inference_context,
                sequence_len_offset=sequence_len_offset,
                extract_layer_indices=extract_layer_indices,
                inference_params=inference_params,
                dynamic_inference_decode_only=dynamic_inference_decode_only,
            )
        if not self.pre_process:
            # The reference is dropped now. Otherwise the tensor would live until the next microbatch.
            hidden_states, self._input = self._input, None
        if hidden_states is None:
            raise ValueError("this part of the model has no embedding: call set_input_tensor before each forward")
        # Passed only if given, because an external layer may not accept it.
        padding = {} if padding_mask is None else {"padding_mask": padding_mask}
        self.arrangement.begin()
        for segment in self.arrangement.segments:
            layers = partial(self._run_layers, layers=segment.layers)
            hidden_states = segment.run(
                layers,
                hidden_states,
                attention_mask=attention_mask,
                rotary_pos_emb=rotary_pos_emb,
                packed_seq_params=packed_seq_params,
                **padding,
            )
        return hidden_states if self.final_layernorm is None else self.final_layernorm(hidden_states)

    def set_input_tensor(self, input_tensor: Tensor | None) -> None:
        """Sets the input of the next forward if pre_process is False: [S, B, H], dtype config.hidden_dtype."""
        self._input = input_tensor

    def _run_layers(self, hidden_states: Tensor, *, layers: range, **known: Any) -> Tensor:
        for layer in list(self.layers)[layers.start : layers.stop]:
            hidden_states = output_of(layer(hidden_states=hidden_states, **known))
        return hidden_states


def output_of(result: Any) -> Tensor:
    """Returns the hidden states of a layer's result, which may be a tuple with a context: [S, B, H], any dtype."""
    hidden_states: Tensor = result[0] if isinstance(result, tuple) else result
    return hidden_states


def block_submodules(
    spec: ModuleSpec | TransformerBlockSubmodules, config: TransformerConfig
) -> TransformerBlockSubmodules:
    """Returns the specs of a block's layers and norm. spec: these specs, a block spec, or one spec for all layers."""
    if isinstance(spec, TransformerBlockSubmodules):
        return spec
    if isinstance(spec.submodules, TransformerBlockSubmodules):
        return spec.submodules
    return TransformerBlockSubmodules(layer_specs=[spec] * config.num_layers, layer_norm=Norm)


class LayerList(nn.ModuleList):
    """A ModuleList with submodule names that number layers over the whole model. Indexing starts at 0 in each chunk."""

    def __init__(self, layers: list[nn.Module], *, offset: int) -> None:
        super().__init__()
        self.offset = offset
        for index, layer in enumerate(layers):
            self.add_module(str(offset + index), layer)

    def _get_abs_string_index(self, index: int) -> str:
        """Returns the name under which nn.ModuleList looks up an item."""
        return str(self.offset + int(super()._get_abs_string_index(index)))


def require_layout(config: TransformerConfig, groups: ProcessGroupCollection) -> None:
    """Raises ValueError if the sizes of the groups differ from config, or if config lacks model sizes.

    Tensor-parallel sizes that config leaves at 1 are first set to the group sizes, because scripts of Megatron-LM
    rarely set them. The layers of Megatron-LM only read the groups.
    """
    config.take_tensor_sizes(tp=group_size(groups.tp), expt_tp=group_size(groups.expt_tp))
    names = {"tp": "tensor_model_parallel_size", "cp": "context_parallel_size", "pp": "pipeline_model_parallel_size"}
    require_sizes(config, "num_layers", "hidden_size", "num_attention_heads")
    require_group_sizes(groups, {field: (name, vars(config)[name]) for field, name in names.items()})


def get_num_layers_to_build(config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None) -> int:
    """Returns the number of layers in a model chunk. The arguments are as in get_transformer_layer_offset."""
    counts = layers_per_part(config, num_layers=config.num_layers)
    return counts[part_of_model(config, vp_stage, pp_rank=pp_rank)]


def _specs_of_chunk(specs: list[ModuleSpec], config: TransformerConfig, *, first: int, count: int) -> list[ModuleSpec]:
    if len(specs) == config.num_layers:
        return specs[first : first + count]
    if len(specs) != count:
        raise ValueError(
            f"the block's spec has {len(specs)} layers: must have num_layers ({config.num_layers}), or the {count} "
            "layers of this chunk"
        )
    return specs
