"""Gradient norm, clipping and count of zeros."""

import math

import pytest
import torch

from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, count_zeros_fp32, get_grad_norm_fp32
from tests.unit_tests.core.optimizer.reference import wrap


def parameters_with_grads(*shapes):
    generator = torch.Generator().manual_seed(3)
    params = [torch.zeros(shape) for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    return params


@pytest.mark.parametrize("norm_type", [1, 2, 3, math.inf])
def test_norm_is_that_of_all_elements_together(norm_type):
    grads = [p.grad for p in parameters_with_grads((3, 5), (70000,), (), (0,))]
    expected = torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads]).double(), norm_type)
    norm = get_grad_norm_fp32(grads, norm_type, accumulate_in=torch.float64)
    assert norm == pytest.approx(expected.item(), rel=1e-7)


def test_fp32_norm_of_many_elements_keeps_six_digits():
    grad = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0))
    exact = torch.linalg.vector_norm(grad.double()).item()
    assert get_grad_norm_fp32([grad]) == pytest.approx(exact, rel=1e-6)
    assert get_grad_norm_fp32([grad], accumulate_in=torch.float64) == torch.tensor(exact).float().item()


def test_fp64_norm_does_not_depend_on_the_cut():
    grad = torch.randn(300001, generator=torch.Generator().manual_seed(1))
    norms = {get_grad_norm_fp32(grad.split(size), accumulate_in=torch.float64) for size in (300001, 64, 65537)}
    assert len(norms) == 1


def test_no_gradients_have_norm_zero_and_no_zeros():
    assert get_grad_norm_fp32([]) == 0.0
    assert count_zeros_fp32([]) == 0.0
    clip_grad_by_total_norm_fp32([], 1.0, 0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_norm_is_finite_only_if_every_element_is(bad):
    grads = [p.grad for p in parameters_with_grads((3, 5), (70000,))]
    grads[1][69999] = bad
    assert not math.isfinite(get_grad_norm_fp32(grads))


@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_clipping_scales_down_and_never_up(max_norm):
    params = parameters_with_grads((3, 5), (40,))
    before = [p.grad.clone() for p in params]
    norm = get_grad_norm_fp32([p.grad for p in params])
    clip_grad_by_total_norm_fp32(params, max_norm, norm)
    after = get_grad_norm_fp32([p.grad for p in params])
    assert after == pytest.approx(min(max_norm, norm), rel=1e-5)
    assert (max_norm > norm) == all(torch.equal(p.grad, b) for p, b in zip(params, before))


def test_standing_gradients_of_a_wrapper_are_counted_and_clipped():
    wrapped = wrap(torch.nn.Linear(3, 2))
    wrapped(torch.tensor([[1.0, 0.0, 2.0]])).sum().backward()
    params = list(wrapped.parameters())
    assert count_zeros_fp32(params) == 2.0
    clip_grad_by_total_norm_fp32(params, 1.0, 2.0)
    assert params[1].grad is None and params[1].main_grad.tolist() == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize(
    "overlap", [{"release_gradients": True}, {"use_distributed_optimizer": True, "shard_gradients": True}]
)
def test_b28_gradients_that_a_wrapper_has_freed_are_never_silently_not_clipped(overlap):
    wrapped = wrap(torch.nn.Linear(3, 2), overlap=overlap)
    wrapped(torch.ones(1, 3)).sum().backward()
    wrapped.finish_grad_sync()
    with pytest.raises(ValueError, match=r"shape \(2, 3\) is in .*which frees gradients during backward: .*clip_grad"):
        clip_grad_by_total_norm_fp32(wrapped.parameters(), 1.0, 2.0)
    with pytest.raises(ValueError, match="log_num_zeros_in_grad"):
        count_zeros_fp32(wrapped.parameters())


def test_zeros_are_counted_where_there_is_a_gradient():
    params = parameters_with_grads((4, 4), (3,)) + [torch.zeros(9)]
    params[0].grad[1] = 0.0
    assert count_zeros_fp32(params) == 4.0
