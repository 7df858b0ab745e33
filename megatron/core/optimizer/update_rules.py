"""Update rules: torch's optimizers over the flat storage of runs. Each steps some runs and owns their state.

Norm, clipping, loss scale and masters are optimizer.py's; which parameters get which rule is decided in __init__.py.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_groups import GroupKey
from megatron.core.optimizer.param_runs import ParamRun
from megatron.core.optimizer.precision_config import DTYPES
from megatron.core.optimizer.stored_floats import PIECE, Plain, StoredFloats, zeros_beside
from megatron.core.weight_matrices import MatrixWindow


class UpdateRule(Protocol):
    """What an optimizer needs of a rule."""

    optimizer: torch.optim.Optimizer
    runs: list[ParamRun]

    def update(self, divisor: float) -> None:
        """Steps the rule's runs by their gradients / divisor."""
        ...

    def flat_state(self, run: ParamRun) -> dict[str, StoredFloats]:
        """The state of a run by torch's names, N numbers each."""
        ...

    def step_counts(self) -> list[torch.Tensor]:
        """Where it counts the steps taken, to read and to set: [], fp32 each."""
        ...


class FusedRule:
    """AdamW or SGD: one kernel steps whole runs, and divides their gradients while it reads them.

    Runs of which something is not kept as the kernel computes go through it in pieces, and are converted on the way.
    """

    def __init__(self, config: OptimizerConfig, runs: Sequence[ParamRun], *, groups: Sequence[GroupKey]) -> None:
        self.runs = list(runs)
        self._members = [[run for run in runs if run.group == key] for key in groups]
        torch_groups = [
            {"params": [run.stepped for run in members], **key.values(config)}
            for key, members in zip(groups, self._members)
        ]
        assert config.lr is not None
        dtypes: dict[str, torch.dtype] = {}
        if config.optimizer == "sgd":
            # Its decay is added to the gradient, as in Megatron; only Adam decays apart from it.
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
                torch_groups, lr=config.lr, momentum=config.sgd_momentum, fused=True
            )
            # A momentum of zeros gives the first step that torch takes without one.
            if config.sgd_momentum > 0:
                dtypes = {"momentum_buffer": torch.float32}
        else:
            betas = (config.adam_beta1, config.adam_beta2)
            self.optimizer = torch.optim.AdamW(torch_groups, lr=config.lr, betas=betas, eps=config.adam_eps, fused=True)
            dtypes = {"exp_avg": DTYPES[config.exp_avg_dtype], "exp_avg_sq": DTYPES[config.exp_avg_sq_dtype]}
        self._kernel = _sgd_kernel if config.optimizer == "sgd" else _adamw_kernel
        self._states = {
            run: {name: zeros_beside(run.main, dtype) for name, dtype in dtypes.items()} for run in self.runs
        }
        self._steps = {run: torch.zeros((), dtype=torch.float32, device=run.grad.device) for run in self.runs}

    @torch.no_grad()
    def update(self, divisor: float) -> None:
        """See UpdateRule."""
        for group, members in zip(self.optimizer.param_groups, self._members):
            # The kernels divide by this tensor while they read the gradient, as for torch.amp.GradScaler.
            grad_scale = None if divisor == 1.0 or not members else torch.tensor(divisor, device=members[0].grad.device)
            whole = [operands for run in members if (operands := self._whole(run)) is not None]
            if whole:
                # Rates are plain numbers in the group, read at this moment.
                self._kernel(whole, group, grad_scale=grad_scale)
            for run in members:
                if self._whole(run) is None:
                    self._update_pieces(run, group, grad_scale=grad_scale)

    def _whole(self, run: ParamRun) -> "_Operands | None":
        """All of a run as the kernel takes it, if it is kept so."""
        states = self._states[run]
        if not all(isinstance(stored, Plain) for stored in (run.main, *states.values())):
            return None
        main, moments = run.main.read(0, run.main.numel), {n: s.read(0, s.numel) for n, s in states.items()}
        return _Operands(main, run.grad, moments, self._steps[run]) if run.grad.dtype == main.dtype else None

    def _update_pieces(self, run: ParamRun, group: dict[str, Any], *, grad_scale: torch.Tensor | None) -> None:
        states = self._states[run]
        for start in range(0, run.main.numel, PIECE):
            end = min(start + PIECE, run.main.numel)
            main = run.main.read(start, end)
            moments = {name: stored.read(start, end) for name, stored in states.items()}
            # The kernel counts: every piece is at the same step.
            piece = _Operands(main, run.grad[start:end].to(main.dtype), moments, self._steps[run].clone())
            self._kernel([piece], group, grad_scale=grad_scale)
            run.main.write(start, main)
            for name, stored in states.items():
                stored.write(start, moments[name])
        self._steps[run].add_(1)

    def flat_state(self, run: ParamRun) -> dict[str, StoredFloats]:
        """See UpdateRule."""
        return self._states[run]

    def step_counts(self) -> list[torch.Tensor]:
        """See UpdateRule: [], fp32 each."""
        return list(self._steps.values())


@dataclass(frozen=True)
class _Operands:
    """What a kernel works on: main, grad and each of moments [n], one dtype, fp32 or fp64; step: [], fp32."""

    main: torch.Tensor
    grad: torch.Tensor
    moments: dict[str, torch.Tensor]
    step: torch.Tensor


