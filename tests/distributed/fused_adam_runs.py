"""Runs DistributedFusedAdam and torch's Adam on gradients whose sums are exact in any order. Holds no tests."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import cycle, product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.optimizer import DistributedFusedAdam
from tests.counts import long_count

# The first step creates the states; every later step reads them.
STEPS = long_count(4, soak=20)
MIB = 1 << 20
Shapes = Sequence[tuple[int, ...]]
# Returns whether a rank uses a weight in a microbatch: (weight index, step, rank, microbatch).
Used = Callable[[int, int, int, int], bool]
# Eleven layers of width 7; and sizes around the alignment of 64 elements, with a scalar and an empty parameter.
LAYERS: Shapes = [(7, 7), (7,)] * 11
ODD: Shapes = [(1,), (63,), (), (64,), (2, 0), (65,), (129,), (3, 5, 7)]
HYPER: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
NONE, LAZY, GREEDY = "no", "lazy", "greedy"


class Product(nn.Module):
    """A weight whose gradient equals the factor that it is multiplied by, in fp64."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, factor: Tensor) -> Tensor:
        return (self.weight.double() * factor).sum()


class Sums(nn.Module):
    """A sum of products, which leaves a weight unused if its factor is None."""

    def __init__(self, shapes: Shapes = LAYERS, dtypes: Sequence[torch.dtype] = (torch.float32,)) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(3)
        weights = [torch.randn(s, generator=made).to(dtype) for s, dtype in zip(shapes, cycle(dtypes))]
        self.products = nn.ModuleList(map(Product, weights))

    def forward(self, factors: Sequence[Tensor | None]) -> Tensor:
        terms = [one(factor) for one, factor in zip(self.products, factors) if factor is not None]
        return torch.stack(terms).sum()


@cache
def factors(shapes: tuple[tuple[int, ...], ...], step: int, rank: int, microbatch: int) -> list[Tensor]:
    """Returns random integers from -3 to 3, in fp64, one tensor for each shape.

    Multiplied by the number of ranks, they serve as gradients. Their sum and mean over up to five ranks and three
    microbatches have few enough digits to be exact in every dtype, whatever the order of additions and divisions.
    """
    made = torch.Generator().manual_seed(1000 * step + 10 * rank + microbatch)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    drawn = torch.randint(-3, 4, (sum(sizes),), generator=made).double().split(sizes)
    return [flat.view(shape) for flat, shape in zip(drawn, shapes)]


def used_factors(
    shapes: Shapes, step: int, rank: int, *, microbatch: int = 0, used: Used | None = None
) -> list[Tensor | None]:
    """Returns the factors of the weights that are used, and None for the others."""
    every = enumerate(factors(tuple(shapes), step, rank, microbatch))
    return [factor if used is None or used(number, step, rank, microbatch) else None for number, factor in every]


def mean_gradients(
    shapes: Shapes, step: int, *, world: int, microbatches: int = 1, used: Used | None = None
) -> list[Tensor]:
    """Returns the expected gradients, summed over microbatches and averaged over `world` ranks, in fp64.

    Each rank's gradient is `world` times its factor.
    """
    sums = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    for rank, number in product(range(world), range(microbatches)):
        for total, factor in zip(sums, used_factors(shapes, step, rank, microbatch=number, used=used)):
            if factor is not None:
                total.add_(factor)
    return sums


