"""MegatronOptimizer: a step over flat parameters, with loss scale, clipping and skipped steps.

The decision whether a step updates is made either by the host or by the device, so that a graph can capture the step.
flat_params.py joins parameters; the update rules are in adam.py and muon.py.

[Note: outcomes of a step] Skipped: a gradient is not finite (`found_inf`); the loss scale backs off, and nothing else
is updated. Discarded: the caller's `discard` tells the device to ignore the step (experts or their stash have
overflowed); nothing is updated, including the loss scale. Half done: an error interrupted an update, so parameters and
states belong to different steps. Whole: parameters and states belong to the same step.
"""

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.config_field import require_defaults
from megatron.core.device import OffloadedMemory
from megatron.core.device.trace_ranges import trace_range
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedState, ShardedTensor, flatten, range_tensors
from megatron.core.distributed.finalize_model_grads import NotesUpdates, outermost
from megatron.core.distributed.grad_hooks import ReleasedBucket, RunState
from megatron.core.distributed.layout import Span
from megatron.core.logical_tensors import LogicalPiece
from megatron.core.optimizer.adam import GradScale, UpdateRule
from megatron.core.optimizer.clip_grads import (
    GradStats,
    clip_coefficient,
    clip_coefficient_on_device,
    read_count_sync,
    read_norm_sync,
)
from megatron.core.optimizer.flat_params import FlatParamRange, ParamWrites
from megatron.core.optimizer.grad_scaler import MegatronGradScaler
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.optimizer_parts import InitStateFn, OptimizerParts, parts_over_params
from megatron.core.optimizer.state_dict import MASTERS, state_prefix
from megatron.core.optimizer.stored_floats import StoredFloats
from megatron.core.utils import unwrap_model

# Megatron's name for the only format of optimizer state in checkpoints: boxes of whole tensors.
FULLY_RESHARDABLE = "fully_reshardable"
# Settings of parameter groups that kernels receive as host numbers.
_KEPT = ("weight_decay", "betas", "eps", "momentum")
_BROKEN_UPDATE = (
    "an error interrupted the update of an earlier step, so parameters and optimizer states belong to different "
    "steps: load a checkpoint"
)


@dataclass(frozen=True)
class _StepOutcome:
    """Outcome of a step. If is_discarded is set, the other fields are meaningless; see [Note: outcomes of a step]."""

    is_discarded: bool
    found_inf: bool
    grad_norm: float
    num_zeros: float


@dataclass(frozen=True)
class _PreparedStep:
    """A step whose gradients are reduced and finite, but not applied yet.

    loss_scale: the loss scale that the gradients contain. grad_norm: the norm of the unscaled gradients.
    """

    loss_scale: float
    grad_norm: float


@dataclass(frozen=True)
class DeviceStep:
    """Result of a step on the device, for the host. Each replay of a graph that contains the step overwrites it.

    outcome: [4], fp64, on the device: is_discarded, found_inf, grad_norm and num_zeros.
    """

    outcome: torch.Tensor

    def read_sync(self) -> _StepOutcome:
        """Reads the outcome of the step. NOTE: waits until the device has run the step."""
        is_discarded, found_inf, grad_norm, num_zeros = self.outcome.tolist()
        return _StepOutcome(bool(is_discarded), bool(found_inf), grad_norm, num_zeros)


@dataclass(frozen=True)
class FlatState:
    """One kind of state of a flat range."""

    kind: str
    stored: StoredFloats
    param_range: FlatParamRange

    def read(self) -> torch.Tensor:
        """Returns all numbers: [N], fp32 or fp64; a view if stored in that dtype, else a copy."""
        return self.stored.read(0, self.stored.numel)

    def tensors(self, flat: torch.Tensor, model_pieces: dict[str, list[LogicalPiece]]) -> list[ShardedTensor]:
        """Returns views of `flat` as boxes of parameters, for saving and loading.

        flat: [N], fp32 or fp64, as returned by `read`.
        """
        # By parameter, because flat ranges depend on the layout and must not affect checkpoints.
        return [
            tensor
            for member in self.param_range.params
            for tensor in range_tensors(
                model_pieces[member.name], member.view_of(flat), start=member.start, prefix=state_prefix(self.kind)
            )
        ]


