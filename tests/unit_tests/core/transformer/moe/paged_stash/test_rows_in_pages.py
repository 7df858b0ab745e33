"""Experts that compute in pages have the bits of experts with whole buffers, whichever pages their rows receive."""

import gc
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.fusions.gated_activation import ops as activation_ops
from megatron.core.paged_rows import PagedRows, memory_of, operand
from megatron.core.tensor_parallel.weight_grads import GradOwner, WeightGrad, WeightGradQueue, set_grad_owner
from megatron.core.transformer.moe.expert_function import expert_outputs
from megatron.core.transformer.moe.paged_stash import (
    Counter,
    EventKind,
    PagedStash,
    PagePool,
    PoolLayout,
    Priority,
    StashedRows,
    StashEvent,
    TensorSpec,
)
from megatron.core.transformer.moe.paged_stash.expert_ops import ops
from megatron.core.transformer.moe.paged_stash.page_layout import Held, row_spec
from megatron.core.transformer.moe.static_rows import ops as row_ops
from tests.unit_tests.core.transformer.moe.test_expert_function import ACTIVATIONS, CAPACITY, FFN, HIDDEN, Case, normal

ROWS, LIVE, WIDTH, OUT, PAGE_BYTES = 40, 33, 16, 24, 320
OFFSETS = torch.tensor([9, 9, 21, LIVE], dtype=torch.int32)
NUM_ROWS = torch.tensor([LIVE])


