"""attention_output_gate: rows, stored tensors and values compared with plain torch, and incompatible settings."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.fusions.output_gate import apply_output_gate
from megatron.core.logical_tensors import model_logical_pieces
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.attention import SelfAttention
from tests.unit_tests.core.models.small_models import LATENT, LLAMA_LIKE, loss_of, small_config, small_model

GATED: dict[str, Any] = {**LLAMA_LIKE, "num_query_groups": 2, "attention_output_gate": True}


def attention_of(model: GPTModel) -> SelfAttention:
    attention = model.decoder.layers[0].self_attention
    assert isinstance(attention, SelfAttention)
    return attention


def plain(x: Tensor, qkv: Tensor, proj: Tensor) -> Tensor:
    """Computes gated causal attention without rotation. x: [S, B, H]; 2 groups of 2 query heads with 8 channels."""
    rows = qkv.view(2, 2 + 2 + 1 + 1, 8, -1)  # per group: queries, gates, a key, a value
    query, gate, key, value = (part.flatten(0, 2) for part in rows.split([2, 2, 1, 1], dim=1))
    q, k, v = (F.linear(x, w).unflatten(-1, (-1, 8)).permute(1, 2, 0, 3) for w in (query, key, value))
    scores = q @ k.repeat_interleave(2, dim=1).transpose(-1, -2) / 8**0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x), dtype=torch.bool).triu(1), -torch.inf)
    context = (scores.softmax(-1) @ v.repeat_interleave(2, dim=1)).permute(2, 0, 1, 3).flatten(2)
    return F.linear(context * F.linear(x, gate).sigmoid(), proj)


def test_output_and_gradients_are_those_of_plain_torch() -> None:
    attention = attention_of(small_model(small_config(**GATED, params_dtype=torch.float64)))
    torch.manual_seed(1)
    x = torch.randn(16, 2, 32, dtype=torch.float64)
    weights = [attention.linear_qkv.weight, attention.linear_proj.weight]
    outputs = [attention(x)[0], plain(x, *weights)]
    torch.testing.assert_close(*outputs)
    grads = [torch.autograd.grad(output.square().sum(), weights) for output in outputs]
    torch.testing.assert_close(*grads)


def test_stored_tensors_have_a_fourth_piece() -> None:
    model = small_model(small_config(**GATED))
    weight = attention_of(model).linear_qkv.weight
    assert weight.shape == (2 * (2 + 2 + 1 + 1) * 8, 32)
    pieces = model_logical_pieces(model)["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert [piece.key.rsplit(".", 1)[-1] for piece in pieces] == ["q", "gate", "k", "v"]
    rows = weight.view(2, 6, 8, 32)
    wanted = [rows[:, :2], rows[:, 2:4], rows[:, 4], rows[:, 5]]
    assert all(torch.equal(piece.view_of(weight), part) for piece, part in zip(pieces, wanted, strict=True))


def test_calls_return_the_gates() -> None:
    attention, x = attention_of(small_model(small_config(**GATED))), torch.randn(16, 2, 32)
    mixed, widths = attention.get_query_key_value_tensors(x, output_gate=True, split_qkv=False)
    assert mixed.shape == (16, 2, 2, 48) and widths == [16, 16, 8, 8]
    query, key, value, gate = attention.get_query_key_value_tensors(x, output_gate=True)
    assert query.shape == (16, 2, 4, 8) and key.shape == value.shape == (16, 2, 2, 8)
    assert torch.equal(gate.flatten(3), mixed.split(widths, dim=-1)[1])
    with pytest.raises(ValueError, match="output_gate is False and attention_output_gate is True"):
        attention.get_query_key_value_tensors(x)


@pytest.mark.parametrize("fields", [{}, {"qk_layernorm": True, "add_qkv_bias": True}])
def test_recompute_of_the_core_changes_nothing(fields: dict[str, Any]) -> None:
    saving = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    plainly, again = (small_model(small_config(**GATED, **fields, **more)) for more in ({}, saving))
    for model in (plainly, again):
        loss_of(model).backward()
    for (name, param), other in zip(plainly.named_parameters(), again.parameters(), strict=True):
        assert param.grad is not None and other.grad is not None and torch.equal(param.grad, other.grad), name


def test_half_precision_is_rounded_once() -> None:
    torch.manual_seed(2)
    inputs = [torch.randn(4, 2, 16).bfloat16(), torch.randn(4, 2, 2, 2, 4).bfloat16()]
    half = [value.clone().requires_grad_() for value in inputs]
    wide = [value.double().requires_grad_() for value in inputs]
    outputs = [apply_output_gate(*half), wide[0] * wide[1].flatten(2).sigmoid()]
    assert outputs[0].dtype == torch.bfloat16
    torch.testing.assert_close(outputs[0].double(), outputs[1], atol=1e-6, rtol=2**-8)
    for output in outputs:
        output.sum().backward()
    for ours, exact in zip(half, wide, strict=True):
        torch.testing.assert_close(ours.grad.double(), exact.grad, atol=1e-6, rtol=2**-8)


def test_latent_attention_refuses_it() -> None:
    with pytest.raises(ValueError, match="attention_output_gate is True and multi_latent_attention is True"):
        small_config(**LATENT, attention_output_gate=True)
