"""Measures the savings and costs of a paged stash in expert layers with static buffers, forward and backward, compared
with alternatives.

    python benchmarks/stash_step.py [--rounds 9] [--layers 8] [--device cuda] [--json FILE]
    python benchmarks/stash_step.py --hidden 1024 --ffn 512 --tokens 512    more FLOPs for each saved byte

The experts of a layer receive T x K rows on average. The numbers are skewed, and shuffled over the layers in every
round.

dynamic    buffers of the R live rows; the host has to read R before it can continue
static     buffers of C = 2 x T x K rows, of which R are live
full       static, and a stash with as many device pages as the live rows require; some act is still recomputed,
           because its reserve assumes C rows in later layers
60%        static, and a stash with 60% of these pages: tensors without pages are recomputed
60% host   the same, and host pages for the rest
host       static, and a stash with host pages only

In a round all variants run one after the other on the same rows. Gradients of all except `dynamic` must be bitwise
equal. Prints the bytes saved for backward (allocated in forward and still alive after it; pages at their high water),
and the time of a step as a ratio, the median over rounds: CPU seconds of the process, on other devices wall time.
"""

import argparse
import json
import statistics
import sys
import time
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
from benchmarks.sides import context as machine  # noqa: E402
from megatron.core.device import keep_cpu_heap, use_deterministic_kernels  # noqa: E402
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

EXPERTS, TOPK = 8, 2
PAGE_BYTES = 65536
SKEW = 0.4  # standard deviation of the logarithm of a layer's rows
SHORT = 0.6


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer. tokens: T. hidden: H. ffn: F."""

    tokens: int = 1024
    hidden: int = 256
    ffn: int = 512

    @property
    def mean_rows(self) -> int:
        """Mean number of rows of a layer's experts."""
        return self.tokens * TOPK

    @property
    def capacity(self) -> int:
        """Number of rows of a buffer, C."""
        return 2 * self.mean_rows

    @property
    def widths(self) -> list[int]:
        """Widths of x, gate_up, act and weights, in elements."""
        return [self.hidden, 2 * self.ffn, self.ffn, 1]


@dataclass
class Rows:
    """A layer's routing.

    tokens: [C], int64. weights: [C], float. offsets: [E], int32. num_rows: [1], int64. live: num_rows on the host.
    """

    tokens: Tensor
    weights: Tensor
    offsets: Tensor
    num_rows: Tensor
    live: int

    def without_padding(self) -> "Rows":
        """Returns the routing for buffers of R rows."""
        return Rows(self.tokens[: self.live], self.weights[: self.live], self.offsets, self.num_rows, self.live)


class ExpertLayer(nn.Module):
    """Gathers rows, runs the experts in the stash's context, and adds their results to the tokens."""

    def __init__(self, name: str, sizes: Sizes) -> None:
        super().__init__()
        self.name = name
        hidden, ffn = sizes.hidden, sizes.ffn
        self.weight1 = nn.Parameter(torch.randn(EXPERTS, hidden, 2 * ffn) * hidden**-0.5)
        # Small, because no norm between the layers limits the growth of the activations.
        self.weight2 = nn.Parameter(torch.randn(EXPERTS, ffn, hidden) * ffn**-0.5 / 8)

    def forward(self, hidden: Tensor, rows: Rows, *, stash: PagedStash | None) -> Tensor:
        """Applies the layer to hidden, [T, H], parameter dtype. Returns the same shape and dtype."""
        # Experts leave arbitrary bytes beyond the live rows, including in gradients.
        live = (torch.arange(len(rows.tokens), device=hidden.device) < rows.num_rows)[:, None]
        x = hidden.index_select(0, rows.tokens).where(live, 0)
        with self._context(rows, stash) as group:
            gate_up = grouped_gemm(x, self.weight1, offsets=rows.offsets)
            act = gated_activation(gate_up, rows.weights, num_rows=rows.num_rows)
            y = grouped_gemm(act, self.weight2, offsets=rows.offsets)
            if group is not None:
                again = recompute_act(rows.num_rows)
                group.mark(act, priority=Priority.ACT, recompute=again, sources=(gate_up, rows.weights))
                again = recompute_gate_up(self.weight1, rows.offsets)
                group.mark(gate_up, priority=Priority.GATE_UP, recompute=again, sources=(x,))
        y = y.where(live, 0)
        return hidden.index_put((rows.tokens,), y, accumulate=True)  # index_add would save y for backward

    def _context(self, rows: Rows, stash: PagedStash | None) -> AbstractContextManager[Any]:
        return nullcontext() if stash is None else stash.context(self.name, rows.num_rows, max_rows=len(rows.tokens))


