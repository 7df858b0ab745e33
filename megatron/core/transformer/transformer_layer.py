"""One transformer layer: attention and feed-forward, each after a norm and into the residual stream."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import numbers_of_each_rank
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.recompute import Drawing
from megatron.core.transformer.rope import RotaryTable
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class TransformerLayerSubmodules:
    """Specs of a layer's parts, in the order they run; an IdentityOp leaves a place empty."""

    input_layernorm: Any = IdentityOp
    self_attention: Any = IdentityOp
    self_attn_bda: Any = IdentityFuncOp
    pre_mlp_layernorm: Any = IdentityOp
    mlp: Any = IdentityOp
    mlp_bda: Any = IdentityFuncOp


class TransformerLayer(MegatronModule, Drawing):
    """x + attention(norm(x)), then x + mlp(norm(x)); the mlp may be a mixture of experts."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int = 1,
        hidden_dropout: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """layer_number: counts from 1 over the whole model; handed to the attention. pg_collection: the groups of this
        rank; None: those of parallel_state, if there are any.
        """
        super().__init__(config)
        groups = pg_collection or existing_process_groups()
        self.layer_number = layer_number
        self.hidden_dropout = config.hidden_dropout if hidden_dropout is None else hidden_dropout
        # Ranks that hold parts of the sequence drop other elements, ranks that all hold the whole drop the same.
        split_over = groups.tp if config.sequence_parallel else None
        self.hidden_numbers = numbers_of_each_rank(split_over, dropout=self.hidden_dropout)
        norm = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.input_layernorm = build_module(submodules.input_layernorm, **norm)
        self.self_attention = build_module(
            submodules.self_attention, config=config, layer_number=layer_number, pg_collection=groups
        )
        self.self_attn_bda = build_module(submodules.self_attn_bda)
        self.pre_mlp_layernorm = build_module(submodules.pre_mlp_layernorm, **norm)
        self.mlp = build_module(submodules.mlp, config=config, pg_collection=groups)
        self.mlp_bda = build_module(submodules.mlp_bda)

    @property
    def draws_numbers(self) -> bool:
        """Whether what is added to the residual stream has dropout."""
        return self.hidden_dropout > 0

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotary_pos_emb: RotaryTable | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """hidden_states: [S, B, H], parameter dtype; attention_mask: bool, True where attention is forbidden, or None.
        Returns [S, B, H], same dtype. Under sequence parallelism both have this rank's part of the sequence.
        """
        normed, release = self.parts.attn_norm(self.input_layernorm, hidden_states)
        attention_output = self.parts.attn(
            self.self_attention, normed, attention_mask, rotary_pos_emb, packed_seq_params=packed_seq_params
        )
        release(attention_output[0])
        # Asked each time: whether there is dropout depends on the mode of the moment.
        with self.hidden_numbers():
            hidden_states = self.self_attn_bda(self.training)(attention_output, hidden_states, self.hidden_dropout)
        normed, release = self.parts.mlp_norm(self.pre_mlp_layernorm, hidden_states)
        mlp_output = self.parts.mlp(self.mlp, normed)
        release(mlp_output[0])
        with self.hidden_numbers():
            output: Tensor = self.mlp_bda(self.training)(mlp_output, hidden_states, self.hidden_dropout)
        return output
