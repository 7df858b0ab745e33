"""Triton kernel for the operator in router.py, and its launcher, which has the operator's name."""
# mypy: allow-untyped-defs

import functools
from collections.abc import Iterator, Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.device.triton_compile import CompileCase, Residency, compile_case
from megatron.core.device.triton_launch import MAX_PREPARED, PreparedLaunch, next_power_of_2

# Gradients computed per program.
_TILE = 2048
_WARPS = {"num_warps": 4}


@triton.jit(
    do_not_specialize=["num_tokens", "num_experts", "choices"],
    do_not_specialize_on_alignment=["token_stride", "expert_stride"],
)
def choice_grad_kernel(
    grad_weights,
    weights,
    indices,
    grad_scores,
    scores,
    grad_logits,
    num_tokens,
    num_experts,
    choices,
    token_stride,
    expert_stride,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Computes the gradient of a token's logits from the gradients of its scores s and of its chosen weights w.

    With the gradients g of s and h of w, it is s (g - <s, g>), plus w (h - <w, h>) at the chosen experts. token_stride
    and expert_stride are the strides of grad_scores; all other tensors are contiguous.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, EXPERTS)
    is_token = token < num_tokens
    inside = is_token[:, None] & (expert < num_experts)[None, :]
    place = token.to(tl.int64)[:, None] * num_experts + expert[None, :]
    score = tl.load(scores + place, mask=inside, other=0)
    given = token.to(tl.int64)[:, None] * token_stride + expert.to(tl.int64)[None, :] * expert_stride
    grad = tl.load(grad_scores + given, mask=inside, other=0)
    total = score * (grad - tl.sum(score * grad, axis=1)[:, None])

    mean = tl.zeros((TOKENS,), dtype=scores.dtype.element_ty)
    slot = token.to(tl.int64) * choices
    for choice in range(choices):
        weight = tl.load(weights + slot + choice, mask=is_token, other=0)
        mean += weight * tl.load(grad_weights + slot + choice, mask=is_token, other=0)
    for choice in range(choices):
        weight = tl.load(weights + slot + choice, mask=is_token, other=0)
        of_choice = weight * (tl.load(grad_weights + slot + choice, mask=is_token, other=0) - mean)
        chosen = tl.load(indices + slot + choice, mask=is_token, other=-1)
        total += tl.where(chosen[:, None] == expert[None, :], of_choice[:, None], 0)
    tl.store(grad_logits + place, total, mask=inside)


def choice_grad(
    grad_weights: Tensor, weights: Tensor, indices: Tensor, *, grad_scores: Tensor, scores: Tensor
) -> Tensor:
    """Computes the gradient of the logits from the gradients of two softmaxes, over the chosen experts and over all.

    grad_weights, weights: [T, K], fp32 or fp64; indices: [T, K], int64, distinct for a token; grad_scores, scores: [T,
    E], same dtype, of any strides. Returns [T, E], same dtype.
    """
    scores = scores.contiguous()
    (num_tokens, num_experts), choices = scores.shape, weights.shape[1]
    grad_logits = torch.empty_like(scores)
    if grad_logits.numel():
        launch, tile_tokens = _choice(num_experts, choices, grad_scores.stride())
        chosen = (grad_weights.contiguous(), weights.contiguous(), indices.contiguous())
        launch(-(-num_tokens // tile_tokens), (*chosen, grad_scores, scores, grad_logits), (num_tokens,))
    return grad_logits


@functools.lru_cache(MAX_PREPARED)
def _choice(num_experts: int, choices: int, strides: tuple[int, ...]) -> tuple[PreparedLaunch, int]:
    """Returns a launch of choice_grad_kernel, and the tokens of a tile. strides: of grad_scores."""
    tile, (token_stride, expert_stride) = _tile(num_experts), strides
    sizes = {"num_experts": num_experts, "choices": choices}
    fixed = {**sizes, "token_stride": token_stride, "expert_stride": expert_stride, **tile}
    return PreparedLaunch(choice_grad_kernel, fixed, options=_WARPS), tile["TOKENS"]


def residencies(num_warps: int) -> Mapping[str, Residency]:
    """Maps the kernel's name to the residency that its launcher assumes, which is the default."""
    assert num_warps == _WARPS["num_warps"]
    return {"choice_grad_kernel": Residency()}


def compile_cases() -> Iterator[CompileCase]:
    """Yields compile cases for few and for many experts. grad_scores has the strides of a balancing loss's gradient."""
    for name, num_experts in (("fp32", 8), ("fp32", 256), ("fp64", 256)):
        data = dict.fromkeys(("grad_weights", "weights", "grad_scores", "scores", "grad_logits"), f"*{name}:16")
        yield compile_case(
            choice_grad_kernel,
            f"choice_grad, {name}, {num_experts} experts",
            options=_WARPS,
            indices="*i64:16",
            num_tokens="i32",
            num_experts="i32",
            choices="i32",
            token_stride="i32",
            expert_stride=1,
            **data,
            **_tile(num_experts),
        )


def _tile(num_experts: int) -> dict[str, int]:
    experts = next_power_of_2(num_experts)
    return {"TOKENS": max(1, _TILE // experts), "EXPERTS": experts}
