"""One rank of several on one device, whose others are stand-ins, and a routing that is forced. Measures nothing.

[Note: stand-ins] Buffers of a fixed size are larger than the rows that come only where experts are spread over ranks,
and NCCL wants a GPU for each rank. So the process group has many members of which one exists. The others have its
tokens and its choices, and from their experts comes what comes from its own: a gather repeats this rank's rows, a
reduce-scatter sums this rank's parts. Moving rows costs a pass over the same bytes in the device's memory instead of
the network's time; an all-reduce costs nothing. Losses mean nothing. All sides of a benchmark have the same stand-ins.
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

TABLES = 8  # routings that steps take in turn


def join_stand_ins(ranks: int) -> None:
    """Makes this process rank 0 of so many, of which it is the only one; for good."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(ranks))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    # torch's own stand-ins leave results of some collectives unwritten before 2.13, and gather in many copies.
    group_collectives.all_gather_single = _gather  # type: ignore[assignment]
    group_collectives.reduce_scatter_single = _reduce_scatter  # type: ignore[assignment]
    dist.all_to_all_single = _exchange  # type: ignore[assignment]


def _gather(result: Tensor, x: Tensor, *, group: dist.ProcessGroup, async_op: bool) -> None:
    """x: [N, *] -> result: [ranks * N, *], any dtype."""
    result.view(dist.get_world_size(group), *x.shape).copy_(x)


def _reduce_scatter(result: Tensor, x: Tensor, *, group: dist.ProcessGroup, async_op: bool) -> None:
    """x: [ranks * N, *] -> result: [N, *], any dtype that can be summed."""
    torch.sum(x.view(dist.get_world_size(group), *result.shape), dim=0, out=result)


def _exchange(
    output: Tensor, x: Tensor, *sizes: list[int], group: dist.ProcessGroup | None = None, async_op: bool = False
) -> dist.Work | None:
    """x, output: [ranks * N, *], any dtype, equal parts: rank 0's for each; or of any sizes, both alike: the same."""
    ranks = 1 if sizes else dist.get_world_size(group)
    output.view(ranks, -1).copy_(x.view(ranks, -1)[:1])
    # An all-reduce of nothing: it is over, and has what callers wait for.
    return dist.all_reduce(output[:0], group=group, async_op=async_op)


@dataclass(frozen=True)
class Choices:
    """The choices of tokens. num_own: experts of this rank, the first ones of num_experts, spread over as many each."""

    num_tokens: int
    topk: int
    num_experts: int
    num_own: int
    # Of how much more often than the next one an expert of this rank is chosen: a power of its place.
    unevenness: float = 0.0

    def draw(self, share: float, generator: torch.Generator) -> Tensor:
        """Random choices that bring this rank's experts `share` of the balanced number of rows: [T, K], int64."""
        num_rows = round(share * self.num_tokens * self.topk * self.num_own / self.num_experts)
        size = self.num_tokens, self.num_own
        weights = torch.arange(1, self.num_own + 1) ** -self.unevenness
        # The largest of noise plus logarithms are a draw without repetition, by weight.
        keys = weights.log() - torch.rand(size, generator=generator).log().neg().log()
        chosen = torch.zeros(size, dtype=torch.bool)
        chosen.view(-1)[keys.view(-1).topk(num_rows).indices] = True
        noise = torch.rand(self.num_tokens, self.num_experts, generator=generator)
        noise[:, : self.num_own] = torch.where(chosen, 2.0, -1.0)
        return noise.topk(self.topk).indices


def shares_of_layers(
    layers: int, *, mean: float, spread: float, most: float, generator: torch.Generator
) -> list[float]:
    """Rows of each layer over the balanced number: log-normal with this mean over the layers, none above `most`."""
    draws = (torch.randn(layers, generator=generator) * spread).exp()
    shares: list[float] = (draws * mean / draws.mean()).clamp(max=most).tolist()
    return shares


class ForcedRouting:
    """Replaces what routers choose by tables, another one in each step; weights stay, with their gradients."""

    def __init__(self, routers: Sequence[nn.Module], tables: Tensor) -> None:
        """tables: [turns, layers, T, K], int64, on the device."""
        self.tables, self.turn = tables, 0
        # In one place for good: a CUDA graph reads it anew in each replay.
        self.chosen = tables[0].clone()
        for layer, router in enumerate(routers):
            router.register_forward_hook(self._choice_of(layer))

    def advance(self) -> None:
        """The next table, for the next step."""
        self.turn = (self.turn + 1) % len(self.tables)
        self.chosen.copy_(self.tables[self.turn])

    def _choice_of(self, layer: int) -> Callable[..., Routing]:
        return lambda module, args, output: Routing(output.weights, self.chosen[layer], output.num_experts)
