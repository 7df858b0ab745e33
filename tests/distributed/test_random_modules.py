"""Random modules in every mode of data parallelism train bit-identically to torch's AdamW on one whole copy.

Gradients are rounded to integers (random_modules.py), so that every sum and mean over micro-batches and ranks is exact,
and the factor of clipping is one half: no tolerance is needed. RANDOM_MODULE=SEED runs one module alone.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
    TorchFullyShardedDataParallelConfig,
)
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import (
    DistributedFusedAdam,
    OptimizerConfig,
    ParamGroupOverride,
    ParamKey,
    ParamPredicate,
    ParamWithNamePredicate,
    get_megatron_optimizer,
)
from tests.counts import long_count
from tests.distributed.fused_adam_runs import Reference
from tests.distributed.random_modules import Draw, Net, draw
from tests.distributed.wrapper_modes import IN_BACKWARD, RELEASED, Modes, wrapper_modes
from tests.harness import run_on_ranks

STEPS = 3
# With betas that have few mantissa digits, the moments of integers are exact too. Otherwise they would differ in the
# last digit at the ends of tensors, where torch's kernel processes elements one by one ([Note: ends of parameters]).
RATE, DECAY, BETAS = 0.01, 0.1, (0.5, 0.75)
DETERMINISTIC = ModelParallelConfig(deterministic_mode=True)
WRAPPERS = wrapper_modes(bucket_size=40)
FSDP2: Modes = {
    "fsdp2": ({}, {}),
    "fsdp2, kept": ({"reshard_after_forward": False}, {}),
    "fsdp2 in backward": (RELEASED, IN_BACKWARD),
}
FUSED_ADAM: dict[str, dict[str, Any]] = {
    "fused adam": {},
    "fused adam, small buckets": {"bucket_cap_mb": 256 / 2**20},
    "fused adam, overlapped": {"overlap_param_sync": True, "bucket_cap_mb": 256 / 2**20},
    "fused adam, late": {"overlap_grad_sync": False, "contiguous_param_buffer": False},
}
MODES = [*WRAPPERS, *FSDP2, *FUSED_ADAM]
# In these modes, parameters are gathered late, so surrounding modules may not read them.
GATHERS_LATE = ("zero1, overlapped", "zero2, overlapped", "zero1 in backward", "fused adam, overlapped")
# Beginnings of the errors that report a documented limit of a mode.
REFUSALS = ("parameter ", "TorchFullyShardedDataParallel")
MODULES = long_count(15, soak=300)
CHUNK = 5
# By default, each module is trained in every third mode, starting at a different mode for each group of seeds.
EVERY = long_count(3, soak=1)


class Refused(Exception):
    """Raised for a module that a mode rejects with a documented error."""


def is_apart(name: str) -> bool:
    """Returns whether a parameter is in the group with a different learning rate and weight decay."""
    return "bias" in name or "factors" in name


def groups_of(one: Draw, net: nn.Module) -> list[dict[str, Any]]:
    """Returns the groups of trained parameters for torch.optim."""
    trained = [(name, param) for name, param in net.named_parameters() if param.requires_grad]
    groups: list[dict[str, Any]] = []
    for apart in (False, True):
        params = [param for name, param in trained if (one.apart and is_apart(name)) == apart]
        if params:
            factors = (2.0, 0.5) if apart else (1.0, 1.0)
            groups.append({"params": params, "lr": RATE * factors[0], "weight_decay": DECAY * factors[1]})
    return groups


@dataclass
class Trace:
    """Results of a step: losses of this rank's micro-batches, gradient norm before clipping, and parameter values."""

    losses: list[Tensor]
    norm: float
    values: list[Tensor]