class MegatronOptimizer:
    """Common base of all optimizers. In a step:

    1. the norm of all gradients is computed, which also shows whether any gradient overflowed;
    2. if the norm is not finite, the loss scale backs off, and neither parameters, moments nor step count change;
    3. otherwise each rule unscales and clips gradients inside its update, without a separate pass;
    4. 16-bit parameters are written from their fp32 masters.

    `step` decides between 2 and 3 on the host, which waits for the norm. step_on_device, which a graph can capture,
    decides on the device. prepare_device_step, step_on_device or a replay of it, and settle_step_sync together are
    bit-identical to `step`.

    An error inside an update leaves it half done. Every later step and save then raises an error until a checkpoint is
    loaded. See [Note: outcomes of a step].

    optimizer: a torch optimizer whose groups list the parameters to update. init_state_fn: allocates its state for a
    save or load before the first step. Subclasses in this package pass `parts` instead, whose first rule uses
    `optimizer`. State then exists from the start, so training can be saved and resumed even if every step so far was
    skipped. grad_scaler: the loss scale; None for 1.
    """

    # Whether 16-bit parameters of a torch optimizer are replaced by fp32 copies.
    _makes_masters = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: OptimizerConfig,
        init_state_fn: InitStateFn | None = lambda x: None,
        *,
        grad_scaler: MegatronGradScaler | None = None,
        parts: OptimizerParts | None = None,
    ):
        parts = parts or parts_over_params(optimizer, config, init_state_fn, masters=self._makes_masters)
        self.config = config
        self.grad_scaler = grad_scaler
        # Copies, so that later changes of the caller's lists have no effect.
        self._rules = list(parts.rules)
        self._ranges = list(parts.ranges)
        self._writes = ParamWrites(self._ranges)
        self._model_chunks = list(parts.model_chunks)
        self._pieces = parts.pieces
        # Chunks of a stage share a scheduler.
        self._schedulers = list(dict.fromkeys(chunk.launch_order for chunk in self._model_chunks))
        for scheduler in self._schedulers:
            scheduler.iteration.has_optimizer = True
        self._grad_stats = parts.grad_stats
        self._logits = list(parts.logits)
        # Between prepare_grads and step_with_ready_grads.
        self._prepared: _PreparedStep | None = None
        self._last_norm = 0.0
        # A load that sharded_state_dict has started and load_state_dict completes.
        self._load_in_progress: AbstractContextManager[list[ShardedTensor]] | None = None
        self._offloaded: OffloadedMemory | None = None
        # The error to raise while an update is half done: during it, and after an error in it.
        self._half_done: str | None = None
        # Wrappers reference it weakly, so this attribute keeps it alive.
        self._run_states = _RunStates(self._rules)
        for chunk in self._model_chunks:
            chunk.set_state_provider(self._run_states.states)
        # Not read from torch's state, because a rank without trained parameters also counts steps.
        self._num_steps = 0
        # Persistent, so that graphs multiply losses and divide gradients by the current scale of each replay.
        self._device_scale = torch.full((), self._loss_scale, dtype=torch.float64, device=parts.device)
        # Weight decays that a graph has captured as plain numbers; None before the first step on the device.
        self._captured_settings: list[dict[str, Any]] | None = None

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer, or the first of several."""
        return self._rules[0].optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of all torch optimizers. A schedule writes `lr` and `weight_decay` into them."""
        return [group for rule in self._rules for group in rule.optimizer.param_groups]

    @property
    def state(self) -> Any:
        """State of the torch optimizer, keyed by the parameters in its groups.

        With get_megatron_optimizer the keys are flat ranges. Their state contains moments unless these are stored in
        reduced precision.
        """
        return self.optimizer.state

    @property
    def decoupled_learning_rate(self) -> float | None:
        """Current learning rate of parameters with --decoupled-lr; None without that flag."""
        return next((group["lr"] for group in self.param_groups if group.get("is_decoupled_lr")), None)

    def get_parameters(self) -> list[Tensor]:
        """Returns the tensors that are updated, any shape and float dtype: masters instead of 16-bit parameters."""
        return [param for group in self.param_groups for param in group["params"]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients; must be called before the first microbatch.

        set_to_none: whether `param.grad` becomes None or zeros; gradients in a wrapper's buffers become zeros.
        """
        for logits in self._logits:
            logits.reset()
        for chunk in self._model_chunks:
            # Not `param.grad = None`, because gradients are in flat buffers, whose memory is persistent.
            chunk.zero_grad_buffer(caller=self)
        if not self._model_chunks:
            for member in (member for one in self._ranges for member in one.params):
                if set_to_none:
                    member.param.grad = None
                elif member.param.grad is not None:
                    member.param.grad = torch.zeros_like(member.param.grad)

    def forget_attention_logits(self) -> None:
        """Drops the largest attention scores of discarded passes since the last step."""
        for logits in self._logits:
            logits.reset()

    def largest_attention_logit_sync(self) -> float | None:
        """Returns the largest attention score of the last step, over all layers, heads and ranks. Collective.

        Returns None if no layer computed scores. Must be called on all ranks. NOTE: waits until the device has run the
        step.
        """
        largest = torch.full((), -torch.inf, dtype=torch.float64, device=self._device_scale.device)
        for logits in self._logits:
            largest.copy_(torch.maximum(largest, logits.largest))
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        found = float(largest)
        return None if found == -math.inf else found

    def get_loss_scale(self) -> torch.Tensor:
        """Returns the loss scale: [], fp32, on the CPU."""
        # A tensor, because scripts written for Megatron call .item() on it.
        return torch.tensor(self._loss_scale, dtype=torch.float32)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiplies a loss by the loss scale and returns it in fp32; without a loss scale, returns it unchanged.

        loss: any shape, floating point. The scale is read on the device, so that each replay of a graph uses the
        current scale.
        """
        # In fp32, because a scaled fp16 loss would overflow before its gradients do.
        return loss if self.grad_scaler is None else loss.float() * self._device_scale.float()

    @trace_range("MegatronOptimizer.step")
    def step(self) -> tuple[bool, float, float | None]:
        """Updates the parameters from reduced gradients; returns (is_updated, grad_norm, num_zeros).

        is_updated is False if a gradient was not finite. grad_norm is the norm of unscaled gradients before clipping.
        num_zeros is None unless log_num_zeros_in_grad is set. Collective over all ranks that hold parts of the model.
        An error before the update changes nothing. Raises RuntimeError if finish_grad_sync was not called, and after an
        error inside an update, until a checkpoint is loaded. Raises RemoteRankError if another rank has called
        reset_iteration.
        """
        found_inf = self.prepare_grads()
        if found_inf:
            return False, self._last_norm, None
        # Must come before the update, which may overwrite gradients with unscaled ones.
        with self.config.timers("optimizer-count-zeros", log_level=1):
            num_zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else None
        with self._prepared_step(clip_grad=self.config.clip_grad) as scale:
            self._update(scale)
        return True, self._last_norm, num_zeros

    # The parts of `step`, for scripts that run code between them.

    def prepare_grads(self) -> bool:
        """Begins a step: computes the norm of the reduced gradients and returns whether any gradient is not finite.

        If so, the loss scale backs off and the step ends; otherwise step_with_ready_grads must follow. Collective.
        Raises the same errors as `step`.
        """
        self._prepared = None
        self._prepare_step()
        # Before any change on this rank, because other ranks may have caught an error after the reduction of gradients.
        for scheduler in self._schedulers:
            scheduler.step()
        for logits in self._logits:
            logits.collect()
        # One pass computes norm and overflow, because the norm is finite only if every gradient is. The norm is
        # bit-identical on all ranks, so all ranks make the same decision without communication. `_decide` makes this
        # decision in a graph.
        with self.config.timers("optimizer-clip-main-grad", log_level=1):
            scaled_norm = read_norm_sync(self._grad_stats.norm())
        # Also lowers the loss scale. A different reason to skip, such as a limit on the norm, would require a separate
        # flag.
        found_inf = not math.isfinite(scaled_norm)
        loss_scale = self._loss_scale
        self._last_norm = scaled_norm / loss_scale
        # After the scale of these gradients was read.
        self._update_scale(found_inf)
        if found_inf:
            self._grad_stats.skip_step(self._last_norm)
        else:
            self._prepared = _PreparedStep(loss_scale, self._last_norm)
        return found_inf

    def step_with_ready_grads(self) -> bool:
        """Updates the parameters after prepare_grads, without clipping. Always returns True.

        Raises RuntimeError if prepare_grads was not called, or if it found a gradient that is not finite.
        """
        with self._prepared_step(clip_grad=0.0) as scale:
            self._update(scale)
        return True

    def get_grad_norm(self) -> float:
        """Returns the 2-norm of all reduced gradients, unscaled. Collective, like `step`."""
        return read_norm_sync(self._grad_stats.norm()) / self._grads_scale

    def clip_grad_norm(self, clip_grad: float) -> float:
        """Scales the reduced gradients in place to a norm of at most clip_grad; returns the previous norm.

        Intended for scripts that call prepare_grads and step_with_ready_grads; `step` itself clips to
        OptimizerConfig.clip_grad. Collective, like `step`.
        """
        grad_norm = self.get_grad_norm()
        coefficient = clip_coefficient(clip_grad, grad_norm) if clip_grad > 0 and math.isfinite(grad_norm) else 1.0
        if coefficient < 1.0:
            for one in self._ranges:
                one.grad.mul_(coefficient)
        return grad_norm

    def count_zeros(self) -> float:
        """Returns the number of exact zeros in all reduced gradients. Collective, like `step`."""
        return read_count_sync(self._grad_stats.count_zeros())

    @contextmanager
    def _prepared_step(self, *, clip_grad: float) -> Iterator[GradScale]:
        """Yields the scale of the prepared gradients, to update with inside the block, and then ends the step."""
        if self._prepared is None:
            raise RuntimeError(
                "step_with_ready_grads was called without prepare_grads, or after it found a gradient that is not "
                "finite: call prepare_grads, and update only if it returns False"
            )
        prepared, self._prepared = self._prepared, None
        coefficient = 1.0 if clip_grad == 0 else clip_coefficient(clip_grad, prepared.grad_norm)
        with self.config.timers("optimizer-inner-step", log_level=1):
            self._num_steps += 1
            yield GradScale(prepared.loss_scale / coefficient)
        self._grad_stats.end_step(prepared.grad_norm)

    @property
    def _grads_scale(self) -> float:
        """The loss scale of the gradients; prepare_grads may already have changed the scale for the next step."""
        return self._loss_scale if self._prepared is None else self._prepared.loss_scale

    # Steps decided on the device.

    def prepare_device_step(self) -> None:
        """Prepares an update on the device; must be called before step_on_device and before each replay of it.

        Performs the checks of `step`, and copies the learning rates to the device (prepare_update, refresh_rates of
        each rule). Raises RuntimeError and ValueError like `step`, and ValueError if a setting that graphs keep has
        changed since the first step on the device.
        """
        self._prepare_step()
        if self._captured_settings is not None:
            self._check_settings(self._captured_settings)

    @trace_range("MegatronOptimizer.step_on_device")
    def step_on_device(self, discard: torch.Tensor | None = None) -> DeviceStep:
        """Runs a step in which the device decides whether to update. Never waits for the device and can be captured.

        discard: discards the step if any element is above 0: any shape and dtype, on the device, the same on all ranks.
        Must be called when gradients are reduced and no gather is in flight. Ranks must agree that none has aborted the
        iteration (finish_grad_sync, CollectiveScheduler.step), before the call or after each replay. Collective, like
        `step`. Raises ValueError for settings that require the host.
        """
        self.config.validate_device_step()
        self._captured_settings = self._kept_settings()
        for logits in self._logits:
            logits.collect()
        decision = _decide(
            self._grad_stats.norm(), loss_scale=self._device_scale, discard=discard, clip_grad=self.config.clip_grad
        )
        # Before the update, as in `step`.
        num_zeros = self._grad_stats.count_zeros() if self.config.log_num_zeros_in_grad else None
        self.mark_half_done()
        self.update_ranges(decision.scale, self._ranges)
        self.mark_whole()
        return decision.for_host(num_zeros)

    def forget_broken_capture(self) -> None:
        """Allows steps again after a failed capture of step_on_device, which has changed no parameter."""
        self.mark_whole()

    def settle_step_sync(self, done: DeviceStep) -> tuple[bool, float, float | None]:
        """Completes a device step on the host and returns the result of `step`; must be called once for each replay.

        Updates loss scale, step count and sharded parameters like `step`; a discarded step changes none of them. NOTE:
        waits until the device has run the step. Collective if `step` gathers parameters.
        """
        outcome = done.read_sync()
        if outcome.is_discarded:
            return False, outcome.grad_norm, None
        self._update_scale(outcome.found_inf)
        if outcome.found_inf:
            return False, outcome.grad_norm, None
        self._num_steps += 1
        self._after_device_update()
        return True, outcome.grad_norm, outcome.num_zeros if self.config.log_num_zeros_in_grad else None

    # The update of both kinds of steps. UpdatesInBackward prepares it and runs the rules before the step.

    def _prepare_step(self) -> None:
        if not self._grad_stats.is_updated:
            self.prepare_update()

    def prepare_update(self) -> None:
        """Checks that an update may run, and copies the learning rates, and parameters that other code has written.

        Raises RuntimeError if parameters and states belong to different steps, ValueError if a parameter was moved.
        """
        self._check_whole()
        # Without this check, the kernel would silently update memory that the model no longer reads.
        for param_range in self._ranges:
            param_range.check_attached()
        self._writes.take()
        for rule in self._rules:
            rule.refresh_rates()

    def _check_whole(self) -> None:
        """Raises RuntimeError if an update is half done, or state is offloaded."""
        if self._offloaded is not None:
            raise RuntimeError("the optimizer's state is on the host after offload_to_cpu: call restore_from_cpu first")
        if self._half_done is not None:
            raise RuntimeError(self._half_done)

    def _update(self, scale: GradScale) -> None:
        """Performs an update on which the host has decided."""
        self.mark_half_done()
        self.update_ranges(scale, self._ranges)
        self.mark_whole()
        self._note_update()

    def mark_half_done(self, error: str = _BROKEN_UPDATE) -> None:
        """Records that an update has begun; error: the message of later steps and saves until `mark_whole`."""
        self._half_done = error

    def update_ranges(
        self, scale: GradScale, ranges: Iterable[FlatParamRange], *, rules: Sequence[UpdateRule] | None = None
    ) -> None:
        """Updates flat ranges from their scaled gradients, then scales down attention projections inside them.

        Ranges that were updated in backward are only scaled down. A step must pass each range once. rules: the rules to
        run; None means all.
        """
        chosen, used = frozenset(ranges), self._rules if rules is None else rules
        if not self._grad_stats.is_updated:
            for rule in used:
                rule.update(scale, chosen)
        # A range belongs to one rule. Scaled here, before a DistributedOptimizer gathers it.
        stepped = [one for rule in used for one in rule.ranges if one in chosen] if self._logits else []
        for logits in self._logits:
            logits.rescale(stepped, skip=None if scale.skip is None else scale.skip.detach())

    def mark_whole(self) -> None:
        """Records that no update is half done: it has ended, or a load has rewritten parameters and states."""
        self._half_done = None
        self._grad_stats.forget()

    def _note_update(self) -> None:
        # Updates in backward increment the counters (ReadyBucket.note_written).
        self._writes.note()
        for chunk in self._model_chunks:
            chunk.note_update()
            for module in outermost(unwrap_model(chunk), NotesUpdates):  # type: ignore[type-abstract]  # never called
                module.note_update(self)

    def _after_device_update(self) -> None:
        """Performs the host's part of an update made by the device."""
        self._note_update()

    # Parameters and states.

    def params_norm(self) -> float:
        """Returns the 2-norm of all updated parameters (masters), in fp64. Collective, like `step`."""
        return self._grad_stats.params_norm()

    def norm_of(self, params: Iterable[nn.Parameter]) -> float:
        """Returns the 2-norm of parameters that are not updated, in fp64. Collective, like `step`."""
        return self._grad_stats.norm_of(params)

    def reload_model_params(self, state_dict: Mapping[str, Any] | None = None) -> None:
        """Copies the model's parameters to the fp32 masters, after weights were loaded without optimizer state.

        Required after writes between steps to `param.data` or by collectives such as dist.broadcast; other writes are
        detected (see ParamWrites). state_dict: must be None. Megatron uses it to set masters from a model state with
        higher precision.
        """
        why = "masters are set to the parameters' values; convert the checkpoint, or load it with its optimizer state"
        require_defaults("reload_model_params", why, state_dict=(state_dict, None))
        for param_range in self._ranges:
            param_range.take_model()
        self._writes.note()

    def sharded_state(self, model_pieces: dict[str, list[LogicalPiece]]) -> list[ShardedTensor]:
        """Returns moments and masters of this rank's shards as boxes to save, in fp32.

        model_pieces: logical pieces by parameter name. State stored as fp32 is not copied. Raises RuntimeError if
        parameters and states belong to different steps.
        """
        self._check_whole()
        return [tensor for state in self._flat_states() for tensor in state.tensors(state.read(), model_pieces)]

    @contextmanager
    def loading(self, model_pieces: dict[str, list[LogicalPiece]]) -> Iterator[list[ShardedTensor]]:
        """Yields the boxes of sharded_state, to be loaded in place inside the block.

        When the block ends, loaded values are written to storage forms other than fp32.
        """
        if self._offloaded is not None:
            self._check_whole()
        states = self._flat_states()
        values = [state.read() for state in states]
        yield [tensor for state, flat in zip(states, values) for tensor in state.tensors(flat, model_pieces)]
        for state, flat in zip(states, values):
            state.stored.write(0, flat)
        for param_range in self._ranges:
            # A copy that is not a master has no entry in the checkpoint.
            if param_range.is_copy and not param_range.has_master:
                param_range.take_model()
        self.mark_whole()
        self._after_load()

    @property
    def state_bytes(self) -> dict[str, int]:
        """Bytes of this rank's state: `masters` and `moments` on the device, and `host_states` for both on the host."""
        by_range = {one: rule.flat_state(one).values() for rule in self._rules for one in rule.ranges}
        found = {"masters": 0, "moments": 0, "host_states": 0}
        for param_range in self._ranges:
            masters, moments = ("host_states",) * 2 if param_range.on_host else ("masters", "moments")
            found[masters] += param_range.main.num_bytes if param_range.is_copy else 0
            found[moments] += sum(stored.num_bytes for stored in by_range[param_range])
        return found

    def _flat_states(self) -> list[FlatState]:
        states = []
        by_range = {one: rule.flat_state(one) for rule in self._rules for one in rule.ranges}
        for param_range in self._ranges:
            # Without masters, the model's weights are updated, which are already in the checkpoint.
            masters = {MASTERS: param_range.main} if param_range.has_master else {}
            states += [
                FlatState(kind, stored, param_range) for kind, stored in {**by_range[param_range], **masters}.items()
            ]
        return states

    def common_state(self) -> dict[str, Any]:
        """Returns step count and loss scale, the same on all ranks, as JSON values; tensors are in sharded_state."""
        return {
            "step": self._num_steps,
            "grad_scaler": None if self.grad_scaler is None else self.grad_scaler.state_dict(),
            **self._grad_stats.state_dict(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns common_state and, unless shards are updated, this rank's moments and masters for torch.save.

        `state` contains one dictionary of copies, [n] each, per flat range, so it loads only into the same layout. Use
        sharded_state_dict for checkpoints that load into any layout. DistributedOptimizer omits `state`.
        """
        self._check_whole()
        by_range: dict[FlatParamRange, dict[str, Tensor]] = {one: {} for one in self._ranges}
        for state in self._flat_states():
            by_range[state.param_range][state.kind] = state.read().clone()
        return {**self.common_state(), "state": list(by_range.values())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores a state_dict, a common_state or a loaded sharded_state_dict.

        Raises ValueError if `state` differs from this optimizer in its ranges, their sizes or their kinds of state.
        """
        if self._load_in_progress is not None:
            loading, self._load_in_progress = self._load_in_progress, None
            loading.__exit__(None, None, None)
            common = state_dict["common"]
            state_dict = common.data if isinstance(common, ShardedObject) else common
        elif "tensors" in state_dict:
            raise ValueError(
                "load_state_dict received a sharded_state_dict created without is_loading=True, or loaded twice: "
                "call sharded_state_dict(..., is_loading=True), dist_checkpointing.load, then load_state_dict once"
            )
        if "state" in state_dict:
            self._load_ranges(state_dict["state"])
        self._num_steps = state_dict["step"]
        for count in self._step_counts():
            count.fill_(self._num_steps)
        # The precision may change between save and load.
        if self.grad_scaler is not None and state_dict["grad_scaler"] is not None:
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])
            self._device_scale.fill_(self._loss_scale)
        self._grad_stats.load_state_dict(dict(state_dict))

    def sharded_state_dict(
        self,
        model_sharded_state_dict: ShardedState,
        is_loading: bool = False,
        metadata: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Returns boxes of moments and masters, and common_state, which dist_checkpointing saves or loads in place.

        model_sharded_state_dict: the items of the model in the same checkpoint, which must include all parameters that
        are updated, or be empty. is_loading: whether the result will be loaded, after which load_state_dict must be
        called. metadata: its distrib_optim_sharding_type must be fully_reshardable, the only format here; other entries
        select among formats of Megatron and are ignored. Raises ValueError for other formats, and if a parameter is not
        among the items.
        """
        kind = (metadata or {}).get("distrib_optim_sharding_type", FULLY_RESHARDABLE)
        if kind != FULLY_RESHARDABLE:
            raise ValueError(f"metadata['distrib_optim_sharding_type'] is {kind!r}: must be {FULLY_RESHARDABLE!r}")
        pieces = self._pieces_of(model_sharded_state_dict)
        common = ShardedObject("optimizer.common_state", self.common_state())
        if not is_loading:
            return {"common": common, "tensors": self.sharded_state(pieces)}
        self._load_in_progress = self.loading(pieces)
        return {"common": common, "tensors": self._load_in_progress.__enter__()}

    def offload_to_cpu(self) -> None:
        """Copies moments and masters to the host and frees their memory on the device, between two steps.

        Steps, saves and loads raise RuntimeError until restore_from_cpu. Does nothing for state that is already on the
        host.
        """
        self._check_whole()
        of_rules = [stored for rule in self._rules for one in rule.ranges for stored in rule.flat_state(one).values()]
        masters = [one.main for one in self._ranges if one.is_copy]
        held = [tensor for stored in [*of_rules, *masters] for tensor in stored.memory]
        # On a GPU, these are already on the host with OptimizerConfig.optimizer_cpu_offload.
        self._offloaded = OffloadedMemory(one for one in held if one.device == self._device_scale.device)

    def restore_from_cpu(self) -> None:
        """Moves moments and masters back to the device after offload_to_cpu, bit-identical to the originals."""
        if self._offloaded is not None:
            self._offloaded.restore()
            self._offloaded = None

    def _pieces_of(self, model_state: ShardedState) -> dict[str, list[LogicalPiece]]:
        items = [item for item in flatten(model_state) if isinstance(item, ShardedTensor)]
        known = {item.key for item in items}
        found = {}
        for member in (member for one in self._ranges for member in one.params):
            held = self._pieces.get(member.name) or _pieces_in(items, member.param)
            missing = {piece.key for piece in held} - known if items else set()
            if missing or not held:
                raise ValueError(
                    f"model_sharded_state_dict has no item for {member.name}: must contain all parameters that are "
                    "updated"
                )
            found[member.name] = held
        return found

    def _load_ranges(self, saved: Sequence[Mapping[str, Tensor]]) -> None:
        states = self._flat_states()
        by_range: dict[FlatParamRange, list[FlatState]] = {one: [] for one in self._ranges}
        for state in states:
            by_range[state.param_range].append(state)
        sizes = [{state.kind: (state.stored.numel,) for state in held} for held in by_range.values()]
        given = [{kind: tuple(tensor.shape) for kind, tensor in held.items()} for held in saved]
        if sizes != given:
            raise ValueError(
                f"state_dict['state'] has shapes {given}: must be {sizes}, the shapes of this optimizer. Load state "
                "of a different layout with sharded_state_dict"
            )
        for held, tensors in zip(by_range.values(), saved):
            for state in held:
                like = state.read()
                state.stored.write(0, tensors[state.kind].to(like))
        for one in self._ranges:
            one.write_model()
        self.mark_whole()
        self._after_load()

    def _after_load(self) -> None:
        """Hook that runs after state was loaded; DistributedOptimizer overrides it to gather parameters."""

    @property
    def _loss_scale(self) -> float:
        return 1.0 if self.grad_scaler is None else self.grad_scaler.value

    def _update_scale(self, found_inf: bool) -> None:
        if self.grad_scaler is not None:
            self.grad_scaler.update(found_inf)
            self._device_scale.fill_(self._loss_scale)

    def _kept_settings(self) -> list[dict[str, Any]]:
        """Returns the settings of each parameter group that kernels receive as host numbers, which graphs keep."""
        clip = {"clip_grad": self.config.clip_grad}
        return [{name: group[name] for name in _KEPT if name in group} | clip for group in self.param_groups]

    def _check_settings(self, kept: list[dict[str, Any]]) -> None:
        for number, (before, now) in enumerate(zip(kept, self._kept_settings())):
            name = next((name for name, value in now.items() if before[name] != value), None)
            if name is not None:
                raise ValueError(
                    f"{name} of parameter group {number} was {before[name]} in the first step on the device and is "
                    f"{now[name]}: graphs keep the first value, so {name} must not change unless steps run without a "
                    "graph"
                )

    def _step_counts(self) -> list[torch.Tensor]:
        # One counter for each range of a rule that counts steps; all counters have the same value.
        return [count for rule in self._rules for count in rule.step_counts()]


class FP32Optimizer(MegatronOptimizer):
    """Updates fp32 (or fp64) parameters of a model directly, without masters."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: OptimizerConfig,
        init_state_fn: InitStateFn | None = None,
        *,
        parts: OptimizerParts | None = None,
    ) -> None:
        super().__init__(optimizer, config, init_state_fn, parts=parts)


class MixedPrecisionOptimizer(MegatronOptimizer):
    """Base class of optimizers for 16-bit parameters, with masters and optionally a loss scale."""

    _makes_masters = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: OptimizerConfig,
        grad_scaler: MegatronGradScaler | None,
        init_state_fn: InitStateFn | None = None,
        *,
        parts: OptimizerParts | None = None,
    ) -> None:
        super().__init__(optimizer, config, init_state_fn, grad_scaler=grad_scaler, parts=parts)