class Reference:
    """Runs torch's fused Adam on master copies of the parameters; `values` stores the resulting parameters.

    groups: parameter groups in the form of torch.optim.Optimizer; None puts all parameters into one.

    dtype: in which masters and moments are stored, except that fp64 parameters use fp64; 16-bit states are computed in
    fp32. out: dtype to which masters are rounded before they are copied to the parameters. masters: "copy"; "none",
    where the parameters are their own masters; or "remainders", where a parameter is the upper half of its master,
    rounded as in stored_floats.WithRemainder.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        *,
        groups: Sequence[dict[str, Any]] | None = None,
        dtype: torch.dtype = torch.float32,
        out: torch.dtype | None = None,
        masters: str = "copy",
        adam_w_mode: bool = True,
        **settings: Any,
    ) -> None:
        self.out, self.kind = out, masters
        self.params = list(params)
        self.values = [param.detach().clone() for param in self.params]
        self.dtypes = [dtype if param.dtype != torch.float64 else param.dtype for param in self.params]
        wide = [torch.promote_types(one, torch.float32) for one in self.dtypes]
        kept = [param.to(one) for param, one in zip(self.params, self.dtypes)]
        self.masters = [nn.Parameter(param.detach().to(computes, copy=True)) for param, computes in zip(kept, wide)]
        first, *others = [{"params": self.params}] if groups is None else groups
        kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
        self.optimizer: torch.optim.Optimizer = kind([self._of_masters(first)], fused=True, **settings)
        for group in others:
            self.add_param_group(group)

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Adds a parameter group; parameters without a group are not stepped."""
        self.optimizer.add_param_group(self._of_masters(group))

    def _of_masters(self, group: dict[str, Any]) -> dict[str, Any]:
        master_of = {id(param): master for param, master in zip(self.params, self.masters)}
        return {**group, "params": [master_of[id(param)] for param in group["params"]]}

    def set_grads(self, grads: Sequence[Tensor | None], *, scale: float = 1.0) -> None:
        """Sets the gradients of the masters to `grads` times `scale`.

        grads: in the parameters' shapes, any dtype; None stands for zeros.
        """
        for master, value, grad in zip(self.masters, self.values, grads, strict=True):
            master.grad = (torch.zeros_like(value) if grad is None else grad * scale).to(master)

    def step(self, grads: Sequence[Tensor | None]) -> None:
        """Steps with these gradients and updates the parameters."""
        self.set_grads(grads)
        self.optimizer.step()
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Rounds masters and moments to their storage dtype and copies the masters to the parameters."""
        for master, value, dtype in zip(self.masters, self.values, self.dtypes):
            if master not in self.optimizer.state:
                continue
            state = self.optimizer.state[master]
            for kept in (master, state["exp_avg"], state["exp_avg_sq"]):
                kept.copy_(kept.to(dtype))
            seen = master if self.out is None else master.to(self.out)
            if self.kind == "remainders":
                seen = ((master.view(torch.int32) + 0x8000) & ~0xFFFF).view(torch.float32)
            value.copy_(seen)
            if self.kind == "none":
                master.copy_(value)

    def loss(self, chosen: Sequence[Tensor | None]) -> Tensor:
        """Returns the loss that Sums computes for these factors."""
        used = [(value, factor) for value, factor in zip(self.values, chosen) if factor is not None]
        return torch.stack([(value.double() * factor).sum() for value, factor in used]).sum()


@dataclass(frozen=True)
class Case:
    """Settings of a run to compare.

    waits: how microbatches before the last defer their reduction. grid: sizes of the sharding group and of the replica
    group. out, masters: see Reference.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    shapes: Shapes = tuple(LAYERS)
    microbatches: int = 1
    waits: str = NONE
    grid: tuple[int, int] | None = None
    out: torch.dtype | None = None
    masters: str = "copy"

    def reference(self, params: Iterable[Tensor], *, groups: Sequence[dict[str, Any]] | None = None) -> Reference:
        """Builds torch's Adam with the hyperparameters of this case."""
        names = ("adam_w_mode", "betas", "eps", "lr", "weight_decay", "dtype")
        given = {name: value for name, value in {**HYPER, **self.settings}.items() if name in names}
        return Reference(params, groups=groups, out=self.out, masters=self.masters, **given)


def usually(some: Iterable[Any], *, soak: Iterable[Any]) -> list[Any]:
    """Returns the cases of an ordinary run, or all of them under `make soak`."""
    return list(soak if long_count(0, soak=1) else some)


def alternating(cases: Iterable[Any]) -> list[Any]:
    """Returns half of a product whose last two options have two values each, covering all pairs of options."""
    every = list(cases)
    return usually([case for number, case in enumerate(every) if number % 8 in (0, 3, 5, 6)], soak=every)


def cap(num_bytes: int) -> float:
    """Converts a bucket size in bytes to bucket_cap_mb."""
    return num_bytes / MIB


