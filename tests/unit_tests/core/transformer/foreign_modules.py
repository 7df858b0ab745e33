"""Attention cores and layers as users of Megatron-LM write them, without using any of our own names."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.transformer.norms import Norm
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer


class ForeignCore(nn.Module):
    """An attention core computed with matrix multiplications. `calls` counts its forward calls."""

    calls = 0

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        assert attention_type == "self" and pg_collection is not None
        self.config, self.layer_number = config, layer_number
        self.scale = softmax_scale or 1 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """query: [S, B, N, D] or, packed, [T, N, D] -> [S, B, N * D] or [T, N * D], same dtype."""
        type(self).calls += 1
        assert attn_mask_type.name == "causal" and attention_bias is None
        if packed_seq_params is None:
            return self._causal(query, key, value)
        parts = [one.split(packed_seq_params.segment_lengths) for one in (query, key, value)]
        results = [self._causal(*(one.unsqueeze(1) for one in segment)).squeeze(1) for segment in zip(*parts)]
        return torch.cat(results)

    def _causal(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        shared = query.shape[2] // key.shape[2]
        key, value = (one.repeat_interleave(shared, dim=2) for one in (key, value))
        scores = torch.einsum("sbnd,tbnd->bnst", query, key) * self.scale
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        probs = scores.masked_fill(ahead, -torch.inf).softmax(-1)
        return torch.einsum("bnst,tbnd->sbnd", probs, value).flatten(2)


class ForeignAttention(nn.Module):
    """A whole attention layer, with arguments that are passed by name and mostly have no default."""

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any = None, pg_collection: Any = None) -> None:
        super().__init__()
        self.tp_size = pg_collection.tp.size() if pg_collection.tp is not None else 1
        width = config.num_attention_heads * config.kv_channels
        built = {"config": config, "init_method": config.init_method, "bias": False, "skip_bias_add": True}
        self.qkv = tensor_parallel.ColumnParallelLinear(
            config.hidden_size, 3 * width, gather_output=False, pg_collection=pg_collection, **built
        )
        self.proj = tensor_parallel.RowParallelLinear(
            width, config.hidden_size, input_is_parallel=True, pg_collection=pg_collection, **built
        )
        self.heads, self.layer_number = config.num_attention_heads // self.tp_size, layer_number

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        key_value_states: Tensor | None = None,
        *,
        inference_context: Any,
        rotary_pos_emb: Any,
        rotary_pos_cos: Any,
        rotary_pos_sin: Any,
        attention_bias: Any,
        packed_seq_params: Any,
        sequence_len_offset: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states: [S, B, H], parameter dtype -> same, and no bias."""
        mixed, _ = self.qkv(hidden_states)
        query, key, value = mixed.unflatten(-1, (self.heads, -1)).permute(1, 2, 0, 3).chunk(3, dim=-1)
        context = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.proj(context.permute(2, 0, 1, 3).flatten(2))


class ForeignMLP(nn.Module):
    """A feed-forward layer that receives only the configuration."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, 24, bias=False, dtype=config.params_dtype)
        self.down = nn.Linear(24, config.hidden_size, dtype=config.params_dtype)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        """hidden_states: [S, B, H], parameter dtype -> same, and no bias."""
        return self.down(self.up(hidden_states).relu()), None


class ForeignActivation(nn.Module):
    """Gated SiLU as a module."""

    def __init__(self, config: Any) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """x: [*, 2F], any float dtype -> [*, F], same dtype."""
        gate, up = x.chunk(2, dim=-1)
        return nn.functional.silu(gate) * up


def spec_with(**parts: Any) -> ModuleSpec:
    """Returns a dense layer's spec with some submodules replaced; `core` replaces the core of its attention."""
    submodules = get_gpt_layer_local_submodules()
    if "core" in parts:
        attention = submodules.self_attention
        inner = replace(attention.submodules, core_attention=parts.pop("core"))
        submodules = replace(submodules, self_attention=replace(attention, submodules=inner))
    return ModuleSpec(TransformerLayer, submodules=replace(submodules, **parts))


# Passed by --spec.
FOREIGN_CORE = spec_with(core=ForeignCore)


def foreign_layers(config: Any) -> TransformerBlockSubmodules:
    """Returns layers whose attention and feed-forward submodules are foreign."""
    spec = spec_with(self_attention=ForeignAttention, mlp=ForeignMLP)
    return TransformerBlockSubmodules(layer_specs=[spec] * config.num_layers, layer_norm=Norm)
