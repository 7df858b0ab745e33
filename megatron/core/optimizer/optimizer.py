"""MegatronOptimizer: one step over flat parameters, with loss scale, clipping and skipped steps.

Which parameters lie together is param_runs.py; the update rule is torch.optim's.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing.logical import LogicalPiece
from megatron.core.dist_checkpointing.mapping import ShardedTensor, sharded_tensors
from megatron.core.distributed.grad_buffer import GradBuffer
from megatron.core.optimizer.clip_grads import clip_coefficient, count_zeros, get_grad_norm_fp32
from megatron.core.optimizer.grad_scaler import GradScaler
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_runs import ParamRun


class MegatronOptimizer:
    """What FP32Optimizer and Float16OptimizerWithFloat16Params share. In a step:

    1. the norm of all gradients, which also tells whether any of them overflowed;
    2. if it is not finite: the loss scale backs off, and neither parameters, moments nor step count change;
    3. otherwise torch's fused kernel divides by loss scale and clip factor while it updates (no pass of its own);
    4. 16-bit parameters are written from their fp32 masters.

    grad_stats_group: ranks that hold other parameters (model parallel); None for this rank alone. State exists from
    the start, so that a run whose every step was skipped can be saved and resumed.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: OptimizerConfig,
        *,
        runs: Sequence[ParamRun],
        grad_buffers: Sequence[GradBuffer],
        grad_scaler: GradScaler | None = None,
        grad_stats_group: dist.ProcessGroup | None = None,
    ):
        self.optimizer = optimizer
        self.config = config
        self.grad_scaler = grad_scaler
        # Copies of the lists: a caller that goes on building must not change what is stepped.
        self._runs = list(runs)
        self._grad_buffers = list(grad_buffers)
        self._grad_stats_group = grad_stats_group
        # fp64 makes the norm independent of how gradients are cut, which other layouts do differently.
        self._norm_dtype = torch.float64 if config.deterministic_mode else torch.float32
        self._state_names = _create_state(optimizer)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The torch optimizer's groups; a schedule writes `lr` and `weight_decay` into them."""
        return self.optimizer.param_groups

    def zero_grad(self) -> None:
        """Forgets all gradients; call before the first microbatch."""
        for buffer in self._grad_buffers:
            # Not by `param.grad = None`: gradients stand in the buffers and their memory is kept.
            buffer.clear()

    def get_loss_scale(self) -> torch.Tensor:
        """Factor of the loss: [], fp32, on the CPU."""
        # A tensor because scripts written for Megatron call .item() on it.
        return torch.tensor(self._loss_scale, dtype=torch.float32)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss, any shape, floating point, times the loss scale: same shape, fp32 or wider."""
        # In fp32, or a scaled fp16 loss would overflow before its gradients do.
        return loss if self.grad_scaler is None else loss.float() * self._loss_scale

    def step(self) -> tuple[bool, float, float | None]:
        """Updates the parameters from reduced gradients: (whether it did, gradient norm, zeros if configured).

        The norm is that of the unscaled gradients before clipping. Not updated means that a gradient was not finite.
        Collective over grad_stats_group.
        """
        # Else the kernel would update memory that the model no longer reads, silently.
        for run in self._runs:
            run.check_attached()
        # One pass for both: a norm is finite only if every gradient is.
        scaled_norm = self._grad_norm()
        found_inf = not math.isfinite(scaled_norm)
        grad_norm = scaled_norm / self._loss_scale
        divisor = self._loss_scale / self._clip_coefficient(grad_norm)
        # After the divisor: these gradients carry the old scale.
        if self.grad_scaler is not None:
            self.grad_scaler.update(found_inf)
        if found_inf:
            return False, grad_norm, None
        # Before the update, which may overwrite gradients with unscaled ones.
        num_zeros = self._count_zeros() if self.config.log_num_zeros_in_grad else None
        self._update(divisor)
        return True, grad_norm, num_zeros

    def reload_model_params(self) -> None:
        """Takes the fp32 masters from the model's parameters, after weights alone were loaded."""
        for run in self._runs:
            if run.has_master:
                run.main.copy_(run.model)

    def sharded_state(self, model_pieces: dict[str, list[LogicalPiece]]) -> list[ShardedTensor]:
        """Moments and masters as boxes to save, or to load in place; model_pieces: by parameter name."""
        tensors = []
        for run in self._runs:
            flats = {name: self.optimizer.state[run.main][name] for name in self._state_names}
            # Without a master, the model's own weights in the checkpoint are what was stepped.
            if run.has_master:
                flats["fp32_param"] = run.main
            for state_name, flat in flats.items():
                # Boxes by parameter: a run is a matter of this layout and must not show in a checkpoint.
                for param_name, view in run.named_views(flat):
                    tensors += sharded_tensors(model_pieces[param_name], view, prefix=f"optimizer.{state_name}.")
        return tensors

    def state_dict(self) -> dict[str, Any]:
        """Step count and loss scale, JSON values; tensors are in sharded_state, rates in the schedule."""
        return {
            "step": self._step_count_sync(),
            "grad_scaler": None if self.grad_scaler is None else self.grad_scaler.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from `state_dict`; the tensors of sharded_state are loaded apart."""
        for state in self.optimizer.state.values():
            # SGD counts nothing.
            if "step" in state:
                state["step"].fill_(state_dict["step"])
        # A run may change its precision between save and load.
        if self.grad_scaler is not None and state_dict["grad_scaler"] is not None:
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])

    @property
    def _loss_scale(self) -> float:
        return 1.0 if self.grad_scaler is None else self.grad_scaler.scale

    def _grad_norm(self) -> float:
        return get_grad_norm_fp32(
            [run.grad for run in self._runs],
            grad_stats_parallel_group=self._grad_stats_group,
            # Whole runs: their padding is zero and adds nothing.
            accumulate_in=self._norm_dtype,
        )

    def _clip_coefficient(self, grad_norm: float) -> float:
        # No factor would repair such a gradient, and a step that is skipped needs none.
        if self.config.clip_grad == 0 or not math.isfinite(grad_norm):
            return 1.0
        return clip_coefficient(self.config.clip_grad, grad_norm)

    def _count_zeros(self) -> float:
        # Per parameter: the padding's zeros are nobody's.
        grads = [grad for run in self._runs for _, grad in run.named_views(run.grad)]
        return count_zeros(grads, self._grad_stats_group)

    def _update(self, divisor: float) -> None:
        # The fused kernels divide by this tensor while they read the gradient, as for torch.amp.GradScaler.
        device = self._runs[0].grad.device if self._runs else None
        self.optimizer.grad_scale = None if divisor == 1.0 else torch.tensor(divisor, device=device)  # type: ignore[attr-defined]
        # Rates are plain numbers in param_groups, read at this moment.
        self.optimizer.step()
        for run in self._runs:
            if run.has_master:
                # Rounds to nearest, as .to() does; one copy for all parameters of the run.
                run.model.copy_(run.main)

    def _step_count_sync(self) -> int:
        # One count a run in torch's state, all moved together. NOTE: reads the device; for checkpoints.
        counts = {int(state["step"].item()) for state in self.optimizer.state.values() if "step" in state}
        assert len(counts) <= 1, f"parameters disagree on the number of steps: {counts}"
        return counts.pop() if counts else 0


class FP32Optimizer(MegatronOptimizer):
    """Steps the model's own fp32 (or fp64) parameters."""


class Float16OptimizerWithFloat16Params(MegatronOptimizer):
    """Steps fp32 masters of 16-bit parameters; fp32 parameters among them are stepped themselves."""


def _create_state(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Zero moments and counts, which torch would make in the first step; returns the names of the moments."""
    is_adam = isinstance(optimizer, torch.optim.AdamW)
    names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    if not is_adam:
        # A momentum of zeros gives the first step that torch takes without one.
        names = ("momentum_buffer",) if optimizer.defaults["momentum"] > 0 else ()
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = {name: torch.zeros_like(param) for name in names}
            if is_adam:
                state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            optimizer.state[param] = state
    return names
