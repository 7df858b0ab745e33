"""Checks that the benchmarks' plain models agree: a loop over experts, a grouped GEMM, and expert parallelism."""

from dataclasses import replace

import torch
import torch.distributed as dist

from benchmarks.plain_model import PlainConfig, PlainExpert, PlainGroupedMoE, PlainMoE
from tests.harness import run_on_ranks

# Rows of the operands of a grouped GEMM must be multiples of 16 bytes.
CONFIG = PlainConfig(hidden_size=16, num_experts=4, ffn_hidden_size=8)


def _experts(moe: PlainMoE) -> list[PlainExpert]:
    return [expert for expert in moe.experts if isinstance(expert, PlainExpert)]


@torch.no_grad()
def _take_weights(moe: PlainGroupedMoE, loop: PlainMoE, experts: list[PlainExpert]) -> None:
    moe.router.weight.copy_(loop.router.weight)
    moe.fc1.copy_(torch.stack([expert.fc1.weight for expert in experts]))
    moe.fc2.copy_(torch.stack([expert.fc2.weight for expert in experts]))


def _compare_on_rank() -> None:
    torch.manual_seed(1)
    loop, rank = PlainMoE(CONFIG), dist.get_rank()
    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    grouped = PlainGroupedMoE(replace(CONFIG, grouped=True))
    parallel = PlainGroupedMoE(replace(CONFIG, grouped=True, expert_parallel=True))
    own = _experts(loop)[2 * rank : 2 * rank + 2]
    _take_weights(grouped, loop, _experts(loop))
    _take_weights(parallel, loop, own)
    expected = loop(x)
    expected.square().sum().backward()
    # Expert-parallel ranks accumulate the gradients of all ranks' rows.
    on_all_ranks = {name: _summed(param) for name, param in loop.named_parameters()}
    for moe, experts in ((grouped, _experts(loop)), (parallel, own)):
        again = x.detach().requires_grad_()
        output = moe(again)
        torch.testing.assert_close(output, expected)
        output.square().sum().backward()
        torch.testing.assert_close(again.grad, x.grad)
        torch.testing.assert_close(moe.router.weight.grad, loop.router.weight.grad)
        for place, expert in enumerate(experts):
            number = _experts(loop).index(expert)
            for name, weight in (("fc1", moe.fc1), ("fc2", moe.fc2)):
                of_loop = _gradient(expert.get_parameter(f"{name}.weight"))
                total = on_all_ranks[f"experts.{number}.{name}.weight"]
                assert weight.grad is not None
                torch.testing.assert_close(weight.grad[place], of_loop if moe is grouped else total)


def _summed(param: torch.Tensor) -> torch.Tensor:
    total = _gradient(param).clone()
    dist.all_reduce(total)
    return total


def _gradient(weight: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad


def test_grouped_and_parallel_experts_compute_what_the_loop_does() -> None:
    run_on_ranks(_compare_on_rank, 2)
