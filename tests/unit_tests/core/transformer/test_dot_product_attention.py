"""Attention cores compared with a naive reference: packed sequences, windows, groups and masks over random shapes."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import attention_tiles, dot_product_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend
from tests.unit_tests.core.models.small_models import LATENT, LLAMA_LIKE, SEQ, small_batch, small_config, small_model


def naive(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Computes softmax(q k^T / sqrt(D)) v head by head. allowed: [B, S, S]; sinks: [N], logits of a zero column."""
    heads = []
    for head in range(query.shape[2]):
        group = head // (query.shape[2] // key.shape[2])
        q, k, v = query[:, :, head], key[:, :, group], value[:, :, group]  # [S, B, D]
        scores = torch.einsum("sbd,tbd->bst", q, k) / q.shape[-1] ** 0.5
        # A token that attends to nothing gets 0.
        scores = scores.masked_fill(~allowed, -1e30)
        if sinks is not None:
            scores = torch.cat((scores, sinks[head].expand(*scores.shape[:2], 1)), dim=-1)
        probs = scores.softmax(-1)[..., : len(key)].masked_fill(~allowed, 0)
        heads.append(torch.einsum("bst,tbd->sbd", probs, v))
    return torch.cat(heads, dim=-1)


def borders(batch: int, seq: int, draw: random.Random) -> list[int]:
    """Draws segment boundaries: every sample's end, some positions in between, and an empty segment."""
    inner = draw.sample(range(batch * seq), k=draw.randint(0, batch * seq // 2))
    return sorted({0, *inner, *range(0, batch * seq + 1, seq)}) + [batch * seq]


def allowed_pairs(batch: int, seq: int, ends: list[int], left: int) -> Tensor:
    """Returns the causal mask within segments and windows: [B, S, S], whether row i attends to column j."""
    segment = torch.tensor([sum(token >= end for end in ends) for token in range(batch * seq)]).view(batch, seq)
    distance = torch.arange(seq)[:, None] - torch.arange(seq)
    seen = (distance >= 0) & ((distance <= left) | (left == -1))
    return seen & (segment[:, :, None] == segment[:, None, :])


@pytest.mark.slow
@pytest.mark.parametrize("softmax", ["vanilla", "off-by-one", "learnable"])
@pytest.mark.parametrize("backend", [AttnBackend.auto, AttnBackend.unfused])
def test_attention_equals_the_naive_one_on_random_shapes(
    backend: AttnBackend, softmax: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Makes windows of short sequences span several blocks.
    for module in (dot_product_attention, attention_tiles):
        monkeypatch.setattr(module, "MIN_ROWS", 2)
    draw = random.Random(4)
    for _ in range(80 if softmax == "vanilla" else 40):
        batch, seq, groups, width = (draw.randint(1, top) for top in (3, 16, 3, 8))
        heads = groups * draw.randint(1, 3)
        fields: dict[str, Any] = {"num_attention_heads": heads, "num_query_groups": groups, "kv_channels": width}
        left = draw.choice([-1, 0, 1, 2, 3, 5, seq - 1, seq])
        window = draw.choice([(left, 0), (left, -1)] + [None] * (left == -1))
        fields |= {"softmax_type": softmax, "params_dtype": torch.float64}
        core = DotProductAttention(small_config(**fields, attention_backend=backend, window_size=window), 1)
        learned = list(core.parameters())
        assert [p.shape for p in learned] == [(heads,)] * (softmax == "learnable")
        sinks = {"vanilla": None, "off-by-one": torch.zeros(heads).double()}.get(softmax, core.softmax_offset)
        for parameter in learned:
            torch.nn.init.normal_(parameter)
        shapes = (heads, width), (groups, width), (groups, draw.choice([width, width, 1, 9]))
        query, key, value = (
            torch.randn(seq, batch, *shape, dtype=torch.float64, requires_grad=True) for shape in shapes
        )
        ends = borders(batch, seq, draw)
        samples = list(range(0, batch * seq + 1, seq))
        documents, unmasked = (allowed_pairs(batch, seq, cuts, -1)[:, None] for cuts in (ends, samples))
        some, all_pairs = (allowed_pairs(batch, seq, cuts, left) for cuts in (ends, samples))
        sees = torch.rand(batch, seq, 1) < 0.8
        cases: list[tuple[Tensor, dict[str, Any]]] = [
            (some, {"packed_seq_params": PackedSeqParams(cu_seqlens_q=torch.tensor(ends, dtype=torch.int32))}),
            (some & sees, {"attention_mask": ~(documents & sees[:, None])}),
            (all_pairs, {"attention_mask": ~unmasked}),
            (all_pairs, {}),
        ]
        for allowed, options in cases:
            wanted = naive(query, key, value, allowed, sinks)
            found = core(query, key, value, **options)
            torch.testing.assert_close(found, wanted)
            upstream = torch.randn_like(wanted)
            inputs = (query, key, value, *learned)
            expected = torch.autograd.grad(wanted, inputs, upstream)
            torch.testing.assert_close(torch.autograd.grad(found, inputs, upstream), expected)


@pytest.mark.parametrize(
    ("positions", "fields"),
    [
        ("rope", {**LLAMA_LIKE, "num_query_groups": 2}),
        ("none", {**LLAMA_LIKE, "num_query_groups": 2}),
        ("rope", {**LATENT, "window_size": (3, 0)}),
    ],
)
def test_a_packed_document_equals_the_document_alone(positions: str, fields: dict[str, Any]) -> None:
    model = small_model(small_config(**fields), position_embedding_type=positions)
    input_ids, position_ids, labels = small_batch()
    ends = [0, 5, 6, SEQ, SEQ + 9, 2 * SEQ]
    packed = PackedSeqParams(cu_seqlens_q=torch.tensor(ends, dtype=torch.int32))
    losses = model(input_ids, position_ids, None, labels=labels, packed_seq_params=packed)
    for start, end in zip(ends, ends[1:], strict=False):
        ids, wanted = (t.reshape(1, -1)[:, start:end] for t in (input_ids, labels))
        alone = model(ids, torch.arange(end - start)[None], None, labels=wanted)
        torch.testing.assert_close(losses.view(1, -1)[:, start:end], alone)


def test_windows_of_layers_follow_the_pattern() -> None:
    def windows(freq: object) -> list[bool]:
        config = small_config(num_layers=4, window_size=(2, 0), window_attn_skip_freq=freq)
        return [config.window_of_layer(number) is not None for number in (1, 2, 3, 4)]

    assert windows(None) == [True] * 4
    assert windows(2) == [True, False, True, False]
    assert windows("[1]*3+[0]") == windows(4) == [True, True, True, False]


def test_packed_attention_drops_out_in_training_only() -> None:
    core = DotProductAttention(small_config(attention_dropout=0.5), 1)
    packed = PackedSeqParams(cu_seqlens_q=torch.tensor([0, 7, 16]))
    q = torch.randn(16, 1, 4, 8)
    assert not torch.equal(core(q, q, q, packed_seq_params=packed), core(q, q, q, packed_seq_params=packed))
    core.eval()
    assert torch.equal(core(q, q, q, packed_seq_params=packed), core(q, q, q, packed_seq_params=packed))


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ([0, 9, 5, 32], "must start at 0 and increase"),
        ([1, 32], "must start at 0 and increase"),
        ([0, 10, 20, 32], "from token 10 to 20: must not cross the end of a sample, and all samples have 16 tokens"),
        ([0, 16], "ends at 16: must end at micro-batch 2 x sequence 16"),
    ],
)
def test_wrong_borders_are_named(ends: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PackedSeqParams(cu_seqlens_q=torch.tensor(ends)).require_samples(2, 16)
    with pytest.raises(ValueError, match="max_seqlen_q is 3: must be the length of the longest segment, 9"):
        PackedSeqParams(cu_seqlens_q=torch.tensor([0, 9]), max_seqlen_q=3)


def test_a_sink_takes_its_share_under_dropout_too() -> None:
    config = small_config(attention_dropout=0.5, softmax_type="learnable", num_attention_heads=1)
    core = DotProductAttention(config, 1)
    assert core.softmax_offset is not None
    with torch.no_grad():
        core.softmax_offset.fill_(torch.tensor(8.0).log())
    # All scores are 0: each of 8 tokens has weight 1 / 16 in the last row, which dropout sets to zero or doubles.
    zeros, ones = torch.zeros(8, 500, 1, 32), torch.ones(8, 500, 1, 32)
    last = core(zeros, zeros, ones)[-1, :, 0] * 8
    assert torch.equal(last, last.round()) and 3.5 < last.mean() < 4.5
    core.eval()
    torch.testing.assert_close(core(zeros, zeros, ones)[-1, :, 0], torch.full((500,), 0.5))


def test_a_mask_and_borders_exclude_each_other() -> None:
    core, q, mask = DotProductAttention(small_config(), 1), torch.randn(4, 1, 4, 8), torch.zeros(4, 4).bool()
    with pytest.raises(ValueError, match="attention_mask and packed_seq_params are both given"):
        core(q, q, q, mask, packed_seq_params=PackedSeqParams(cu_seqlens_q=torch.tensor([0, 4])))
