"""Every expert kernel on a GPU agrees with its operator on the CPU: bitwise for copies, within one rounding for
computations. test_stash_kernels.py tests random orders of operations, and test_stash_recompute.py tests captured
recomputations.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.fusions.gated_activation import ActivationForm, activate
from megatron.core.fusions.gated_activation import ops as activation_ops
from megatron.core.transformer.moe.paged_stash.expert_ops import ops
from megatron.core.transformer.moe.paged_stash.page_layout import (
    Counter,
    Held,
    PoolLayout,
    Priority,
    TensorSpec,
    page_bytes,
    split_tensors,
)
from megatron.core.transformer.moe.paged_stash.page_pool import PageGroup, PagePool
from megatron.core.transformer.moe.router import ops as router_ops
from megatron.core.transformer.moe.static_rows import ops as row_ops
from megatron.core.transformer.rope import HeadNorms, RotaryEmbedding, apply_rotary_pos_emb, split_and_rotate

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
WIDTHS = [1, 7, 16, 1000, 7168]
# Error of one rounding of the sums, relative to the norm of the exact result.
ERROR = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}
BYTES = [*ERROR, torch.float8_e4m3fn, torch.int8]
# Every width in only two dtypes, since each combination compiles kernels.
CASES = [(torch.float32, width) for width in WIDTHS] + [(torch.bfloat16, width) for width in WIDTHS]
CASES += [(torch.float16, 1000)]
PLAIN = ("geglu", "geglu_tanh", "quick_geglu", "silu", "gelu", "gelu_tanh", "quick_gelu", "squared_relu")
MAX_ROWS, EXPERTS = 192, 3
# Rows of each expert: none, some, slightly more than a tile, and as many as fit in the buffers.
COUNTS = [[0, 0, 0], [1, 0, 70], [129, 2, 30], [60, 64, 68]]


def made(*shape: int, rows: int | None = None, seed: int = 0) -> Tensor:
    """Returns random fp32 values on the CPU, with NaN from row `rows` on."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed)) / shape[-1] ** 0.25
    values[shape[0] if rows is None else rows :] = math.nan
    return values


def near(found: Tensor, exact: Tensor, error: float) -> bool:
    return bool((found.double().cpu() - exact).norm() <= error * exact.norm())


def worn_pool(device: str, layout: PoolLayout) -> PagePool:
    """Builds a pool whose free pages are in random order, and whose ring positions soon wrap around."""
    pool, generator = PagePool(device, layout), torch.Generator().manual_seed(1)
    for tier, (pages, head) in enumerate(((layout.device_pages, 2**31 - 5), (layout.host_pages, 2**62 - 1))):
        start = tier * layout.device_pages
        pool.ring[start : start + pages] = (torch.randperm(pages, generator=generator) + start).to(pool.ring)
        pool.heads[tier], pool.tails[tier] = head, head + pages
    for memory in (pool.device_pages, pool.host_pages):
        memory.fill_(0xA5)
    return pool


