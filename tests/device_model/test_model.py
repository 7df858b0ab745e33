"""Tests of the device model on programs of a few lines: it reports faulty programs and accepts correct ones."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest

from tests.device_model.host import on_modelled_gpus


def kinds_of(cases: list[Callable[[], Any]]) -> list[list[str]]:
    """Runs cases one after the other, and returns each case's sorted kinds of alarms."""
    from tests.device_model.cuda_api import install
    from tests.device_model.project import begin_run

    kinds = []
    for case in cases:
        begin_run(install())
        case()
        install().raise_callback_error()
        kinds.append(sorted(kind.name for kind in install().alarms.kinds()))
    return kinds


def numbers(count: int = 8) -> Any:
    import torch

    return torch.arange(float(count), device="cuda")


def side_stream() -> Any:
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return stream


def reads_without_waiting(waits: bool = False) -> None:
    import torch

    side, x = side_stream(), None
    with torch.cuda.stream(side):
        x = numbers()
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    x.sum()


def writes_what_another_stream_reads(waits: bool = False) -> None:
    import torch

    x = numbers()
    side = side_stream()
    with torch.cuda.stream(side):
        x.sum()
    if waits:
        torch.cuda.current_stream().wait_event(side.record_event())
    x.zero_()


def parts_of_one_tensor_are_apart() -> None:
    import torch

    x = numbers()
    side = side_stream()
    with torch.cuda.stream(side):
        x[:4].zero_()
    x[4:].zero_()


def frees_while_another_stream_reads(records: bool = False) -> None:
    import torch

    x = numbers()
    side = side_stream()
    with torch.cuda.stream(side):
        x.sum()
    if records:
        x.record_stream(side)
    del x
    numbers()


def overwrites_a_pinned_source(waits: bool = False) -> None:
    import torch

    source = torch.ones(8, pin_memory=True)
    target = source.to("cuda", non_blocking=True)
    if waits:
        torch.cuda.current_stream().synchronize()
    source.zero_()
    assert target.sum().item() == 8


def reads_a_pinned_target(waits: bool = False) -> None:
    import torch

    target = torch.empty(8, pin_memory=True)
    target.copy_(numbers(), non_blocking=True)
    if waits:
        torch.cuda.synchronize()
    assert target.sum() == 28


def returns_memory_of_a_running_copy(waits: bool = False) -> None:
    import torch

    from megatron.core.device.pinned_memory import pinned_bytes

    source = pinned_bytes(32, torch.device("cuda", 0)).view(torch.float32)
    target = torch.empty(8, device="cuda")
    target.copy_(source, non_blocking=True)
    with nullcontext() if waits else mock.patch.object(torch.cuda, "synchronize"):
        del source


def returns_memory_of_a_graph(drops: bool = False) -> None:
    import torch

    from megatron.core.device.pinned_memory import pinned_bytes

    memory = [pinned_bytes(32, torch.device("cuda", 0)).view(torch.float32)]

    def inside(x: Any) -> None:
        memory[0].copy_(x, non_blocking=True)

    graph, _x, _ = captures(inside)  # keeps x alive
    graph.replay()
    if drops:
        graph.reset()
    memory.clear()


def captures(inside: Callable[[Any], Any]) -> Any:
    """Captures inside(x) on a side stream. Returns the graph, x, and the result of `inside`."""
    import torch

    x = numbers()
    graph, stream = torch.cuda.CUDAGraph(), side_stream()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        result = inside(x)
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph, x, result


def replays_right_numbers() -> None:
    graph, x, result = captures(lambda x: (x * 2).cumsum(0))
    for factor in (1.0, 3.0):
        x.fill_(factor)
        graph.replay()
        assert result.tolist() == [2 * factor * place for place in range(1, 9)]


def waits_for_an_older_event(is_inside: bool = False) -> None:
    import torch

    other = side_stream()
    event = other.record_event()

    def inside(x: Any) -> None:
        if is_inside:
            other.wait_stream(torch.cuda.current_stream())
        torch.cuda.current_stream().wait_event(other.record_event() if is_inside else event)

    captures(inside)


def leaves_a_stream(joins: bool = False) -> None:
    import torch

    def inside(x: Any) -> None:
        side = side_stream()
        with torch.cuda.stream(side):
            x.sum()
        if joins:
            torch.cuda.current_stream().wait_stream(side)

    captures(inside)


def reads_a_value(in_capture: bool = True) -> None:
    if in_capture:
        captures(lambda x: x.sum().item())
    else:
        assert numbers().sum().item() == 28