class Expected:
    """Trains one whole copy by torch.optim.AdamW, with the gradient averaged over all ranks."""

    def __init__(self, one: Draw, *, inside: bool, strides: Sequence[tuple[int, ...]]) -> None:
        self.one, self.net = one, deepcopy(one.net)
        # The choice of convolution kernels depends on the memory layout of their weights.
        for param, stride in zip(self.net.parameters(), strides, strict=True):
            value = torch.empty_strided(param.shape, stride, dtype=param.dtype)
            param.data = value.copy_(param.detach())
        one.add_hooks(self.net, factor=dist.get_world_size(), inside=inside)
        self.params = [param for param in self.net.parameters() if param.requires_grad]
        self.reference = Reference(self.params, groups=groups_of(one, self.net), betas=BETAS)
        self.steps = [self._stepped(step) for step in range(STEPS)]

    def _stepped(self, step: int) -> Trace:
        world, rank = dist.get_world_size(), dist.get_rank()
        # With the parameters' memory layout, which torch's fused AdamW on the CPU requires of gradients.
        sums = [torch.zeros_like(param, dtype=torch.float64) for param in self.params]
        losses = []
        for microbatch in range(self.one.microbatches):
            for other in range(world):
                loss = self.one.loss(self.net, step, microbatch, other)
                loss.backward()
                losses += [loss.detach()] if other == rank else []
                for total, param in zip(sums, self.params):
                    total += 0 if param.grad is None else param.grad
                    param.grad = None
        means = [total / world for total in sums]
        squares = torch.stack([mean.square().sum() for mean in means]).sum()
        norm = squares.sqrt().float().item()
        self.reference.step([mean * 0.5 for mean in means] if self.one.clips else means)
        with torch.no_grad():
            for param, value in zip(self.params, self.reference.values):
                param.copy_(value)
        return Trace(losses, norm, [param.detach().clone() for param in self.net.parameters()])


def max_norm(norm: float) -> float:
    """Returns the max_norm for which clipping halves gradients of norm `norm` exactly, given clipping's epsilon."""
    return 0.5 * (norm + 1e-6)


def takes_sums(one: Draw, mode: str) -> bool:
    """Returns whether DistributedFusedAdam must sum gradients, because a mean over three ranks may be inexact."""
    return mode in FUSED_ADAM and dist.get_world_size() == 3 and one.adds_up()


class Wrapped:
    """Trains the module in a wrapper, with an optimizer of get_megatron_optimizer."""

    def __init__(self, one: Draw, net: Net, mode: str) -> None:
        self.one = one
        settings, optimizing = (WRAPPERS | FSDP2)[mode]
        settings = {**settings, "grad_reduce_in_fp32": one.grad_reduce_in_fp32}
        self.is_sharded = mode in FSDP2
        # A third of a gradient is not an integer and would be rounded when added up, so the collective divides the
        # sums.
        if not self.is_sharded and dist.get_world_size() == 3 and one.adds_up():
            settings["average_in_collective"] = True
        self.calls = 0
        self.counted = [] if self.is_sharded else [p for n, p in net.named_parameters() if n in one.counted]
        for param in self.counted:
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self._count)
        self.wrapped: Any
        if self.is_sharded:
            config = TorchFullyShardedDataParallelConfig(**settings)
            self.wrapped = TorchFullyShardedDataParallel(DETERMINISTIC, config, net)
        else:
            self.wrapped = DistributedDataParallel(DETERMINISTIC, DistributedDataParallelConfig(**settings), net)
        self.each_is_sent = one.sends_each and "in backward" not in mode and not self.is_sharded
        self.earlier = self.wrapped.no_sync if mode in ("ddp", "fsdp2, kept") else self.wrapped.accumulate
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                lr=RATE,
                weight_decay=DECAY,
                adam_beta1=BETAS[0],
                adam_beta2=BETAS[1],
                clip_grad=1.0 if one.clips else 0.0,
                deterministic_mode=True,
                bf16=any(param.dtype == torch.bfloat16 for param in one.net.parameters()),
                **optimizing,
            ),
            [self.wrapped],
            self._overrides(net),
        )

    def _overrides(self, net: Net) -> dict[ParamKey, ParamGroupOverride]:
        found = {ParamKey(predicate=ParamPredicate("all", lambda param: True)): ParamGroupOverride(wd_mult=1.0)}
        trained = [name for name, param in net.named_parameters() if param.requires_grad]
        if self.one.apart and any(is_apart(name) for name in trained):
            key = ParamKey(with_name_predicate=ParamWithNamePredicate("apart", lambda param, name: is_apart(name)))
            found[key] = ParamGroupOverride(lr_mult=2.0, wd_mult=0.5)
        return found

    def _count(self, param: nn.Parameter) -> None:
        self.calls += 1

    def earlier_microbatch(self) -> AbstractContextManager[None]:
        return nullcontext() if self.each_is_sent else self.earlier()

    def step(self, expected: Trace) -> float:
        self.wrapped.finish_grad_sync()
        if self.one.clips:
            self.optimizer.config.clip_grad = max_norm(expected.norm) or 1.0
        _, norm, _ = self.optimizer.step()
        assert norm is not None
        return norm

    def values(self) -> list[Tensor]:
        params = list(self.wrapped.module.parameters())
        if not self.is_sharded:
            self.wrapped.wait_params(params)
        whole = [param.full_tensor() if isinstance(param, DTensor) else param for param in params]
        return [value.detach().to(param.dtype) for value, param in zip(whole, self.one.net.parameters(), strict=True)]

    def check_hooks(self, steps: int) -> None:
        trained = sum(param.requires_grad for param in self.counted)
        assert self.calls == steps * trained, f"{self.calls} calls of {trained} hooks in {steps} steps"


