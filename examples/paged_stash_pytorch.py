"""Trains a mixture of experts in plain PyTorch twice: normally, and with its experts' saved tensors in a paged stash.

    python examples/paged_stash_pytorch.py                        pages for all live rows
    python examples/paged_stash_pytorch.py --device-pages 0.25    fewer: the rest is recomputed
    python examples/paged_stash_pytorch.py --device-pages 0.1 --host-pages 0.5

The stash is the folder megatron/core/transformer/moe/paged_stash, which requires only torch. benchmarks/live_bytes.py
measures memory.

The experts compute on buffers of C rows regardless of the routing: no shape depends on a value, and no number is read
from the device. R of the rows are live. Autograd would save all C for backward. The stash saves R, in pages. Only the
layer whose backward runs next keeps its buffers. In backward the rows of two layers at a time are restored to buffers
of C. In the first step the order of layers is unknown, and only x gets pages: the rest is recomputed.

Shapes: T tokens, H hidden, F ffn, E experts, at most K of them per token, C = T x K rows, R <= C live rows.
"""

import argparse
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from benchmarks.live_bytes import LiveBytes  # noqa: E402
from megatron.core.transformer.moe.paged_stash import (  # noqa: E402
    Counter,
    PagedStash,
    PagePool,
    PoolLayout,
    Priority,
    gated_activation,
    grouped_gemm,
    recompute_act,
    recompute_gate_up,
)

T, H, F, E, K, LAYERS, VOCABULARY = 512, 64, 96, 8, 4, 8, 128
C = T * K

Context = Callable[..., AbstractContextManager[Any]]