@dataclass
class Way:
    """One variant, and its results in each round. stash and pool are both given or both None."""

    name: str
    is_padded: bool = True
    stash: PagedStash | None = None
    pool: PagePool | None = None
    seconds: list[float] = field(default_factory=list)
    bytes_outside: list[int] = field(default_factory=list)
    counters: list[list[int]] = field(default_factory=list)

    @staticmethod
    def with_pool(name: str, device: torch.device, *, device_pages: int, host_pages: int) -> "Way":
        """Creates a variant with a stash and a separate pool."""
        pool = PagePool(device, PoolLayout(PAGE_BYTES, device_pages, host_pages))
        return Way(name, stash=PagedStash(pool), pool=pool)


class Bench:
    """The layers, their input, and the gradient of their output."""

    def __init__(self, layers: int, device: torch.device, *, sizes: Sizes) -> None:
        torch.manual_seed(1)
        self.sizes = sizes
        self.generator = torch.Generator().manual_seed(1)
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self.device, self.itemsize = device, dtype.itemsize
        self.layers = nn.ModuleList(ExpertLayer(f"layer {number}", sizes) for number in range(layers)).to(device, dtype)
        self.hidden = torch.randn(sizes.tokens, sizes.hidden, device=device, dtype=dtype, requires_grad=True)
        self.grad = torch.randn(sizes.tokens, sizes.hidden, device=device, dtype=dtype)
        # Log-normal with mean 1, limited to C. All rounds have the same numbers, in a different order of layers.
        logarithms = torch.randn(layers, generator=self.generator) * SKEW - SKEW**2 / 2
        self.live = [min(sizes.capacity, int(sizes.mean_rows * share)) for share in logarithms.exp().tolist()]

    def draw(self) -> list[Rows]:
        """Draws a new routing for every layer."""
        return [
            self._draw_rows(self.live[number]) for number in torch.randperm(len(self.live), generator=self.generator)
        ]

    def step(self, way: Way, routing: list[Rows]) -> list[Tensor]:
        """Times forward and backward, then counts the bytes between them in a second step.

        Returns the gradients of the parameters and of the input, any shape, fp32 or bf16.
        """
        routing = routing if way.is_padded else [rows.without_padding() for rows in routing]
        parameters = [*self.layers.parameters(), self.hidden]
        start = self._now_sync()
        gradients = torch.autograd.grad(self._forward(way, routing), parameters, self.grad)
        if way.stash is not None and way.pool is not None:
            way.counters.append(_read_sync(way.pool.counters))
            way.stash.reset()
        way.seconds.append(self._now_sync() - start)
        with LiveBytes() as made:
            output = self._forward(way, routing)
        way.bytes_outside.append(made.total() - output.nbytes)
        # Runs backward so that, for the stash, this is a normal step.
        torch.autograd.grad(output, parameters, self.grad)
        if way.stash is not None:
            way.stash.reset()
        return list(gradients)

    def pages_needed(self) -> int:
        """Returns the number of pages for all live rows of all layers."""
        layout = PoolLayout(PAGE_BYTES, 1)
        return sum(layout.pages_for(live * width * self.itemsize) for live in self.live for width in self.sizes.widths)

    def _forward(self, way: Way, routing: list[Rows]) -> Tensor:
        hidden: Tensor = self.hidden
        for layer, rows in zip(self.layers, routing, strict=True):
            hidden = layer(hidden, rows, stash=way.stash)
        return hidden

    def _draw_rows(self, live: int) -> Rows:
        # Experts' shares differ by a factor of ten or more.
        shares = torch.randn(EXPERTS, generator=self.generator).exp().cumsum(dim=0)
        offsets = (shares / shares[-1] * live).round().int().to(self.device)
        tokens = torch.randint(self.sizes.tokens, (self.sizes.capacity,), generator=self.generator).to(self.device)
        weights = torch.rand(self.sizes.capacity, generator=self.generator).to(self.grad)
        return Rows(tokens, weights, offsets, offsets[-1:].long(), live)

    def _now_sync(self) -> float:
        if self.device.type == "cpu":
            return time.process_time()
        torch.accelerator.synchronize(self.device)
        return time.perf_counter()


def _read_sync(counters: Tensor) -> list[int]:
    numbers: list[int] = counters.tolist()
    return numbers


