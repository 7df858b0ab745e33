"""Maps tensors of a hub model to the parts of a canonical checkpoint that they fill.

../safetensors_files.py reads the files, and families.py defines the names of each family. Shape letters are defined in
megatron/core/README.md.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.dist_checkpointing import LogicalPiece
from megatron.tools.hugging_face.expert_parts import expert_layers
from megatron.tools.hugging_face.families import Family, FeedForwardNames

_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True)
class HubTensor:
    """A tensor of the hub's files and the stored tensors that correspond to it.

    copy_of: name of another tensor with the same values, which files store twice and checkpoints store once.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[LogicalPiece, ...]
    copy_of: str | None = None


def hub_tensors(
    family: Family, settings: Mapping[str, Any], *, names: FeedForwardNames | None = None
) -> Iterator[HubTensor]:
    """Yields all tensors of a model with these settings, layer by layer. names: None means the names of the family."""
    names = names or family.names
    vocabulary = (settings["vocab_size"], settings["hidden_size"])
    yield _same("model.embed_tokens.weight", _EMBEDDING, *vocabulary)
    for number, has_experts in enumerate(expert_layers(settings)):
        layer = _Layer(f"model.layers.{number}.", f"decoder.layers.{number}.", settings, names)
        yield from layer.tensors(bool(has_experts))
    yield _same("model.norm.weight", "decoder.final_layernorm.weight", vocabulary[1])
    if settings["untie_embeddings_and_output_weights"]:
        yield _same("lm_head.weight", _OUTPUT, *vocabulary)
    for depth in range(settings.get("mtp_num_layers") or 0):
        yield from _mtp_layer(depth, settings, names=names)


def is_mtp_tensor(name: str, settings: Mapping[str, Any]) -> bool:
    """Returns whether a tensor belongs to a multi-token prediction layer."""
    words = name.split(".")
    number = words[2] if words[:2] == ["model", "layers"] and len(words) > 2 else ""
    return number.isdecimal() and int(number) >= settings["num_layers"]


def _mtp_layer(depth: int, settings: Mapping[str, Any], *, names: FeedForwardNames) -> Iterator[HubTensor]:
    """Yields the tensors of a multi-token prediction layer, including the vocabulary tables that files repeat."""
    theirs, ours = f"model.layers.{settings['num_layers'] + depth}.", f"mtp.layers.{depth}."
    hidden, vocabulary = settings["hidden_size"], (settings["vocab_size"], settings["hidden_size"])
    whole = _whole(_EMBEDDING, vocabulary)
    yield HubTensor(f"{theirs}embed_tokens.weight", vocabulary, (whole,), copy_of="model.embed_tokens.weight")
    for norm in ("enorm", "hnorm"):
        yield _same(f"{theirs}{norm}.weight", f"{ours}{norm}.weight", hidden)
    yield _same(f"{theirs}eh_proj.weight", f"{ours}eh_proj.weight", hidden, 2 * hidden)
    # It is of the same kind, dense or MoE, as the last layer.
    has_experts = bool(expert_layers(settings)[-1])
    yield from _Layer(theirs, f"{ours}transformer_layer.", settings, names).tensors(has_experts)
    yield _same(f"{theirs}shared_head.norm.weight", f"{ours}final_layernorm.weight", hidden)
    is_untied = settings["untie_embeddings_and_output_weights"]
    whole, copied = (
        (_whole(_OUTPUT, vocabulary), "lm_head.weight") if is_untied else (whole, "model.embed_tokens.weight")
    )
    yield HubTensor(f"{theirs}shared_head.head.weight", vocabulary, (whole,), copy_of=copied)


