"""Experts that compute in the pages of a stash on a GPU have the bits of experts whose rows are copied, also with rows
on the host, with dropped gate_up and in replays with other rows, and are close to experts without a stash. Skipped
without a GPU.
"""

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu.checks.reporting import graphs_of
from megatron.core.device import default_device, prepare_device
from megatron.core.fusions.gated_activation import GatedActivation
from megatron.core.transformer.module import LayerParts
from megatron.core.transformer.moe.expert_function import ExpertLinear, ExpertMath, expert_outputs
from megatron.core.transformer.moe.paged_stash import Counter, PagedStash, PagePool, PoolLayout
from megatron.core.transformer.moe.static_rows import order_by_expert

pytestmark = pytest.mark.gpu

LAYERS, EXPERTS, HIDDEN, FFN, TOKENS, CHOICES, CAPACITY = 3, 4, 256, 192, 500, 2, 900
# Least common multiple of the bytes of a row of x and of gate_up, in bf16. A page of 8 has fewer rows than a tile, and
# the kernels find each row separately (see triton_pages.py).
LEAST_BYTES = 1536
ERROR = 2e-2  # several roundings to bf16, in other orders
# Pages on the device and on the host in units of the pages that one layer needs at most, and what happens. In a known
# order of layers, the last one needs none.
POOLS: dict[str, tuple[float, float, set[Counter]]] = {
    "all on the device": (3.0, 0.0, set()),
    "on both": (0.4, 3.0, {Counter.SPILLED_PAGES}),
    "few": (1.5, 0.0, {Counter.DROPPED_GATE_UP}),
}


class Model:
    """Layers of experts in a row, with inputs and results in fixed memory, as graphs require.

    capacity: rows of a buffer. alignment: of the rows of each expert.
    """

    capacity, alignment = CAPACITY, 1

    def __init__(self, device: torch.device, *, has_more: bool = False) -> None:
        self.device, self._generator = device, torch.Generator().manual_seed(1)
        self.x = self._random(TOKENS, HIDDEN)
        self.probs = torch.rand(TOKENS, CHOICES, generator=self._generator).to(device)
        self.chosen = torch.zeros(TOKENS, CHOICES, dtype=torch.int64, device=device)
        self.grad = self._random(TOKENS, HIDDEN)
        self.layers = [
            [self._linear(sizes, has_more) for sizes in ((HIDDEN, 2 * FFN), (FFN, HIDDEN))] for _ in range(LAYERS)
        ]
        self.math = ExpertMath(GatedActivation(F.silu, True), True, 1.0, (0.5, 0.5))
        self.choose(seed=0)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).mul_(shape[-1] ** -0.25).to(self.device, torch.bfloat16)

    def _linear(self, sizes: tuple[int, int], has_more: bool) -> ExpertLinear:
        inner, outer = sizes
        shapes = [(EXPERTS, inner, outer), (EXPERTS, outer), (EXPERTS, inner, 16), (EXPERTS, 16, outer)]
        return ExpertLinear(*(nn.Parameter(self._random(*shape)) for shape in shapes[: 4 if has_more else 1]))

    def choose(self, *, seed: int) -> None:
        """Chooses other experts, of which one may be on another rank, so that numbers of rows differ."""
        weights = torch.tensor(random.Random(seed).sample([0.1, 0.5, 1.0, 2.0, 4.0], EXPERTS + 1))
        generator = torch.Generator().manual_seed(seed)
        self.chosen.copy_(torch.multinomial(weights.expand(TOKENS, -1), CHOICES, generator=generator))

    def math_of(self, number: int) -> ExpertMath:
        """Returns the activation and constants of a layer."""
        return self.math

    def gradients(self, stash: PagedStash | None) -> list[Tensor]:
        """Runs forward and backward. Returns the output and the gradients of inputs and parameters."""
        leaves = [one.detach().requires_grad_() for one in (self.x, self.probs)]
        order = order_by_expert(self.chosen, EXPERTS, capacity=self.capacity, alignment=self.alignment)
        offsets = order.rows_per_group.cumsum(0, dtype=torch.int32)
        y = leaves[0]
        for number, fcs in enumerate(self.layers):
            stashed = None
            if stash is not None:
                stashed = stash.begin(f"layer {number}", order.num_rows, max_rows=self.capacity)
            given: dict[str, Any] = {
                "math": self.math_of(number),
                "parts": LayerParts(),
                "offsets": offsets,
                "order": order,
            }
            y = y + expert_outputs(y, leaves[1], *fcs, **given, stashed=stashed)
        parameters = [one for fcs in self.layers for fc in fcs for one in fc if one is not None]
        return [y.detach(), *torch.autograd.grad(y, [*leaves, *parameters], self.grad)]


