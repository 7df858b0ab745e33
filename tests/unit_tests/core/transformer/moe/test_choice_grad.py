"""Gradient of both router softmaxes: bit-identical to autograd, and the kernel is bit-identical to the CPU operator."""

from collections.abc import Callable
from functools import partial
from types import ModuleType

import pytest
import torch
from torch import Tensor

from megatron.core.transformer import moe
from megatron.core.transformer.moe import router

# Numbers of tokens, experts and choices.
SIZES = [(0, 4, 2), (1, 1, 1), (13, 6, 2), (70, 33, 8), (5, 512, 8)]


def operands(tokens: int, experts: int, topk: int, *, is_row: bool, dtype: torch.dtype) -> tuple[list[Tensor], dict]:
    generator = torch.Generator().manual_seed(tokens)
    logits = torch.randn(tokens, experts, generator=generator, dtype=dtype)
    chosen, indices = logits.topk(topk)
    given = torch.randn(1 if is_row else tokens, experts, generator=generator, dtype=dtype).expand(tokens, -1)
    grad_weights = torch.randn(tokens, topk, generator=generator, dtype=dtype)
    return [grad_weights, chosen.softmax(-1), indices], {"grad_scores": given, "scores": logits.softmax(-1)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("is_row", [True, False])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_kernel_computes_what_the_cpu_does(
    interpreted: Callable[..., ModuleType], sizes: tuple[int, int, int], is_row: bool, dtype: torch.dtype
) -> None:
    given, named = operands(*sizes, is_row=is_row, dtype=dtype)
    found = interpreted("triton_router", of=moe.__name__).choice_grad(*given, **named)
    expected = router.choice_grad(*given, **named)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("uses", [("weights", "scores"), ("weights",), ("scores",)], ids=str)
def test_one_node_has_the_bits_of_two_softmaxes(uses: tuple[str, ...]) -> None:
    choose = partial(torch.topk, k=3, dim=-1)
    logits = torch.randn(50, 9, generator=torch.Generator().manual_seed(1))
    factors = {"weights": torch.randn(50, 3), "scores": torch.randn(9)}
    gradients = []
    for route in (router._softmax_of_chosen_and_all, router._softmax_of_chosen):
        x = logits.clone().requires_grad_()
        choice = route(x, None, choose=choose)
        results = {"weights": choice.weights, "scores": x.softmax(-1) if choice.scores is None else choice.scores}
        sum((results[name] * factors[name]).sum() for name in uses).backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_the_operator_fits_what_torch_asks_of_it() -> None:
    given, named = operands(13, 6, 2, is_row=True, dtype=torch.float32)
    torch.library.opcheck(torch.ops.router.choice_grad.default, tuple(given), named)