class Float16OptimizerWithFloat16Params(MixedPrecisionOptimizer):
    """Updates fp32 masters of 16-bit parameters; fp32 parameters are updated directly."""

    def state_dict(self, is_loading: bool = False) -> dict[str, Any]:
        """Returns MegatronOptimizer.state_dict. is_loading: ignored, because state exists from the start."""
        return super().state_dict()


class ProxyDict(MutableMapping[Any, Any]):
    """View of several dictionaries as one, with keys (index of the dictionary, key in it).

    An item can also be found, replaced and deleted by its bare key, in the first dictionary that contains it.
    """

    def __init__(self, inner_dicts: Sequence[MutableMapping[Any, Any]]) -> None:
        self._inner_dicts = list(inner_dicts)

    def __getitem__(self, key: Any) -> Any:
        index, inner = self._place(key)
        return self._inner_dicts[index][inner]

    def __setitem__(self, key: Any, value: Any) -> None:
        index, inner = self._place(key)
        self._inner_dicts[index][inner] = value

    def __delitem__(self, key: Any) -> None:
        index, inner = self._place(key)
        del self._inner_dicts[index][inner]

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return ((index, key) for index, inner in enumerate(self._inner_dicts) for key in inner)

    def __len__(self) -> int:
        return sum(map(len, self._inner_dicts))

    def _place(self, key: Hashable) -> tuple[int, Any]:
        if isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], int):
            if 0 <= key[0] < len(self._inner_dicts):
                return key
        found = next((index for index, inner in enumerate(self._inner_dicts) if key in inner), None)
        if found is None:
            raise KeyError(key)
        return found, key


