"""Inputs of the tests of block-scaled rows: every bf16 number, in rows that exercise the scales."""

import torch
from torch import Tensor


def all_bf16() -> Tensor:
    """Returns all numbers, among them both zeros, subnormal ones, infinities and NaN: [65536], bf16."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def rows_of_codes(block: int) -> Tensor:
    """Returns rows of 2.5 blocks, bf16, in which every number stands beside near, far and arbitrary numbers.

    Infinities and NaN, which hide the other numbers of their block, are in the first part only.
    """
    numbers, wide = all_bf16(), block * 5 // 2
    order = torch.randperm(65536, generator=torch.Generator().manual_seed(block))
    finite = numbers[order][numbers[order].isfinite()]
    parts = [numbers, finite, _within_binades(finite)]
    flat = torch.cat([torch.nn.functional.pad(part, (0, -len(part) % wide)) for part in parts])
    return flat.view(-1, wide)


def _within_binades(numbers: Tensor) -> Tensor:
    """Returns the numbers in an order in which neighbours have similar exponents, and any mantissas and signs."""
    exponents = numbers.float().abs().view(torch.int32) >> 26
    return numbers[exponents.argsort(stable=True)]
