"""A GPT in plain PyTorch, as one function of weights with Megatron's names. Imports only torch; holds no tests.

The names determine the architecture: a norm with a bias is a LayerNorm, position weights replace rotary embeddings, a
router implies experts. It computes in the weights' dtype, so that fp64 weights give an fp64 reference.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class PlainShape:
    """Settings that the weights do not determine.

    vocab_size: without padding. aux_loss_coeff, z_loss_coeff: coefficients of the router's losses.
    """

    num_layers: int
    num_heads: int
    num_groups: int
    vocab_size: int
    topk: int = 1
    aux_loss_coeff: float = 0.0
    z_loss_coeff: float = 0.0
    rotary_base: float = 10000.0
    epsilon: float = 1e-5


@dataclass
class RouterLosses:
    """Router losses summed over layers, without coefficients; scalars."""

    load_balancing: Tensor
    z: Tensor


def plain_losses(weights: Weights, tokens: Tensor, labels: Tensor, *, shape: PlainShape) -> tuple[Tensor, RouterLosses]:
    """Computes the per-token losses and the router losses of one token group.

    tokens, labels: [B, S], int64. Returns the losses, [B, S], in the weights' dtype, and the router losses.
    """
    embedding = weights["embedding.word_embeddings.weight"]
    x = embedding[tokens]
    routers = RouterLosses(x.new_zeros(()), x.new_zeros(()))
    if "embedding.position_embeddings.weight" in weights:
        x = x + weights["embedding.position_embeddings.weight"][: tokens.shape[1]]
    for number in range(shape.num_layers):
        prefix = f"decoder.layers.{number}."
        layer = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
        x = x + _attention(_norm(x, layer, "input_layernorm", shape), layer, shape)
        x = x + _feed_forward(_norm(x, layer, "pre_mlp_layernorm", shape), layer, shape, routers)
    x = _norm(x, weights, "decoder.final_layernorm", shape)
    logits = x @ weights.get("output_layer.weight", embedding)[: shape.vocab_size].T
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none"), routers


def _norm(x: Tensor, weights: Weights, name: str, shape: PlainShape) -> Tensor:
    weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    if bias is None:
        return x / (x.square().mean(-1, keepdim=True) + shape.epsilon).sqrt() * weight
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + shape.epsilon).sqrt() * weight + bias


def _linear(x: Tensor, weights: Weights, name: str) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def _attention(x: Tensor, layer: Weights, shape: PlainShape) -> Tensor:
    batch, seq, _ = x.shape
    groups, queries = shape.num_groups, shape.num_heads // shape.num_groups
    # Each group's rows are its queries, its key, its value. [B, S, G, q + 2, D]
    mixed = _linear(x, layer, "self_attention.linear_qkv").view(batch, seq, groups, queries + 2, -1)
    if "mlp.linear_fc1.bias" not in layer:
        mixed = torch.cat([_rotate(mixed[..., :-1, :], shape.rotary_base), mixed[..., -1:, :]], dim=-2)
    query, key, value = mixed[..., :queries, :], mixed[..., queries, :], mixed[..., queries + 1, :]
    scores = torch.einsum("bsgqd,btgd->bgqst", query, key) / query.shape[-1] ** 0.5
    future = torch.ones(seq, seq, dtype=torch.bool).triu(1)
    probs = scores.masked_fill(future, -torch.inf).softmax(-1)
    context = torch.einsum("bgqst,btgd->bsgqd", probs, value)
    return _linear(context.reshape(batch, seq, -1), layer, "self_attention.linear_proj")


def _rotate(x: Tensor, base: float) -> Tensor:
    """Rotates channel i together with channel i + D/2 of each head. x: [B, S, G, N, D]."""
    half = x.shape[-1] // 2
    frequencies = base ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(x.shape[1], dtype=torch.float64), frequencies)[:, None, None]
    turned = torch.view_as_complex(torch.stack([x[..., :half], x[..., half:]], -1)) * torch.polar(
        torch.ones_like(angles), angles
    ).to(torch.complex128 if x.dtype == torch.float64 else torch.complex64)
    return torch.cat([turned.real, turned.imag], dim=-1)


def _feed_forward(x: Tensor, layer: Weights, shape: PlainShape, routers: RouterLosses) -> Tensor:
    if "mlp.router.weight" in layer:
        return _experts(x, layer, shape, routers)
    hidden = _linear(x, layer, "mlp.linear_fc1")
    return _linear(F.gelu(hidden) if "mlp.linear_fc1.bias" in layer else _swiglu(hidden), layer, "mlp.linear_fc2")


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


def _experts(x: Tensor, layer: Weights, shape: PlainShape, routers: RouterLosses) -> Tensor:
    """Runs every expert on every token and weights experts that the router did not choose by 0."""
    tokens = x.flatten(0, 1)  # [T, H]
    logits = tokens @ layer["mlp.router.weight"].T  # [T, E]
    num_experts = logits.shape[1]
    chosen = torch.zeros_like(logits).scatter(1, logits.topk(shape.topk).indices, 1.0)
    share = logits.masked_fill(chosen == 0, -torch.inf).softmax(-1)
    routers.load_balancing = routers.load_balancing + num_experts * (
        (chosen.mean(0) / shape.topk) @ logits.softmax(-1).mean(0)
    )
    routers.z = routers.z + logits.logsumexp(-1).square().mean()
    # Layout of the grouped weights: [E, H, 2F] and [E, F, H].
    hidden = tokens @ layer["mlp.experts.weight1"].reshape(num_experts, tokens.shape[1], -1)  # [E, T, 2F]
    outputs = _swiglu(hidden) @ layer["mlp.experts.weight2"].reshape(num_experts, -1, tokens.shape[1])
    return torch.einsum("te,eth->th", share, outputs).view(x.shape)