class ChainedOptimizer(MegatronOptimizer):
    """Updates parameters with several optimizers that share gradient norm, skip decision and loss scale.

    chained_optimizers: at least one; a torch optimizer is wrapped in an FP32Optimizer without clipping. Raises
    ValueError unless all of them have the same settings for clipping and zero counts, and the same loss scale. parts:
    the parts of all optimizers, if this optimizer updates their parameters itself.
    """

    def __init__(
        self,
        chained_optimizers: Sequence[MegatronOptimizer | torch.optim.Optimizer],
        *,
        parts: OptimizerParts | None = None,
    ) -> None:
        chained = [_as_ours(one) for one in chained_optimizers]
        _check_chain(chained)
        self.chained_optimizers = chained
        self._updates_itself = parts is not None
        super().__init__(
            chained[0].optimizer, chained[0].config, grad_scaler=chained[0].grad_scaler, parts=parts or _joined(chained)
        )

    @property
    def state(self) -> ProxyDict:
        """The state of all torch optimizers; its keys are (index of the optimizer, parameter)."""
        return ProxyDict([rule.optimizer.state for rule in self._rules])

    def sharded_state_dict(  # type: ignore[override]  # Megatron's arguments
        self, model_sharded_state_dict: ShardedState, is_loading: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """Returns one sharded_state_dict for all optimizers. kwargs: may contain `metadata`."""
        return super().sharded_state_dict(model_sharded_state_dict, is_loading, **kwargs)

    def save_parameter_state(self, filename: str) -> None:
        """Calls save_parameter_state of each optimizer that updates shards; see DistributedOptimizer.

        With several such optimizers, the files are `filename`, `filename.1` and so on.
        """
        for index, one in self._with_shards():
            one.save_parameter_state(_numbered(filename, index))

    def load_parameter_state(self, filename: str, *, update_legacy_format: bool = False) -> None:
        """Loads the files written by save_parameter_state; see DistributedOptimizer."""
        for index, one in self._with_shards():
            one.load_parameter_state(_numbered(filename, index), update_legacy_format=update_legacy_format)

    def _with_shards(self) -> "list[tuple[int, HasParameterState]]":
        found = [one for one in self.chained_optimizers if isinstance(one, HasParameterState)]
        if not found:
            raise ValueError("no optimizer in the chain updates shards: use state_dict, which contains the whole state")
        return list(enumerate(found))

    def _update(self, scale: GradScale) -> None:
        if self._updates_itself:
            super()._update(scale)
            return
        self.mark_half_done()
        for one in self.chained_optimizers:
            one._update(scale)
        self.mark_whole()

    def _after_device_update(self) -> None:
        if self._updates_itself:
            super()._after_device_update()
            return
        for one in self.chained_optimizers:
            one._after_device_update()

    def _update_scale(self, found_inf: bool) -> None:
        # Optimizers that were built separately have separate scales with equal values.
        scalers = (one.grad_scaler for one in self.chained_optimizers[1:] if one.grad_scaler is not self.grad_scaler)
        for scaler in dict.fromkeys(scaler for scaler in scalers if scaler is not None):
            scaler.update(found_inf)
        super()._update_scale(found_inf)

    def _after_load(self) -> None:
        for one in self.chained_optimizers:
            one._after_load()


@runtime_checkable
class HasParameterState(Protocol):
    """An optimizer that updates shards and saves their state in files separate from its state_dict."""

    def save_parameter_state(self, filename: str) -> None: ...
    def load_parameter_state(self, filename: str, *, update_legacy_format: bool = False) -> None: ...


class _JoinedStats(GradStats):
    """Combines the gradient statistics of several optimizers, each computed over the ranks of that optimizer."""

    def __init__(self, every: Sequence[GradStats]) -> None:
        self._every = list(every)

    @property
    def is_updated(self) -> bool:
        return False

    def norm(self) -> Tensor:
        return _root_of_squares([one.norm() for one in self._every])

    def count_zeros(self) -> Tensor:
        return torch.stack([one.count_zeros() for one in self._every]).sum()

    def params_norm(self) -> float:
        return math.hypot(*(one.params_norm() for one in self._every))

    def norm_of(self, params: Iterable[nn.Parameter]) -> float:
        return self._every[0].norm_of(params)


def _root_of_squares(norms: Sequence[Tensor]) -> Tensor:
    # Taking the norm of a single norm may round it.
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(list(norms)), 2)


