"""Which tensors a model of the hub has, and which boxes of a canonical checkpoint each of them fills.

Where files keep them is ../safetensors_files.py's; which family says what is in families.py. Shape letters as in
megatron/core/README.md.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.dist_checkpointing import LogicalPiece
from tools.hugging_face.config_parts import expert_layers
from tools.hugging_face.families import Family, FeedForwardNames

_EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class HubTensor:
    """A tensor of the hub's files, and the windows of it that are stored."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[LogicalPiece, ...]


def hub_tensors(family: Family, settings: Mapping[str, Any]) -> Iterator[HubTensor]:
    """All tensors of a model with these settings, layer by layer."""
    vocabulary = (settings["vocab_size"], settings["hidden_size"])
    yield _same("model.embed_tokens.weight", _EMBEDDING, *vocabulary)
    for number, has_experts in enumerate(expert_layers(settings)):
        layer = _Layer(f"model.layers.{number}.", f"decoder.layers.{number}.", settings, family.names)
        yield from layer.attention()
        yield from layer.experts() if has_experts else layer.dense()
    yield _same("model.norm.weight", "decoder.final_layernorm.weight", vocabulary[1])
    if settings["untie_embeddings_and_output_weights"]:
        yield _same("lm_head.weight", "output_layer.weight", *vocabulary)


@dataclass(frozen=True)
class _Layer:
    """The tensors of a layer; theirs, ours: what its names begin with."""

    theirs: str
    ours: str
    settings: Mapping[str, Any]
    names: FeedForwardNames

    def attention(self) -> Iterator[HubTensor]:
        settings = self.settings
        hidden, width = settings["hidden_size"], settings["kv_channels"]
        heads, groups = settings["num_attention_heads"], settings["num_query_groups"]
        yield self._same("input_layernorm.weight", "input_layernorm.weight", hidden)
        for letter, shared in (("q", heads // groups), ("k", 1), ("v", 1)):
            # [G, q, D, H] in checkpoints: by group.
            stored = (groups, shared, width) if letter == "q" else (groups, width)
            name, key = f"self_attn.{letter}_proj", "self_attention.linear_qkv"
            rows = groups * shared * width
            yield self._shaped(
                f"{name}.weight", f"{key}.weight.{letter}", shape=(rows, hidden), stored=(*stored, hidden)
            )
            if settings["add_qkv_bias"]:
                yield self._shaped(f"{name}.bias", f"{key}.bias.{letter}", shape=(rows,), stored=stored)
        yield self._same("self_attn.o_proj.weight", "self_attention.linear_proj.weight", hidden, heads * width)
        if settings["qk_layernorm"]:
            for letter in "qk":
                ours = f"self_attention.{letter}_layernorm.weight"
                yield self._same(f"self_attn.{letter}_norm.weight", ours, width)
        yield self._same("post_attention_layernorm.weight", "pre_mlp_layernorm.weight", hidden)

    def dense(self) -> Iterator[HubTensor]:
        """The feed-forward layer without experts."""
        return self._gated("mlp", "mlp", width=self.settings["ffn_hidden_size"])

    def experts(self) -> Iterator[HubTensor]:
        """Router, experts and what every token sees."""
        settings, names = self.settings, self.names
        hidden, width, count = settings["hidden_size"], settings["moe_ffn_hidden_size"], settings["num_experts"]
        yield self._same(f"{names.block}.gate.weight", "mlp.router.weight", count, hidden)
        if settings["moe_router_enable_expert_bias"]:
            yield self._same(f"{names.block}.{names.bias}", "mlp.router.expert_bias", count)
        matrices = (
            (names.gate, "linear_fc1.weight.gate", (width, hidden)),
            (names.up, "linear_fc1.weight.up", (width, hidden)),
            (names.down, "linear_fc2.weight", (hidden, width)),
        )
        for expert in range(count):
            for name, key, shape in matrices:
                piece = _row(f"{self.ours}mlp.experts.{key}", shape, row=expert, rows=count)
                yield HubTensor(f"{self.theirs}{names.block}.experts.{expert}.{name}.weight", shape, (piece,))
        if settings["moe_shared_expert_intermediate_size"] is not None:
            shared = settings["moe_shared_expert_intermediate_size"]
            yield from self._gated(f"{names.block}.{names.shared}", "mlp.shared_experts", width=shared)
        if settings["moe_shared_expert_gate"]:
            name = f"{names.block}.{names.shared_gate}.weight"
            yield self._same(name, "mlp.shared_experts.gate_weight", 1, hidden)

    def _gated(self, name: str, key: str, *, width: int) -> Iterator[HubTensor]:
        hidden = self.settings["hidden_size"]
        yield self._same(f"{name}.gate_proj.weight", f"{key}.linear_fc1.weight.gate", width, hidden)
        yield self._same(f"{name}.up_proj.weight", f"{key}.linear_fc1.weight.up", width, hidden)
        yield self._same(f"{name}.down_proj.weight", f"{key}.linear_fc2.weight", hidden, width)

    def _same(self, name: str, key: str, *shape: int) -> HubTensor:
        return _same(self.theirs + name, self.ours + key, *shape)

    def _shaped(self, name: str, key: str, *, shape: tuple[int, ...], stored: tuple[int, ...]) -> HubTensor:
        return HubTensor(self.theirs + name, shape, (_whole(self.ours + key, stored),))


def _same(name: str, key: str, *shape: int) -> HubTensor:
    return HubTensor(name, shape, (_whole(key, shape),))


def _whole(key: str, shape: tuple[int, ...]) -> LogicalPiece:
    """All elements of a tensor in order, as a stored tensor of that shape."""
    return LogicalPiece(key, shape, _strides(shape), 0, shape, (0,) * len(shape))


def _row(key: str, shape: tuple[int, ...], *, row: int, rows: int) -> LogicalPiece:
    """A tensor as one row of a stored tensor of so many rows."""
    one = (1, *shape)
    return LogicalPiece(key, one, _strides(one), 0, (rows, *shape), (row, *(0,) * len(shape)))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
