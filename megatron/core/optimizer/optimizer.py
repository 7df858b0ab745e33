"""MegatronOptimizer: a step over flat parameters, with loss scale, clipping and skipped steps.

Either the host decides whether a step updates, or the device, so that a graph can capture the step. flat_params.py
joins parameters; the update rules are in adam.py and muon.py.

[Note: outcomes of a step] Skipped: `found_inf`, a gradient is not finite; nothing is updated but the loss scale, which
backs off. Discarded: the caller's `discard` tells the device to ignore the step (experts or their stash have
overflowed); nothing is updated, the loss scale neither. Half done: an error interrupted an update, so that parameters
and states are of two steps. Whole: they are of one step.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron.core.device import default_device
from megatron.core.device.trace_ranges import trace_range
from megatron.core.dist_checkpointing.mapping import ShardedTensor, range_tensors
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
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
from megatron.core.optimizer.flat_params import FlatParamRange
from megatron.core.optimizer.grad_scaler import GradScaler
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.state_dict import MASTERS, state_prefix
from megatron.core.optimizer.stored_floats import StoredFloats

_BROKEN_UPDATE = (
    "an error interrupted the update of an earlier step, so parameters and optimizer states are no longer of one step: "
    "load a checkpoint"
)


@dataclass(frozen=True)
class _StepOutcome:
    """Numbers of a step. is_discarded: the other numbers have no meaning; see [Note: outcomes of a step]."""

    is_discarded: bool
    found_inf: bool
    grad_norm: float
    num_zeros: float


@dataclass(frozen=True)
class DeviceStep:
    """Result of a step on the device, for the host; each replay of a graph with the step overwrites it.

    outcome: [4], fp64, on the device: is_discarded, found_inf, grad_norm and num_zeros.
    """

    outcome: torch.Tensor

    def read_sync(self) -> _StepOutcome:
        """Returns the numbers of the step. NOTE: waits until the device has run the step."""
        is_discarded, found_inf, grad_norm, num_zeros = self.outcome.tolist()
        return _StepOutcome(bool(is_discarded), bool(found_inf), grad_norm, num_zeros)


@dataclass(frozen=True)
class _FlatState:
    """One kind of state of a flat range."""

    kind: str
    stored: StoredFloats
    param_range: FlatParamRange

    def read(self) -> torch.Tensor:
        return self.stored.read(0, self.stored.numel)

    def tensors(self, flat: torch.Tensor, model_pieces: dict[str, list[LogicalPiece]]) -> list[ShardedTensor]:
        # By parameter, because flat ranges depend on the layout and must not affect checkpoints.
        return [
            tensor
            for member in self.param_range.params
            for tensor in range_tensors(
                model_pieces[member.name], member.view_of(flat), start=member.start, prefix=state_prefix(self.kind)
            )
        ]


class MegatronOptimizer:
    """Common base of FP32Optimizer and Float16OptimizerWithFloat16Params. In a step:

    1. the norm of all gradients is computed, which also shows whether any of them overflowed;
    2. if it is not finite: the loss scale backs off, and neither parameters, moments nor step count change;
    3. otherwise each rule divides by loss scale and clip factor inside its update, without a pass of its own;
    4. 16-bit parameters are written from their fp32 masters.

    Whether 2 or 3 follows is decided on the host by `step`, which waits for the norm, and on the device by
    step_on_device, which a graph captures. prepare_device_step, step_on_device or a replay of it, and settle_step_sync
    together give the same bits as `step`.

    An error inside an update leaves it half done. Every later step and save is then refused until a checkpoint is
    loaded. See [Note: outcomes of a step].

    grad_stats: computes the norm of the gradients of `runs`, the flat ranges. device: the model's; None means
    default_device(). State exists from the start, so that training can be saved and resumed even if every step so far
    was skipped.
    """

    def __init__(
        self,
        rules: Sequence[UpdateRule],
        config: OptimizerConfig,
        *,
        runs: Sequence[FlatParamRange],
        model_chunks: Sequence[_BaseDataParallel],
        grad_stats: GradStats,
        grad_scaler: GradScaler | None = None,
        device: torch.device | None = None,
    ):
        self.config = config
        self.grad_scaler = grad_scaler
        # Copies, so that later changes of the caller's lists have no effect.
        self._rules = list(rules)
        self._runs = list(runs)
        self._model_chunks = list(model_chunks)
        # Chunks of a stage share a scheduler.
        self._schedulers = list(dict.fromkeys(chunk.launch_order for chunk in model_chunks))
        for scheduler in self._schedulers:
            scheduler.iteration.has_optimizer = True
        self._grad_stats = grad_stats
        # The error to raise while an update is half done: during it, and after an error in it.
        self._half_done: str | None = None
        # Wrappers refer to it weakly, so it lives as long as this optimizer.
        self._run_states = _RunStates(self._rules)
        for chunk in model_chunks:
            chunk.set_state_provider(self._run_states.states)
        # Not read from torch's state, because a rank without trained parameters counts steps too.
        self._num_steps = 0
        # Persistent, so that graphs multiply losses and divide gradients by the scale of their replay.
        self._device_scale = torch.full((), self._loss_scale, dtype=torch.float64, device=device or default_device())
        # Weight decays that a graph has captured as plain numbers; None before the first step on the device.
        self._decays_on_device: list[float] | None = None

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer, or the first of several."""
        return self._rules[0].optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The torch optimizers' groups; a schedule writes `lr` and `weight_decay` into them."""
        return [group for rule in self._rules for group in rule.optimizer.param_groups]

    @property
    def decoupled_learning_rate(self) -> float | None:
        """Current learning rate of parameters with --decoupled-lr; None without that flag."""
        return next((group["lr"] for group in self.param_groups if group.get("is_decoupled_lr")), None)

    def zero_grad(self) -> None:
        """Drops all gradients; call before the first microbatch."""
        for chunk in self._model_chunks:
            # Not `param.grad = None`, because gradients are in flat buffers, whose memory is persistent.
            chunk.zero_grad_buffer(caller=self)

    def get_loss_scale(self) -> torch.Tensor:
        """Returns the factor of the loss: [], fp32, on the CPU."""
        # A tensor, because scripts written for Megatron call .item() on it.
        return torch.tensor(self._loss_scale, dtype=torch.float32)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiplies a loss, any shape, floating point, by the loss scale, if any: same shape, then fp32.

        Reads the scale on the device, so that a graph uses the one of the replay.
        """
        # In fp32, because a scaled fp16 loss would overflow before its gradients do.
        return loss if self.grad_scaler is None else loss.float() * self._device_scale.float()

    @trace_range("MegatronOptimizer.step")
    def step(self) -> tuple[bool, float, float | None]:
        """Updates the parameters from reduced gradients; returns (is_updated, grad_norm, num_zeros).

        is_updated is False if a gradient was not finite. grad_norm is that of unscaled gradients before clipping.
        num_zeros is None unless log_num_zeros_in_grad is set. Collective over all ranks that hold parts of the model.
        An error before the update changes nothing. Raises RuntimeError without finish_grad_sync, and after an error
        inside an update, until a checkpoint is loaded; RemoteRankError if another rank has called reset_iteration.
        """
        self._prepare_step()
        # Before any change on this rank, because others may have caught an error after the reduction of gradients.
        for scheduler in self._schedulers:
            scheduler.step()
        # One pass finds norm and overflow, because the norm is finite only if every gradient is. The norm has the same
        # bits on all ranks, so they decide alike without a message. `_decide` decides the same way in a graph.
        with self.config.timers("optimizer-clip-main-grad", log_level=1):
            scaled_norm = read_norm_sync(self._grad_stats.norm())
        # Also lowers the loss scale, so another reason to skip, such as a limit of the norm, needs a flag of its own.
        found_inf = not math.isfinite(scaled_norm)
        grad_norm = scaled_norm / self._loss_scale
        divisor = self._loss_scale / self._clip_coefficient(grad_norm)
        # After the divisor: these gradients carry the old scale.
        self._update_scale(found_inf)
        if found_inf:
            self._grad_stats.skip_step(grad_norm)
            return False, grad_norm, None
        # Before the update, which may overwrite gradients with unscaled ones.
        with self.config.timers("optimizer-count-zeros", log_level=1):
            num_zeros = read_count_sync(self._grad_stats.count_zeros()) if self.config.log_num_zeros_in_grad else None
        with self.config.timers("optimizer-inner-step", log_level=1):
            self._num_steps += 1
            self._update(GradScale(divisor))
        self._grad_stats.end_step(grad_norm)
        return True, grad_norm, num_zeros

    def prepare_device_step(self) -> None:
        """Prepares an update on the device; call before step_on_device and before each replay of it.

        Checks what `step` checks, and copies the learning rates to the device (prepare_update, refresh_rates of each
        rule). Raises the RuntimeError and ValueError of `step`, and ValueError if weight decay has changed since the
        capture.
        """
        self._prepare_step()
        decays = self._weight_decays()
        if self._decays_on_device not in (None, decays):
            raise ValueError(
                f"weight decays of the parameter groups were {self._decays_on_device} in the first step on the device "
                f"and are {decays}: graphs keep the first, so weight_decay must not change (or step without a graph)"
            )

    @trace_range("MegatronOptimizer.step_on_device")
    def step_on_device(self, discard: torch.Tensor | None = None) -> DeviceStep:
        """Runs a step in which the device decides whether to update; for graphs, since it never waits for the device.

        discard: discards the step if any element is above 0: any shape and dtype, on the device, the same on all
        ranks.
        Call it after finish_grad_sync and CollectiveScheduler.step, without a gather in flight. Collective, like
        `step`. Raises ValueError for settings that need the host.
        """
        self.config.validate_device_step()
        self._decays_on_device = self._weight_decays()
        decision = _decide(
            self._grad_stats.norm(), loss_scale=self._device_scale, discard=discard, clip_grad=self.config.clip_grad
        )
        # Before the update, as in `step`.
        num_zeros = self._grad_stats.count_zeros() if self.config.log_num_zeros_in_grad else None
        with self._whole_update():
            self._step_ranges(decision.scale, self._runs, rules=self._rules)
        return decision.for_host(num_zeros)

    def forget_broken_capture(self) -> None:
        """Allows steps again after a failed capture of step_on_device, which has changed no parameter."""
        self._make_whole()

    def settle_step_sync(self, done: DeviceStep) -> tuple[bool, float, float | None]:
        """Completes a step on the device on the host and returns the result of `step`; call once for each replay.

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

    # Parts of an update, which UpdatesInBackward calls before the step.

    def prepare_update(self) -> None:
        """Checks that an update may run, and copies the learning rates.

        Raises RuntimeError if parameters and states are of two steps, ValueError if a parameter was moved.
        """
        self._check_whole()
        # Without this check the kernel would silently update memory that the model no longer reads.
        for param_range in self._runs:
            param_range.check_attached()
        for rule in self._rules:
            rule.refresh_rates()

    def update_ranges(
        self, scale: GradScale, runs: Iterable[FlatParamRange], *, rules: Sequence[UpdateRule] | None = None
    ) -> None:
        """Steps flat ranges by their scaled gradients; rules: the rules that step now, None for all."""
        chosen = frozenset(runs)
        for rule in self._rules if rules is None else rules:
            rule.update(scale, chosen)

    def mark_half_done(self, error: str) -> None:
        """Records that an update is half done; error: the message of errors until parameters and states are whole."""
        self._half_done = error

    # Parameters and states.

    def params_norm(self) -> float:
        """Returns the 2-norm of all parameters as they are stepped (masters), in fp64. Collective, like `step`."""
        return self._grad_stats.params_norm()

    def norm_of(self, params: Iterable[nn.Parameter]) -> float:
        """Returns the 2-norm of unstepped parameters, any shapes and dtypes, in fp64. Collective, like `step`."""
        return self._grad_stats.norm_of(params)

    def reload_model_params(self) -> None:
        """Sets the fp32 masters to the model's parameters, after a load of weights alone."""
        for param_range in self._runs:
            param_range.take_model()

    def sharded_state(self, model_pieces: dict[str, list[LogicalPiece]]) -> list[ShardedTensor]:
        """Returns moments and masters of this rank's shard as boxes to save, fp32; model_pieces: by parameter name.

        State that is stored as fp32 is not copied. Raises RuntimeError if parameters and states are of two steps.
        """
        self._check_whole()
        return [tensor for state in self._flat_states() for tensor in state.tensors(state.read(), model_pieces)]

    @contextmanager
    def loading(self, model_pieces: dict[str, list[LogicalPiece]]) -> Iterator[list[ShardedTensor]]:
        """Yields the boxes of sharded_state to load in place; other forms than fp32 are written when the block ends."""
        states = self._flat_states()
        values = [state.read() for state in states]
        yield [tensor for state, flat in zip(states, values) for tensor in state.tensors(flat, model_pieces)]
        for state, flat in zip(states, values):
            state.stored.write(0, flat)
        for param_range in self._runs:
            # A copy that is not a master has no entry in the checkpoint.
            if param_range.is_copy and not param_range.has_master:
                param_range.take_model()
        self._make_whole()

    @property
    def state_bytes(self) -> dict[str, int]:
        """Bytes of this rank's state: `masters` and `moments` on the device, and both on the host as `host_states`."""
        by_range = {one: rule.flat_state(one).values() for rule in self._rules for one in rule.runs}
        found = {"masters": 0, "moments": 0, "host_states": 0}
        for param_range in self._runs:
            masters, moments = ("host_states",) * 2 if param_range.on_host else ("masters", "moments")
            found[masters] += param_range.main.num_bytes if param_range.is_copy else 0
            found[moments] += sum(stored.num_bytes for stored in by_range[param_range])
        return found

    def _flat_states(self) -> list[_FlatState]:
        states = []
        by_range = {one: rule.flat_state(one) for rule in self._rules for one in rule.runs}
        for param_range in self._runs:
            # Without masters, the model's weights are stepped, which the checkpoint has already.
            masters = {MASTERS: param_range.main} if param_range.has_master else {}
            states += [
                _FlatState(kind, stored, param_range) for kind, stored in {**by_range[param_range], **masters}.items()
            ]
        return states

    def state_dict(self) -> dict[str, Any]:
        """Returns step count and loss scale, the same on all ranks, as JSON values; tensors are in sharded_state."""
        return {
            "step": self._num_steps,
            "grad_scaler": None if self.grad_scaler is None else self.grad_scaler.state_dict(),
            **self._grad_stats.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from `state_dict`; the tensors of sharded_state are loaded separately."""
        self._num_steps = state_dict["step"]
        for count in self._step_counts():
            count.fill_(self._num_steps)
        # The precision may change between save and load.
        if self.grad_scaler is not None and state_dict["grad_scaler"] is not None:
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])
            self._device_scale.fill_(self._loss_scale)
        self._grad_stats.load_state_dict(state_dict)

    @property
    def _loss_scale(self) -> float:
        return 1.0 if self.grad_scaler is None else self.grad_scaler.scale

    def _update_scale(self, found_inf: bool) -> None:
        if self.grad_scaler is not None:
            self.grad_scaler.update(found_inf)
            self._device_scale.fill_(self._loss_scale)

    def _weight_decays(self) -> list[float]:
        return [group["weight_decay"] for group in self.param_groups]

    def _clip_coefficient(self, grad_norm: float) -> float:
        # A non-finite gradient cannot be clipped, and its step is skipped.
        if self.config.clip_grad == 0 or not math.isfinite(grad_norm):
            return 1.0
        return clip_coefficient(self.config.clip_grad, grad_norm)

    def _update(self, scale: GradScale) -> None:
        with self._whole_update():
            self._step_ranges(scale, self._runs, rules=self._rules)
        self._note_update()

    def _after_device_update(self) -> None:
        """Does the host's part of an update that the device has made."""
        self._note_update()

    def _prepare_step(self) -> None:
        if not self._grad_stats.is_updated:
            self.prepare_update()

    def _step_ranges(self, scale: GradScale, ranges: Iterable[FlatParamRange], *, rules: Sequence[UpdateRule]) -> None:
        """Updates ranges in a step, unless they were updated in backward; call it inside `_whole_update`."""
        if not self._grad_stats.is_updated:
            self.update_ranges(scale, ranges, rules=rules)

    @contextmanager
    def _whole_update(self) -> Iterator[None]:
        """Surrounds an update; after an error inside, the update is half done."""
        self.mark_half_done(_BROKEN_UPDATE)
        yield
        self._half_done = None

    def _make_whole(self) -> None:
        """Records that parameters and states were rewritten, so that an aborted update no longer matters."""
        self._half_done = None
        self._grad_stats.forget()

    def _check_whole(self) -> None:
        """Raises RuntimeError if an update is half done."""
        if self._half_done is not None:
            raise RuntimeError(self._half_done)

    def _note_update(self) -> None:
        for chunk in self._model_chunks:
            chunk.note_update()

    def _step_counts(self) -> list[torch.Tensor]:
        # One for each range of a rule that counts; all have the same value.
        return [count for rule in self._rules for count in rule.step_counts()]


class FP32Optimizer(MegatronOptimizer):
    """Steps the model's own fp32 (or fp64) parameters."""


class Float16OptimizerWithFloat16Params(MegatronOptimizer):
    """Steps fp32 masters of 16-bit parameters; fp32 parameters among them are stepped themselves."""


class ChainedOptimizer(MegatronOptimizer):
    """Steps parameters by several torch optimizers with a common norm and loss scale."""

    @property
    def chained_optimizers(self) -> list[torch.optim.Optimizer]:
        """The torch optimizers, in the order of their parameter groups."""
        return [rule.optimizer for rule in self._rules]


# The device's decision whether a step updates; MegatronOptimizer.step decides on the host, with the same bits.


@dataclass(frozen=True)
class _Decision:
    """Decision of a step. is_discarded, found_inf: [], bool. grad_norm, divisor: [], fp64. All on the device."""

    is_discarded: torch.Tensor
    found_inf: torch.Tensor
    grad_norm: torch.Tensor
    divisor: torch.Tensor

    @property
    def scale(self) -> GradScale:
        """The GradScale for update rules."""
        return GradScale(self.divisor.float(), skip=(self.is_discarded | self.found_inf).float())

    def for_host(self, num_zeros: torch.Tensor | None) -> DeviceStep:
        """Returns the result for the host; num_zeros: [], int64, None if zeros are not counted."""
        zeros = torch.zeros_like(self.grad_norm) if num_zeros is None else num_zeros.double()
        return DeviceStep(torch.stack([self.is_discarded.double(), self.found_inf.double(), self.grad_norm, zeros]))


def _decide(
    total_norm: torch.Tensor, *, loss_scale: torch.Tensor, discard: torch.Tensor | None, clip_grad: float
) -> _Decision:
    """Decides from the norm of scaled gradients and the loss scale, [], fp64 each, on one device, without waiting.

    discard: discards the step if any element is above 0: any shape, any dtype. clip_grad: 0 does not clip.
    """
    # Rounded as read_norm_sync rounds it.
    scaled_norm = total_norm.float()
    found_inf = torch.isfinite(scaled_norm).logical_not()
    is_discarded = torch.zeros_like(found_inf) if discard is None else (discard > 0).any()
    grad_norm = scaled_norm.double() / loss_scale
    coefficient = clip_coefficient_on_device(clip_grad, grad_norm) if clip_grad else torch.ones_like(grad_norm)
    return _Decision(is_discarded, found_inf, grad_norm, divisor=loss_scale / coefficient)


# States for hooks on reduced gradients.


class _RunStates:
    """Provides optimizer states of each bucket to hooks on reduced gradients; rules: the optimizer's."""

    def __init__(self, rules: Sequence[UpdateRule]) -> None:
        # Keys are known to wrappers: the buffer object and the index of the bucket in it.
        self._found: dict[tuple[object, int], list[tuple[UpdateRule, FlatParamRange]]] = {}
        for rule in rules:
            for param_range in rule.runs:
                self._found.setdefault((param_range.buffer, param_range.bucket), []).append((rule, param_range))
        for pairs in self._found.values():
            pairs.sort(key=lambda pair: pair[1].span.start)

    def states(self, place: ReleasedBucket) -> Sequence[RunState]:
        """Returns states of a bucket, sorted by place: fp32 or fp64, views of storage in that dtype, else copies."""
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
