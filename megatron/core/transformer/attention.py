"""Attention layers: the base class with projections around an attention core, and self-attention with grouped queries.

The core handles masks and kernels. Multi-latent attention is in multi_latent_attention.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.config_field import require_defaults
from megatron.core.fusions.output_gate import apply_output_gate
from megatron.core.logical_tensors import LogicalPiece
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection, group_rank, group_size, or_alone
from megatron.core.tensor_parallel.largest_logits import LargestLogits
from megatron.core.tensor_parallel.layers import split_size
from megatron.core.tensor_parallel.param_attributes import MatrixWindow, mark_partial_gradient
from megatron.core.tensor_parallel.random import numbers_of_each_rank
from megatron.core.transformer.context_parallel_attention import over_ranks
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule, run_and_keep
from megatron.core.transformer.norms import RMSNorm
from megatron.core.transformer.rope import HeadNorms, RotaryTable, apply_rotary_pos_emb, split_and_rotate
from megatron.core.transformer.spec_utils import build_module, build_offering
from megatron.core.transformer.transformer_config import TransformerConfig, require_sizes

# query [S, B, N, D], key [S, B, G, D], value [S, B, G, E]; with an output gate also gate [S, B, G, N / G, D].
QueryKeyValue = tuple[Tensor, Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, Tensor]


class Attention(MegatronModule):
    """Base class of attention layers. Subclasses compute queries, keys and values; the base class does the rest.

    num_heads (attribute): number of query heads on this rank.
    """

    def __init__(
        self, config: TransformerConfig, *, num_heads: int, pg_collection: ProcessGroupCollection | None
    ) -> None:
        super().__init__(config)
        require_sizes(config, "hidden_size", "num_attention_heads")
        self.groups = pg_collection or existing_process_groups()
        self.tp_group = or_alone(self.groups.tp)
        self.num_heads = split_size(num_heads, self.tp_group, name="num_attention_heads")

    def _build_core(
        self,
        spec: Any,
        *,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        cp_comm_type: str | None,
        offered: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Builds the attention core.

        cp_comm_type: None means the configured value of the layer. offered: arguments that are passed only if the core
        accepts them. options: arguments that the core must accept.
        """
        config = self.config
        kind = cp_comm_type or config.cp_comm_type_of_layer(layer_number)
        known = {"attention_type": "self", "cp_comm_type": kind, "pg_collection": self.groups, **(offered or {})}
        self.core_attention = build_offering(
            spec, known, config=config, layer_number=layer_number, attn_mask_type=attn_mask_type, **options
        )
        self.largest_logits: LargestLogits | None = None
        if config.watches_logits:
            if not isinstance(self.core_attention, DotProductAttention):
                raise ValueError(
                    "qk_clip or log_max_attention_logit is True and the attention core is a "
                    f"{type(self.core_attention).__name__}: must be a DotProductAttention, which computes the "
                    "largest scores"
                )
            self.largest_logits = self.core_attention.largest_logits
        self.attn_mask_type = attn_mask_type
        self.around_core = over_ranks(self.core_attention, config, kind=kind, groups=self.groups)
        # Ranks hold different heads, so their dropout must draw different numbers.
        self.core_numbers = numbers_of_each_rank(self.tp_group, dropout=config.attention_dropout)

    def _build_output(self, spec: Any, input_size: int) -> None:
        self.linear_proj = build_module(
            spec,
            input_size,
            self.config.hidden_size,
            config=self.config,
            init_method=self.config.output_layer_init_method,
            bias=self.config.add_bias_linear,
            input_is_parallel=True,
            # The bias is added together with the residual, which saves one pass over [S, B, H].
            skip_bias_add=True,
            is_expert=False,
            tp_comm_buffer_name="proj",
            tp_group=self.tp_group,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        inference_context: Any = None,
        rotary_pos_emb: RotaryTable | None = None,
        rotary_pos_cos: Tensor | None = None,
        rotary_pos_sin: Tensor | None = None,
        rotary_pos_cos_sin: Tensor | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        sequence_len_offset: Any = None,
        *,
        inference_params: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes self-attention.

        hidden_states: [S, B, H], parameter dtype. attention_mask: bool, True where attention is forbidden, or None.
        packed_seq_params: segments to which attention is restricted. Returns [S, B, H], same dtype, and the bias [H]
        that the caller must add, or None. Under sequence parallelism, S is this rank's part of the sequence. All other
        arguments except rotary_pos_emb must be None.
        """
        others = key_value_states, rotary_pos_cos, rotary_pos_sin, rotary_pos_cos_sin, attention_bias
        unused = (*others, inference_context, sequence_len_offset, inference_params)
        if unused.count(None) != len(unused):
            _require_self_attention(
                key_value_states=key_value_states,
                inference_context=inference_context,
                rotary_pos_cos=rotary_pos_cos,
                rotary_pos_sin=rotary_pos_sin,
                rotary_pos_cos_sin=rotary_pos_cos_sin,
                attention_bias=attention_bias,
                sequence_len_offset=sequence_len_offset,
                inference_params=inference_params,
            )
        tensors, release = self._kept_until_used(hidden_states, rotary_pos_emb)
        # [S, B, N * E]
        context = self.parts.core_attn(self._attend, attention_mask, *tensors, packed_seq_params=packed_seq_params)
        release(context)
        return self.parts.attn_proj(self.linear_proj, context)

    def _attend(
        self,
        attention_mask: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        gate: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None,
    ) -> Tensor:
        # Inside the recomputed function, so that the second run draws from the same stream.
        with self.core_numbers():
            context: Tensor = self.around_core(
                self.core_attention,
                query,
                key,
                value,
                attention_mask,
                attn_mask_type=self.attn_mask_type,
                packed_seq_params=packed_seq_params,
            )
        return context if gate is None else apply_output_gate(context, gate)

    def _projected(self, hidden_states: Tensor, rotary_pos_emb: RotaryTable | None) -> QueryKeyValue:
        """Computes query [S, B, N, D], key [S, B, G, D] and value [S, B, G, E] from [S, B, H], parameter dtype.

        Applies rotary positions to queries and keys if rotary_pos_emb is not None.
        """
        raise NotImplementedError

    def clip_factors(self, largest: Tensor) -> Tensor:
        """Returns the qk_clip factor of each head: threshold / largest if that is below 1, else 1. Shape [N], fp64.

        largest: [N], fp64, largest score of each head on this rank. Non-finite scores give a factor of 1.
        """
        threshold = self.config.qk_clip_threshold
        return torch.where((largest > threshold) & largest.isfinite(), threshold / largest, torch.ones_like(largest))

    def row_factors(self, factors: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        """Returns projection parameters, each with factors of its rows: [rows], fp64. factors: [N], fp64, per head.

        Scaling the rows multiplies the scores of each head by the factor of the head. Raises ValueError if the class
        does not override this method.
        """
        raise ValueError(
            f"qk_clip is True and {type(self).__name__} does not define row_factors: define it, or disable qk_clip"
        )

    @torch.no_grad()
    def clip_qk(self) -> None:
        """Scales down the projections of heads whose scores exceeded qk_clip_threshold since the last call.

        For custom training loops with a custom optimizer: call it after the optimizer step. It uses only the scores of
        this rank, and leaves frozen projections as they are. Optimizers from get_megatron_optimizer clip over all ranks
        within their step, after which this call changes nothing. Raises ValueError if qk_clip is False, or if the fp32
        master of a projection is sharded over ranks.
        """
        if not self.config.qk_clip:
            raise ValueError("clip_qk was called, but qk_clip is False: must be True")
        if self.largest_logits is None or self.largest_logits.values is None:
            return
        for param, rows in self.row_factors(self.clip_factors(self.largest_logits.values)):
            if not param.requires_grad:
                continue
            factors = rows.view(-1, *[1] * (param.dim() - 1))
            main = vars(param).get("main_param")
            if main is not None:
                if main.shape != param.shape:
                    raise ValueError(
                        "clip_qk: the fp32 master of a projection is sharded over ranks; rely on the clipping of the "
                        "optimizer's step instead"
                    )
                param.copy_(main.mul_(factors))
            else:
                param.mul_(factors)
        self.largest_logits.reset()

    def _kept_until_used(
        self, hidden_states: Tensor, rotary_pos_emb: RotaryTable | None
    ) -> tuple[QueryKeyValue, Callable[[Tensor], None]]:
        """Returns queries, keys and values, and a release function to call with the context computed from them.

        With recompute, the release function frees these tensors until backward recomputes them.
        """
        return run_and_keep(self._projected, hidden_states, rotary_pos_emb)


@dataclass
class SelfAttentionSubmodules:
    """Specs of the projections, the attention core, and the optional norms of queries and keys."""

    linear_qkv: Any = None
    core_attention: Any = None
    linear_proj: Any = None
    q_layernorm: Any = None
    k_layernorm: Any = None


class SelfAttention(Attention):
    """Self-attention with grouped queries.

    The rows of linear_qkv are ordered by key/value group. Each group consists of its queries, with
    attention_output_gate the same number of gates, its key and its value. Tensor-parallel ranks hold whole groups.
    num_groups is the number of groups on this rank.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.padding,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        pp_layer_offset: int | None = None,
        name: str | None = None,
    ) -> None:
        """Builds the projections, the core and the optional norms.

        layer_number: number of the layer in the model, starting at 1. attn_mask_type: passed to the core; padding masks
        nothing by itself. cp_comm_type: None means the configured value of the layer. pp_layer_offset, name: accepted
        without effect.
        """
        super().__init__(config, num_heads=config.num_attention_heads, pg_collection=pg_collection)
        self.head_width = config.kv_channels
        self.num_groups = split_size(config.num_query_groups, self.tp_group, name="num_query_groups")
        self.queries_per_group = config.num_attention_heads // config.num_query_groups
        self.gates_per_group = self.queries_per_group if config.attention_output_gate else 0
        self.linear_qkv = build_module(
            submodules.linear_qkv,
            config.hidden_size,
            config.num_query_groups * (self.queries_per_group + self.gates_per_group + 2) * self.head_width,
            config=config,
            init_method=config.init_method,
            bias=config.add_bias_linear or config.add_qkv_bias,
            gather_output=False,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name="qkv",
            tp_group=self.tp_group,
        )
        self._build_core(
            submodules.core_attention,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            cp_comm_type=cp_comm_type,
            offered={"softmax_scale": None},
        )
        if config.qk_layernorm and (submodules.q_layernorm is None or submodules.k_layernorm is None):
            raise ValueError("qk_layernorm is True: the spec of the layer must define q_layernorm and k_layernorm")
        self.q_layernorm = self._head_norm(submodules.q_layernorm)
        self.k_layernorm = self._head_norm(submodules.k_layernorm)
        # Whether one function normalizes and rotates. Other norms, or one for only queries or keys, run as modules.
        self.has_fused_norms = {type(self.q_layernorm), type(self.k_layernorm)} in ({RMSNorm}, {type(None)})
        self._build_output(submodules.linear_proj, config.num_attention_heads * self.head_width)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> QueryKeyValue | tuple[Tensor, list[int]]:
        """Computes query [S, B, N, D], key and value [S, B, G, D] without rotary positions.

        hidden_states: [S, B, H], parameter dtype. N and G are this rank's heads and groups. Results cover the whole
        sequence. output_gate: must equal attention_output_gate; True returns the gates, [S, B, G, N / G, D], as a
        fourth tensor. split_qkv: False returns the unsplit projection, [S, B, G, (q + 2) D], or with gates
        [S, B, G, (2 q + 2) D], and the widths of queries, gates, key and value in it. key_value_states: must be None.
        """
        why = "cross-attention is not supported"
        require_defaults("get_query_key_value_tensors", why, key_value_states=(key_value_states, None))
        if output_gate != self.config.attention_output_gate:
            raise ValueError(
                f"output_gate is {output_gate} and attention_output_gate is {self.config.attention_output_gate}: "
                "must be equal, because attention_output_gate determines whether the projection computes gates"
            )
        if split_qkv:
            return self._projected(hidden_states, None)
        mixed, _ = self.parts.qkv_linear(self.linear_qkv, hidden_states)
        heads = [self.queries_per_group, self.gates_per_group, 1, 1]
        widths = [count * self.head_width for count in heads if count]
        return mixed.unflatten(-1, (self.num_groups, -1)), widths

    def _projected(self, hidden_states: Tensor, rotary_pos_emb: RotaryTable | None) -> QueryKeyValue:
        mixed, _ = self.parts.qkv_linear(self.linear_qkv, hidden_states)  # [S, B, G * (q + gates + 2) * D]
        mixed = mixed.unflatten(-1, (self.num_groups, -1, self.head_width))
        if rotary_pos_emb is not None and self.has_fused_norms:
            return self._split_and_rotate(mixed, rotary_pos_emb)
        # Split instead of sliced: backward of split concatenates the gradients once, whereas backward of slices pads
        # and sums them.
        query, gate, key, value = torch.split(mixed, [self.queries_per_group, self.gates_per_group, 1, 1], dim=3)
        query, key = query.flatten(2, 3), key.squeeze(3)
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        if rotary_pos_emb is not None:
            query, key = (apply_rotary_pos_emb(t, rotary_pos_emb) for t in (query, key))
        return (query, key, value.squeeze(3), gate) if self.gates_per_group else (query, key, value.squeeze(3))

    def _split_and_rotate(self, mixed: Tensor, table: RotaryTable) -> QueryKeyValue:
        norms, query_norm, key_norm = None, self.q_layernorm, self.k_layernorm
        if query_norm is not None:
            norms = HeadNorms(query_norm.weight, key_norm.weight, query_norm.eps, query_norm.zero_centered)
        return split_and_rotate(mixed, table, gates=self.gates_per_group, norms=norms)

    def row_factors(self, factors: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        """Returns the weight and bias of linear_qkv, each with factors for its rows: [rows], fp64.

        factors: [N], fp64, one per head. The query heads of a group share its key, so the key is scaled by
        f ** (1 - alpha), where f is the smallest factor of the group. Each query head is scaled by its factor divided
        by the factor of the key. That is f ** alpha for the head with factor f, and more than 1 for heads below the
        threshold, whose scores stay unchanged.
        """
        of_groups = factors.view(self.num_groups, self.queries_per_group)
        of_keys = of_groups.amin(1, keepdim=True) ** (1 - self.config.qk_clip_alpha)
        gates = [torch.ones_like(of_groups)] if self.config.attention_output_gate else []
        heads = torch.cat((of_groups / of_keys, *gates, of_keys, torch.ones_like(of_keys)), dim=1)
        rows = heads.flatten().repeat_interleave(self.head_width)
        return [(param, rows) for param in (self.linear_qkv.weight, self.linear_qkv.bias) if param is not None]

    def _head_norm(self, spec: Any) -> Any:
        if spec is None:
            return None
        config = self.config
        norm = build_module(spec, config=config, hidden_size=self.head_width, eps=config.layernorm_epsilon)
        for param in norm.parameters():
            # The gradient covers only this rank's heads, with or without sequence parallelism.
            mark_partial_gradient(param, partial=group_size(self.tp_group) > 1)
        return norm

    def logical_pieces(self, prefix: str) -> dict[str, list[LogicalPiece]]:
        """Describes linear_qkv as stored tensors q [G, q, D, H], k [G, D, H] and v [G, D, H]; biases without H.

        With attention_output_gate, also gate [G, q, D, H]. G is the number of groups of all ranks.
        """
        pieces = {"linear_qkv.weight": self._qkv_pieces(prefix + "linear_qkv.weight", (self.config.hidden_size,))}
        if self.linear_qkv.bias is not None:
            pieces["linear_qkv.bias"] = self._qkv_pieces(prefix + "linear_qkv.bias", ())
        return pieces

    def weight_matrices(self) -> dict[str, list[MatrixWindow]]:
        """Describes linear_qkv as a matrix each of all queries, all gates (if present), all keys and all values."""
        pieces = self._qkv_pieces("linear_qkv.weight", (self.config.hidden_size,))
        return {"linear_qkv.weight": [MatrixWindow(p.shape, p.stride, p.storage_offset) for p in pieces]}

    def _qkv_pieces(self, key: str, columns: tuple[int, ...]) -> list[LogicalPiece]:
        groups, queries, gates = self.num_groups, self.queries_per_group, self.gates_per_group
        width = self.head_width
        # Sizes of a row, a head and a group, in elements.
        row = math.prod(columns)
        head, group = width * row, (queries + gates + 2) * width * row
        inner = (row, 1) if columns else (1,)
        q_shape, kv_shape = (groups, queries, width, *columns), (groups, width, *columns)
        ranks, first_group = group_size(self.tp_group), group_rank(self.tp_group) * groups

        def piece(name: str, shape: tuple[int, ...], *, stride: tuple[int, ...], offset: int) -> LogicalPiece:
            whole, place = (ranks * groups, *shape[1:]), (first_group, *(0,) * (len(shape) - 1))
            return LogicalPiece(f"{key}.{name}", shape, stride, offset, whole, place)

        of_gates = [piece("gate", q_shape, stride=(group, head, *inner), offset=queries * head)] if gates else []
        return [
            piece("q", q_shape, stride=(group, head, *inner), offset=0),
            *of_gates,
            piece("k", kv_shape, stride=(group, *inner), offset=(queries + gates) * head),
            piece("v", kv_shape, stride=(group, *inner), offset=(queries + gates + 1) * head),
        ]


def _require_self_attention(**arguments: Any) -> None:
    why = "only self-attention in training is supported, with a table in rotary_pos_emb and no bias on scores"
    require_defaults("attention", why, **{name: (value, None) for name, value in arguments.items()})
