"""Attention around a core, and self-attention with grouped queries; masks and kernels live in the core.

What makes queries, keys and values of latent attention is in multi_latent_attention.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.logical import LogicalPiece
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection, group_rank, group_size, or_alone
from megatron.core.tensor_parallel.layers import split_size
from megatron.core.tensor_parallel.param_attributes import mark_partial_gradient
from megatron.core.tensor_parallel.random import numbers_of_each_rank
from megatron.core.transformer.context_parallel_attention import over_ranks
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule, run_and_keep
from megatron.core.transformer.rope import RotaryTable, apply_rotary_pos_emb, split_and_rotate
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.weight_matrices import MatrixWindow

# query [S, B, N, D], key [S, B, G, D], value [S, B, G, E].
QueryKeyValue = tuple[Tensor, Tensor, Tensor]


class Attention(MegatronModule):
    """Queries, keys and values, which subclasses make, through an attention core and an output projection.

    num_heads: what this rank has of the query heads.
    """

    def __init__(
        self, config: TransformerConfig, *, num_heads: int, pg_collection: ProcessGroupCollection | None
    ) -> None:
        super().__init__(config)
        self.groups = pg_collection or existing_process_groups()
        self.tp_group = or_alone(self.groups.tp)
        self.num_heads = split_size(num_heads, self.tp_group, name="num_attention_heads")

    def _build_core(self, spec: Any, *, layer_number: int, attn_mask_type: AttnMaskType, **options: Any) -> None:
        """options: what else the core is to be given."""
        config = self.config
        self.core_attention = build_module(
            spec,
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            pg_collection=self.groups,
            **options,
        )
        self.around_core = over_ranks(self.core_attention, config, layer_number=layer_number, cp_group=self.groups.cp)
        # Each rank has other heads, so other probabilities to drop.
        self.core_numbers = numbers_of_each_rank(self.tp_group, dropout=config.attention_dropout)

    def _build_output(self, spec: Any, input_size: int) -> None:
        self.linear_proj = build_module(
            spec,
            input_size,
            self.config.hidden_size,
            config=self.config,
            init_method=self.config.output_layer_init_method,
            bias=self.config.add_bias_linear,
            # The bias joins the sum into the residual stream: one pass over [S, B, H] less.
            skip_bias_add=True,
            tp_group=self.tp_group,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotary_pos_emb: RotaryTable | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states: [S, B, H], parameter dtype; attention_mask: bool, True where attention is forbidden, or None.
        Returns [S, B, H], same dtype, and the bias [H] that is still to be added, or None. Under sequence parallelism
        both have this rank's part of the sequence.
        """
        tensors, release = self._kept_until_used(hidden_states, rotary_pos_emb)
        # [S, B, N * E]
        context = self.parts.core_attn(self._attend, *tensors, attention_mask, packed_seq_params=packed_seq_params)
        release(context)
        return self.parts.attn_proj(self.linear_proj, context)

    def _attend(self, *tensors: Tensor | None, packed_seq_params: PackedSeqParams | None) -> Tensor:
        # Here and not around the caller: what recompute runs again must draw from the same stream.
        with self.core_numbers():
            return self.around_core(self.core_attention, *tensors, packed_seq_params=packed_seq_params)

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, rotary_pos_emb: RotaryTable | None = None
    ) -> QueryKeyValue:
        """hidden_states: [S, B, H], parameter dtype -> query [S, B, N, D], key [S, B, G, D] and value [S, B, G, E]."""
        raise NotImplementedError

    def _kept_until_used(
        self, hidden_states: Tensor, rotary_pos_emb: RotaryTable | None
    ) -> tuple[QueryKeyValue, Callable[[Tensor], None]]:
        """Them, and what is to be called with the context that was computed from them."""
        return run_and_keep(self.get_query_key_value_tensors, hidden_states, rotary_pos_emb)


@dataclass
class SelfAttentionSubmodules:
    """Specs of the projections, of the attention core, and of norms over queries and keys where there are some."""

    linear_qkv: Any = None
    core_attention: Any = None
    linear_proj: Any = None
    q_layernorm: Any = None
    k_layernorm: Any = None