def ways_of(bench: Bench) -> list[Way]:
    """Returns the variants to compare."""
    need = bench.pages_needed()
    short, rest = int(SHORT * need), need - int(SHORT * need)
    return [
        Way("dynamic", is_padded=False),
        Way("static"),
        Way.with_pool("full", bench.device, device_pages=need, host_pages=0),
        Way.with_pool("60%", bench.device, device_pages=short, host_pages=0),
        Way.with_pool("60% host", bench.device, device_pages=short, host_pages=rest),
        Way.with_pool("host", bench.device, device_pages=0, host_pages=need),
    ]


def measure(bench: Bench, ways: list[Way], *, rounds: int) -> None:
    """Runs rounds of all variants, after a warm-up round in which stashes learn the order of a step.

    Raises SystemExit if a padded variant's gradients differ from static's.
    """
    for number in range(rounds + 1):
        routing = bench.draw()
        static = next(way for way in ways if way.name == "static")
        expected = bench.step(static, routing)
        for way in ways:
            if way is static:
                continue
            gradients = bench.step(way, routing)
            if way.is_padded and not all(map(torch.equal, gradients, expected)):
                raise SystemExit(f"{way.name}, round {number}: gradients differ from static's")
            del gradients
        for way in ways if number == 0 else ():
            way.seconds.clear()
            way.bytes_outside.clear()
            way.counters.clear()


def figures_of(way: Way, ways: dict[str, Way]) -> dict[str, Any]:
    """Returns the table line of a variant: medians of times over rounds, and maxima of bytes and counts."""
    figures: dict[str, Any] = {"way": way.name}
    for other in ("dynamic", "static", "full"):
        ratios = [mine / theirs for mine, theirs in zip(way.seconds, ways[other].seconds, strict=True)]
        figures[f"time_of_{other}"] = statistics.median(ratios)
    most = [max(column) for column in zip(*way.counters)] or [0] * len(Counter)
    figures["bytes_outside"] = max(way.bytes_outside)
    figures["device_page_bytes"] = most[Counter.HIGH_WATER_DEVICE] * PAGE_BYTES
    figures["host_page_bytes"] = most[Counter.HIGH_WATER_HOST] * PAGE_BYTES
    figures["on_device"] = figures["bytes_outside"] + figures["device_page_bytes"]
    for counter in (Counter.VOID, Counter.SPILLED_PAGES, Counter.DROPPED_GATE_UP, Counter.DROPPED_ACT):
        figures[counter.name.lower()] = most[counter]
    figures["median_seconds"] = statistics.median(way.seconds)
    return figures


def main() -> None:
    """Measures the variants and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="counted rounds (default: 9)")
    parser.add_argument("--layers", type=int, default=8, help="expert layers (default: 8)")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="cpu (default) or cuda")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    for name, default in vars(Sizes()).items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"size of a layer (default: {default})")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_cpu_heap()
    if options.device.type != "cpu":
        # By default a GPU accumulates the gradients of tokens in any order, but gradients must be bitwise equal.
        use_deterministic_kernels()
    sizes = Sizes(options.tokens, options.hidden, options.ffn)
    bench = Bench(options.layers, options.device, sizes=sizes)
    ways = ways_of(bench)
    measure(bench, ways, rounds=options.rounds)
    rows = [figures_of(way, {way.name: way for way in ways}) for way in ways]
    print(
        f"{'':10}{'time x: dynamic':>16}{'static':>8}{'full':>8}{'waits on device, MB':>21}{'of dynamic':>12}"
        f"{'of static':>11}{'on host':>9}{'void':>6}{'spilled':>9}{'gate_up':>9}{'act again':>11}"
    )
    dynamic, static = rows[0]["on_device"], rows[1]["on_device"]
    for row in rows:
        print(
            f"{row['way']:10}{row['time_of_dynamic']:16.3f}{row['time_of_static']:8.3f}{row['time_of_full']:8.3f}"
            f"{row['on_device'] / 1e6:21.1f}{row['on_device'] / dynamic:12.2f}{row['on_device'] / static:11.2f}"
            f"{row['host_page_bytes'] / 1e6:9.1f}{row['void']:6}{row['spilled_pages']:9}{row['dropped_gate_up']:9}"
            f"{row['dropped_act']:11}"
        )
    if options.json is not None:
        shape = {"layers": options.layers, **vars(sizes), "capacity": sizes.capacity, "live_rows": bench.live}
        where = {**machine(), "device": str(options.device)} if options.device.type != "cpu" else machine()
        options.json.write_text(json.dumps({"rows": rows, "rounds": options.rounds, **shape, **where}, indent=1) + "\n")


if __name__ == "__main__":
    main()
