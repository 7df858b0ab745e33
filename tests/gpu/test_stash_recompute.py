"""On a GPU, captured recomputations are bit-identical to forward, skipped ones are fast, and gradients are correct."""

import math

import pytest
import torch
from torch import Tensor

from megatron.core.transformer.moe.paged_stash.expert_ops import (
    Recompute,
    add_low_rank,
    gated_activation,
    grouped_gemm,
    recompute_act,
    recompute_gate_up,
)

pytestmark = pytest.mark.gpu

COUNTS, CAPACITY, HIDDEN, FFN = [130, 0, 1, 500, 69], 1000, 320, 200
ROWS = sum(COUNTS)
ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def made(*shape: int, dtype: torch.dtype, rows: int | None = None) -> Tensor:
    """Returns a leaf tensor of random values on the GPU, with NaN from row `rows` on."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) / shape[-1] ** 0.25
    values[rows if rows is not None else shape[0] :] = math.nan
    return values.to("cuda", dtype).requires_grad_()


def layer(dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns x, the scales of its rows, and the weights of both GEMMs. fc2 is transposed, as in Hugging Face."""
    x, scale = made(CAPACITY, HIDDEN, dtype=dtype, rows=ROWS), made(CAPACITY, 1, dtype=torch.float32, rows=ROWS)
    fc1, fc2 = made(5, HIDDEN, 2 * FFN, dtype=dtype), made(5, HIDDEN, FFN, dtype=dtype)
    return {"x": x, "scale": scale, "fc1": fc1, "fc2": fc2}


def run(parts: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    device = parts["x"].device
    offsets = torch.tensor(COUNTS).cumsum(0, dtype=torch.int32).to(device)
    gate_up = grouped_gemm(parts["x"], parts["fc1"], offsets=offsets)
    act = gated_activation(gate_up, parts["scale"].squeeze(1), num_rows=offsets[-1:].long())
    return gate_up, act, grouped_gemm(act, parts["fc2"].transpose(1, 2), offsets=offsets)


@pytest.mark.parametrize("dtype", ERROR)
def test_gradients_agree_with_the_cpu(dtype: torch.dtype) -> None:
    parts = layer(dtype)
    exact = {name: part.detach().double().cpu().requires_grad_() for name, part in parts.items()}
    grad = made(CAPACITY, HIDDEN, dtype=dtype, rows=ROWS).detach()
    outputs, expected = run(parts)[2], run(exact)[2]
    found = [outputs, *torch.autograd.grad(outputs, list(parts.values()), grad)]
    right = [expected, *torch.autograd.grad(expected, list(exact.values()), grad.double().cpu())]
    for one, other in zip(found, right):
        live = slice(ROWS if one.shape[0] == CAPACITY else None)
        assert (one.double().cpu() - other)[live].norm() <= ERROR[dtype] * other[live].norm()


@pytest.mark.parametrize("dtype", ERROR)
def test_captured_recomputations_give_forwards_bits_when_needed(dtype: torch.dtype) -> None:
    parts = layer(dtype)
    gate_up, act, _ = (value.detach() for value in run(parts))
    offsets = torch.tensor(COUNTS).cumsum(0, dtype=torch.int32).cuda()
    again: list[tuple[Recompute, tuple[Tensor, ...], Tensor]]
    again = [(recompute_gate_up(parts["fc1"], offsets), (parts["x"].detach(),), gate_up)]
    low, wide = made(CAPACITY, 16, dtype=dtype, rows=ROWS).detach(), made(5, 16, 2 * FFN, dtype=dtype).detach()
    adapted = add_low_rank(gate_up.clone(), low, weight=wide, offsets=offsets, scale=0.5)
    adapter = recompute_gate_up(parts["fc1"], offsets, low_rank=(wide, 0.5))
    again += [(adapter, (parts["x"].detach(), low), adapted)]
    again += [(recompute_act(offsets[-1:].long()), (gate_up, parts["scale"].detach().squeeze(1)), act)]
    for recompute, sources, forward in again:
        out, needed = torch.empty_like(forward), torch.zeros(2, dtype=torch.int64, device="cuda")[1:]
        recompute(out, needed, *sources)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recompute(out, needed, *sources)
        for flag in (0, 1):
            needed.fill_(flag)
            out.fill_(7)
            graph.replay()
            assert torch.equal(out[:ROWS], forward[:ROWS] if flag else torch.full_like(out[:ROWS], 7))
            assert (out[ROWS:] == 7).all()


def test_a_recomputation_that_is_not_needed_takes_microseconds() -> None:
    parts, needed = layer(torch.bfloat16), torch.zeros(1, dtype=torch.int64, device="cuda")
    offsets = torch.tensor(COUNTS).cumsum(0, dtype=torch.int32).cuda()
    out, recompute = torch.empty(CAPACITY, 2 * FFN, device="cuda").bfloat16(), recompute_gate_up(parts["fc1"], offsets)
    graph, start, end = (
        torch.cuda.CUDAGraph(),
        torch.cuda.Event(enable_timing=True),
        torch.cuda.Event(enable_timing=True),
    )
    recompute(out, needed, parts["x"].detach())
    with torch.cuda.graph(graph):
        for _ in range(100):
            recompute(out, needed, parts["x"].detach())
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) * 1000 / 100 < 10