class SelfAttention(Attention):
    """Rows of linear_qkv come per key/value group: its queries, then its key, then its value.

    Whole groups are split over the tensor-parallel ranks: num_groups is what this rank has.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        *,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config, num_heads=config.num_attention_heads, pg_collection=pg_collection)
        assert config.kv_channels is not None and config.num_query_groups is not None
        self.head_width = config.kv_channels
        self.num_groups = split_size(config.num_query_groups, self.tp_group, name="num_query_groups")
        self.queries_per_group = config.num_attention_heads // config.num_query_groups
        self.linear_qkv = build_module(
            submodules.linear_qkv,
            config.hidden_size,
            config.num_query_groups * (self.queries_per_group + 2) * self.head_width,
            config=config,
            init_method=config.init_method,
            bias=config.add_bias_linear or config.add_qkv_bias,
            tp_group=self.tp_group,
        )
        self._build_core(submodules.core_attention, layer_number=layer_number, attn_mask_type=attn_mask_type)
        if config.qk_layernorm and (submodules.q_layernorm is None or submodules.k_layernorm is None):
            raise ValueError("qk_layernorm is True: the layer's spec must have q_layernorm and k_layernorm")
        self.q_layernorm = self._head_norm(submodules.q_layernorm)
        self.k_layernorm = self._head_norm(submodules.k_layernorm)
        self._build_output(submodules.linear_proj, config.num_attention_heads * self.head_width)

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, rotary_pos_emb: RotaryTable | None = None
    ) -> QueryKeyValue:
        """hidden_states: [S, B, H], parameter dtype -> query [S, B, N, D], key and value [S, B, G, D], same dtype.

        Of a split layer: this rank's heads and groups, of the whole sequence.
        """
        mixed, _ = self.parts.qkv_linear(self.linear_qkv, hidden_states)  # [S, B, G * (q + 2) * D]
        mixed = mixed.unflatten(-1, (self.num_groups, self.queries_per_group + 2, self.head_width))
        has_norms = self.q_layernorm is not None or self.k_layernorm is not None
        if rotary_pos_emb is not None and not has_norms:
            return split_and_rotate(mixed, rotary_pos_emb)
        # Splitting instead of slicing: backward then joins three gradients once, without zeros to add.
        query, key, value = torch.split(mixed, [self.queries_per_group, 1, 1], dim=3)
        query, key = query.flatten(2, 3), key.squeeze(3)
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        if rotary_pos_emb is not None:
            query, key = (apply_rotary_pos_emb(t, rotary_pos_emb) for t in (query, key))
        return query, key, value.squeeze(3)

    def _head_norm(self, spec: Any) -> Any:
        if spec is None:
            return None
        config = self.config
        norm = build_module(spec, config=config, hidden_size=self.head_width, eps=config.layernorm_epsilon)
        for param in norm.parameters():
            # This rank's heads alone, whether or not the sequence is split too.
            mark_partial_gradient(param, partial=group_size(self.tp_group) > 1)
        return norm

    def logical_pieces(self, prefix: str) -> dict[str, list[LogicalPiece]]:
        """linear_qkv is stored as three tensors: q [G, q, D, H], k [G, D, H], v [G, D, H]; so are biases without H.

        G counts the groups of all ranks.
        """
        pieces = {"linear_qkv.weight": self._qkv_pieces(prefix + "linear_qkv.weight", (self.config.hidden_size,))}
        if self.linear_qkv.bias is not None:
            pieces["linear_qkv.bias"] = self._qkv_pieces(prefix + "linear_qkv.bias", ())
        return pieces

    def weight_matrices(self) -> dict[str, list[MatrixWindow]]:
        """Queries, keys and values of all groups are three matrices."""
        pieces = self._qkv_pieces("linear_qkv.weight", (self.config.hidden_size,))
        return {"linear_qkv.weight": [MatrixWindow(p.shape, p.stride, p.storage_offset) for p in pieces]}

    def _qkv_pieces(self, key: str, columns: tuple[int, ...]) -> list[LogicalPiece]:
        groups, queries, width = self.num_groups, self.queries_per_group, self.head_width
        # Strides in elements: of a row, of one head, and from one group to the next.
        row = math.prod(columns)
        head, group = width * row, (queries + 2) * width * row
        inner = (row, 1) if columns else (1,)
        q_shape, kv_shape = (groups, queries, width, *columns), (groups, width, *columns)
        ranks, first_group = group_size(self.tp_group), group_rank(self.tp_group) * groups

        def piece(name: str, shape: tuple[int, ...], *, stride: tuple[int, ...], offset: int) -> LogicalPiece:
            whole, place = (ranks * groups, *shape[1:]), (first_group, *(0,) * (len(shape) - 1))
            return LogicalPiece(f"{key}.{name}", shape, stride, offset, whole, place)

        return [
            piece("q", q_shape, stride=(group, head, *inner), offset=0),
            piece("k", kv_shape, stride=(group, *inner), offset=queries * head),
            piece("v", kv_shape, stride=(group, *inner), offset=(queries + 1) * head),
        ]