def in_pages(rows: Tensor, *, seed: int | None, page_bytes: int = PAGE_BYTES) -> PagedRows:
    """Returns live rows, [C, W], in a NaN-filled arena: adjacent pages without a seed, otherwise random ones."""
    live, size = rows[:LIVE].reshape(-1), page_bytes // rows.itemsize
    pages = -(-live.numel() // size)
    arena = torch.full((3 * pages * size,), torch.nan, dtype=rows.dtype)
    numbers = list(range(1, 1 + pages)) if seed is None else random.Random(seed).sample(range(3 * pages), pages)
    for place, number in enumerate(numbers):
        part = live[place * size : (place + 1) * size]
        arena[number * size :][: part.numel()] = part
    return PagedRows(arena, torch.tensor([*numbers, -1]), page_bytes, *rows.shape)


def out_of_pages(rows: PagedRows) -> Tensor:
    """Returns the live rows of pages: [LIVE, W]."""
    size, pages = rows.page_bytes // rows.arena.itemsize, rows.table[:-1].tolist()
    return torch.cat([rows.arena[number * size :][:size] for number in pages])[: LIVE * rows.width].view(LIVE, -1)


def paging(name: str, rows: Any) -> dict[str, Any]:
    return operand(name, rows)[1]


def product(x: Any, weight: Tensor, out: Any) -> None:
    places = {**paging("x", x), **paging("out", out)}
    ops.grouped_gemm(memory_of(x), weight, offsets=OFFSETS, out=memory_of(out), **places)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("seed", [None, 1, 2], ids=["adjacent", "random", "random again"])
@pytest.mark.parametrize("page_bytes", [PAGE_BYTES, 64, 48, 1 << 14])
def test_operators_on_pages_have_the_bits_of_contiguous_ones(
    dtype: torch.dtype, seed: int | None, page_bytes: int
) -> None:
    def paged(rows: Tensor, *, is_result: bool = False) -> PagedRows:
        return in_pages(torch.full_like(rows, 3.0) if is_result else rows, seed=seed, page_bytes=page_bytes)

    x, weight = normal(ROWS, WIDTH, dtype=dtype), normal(4, WIDTH, OUT, dtype=dtype)
    source = torch.randint(-1, 50, (ROWS,), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    tokens, low, low_weight = (normal(*shape, dtype=dtype) for shape in ((50, WIDTH), (ROWS, 8), (4, 8, OUT)))
    bias, scale, grad = normal(4, OUT, dtype=dtype), normal(ROWS), normal(ROWS, OUT // 2, dtype=dtype)
    gate_up, needed = normal(ROWS, OUT, dtype=dtype), torch.tensor([1])

    gathered, expected = paged(x, is_result=True), torch.empty_like(x)
    row_ops.gather_rows(tokens, source, num_rows=NUM_ROWS, out=expected)
    row_ops.gather_rows(tokens, source, num_rows=NUM_ROWS, out=gathered.arena, **paging("out", gathered))
    assert torch.equal(out_of_pages(gathered), expected[:LIVE])

    for name, call in {
        "grouped_gemm": lambda one, out: product(one, weight, out),
        "gate_up_from_x": lambda one, out: ops.gate_up_from_x(
            memory_of(one),
            weight,
            offsets=OFFSETS,
            needed=needed,
            out=memory_of(out),
            bias=bias,
            **paging("x", one),
            **paging("out", out),
        ),
    }.items():
        found, expected = paged(gate_up, is_result=True), torch.empty_like(gate_up)
        call(paged(x), found)
        call(x, expected)
        assert torch.equal(out_of_pages(found), expected[:LIVE]), name

    added, expected = paged(gate_up), gate_up.clone()
    for out, memory in ((expected, expected), (added, added.arena)):
        ops.add_expert_bias(memory, bias, scale=scale, offsets=OFFSETS, share=0.5, **paging("rows", out))
        ops.add_low_rank(memory, low, weight=low_weight, offsets=OFFSETS, scale=0.25, **paging("rows", out))
    assert torch.equal(out_of_pages(added), expected[:LIVE])

    weight_grads = [torch.empty(4, WIDTH, OUT, dtype=dtype) for _ in range(2)]
    for one, out in zip((x, paged(x)), weight_grads):
        memory = memory_of(one)
        ops.grouped_gemm_weight_grad(memory, gate_up, offsets=OFFSETS, out=out, **paging("x", one))
    assert torch.equal(*weight_grads)

    results = []
    for one in (gate_up, paged(gate_up)):
        memory, places = memory_of(one), paging("gate_up", one)
        act, act_again, grad_scale = torch.zeros_like(grad), torch.zeros_like(grad), torch.zeros_like(scale)
        grad_gate_up, form = torch.zeros_like(gate_up), {"activation": "swiglu", "clamp": 0.7, "offset": 1.0}
        activation_ops.gated_activation(memory, scale, num_rows=NUM_ROWS, out=act, **places, **form)
        outputs = {"grad_gate_up": grad_gate_up, "grad_scale": grad_scale, "act": act_again}
        activation_ops.gated_activation_backward(
            grad, memory, scale=scale, num_rows=NUM_ROWS, **outputs, **places, **form
        )
        assert torch.equal(act, act_again)
        results.append([act, grad_gate_up, grad_scale])
    assert all(map(torch.equal, *results))


def test_plan_finds_adjacent_pages_and_points_at_the_scratch_where_pages_are_missing() -> None:
    chance = random.Random(5)
    for _ in range(30):
        host = chance.choice([0, 9])
        layout = PoolLayout(64, chance.randint(8, 24), host)
        specs = [row_spec(16, 32), row_spec(32, 32, Priority.GATE_UP)]
        plain, paged = PagePool("cpu", layout), PagePool("cpu", layout, scratch_pages=24)
        held: list[Any] = []
        for _ in range(12):
            if held and chance.random() < 0.5:
                for pool, group in zip((plain, paged), held.pop(chance.randrange(len(held)))):
                    pool.release(group)
                    pool.close_group(group)
            live = chance.randint(0, 32)
            num_rows, reserve = torch.tensor([live]), torch.tensor([0, chance.choice([0, 3]), 0])
            groups = plain.open_group(specs), paged.open_group(specs)
            free = paged.ring[: layout.device_pages].tolist()
            head, tail = int(paged.heads[0]), int(paged.tails[0])
            free = sorted(free[place % layout.device_pages] for place in range(head, tail))
            plain.plan(groups[0], num_rows, reserve=reserve)
            paged.plan(groups[1], num_rows, reserve=reserve, in_pages=True)
            held.append(groups)
            paged.check_integrity_sync()
            # The same numbers of pages as without computing in them.
            assert torch.equal(plain.counters, paged.counters)
            for index, spec in enumerate(specs):
                record = groups[1].slab.held[groups[1].tensors[index].slot].tolist()
                on_device = record[Held.PAGES] - record[Held.ON_HOST]
                ids = groups[1].slab.table[groups[1].tensors[index].table_start :][:on_device].tolist()
                scratch = layout.device_pages + (0, 8)[index]
                places = paged.rows_in_pages(groups[1], index, torch.float32).table.tolist()
                entries = 32 * spec.row_bytes // 64
                assert places == ids + list(range(scratch + on_device, scratch + entries))
                runs = (free[first : first + on_device] for first in range(len(free) - on_device + 1))
                has_run = any(one[-1] - one[0] == on_device - 1 for one in runs if one)
                assert not has_run or ids == list(range(ids[0], ids[0] + on_device))
                free = sorted({*free} - {*ids})


def make_stash(
    device_pages: int = 99, host_pages: int = 0, *, page_bytes: int = 192, scratch_sets: int = 1, **options: Any
) -> PagedStash:
    layout = PoolLayout(page_bytes, device_pages, host_pages)
    pool = PagePool("cpu", layout, scratch_pages=60, scratch_sets=scratch_sets)
    return PagedStash(pool, computes_in_pages=True, prefetch_groups=0, **options)


def run(case: Case, stash: PagedStash | None, name: str) -> Tensor:
    """Runs the experts of a case in the pages of a stash, or in whole buffers."""
    stashed = None if stash is None else stash.begin(name, case.order.num_rows, max_rows=CAPACITY)
    given: dict[str, Any] = {"math": case.math, "parts": case.parts, "offsets": case.offsets, "order": case.order}
    return expert_outputs(case.x, case.probs, *case.fcs, **given, stashed=stashed)


def equal_with(stash: PagedStash, cases: Sequence[Case], *, order: str = "F0 F1 B1 F2 B0 B2") -> None:
    """Asserts that results and gradients are those without a stash; order: forwards and backwards of the cases."""
    expected = [(output := run(case, None, "")).detach() for case in cases]
    grads = [case.live_grads(run(case, None, "")) for case in cases]
    outputs: dict[int, Tensor] = {}
    for kind, number in (word.split(" ")[0] for word in order.split()):
        index = int(number)
        if kind == "F":
            outputs[index] = output = run(cases[index], stash, f"layer {index}")
            assert torch.equal(output, expected[index])
        else:
            assert all(map(torch.equal, cases[index].live_grads(outputs.pop(index)), grads[index]))
    held = stash.pool.occupancy_sync()
    assert held.device_held == held.host_held == 0


# Numbers of pages on the device and on the host. x has 4 pages, gate_up 4 or, without a gate, 2. Few pages are enough
# for one group and the x of another.
POOLS = {
    "all on the device": (99, 0),
    "nothing recomputed": (99, 0),
    "few": (12, 0),
    "on the host": (0, 99),
    "on both": (7, 99),
    "few on both": (5, 7),
}


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_more", [False, True], ids=["", "biases and adapters"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_in_pages_have_the_bits_of_whole_buffers(
    pool: str, activation: str, has_more: bool, dtype: torch.dtype
) -> None:
    (device, host), has_rungs = POOLS[pool], pool != "nothing recomputed"
    device -= pool == "few" and not ACTIVATIONS[activation].is_gated
    host -= pool == "few on both" and not ACTIVATIONS[activation].is_gated
    stash = make_stash(device, host, page_bytes=48 * dtype.itemsize, reserved_share=0.0, has_rungs=has_rungs)
    cases = [Case(ACTIVATIONS[activation], has_more=has_more, dtype=dtype) for _ in range(3)]
    equal_with(stash, cases)
    counters = stash.pool.occupancy_sync().counters
    assert counters[Counter.VOID] == 0
    assert (counters[Counter.DROPPED_GATE_UP] > 0) == pool.startswith("few")
    assert (counters[Counter.SPILLED_PAGES] > 0) == ("host" in pool or "both" in pool)
    # The next step follows a known order, in which the last backward directly follows its forward.
    stash.reset()
    equal_with(stash, cases, order="F0 F1 B1 F2 B2 B0")


def test_groups_that_are_copied_share_the_pages() -> None:
    pool = PagePool("cpu", PoolLayout(192, 60, 60), scratch_pages=60)
    stash, cases = PagedStash(pool, computes_in_pages=True, prefetch_groups=2), [Case() for _ in range(2)]
    expected = [case.live_grads(run(case, None, "")) for case in cases]
    for _ in range(3):
        x = normal(CAPACITY, 8).requires_grad_()
        first = run(cases[0], stash, "first")
        with stash.context("copied", 9, max_rows=CAPACITY) as group:
            group.rows(x)
            copied = (x * x).sigmoid()
        last = run(cases[1], stash, "last")
        assert all(map(torch.equal, cases[1].live_grads(last), expected[1]))
        (found,) = torch.autograd.grad(copied[:9].sum(), [x])
        again = x.detach().requires_grad_()
        (same,) = torch.autograd.grad((again * again).sigmoid()[:9].sum(), [again])
        assert torch.equal(found[:9], same[:9])
        assert all(map(torch.equal, cases[0].live_grads(first), expected[0]))
        assert stash.pool.occupancy_sync().device_held == 0
        stash.reset()


def spoil_padding(stash: PagedStash, groups: Sequence[StashedRows], *, live: int) -> None:
    """Fills all bytes of the arena with NaN, except for live rows of these groups in pages that they hold."""
    arena, page_bytes = stash.pool.arena, stash.pool.layout.page_bytes
    is_live = torch.zeros_like(arena, dtype=torch.bool)
    for rows in (rows for group in groups for rows in group._group.placed):
        left = live * rows.width * rows.arena.itemsize
        for page in rows.table.tolist():
            if page < stash.pool.layout.device_pages:
                is_live[page * page_bytes :][: max(0, min(left, page_bytes))] = True
            left -= page_bytes
    arena.masked_fill_(~is_live, 0xFF)


@pytest.mark.parametrize("pool", ["all on the device", "few", "on both"])
@pytest.mark.parametrize("has_more", [False, True], ids=["", "biases and adapters"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nan_in_padding_free_pages_and_scratch_reaches_no_result(pool: str, has_more: bool, dtype: torch.dtype) -> None:
    stash = make_stash(*POOLS[pool], page_bytes=48 * dtype.itemsize, reserved_share=0.0)
    cases = [Case(has_more=has_more, dtype=dtype) for _ in range(2)]
    assert stash.pool.arena.fill_(0xFF).view(dtype).isnan().all()
    outputs = []
    for number, case in enumerate(cases):
        outputs.append(run(case, stash, f"layer {number}"))
        spoil_padding(stash, [output.grad_fn.saved._stashed for output in outputs], live=case.live)
    for case, output in zip(reversed(cases), reversed(outputs)):
        assert torch.equal(output, run(case, None, ""))
        assert all(map(torch.equal, case.live_grads(output), case.live_grads(run(case, None, ""))))
    counters = stash.pool.occupancy_sync().counters
    assert counters[Counter.VOID] == 0
    assert (counters[Counter.DROPPED_GATE_UP] > 0) == (pool == "few")
    assert (counters[Counter.SPILLED_PAGES] > 0) == (pool == "on both")


def test_pages_are_scattered_after_groups_of_other_sizes() -> None:
    stash, chance = make_stash(60), random.Random(2)
    cases, waiting = [Case() for _ in range(3)], list[tuple[Case, Tensor]]()
    expected = [case.live_grads(run(case, None, "")) for case in cases]
    fragments = 0
    for step in range(40):
        number = chance.randrange(3)
        waiting.append((number, run(cases[number], stash, f"{step}")))
        pages = waiting[-1][1].grad_fn.saved._stashed._group.placed
        fragments += any(one.table[:3].diff().tolist() != [1, 1] for one in pages)
        if len(waiting) > 3:
            number, output = waiting.pop(chance.randrange(4))
            assert all(map(torch.equal, cases[number].live_grads(output), expected[number]))


def test_a_step_whose_inputs_received_no_pages_is_void_but_its_forward_is_right() -> None:
    stash, case = make_stash(1), Case()
    output = run(case, stash, "layer")
    assert torch.equal(output, run(case, None, "")) and stash.is_void_sync()
    case.live_grads(output)
    stash.reset()
    assert not stash.is_void_sync()


def test_frozen_arguments_are_served() -> None:
    for frozen in (["weight1", "lora_a1"], ["lora_b1", "lora_b2"], ["x", "probs"], ["weight2", "bias2", "lora_a2"]):
        case = Case(has_more=True)
        for name in frozen:
            case.named[name].requires_grad_(False)
        equal_with(make_stash(), [case], order="F0 B0")


def test_a_second_backward_names_the_flag() -> None:
    stash, case = make_stash(), Case()
    output = run(case, stash, "layer")
    case.live_grads(output, retain_graph=True)
    with pytest.raises(RuntimeError, match="'layer' a second time: .*--moe-paged-stash-compute copies"):
        case.live_grads(output)


def test_pages_are_held_until_late_weight_gradients_have_read_them() -> None:
    stash, case, late = make_stash(), Case(has_more=True), list[tuple[Tensor, WeightGrad]]()
    names = ["weight1", "lora_a1"]
    expected = dict(zip(names, case.live_grads(case.apart(), wanted=names)))
    for name in names:
        main_grad = torch.zeros_like(case.named[name])
        set_grad_owner(case.named[name], GradOwner(main_grad, lambda grad, into=main_grad: late.append((into, grad))))
    output = run(case, stash, "layer")
    # Another group is computed between backward and the weight gradients.
    output.backward(normal(*output.shape))
    held = stash.pool.occupancy_sync().device_held
    other = run(Case(), stash, "other")
    for main_grad, grad in late:
        assert stash.pool.occupancy_sync().device_held > held > 0
        grad.add_to(main_grad, scale=1.0, is_zero=True)
    for name, (main_grad, _) in zip(names, late):
        torch.testing.assert_close(main_grad, expected[name])
    assert stash.pool.occupancy_sync().device_held == held
    del other
    gc.collect()
    assert stash.pool.occupancy_sync().device_held == 0


def test_late_weight_gradients_of_rows_from_the_host_are_computed_before_the_next_group() -> None:
    stash, case, late = make_stash(2, 99), Case(), list[WeightGrad]()
    main_grad = torch.zeros_like(case.named["weight1"])
    set_grad_owner(case.named["weight1"], GradOwner(main_grad, late.append))
    expected = case.live_grads(case.apart(), wanted=["weight1"])[0]
    output = run(case, stash, "layer")
    output.backward(normal(*output.shape))
    with pytest.raises(RuntimeError, match="'other' would overwrite rows of 'layer', whose weight gradients have not"):
        run(Case(), stash, "other")
    late[0].add_to(main_grad, scale=1.0, is_zero=True)
    torch.testing.assert_close(main_grad, expected)
    run(Case(), stash, "other")


class InBackward(torch.autograd.Function):
    """Calls a function in backward, in another thread, as a pass that takes turns with the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, then: Callable[[], None]) -> Tensor:
        ctx.then = then
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        with ThreadPoolExecutor(1) as other:
            other.submit(ctx.then).result()
        return grad, None


def held_with(stash: PagedStash | None, cases: Sequence[Case], queue: WeightGradQueue, *, order: str) -> int:
    """Runs forwards and backwards of the cases, each backward inside the one before it.

    Returns the highest number of products that were held.
    """
    steps, outputs, most = deque(order.split()), dict[int, Tensor](), [0]

    def go_on() -> None:
        most[0] = max(most[0], queue.num_pending)
        while steps:
            step = steps.popleft()
            case, index = cases[int(step[1])], int(step[1])
            if step[0] == "F":
                x = case.x
                case.x = InBackward.apply(x, go_on)
                outputs[index], case.x = run(case, stash, f"layer {index}"), x
            else:
                output = outputs.pop(index)
                output.backward(normal(*output.shape, dtype=output.dtype))

    with queue.holding():
        go_on()
    return most[0]


@pytest.mark.parametrize("kind", [*POOLS, "copies", "buffers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_that_a_queue_holds_have_the_same_bits_and_hold_their_pages(kind: str, dtype: torch.dtype) -> None:
    device, host = POOLS.get(kind, (99, 0))
    pool = PagePool("cpu", PoolLayout(48 * dtype.itemsize, 3 * device, host), scratch_pages=60)
    has_rungs, computes_in_pages = kind != "nothing recomputed", kind != "copies"
    stash = PagedStash(
        pool, computes_in_pages=computes_in_pages, prefetch_groups=0, has_rungs=has_rungs, reserved_share=0.0
    )
    # The second step follows a known order, in which the last backward directly follows its forward.
    for number, order in enumerate(("F0 F1 B1 F2 B0 B2", "F0 F1 B1 B0 F2 B2")):
        cases = [Case(has_more=True, dtype=dtype) for _ in range(3)]
        names = ["weight1", "weight2", "lora_a1", "lora_a2"]
        expected = [dict(zip(names, case.live_grads(run(case, None, ""), wanted=names))) for case in cases]
        queue = WeightGradQueue("--delay-wgrad-compute")
        for index, case in enumerate(cases):
            queue.serve((f"{index}.{name}", case.named[name]) for name in names)
        most = held_with(None if kind == "buffers" else stash, cases, queue, order=order)
        # Rows from the host are in memory of the next group, so that fc1 does not wait.
        assert most == ((8 if number else 6) if host else 12)
        for case, wanted in zip(cases, expected):
            assert all(torch.equal(case.named[name].grad, one) for name, one in wanted.items())
        occupancy = stash.pool.occupancy_sync()
        assert occupancy.device_held == occupancy.host_held == occupancy.counters[Counter.VOID] == 0
        stash.reset()


def known_order(order: str, *, pages: tuple[int, int] = (99, 0), **options: Any) -> PagedStash:
    """Returns a stash that expects forwards and backwards of "layer 0", "layer 1", ... in this order."""
    kinds = {"F": EventKind.FORWARD, "B": EventKind.BACKWARD}
    events = [StashEvent(kinds[one[0]], f"layer {one[1:]}", 0) for one in order.split()]
    return make_stash(*pages, events=events, **options)


def test_the_scratch_is_the_only_memory_outside_of_pages() -> None:
    found = []
    for sets in (1, 2):
        stash, case = known_order("F0 F1 B1 B0", scratch_sets=sets), Case()
        case.live_grads(run(case, stash, "layer 0"))
        found.append(stash.footprint().working_set_bytes)
    one_group = sum(spec.max_bytes for spec in stash._reserve._stashed["layer 0", 0][0])
    assert found == [one_group, 2 * one_group]


@pytest.mark.parametrize("has_more", [False, True], ids=["", "biases and adapters"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_group_whose_backward_follows_computes_in_the_scratch(has_more: bool, dtype: torch.dtype) -> None:
    order, cases = "F0 F1 B1 B0", [Case(has_more=has_more, dtype=dtype) for _ in range(3)]
    stash = known_order(order)
    output = run(cases[0], stash, "layer 0")
    held = stash.pool.occupancy_sync()
    last, expected = run(cases[1], stash, "layer 1"), cases[1].live_grads(run(cases[1], None, ""))
    assert stash.pool.occupancy_sync() == held
    with torch.no_grad():
        stash.pool.device_pages.view(torch.uint8)[held.device_held * 192 :] = 0xFF
    assert all(map(torch.equal, cases[1].live_grads(last, retain_graph=True), expected))
    with pytest.raises(RuntimeError, match="'layer 1' a second time: .*--moe-paged-stash-compute copies"):
        cases[1].live_grads(last)
    cases[0].live_grads(output)
    stash.reset()
    equal_with(stash, cases, order=order)


@pytest.mark.parametrize("order", ["F0 F1 F2 B2 B1 B0", "F0 F1 B0 F2 B2 B1"])
def test_rows_in_the_scratch_are_moved_if_the_step_departs_from_its_order(order: str) -> None:
    # All other groups compute in the scratch too, with other rows.
    stash, cases = known_order("F0 F1 B1 B0", pages=(0, 99)), [Case() for _ in range(3)]
    for number, case in enumerate(cases):
        case.x.data.mul_(number + 1)
    equal_with(stash, cases, order=order)


def test_rows_in_the_scratch_outlive_their_backward_for_late_weight_gradients() -> None:
    stash, case, late = known_order("F0 B0 F1 B1"), Case(), list[WeightGrad]()
    main_grad = torch.zeros_like(case.named["weight1"])
    expected = case.live_grads(case.apart(), wanted=["weight1"])[0]
    set_grad_owner(case.named["weight1"], GradOwner(main_grad, late.append))
    output = run(case, stash, "layer 0")
    output.backward(normal(*output.shape))
    other = Case()
    other.x.data.neg_()
    other.live_grads(run(other, stash, "layer 1"))
    late[0].add_to(main_grad, scale=1.0, is_zero=True)
    torch.testing.assert_close(main_grad, expected)


def test_a_reset_releases_the_scratch() -> None:
    stash, case = known_order("F0 B0"), Case()
    output = run(case, stash, "layer 0")
    stash.reset()
    with pytest.raises(RuntimeError, match="its rows were in the stash when reset"):
        case.live_grads(output)
    output = run(case, stash, "layer 0")
    # Another stash over the same pool.
    PagedStash(stash.pool, computes_in_pages=True, prefetch_groups=0).reset()
    with pytest.raises(RuntimeError, match="the group has no pages: it is closed, or was opened before its pool's"):
        case.live_grads(output)
    stash.reset()
    given: dict[str, Any] = {"math": case.math, "parts": case.parts, "offsets": case.offsets, "order": case.order}
    stashed = stash.begin("layer 0", torch.tensor([CAPACITY + 1]), max_rows=CAPACITY)
    expert_outputs(case.x, case.probs, *case.fcs, **given, stashed=stashed)
    assert stash.is_void_sync()


def test_pages_of_another_stash_are_not_read_after_its_reset() -> None:
    pool = PagePool("cpu", PoolLayout(192, 99), scratch_pages=60)
    first, second = (PagedStash(pool, computes_in_pages=True, prefetch_groups=0) for _ in range(2))
    case = Case()
    output = run(case, first, "first")
    second.reset()
    run(Case(), second, "second")
    with pytest.raises(RuntimeError, match="the group has no pages: it is closed, or was opened before its pool's"):
        case.live_grads(output)


def test_late_weight_gradients_are_refused_after_a_reset_and_in_a_second_use() -> None:
    stash, case, late = make_stash(), Case(), list[WeightGrad]()
    main_grad = torch.zeros_like(case.named["weight1"])
    set_grad_owner(case.named["weight1"], GradOwner(main_grad, late.append))
    output = run(case, stash, "layer")
    output.backward(normal(*output.shape))
    late[0].compute()
    with pytest.raises(RuntimeError, match="read by each product once"):
        late[0].add_to(main_grad, scale=1.0, is_zero=True)
    output = run(case, stash, "layer")
    output.backward(normal(*output.shape))
    stash.reset()
    with pytest.raises(RuntimeError, match="its rows were in the stash when reset"):
        late[1].compute()


def test_a_backward_that_fails_releases_its_pages() -> None:
    stash, case = make_stash(5, 99), Case()
    owner = GradOwner(torch.zeros_like(case.named["weight1"]), lambda grad: 1 / 0)
    set_grad_owner(case.named["weight1"], owner)
    output = run(case, stash, "layer")
    with pytest.raises(ZeroDivisionError):
        output.backward(normal(*output.shape))
    occupancy = stash.pool.occupancy_sync()
    assert occupancy.device_held == occupancy.host_held == 0
    equal_with(stash, [Case()], order="F0 B0")


def test_two_threads_in_the_pages_of_one_pool_are_an_error() -> None:
    stash, case, errors = make_stash(), Case(), list[BaseException]()
    stashed = stash.begin("layer", case.order.num_rows, max_rows=CAPACITY)
    assert stashed is not None and stashed.place((HIDDEN, 2 * FFN), (torch.float32, torch.float32))

    def other() -> None:
        try:
            run(Case(), stash, "other")
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert "'other' and 'layer' run in two threads" in str(errors[0])
    # An interrupted group of the same thread does not matter.
    run(Case(), stash, "next")


@pytest.mark.parametrize("counted", [-1, 0, 2, 10**9])
def test_a_wrong_number_of_rows_writes_to_no_page_of_another_group(counted: int) -> None:
    stash, cases = make_stash(), [Case(), Case()]
    expected = cases[0].live_grads(run(cases[0], None, ""))
    output = run(cases[0], stash, "first")
    order = cases[1].order
    stashed = stash.begin("second", torch.tensor([counted]), max_rows=CAPACITY)
    given: dict[str, Any] = {"math": cases[1].math, "parts": cases[1].parts, "offsets": cases[1].offsets}
    wrong = expert_outputs(cases[1].x, cases[1].probs, *cases[1].fcs, **given, order=order, stashed=stashed)
    assert stash.is_void_sync() == (not 0 <= counted <= CAPACITY)
    cases[1].live_grads(wrong)
    assert all(map(torch.equal, cases[0].live_grads(output), expected))


def test_pages_return_without_a_backward_and_after_an_error() -> None:
    stash, case = make_stash(), Case()
    output = run(case, stash, "layer")
    assert stash.pool.occupancy_sync().device_held > 0
    del output
    gc.collect()
    assert stash.pool.occupancy_sync().device_held == 0
    case.fcs[1] = case.fcs[1]._replace(weight=normal(3, FFN + 1, HIDDEN))
    stashed = stash.begin("layer", case.order.num_rows, max_rows=CAPACITY)
    assert stashed is not None
    with pytest.raises(ValueError, match="rows of 8 elements"), stashed:
        given: dict[str, Any] = {"math": case.math, "parts": case.parts, "offsets": case.offsets, "order": case.order}
        expert_outputs(case.x, case.probs, *case.fcs, **given, stashed=stashed)
    del stashed
    gc.collect()
    assert stash.pool.occupancy_sync().device_held == 0


def test_a_reset_before_the_backward_is_an_error() -> None:
    stash, case = make_stash(), Case()
    output = run(case, stash, "layer")
    stash.reset()
    with pytest.raises(RuntimeError, match="its rows were in the stash when reset"):
        case.live_grads(output)


def test_what_cannot_be_computed_in_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="computes_in_pages is True, but the pool has no scratch"):
        PagedStash(PagePool("cpu", PoolLayout(64, 9)), computes_in_pages=True)
    pool = PagePool("cpu", PoolLayout(64, 9), scratch_pages=3)
    for spec in (TensorSpec(64, 64, 4), TensorSpec(16, 32, 4)):
        with pytest.raises(ValueError, match=r"scratch_pages \(3\) must be at least"):
            pool.plan(pool.open_group([spec]), torch.tensor([1]), in_pages=True)
    stash, case = make_stash(), Case()
    stashed = stash.begin("layer", case.order.num_rows, max_rows=CAPACITY)
    assert isinstance(stashed, StashedRows)
    for widths in ((16.0, 8), (0, 8), (True, 8)):
        with pytest.raises(ValueError, match="widths .* must be integers of at least 1"):
            stashed.place(widths, (torch.float32, torch.float32))
    x, gate_up = stashed.place((HIDDEN, 2 * FFN), (torch.float32, torch.float32)) or (None, None)
    with pytest.raises(ValueError, match="save must receive what place returned"):
        stashed.save([gate_up], x, recompute=None, num_sources=0)
