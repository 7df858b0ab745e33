"""Gradients in one flat tensor: layout, hooks, accumulation."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed.grad_buffer import ALIGNMENT, GradBuffer, lay_out


@given(st.lists(st.integers(0, 300)))
def test_spans_are_aligned_in_order_and_disjoint(sizes):
    spans = lay_out(sizes)
    assert [span.numel for span in spans] == sizes
    assert all(span.start % ALIGNMENT == 0 and span.end <= span.padded_end for span in spans)
    assert all(a.padded_end == b.start for a, b in zip(spans, spans[1:]))


def buffer_of(model, **settings):
    return GradBuffer(list(model.named_parameters()), torch.float32, **settings)


def grads(buffer):
    return dict(buffer.named_grads())


def test_gradients_of_microbatches_add_up_until_cleared():
    model = nn.Linear(3, 2)
    buffer = buffer_of(model)
    for _ in range(2):
        buffer.clear()
        for value in (1.0, 2.0, 4.0):
            model(torch.full((1, 3), value)).sum().backward()
        assert torch.equal(grads(buffer)["weight"], torch.full((2, 3), 7.0))
        assert all(param.grad is None for param in model.parameters())


def test_sixteen_bit_gradients_are_scaled_and_summed_in_fp32():
    model = nn.Linear(3, 2).bfloat16()
    buffer = buffer_of(model, scale=1 / 3)
    inputs = [torch.full((1, 3), value, dtype=torch.bfloat16) for value in (256.0, 1.0)]
    for x in inputs:
        model(x).sum().backward()
    # 257 does not fit into bfloat16, nor does a third of it.
    assert torch.equal(grads(buffer)["weight"], torch.full((2, 3), 256.0) * (1 / 3) + 1 / 3)


@pytest.mark.parametrize("move", [nn.Module.double, nn.Module.bfloat16, lambda m: m.to("cpu", torch.float16)])
def test_hooks_survive_a_move_of_the_module(move):
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()  # makes autograd's node for the old dtype
    model.zero_grad()
    buffer = buffer_of(model)
    move(model)
    model(torch.ones(1, 3, dtype=model.weight.dtype)).sum().backward()
    assert torch.equal(grads(buffer)["weight"], torch.ones(2, 3))


class Tied(nn.Module):
    """One matrix as embedding and as output."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.output = nn.Linear(3, 4, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens):
        return self.output(self.embedding(tokens))


def test_a_shared_parameter_is_counted_once():
    tokens = torch.tensor([0, 1, 1])
    torch.manual_seed(0)
    model = Tied()
    model(tokens).square().sum().backward()
    expected = model.embedding.weight.grad.clone()
    model.zero_grad()
    buffer = buffer_of(model)
    model(tokens).square().sum().backward()
    assert [name for name, _ in buffer.named_grads()] == ["embedding.weight"]
    assert torch.equal(grads(buffer)["embedding.weight"], expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_layer_used_twice_under_recompute_gets_the_sum_of_both_uses(reentrant):
    model = nn.Linear(3, 3)
    x = torch.randn(2, 3, requires_grad=True)

    def twice():
        hidden = checkpoint(model, x, use_reentrant=reentrant)
        return checkpoint(model, hidden, use_reentrant=reentrant).square().sum()

    twice().backward()
    expected = model.weight.grad.clone()
    model.zero_grad()
    buffer = buffer_of(model)
    twice().backward()
    torch.testing.assert_close(grads(buffer)["weight"], expected)


def test_parameters_that_backward_did_not_reach_have_zero_gradients():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    buffer = buffer_of(model)
    for used in (0, 1, 0):
        buffer.clear()
        model[used](torch.ones(1, 2)).sum().backward()
        buffer.fill_missing()
        sums = [float(grads(buffer)[f"{i}.weight"].sum()) for i in range(2)]
        assert sums == [4.0 if i == used else 0.0 for i in range(2)]


def test_an_interrupted_backward_leaves_nothing_behind():
    model = nn.Linear(3, 2)
    buffer = buffer_of(model)
    model(torch.ones(1, 3)).sum().backward()
    buffer.clear()
    model(torch.ones(1, 3)).sum().backward()
    buffer.fill_missing()
    assert torch.equal(grads(buffer)["bias"], torch.ones(2))
    assert float(buffer.storage.sum()) == 8.0
