"""The stash under Megatron's names, called by a user's layer: rows are stored in pages and restored."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.transformer.moe.paged_stash import (
    Counter,
    PagedStashBuffer,
    PagedStashManager,
    PagedStashRunner,
    PagedTensor,
    PagePool,
    PoolLayout,
    check_paged_stash_host_spill,
    check_paged_stash_overflow,
    get_paged_stash_context,
    paged_stash_group_commit,
    paged_stash_group_start,
    paged_stash_init_chunk_handler,
    paged_stash_reset,
)
from megatron.core.transformer.moe.paged_stash import manager as manager_module
from tests.unit_tests.core.poisoned_memory import poisoned_memory
from tests.unit_tests.core.transformer.moe.paged_stash.expert_models import is_empty_sync

C, LIVE, HIDDEN, LAYERS = 48, 30, 16, 3


class LiveRowsLinear(torch.autograd.Function):
    """x @ weight, whose backward reads only the live rows. Restored rows beyond them may hold any bytes, even NaN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """x: [C, H]. weight: [H, H]. Returns [C, H]."""
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """grads: [C, H]. Returns the gradients of x, zero beyond the live rows, and of the weight."""
        x, weight = ctx.saved_tensors
        grad = grads[0][:LIVE]
        return nn.functional.pad(grad @ weight.t(), (0, 0, 0, C - LIVE)), x[:LIVE].t() @ grad


class OwnExperts(nn.Module):
    """A layer written for upstream's stash. is_stashed: False disables the stash."""

    def __init__(self, is_stashed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.is_stashed = is_stashed
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(HIDDEN, HIDDEN) * 0.3) for _ in range(LAYERS)])

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [C, H], fp32. Returns the same shape and dtype."""
        paged_stash_init_chunk_handler(1, None)
        for number, weight in enumerate(self.weights):
            if not self.is_stashed:
                hidden = LiveRowsLinear.apply(hidden, weight).sigmoid()
                continue
            hidden = paged_stash_group_start(hidden)
            with get_paged_stash_context(f"layer {number}", C, torch.tensor([LIVE]), LIVE):
                hidden = LiveRowsLinear.apply(hidden, weight).sigmoid()
            hidden = paged_stash_group_commit(hidden, f"layer {number}")
        return hidden


@pytest.fixture(autouse=True)
def manager() -> Iterator[PagedStashManager]:
    """Creates a new default manager for each test, and makes torch fill new memory with NaN."""
    manager_module._default_manager.cache_clear()
    with poisoned_memory():
        assert torch.empty(2).isnan().all(), "memory is not poisoned"
        yield PagedStashManager.get_instance()
    manager_module._default_manager.cache_clear()


def step(model: nn.Module) -> list[Tensor]:
    """Returns the gradients of the input's live rows and of the weights."""
    model.zero_grad()
    x = torch.linspace(-1, 1, C * HIDDEN).view(C, HIDDEN).requires_grad_()
    model(x)[:LIVE].square().sum().backward()
    return [x.grad[:LIVE], *(weight.grad for weight in model.parameters())]


def settings(cuda: float = 1.1, cpu: float = 0.0) -> Any:
    return SimpleNamespace(
        moe_paged_stash_page_size=4,
        moe_paged_stash_buffer_size_factor_cuda=cuda,
        moe_paged_stash_buffer_size_factor_cpu=cpu,
    )


