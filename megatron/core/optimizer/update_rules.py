"""Update rules: torch's optimizers over the flat storage of runs. Each steps some runs and owns their state.

Norm, clipping, loss scale and masters are optimizer.py's; which parameters get which rule is decided in __init__.py.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_groups import GroupKey
from megatron.core.optimizer.param_runs import ParamRun
from megatron.core.weight_matrices import MatrixWindow


class UpdateRule(Protocol):
    """What an optimizer needs of a rule."""

    optimizer: torch.optim.Optimizer
    runs: list[ParamRun]

    def update(self, divisor: float) -> None:
        """Steps the rule's runs by their gradients / divisor."""
        ...

    def flat_state(self, run: ParamRun) -> dict[str, torch.Tensor]:
        """The state of a run by torch's names: [N], the dtype of `run.main`."""
        ...


class FusedRule:
    """AdamW or SGD: one kernel steps whole runs, and divides their gradients while it reads them."""

    def __init__(self, config: OptimizerConfig, runs: Sequence[ParamRun], *, groups: Sequence[GroupKey]) -> None:
        self.runs = list(runs)
        self._members = [[run for run in runs if run.group == key] for key in groups]
        torch_groups = [
            {"params": [run.main for run in members], **key.values(config)}
            for key, members in zip(groups, self._members)
        ]
        assert config.lr is not None
        if config.optimizer == "sgd":
            # Its decay is added to the gradient, as in Megatron; only Adam decays apart from it.
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
                torch_groups, lr=config.lr, momentum=config.sgd_momentum, fused=True
            )
            # A momentum of zeros gives the first step that torch takes without one.
            self._names: tuple[str, ...] = ("momentum_buffer",) if config.sgd_momentum > 0 else ()
        else:
            betas = (config.adam_beta1, config.adam_beta2)
            self.optimizer = torch.optim.AdamW(torch_groups, lr=config.lr, betas=betas, eps=config.adam_eps, fused=True)
            self._names = ("exp_avg", "exp_avg_sq")
        self._step_group = _sgd_step if config.optimizer == "sgd" else _adamw_step
        self._create_state(counts_steps=config.optimizer != "sgd")

    def _create_state(self, *, counts_steps: bool) -> None:
        # torch would make it in the first step.
        for run in self.runs:
            state = {name: torch.zeros_like(run.main) for name in self._names}
            if counts_steps:
                state["step"] = torch.zeros((), dtype=torch.float32, device=run.main.device)
            self.optimizer.state[run.main] = state

    @torch.no_grad()
    def update(self, divisor: float) -> None:
        """See UpdateRule."""
        # The fused kernels divide by this tensor while they read the gradient, as for torch.amp.GradScaler.
        device = self.runs[0].grad.device if self.runs else None
        grad_scale = None if divisor == 1.0 else torch.tensor(divisor, device=device)
        for group, members in zip(self.optimizer.param_groups, self._members):
            if members:
                states = [self.optimizer.state[run.main] for run in members]
                # Rates are plain numbers in the group, read at this moment.
                self._step_group(members, states, group=group, grad_scale=grad_scale)

    def flat_state(self, run: ParamRun) -> dict[str, torch.Tensor]:
        """See UpdateRule: [N], the dtype of `run.main`."""
        return {name: self.optimizer.state[run.main][name] for name in self._names}


_States = list[dict[str, torch.Tensor]]


# torch's own functions under torch.optim.Optimizer.step, which would always step all runs.
def _adamw_step(
    runs: list[ParamRun], states: _States, *, group: dict[str, Any], grad_scale: torch.Tensor | None
) -> None:
    beta1, beta2 = group["betas"]
    adamw(
        [run.main for run in runs],
        [run.grad for run in runs],
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] for state in states],
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


def _sgd_step(runs: list[ParamRun], states: _States, *, group: dict[str, Any], grad_scale: torch.Tensor | None) -> None:
    sgd(
        [run.main for run in runs],
        [run.grad for run in runs],
        [state.get("momentum_buffer") for state in states],
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
        self._momenta = {run: torch.zeros_like(run.main) for run in runs}
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
            flats = [member.view_of(flat) for flat in (run.main, run.grad, self._momenta[run])]
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

    def flat_state(self, run: ParamRun) -> dict[str, torch.Tensor]:
        """See UpdateRule: [N], the dtype of `run.main`."""
        return {"momentum_buffer": self._momenta[run]}


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