@dataclass(frozen=True)
class _Layer:
    """Maps the tensors of one layer. theirs, ours: name prefixes in the hub's files and in checkpoints."""

    theirs: str
    ours: str
    settings: Mapping[str, Any]
    names: FeedForwardNames

    def tensors(self, has_experts: bool) -> Iterator[HubTensor]:
        """Yields the tensors of attention and of a dense or MoE feed-forward layer."""
        yield self._same("input_layernorm.weight", "input_layernorm.weight", self.settings["hidden_size"])
        yield from self._latent_attention() if self.settings["multi_latent_attention"] else self._attention()
        yield self._same("post_attention_layernorm.weight", "pre_mlp_layernorm.weight", self.settings["hidden_size"])
        if has_experts:
            yield from self._experts()
        else:
            yield from self._gated("mlp", "mlp", width=self.settings["ffn_hidden_size"])

    def _attention(self) -> Iterator[HubTensor]:
        settings = self.settings
        hidden, width = settings["hidden_size"], settings["kv_channels"]
        heads, groups = settings["num_attention_heads"], settings["num_query_groups"]
        for letter, shared in (("q", heads // groups), ("k", 1), ("v", 1)):
            # [G, q, D, H] in checkpoints: grouped.
            stored = (groups, shared, width) if letter == "q" else (groups, width)
            name, key, rows = f"self_attn.{letter}_proj", "self_attention.linear_qkv", groups * shared * width
            yield self._tensor(
                f"{name}.weight", (rows, hidden), self._whole(f"{key}.weight.{letter}", (*stored, hidden))
            )
            if settings["add_qkv_bias"] or settings["add_bias_linear"]:
                yield self._tensor(f"{name}.bias", (rows,), self._whole(f"{key}.bias.{letter}", stored))
        yield self._same("self_attn.o_proj.weight", "self_attention.linear_proj.weight", hidden, heads * width)
        if settings["add_bias_linear"]:
            yield self._same("self_attn.o_proj.bias", "self_attention.linear_proj.bias", hidden)
        if settings["qk_layernorm"]:
            for letter in "qk":
                key = f"self_attention.{letter}_layernorm.weight"
                yield self._same(f"self_attn.{letter}_norm.weight", key, width)
        if settings["softmax_type"] == "learnable":
            yield self._same("self_attn.sinks", "self_attention.core_attention.softmax_offset", heads)

    def _latent_attention(self) -> Iterator[HubTensor]:
        settings = self.settings
        hidden, heads, latent = settings["hidden_size"], settings["num_attention_heads"], settings["kv_lora_rank"]
        nope, rope, value = (settings[name] for name in ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"))
        queries, rank = heads * (nope + rope), settings["q_lora_rank"]
        matrices = [
            ("kv_a_proj_with_mqa", "linear_kv_down_proj", (latent + rope, hidden)),
            ("kv_a_layernorm", "kv_layernorm", (latent,)),
            ("kv_b_proj", "linear_kv_up_proj", (heads * (nope + value), latent)),
            ("o_proj", "linear_proj", (hidden, heads * value)),
        ]
        if rank is None:
            matrices.append(("q_proj", "linear_q_proj", (queries, hidden)))
        else:
            matrices.append(("q_a_proj", "linear_q_down_proj", (rank, hidden)))
            matrices.append(("q_a_layernorm", "q_layernorm", (rank,)))
            matrices.append(("q_b_proj", "linear_q_up_proj", (queries, rank)))
        for theirs, ours, shape in matrices:
            yield self._same(f"self_attn.{theirs}.weight", f"self_attention.{ours}.weight", *shape)

    def _experts(self) -> Iterator[HubTensor]:
        """Yields the tensors of the router, the experts and the shared experts."""
        settings, names = self.settings, self.names
        hidden, count = settings["hidden_size"], settings["num_experts"]
        yield self._same(f"{names.block}.{names.router}.weight", "mlp.router.weight", count, hidden)
        if settings["add_bias_linear"]:
            yield self._same(f"{names.block}.{names.router}.bias", "mlp.router.bias", count)
        if settings["moe_router_enable_expert_bias"]:
            yield self._same(f"{names.block}.{names.bias}", "mlp.router.expert_bias", count)
        if names.interleaved:
            yield from self._interleaved_experts()
        else:
            yield from self._stacked_experts() if names.stacked else self._numbered_experts()
        if settings["moe_shared_expert_intermediate_size"] is not None:
            shared = settings["moe_shared_expert_intermediate_size"]
            yield from self._gated(f"{names.block}.{names.shared}", "mlp.shared_experts", width=shared)
        if settings["moe_shared_expert_gate"]:
            name = f"{names.block}.{names.shared_gate}.weight"
            yield self._same(name, "mlp.shared_experts.gate_weight", 1, hidden)

    def _numbered_experts(self) -> Iterator[HubTensor]:
        """Yields a separate tensor for each matrix of each expert."""
        settings, names = self.settings, self.names
        hidden, width, count = settings["hidden_size"], settings["moe_ffn_hidden_size"], settings["num_experts"]
        matrices = (
            (names.gate, "linear_fc1.weight.gate", (width, hidden)),
            (names.up, "linear_fc1.weight.up", (width, hidden)),
            (names.down, "linear_fc2.weight", (hidden, width)),
        )
        for expert in range(count):
            for name, key, shape in matrices:
                piece = _row(f"{self.ours}mlp.experts.{key}", shape, row=expert, rows=count)
                yield self._tensor(f"{names.block}.experts.{expert}.{name}.weight", shape, piece)

    def _stacked_experts(self) -> Iterator[HubTensor]:
        """Yields tensors of all experts together, with the rows of gate before those of up."""
        settings, block = self.settings, self.names.block
        hidden, width, count = settings["hidden_size"], settings["moe_ffn_hidden_size"], settings["num_experts"]
        fc1, shape = f"{self.ours}mlp.experts.linear_fc1.weight", (count, width, hidden)
        stride = (2 * width * hidden, hidden, 1)
        yield self._tensor(
            f"{block}.experts.gate_up_proj",
            (count, 2 * width, hidden),
            *(
                _window(f"{fc1}.{part}", shape, stride=stride, start=number * width * hidden)
                for number, part in enumerate(("gate", "up"))
            ),
        )
        yield self._same(f"{block}.experts.down_proj", "mlp.experts.linear_fc2.weight", count, hidden, width)

    def _interleaved_experts(self) -> Iterator[HubTensor]:
        """Yields tensors of all experts together, input dimension first, with gate and up in alternating columns."""
        settings, block = self.settings, self.names.block
        hidden, width, count = settings["hidden_size"], settings["moe_ffn_hidden_size"], settings["num_experts"]
        fc1, fc2 = (f"{self.ours}mlp.experts.linear_{name}" for name in ("fc1", "fc2"))
        columns = 2 * width
        yield self._tensor(
            f"{block}.experts.gate_up_proj",
            (count, hidden, columns),
            *(
                _window(
                    f"{fc1}.weight.{part}", (count, width, hidden), stride=(hidden * columns, 2, columns), start=start
                )
                for start, part in enumerate(("gate", "up"))
            ),
        )
        yield self._tensor(
            f"{block}.experts.gate_up_proj_bias",
            (count, columns),
            *(
                _window(f"{fc1}.bias.{part}", (count, width), stride=(columns, 2), start=start)
                for start, part in enumerate(("gate", "up"))
            ),
        )
        down = _window(f"{fc2}.weight", (count, hidden, width), stride=(width * hidden, 1, hidden))
        yield self._tensor(f"{block}.experts.down_proj", (count, width, hidden), down)
        yield self._same(f"{block}.experts.down_proj_bias", "mlp.experts.linear_fc2.bias", count, hidden)

    def _gated(self, name: str, key: str, *, width: int) -> Iterator[HubTensor]:
        hidden = self.settings["hidden_size"]
        yield self._same(f"{name}.gate_proj.weight", f"{key}.linear_fc1.weight.gate", width, hidden)
        yield self._same(f"{name}.up_proj.weight", f"{key}.linear_fc1.weight.up", width, hidden)
        yield self._same(f"{name}.down_proj.weight", f"{key}.linear_fc2.weight", hidden, width)

    def _same(self, name: str, key: str, *shape: int) -> HubTensor:
        return _same(self.theirs + name, self.ours + key, *shape)

    def _whole(self, key: str, shape: tuple[int, ...]) -> LogicalPiece:
        return _whole(self.ours + key, shape)

    def _tensor(self, name: str, shape: tuple[int, ...], *pieces: LogicalPiece) -> HubTensor:
        return HubTensor(self.theirs + name, shape, pieces)


def _same(name: str, key: str, *shape: int) -> HubTensor:
    return HubTensor(name, shape, (_whole(key, shape),))


def _whole(key: str, shape: tuple[int, ...]) -> LogicalPiece:
    """Maps all elements of a tensor, in order, to a stored tensor of the same shape."""
    return _window(key, shape, stride=_strides(shape))


def _window(key: str, shape: tuple[int, ...], *, stride: tuple[int, ...], start: int = 0) -> LogicalPiece:
    """Maps a strided range of a tensor's elements, beginning at `start`, to a whole stored tensor."""
    return LogicalPiece(key, shape, stride, start, shape, (0,) * len(shape))


def _row(key: str, shape: tuple[int, ...], *, row: int, rows: int) -> LogicalPiece:
    """Maps a tensor to row `row` of a stored tensor with `rows` rows."""
    one = (1, *shape)
    return LogicalPiece(key, one, _strides(one), 0, (rows, *shape), (row, *(0,) * len(shape)))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