def _as_ours(one: MegatronOptimizer | torch.optim.Optimizer) -> MegatronOptimizer:
    if isinstance(one, MegatronOptimizer):
        return one
    if isinstance(one, torch.optim.Optimizer):
        return FP32Optimizer(one, OptimizerConfig(lr=one.defaults.get("lr", 0.0), clip_grad=0.0))
    raise TypeError(
        f"chained_optimizers contains a {type(one).__name__}: must be a MegatronOptimizer or a torch optimizer"
    )


def _check_chain(chained: Sequence[MegatronOptimizer]) -> None:
    if not chained:
        raise ValueError("chained_optimizers is empty: must contain at least one optimizer")
    settings: dict[str, list[float | bool]] = {
        "OptimizerConfig.clip_grad": [one.config.clip_grad for one in chained],
        "OptimizerConfig.log_num_zeros_in_grad": [one.config.log_num_zeros_in_grad for one in chained],
        "the loss scale": [float(one.get_loss_scale()) for one in chained],
    }
    for name, values in settings.items():
        if len(set(values)) > 1:
            raise ValueError(f"{name} of chained_optimizers is {values}: must be equal")
    if any(one.config.optimizer_in_backward for one in chained):
        raise ValueError(
            "OptimizerConfig.optimizer_in_backward is set in chained_optimizers: an optimizer that updates in "
            "backward cannot be chained, because it updates before the norm of all gradients is known"
        )