class MoELayer(nn.Module):
    """MoE layer in which a token uses its best experts until they have half of the probability, at most K."""

    def __init__(self, name: str, *, context: Context) -> None:
        super().__init__()
        self.name, self.context = name, context
        self.norm = nn.RMSNorm(H)
        self.router = nn.Parameter(torch.randn(H, E) * 0.1)
        self.weight1 = nn.Parameter(torch.randn(E, H, 2 * F) * H**-0.5)
        self.weight2 = nn.Parameter(torch.randn(E, F, H) * F**-0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        """Applies the layer to hidden, [T, H], fp32. Returns the same shape and dtype."""
        tokens = self.norm(hidden)
        weights, experts = (tokens @ self.router).softmax(dim=-1).topk(K)  # [T, K]
        wanted = weights.cumsum(dim=-1) - weights < 0.5
        # Rows are sorted by expert. Unused rows come last, beyond R.
        experts, order = experts.where(wanted, E).flatten().sort(stable=True)
        offsets = torch.searchsorted(experts, torch.arange(E, device=experts.device), right=True).int()
        # Gather and sum add a token's rows in a fixed order in forward and backward. Atomic adds would not.
        x = tokens[:, None].expand(T, K, H).flatten(0, 1)[order]
        # Beyond R the experts leave arbitrary bytes, including in gradients, so they are zeroed before and after the
        # experts.
        live = torch.arange(C, device=x.device) < offsets[-1]
        x, scale = x.where(live[:, None], 0), weights.flatten()[order].where(live, 0)
        y = self.run_experts(x, scale, offsets=offsets).where(live[:, None], 0)
        return hidden + y[order.argsort()].view(T, K, H).sum(dim=1)

    def run_experts(self, x: Tensor, weights: Tensor, *, offsets: Tensor) -> Tensor:
        """Runs the experts and returns [C, H].

        x: [C, H], fp32. weights: [C], fp32. offsets: end of each expert's rows, [E], int32.
        """
        num_rows = offsets[-1:].long()  # R
        with self.context(self.name, num_rows, max_rows=C) as group:
            # These functions read no row beyond R in forward or backward, because the stash restores no rows there.
            gate_up = grouped_gemm(x, self.weight1, offsets=offsets)
            act = gated_activation(gate_up, weights, num_rows=num_rows)
            y = grouped_gemm(act, self.weight2, offsets=offsets)
            if group is not None:
                # Without marks every tensor requires pages. These two can be recomputed: first act, then gate_up.
                again = recompute_act(num_rows)
                group.mark(act, priority=Priority.ACT, recompute=again, sources=(gate_up, weights))
                again = recompute_gate_up(self.weight1, offsets)
                group.mark(gate_up, priority=Priority.GATE_UP, recompute=again, sources=(x,))
        return y


@dataclass
class Run:
    """Results by step.

    bytes_outside: bytes allocated in forward and still alive after it, without pages. counters: counters of the pool.
    """

    losses: list[float] = field(default_factory=list)
    bytes_outside: list[int] = field(default_factory=list)
    counters: list[list[int]] = field(default_factory=list)


def train(steps: int, device: str, *, pool: PagePool | None = None) -> Run:
    """Trains a small model for some steps, with a stash if a pool is given."""
    stash = None if pool is None else PagedStash(pool)
    context: Context = (lambda *_, **__: nullcontext()) if stash is None else stash.context
    torch.manual_seed(1)
    layers = [MoELayer(f"layer {number}", context=context) for number in range(LAYERS)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, H), *layers, nn.Linear(H, VOCABULARY)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run = Run()
    for step in range(steps):
        torch.manual_seed(step)
        tokens = (torch.rand(T) ** 2 * VOCABULARY).long()  # some experts are chosen more often than others
        with LiveBytes() as made:
            loss = nn.functional.cross_entropy(model(tokens.to(device)), (tokens * 7 % VOCABULARY).to(device))
        bytes_outside = made.total()
        loss.backward()
        if stash is not None:
            counters, is_void = stash.pool.counters.tolist(), stash.is_void_sync()
            stash.reset()
            if is_void:  # These gradients are wrong: skip the step, or repeat it with a larger pool.
                raise SystemExit("Pages ran out for x: increase --device-pages or --host-pages")
            run.counters.append(counters)
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
        run.bytes_outside.append(bytes_outside)
    return run


def compare(plain: Run, stashed: Run, *, page_bytes: int) -> None:
    """Prints one line per step. Raises SystemExit if a loss is not bitwise equal."""
    print("step       loss | saved for backward, MB: plain | stash: outside + device pages | host pages | recomputed")
    for step, counters in enumerate(stashed.counters):
        pages = [counters[tier] * page_bytes for tier in (Counter.HIGH_WATER_DEVICE, Counter.HIGH_WATER_HOST)]
        numbers = [plain.bytes_outside[step], stashed.bytes_outside[step], *pages]
        before, outside, device, host = (number / 1e6 for number in numbers)
        again = f"{counters[Counter.DROPPED_ACT]} act, {counters[Counter.DROPPED_GATE_UP]} gate_up"
        stash = f"{outside:6.2f} + {device:5.2f} = {outside + device:5.2f} ({(outside + device) / before:4.0%})"
        print(f"{step:4} {stashed.losses[step]:10.6f} | {before:28.2f} | {stash} | {host:10.2f} | {again}")
    if stashed.losses != plain.losses:
        raise SystemExit(f"The losses differ. Without the stash they are {plain.losses}")
    print(f"All {len(plain.losses)} losses are bitwise equal to the losses without the stash.")


def main() -> None:
    """Trains without and with the stash, and compares the losses and the memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--page-bytes", type=int, default=4096)
    parser.add_argument(
        "--device-pages",
        type=float,
        default=0.6,
        help="size of the device tier / saved bytes of the plain run (default: 0.6)",
    )
    parser.add_argument(
        "--host-pages",
        type=float,
        default=0.0,
        help="size of the host tier / saved bytes of the plain run (default: 0)",
    )
    options = parser.parse_args()
    plain = train(options.steps, options.device)
    pages = max(plain.bytes_outside) / options.page_bytes
    try:
        layout = PoolLayout(options.page_bytes, int(options.device_pages * pages), int(options.host_pages * pages))
    except ValueError as error:
        parser.error(str(error))
    stashed = train(options.steps, options.device, pool=PagePool(options.device, layout))
    compare(plain, stashed, page_bytes=options.page_bytes)


if __name__ == "__main__":
    main()