# torch's own functions under torch.optim.Optimizer.step, which would always step everything, and only as it is kept.
def _adamw_kernel(operands: list[_Operands], group: dict[str, Any], *, grad_scale: torch.Tensor | None) -> None:
    beta1, beta2 = group["betas"]
    adamw(
        [one.main for one in operands],
        [one.grad for one in operands],
        [one.moments["exp_avg"] for one in operands],
        [one.moments["exp_avg_sq"] for one in operands],
        [],
        [one.step for one in operands],
        fused=True,
        grad_scale=grad_scale,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def _sgd_kernel(operands: list[_Operands], group: dict[str, Any], *, grad_scale: torch.Tensor | None) -> None:
    sgd(
        [one.main for one in operands],
        [one.grad for one in operands],
        [one.moments.get("momentum_buffer") for one in operands],
        fused=True,
        grad_scale=grad_scale,
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )


class _Copied:
    """A matrix that no two-dimensional view reaches: torch steps copies [rows, columns] of windows [*rows, columns].

    Weight, gradient and momentum, in this order. The flat storage has the last word: it is what is saved and loaded.
    """

    def __init__(self, windows: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        self._windows = windows
        weight, grad, momentum = (window.flatten(0, -2).clone() for window in windows)
        self.copies = weight, grad, momentum

    def read(self) -> None:
        for window, copy in zip(self._windows, self.copies):
            copy.view(window.shape).copy_(window)

    def write_back(self) -> None:
        for index in (0, 2):
            window = self._windows[index]
            window.copy_(self.copies[index].view(window.shape))


class MuonRule:
    """torch's Muon over the matrices inside the runs: an expert's, a projection's, or q, k and v of an attention.

    A matrix is a view of the flat storage; q, k and v of several groups are not in one piece and are copied in and
    out. matrices: windows by parameter name; a parameter that it leaves out is one matrix as it is.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        runs: Sequence[ParamRun],
        *,
        groups: Sequence[GroupKey],
        matrices: Mapping[str, list[MatrixWindow]],
    ) -> None:
        self.runs = list(runs)
        self._momenta = {run: torch.zeros_like(run.stepped) for run in runs}
        self._copied: list[_Copied] = []
        torch_groups: dict[tuple[GroupKey, tuple[int, ...]], list[torch.Tensor]] = {}
        states: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for key in groups:
            for run in (run for run in runs if run.group == key):
                for weight, momentum in self._matrices_of(run, matrices):
                    torch_groups.setdefault((key, tuple(weight.shape)), []).append(weight)
                    states[weight] = {"momentum_buffer": momentum}
        self.optimizer: torch.optim.Optimizer = torch.optim.Muon(
            [
                {"params": weights, **_scaled(key.values(config), _lr_factor(shape, config))}
                for (key, shape), weights in torch_groups.items()
            ]
            # torch refuses an optimizer without groups; a model may have no matrices.
            or [{"params": []}],
            momentum=config.muon_momentum,
            nesterov=config.muon_nesterov,
            ns_steps=config.muon_num_ns_steps,
        )
        self.optimizer.state.update(states)

    def _matrices_of(
        self, run: ParamRun, matrices: Mapping[str, list[MatrixWindow]]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Weight and momentum of each matrix of a run; the gradient hangs on the weight."""
        found = []
        for member in run.params:
            flats = [member.view_of(flat) for flat in (run.stepped, run.grad, self._momenta[run])]
            for window in matrices.get(member.name, [_whole(member.param)]):
                weight, grad, momentum = (window.view_of(flat) for flat in flats)
                # Rows of several groups are in one piece only where there is one group.
                if weight.dim() > 2:
                    copied = _Copied((weight, grad, momentum))
                    self._copied.append(copied)
                    weight, grad, momentum = copied.copies
                weight.grad = grad
                found.append((weight, momentum))
        return found

    def update(self, divisor: float) -> None:
        """See UpdateRule."""
        if divisor != 1.0:
            # torch's Muon has no fused division.
            for run in self.runs:
                run.grad.div_(divisor)
        for copied in self._copied:
            copied.read()
        self.optimizer.step()
        for copied in self._copied:
            copied.write_back()

    def flat_state(self, run: ParamRun) -> dict[str, StoredFloats]:
        """See UpdateRule."""
        return {"momentum_buffer": Plain(self._momenta[run])}

    def step_counts(self) -> list[torch.Tensor]:
        """See UpdateRule: none, [], fp32 each."""
        return []


def _whole(param: torch.Tensor) -> MatrixWindow:
    rows, columns = param.shape
    return MatrixWindow((rows, columns), (columns, 1), 0)


def _lr_factor(shape: tuple[int, ...], config: OptimizerConfig) -> float:
    """What torch's learning rate is multiplied with to get the wanted scale of a matrix's update."""
    rows, columns = shape
    by_torch = math.sqrt(max(1, rows / columns))
    wanted = {
        "spectral": math.sqrt(max(rows, columns)),
        "unit_rms_norm": math.sqrt(rows / columns),
        "shape_scaling": by_torch,
    }[config.muon_scale_mode]
    return config.muon_extra_scale_factor * wanted / by_torch


def _scaled(values: dict[str, Any], factor: float) -> dict[str, Any]:
    """A group whose rate is `factor` times as high and whose decay, which torch multiplies by the rate, is not."""
    scaled = {"lr": values["lr"] * factor, "lr_mult": values["lr_mult"] * factor}
    return {**values, **scaled, **{name: values[name] / factor for name in ("weight_decay", "wd_mult")}}