def _joined(chained: Sequence[MegatronOptimizer]) -> OptimizerParts:
    chunks = list(dict.fromkeys(chunk for one in chained for chunk in one._model_chunks))
    return OptimizerParts(
        [rule for one in chained for rule in one._rules],
        [run for one in chained for run in one._ranges],
        chunks,
        chained[0]._grad_stats if len(chained) == 1 else _JoinedStats([one._grad_stats for one in chained]),
        chained[0]._device_scale.device,
        {name: pieces for one in chained for name, pieces in one._pieces.items()},
        [logits for one in chained for logits in one._logits],
    )


def _numbered(filename: str, index: int) -> str:
    return f"{filename}.{index}" if index else filename


def _pieces_in(items: Iterable[ShardedTensor], param: nn.Parameter) -> list[LogicalPiece]:
    """Returns pieces of a dense parameter, one for each item of a model's sharded state that is a view of it."""
    first, size = param.data_ptr(), param.element_size()
    found = []
    for item in items:
        offset, rest = divmod(item.data.data_ptr() - first, size)
        if item.data.dtype == param.dtype and item.data.numel() and not rest and 0 <= offset < param.numel():
            shape, stride = tuple(item.data.shape), tuple(item.data.stride())
            found.append(LogicalPiece(item.key, shape, stride, offset, item.global_shape, item.global_offset))
    return found


