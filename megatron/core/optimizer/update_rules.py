"""Update rules: torch's optimizers over the flat storage of runs. Each steps some runs and owns their state.

Norm, clipping, loss scale and masters are optimizer.py's; which parameters get which rule is decided in __init__.py.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megatron.core.distributed.layout import Span
from megatron.core.optimizer.host_copies import Chunk, HostCopies
from megatron.core.optimizer.optimizer_config import DTYPES, OptimizerConfig
from megatron.core.optimizer.param_groups import GroupKey
from megatron.core.optimizer.param_runs import ParamRun
from megatron.core.optimizer.stored_floats import Plain, StoredFloats, piece_elements, zeros_beside


@dataclass(frozen=True)
class GradScale:
    """The divisor of a step's gradients, and whether the step changes anything.

    divisor: a number, or [], fp32, on the gradients' device. skip: [], fp32, there too, where the device decides: 1 if
    nothing is to change, else 0.
    """

    divisor: float | torch.Tensor
    skip: torch.Tensor | None = None

    def on(self, device: torch.device) -> torch.Tensor | None:
        """Returns the divisor for kernels, as for torch.amp.GradScaler: [], fp32; None for 1."""
        if isinstance(self.divisor, torch.Tensor):
            return self.divisor
        # Filled on the device: a copy from the host would wait for all that the stream has yet to do.
        return None if self.divisor == 1.0 else torch.full((), self.divisor, dtype=torch.float32, device=device)


class UpdateRule(Protocol):
    """The optimizer's interface to a rule. is_collective: ranks communicate in `update`, for all runs in one call."""

    is_collective: bool
    optimizer: torch.optim.Optimizer
    runs: list[ParamRun]

    def refresh_rates(self) -> None:
        """Copies the groups' current learning rates for the updates that follow, including updates in graphs."""
        ...

    def update(self, scale: GradScale, runs: Set[ParamRun]) -> None:
        """Steps those of the rule's runs that are in `runs` by their scaled gradients, and writes their parameters;
        each once a step.
        """
        ...

    def flat_state(self, run: ParamRun) -> dict[str, StoredFloats]:
        """Returns the state of a run by torch's names, N numbers each."""
        ...

    def settings_in(self, run: ParamRun) -> list[tuple[Span, Mapping[str, Any]]]:
        """Returns the current group settings of each part of a run; the parts are in order, on the grid."""
        ...

    def step_counts(self) -> list[torch.Tensor]:
        """Returns the counters of steps taken, to read and to set: [], fp32 each."""
        ...


class FusedRule:
    """AdamW or SGD: one kernel steps whole runs, and divides their gradients while it reads them.

    Runs of which something is not kept as the kernel computes go through it in pieces, and are converted on the way.
    """

    is_collective = False

    def __init__(self, config: OptimizerConfig, runs: Sequence[ParamRun], *, groups: Sequence[GroupKey]) -> None:
        self.runs = list(runs)
        self._members = [[run for run in runs if run.group == key] for key in groups]
        self._group_of = _numbers_of(self._members)
        torch_groups = [
            {"params": [run.stepped for run in members], **key.values(config)}
            for key, members in zip(groups, self._members)
        ]
        assert config.lr is not None
        if config.optimizer == "sgd":
            # Its decay is added to the gradient, as in Megatron; only Adam decays apart from it.
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
                torch_groups, lr=config.lr, momentum=config.sgd_momentum, fused=True
            )
        else:
            betas = (config.adam_beta1, config.adam_beta2)
            self.optimizer = torch.optim.AdamW(torch_groups, lr=config.lr, betas=betas, eps=config.adam_eps, fused=True)
        self._kernel = _sgd_kernel if config.optimizer == "sgd" else _adamw_kernel
        dtypes = _moment_dtypes(config)
        self._states = {
            run: {name: zeros_beside(run.main, dtype) for name, dtype in dtypes.items()} for run in self.runs
        }
        self._steps = {run: torch.zeros((), dtype=torch.float32, device=_place(run)) for run in self.runs}
        self._rates = [_rates_of(members) for members in self._members]
        self.refresh_rates()
        on_host = [run for run in self.runs if _place(run).type == "cpu"]
        self._copies = HostCopies(on_host if config.overlap_cpu_optimizer_d2h_h2d else [])

    @torch.no_grad()
    def refresh_rates(self) -> None:
        # Groups have plain numbers, since a schedule calculates with them; graphs read the same memory in each replay.
        for group, rates in zip(self.optimizer.param_groups, self._rates):
            for rate in rates.values():
                rate.fill_(group["lr"])

    @torch.no_grad()
    def update(self, scale: GradScale, runs: Set[ParamRun]) -> None:
        """Steps those of its runs in `runs`. Scaled fp16 state and state on the host do not support scale.skip."""
        for settings, every in zip(self._settings(), self._members):
            members = [run for run in every if run in runs and run not in self._copies.runs]
            self._update_members(members, settings, scale=scale)
        # Last: what is updated on a GPU runs while the host is busy.
        self._update_overlapped([run for run in self.runs if run in runs and run in self._copies.runs], scale)

    def _settings(self) -> "list[_Settings]":
        return [_Settings(group, rates) for group, rates in zip(self.optimizer.param_groups, self._rates)]

    def _update_members(self, members: Sequence[ParamRun], settings: "_Settings", *, scale: GradScale) -> None:
        operands = {run: self._whole(run) for run in members}
        whole = [one for one in operands.values() if one is not None]
        if whole:
            self._kernel(whole, settings, scale=scale)
        for run, one in operands.items():
            if one is None:
                step, grad = piece_elements(run.main), run.grad
                for start in range(0, run.main.numel, step):
                    chunk = Chunk(run, start, min(start + step, run.main.numel))
                    self._update_chunk(chunk, grad[chunk.start : chunk.end], settings=settings, scale=scale)
                self._count(run, scale)
            run.write_model()

    def _update_overlapped(self, runs: Sequence[ParamRun], scale: GradScale) -> None:
        settings_of = {run: settings for settings, every in zip(self._settings(), self._members) for run in every}
        for chunk, grad in self._copies.chunks(runs):
            self._update_chunk(chunk, grad, settings=settings_of[chunk.run], scale=scale)
        for run in runs:
            self._count(run, scale)

    def _count(self, run: ParamRun, scale: GradScale) -> None:
        self._steps[run].add_(1)
        if scale.skip is not None:
            self._steps[run].sub_(scale.skip)

    def _whole(self, run: ParamRun) -> "_Operands | None":
        """All of a run as the kernel takes it, if it is kept so."""
        states = self._states[run]
        if not all(isinstance(stored, Plain) for stored in (run.main, *states.values())):
            return None
        main, moments = run.main.read(0, run.main.numel), {n: s.read(0, s.numel) for n, s in states.items()}
        grad = run.grad
        is_beside = (grad.dtype, grad.device) == (main.dtype, main.device)
        return _Operands(main, grad, moments, self._steps[run]) if is_beside else None

    def _update_chunk(self, chunk: Chunk, grad: torch.Tensor, *, settings: "_Settings", scale: GradScale) -> None:
        run, states = chunk.run, self._states[chunk.run]
        main = run.main.read(chunk.start, chunk.end)
        moments = {name: stored.read(chunk.start, chunk.end) for name, stored in states.items()}
        # The kernel counts: every piece is at the same step.
        piece = _Operands(main, grad.to(main), moments, self._steps[run].clone())
        self._kernel([piece], settings, scale=scale)
        run.main.write(chunk.start, main)
        for name, stored in states.items():
            stored.write(chunk.start, moments[name])

    def flat_state(self, run: ParamRun) -> dict[str, StoredFloats]:
        return self._states[run]

    def settings_in(self, run: ParamRun) -> list[tuple[Span, Mapping[str, Any]]]:
        """Returns the settings of the one group that the whole run is in."""
        return [(Span(0, run.span.numel), self.optimizer.param_groups[self._group_of[run]])]

    def step_counts(self) -> list[torch.Tensor]:
        """Returns the step counter of each run: [], fp32 each, to read and to set."""
        return list(self._steps.values())