def works_on_the_default_stream(in_capture: bool = True) -> None:
    import torch

    def inside(x: Any) -> None:
        with torch.cuda.stream(torch.cuda.default_stream() if in_capture else torch.cuda.current_stream()):
            x.add_(1)

    captures(inside)


def frees_the_input_of_a_graph(keeps: bool = False) -> None:
    graph, x, result = captures(lambda x: x * 2)
    kept = x if keeps else None
    del x
    graph.replay()
    assert kept is None or result.tolist() == [2.0 * place for place in range(8)]


def shares_a_pool_out_of_order(in_order: bool = False) -> None:
    import torch

    pool, x, stream = torch.cuda.graph_pool_handle(), numbers(), side_stream()
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        first.capture_begin(pool)
        one = (x + 1) * 2  # x + 1 is free at the end of this capture
        first.capture_end()
        second.capture_begin(pool)
        two = x + 3  # may reuse the memory of x + 1
        second.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    first.replay()
    second.replay()
    if not in_order:
        first.replay()  # writes x + 1, and may overwrite `two`
    assert one.numel() and two.sum().item() == 28 + 24


def reads_pages_after_their_release(reads_first: bool = False) -> None:
    import torch

    from megatron.core.paged_rows import operand
    from megatron.core.transformer.moe.paged_stash import PagePool, PoolLayout
    from megatron.core.transformer.moe.paged_stash.expert_ops import ops
    from megatron.core.transformer.moe.paged_stash.page_layout import row_spec

    pool = PagePool("cuda", PoolLayout(64, 8), scratch_pages=8)
    group = pool.open_group([row_spec(16, 8)])
    offsets = torch.tensor([6], dtype=torch.int32, device="cuda")
    pool.plan(group, offsets.long(), in_pages=True)
    x, places = operand("x", pool.rows_in_pages(group, 0, torch.float32))

    def read() -> None:
        ops.grouped_gemm(x, numbers().view(1, 4, 2), offsets=offsets, out=torch.empty(8, 2, device="cuda"), **places)

    if reads_first:
        read()
    pool.release(group)
    if not reads_first:
        read()


CASES = {
    "RACE": [
        (reads_without_waiting, {"waits": True}),
        (writes_what_another_stream_reads, {"waits": True}),
        (overwrites_a_pinned_source, {"waits": True}),
        (reads_a_pinned_target, {"waits": True}),
    ],
    "HANDED_OUT": [(frees_while_another_stream_reads, {"records": True})],
    "CAPTURE_WAIT": [(waits_for_an_older_event, {"is_inside": True})],
    "UNJOINED": [(leaves_a_stream, {"joins": True})],
    "FORBIDDEN": [(reads_a_value, {"in_capture": False})],
    "OUTSIDE": [(works_on_the_default_stream, {"in_capture": False})],
    "RETURNED": [
        (returns_memory_of_a_running_copy, {"waits": True}),
        (returns_memory_of_a_graph, {"drops": True}),
    ],
    "RELEASED": [(reads_pages_after_their_release, {"reads_first": True})],
    "FREED": [(frees_the_input_of_a_graph, {"keeps": True})],
    "OVERWRITTEN": [(shares_a_pool_out_of_order, {"in_order": True})],
}
PAIRS = [(kind, faulty, mended) for kind, pairs in CASES.items() for faulty, mended in pairs]
SOUND = [parts_of_one_tensor_are_apart, replays_right_numbers]


@cache
def all_kinds() -> tuple[list[list[str]], list[list[str]], list[list[str]]]:
    """Returns the kinds of alarms of the faulty cases, of their corrected forms, and of the sound cases."""
    faulty = [case for _, case, _ in PAIRS]
    mended = [partial(case, **flags) for _, case, flags in PAIRS]
    (kinds,) = on_modelled_gpus(kinds_of, 1, [*faulty, *mended, *SOUND])
    return kinds[: len(PAIRS)], kinds[len(PAIRS) : 2 * len(PAIRS)], kinds[2 * len(PAIRS) :]


@pytest.mark.parametrize("index", range(len(PAIRS)), ids=[case.__name__ for _, case, _ in PAIRS])
def test_a_fault_of_a_few_lines_is_found_and_its_mended_form_is_not(index: int) -> None:
    faulty, mended, _ = all_kinds()
    assert faulty[index] == [PAIRS[index][0]]
    assert mended[index] == []


@pytest.mark.parametrize("index", range(len(SOUND)), ids=[case.__name__ for case in SOUND])
def test_what_is_in_order_raises_no_alarm(index: int) -> None:
    assert all_kinds()[2][index] == []