class Fused:
    """Trains the module itself, with DistributedFusedAdam."""

    def __init__(self, one: Draw, net: Net, mode: str) -> None:
        self.one, self.wrapped = one, net
        settings = {**FUSED_ADAM[mode], "average_grad_sync": not takes_sums(one, mode)}
        self.optimizer = DistributedFusedAdam(groups_of(one, net), betas=BETAS, **settings)

    def earlier_microbatch(self) -> AbstractContextManager[None]:
        return nullcontext() if self.one.sends_each else self.optimizer.no_sync()

    def step(self, expected: Trace) -> float:
        norm = self.optimizer.grad_norm().item()
        if self.one.clips:
            self.optimizer.clip_grad_norm(max_norm(norm))
        self.optimizer.step()
        # The norms of buckets are rounded to fp32 before they are summed.
        return expected.norm if abs(norm - expected.norm) <= 5e-7 * expected.norm else norm

    def values(self) -> list[Tensor]:
        params = list(self.wrapped.parameters())
        self.optimizer.wait_params([param for param in params if param.requires_grad])
        return [param.detach() for param in params]

    def check_hooks(self, steps: int) -> None:
        """Does nothing, since this mode registers no hooks."""


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Comparison:
    """Compares a module in all modes with one or two references, which modes share."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.references: dict[Any, Expected] = {}

    def expected(self, one: Draw, *, inside: bool, net: Net, mode: str) -> Expected:
        """Returns the reference whose weights have the same memory layout as the wrapped net's."""
        before = list(one.net.parameters())
        strides = [p.stride() for p in (before if mode in FSDP2 else net.parameters())]
        key = (inside, mode in FSDP2, tuple(one.optional), tuple(strides))
        if key not in self.references:
            self.references[key] = Expected(one, inside=inside, strides=strides)
        return self.references[key]

    def differences(self, mode: str) -> str | None:
        """Trains the module in a mode and returns the first difference. Raises Refused if the mode rejects it."""
        one = draw(self.seed)
        inside = mode in FSDP2 or (one.rounds_inside and mode not in GATHERS_LATE)
        if mode in FSDP2:
            one.spare_units()
        if mode.endswith("in backward"):
            one.settle_counts()
        with default_dtype(one.default_dtype):
            net = deepcopy(one.net)
            one.add_hooks(net, factor=1 if takes_sums(one, mode) else dist.get_world_size(), inside=inside)
            try:
                run: Wrapped | Fused = (Fused if mode in FUSED_ADAM else Wrapped)(one, net, mode)
            except ValueError as error:
                if not str(error).startswith(REFUSALS):
                    raise
                raise Refused(str(error)) from error
            expected = self.expected(one, inside=inside, net=net, mode=mode)
            for step, trace in enumerate(expected.steps):
                if (found := self._step(one, run, step, trace)) is not None:
                    return f"{found} of step {step}"
            run.check_hooks(STEPS)
        return None

    def _step(self, one: Draw, run: Wrapped | Fused, step: int, trace: Trace) -> str | None:
        run.optimizer.zero_grad()
        losses = []
        for microbatch in range(one.microbatches):
            is_last = microbatch == one.microbatches - 1
            with nullcontext() if is_last else run.earlier_microbatch():
                loss = one.loss(run.wrapped, step, microbatch, dist.get_rank())
                loss.backward()
            losses.append(loss.detach())
        norm = run.step(trace)
        names = [name for name, _ in one.net.named_parameters()]
        pairs = [*zip(names, run.values(), trace.values, strict=True)]
        pairs += [(f"loss {number}", *both) for number, both in enumerate(zip(losses, trace.losses, strict=True))]
        for name, found, wanted in pairs:
            if not torch.equal(found, wanted):
                return f"{name}: {(found.double() - wanted.double()).abs().max().item():.3g} apart after"
        return None if norm == trace.norm else f"norm: {norm!r}, not {trace.norm!r},"