@dataclass(frozen=True)
class _Operands:
    """A kernel's operands: main, grad and each of moments [n], one dtype, fp32 or fp64; step: [], fp32."""

    main: torch.Tensor
    grad: torch.Tensor
    moments: dict[str, torch.Tensor]
    step: torch.Tensor


@dataclass(frozen=True)
class _Settings:
    """A torch parameter group as kernels read it; rates: see _rates_of."""

    group: dict[str, Any]
    rates: dict[torch.device, torch.Tensor]


def _numbers_of(groups: Sequence[Sequence[ParamRun]]) -> dict[ParamRun, int]:
    return {run: number for number, members in enumerate(groups) for run in members}


def _moment_dtypes(config: OptimizerConfig) -> dict[str, torch.dtype]:
    """Returns the dtype of each moment, by torch's names."""
    if config.optimizer == "sgd":
        # A momentum of zeros gives the first step that torch takes without one.
        return {"momentum_buffer": torch.float32} if config.sgd_momentum > 0 else {}
    return {"exp_avg": DTYPES[config.exp_avg_dtype], "exp_avg_sq": DTYPES[config.exp_avg_sq_dtype]}


def _place(run: ParamRun) -> torch.device:
    """Returns the device on which a run is updated: that of its masters, which may be the host."""
    return run.main.read(0, 0).device


def _rates_of(runs: Sequence[ParamRun]) -> dict[torch.device, torch.Tensor]:
    """A learning rate, to be filled, wherever there are runs: [], as kernels read it, fp64 on the CPU, else fp32."""
    types = {place: torch.float64 if place.type == "cpu" else torch.float32 for place in map(_place, runs)}
    return {place: torch.zeros((), dtype=dtype, device=place) for place, dtype in types.items()}


# torch's own functions under torch.optim.Optimizer.step, which would always step everything, and only as it is kept.
def _adamw_kernel(operands: list[_Operands], settings: _Settings, *, scale: GradScale) -> None:
    group, device = settings.group, operands[0].main.device
    beta1, beta2 = group["betas"]
    adamw(
        [one.main for one in operands],
        [one.grad for one in operands],
        [one.moments["exp_avg"] for one in operands],
        [one.moments["exp_avg_sq"] for one in operands],
        [],
        [one.step for one in operands],
        fused=True,
        grad_scale=scale.on(device),
        found_inf=scale.skip,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=settings.rates[device],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def _sgd_kernel(operands: list[_Operands], settings: _Settings, *, scale: GradScale) -> None:
    group, device = settings.group, operands[0].main.device
    sgd(
        [one.main for one in operands],
        [one.grad for one in operands],
        [one.moments.get("momentum_buffer") for one in operands],
        fused=True,
        grad_scale=scale.on(device),
        found_inf=scale.skip,
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=settings.rates[device],  # type: ignore[arg-type]  # torch.optim.SGD gives it tensors, too
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )
