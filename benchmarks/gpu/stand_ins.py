"""Runs one of several ranks on one device, with stand-ins for the others and forced routing. Measures nothing.

[Note: stand-ins] Fixed-size buffers are larger than the live rows only if experts are spread over ranks, and NCCL needs
a GPU for each rank. The process group therefore has many members, of which only one exists. The others are assumed to
have the same tokens and choices, and their experts to return the same rows: a gather repeats this rank's rows, and a
reduce-scatter sums this rank's parts. Moving rows costs a pass over the same bytes in device memory instead of network
time, and an all-reduce costs nothing. Losses are meaningless. All sides of a benchmark use the same stand-ins.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core import group_collectives
from megatron.core.transformer.moe.permutation import Routing

TABLES = 8  # number of routings that steps use in turn


def join_stand_ins(ranks: int) -> None:
    """Makes this process rank 0 of several, the only rank that exists. Cannot be undone."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(ranks))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    # torch's fake backend leaves results of some collectives unwritten before 2.13, and gathers in many copies. These
    # functions write every result.
    group_collectives.FAKES_WRITE = True
    group_collectives.all_gather_single = _gather  # type: ignore[assignment]
    group_collectives.reduce_scatter_single = _reduce_scatter  # type: ignore[assignment]
    dist.all_to_all_single = _exchange  # type: ignore[assignment]


def _gather(result: Tensor, x: Tensor, *, group: dist.ProcessGroup, async_op: bool) -> None:
    """Gathers x, [N, *], into result, [ranks * N, *], any dtype."""
    result.view(dist.get_world_size(group), *x.shape).copy_(x)


def _reduce_scatter(result: Tensor, x: Tensor, *, group: dist.ProcessGroup, async_op: bool) -> None:
    """Reduce-scatters x, [ranks * N, *], into result, [N, *], any dtype that can be summed."""
    torch.sum(x.view(dist.get_world_size(group), *result.shape), dim=0, out=result)


def _exchange(
    output: Tensor, x: Tensor, *sizes: list[int], group: dist.ProcessGroup | None = None, async_op: bool = False
) -> dist.Work | None:
    """Exchanges x, [ranks * N, *], any dtype, into output of the same shape.

    With equal parts, every part of the result is rank 0's part of x. With sizes, which must be the same in both
    directions, copies x.
    """
    ranks = 1 if sizes else dist.get_world_size(group)
    output.view(ranks, -1).copy_(x.view(ranks, -1)[:1])
    # An all-reduce of nothing, which is complete and provides the handle that callers expect.
    return dist.all_reduce(output[:0], group=group, async_op=async_op)


@dataclass(frozen=True)
class Choices:
    """Draws the expert choices of tokens. num_own: number of this rank's experts, the first of num_experts."""

    num_tokens: int
    topk: int
    num_experts: int
    num_own: int
    # Exponent of the skew among this rank's experts, whose popularity is a power of their position.
    unevenness: float = 0.0

    def draw(self, share: float, generator: torch.Generator) -> Tensor:
        """Draws choices that send this rank's experts `share` times the balanced number of rows.

        Returns [T, K], int64, on the generator's device.
        """
        device = generator.device
        num_rows = round(share * self.num_tokens * self.topk * self.num_own / self.num_experts)
        size = self.num_tokens, self.num_own
        weights = torch.arange(1, self.num_own + 1, device=device) ** -self.unevenness
        # The largest sums of Gumbel noise and logarithms are a weighted draw without repetition.
        keys = weights.log() - torch.rand(size, generator=generator, device=device).log().neg().log()
        chosen = torch.zeros(size, dtype=torch.bool, device=device)
        chosen.view(-1)[keys.view(-1).topk(num_rows).indices] = True
        noise = torch.rand(self.num_tokens, self.num_experts, generator=generator, device=device)
        noise[:, : self.num_own] = torch.where(chosen, 2.0, -1.0)
        return noise.topk(self.topk).indices


def shares_of_layers(
    layers: int, *, mean: float, spread: float, most: float, generator: torch.Generator
) -> list[float]:
    """Draws each layer's rows over the balanced number: log-normal with this mean over layers, at most `most`."""
    draws = (torch.randn(layers, generator=generator, device=generator.device) * spread).exp()
    shares: list[float] = (draws * mean / draws.mean()).clamp(max=most).tolist()
    return shares


class ForcedRouting:
    """Replaces the routers' choices by tables, a different table for each step.

    Routing weights and their gradients are unchanged.
    """

    def __init__(self, routers: Sequence[nn.Module], tables: Tensor) -> None:
        """Registers hooks on the routers. tables: [turns, layers, T, K], int64, on the device."""
        self.tables, self.turn = tables, 0
        # At a fixed address, because a CUDA graph reads it again in each replay.
        self.chosen = tables[0].clone()
        for layer, router in enumerate(routers):
            router.register_forward_hook(self._choice_of(layer))

    def advance(self) -> None:
        """Selects the table for the next step."""
        self.turn = (self.turn + 1) % len(self.tables)
        self.chosen.copy_(self.tables[self.turn])

    def _choice_of(self, layer: int) -> Callable[..., Routing]:
        return lambda module, args, output: Routing(output.weights, self.chosen[layer], output.num_experts)
