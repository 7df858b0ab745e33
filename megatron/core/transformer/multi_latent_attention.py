"""Multi-latent attention, which computes the keys and values of all heads from one compressed vector per token.

It follows DeepSeek-V2 and V3. Shapes: N heads of this rank; C = kv_lora_rank; P = qk_pos_emb_head_dim, the rotated
channels of a head; D = qk_head_dim, the other channels; E = v_head_dim.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.param_attributes import MatrixWindow
from megatron.core.transformer.attention import Attention, QueryKeyValue
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.rope import RotaryTable, apply_rotary_pos_emb, yarn_score_scale
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class MLASelfAttentionSubmodules:
    """Specs of the projections, the attention core, and the optional norms between down and up projections.

    With q_lora_rank, linear_q_down_proj and linear_q_up_proj are built. Otherwise linear_q_proj is built.
    """

    linear_q_proj: Any = None
    linear_q_down_proj: Any = None
    linear_q_up_proj: Any = None
    linear_kv_down_proj: Any = None
    linear_kv_up_proj: Any = None
    core_attention: Any = None
    linear_proj: Any = None
    q_layernorm: Any = None
    kv_layernorm: Any = None


class MLASelfAttention(Attention):
    """Self-attention with low-rank projections of queries, keys and values.

    1. Every tensor-parallel rank projects the hidden states down for all heads, to q_lora_rank and to C + P channels.
    2. Norms apply to the q_lora_rank channels and to the C channels (qk_layernorm).
    3. Each rank projects up for its heads: queries of D + P channels, keys of D and values of E.
    4. The last P channels of the queries and the P channels of step 1 are rotated. The latter are then appended to the
       keys of all heads.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.padding,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        pp_layer_offset: int | None = None,
        name: str | None = None,
    ) -> None:
        """Builds the projections, the core and the norms. The arguments are the same as for SelfAttention.

        Raises ValueError if multi_latent_attention is False, or if qk_layernorm is True but the spec has no norms.
        """
        super().__init__(config, num_heads=config.num_attention_heads, pg_collection=pg_collection)
        if not config.multi_latent_attention:
            raise ValueError("multi_latent_attention is False: must be True for MLASelfAttention")
        if config.qk_layernorm and submodules.kv_layernorm is None:
            raise ValueError("qk_layernorm is True: the layer's spec must have q_layernorm and kv_layernorm")
        self._build_queries(submodules)
        latent, heads = config.kv_lora_rank, config.num_attention_heads
        self.linear_kv_down_proj = self._projection(
            submodules.linear_kv_down_proj, (config.hidden_size, latent + config.qk_pos_emb_head_dim)
        )
        self.linear_kv_up_proj = self._projection(
            submodules.linear_kv_up_proj, (latent, heads * (config.qk_head_dim + config.v_head_dim))
        )
        self.kv_layernorm = self._latent_norm(submodules.kv_layernorm, latent)
        scale = config.score_factor(config.qk_width) / math.sqrt(config.qk_width)
        if config.rope_type == "yarn":
            scale *= yarn_score_scale(config)
        self._build_core(
            submodules.core_attention,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            cp_comm_type=cp_comm_type,
            offered={"k_channels": config.qk_width, "v_channels": config.v_head_dim},
            softmax_scale=scale,
        )
        self._build_output(submodules.linear_proj, heads * config.v_head_dim)

    def _build_queries(self, submodules: MLASelfAttentionSubmodules) -> None:
        config, rank = self.config, self.config.q_lora_rank
        width = config.num_attention_heads * config.qk_width
        # Either linear_q_proj is built, or linear_q_down_proj and linear_q_up_proj. forward uses those that exist.
        self.linear_q_proj: Any = None
        self.linear_q_down_proj: Any = None
        self.linear_q_up_proj: Any = None
        self.q_layernorm: Any = None
        if rank is None:
            self.linear_q_proj = self._projection(submodules.linear_q_proj, (config.hidden_size, width))
            return
        if config.qk_layernorm and submodules.q_layernorm is None:
            raise ValueError("qk_layernorm is True: the layer's spec must have q_layernorm and kv_layernorm")
        self.linear_q_down_proj = self._projection(submodules.linear_q_down_proj, (config.hidden_size, rank))
        self.linear_q_up_proj = self._projection(submodules.linear_q_up_proj, (rank, width))
        self.q_layernorm = self._latent_norm(submodules.q_layernorm, rank)

    def _projection(self, spec: Any, sizes: tuple[int, int]) -> Any:
        return build_module(
            spec,
            *sizes,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self.tp_group,
        )

    def _latent_norm(self, spec: Any, width: int) -> Any:
        if spec is None:
            return None
        # As for other norms, its gradient is partial under sequence parallelism.
        return build_module(spec, config=self.config, hidden_size=width, eps=self.config.layernorm_epsilon)

    def _projected(self, hidden_states: Tensor, rotary_pos_emb: RotaryTable | None) -> QueryKeyValue:
        """Computes query and key [S, B, N, D + P] and value [S, B, N, E]. hidden_states: [S, B, H], parameter dtype.

        The results have the same dtype and cover the whole sequence. Raises ValueError if rotary_pos_emb is None.
        """
        return self._project_up(rotary_pos_emb, *self._project_down(hidden_states))

    def _kept_until_used(
        self, hidden_states: Tensor, rotary_pos_emb: RotaryTable | None
    ) -> tuple[QueryKeyValue, Callable[[Tensor], None]]:
        made: tuple[QueryKeyValue, Callable[[Tensor], None]] = self.parts.qkv_linear(
            self._project, hidden_states, rotary_pos_emb
        )
        return made

    def _project(
        self, hidden_states: Tensor, rotary_pos_emb: RotaryTable | None
    ) -> tuple[QueryKeyValue, Callable[[Tensor], None]]:
        return self.parts.mla_up_proj(self._project_up, rotary_pos_emb, *self._project_down(hidden_states))

    def _project_down(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the inputs of the up projections: queries [S, B, q_lora_rank or H], keys and values [S, B, C + P].

        Under sequence parallelism, S is this rank's part of the sequence. These narrow tensors are gathered later.
        """
        query = hidden_states
        if self.linear_q_down_proj is not None:
            query, _ = self.linear_q_down_proj(hidden_states)
        latent, _ = self.linear_kv_down_proj(hidden_states)
        return query, latent

    def _project_up(self, rotary_pos_emb: RotaryTable | None, *projected: Tensor) -> QueryKeyValue:
        """Computes queries, keys and values from the results of _project_down, and rotates queries and keys."""
        if rotary_pos_emb is None:
            raise ValueError(
                "rotary_pos_emb is None: latent attention requires a rotary table for its rotated channels"
            )
        config = self.config
        query, latent = projected
        latent, key_pos = latent.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
        key, value = self._keys_and_values(latent)
        key_pos = apply_rotary_pos_emb(self._for_own_heads(key_pos).unsqueeze(2), rotary_pos_emb)  # [S, B, 1, P]
        key = torch.cat((key, key_pos.expand(-1, -1, self.num_heads, -1)), dim=-1)
        query = apply_rotary_pos_emb(self._queries(query), rotary_pos_emb, first=config.qk_head_dim)
        # A copy, because a view would also keep the memory of the keys alive, which were already copied.
        return query, key, value.contiguous()

    def _queries(self, query: Tensor) -> Tensor:
        """Computes queries, [S, B, N, D + P], from the output of _project_down."""
        if self.linear_q_proj is not None:
            query, _ = self.linear_q_proj(query)
        else:
            assert self.linear_q_up_proj is not None
            query, _ = self.linear_q_up_proj(query if self.q_layernorm is None else self.q_layernorm(query))
        return query.unflatten(-1, (self.num_heads, self.config.qk_width))

    def _keys_and_values(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Computes keys without rotary channels, [S, B, N, D], and values, [S, B, N, E]."""
        config = self.config
        both, _ = self.linear_kv_up_proj(latent if self.kv_layernorm is None else self.kv_layernorm(latent))
        both = both.unflatten(-1, (self.num_heads, config.qk_head_dim + config.v_head_dim))
        key, value = both.split([config.qk_head_dim, config.v_head_dim], dim=-1)
        return key, value

    def _for_own_heads(self, key_pos: Tensor) -> Tensor:
        """Returns the shared key channels for the whole sequence. Backward sums their gradient over all ranks."""
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(key_pos, group=self.tp_group)
        return copy_to_tensor_model_parallel_region(key_pos, self.tp_group)

    def row_factors(self, factors: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        """Returns each up projection with a factor for each row: [rows], fp64. factors: [N], fp64, one per head.

        As in Kimi K2, the D channels of a query are scaled by factor ** alpha, and the D channels of a key by
        factor ** (1 - alpha). The P rotated channels of a query are scaled by the whole factor, because all heads share
        their key, which stays unchanged. Values also stay unchanged.
        """
        config, alpha = self.config, self.config.qk_clip_alpha
        query = self.linear_q_proj if self.linear_q_proj is not None else self.linear_q_up_proj
        nope, rope = (factors**alpha).unsqueeze(1), factors.unsqueeze(1)
        of_query = torch.cat((nope.expand(-1, config.qk_head_dim), rope.expand(-1, config.qk_pos_emb_head_dim)), dim=1)
        of_key = (factors ** (1 - alpha)).unsqueeze(1).expand(-1, config.qk_head_dim)
        of_both = torch.cat((of_key, torch.ones_like(factors).unsqueeze(1).expand(-1, config.v_head_dim)), dim=1)
        return [(query.weight, of_query.flatten()), (self.linear_kv_up_proj.weight, of_both.flatten())]

    def weight_matrices(self) -> dict[str, list[MatrixWindow]]:
        """Describes linear_kv_up_proj as a key and a value matrix, and splits linear_kv_down_proj into C and P rows."""
        config = self.config
        heads, inner, columns = self.num_heads, config.kv_lora_rank, config.hidden_size
        key, value = config.qk_head_dim, config.v_head_dim
        up = partial(MatrixWindow, stride=((key + value) * inner, inner, 1))
        down = partial(MatrixWindow, stride=(columns, 1))
        return {
            "linear_kv_up_proj.weight": [
                up(shape=(heads, key, inner), offset=0),
                up(shape=(heads, value, inner), offset=key * inner),
            ],
            "linear_kv_down_proj.weight": [
                down(shape=(inner, columns), offset=0),
                down(shape=(config.qk_pos_emb_head_dim, columns), offset=inner * columns),
            ],
        }
