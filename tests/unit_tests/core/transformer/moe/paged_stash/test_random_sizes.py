"""Training random user-defined expert layers with coinciding sizes is bit-identical with and without the stash.

Layers are built as in scripts: rows are gathered before a context and summed after it. Inside it run the package's
operators, or torch's operators with rows that the script declares or that the stash guesses.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.transformer.moe.paged_stash import (
    PagedStash,
    PagePool,
    PoolLayout,
    Priority,
    RowTensors,
    StashGroup,
    add_expert_bias,
    add_low_rank,
    gated_activation,
    grouped_gemm,
    recompute_act,
    recompute_gate_up,
)
from tests.counts import long_count
from tests.unit_tests.core.transformer.moe.paged_stash.expert_models import is_empty_sync

STEPS = 3
COMMON = (4, 8, 16)
LARGE = PoolLayout(256, 4096)
# Number of seeds in one test.
PER_TEST = 10


@dataclass(frozen=True)
class Draw:
    """Sizes and options of a randomly drawn model.

    rows: C; experts: this rank's e of ranks x e; ffn: F; rank: adapter rank r or None; tokens: per microbatch.
    kind: operators that run. takes: how rows are recognized. named: probability that the script declares a tensor.
    is_late: all forwards of a step run before its first backward.
    """

    rows: int
    experts: int
    ranks: int
    topk: int
    hidden: int
    ffn: int
    rank: int | None
    tokens: int
    kind: str
    activation: str
    has_biases: bool
    has_masks: bool
    is_stacked: bool
    takes: RowTensors
    has_marks: bool
    named: float
    counts_on_device: bool
    dtype: torch.dtype
    num_layers: int
    num_microbatches: int
    is_late: bool
    is_reversed: bool
    pool: PoolLayout
    options: dict[str, Any]

    @property
    def is_gated(self) -> bool:
        """Whether fc1 computes gate and up."""
        return self.activation in ("swiglu", "geglu", "quick_geglu")

    @property
    def widths(self) -> dict[str, int]:
        """Sizes that may equal C, by name."""
        gated = {"2F": 2 * self.ffn} if self.is_gated else {}
        return {"e": self.experts, "H": self.hidden, "F": self.ffn, **gated, "r": self.rank or 0, "T": self.tokens}


def drawn(seed: int) -> Draw:
    """Draws a model in which most sizes are equal."""
    choose = random.Random(seed)
    dtype = choose.choice([torch.float32, torch.float32, torch.bfloat16])
    word = 16 // dtype.itemsize
    common = choose.choice([size for size in COMMON if size >= word])

    def size(*others: int) -> int:
        return common if choose.random() < 0.7 else choose.choice(others)

    def chance(probability: float) -> bool:
        return choose.random() < probability

    kind, activation = choose.choice(["ours", "torch"]), choose.choice(["swiglu", "geglu", "silu"])
    is_half = activation != "silu" and common >= 2 * word and chance(0.4)
    experts, ranks = size(1, 2, 3), choose.choice([1, 2, 4])
    return Draw(
        rows=size(8, 16, 24),
        experts=experts,
        ranks=ranks,
        topk=min(size(1, 2), experts * ranks),
        hidden=size(8, 16),
        ffn=common // 2 if is_half else size(8, 16),  # then 2F is the common size
        rank=size(8, 16) if chance(0.3) else None,
        tokens=size(1, 3, 8),
        kind=kind,
        activation=activation,
        has_biases=kind == "ours" and chance(0.4),
        has_masks=chance(0.2),
        is_stacked=chance(0.35),
        takes=choose.choice(list(RowTensors)),
        has_marks=kind == "ours" and chance(0.7),
        named=choose.choice([0.5, 1.0]),
        counts_on_device=chance(0.7),
        dtype=dtype,
        num_layers=choose.choice([2, 3]),
        num_microbatches=choose.choice([1, 2, 3]),
        is_late=chance(0.5),
        is_reversed=chance(0.5),
        pool=PoolLayout(choose.choice([16, 64, 256]), choose.choice([0, 20, 100, 1000]), choose.choice([1, 100, 4096])),
        options={"prefetch_groups": choose.choice([0, 1, 2]), "reserved_share": choose.choice([0.0, 0.5, 1.0])},
    )


class Experts(nn.Module):
    """This rank's experts of one layer, and the router for the experts of all ranks."""

    def __init__(self, draw: Draw, seed: int) -> None:
        super().__init__()
        self.draw, self.seed = draw, seed
        e, h, f, r = draw.experts, draw.hidden, draw.ffn, draw.rank
        wide = 2 * f if draw.is_gated else f
        self.router = nn.Parameter(torch.randn(h, e * draw.ranks).to(draw.dtype))
        self.fc1, self.fc2 = self._matrices(h, wide), self._matrices(f, h)
        self.bias1, self.bias2 = (self._parameter(e, wide), self._parameter(e, h)) if draw.has_biases else (None, None)
        self.low1 = nn.ParameterList([self._parameter(e, h, r), self._parameter(e, r, wide)] if r else [])
        self.register_buffer("mask", torch.rand(e, h, wide).gt(0.3).to(draw.dtype), persistent=False)

    def _parameter(self, *shape: int) -> nn.Parameter:
        return nn.Parameter((torch.randn(shape) * 0.3).to(self.draw.dtype))

    def _matrices(self, rows: int, columns: int) -> nn.ParameterList:
        e = self.draw.experts
        shapes = [(rows, columns)] * e if self.draw.is_stacked else [(e, rows, columns)]
        return nn.ParameterList([self._parameter(*shape) for shape in shapes])

    def forward(self, hidden: Tensor, name: str, stash: PagedStash | None) -> Tensor:
        """hidden: [T, H], of the draw's dtype. Returns the same shape."""
        draw = self.draw
        scores, chosen = (hidden @ self.router).softmax(-1).topk(draw.topk)
        slots = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=draw.experts * draw.ranks)
        # The first rank's experts come first. Rows beyond the capacity are dropped.
        offsets = counts.cumsum(0)[: draw.experts].clamp(max=draw.rows).int()
        live = int(offsets[-1])
        slots = slots[:live]
        rows = hidden[slots // draw.topk]
        # Rows beyond the live ones are NaN and must not affect any other.
        x = F.pad(rows, (0, 0, 0, draw.rows - live), value=torch.nan)
        weights = F.pad(scores.flatten()[slots], (0, draw.rows - live), value=torch.nan)
        num_rows = offsets[-1:].long() if draw.counts_on_device else live
        around = stash.context(name, num_rows, max_rows=draw.rows, takes=draw.takes) if stash else nullcontext()
        with around as group:
            run = self._ours if draw.kind == "ours" else self._torchs
            output = run(x, weights, offsets, group)
        return hidden.index_add(0, slots // draw.topk, output[:live])

    def _weights(self, group: StashGroup | None) -> tuple[Tensor, Tensor]:
        """Returns fc1 [e, H, 2F] and fc2 [e, F, H]: parameters, stacks of parameters, or masked weights."""
        fc1, fc2 = (torch.stack([*fc]) if self.draw.is_stacked else fc[0] for fc in (self.fc1, self.fc2))
        if self.draw.has_masks:
            if group is not None:
                group.keep(self.mask)  # saved for backward by the multiplication
            fc1 = fc1 * self.mask
            if group is not None:
                group.keep(fc1)
        return fc1, fc2

    def _ours(self, x: Tensor, weights: Tensor, offsets: Tensor, group: StashGroup | None) -> Tensor:
        draw, num_rows, (fc1, fc2) = self.draw, offsets[-1:].long(), self._weights(group)
        gate_up = grouped_gemm(x, fc1, offsets=offsets)
        if self.bias1 is not None:
            gate_up = add_expert_bias(gate_up, self.bias1, offsets=offsets)
        low: tuple[Tensor, ...] = ()
        if draw.rank:
            low = (grouped_gemm(x, self.low1[0], offsets=offsets),)
            gate_up = add_low_rank(gate_up, *low, weight=self.low1[1], offsets=offsets, scale=2.0)
        act = gated_activation(gate_up, weights, num_rows=num_rows, activation=draw.activation)
        if group is not None and draw.has_marks:
            adapter = (self.low1[1], 2.0) if draw.rank else None
            again = recompute_gate_up(fc1, offsets, bias=self.bias1, low_rank=adapter)
            group.mark(gate_up, priority=Priority.GATE_UP, recompute=again, sources=(x, *low))
            again = recompute_act(num_rows, draw.activation)
            group.mark(act, priority=Priority.ACT, recompute=again, sources=(gate_up, weights))
        output = grouped_gemm(act, fc2, offsets=offsets)
        if self.bias2 is not None:
            output = add_expert_bias(output, self.bias2, offsets=offsets, scale=weights)
        return output

    def _torchs(self, x: Tensor, weights: Tensor, offsets: Tensor, group: StashGroup | None) -> Tensor:
        draw, choose = self.draw, random.Random(self.seed)
        if group is not None:
            # A guess would be ambiguous if there are as many experts as rows.
            group.keep(offsets)

        def named(rows: Tensor) -> Tensor:
            if group is not None and choose.random() < draw.named:
                group.rows(rows)
            return rows

        fc1, fc2 = self._weights(group)
        gate_up = named(F.grouped_mm(named(x), fc1, offs=offsets))
        if draw.rank:
            low = named(F.grouped_mm(x, self.low1[0], offs=offsets))
            gate_up = named(gate_up + F.grouped_mm(low, self.low1[1], offs=offsets))
        gate, up = gate_up.chunk(2, dim=-1) if draw.is_gated else (gate_up, None)
        function: Callable[[Tensor], Tensor] = F.gelu if draw.activation == "geglu" else F.silu
        act = named(function(gate))
        act = act if up is None else named(act * up)
        return F.grouped_mm(named(act * named(weights)[:, None]), fc2, offs=offsets)


def train(draw: Draw, seed: int, stash: PagedStash | None) -> tuple[list[Tensor], bool]:
    """Returns the losses and gradients of each step, the final parameters, and whether a step had no pages for an x."""
    torch.manual_seed(seed)
    layers = nn.ModuleList(Experts(draw, seed + number) for number in range(draw.num_layers))
    batches = torch.randn(STEPS, draw.num_microbatches, draw.tokens, draw.hidden).to(draw.dtype)
    optimizer, found = torch.optim.AdamW(layers.parameters(), lr=0.01), []
    for step in batches:
        losses: list[Tensor] = []
        for x in step:
            hidden = x.requires_grad_()
            for number, layer in enumerate(layers):
                hidden = layer(hidden, str(number), stash)
            losses.append(hidden.float().square().mean())
            if not draw.is_late:
                losses[-1].backward()
        for loss in _late(losses, draw):
            loss.backward()
        if stash is not None:
            if stash.is_void_sync():
                return found, True
            assert is_empty_sync(stash)
            stash.reset()
        grads = [parameter.grad for parameter in layers.parameters() if parameter.grad is not None]
        found += [loss.detach() for loss in losses] + [grad.clone() for grad in grads]
        optimizer.step()
        optimizer.zero_grad()
    return found + [parameter.detach() for parameter in layers.parameters()], False


def _late(losses: Sequence[Tensor], draw: Draw) -> Iterator[Tensor]:
    if draw.is_late:
        yield from reversed(losses) if draw.is_reversed else losses


def assert_no_bit_changes(seed: int) -> bool:
    """Asserts bitwise equality for one seed. If pages for x run out, repeats with a large pool and returns True."""
    draw = drawn(seed)
    expected, _ = train(draw, seed, None)
    found, is_void = train(draw, seed, PagedStash(PagePool("cpu", draw.pool), **draw.options))
    if is_void:
        found, is_still_void = train(draw, seed, PagedStash(PagePool("cpu", LARGE), **draw.options))
        assert not is_still_void
    assert len(found) == len(expected)
    different = [number for number, pair in enumerate(zip(found, expected)) if not torch.equal(*pair)]
    assert not different and all(bool(tensor.isfinite().all()) for tensor in expected), (different, draw)
    return is_void


COUNT = long_count(40, soak=500)


@pytest.mark.parametrize("first", range(0, COUNT, PER_TEST))
def test_no_bit_changes_where_sizes_coincide(first: int) -> None:
    num_void = 0
    for seed in range(first, first + PER_TEST):
        try:
            num_void += assert_no_bit_changes(seed)
        except Exception as error:
            error.add_note(f'alone: python -c "from {__name__} import *; assert_no_bit_changes({seed})"')
            raise
    assert num_void < PER_TEST


def test_c_is_each_other_size_in_some_draw() -> None:
    draws = [drawn(seed) for seed in range(COUNT)]
    met = {name for draw in draws for name, size in draw.widths.items() if size == draw.rows}
    assert met == {"e", "H", "F", "2F", "r", "T"}
