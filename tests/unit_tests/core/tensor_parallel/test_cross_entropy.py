"""The memory-efficient cross entropy compared with torch's: values, gradients, padding, dtypes, and errors."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.core.device import RowChunks
from megatron.core.process_groups_config import ALONE
from megatron.core.tensor_parallel import cross_entropy
from megatron.core.tensor_parallel.cross_entropy import consuming_cross_entropy, vocab_parallel_cross_entropy
from tests.harness import run_on_ranks

CLASSES, PADDED = 13, 16


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits rows into several chunks, with an incomplete last one."""
    monkeypatch.setattr(cross_entropy, "_CHUNKS", RowChunks(cpu_elements=3 * PADDED, gpu_elements=3 * PADDED))


def logits_and_targets(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Returns random logits [4, 2, 16] and targets [4, 2] below 13."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4, 2, PADDED, generator=generator, dtype=torch.float64).mul_(3).to(dtype).requires_grad_()
    return logits, torch.randint(0, CLASSES, (4, 2), generator=generator)


def test_gradient_of_the_public_function_is_right() -> None:
    logits, target = logits_and_targets()
    assert torch.autograd.gradcheck(lambda x: vocab_parallel_cross_entropy(x, target), (logits,))


@pytest.mark.parametrize("strided", [False, True])
def test_public_function_leaves_its_input_and_graph_alone(strided: bool) -> None:
    leaf, target = logits_and_targets()
    logits = leaf.transpose(0, 1) if strided else leaf
    target = target.t() if strided else target
    before = leaf.detach().clone()
    loss = vocab_parallel_cross_entropy(logits, target)
    (first,) = torch.autograd.grad(loss.sum(), leaf, retain_graph=True)
    (second,) = torch.autograd.grad(loss.sum(), leaf)
    assert torch.equal(leaf, before) and torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_consuming_loss_ignores_padding_and_agrees_with_torch(dtype: torch.dtype) -> None:
    leaf, target = logits_and_targets(dtype)
    weights = torch.linspace(-1, 2, 8, dtype=torch.float64).view(4, 2)
    loss = consuming_cross_entropy(leaf * 1, target, num_classes=CLASSES)
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    (loss * weights).sum().backward()
    exact = leaf.detach().double().requires_grad_()
    expected = F.cross_entropy(exact[..., :CLASSES].flatten(0, 1), target.flatten(), reduction="none").view(4, 2)
    (expected * weights).sum().backward()
    tolerance = {"atol": 2e-2, "rtol": 0.0} if dtype.itemsize == 2 else {"atol": 2e-6, "rtol": 1e-5}
    torch.testing.assert_close(loss.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(leaf.grad.double(), exact.grad, **tolerance)
    assert (leaf.grad[..., CLASSES:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_improbable_targets_have_finite_losses(dtype: torch.dtype) -> None:
    logits = torch.zeros(1, PADDED, dtype=dtype, requires_grad=True)
    shift = torch.zeros(PADDED, dtype=dtype)
    shift[0] = 512
    loss = consuming_cross_entropy(logits + shift, torch.tensor([1]), num_classes=CLASSES)
    loss.sum().backward()
    assert loss.item() == 512 and torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_second_backward_of_the_consuming_loss_is_refused(dtype: torch.dtype) -> None:
    leaf, target = logits_and_targets(dtype)
    loss = consuming_cross_entropy(leaf * 1, target, num_classes=CLASSES).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_loss_without_gradients_and_without_tokens() -> None:
    leaf, target = logits_and_targets(torch.float32)
    with torch.no_grad():
        loss = consuming_cross_entropy(leaf * 1, target, num_classes=CLASSES)
    torch.testing.assert_close(loss, vocab_parallel_cross_entropy(leaf[..., :CLASSES], target))
    empty = vocab_parallel_cross_entropy(torch.zeros(0, PADDED, requires_grad=True), target.new_zeros(0))
    assert empty.shape == (0,)
    empty.sum().backward()


def test_smoothed_and_ignored_targets_agree_with_torch() -> None:
    logits, target = logits_and_targets()
    target[1, 0], target[3, 1] = -100, -1
    compare_smoothed(logits.detach(), target, own=slice(None), group=ALONE)
    for wrong in (-0.1, 1.0):
        with pytest.raises(ValueError, match=f"label_smoothing is {wrong}: must be at least 0 and below 1"):
            vocab_parallel_cross_entropy(logits, target, wrong)


def compare_smoothed(whole: Tensor, target: Tensor, *, own: slice, group: dist.ProcessGroup) -> None:
    """Compares with torch, which spreads label smoothing over all classes rather than only the wrong ones."""
    classes = whole.shape[-1]
    weights = torch.linspace(-1, 2, 8, dtype=torch.float64).view(4, 2)
    for smoothing in (0.0, 0.1, 0.7):
        exact = whole.clone().requires_grad_()
        expected = F.cross_entropy(
            exact.flatten(0, 1),
            target.masked_fill(target < 0, -100).flatten(),
            reduction="none",
            label_smoothing=smoothing * classes / (classes - 1),
        ).view(4, 2)
        (expected * weights).sum().backward()
        for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
            leaf = whole[..., own].to(dtype, copy=True).requires_grad_()
            loss = vocab_parallel_cross_entropy(leaf, target, smoothing, group)
            assert (loss[target < 0] == 0).all()
            (loss * weights).sum().backward()
            if dtype is not torch.bfloat16:
                torch.testing.assert_close(loss.detach().double(), expected.detach(), atol=tolerance, rtol=tolerance)
            torch.testing.assert_close(leaf.grad.double(), exact.grad[..., own], atol=tolerance, rtol=0)
            assert (leaf.grad[target < 0] == 0).all()


def test_split_columns_give_the_losses_and_gradients_of_whole_ones() -> None:
    run_on_ranks(compare_split_columns, 3)


def compare_split_columns() -> None:
    """Runs on each rank. 8 of 18 columns are valid: the second rank has both kinds, the third has only padding."""
    cross_entropy._CHUNKS = RowChunks(cpu_elements=3 * PADDED, gpu_elements=3 * PADDED)
    group, own = dist.group.WORLD, slice(6 * dist.get_rank(), 6 * dist.get_rank() + 6)
    generator = torch.Generator().manual_seed(2)
    whole = torch.randn(4, 2, 18, generator=generator, dtype=torch.float64).mul_(3)
    # A rank's logits may be far below those of the other ranks.
    whole[0, 0, :6] -= 500
    weights = torch.linspace(-1, 2, 8, dtype=torch.float64).view(4, 2)
    for num_classes in (8, 18):
        target = torch.randint(0, num_classes, (4, 2), generator=torch.Generator().manual_seed(3))
        exact = whole.clone().requires_grad_()
        expected = F.cross_entropy(exact[..., :num_classes].flatten(0, 1), target.flatten(), reduction="none")
        (expected.view(4, 2) * weights).sum().backward()
        for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 3e-6), (torch.bfloat16, 3e-2)):
            leaf = whole[..., own].to(dtype, copy=True).requires_grad_()
            loss = consuming_cross_entropy(leaf * 1, target, num_classes=num_classes, tp_group=group)
            (loss * weights).sum().backward()
            if dtype is not torch.bfloat16:
                torch.testing.assert_close(loss.double(), expected.detach().view(4, 2), atol=0, rtol=tolerance)
            torch.testing.assert_close(leaf.grad.double(), exact.grad[..., own], atol=tolerance, rtol=0)
    public = vocab_parallel_cross_entropy(whole[..., own], target, tp_group=group)
    torch.testing.assert_close(public, expected.detach().view(4, 2))
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        vocab_parallel_cross_entropy(whole[..., own], target.new_full((4, 2), 18), tp_group=group)
    target[1, 0], target[3, 1] = -100, -1
    compare_smoothed(whole, target, own=own, group=group)
