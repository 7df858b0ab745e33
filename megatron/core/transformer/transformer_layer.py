"""One transformer layer: attention and feed-forward, each with a preceding norm and a residual connection."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megatron.core.config_field import require_defaults
from megatron.core.dist_checkpointing.mapping import BoxesOfTensor, ShardedTensor
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import existing_process_groups
from megatron.core.pipeline_placement import configured_placement
from megatron.core.process_groups_config import ProcessGroupCollection, group_rank, or_alone
from megatron.core.tensor_parallel.random import numbers_of_each_rank
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.module import GraphableMegatronModule, is_expert_layer
from megatron.core.transformer.pipeline_split import layer_offset, layers_per_part
from megatron.core.transformer.recompute import Drawing
from megatron.core.transformer.rope import RotaryTable
from megatron.core.transformer.spec_utils import accepted_by, build_module, build_offering, needed_by
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class TransformerLayerSubmodules:
    """Specs of a layer's parts, in execution order. IdentityOp omits a part.

    Cross-attention and hyper-connections are not supported and must be omitted. sharded_state_dict_keys_map: maps
    prefixes of parameter names to their replacements in sharded_state_dict.
    """

    input_layernorm: Any = IdentityOp
    self_attention_hyper_connection: Any = IdentityOp
    self_attention: Any = IdentityOp
    self_attn_bda: Any = IdentityFuncOp
    pre_cross_attn_layernorm: Any = IdentityOp
    cross_attention_hyper_connection: Any = IdentityOp
    cross_attention: Any = IdentityOp
    cross_attn_bda: Any = IdentityFuncOp
    pre_mlp_layernorm: Any = IdentityOp
    mlp_hyper_connection: Any = IdentityOp
    mlp: Any = IdentityOp
    mlp_bda: Any = IdentityFuncOp
    sharded_state_dict_keys_map: dict[str, str] = field(default_factory=dict)


# Arguments of an attention layer's forward for inference serving and cross-attention. Modules written for Megatron may
# require some of them.
_ALWAYS_NONE = dict.fromkeys(
    (
        "key_value_states",
        "inference_context",
        "rotary_pos_cos",
        "rotary_pos_sin",
        "rotary_pos_cos_sin",
        "attention_bias",
        "sequence_len_offset",
        "inference_params",
    )
)


def get_transformer_layer_offset(
    config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> int:
    """Returns the number of layers that precede a chunk in the model.

    vp_stage: index of the chunk in its stage; None means the only chunk. pp_rank: None means the rank of this
    process. Raises ValueError for a stage or chunk that does not exist.
    """
    counts = layers_per_part(config, num_layers=config.num_layers)
    return layer_offset(counts, part_of_model(config, vp_stage, pp_rank=pp_rank))


def part_of_model(config: TransformerConfig, vp_stage: int | None, *, pp_rank: int | None) -> int:
    """Returns the index of a chunk among the chunks of all stages, ordered by their layers; see pipeline_split.py."""
    stages, chunks = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    stage = group_rank(existing_process_groups().pp) if pp_rank is None else pp_rank
    if not 0 <= stage < stages or not 0 <= (vp_stage or 0) < (chunks or 1):
        raise ValueError(
            f"stage {stage} and vp_stage {vp_stage}: must be below pipeline_model_parallel_size ({stages}) and "
            f"virtual_pipeline_model_parallel_size ({chunks})"
        )
    if vp_stage is None and (chunks or 1) > 1:
        raise ValueError(f"vp_stage is None: must be set with virtual_pipeline_model_parallel_size {chunks}")
    return configured_placement(config).part_of(stage, vp_stage or 0)


class TransformerLayer(GraphableMegatronModule, Drawing):
    """Computes x + attention(norm(x)), then x + mlp(norm(x)), where mlp may be a mixture of experts."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int = 1,
        hidden_dropout: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
        is_mtp_layer: bool = False,
        add_layer_offset: bool = True,
        pp_layer_offset: int | None = None,
        name: str | None = None,
    ) -> None:
        """Builds the parts of the layer.

        layer_number: number of the layer, starting at 1, within the chunk, or with add_layer_offset=False within the
        model. The attribute layer_number is always the number within the model. pp_layer_offset: number of layers
        before the chunk; None means the result of get_transformer_layer_offset. pg_collection: this rank's groups; None
        means the groups of parallel_state, if they exist. vp_stage: index of the chunk in its stage. is_mtp_layer:
        passed to the feed-forward part, as is the number of the layer. name: accepted without effect.
        """
        super().__init__(config, vp_stage)
        groups = pg_collection or existing_process_groups()
        _require_decoder_layer(submodules)
        if add_layer_offset:
            pp_rank = group_rank(groups.pp)
            if pp_layer_offset is None:
                pp_layer_offset = get_transformer_layer_offset(config, vp_stage, pp_rank)
            layer_number += pp_layer_offset
        self.layer_number, self.is_mtp_layer = layer_number, is_mtp_layer
        self.keys_map = submodules.sharded_state_dict_keys_map
        self.hidden_dropout = config.hidden_dropout if hidden_dropout is None else hidden_dropout
        # Ranks with different parts of the sequence must drop different elements. Ranks that all hold the whole
        # sequence must drop the same elements.
        split_over = groups.tp if config.sequence_parallel else None
        self.hidden_numbers = numbers_of_each_rank(split_over, dropout=self.hidden_dropout)
        norm = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.input_layernorm = build_module(submodules.input_layernorm, **norm)
        kind = config.cp_comm_type_of_layer(layer_number)
        self.self_attention = build_offering(
            submodules.self_attention,
            {"pg_collection": groups, "cp_comm_type": kind},
            config=config,
            layer_number=layer_number,
        )
        # Some attention layers of other projects require arguments that are always None here.
        self.required_nones = needed_by(type(self.self_attention).forward, _ALWAYS_NONE)
        self.self_attn_bda = build_module(submodules.self_attn_bda)
        self.pre_mlp_layernorm = build_module(submodules.pre_mlp_layernorm, **norm)
        offered = {
            "pg_collection": groups,
            "tp_group": or_alone(groups.tp),
            "is_mtp_layer": is_mtp_layer,
            # A layer of multi-token prediction is built with the number of the last layer, and is not the last one.
            "layer_number": None if is_mtp_layer else layer_number,
        }
        self.mlp = build_offering(submodules.mlp, offered, config=config)
        self.mlp_takes_padding = bool(accepted_by(type(self.mlp).forward, {"padding_mask": None}))
        self.mlp_bda = build_module(submodules.mlp_bda)

    @property
    def draws_numbers(self) -> bool:
        """Whether dropout is applied to the outputs that are added to the residual stream."""
        return self.hidden_dropout > 0

    def forward(
        self,
        hidden_states: Tensor,
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
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the layer. Returns [S, B, H], config.hidden_dtype, and None in place of a cross-attention context.

        hidden_states: [S, B, H], config.hidden_dtype. attention_mask: bool, True where attention is forbidden, or None.
        padding_mask: [B, S], bool, True for tokens that router losses and loads ignore; they are computed like other
        tokens. Under sequence parallelism, S is this rank's part of the sequence. All other arguments except
        rotary_pos_emb and packed_seq_params must be None. Raises ValueError for a padding_mask if the forward of the
        layer's experts does not accept it.
        """
        others = context, context_mask, rotary_pos_cos, rotary_pos_sin, rotary_pos_cos_sin, attention_bias
        # Counts None in one call, not with a test per argument, because this runs for each layer and micro-batch.
        unused = (*others, inference_context, sequence_len_offset)
        if kwargs or unused.count(None) != len(unused):
            require_unset(
                "TransformerLayer.forward",
                context=context,
                context_mask=context_mask,
                rotary_pos_cos=rotary_pos_cos,
                rotary_pos_sin=rotary_pos_sin,
                rotary_pos_cos_sin=rotary_pos_cos_sin,
                attention_bias=attention_bias,
                inference_context=inference_context,
                sequence_len_offset=sequence_len_offset,
                **kwargs,
            )
        normed, release = self.parts.attn_norm(self.input_layernorm, hidden_states)
        attention_output = self.parts.attn(
            self.self_attention,
            normed,
            attention_mask,
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=packed_seq_params,
            **self.required_nones,
        )
        release(attention_output[0])
        # Called in every forward, because dropout depends on self.training.
        with self.hidden_numbers():
            add = self.self_attn_bda(self.training, False)
            hidden_states = add(attention_output, hidden_states, self.hidden_dropout)
        normed, release = self.parts.mlp_norm(self.pre_mlp_layernorm, hidden_states)
        padding = {} if padding_mask is None else self._padding_of_mlp(padding_mask)
        mlp_output = self.parts.mlp(self.mlp, normed, **padding)
        release(mlp_output[0])
        with self.hidden_numbers():
            output: Tensor = self.mlp_bda(self.training, False)(mlp_output, hidden_states, self.hidden_dropout)
        return output, None

    def _padding_of_mlp(self, padding_mask: Tensor) -> dict[str, Tensor]:
        """Returns padding_mask as a keyword argument if the feed-forward part accepts it. A dense part may not."""
        if self.mlp_takes_padding:
            return {"padding_mask": padding_mask}
        if is_expert_layer(self.mlp):
            raise ValueError(
                f"padding_mask is given but the forward of {type(self.mlp).__name__} does not accept it, so its "
                "router would count padding tokens: add the argument, or do not pass padding_mask"
            )
        return {}

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, ShardedTensor | BoxesOfTensor]:
        """Returns the layer's sharded tensors, any shape and dtype, with names replaced by the keys map of the spec."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        for old, new in self.keys_map.items():
            renamed = [name for name in state if name.startswith(prefix + old)]
            for name in renamed:
                boxes = state.pop(name)
                for box in boxes if isinstance(boxes, list) else [boxes]:
                    box.key = prefix + new + box.key.removeprefix(prefix + old)
                state[prefix + new + name.removeprefix(prefix + old)] = boxes
        return state


def require_unset(call: str, **arguments: Any) -> None:
    """Raises ValueError naming the unsupported arguments of a forward call that are not None."""
    why = "only decoders in training are supported, with a table in rotary_pos_emb and no bias on scores"
    require_defaults(call, why, **{name: (value, None) for name, value in arguments.items()})


def _require_decoder_layer(submodules: TransformerLayerSubmodules) -> None:
    require_defaults(
        "TransformerLayerSubmodules",
        "only decoder layers with one residual stream are supported",
        pre_cross_attn_layernorm=(submodules.pre_cross_attn_layernorm, IdentityOp),
        cross_attention=(submodules.cross_attention, IdentityOp),
        cross_attn_bda=(submodules.cross_attn_bda, IdentityFuncOp),
        self_attention_hyper_connection=(submodules.self_attention_hyper_connection, IdentityOp),
        cross_attention_hyper_connection=(submodules.cross_attention_hyper_connection, IdentityOp),
        mlp_hyper_connection=(submodules.mlp_hyper_connection, IdentityOp),
    )
