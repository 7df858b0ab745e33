"""A model of expert layers with static, padded buffers for tests of the stash, and its gradients. Contains no tests."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.transformer.moe.paged_stash import (
    PagedStash,
    PagePool,
    PoolLayout,
    Priority,
    StashGroup,
    gated_activation,
    grouped_gemm,
    recompute_act,
    recompute_gate_up,
)

C, LIVE, HIDDEN, FFN, EXPERTS = 48, 37, 16, 24, 3
PAGE_BYTES = 256
Context = Callable[..., AbstractContextManager[Any]]


def make_stash(device_pages: int = 600, host_pages: int = 0, **options: Any) -> PagedStash:
    """Creates a stash with a small CPU pool."""
    return PagedStash(PagePool("cpu", PoolLayout(PAGE_BYTES, device_pages, host_pages)), **options)


def is_empty_sync(stash: PagedStash) -> bool:
    """Returns whether every page has been returned exactly once."""
    stash.pool.check_integrity_sync()
    occupancy = stash.pool.occupancy_sync()
    return occupancy.device_held == occupancy.host_held == 0


class Experts(nn.Module):
    """SwiGLU experts over C rows, of which `live` are live. The others are NaN and must not affect a live row."""

    def __init__(self, live: int, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.live = live
        self.weight1 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 2 * FFN, dtype=dtype) * 0.3)
        self.weight2 = nn.Parameter(torch.randn(EXPERTS, FFN, HIDDEN, dtype=dtype) * 0.3)
        self.offsets = torch.tensor([live // 3, live // 3, live], dtype=torch.int32)

    def forward(self, x: Tensor, probs: Tensor, group: StashGroup | None = None) -> Tensor:
        """x: [C, H], probs: [C], one float dtype. Returns [C, H]."""
        gate, up = F.grouped_mm(x, self.weight1, offs=self.offsets).chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate) * up * probs[:, None], self.weight2, offs=self.offsets)


class MarkedExperts(Experts):
    """Experts with functions that can be recomputed, and marks that describe how."""

    def forward(self, x: Tensor, probs: Tensor, group: StashGroup | None = None) -> Tensor:
        """x: [C, H], probs: [C], one float dtype. Returns [C, H]."""
        num_rows = torch.tensor([self.live])
        gate_up = grouped_gemm(x, self.weight1, offsets=self.offsets)
        act = gated_activation(gate_up, probs, num_rows=num_rows)
        if group is not None:
            again = recompute_gate_up(self.weight1, self.offsets)
            group.mark(gate_up, priority=Priority.GATE_UP, recompute=again, sources=(x,))
            group.mark(act, priority=Priority.ACT, recompute=recompute_act(num_rows), sources=(gate_up, probs))
        return grouped_gemm(act, self.weight2, offsets=self.offsets)


class Layer(nn.Module):
    """Runs experts inside a context, with NaN padding before them and the residual after them."""

    def __init__(self, name: str, experts: Experts, context: Context | None) -> None:
        super().__init__()
        self.name, self.experts, self.context = name, experts, context or (lambda *_, **__: nullcontext())

    def forward(self, hidden: Tensor, probs: Tensor) -> Tensor:
        """hidden: [C, H], probs: [C], one float dtype; only live rows matter. Returns [C, H]."""
        live = self.experts.live
        x = F.pad(hidden[:live], (0, 0, 0, C - live), value=torch.nan)
        weights = F.pad(probs[:live], (0, C - live), value=torch.nan)
        with self.context(self.name, live, max_rows=C) as group:
            y = self.experts(x, weights, group)
        return hidden + F.pad(y[:live], (0, 0, 0, C - live))


class Model(nn.Module):
    """A sequence of layers. around: wraps each layer's forward, for example in a checkpoint."""

    def __init__(
        self,
        context: Context | None,
        *,
        kind: type[Experts] = Experts,
        num_layers: int = 3,
        dtype: torch.dtype = torch.float32,
        around: Callable[..., Tensor] = lambda layer, *tensors: layer(*tensors),
    ) -> None:
        super().__init__()
        torch.manual_seed(5)
        experts = [kind(LIVE, dtype=dtype) for _ in range(num_layers)]
        self.layers = nn.ModuleList(Layer(str(number), one, context) for number, one in enumerate(experts))
        self.around, self.dtype = around, dtype

    def forward(self, hidden: Tensor, probs: Tensor) -> Tensor:
        """hidden: [C, H], probs: [C], one float dtype. Returns [C, H]."""
        for layer in self.layers:
            hidden = self.around(layer, hidden, probs)
        return hidden


def inputs(dtype: torch.dtype = torch.float32, seed: int = 7) -> tuple[Tensor, Tensor]:
    """Returns hidden [C, H] and probs [C], which require grad."""
    generator = torch.Generator().manual_seed(seed)
    hidden, probs = (torch.rand(*size, generator=generator).to(dtype) for size in ((C, HIDDEN), (C,)))
    return hidden.requires_grad_(), probs.requires_grad_()


def loss_of(output: Tensor) -> Tensor:
    """Sums the squares of live rows. output: [C, H], any float dtype. Returns a scalar, fp32."""
    return output[:LIVE].float().square().sum()


def gradients(model: nn.Module, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Returns the existing gradients of the inputs and parameters, and clears the model's gradients."""
    hidden, probs = inputs(dtype)
    loss_of(model(hidden, probs)).backward()
    found = [tensor.grad for tensor in (hidden, probs, *model.parameters()) if tensor.grad is not None]
    model.zero_grad()
    return found


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    """Asserts that the tensors are bit-identical and contain no NaN."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert not other.isnan().any() and torch.equal(one, other)