# The device's decision whether a step updates; MegatronOptimizer.step decides on the host, bit-identically.


@dataclass(frozen=True)
class _Decision:
    """Decision of a step, on the device. is_discarded, found_inf: [], bool. grad_norm, divisor: [], fp64."""

    is_discarded: torch.Tensor
    found_inf: torch.Tensor
    grad_norm: torch.Tensor
    divisor: torch.Tensor

    @property
    def scale(self) -> GradScale:
        """GradScale for update rules."""
        return GradScale(self.divisor.float(), skip=(self.is_discarded | self.found_inf).float())

    def for_host(self, num_zeros: torch.Tensor | None) -> DeviceStep:
        """Packs the result for the host. num_zeros: [], int64, None if zeros are not counted."""
        zeros = torch.zeros_like(self.grad_norm) if num_zeros is None else num_zeros.double()
        return DeviceStep(torch.stack([self.is_discarded.double(), self.found_inf.double(), self.grad_norm, zeros]))


def _decide(
    total_norm: torch.Tensor, *, loss_scale: torch.Tensor, discard: torch.Tensor | None, clip_grad: float
) -> _Decision:
    """Decides on the device, without waiting, whether a step updates.

    total_norm: norm of the scaled gradients. loss_scale: the loss scale of these gradients. Both: [], fp64, on one
    device. discard: discards the step if any element is above 0: any shape, any dtype. clip_grad: norm to clip to; 0
    does not clip.
    """
    # Rounded as in read_norm_sync.
    scaled_norm = total_norm.float()
    found_inf = torch.isfinite(scaled_norm).logical_not()
    is_discarded = torch.zeros_like(found_inf) if discard is None else (discard > 0).any()
    grad_norm = scaled_norm.double() / loss_scale
    coefficient = clip_coefficient_on_device(clip_grad, grad_norm) if clip_grad else torch.ones_like(grad_norm)
    return _Decision(is_discarded, found_inf, grad_norm, divisor=loss_scale / coefficient)