def run_groups(device: str, specs: list[TensorSpec], *, page: int, rows: list[int]) -> tuple[PagePool, dict[str, Any]]:
    """Stashes groups with `rows` live rows in a pool for two, half on the host. Returns the pool and restored data."""
    pages = sum(-(-spec.max_bytes // page) for spec in specs)
    pool = worn_pool(device, PoolLayout(page, device_pages=pages + 1, host_pages=pages))
    generator = torch.Generator().manual_seed(2)
    waiting, restored = [], {}
    for number, count in enumerate(rows):
        sources = [
            torch.randint(256, (spec.max_rows * spec.pitch_bytes,), dtype=torch.uint8, generator=generator)
            for spec in specs
        ]
        group = pool.open_group(specs)
        pool.plan(group, torch.tensor([count], device=device), reserve=torch.tensor([0, 1, 2], device=device))
        pool.stash(group, [source.to(device) for source in sources], num_programs=number)
        waiting.append(group)
        if number:
            older = waiting.pop(0)
            targets = [torch.full_like(source, 7, device=device) for source in sources]
            pool.restore(older, targets, num_programs=3 * number)
            restored |= {f"group {number}, tensor {index}": target.cpu() for index, target in enumerate(targets)}
            pool.release(older)
    (last,) = waiting
    assert_each_page_is_once(pool, last)
    targets = [torch.full_like(source, 7, device=device) for source in sources]
    pool.restore(last, targets)
    restored |= {f"last group, tensor {index}": target.cpu() for index, target in enumerate(targets)}
    numbers = {"heads": pool.heads.cpu(), "tails": pool.tails.cpu(), "counters": pool.counters.cpu()}
    return pool, restored | numbers | {"held": last.slab.held.cpu()}


def assert_each_page_is_once(pool: PagePool, group: PageGroup) -> None:
    """Asserts that each page either belongs to this group, the only open one, or is free, and exists only once."""
    layout, table, held = pool.layout, group.slab.table.tolist(), group.slab.held.tolist()
    found = []
    for one in (one for call in group.calls for one in split_tensors(call.tensors)):
        found += table[one.table_start : one.table_start + held[one.slot][Held.PAGES]]
    device, host = pool.ring.tolist()[: layout.device_pages], pool.ring.tolist()[layout.device_pages :]
    for ring, head, tail in zip((device, host), pool.heads.tolist(), pool.tails.tolist(), strict=True):
        found += [ring[position % len(ring)] for position in range(head, tail)]
    assert sorted(found) == list(range(layout.device_pages + layout.host_pages))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", BYTES, ids=str)
def test_pages_rings_and_rows_have_the_cpus_numbers(dtype: torch.dtype, width: int) -> None:
    row, gap = width * dtype.itemsize, dtype.itemsize
    specs = [TensorSpec(row, row, MAX_ROWS), TensorSpec(2 * row, 2 * row + gap, MAX_ROWS, Priority.GATE_UP)]
    specs += [TensorSpec(row, row, MAX_ROWS, Priority.ACT), TensorSpec(4, 4, MAX_ROWS // 32, tokens_per_row=32)]
    page = page_bytes(16, hidden_size=width, itemsize=dtype.itemsize)
    rows = [MAX_ROWS, MAX_ROWS, 0, 33, MAX_ROWS, MAX_ROWS - 1, 1, MAX_ROWS]
    pool, expected = run_groups("cpu", specs, page=page, rows=rows)
    counters = pool.occupancy_sync().counters
    # Ensures that the test is meaningful: pages were spilled to the host, and a tensor found no pages.
    assert counters[Counter.SPILLED_PAGES] and counters[Counter.DROPPED_ACT] and not counters[Counter.VOID]
    _, found = run_groups(DEVICE, specs, page=page, rows=rows)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize(("dtype", "width"), CASES, ids=str)
def test_products_agree_and_recomputations_have_their_bits(
    dtype: torch.dtype, width: int, is_wide: bool, counts: list[int]
) -> None:
    inner, outer = (72, width) if is_wide else (width, 72)
    rows, offsets = sum(counts), torch.tensor(counts).cumsum(0, dtype=torch.int32)
    x, grad = made(MAX_ROWS, inner, rows=rows).to(dtype), made(MAX_ROWS, outer, rows=rows).to(dtype)
    weight = made(EXPERTS, outer, inner).to(dtype).transpose(1, 2)  # the layout of Hugging Face
    sources, on_device = (x.to(DEVICE), weight.to(DEVICE)), offsets.to(DEVICE)
    forward, again = (torch.full((MAX_ROWS, outer), 7, dtype=dtype, device=DEVICE) for _ in range(2))
    ops.grouped_gemm(*sources, offsets=on_device, out=forward)
    exact = torch.zeros(MAX_ROWS, outer, dtype=torch.float64)
    ops.grouped_gemm(x.double(), weight.double(), offsets=offsets, out=exact)
    assert near(forward[:rows], exact[:rows], ERROR[dtype]) and (forward[rows:] == 7).all()
    for needed in (0, 1):
        flag = torch.tensor([needed], device=DEVICE)
        ops.gate_up_from_x(*sources, offsets=on_device, needed=flag, out=again)
        assert torch.equal(again, forward if needed else torch.full_like(forward, 7))
    found = torch.full((EXPERTS, inner, outer), 7, dtype=dtype, device=DEVICE)
    ops.grouped_gemm_weight_grad(sources[0], grad.to(DEVICE), offsets=on_device, out=found)
    exact = torch.zeros(EXPERTS, inner, outer, dtype=torch.float64)
    ops.grouped_gemm_weight_grad(x.double(), grad.double(), offsets=offsets, out=exact)
    assert near(found, exact, ERROR[dtype])
    for scale, is_added in ((1.0, True), (0.3, True), (0.3, False)):
        out = torch.full(exact.shape, 0.5 if is_added else math.nan, device=DEVICE)
        arguments = {"offsets": on_device, "out": out, "scale": scale, "is_added": is_added}
        ops.grouped_gemm_weight_grad(sources[0], grad.to(DEVICE), **arguments)
        assert near(out, exact * scale + 0.5 * is_added, ERROR[torch.float32])


@pytest.mark.parametrize("rows", [0, 5, 33])
@pytest.mark.parametrize(
    ("activation", "dtype", "ffn"),
    [("swiglu", *case) for case in CASES] + [(name, torch.float32, 1000) for name in PLAIN],
    ids=str,
)
def test_activations_agree_and_recomputations_have_their_bits(
    activation: str, dtype: torch.dtype, ffn: int, rows: int
) -> None:
    capacity, num_rows = 33, torch.tensor([rows])
    gate_up = made(capacity, ffn * (1 + ("glu" in activation)), rows=rows).to(dtype)
    scale, grad = made(capacity, 1, rows=rows, seed=1).view(-1), made(capacity, ffn, rows=rows, seed=2).to(dtype)
    named: dict[str, Any] = {"num_rows": num_rows.to(DEVICE), "activation": activation}
    on_device = gate_up.to(DEVICE), scale.to(DEVICE)
    forward, again = (torch.full((capacity, ffn), 7, dtype=dtype, device=DEVICE) for _ in range(2))
    activation_ops.gated_activation(*on_device, out=forward, **named)
    for needed in (0, 1):
        activation_ops.gated_activation(*on_device, needed=torch.tensor([needed], device=DEVICE), out=again, **named)
        assert torch.equal(again, forward if needed else torch.full_like(forward, 7))
    grads = [torch.full_like(value, 7) for value in on_device]
    out = {"grad_gate_up": grads[0], "grad_scale": grads[1]}
    activation_ops.gated_activation_backward(grad.to(DEVICE), on_device[0], scale=on_device[1], **out, **named)
    exact = [torch.zeros(value.shape, dtype=torch.float64) for value in (forward, gate_up, scale)]
    named["num_rows"] = num_rows
    activation_ops.gated_activation(gate_up.double(), scale.double(), out=exact[0], **named)
    out = {"grad_gate_up": exact[1], "grad_scale": exact[2]}
    activation_ops.gated_activation_backward(grad.double(), gate_up.double(), scale=scale.double(), **out, **named)
    for value, right in zip((forward, *grads), exact, strict=True):
        assert near(value[:rows], right[:rows], ERROR[dtype]) and (value[rows:] == 7).all()


@pytest.mark.parametrize("has_scale", [False, True])
@pytest.mark.parametrize("shape", [(0, 64), (33, 3, 14), (70, 2000)], ids=str)
@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("activation", ["swiglu", *PLAIN])
def test_activations_of_layers_agree(
    activation: str, dtype: torch.dtype, shape: tuple[int, ...], has_scale: bool
) -> None:
    form = ActivationForm(activation)
    x, scale = made(*shape).to(dtype), made(*shape[:-1], seed=1) if has_scale else None
    grad = made(*shape[:-1], form.width(x), seed=2).to(dtype)

    def results(move: Callable[[Tensor], Tensor]) -> list[Tensor]:
        inputs = [move(one).requires_grad_() for one in (x, scale) if one is not None]
        act = activate(inputs[0], inputs[1] if has_scale else None, form=form)
        return [act.detach(), *torch.autograd.grad(act, inputs, move(grad))]

    for value, right in zip(results(lambda one: one.to(DEVICE)), results(Tensor.double), strict=True):
        assert near(value, right, ERROR[dtype])


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("has_scale", [False, True])
@pytest.mark.parametrize(("dtype", "width"), CASES, ids=str)
def test_biases_and_their_gradients_agree(dtype: torch.dtype, width: int, has_scale: bool, counts: list[int]) -> None:
    rows, offsets, share = sum(counts), torch.tensor(counts).cumsum(0, dtype=torch.int32), 0.5
    x, grad = made(MAX_ROWS, width, rows=rows).to(dtype), made(MAX_ROWS, width, rows=rows, seed=1).to(dtype)
    bias, scale = made(EXPERTS, width).to(dtype), made(MAX_ROWS, 1, rows=rows, seed=2).view(-1) if has_scale else None
    found, exact = [], []
    for results, device, wide in ((found, DEVICE, dtype), (exact, "cpu", torch.float64)):
        scaled = None if scale is None else scale.to(device, torch.float32 if results is found else wide)
        named = {"offsets": offsets.to(device)}
        added, given, biases = (values.to(device, wide, copy=True) for values in (x, grad, bias))
        ops.add_expert_bias(added, biases, scale=scaled, share=share, **named)
        grad_bias = torch.full((EXPERTS, width), 7, dtype=wide, device=device)
        ops.expert_bias_grad(given, scale=scaled, out=grad_bias, **named)
        grad_scale = torch.full((MAX_ROWS,), 7, dtype=torch.float32 if results is found else wide, device=device)
        ops.expert_bias_scale_grad(given, biases, share=share, out=grad_scale, **named)
        results += [added, grad_bias, grad_scale]
    for value, right in zip(found, exact, strict=True):
        live = slice(None if len(value) == EXPERTS else rows)
        assert near(value[live], right[live], ERROR[dtype])
    assert found[0][rows:].isnan().all() and (found[2][rows:] == 7).all()


@pytest.mark.parametrize("live", [0, 90, MAX_ROWS])
@pytest.mark.parametrize(("dtype", "width"), CASES, ids=str)
def test_rows_are_gathered_and_summed_as_on_the_cpu(dtype: torch.dtype, width: int, live: int) -> None:
    generator, tokens, choices = torch.Generator().manual_seed(live), 50, 8
    x = made(tokens, width).to(dtype)
    source = torch.randint(-1, tokens, (MAX_ROWS,), generator=generator, dtype=torch.int32)
    found, expected = (torch.full((MAX_ROWS, width), 7, dtype=dtype, device=device) for device in (DEVICE, "cpu"))
    for out in (found, expected):
        on_device = x.to(out.device), source.to(out.device)
        row_ops.gather_rows(*on_device, num_rows=torch.tensor([live], device=out.device), out=out)
    assert torch.equal(found.cpu(), expected)
    rows = made(MAX_ROWS, width, rows=live).to(dtype)
    row_of_slot = torch.randint(-1, max(live, 1), (tokens, choices), generator=generator, dtype=torch.int32)
    row_of_slot = row_of_slot.where(row_of_slot < live, -1)
    found = row_ops.sum_rows(rows.to(DEVICE), row_of_slot.to(DEVICE))
    assert near(found, row_ops.sum_rows(rows.double(), row_of_slot), ERROR[dtype])


# Numbers of tokens, choices, experts, parts and rows per part, and the alignment.
ORDERS = [
    (0, 2, 4, 1, 8, 1),
    (40, 1, 1, 1, 30, 1),
    (5000, 3, 8, 1, 20000, 128),
    (5000, 8, 128, 4, 9000, 1),
    (131072, 8, 512, 1, 1 << 20, 1),
    (131072, 8, 300, 4, 200000, 1),
    (131072, 8, 16, 1, 600000, 16),
]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("sizes", ORDERS, ids=str)
def test_slots_are_ordered_as_on_the_cpu_in_each_replay(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    tokens, choices, experts, parts, rows, alignment = sizes
    first, generator = 2, torch.Generator().manual_seed(tokens)
    options = {"first_expert": first, "num_experts": experts, "num_parts": parts, "rows_per_part": rows}
    options["alignment"] = alignment
    bounds = first - 1, first + experts + 1
    routings = [torch.randint(*bounds, (tokens, choices), generator=generator, dtype=dtype) for _ in range(3)]
    # All tokens are routed to one expert.
    routings.append(torch.full_like(routings[0], first + experts - 1))
    indices = routings[0].to(DEVICE)
    row_ops.order_slots(indices, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = row_ops.order_slots(indices, **options)
    for routing in routings:
        indices.copy_(routing)
        graph.replay()
        for one, other in zip(found, row_ops.order_slots(routing, **options), strict=True):
            assert torch.equal(one.cpu(), other) and one.dtype == other.dtype


@pytest.mark.parametrize(("ranks", "experts", "rows"), [(1, 1, 5), (3, 4, 30), (2, 33, 300), (64, 512, 4000)])
def test_experts_of_rows_are_those_of_the_cpu(ranks: int, experts: int, rows: int) -> None:
    counts = torch.randint(0, 2 * rows // experts + 1, (ranks, experts))
    found = row_ops.experts_of_rows(counts.to(DEVICE), rows_per_rank=rows)
    assert torch.equal(found.cpu(), row_ops.experts_of_rows(counts, rows_per_rank=rows))


@pytest.mark.parametrize("is_row", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "topk"), [(0, 4, 2), (70, 1, 1), (70, 6, 2), (3000, 512, 8)])
def test_gradients_of_choices_agree(tokens: int, experts: int, topk: int, is_row: bool) -> None:
    logits = made(tokens, experts)
    chosen, indices = logits.topk(topk)
    weights, scores = chosen.softmax(-1), logits.softmax(-1)
    grad_scores = made(experts).expand(tokens, -1) if is_row else made(tokens, experts, seed=1)
    results = []
    for device, dtype in ((DEVICE, torch.float32), ("cpu", torch.float64)):
        given = [values.to(device, dtype) for values in (made(tokens, topk, seed=2), weights)]
        of_scores = {"grad_scores": grad_scores.to(device, dtype), "scores": scores.to(device, dtype)}
        results.append(router_ops.choice_grad(*given, indices.to(device), **of_scores))
    assert near(*results, ERROR[torch.float32])


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("norms", [None, "plain", "zero-centered"])
@pytest.mark.parametrize(
    ("width", "rotated", "interleaved", "gates"),
    [(128, 1.0, False, 0), (128, 1.0, True, 4), (256, 0.25, False, 4), (80, 1.0, False, 0), (13, 0.5, True, 0)],
)
def test_normalized_and_rotated_heads_agree(
    width: int, rotated: float, interleaved: bool, gates: int, norms: str | None, dtype: torch.dtype
) -> None:
    seq, batch, groups, queries = 129, 2, 3, 4
    # Gradients with heads in the outer dimension, as attention kernels return them.
    upstream = [made(batch, count, seq, width, seed=count).permute(2, 0, 1, 3) for count in (groups * queries, 3, 3)]
    upstream += [made(seq, batch, groups, gates, width, seed=5)] if gates else []
    values = [made(seq, batch, groups, queries + gates + 2, width), made(width), made(width, seed=1)]
    results = []
    for device, kind in ((DEVICE, dtype), ("cpu", torch.float64), (DEVICE, dtype)):
        mixed, *weights = (one.to(dtype).to(device, kind).requires_grad_() for one in values)
        wide = torch.promote_types(kind, torch.float32)
        options = {"rotary_percent": rotated, "rotary_interleaved": interleaved, "dtype": wide}
        table = RotaryEmbedding(width, seq, **options).to(device)(seq)
        of_heads = None if norms is None else HeadNorms(*weights, 1e-6, norms == "zero-centered")
        outputs = split_and_rotate(mixed, table, gates=gates, norms=of_heads)
        grads = [one.to(dtype).to(device, kind) for one in upstream]
        wanted = [mixed, *([] if norms is None else weights)]
        results.append([*outputs, *torch.autograd.grad(outputs, wanted, grads)])
    found, exact, again = results
    for one, other, same in zip(found, exact, again, strict=True):
        assert one.dtype == dtype and near(one, other, 2 * ERROR[dtype])
        assert torch.equal(one, same)  # sums over rows are added in a fixed order


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize(("width", "rotated", "first"), [(192, 64, 128), (64, 64, 0), (13, 6, 7)])
def test_rotated_parts_of_heads_agree(width: int, rotated: int, first: int, dtype: torch.dtype) -> None:
    t, upstream = made(70, 2, 5, width), made(2, 5, 70, width, seed=1).permute(2, 0, 1, 3)
    results = []
    for device, kind in ((DEVICE, dtype), ("cpu", torch.float64)):
        given = t.to(dtype).to(device, kind).requires_grad_()
        wide = torch.promote_types(kind, torch.float32)
        table = RotaryEmbedding(rotated, 70, rotary_interleaved=True, dtype=wide).to(device)(70)
        output = apply_rotary_pos_emb(given, table, first=first)
        results.append([output, *torch.autograd.grad(output, given, upstream.to(dtype).to(device, kind))])
    for one, other in zip(*results, strict=True):
        assert near(one, other, ERROR[dtype])