def pages_of(rows: int) -> tuple[int, int]:
    """Returns the bytes of a page, which are LEAST_BYTES * rows, and the pages that a layer needs at most."""
    page_bytes = rows * LEAST_BYTES
    x, gate_up = (-(-CAPACITY * width * 2 // page_bytes) for width in (HIDDEN, 2 * FFN))
    return page_bytes, x + gate_up


def made_stash(device: torch.device, pool: str, *, rows: int) -> PagedStash:
    """Builds a stash in whose pages experts compute, all of which contain NaN."""
    page_bytes, most = pages_of(rows)
    on_device, on_host = (round(share * most) for share in POOLS[pool][:2])
    memory = PagePool(device, PoolLayout(page_bytes, on_device, on_host), scratch_pages=most, scratch_sets=2)
    memory.arena.fill_(0xFF)
    return PagedStash(memory, computes_in_pages=True, prefetch_groups=0, reserved_share=0.0)


def counters_of(stash: PagedStash) -> dict[Counter, int]:
    return stash.pool.occupancy_sync().counters


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("has_more", [False, True], ids=["", "biases and adapters"])
@pytest.mark.parametrize("rows", [8, 128])
def test_gradients_in_pages_have_the_bits_of_copied_rows(pool: str, has_more: bool, rows: int) -> None:
    prepare_device(device := default_device())
    model = Model(device, has_more=has_more)
    page_bytes, most = pages_of(rows)
    paged = made_stash(device, pool, rows=rows)
    # Has room for all rows of the layers, and for the weights of rows.
    other = PagedStash(PagePool(device, PoolLayout(page_bytes, 2 * LAYERS * most)))
    if has_more:
        # torch's kernel computes the products of adapters of copied rows, in another order.
        other = made_stash(device, "all on the device", rows=rows)
    model.gradients(paged)  # learns the order
    paged.reset()
    happened = set[Counter]()
    for seed in range(3):
        model.choose(seed=seed)
        found, expected, whole = (model.gradients(one) for one in (paged, other, None))
        assert counters_of(paged)[Counter.VOID] == counters_of(other)[Counter.VOID] == 0
        happened |= {one for one, count in counters_of(paged).items() if count}
        for one, same, near in zip(found, expected, whole, strict=True):
            assert torch.equal(one, same)
            assert (one.double() - near).norm() <= ERROR * near.double().norm()
        for stash in (paged, other):
            stash.reset()
    assert POOLS[pool][2] <= happened
    paged.pool.check_integrity_sync()


@pytest.mark.parametrize("pool", POOLS)
def test_a_replay_with_other_rows_has_the_bits_of_eager_steps(pool: str) -> None:
    prepare_device(device := default_device())
    model, graphs = Model(device, has_more=True), graphs_of(device)
    captured, eager = (made_stash(device, pool, rows=128) for _ in range(2))
    for stash in (captured, eager):  # compiles the kernels and learns the order of groups
        with graphs.on_capture_stream():
            model.gradients(stash)
        stash.reset()
    with graphs.capturing() as graph, captured.captured():
        results = model.gradients(captured)
    happened = set[Counter]()
    for seed in range(12):
        model.choose(seed=seed)
        captured.reset()
        graph.replay()
        expected = model.gradients(eager)
        assert counters_of(captured) == counters_of(eager) and counters_of(eager)[Counter.VOID] == 0
        happened |= {one for one, count in counters_of(eager).items() if count}
        assert all(map(torch.equal, results, expected))
        eager.reset()
    assert POOLS[pool][2] <= happened