# States for hooks on reduced gradients.


class _RunStates:
    """Provides each bucket's optimizer states to hooks on reduced gradients. rules: all rules of the optimizer."""

    def __init__(self, rules: Sequence[UpdateRule]) -> None:
        # Keys consist of the buffer object, which wrappers know, and the index of the bucket in it.
        self._found: dict[tuple[object, int], list[tuple[UpdateRule, FlatParamRange]]] = {}
        for rule in rules:
            for param_range in rule.ranges:
                self._found.setdefault((param_range.buffer, param_range.bucket), []).append((rule, param_range))
        for pairs in self._found.values():
            pairs.sort(key=lambda pair: pair[1].span.start)

    def states(self, place: ReleasedBucket) -> Sequence[RunState]:
        """Returns the states of a bucket, sorted by position.

        Tensors are fp32 or fp64: views if stored in that dtype, else copies.
        """
        start = place.buffer.owned_spans()[place.layout.index].start
        found = self._found.get((place.buffer, place.layout.index), [])
        return [state for rule, one in found for state in _states_of(one, rule, bucket_start=start)]


def _states_of(param_range: FlatParamRange, rule: UpdateRule, *, bucket_start: int) -> Iterator[RunState]:
    moments = rule.flat_state(param_range)
    for part, settings in rule.settings_in(param_range):
        yield RunState(
            Span(param_range.span.start - bucket_start + part.start, part.numel),
            settings,
            param_range.main.read(part.start, part.end),
            {name: stored.read(part.start, part.end) for name, stored in moments.items()},
        )
