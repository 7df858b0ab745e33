"""A model of expert layers on static, padded buffers for tests of the stash, and its gradients. No tests."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.transformer.moe.paged_stash import PagedStash, PagePool, PoolLayout

C, HIDDEN, FFN, EXPERTS = 48, 16, 24, 3
PAGE_BYTES = 256
Context = Callable[..., AbstractContextManager[Any]]


def make_stash(device_pages: int = 600, host_pages: int = 0, **options: Any) -> PagedStash:
    """On the CPU."""
    return PagedStash(PagePool("cpu", PoolLayout(PAGE_BYTES, device_pages, host_pages)), **options)


def is_empty_sync(stash: PagedStash) -> bool:
    """Whether all pages are back, each of them once."""
    stash.pool.check_integrity_sync()
    occupancy = stash.pool.occupancy_sync()
    return occupancy.device_held == occupancy.host_held == 0


class Experts(nn.Module):
    """SwiGLU experts over C rows, `live` of them live; the others hold NaN, which must never reach a live row."""

    def __init__(self, live: int, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.live = live
        self.weight1 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 2 * FFN, dtype=dtype) * 0.3)
        self.weight2 = nn.Parameter(torch.randn(EXPERTS, FFN, HIDDEN, dtype=dtype) * 0.3)
        self.offsets = torch.tensor([live // 3, live // 3, live], dtype=torch.int32)

    def forward(self, x: Tensor, probs: Tensor) -> Tensor:
        """x: [C, H], probs: [C], one float dtype. Returns [C, H]."""
        gate, up = F.grouped_mm(x, self.weight1, offs=self.offsets).chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate) * up * probs[:, None], self.weight2, offs=self.offsets)


class Layer(nn.Module):
    """Experts inside a context, with padding before and the residual after them."""

    def __init__(self, name: str, experts: nn.Module, context: Context | None) -> None:
        super().__init__()
        self.name, self.experts, self.context = name, experts, context or (lambda *_, **__: nullcontext())

    def forward(self, hidden: Tensor, probs: Tensor) -> Tensor:
        """hidden: [C, H], probs: [C], one float dtype; the live rows count. Returns [C, H]."""
        live = self.experts.live
        x = F.pad(hidden[:live], (0, 0, 0, C - live), value=torch.nan)
        weights = F.pad(probs[:live], (0, C - live), value=torch.nan)
        with self.context(self.name, live, max_rows=C):
            y = self.experts(x, weights)
        return hidden + F.pad(y[:live], (0, 0, 0, C - live))


def gradients(model: nn.Module, *, live: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Of a loss over live rows, by parameter, input and probs; the model's gradients are cleared."""
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(C, HIDDEN, generator=generator).to(dtype).requires_grad_()
    probs = torch.rand(C, generator=generator).to(dtype).requires_grad_()
    model(hidden, probs)[:live].float().square().sum().backward()
    found = [tensor.grad for tensor in (hidden, probs, *model.parameters()) if tensor.grad is not None]
    model.zero_grad()
    return found