def test_the_first_step_is_learned_from_and_later_ones_use_pages(manager: PagedStashManager) -> None:
    expected = step(OwnExperts(False))
    model = OwnExperts(True)
    for number in range(3):
        paged_stash_reset(True, settings())
        assert manager.is_learning == (number == 0)
        found = step(model)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        if number:
            counters = manager.pool.counters
            assert counters[Counter.PLANNED_PAGES] > 0 and counters[Counter.HIGH_WATER_DEVICE] > 0
            assert int(check_paged_stash_overflow()) == 0 and int(check_paged_stash_host_spill()) == 0
            assert is_empty_sync(manager.stash)
    # The pool has pages for the live rows of two groups, since the last group's backward directly follows its forward.
    row_bytes, pages = HIDDEN * 4, -(-LIVE // 4)
    assert manager.pool.layout.page_bytes == 4 * row_bytes
    assert manager.pool.layout.device_pages == -(-(2 * 2 * pages) * 11 // 10)


def test_pages_that_run_out_raise_the_overflow_flag_and_host_pages_the_other(manager: PagedStashManager) -> None:
    model, expected = OwnExperts(True), step(OwnExperts(False))
    paged_stash_reset(True, settings(cuda=0.3))
    step(model)
    paged_stash_reset()
    step(model)
    assert int(check_paged_stash_overflow()) > 0
    manager.release_stash_buffers()
    paged_stash_reset(True, settings(cuda=0.3, cpu=1.0))
    step(model)
    paged_stash_reset()
    found = step(model)
    assert int(check_paged_stash_overflow()) == 0 and int(check_paged_stash_host_spill()) > 0
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_an_evaluation_between_steps_stashes_nothing(manager: PagedStashManager) -> None:
    model = OwnExperts(True)
    for _ in range(2):
        paged_stash_reset(True, settings())
        step(model)
    paged_stash_reset(enabled=False)
    step(model)
    assert manager.pool.counters[Counter.PLANNED_PAGES] == 0


def test_chunks_have_groups_of_their_own(manager: PagedStashManager) -> None:
    paged_stash_init_chunk_handler(2, 1)
    x = torch.randn(C, HIDDEN, requires_grad=True)
    with get_paged_stash_context(None, C, torch.tensor([LIVE])):
        y = x.exp()
    y.sum().backward()
    paged_stash_reset()
    assert {event.name for event in manager.stash.order.events} == {"chunk 1 experts"}
    with pytest.raises(ValueError, match="vp_stage is 2: must be at least 0 and below vp_size .2"):
        paged_stash_init_chunk_handler(2, 2)
    with pytest.raises(RuntimeError, match="no complete step was recorded"):
        PagedStashManager(PagePool("cpu", PoolLayout(256, 4))).allocate_stash_buffers()


def test_a_runner_repeats_the_step_that_overflowed(manager: PagedStashManager) -> None:
    model, plain = OwnExperts(True), OwnExperts(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    reads: list[float] = []

    def passes(*, data_iterator: Any, model: Any, num_microbatches: int, forward_only: bool) -> list[float]:
        for _ in range(num_microbatches):
            reads.append(next(data_iterator))
            x = torch.full((C, HIDDEN), reads[-1]).requires_grad_()
            loss = model[0](x)[:LIVE].square().sum()
            if not forward_only:
                loss.backward()
        return reads[-num_microbatches:]

    runner = PagedStashRunner(settings(cuda=0.3), False, model, optimizer, passes)
    batches = iter([0.1, 0.2, 0.3, 0.4])
    for number, found in enumerate(([0.1, 0.2], [0.3, 0.4])):
        model.zero_grad()
        assert runner(data_iterator=batches, num_microbatches=2) == found
        assert runner.num_reruns == number, "the first step has enough pages, the second too few"
    assert reads == [0.1, 0.2, 0.3, 0.4, 0.3, 0.4]
    for value in (0.3, 0.4):
        plain(torch.full((C, HIDDEN), value).requires_grad_())[:LIVE].square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    with pytest.raises(ValueError, match="copy_main_params is True"):
        PagedStashRunner(None, True, model, optimizer, passes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_single_tensor_moves_into_pages_and_back(dtype: torch.dtype) -> None:
    overflow, spill = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    buffer = PagedStashBuffer(16, 32, 8, "cpu", overflow, spill, dtype, num_tokens_host=16)
    bits = torch.randint(0, 255, (24, 32 * dtype.itemsize), dtype=torch.uint8)
    tensors = [PagedTensor(bits.clone().view(dtype), torch.tensor([count]), page_size=8) for count in (13, 9)]
    for tensor in tensors:
        tensor.offload_to_stash(buffer)
    assert overflow.item() == 0 and spill.item() == 1, "two pages of the second tensor are on the host"
    for tensor, count in zip(tensors, (13, 9), strict=True):
        back = tensor.reload_from_stash(buffer)
        assert back.shape == (24, 32) and back.dtype == dtype
        assert torch.equal(back.view(torch.uint8)[:count], bits[:count])
    full = [PagedTensor(bits.clone().view(dtype)) for _ in range(2)]
    for tensor in full:
        tensor.offload_to_stash(buffer)
    assert overflow.item() == 1, "six pages are needed and four exist"
    buffer.reset()
    buffer.pool.check_integrity_sync()
    with pytest.raises(RuntimeError, match="not in pages"):
        PagedTensor(bits).reload_from_stash(buffer)
