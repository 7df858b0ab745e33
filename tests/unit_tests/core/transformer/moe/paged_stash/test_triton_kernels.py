"""Kernels interpreted on the CPU agree with the operators in bytes, tables, rings and counters."""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.core.transformer.moe.paged_stash.page_layout import PoolLayout, TensorSpec
from megatron.core.transformer.moe.paged_stash.page_pool import PagePool
from tests.counts import long_count
from tests.unit_tests.core.transformer.moe.paged_stash.copy_cases import copy_there_and_back
from tests.unit_tests.core.transformer.moe.paged_stash.pool_model import RandomOperations

Interpreted = Callable[[str], ModuleType]


def test_random_operations_agree_with_the_model(interpreted: Interpreted) -> None:
    RandomOperations(1, ops=interpreted("triton_kernels")).run(30)


@pytest.mark.slow
@settings(max_examples=long_count(2, soak=80), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1))
def test_many_random_operations_agree_with_the_model(interpreted: Interpreted, seed: int) -> None:
    RandomOperations(seed, ops=interpreted("triton_kernels")).run(long_count(150, soak=250))


@pytest.mark.parametrize(
    ("row_bytes", "pitch_bytes", "max_rows", "offset"),
    [
        (80000, 80000, 3, 0),  # words of 16 bytes
        (80000, 80016, 3, 16),  # rows longer than a block
        (48, 64, 4000, 0),  # many rows in a block
        (1000, 1008, 300, 8),  # words of 8, 4, 2 and 1 bytes
        (100, 108, 900, 4),
        (6, 14, 7000, 2),
        (7, 15, 3000, 1),
        (7, 7, 20001, 0),  # without gaps: words of 16 bytes for any width
        (7, 7, 20002, 0),  # ends with 7 single bytes
        (7, 7, 20002, 1),
        (4096, 2**31 + 16, 3, 0),  # exceeds 32-bit offsets
    ],
)
def test_any_width_and_address_is_copied(
    row_bytes: int, pitch_bytes: int, max_rows: int, offset: int, interpreted: Interpreted
) -> None:
    spec = TensorSpec(row_bytes, pitch_bytes, max_rows)
    # Pages as large as the largest block: 2 on the host, the others at addresses beyond 2**31.
    layout = PoolLayout(page_bytes=4096 * 16, device_pages=2**15 + 20, host_pages=2)
    copy_there_and_back(interpreted("triton_kernels"), spec, rows=max_rows - 1, layout=layout, offset=offset)


def test_a_group_is_one_launch_of_each_kernel_and_tier(
    interpreted: Interpreted, monkeypatch: pytest.MonkeyPatch
) -> None:
    launchers = interpreted("triton_kernels")
    launched: list[str] = []
    run = type(launchers.plan_kernel).run
    monkeypatch.setattr(
        type(launchers.plan_kernel),
        "run",
        lambda kernel, *args, **named: launched.append(kernel.__name__) or run(kernel, *args, **named),
    )
    pool = PagePool("cpu", PoolLayout(64, 40, 8))
    group = pool.open_group([TensorSpec(64, 64, 3)] * 16)
    state = {"table": group.slab.table, "held": group.slab.held, "layout": pool.layout.numbers}
    state["tensors"] = group.calls[0].tensors
    ends = {"heads": pool.heads, "tails": pool.tails, "ring": pool.ring, "counters": pool.counters}
    memories = [torch.arange(192, dtype=torch.uint8) for _ in range(16)]
    launchers.plan(torch.tensor([2]), torch.zeros(3, dtype=torch.int64), **ends, **state)
    launchers.stash(memories, pool.device_pages, host_pages=pool.host_pages, num_programs=0, **state)
    launchers.restore(pool.device_pages, pool.host_pages, targets=memories, num_programs=0, **state)
    launchers.release(pool.ring, pool.tails, **state)
    assert launched == ["plan_kernel", *["copy_kernel"] * 4, "release_kernel"]
    assert pool.occupancy_sync().device_free == 40


def test_no_number_makes_triton_compile_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    launchers = importlib.import_module(f"{PagePool.__module__.rpartition('.')[0]}.triton_kernels")
    backend = triton.compiler.make_backend(triton.backends.compiler.GPUTarget("cuda", 90, 32))
    keys: dict[str, set[str]] = {}

    def note(kernel: Any, *args: Any, grid: object, warmup: bool, **named: Any) -> None:
        bind = triton.runtime.jit.create_function_from_signature(kernel.signature, kernel.params, backend)
        _, specialization, options = bind(*args, **named)
        keys.setdefault(kernel.__name__, set()).add(f"{specialization} {options}")

    monkeypatch.setattr(type(launchers.plan_kernel), "run", note)
    for layout in (PoolLayout(65536, 1, 0), PoolLayout(65552, 16, 1), PoolLayout(80000, 31, 7)):
        pool = PagePool("cpu", layout)
        for num_tensors, row_bytes, max_rows in ((3, 1, 1), (4, 16, 3), (3, 7, 16), (4, 32, 17), (3, 2**31, 2**4)):
            group = pool.open_group([TensorSpec(row_bytes, row_bytes + gap, max_rows) for gap in range(num_tensors)])
            state = {"table": group.slab.table, "held": group.slab.held, "layout": layout.numbers}
            state["tensors"] = group.calls[0].tensors
            ends = {"heads": pool.heads, "tails": pool.tails, "ring": pool.ring, "counters": pool.counters}
            memory = torch.empty(64, dtype=torch.uint8)
            memories = [memory[offset:] for offset in range(num_tensors)]
            launchers.plan(torch.zeros(2, dtype=torch.int64)[1:], torch.zeros(3, dtype=torch.int64), **ends, **state)
            launchers.stash(memories, pool.device_pages, host_pages=pool.host_pages, num_programs=0, **state)
            launchers.restore(pool.device_pages, pool.host_pages, targets=memories, num_programs=0, **state)
            launchers.release(pool.ring, pool.tails, **state)
    assert {name: len(variants) for name, variants in keys.items()} == {
        "plan_kernel": 1,
        "copy_kernel": 2,  # to pages and back
        "release_kernel": 1,
    }