def world() -> tuple[int, int]:
    """Returns the rank and the number of ranks, (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def grid_groups(sizes: tuple[int, int]) -> dict[str, Any]:
    """Creates the process groups of a grid over all ranks; neighbouring ranks share the shards. Collective."""
    shards, copies = sizes
    ranks = torch.arange(shards * copies).view(copies, shards)
    assert ranks.numel() == dist.get_world_size()
    distributed, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
    redundant, _ = dist.new_subgroups_by_enumeration(ranks.t().tolist())
    return {
        "process_group": dist.group.WORLD,
        "distributed_process_group": distributed,
        "redundant_process_group": redundant,
    }


class Run:
    """A model of products with its DistributedFusedAdam, and the reference.

    groups: builds the parameter groups from all parameters; None puts all parameters into one.
    """

    def __init__(self, case: Case, groups: Callable[[list[nn.Parameter]], list[dict[str, Any]]] | None = None) -> None:
        _, size = world()
        adds_up = case.waits == GREEDY or not case.settings.get("overlap_grad_sync", True)
        if adds_up and case.microbatches > 1 and size & (size - 1):
            # Averaging divides by 3 or 5 before accumulation, so the sums would be rounded.
            case = replace(case, settings={**case.settings, "average_grad_sync": False})
        self.case = case
        self.model = Sums(case.shapes, case.dtypes)
        params = list(self.model.parameters())
        made = None if groups is None else groups(params)
        self.reference = case.reference(params, groups=made)
        grid = {} if case.grid is None else grid_groups(case.grid)
        self.optimizer = DistributedFusedAdam(made or params, **{**HYPER, **case.settings, **grid})

    def backward(self, step: int, *, used: Used | None = None) -> Tensor:
        """Runs all microbatches, asserts that each loss equals the reference's, and returns the last loss."""
        rank, size = world()
        last = self.case.microbatches - 1
        for number in range(self.case.microbatches):
            chosen = used_factors(self.case.shapes, step, rank, microbatch=number, used=used)
            own = [None if factor is None else factor * size for factor in chosen]
            is_kept = self.case.waits != NONE and number < last
            kept = self.optimizer.no_sync(greedy_grad_copy=self.case.waits == GREEDY) if is_kept else nullcontext()
            with kept:
                loss = self.model(own)
                loss.backward()
            assert torch.equal(loss, self.reference.loss(own)), f"loss of step {step}, {self.case}"
        return loss

    def grads(self, step: int, *, used: Used | None = None) -> list[Tensor]:
        """Returns the reduced gradients of all ranks' microbatches, in fp64."""
        _, size = world()
        grads = mean_gradients(self.case.shapes, step, world=size, microbatches=self.case.microbatches, used=used)
        factor = 1 if self.case.settings.get("average_grad_sync", True) else size
        return [grad * factor for grad in grads]

    def step(self, step: int, *, used: Used | None = None) -> None:
        """Runs one training step of the model and one of the reference."""
        self.optimizer.zero_grad()
        self.backward(step, used=used)
        self.optimizer.step()
        self.reference.step(self.grads(step, used=used))

    def check(self, step: int) -> None:
        """Asserts that the parameters are bitwise equal to the reference's."""
        params = list(self.model.parameters())
        self.optimizer.wait_params(params)
        for number, (param, value) in enumerate(zip(params, self.reference.values, strict=True)):
            assert torch.equal(param, value), f"parameter {number} after step {step}, {self.case}"


def run_cases(cases: Sequence[Case], steps: int = STEPS) -> None:
    """Compares each case with its reference: losses in each step, parameters in some steps and at the end."""
    for case in cases:
        run = Run(case)
        moved = [value.clone() for value in run.reference.values]
        for step in range(steps):
            run.step(step)
            if step in (0, steps // 2, steps - 1):
                run.check(step)
        for before, after in zip(moved, run.reference.values):
            assert before.numel() == 0 or not torch.equal(before, after), case


def assert_same_on_all_ranks(tensors: Iterable[Tensor]) -> None:
    """Asserts that each tensor is bitwise equal to rank 0's."""
    for tensor in tensors:
        first = tensor.detach().clone()
        dist.broadcast(first, src=0)
        assert torch.equal(first, tensor)


def plain_and_ours(make: Callable[[], nn.Module], **settings: Any) -> tuple[nn.Module, nn.Module, DistributedFusedAdam]:
    """Builds two models with equal weights; the second is trained by our optimizer."""
    torch.manual_seed(5)
    plain = make()
    torch.manual_seed(5)
    ours = make()
    return plain, ours, DistributedFusedAdam(ours.parameters(), **{**HYPER, **settings})