def modes_of(seed: int) -> list[str]:
    """Returns the modes in which a module is trained; all of them if RANDOM_MODULE selects it."""
    every = 1 if "RANDOM_MODULE" in os.environ else EVERY
    return MODES[seed // 3 % every :: every]


def compare(seeds: Sequence[int]) -> tuple[list[str], list[str]]:
    """Trains the modules of these seeds in their modes. Returns mismatches and rejections."""
    mismatches, refused = [], []
    for seed in seeds:
        comparison = Comparison(seed)
        for mode in modes_of(seed):
            try:
                found = comparison.differences(mode)
            except Refused as error:
                refused.append(f"{seed} {mode}: {error}")
                continue
            except Exception as error:
                error.add_note(f"RANDOM_MODULE={seed} alone, in mode {mode}: {draw(seed)}")
                raise
            found_anywhere: list[str | None] = [None] * dist.get_world_size()
            dist.all_gather_object(found_anywhere, found)
            mismatches += [
                f"RANDOM_MODULE={seed}, {mode}, rank {rank} of {len(found_anywhere)}: {text}; {draw(seed)}"
                for rank, text in enumerate(found_anywhere)
                if text is not None
            ]
    return mismatches, refused


def _chosen() -> list[list[int]]:
    """Returns groups of seeds with the same number of ranks, each group to be trained by the same processes."""
    if "RANDOM_MODULE" in os.environ:
        return [[int(os.environ["RANDOM_MODULE"])]]
    by_ranks = [[seed for seed in range(MODULES) if seed % 3 == rest] for rest in range(3)]
    return [seeds[at : at + CHUNK] for seeds in by_ranks for at in range(0, len(seeds), CHUNK)]


@pytest.mark.parametrize("seeds", _chosen(), ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_random_modules_train_as_under_adamw(seeds: list[int]) -> None:
    found = run_on_ranks(compare, seeds[0] % 3 + 1, seeds, timeout=500)
    mismatches, refused = found[0]
    print(*refused, sep="\n")
    assert not mismatches, "\n".join(mismatches)
    assert len(refused) * 2 < sum(len(modes_of(seed)) for seed in seeds), refused
