"""MegatronOptimizer: one step over flat parameters, with loss scale, clipping and skipped steps.

The host decides whether a step updates, or the device, so that a graph can hold the step. Which parameters lie together
is in flat_params.py; the update rules are in adam.py and muon.py.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from megatron.core.device import default_device
from megatron.core.dist_checkpointing.flat_ranges import range_tensors
from megatron.core.dist_checkpointing.logical import LogicalPiece
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.distributed.grad_hooks import ReleasedBucket, RunState
from megatron.core.distributed.layout import Span
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
    "an error broke an earlier step off in the middle of its update, so parameters and optimizer states are no longer "
    "of one step: load a checkpoint"
)


@dataclass(frozen=True)
class _StepOutcome:
    """Numbers of a step. is_void: the caller said so, and nothing else counts."""

    is_void: bool
    found_inf: bool
    grad_norm: float
    num_zeros: float


@dataclass(frozen=True)
class DeviceStep:
    """Result of a step on the device, for the host; each replay of a graph with the step rewrites it.

    outcome: [4], fp64, on the device: void, found_inf, grad_norm and num_zeros.
    """

    outcome: torch.Tensor

    def read_sync(self) -> _StepOutcome:
        """NOTE: waits until the device has done the step."""
        is_void, found_inf, grad_norm, num_zeros = self.outcome.tolist()
        return _StepOutcome(bool(is_void), bool(found_inf), grad_norm, num_zeros)


@dataclass(frozen=True)
class _FlatState:
    """One of the things that are kept of a run."""

    kind: str
    stored: StoredFloats
    run: FlatParamRange

    def read(self) -> torch.Tensor:
        return self.stored.read(0, self.stored.numel)

    def tensors(self, flat: torch.Tensor, model_pieces: dict[str, list[LogicalPiece]]) -> list[ShardedTensor]:
        # Boxes by parameter: a run is a matter of this layout and must not show in a checkpoint.
        return [
            tensor
            for member in self.run.params
            for tensor in range_tensors(
                model_pieces[member.name], member.view_of(flat), start=member.start, prefix=state_prefix(self.kind)
            )
        ]


class MegatronOptimizer:
    """Common base of FP32Optimizer and Float16OptimizerWithFloat16Params. In a step:

    1. the norm of all gradients, which also tells whether any of them overflowed;
    2. if it is not finite: the loss scale backs off, and neither parameters, moments nor step count change;
    3. otherwise each rule divides by loss scale and clip factor while it updates its runs (fused: no pass of its own);
    4. 16-bit parameters are written from their fp32 masters.

    `step` decides 2 on the host, which waits for the norm. A graph holds step_on_device instead, which decides there:
    prepare_device_step, then that or a replay of it, then settle_step_sync come to the same bits as `step`.

    An update changes all runs or none: an error inside it leaves parameters and states of two steps, and until a
    checkpoint is loaded every later step and save is refused.

    grad_stats: of the gradients of `runs`. device: the model's; None: default_device(). State exists from the start, so
    that a run whose every step was skipped can be saved and resumed.
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
        # Copies of the lists: a caller that goes on building must not change what is stepped.
        self._rules = list(rules)
        self._runs = list(runs)
        self._model_chunks = list(model_chunks)
        # Chunks of a stage share one.
        self._gradient_orders = list(dict.fromkeys(chunk.launch_order for chunk in model_chunks))
        for order in self._gradient_orders:
            order.iteration.has_optimizer = True
        self._grad_stats = grad_stats
        # Why parameters and states are of two steps: from the beginning of an update to its end, and for good if an
        # error comes between.
        self._half_done: str | None = None
        # Wrappers hold it for no longer than this optimizer does.
        self._run_states = _RunStates(self._rules)
        for chunk in model_chunks:
            chunk.set_state_provider(self._run_states.states)
        # Here and not read from torch's state: a rank may have nothing to train, and steps with the others.
        self._num_steps = 0
        # Persistent, so that graphs multiply losses and divide gradients by the scale of their replay.
        self._device_scale = torch.full((), self._loss_scale, dtype=torch.float64, device=device or default_device())
        # What a graph has taken as plain numbers; None before the first step on the device.
        self._decays_on_device: list[float] | None = None

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer; the first of several."""
        return self._rules[0].optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The torch optimizers' groups; a schedule writes `lr` and `weight_decay` into them."""
        return [group for rule in self._rules for group in rule.optimizer.param_groups]

    @property
    def decoupled_learning_rate(self) -> float | None:
        """Current learning rate of the parameters of --decoupled-lr; None without it."""
        return next((group["lr"] for group in self.param_groups if group.get("is_decoupled_lr")), None)

    def zero_grad(self) -> None:
        """Forgets all gradients; call before the first microbatch."""
        for chunk in self._model_chunks:
            # Not by `param.grad = None`: gradients live in flat buffers, whose memory is kept.
            chunk.zero_grad_buffer(caller=self)

    def get_loss_scale(self) -> torch.Tensor:
        """Factor of the loss: [], fp32, on the CPU."""
        # A tensor because scripts written for Megatron call .item() on it.
        return torch.tensor(self._loss_scale, dtype=torch.float32)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss, any shape, floating point, times the loss scale, if there is one: same shape, then fp32.

        The scale is read on the device: in a graph, it is that of the replay.
        """
        # In fp32, or a scaled fp16 loss would overflow before its gradients do.
        return loss if self.grad_scaler is None else loss.float() * self._device_scale.float()

    @record_function("MegatronOptimizer.step")
    def step(self) -> tuple[bool, float, float | None]:
        """Updates the parameters from reduced gradients: (whether it did, gradient norm, zeros if configured).

        The norm is that of the unscaled gradients before clipping. Not updated means that a gradient was not finite.
        Collective over all ranks that hold parts of the model. An error before the update changes nothing; after one
        inside it parameters and states are of two steps, and this raises RuntimeError until a checkpoint is loaded. So
        it does without finish_grad_sync, and RemoteRankError where another rank has called reset_iteration since.
        """
        self._prepare_step()
        # Before anything of this rank changes: others may have caught an error since their gradients were reduced.
        for order in self._gradient_orders:
            order.step()
        # One pass for both: a norm is finite only if every gradient is.
        with self.config.timers("optimizer-clip-main-grad", log_level=1):
            scaled_norm = read_norm_sync(self._grad_stats.norm())
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
        """Fills in the learning rates; call before step_on_device and before each replay of it.

        Raises RuntimeError and ValueError where `step` would, ValueError where the graph has another weight decay.
        """
        self._prepare_step()
        decays = self._weight_decays()
        if self._decays_on_device not in (None, decays):
            raise ValueError(
                f"weight decays of the parameter groups were {self._decays_on_device} in the first step on the device "
                f"and are {decays}: graphs keep the first, so weight_decay must not change (or step without a graph)"
            )

    @record_function("MegatronOptimizer.step_on_device")
    def step_on_device(self, void: torch.Tensor | None = None) -> DeviceStep:
        """A step of which the device alone knows whether it updates; for graphs, as it never waits for the device.

        void: any shape and dtype, on the device, alike on all ranks: where any of it is above 0, nothing changes. Call
        it after finish_grad_sync and CollectiveScheduler.step, when no gather is under way. Collective as `step`.
        Raises ValueError for settings that need the host.
        """
        self.config.validate_device_step()
        self._decays_on_device = self._weight_decays()
        decision = _decide(
            self._grad_stats.norm(), loss_scale=self._device_scale, void=void, clip_grad=self.config.clip_grad
        )
        # Before the update, as in `step`.
        num_zeros = self._grad_stats.count_zeros() if self.config.log_num_zeros_in_grad else None
        with self._whole_update():
            self._step_ranges(decision.scale, self._runs, rules=self._rules)
        return decision.for_host(num_zeros)

    def forget_broken_capture(self) -> None:
        """Restores the state after a failed capture of step_on_device: nothing was done, so parameters are whole."""
        self._make_whole()

    def settle_step_sync(self, done: DeviceStep) -> tuple[bool, float, float | None]:
        """Takes note of a step on the device, or of a replay of it, and returns what `step` does; once for each.

        Scale, step count and sharded parameters are then as after `step`; after a void step they are as before. NOTE:
        waits until the device has done the step. Collective where `step` gathers parameters.
        """
        outcome = done.read_sync()
        if outcome.is_void:
            return False, outcome.grad_norm, None
        self._update_scale(outcome.found_inf)
        if outcome.found_inf:
            return False, outcome.grad_norm, None
        self._num_steps += 1
        self._after_device_update()
        return True, outcome.grad_norm, outcome.num_zeros if self.config.log_num_zeros_in_grad else None

    # The parts of an update; UpdatesInBackward calls them before the step.

    def prepare_update(self) -> None:
        """Prepares an update before it changes anything: raises where it must not run, and copies the learning rates.

        Raises RuntimeError while parameters and states are of two steps, ValueError where a parameter was moved.
        """
        self._check_whole()
        # Else the kernel would update memory that the model no longer reads, silently.
        for run in self._runs:
            run.check_attached()
        for rule in self._rules:
            rule.refresh_rates()

    def update_ranges(
        self, scale: GradScale, runs: Iterable[FlatParamRange], *, rules: Sequence[UpdateRule] | None = None
    ) -> None:
        """Steps runs by their scaled gradients; rules: those that step now, None for all."""
        chosen = frozenset(runs)
        for rule in self._rules if rules is None else rules:
            rule.update(scale, chosen)

    def mark_half_done(self, error: str) -> None:
        """Records that parameters and states are of two steps from here on; error: the message of what is refused."""
        self._half_done = error

    # Parameters and states.

    def params_norm(self) -> float:
        """2-norm of all parameters as they are stepped (masters), summed in fp64. Collective, as `step`."""
        return self._grad_stats.params_norm()

    def norm_of(self, params: Iterable[nn.Parameter]) -> float:
        """2-norm of parameters that it does not step, any shapes and dtypes, summed in fp64. Collective, as `step`."""
        return self._grad_stats.norm_of(params)

    def reload_model_params(self) -> None:
        """Takes the fp32 masters from the model's parameters, after weights alone were loaded."""
        for run in self._runs:
            run.take_model()

    def sharded_state(self, model_pieces: dict[str, list[LogicalPiece]]) -> list[ShardedTensor]:
        """Moments and masters as boxes to save, all as they are read, fp32; model_pieces: by parameter name.

        Of this rank's shard alone. What is kept as fp32 is not copied. Raises RuntimeError where `step` would.
        """
        self._check_whole()
        return [tensor for state in self._flat_states() for tensor in state.tensors(state.read(), model_pieces)]

    @contextmanager
    def loading(self, model_pieces: dict[str, list[LogicalPiece]]) -> Iterator[list[ShardedTensor]]:
        """The boxes of sharded_state to load in place; what is kept in another form takes them when the block ends."""
        states = self._flat_states()
        values = [state.read() for state in states]
        yield [tensor for state, flat in zip(states, values) for tensor in state.tensors(flat, model_pieces)]
        for state, flat in zip(states, values):
            state.stored.write(0, flat)
        for run in self._runs:
            # A copy without a master has no entry of its own in the checkpoint.
            if run.is_copy and not run.has_master:
                run.take_model()
        self._make_whole()

    @property
    def state_bytes(self) -> dict[str, int]:
        """Memory of what it keeps beside parameters and gradients, of this rank: of `masters` and of `moments` on the
        device, and of both in the host's memory, host_states.
        """
        by_run = {run: rule.flat_state(run).values() for rule in self._rules for run in rule.runs}
        found = {"masters": 0, "moments": 0, "host_states": 0}
        for run in self._runs:
            found["host_states" if run.on_host else "masters"] += run.main.num_bytes if run.is_copy else 0
            found["host_states" if run.on_host else "moments"] += sum(stored.num_bytes for stored in by_run[run])
        return found

    def _flat_states(self) -> list[_FlatState]:
        states = []
        by_run = {run: rule.flat_state(run) for rule in self._rules for run in rule.runs}
        for run in self._runs:
            # Without a master, the model's own weights in the checkpoint are what was stepped.
            masters = {MASTERS: run.main} if run.has_master else {}
            states += [_FlatState(kind, stored, run) for kind, stored in {**by_run[run], **masters}.items()]
        return states

    def state_dict(self) -> dict[str, Any]:
        """Step count and loss scale, the same on all ranks, JSON values; tensors are in sharded_state."""
        return {
            "step": self._num_steps,
            "grad_scaler": None if self.grad_scaler is None else self.grad_scaler.state_dict(),
            **self._grad_stats.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from `state_dict`; the tensors of sharded_state are loaded apart."""
        self._num_steps = state_dict["step"]
        for count in self._step_counts():
            count.fill_(self._num_steps)
        # A run may change its precision between save and load.
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
        # No factor would repair such a gradient, and a step that is skipped needs none.
        if self.config.clip_grad == 0 or not math.isfinite(grad_norm):
            return 1.0
        return clip_coefficient(self.config.clip_grad, grad_norm)

    def _update(self, scale: GradScale) -> None:
        with self._whole_update():
            self._step_ranges(scale, self._runs, rules=self._rules)
        self._note_update()

    def _after_device_update(self) -> None:
        """Does on the host the rest of an update that the device has made."""
        self._note_update()

    def _prepare_step(self) -> None:
        if not self._grad_stats.is_updated:
            self.prepare_update()

    def _step_ranges(self, scale: GradScale, runs: Iterable[FlatParamRange], *, rules: Sequence[UpdateRule]) -> None:
        """Updates runs in a step, unless they were updated in backward; call it inside `_whole_update`."""
        if not self._grad_stats.is_updated:
            self.update_ranges(scale, runs, rules=rules)

    @contextmanager
    def _whole_update(self) -> Iterator[None]:
        """Surrounds an update; after an error inside, parameters and states count as half updated."""
        self.mark_half_done(_BROKEN_UPDATE)
        yield
        self._half_done = None

    def _make_whole(self) -> None:
        """Records that parameters and states were rewritten, so that an aborted update no longer matters."""
        self._half_done = None
        self._grad_stats.forget()

    def _check_whole(self) -> None:
        """Raises RuntimeError where parameters and states are of two steps."""
        if self._half_done is not None:
            raise RuntimeError(self._half_done)

    def _note_update(self) -> None:
        for chunk in self._model_chunks:
            chunk.note_update()

    def _step_counts(self) -> list[torch.Tensor]:
        # One a run of rules that count, all moved together.
        return [count for rule in self._rules for count in rule.step_counts()]


class FP32Optimizer(MegatronOptimizer):
    """Steps the model's own fp32 (or fp64) parameters."""


class Float16OptimizerWithFloat16Params(MegatronOptimizer):
    """Steps fp32 masters of 16-bit parameters; fp32 parameters among them are stepped themselves."""


class ChainedOptimizer(MegatronOptimizer):
    """Steps some parameters by one torch optimizer, the rest by another, under one norm and loss scale."""

    @property
    def chained_optimizers(self) -> list[torch.optim.Optimizer]:
        """The torch optimizers, in the order of their parameter groups."""
        return [rule.optimizer for rule in self._rules]


# The decision of a step on its device; MegatronOptimizer.step decides on the host, to the same bits.


@dataclass(frozen=True)
class _Decision:
    """Whether and how a step updates. is_void, found_inf: [], bool. grad_norm, divisor: [], fp64. All on the device."""

    is_void: torch.Tensor
    found_inf: torch.Tensor
    grad_norm: torch.Tensor
    divisor: torch.Tensor

    @property
    def scale(self) -> GradScale:
        """The GradScale for update rules."""
        return GradScale(self.divisor.float(), skip=(self.is_void | self.found_inf).float())

    def for_host(self, num_zeros: torch.Tensor | None) -> DeviceStep:
        """Result for the host; num_zeros: [], int64, None where they are not counted."""
        zeros = torch.zeros_like(self.grad_norm) if num_zeros is None else num_zeros.double()
        return DeviceStep(torch.stack([self.is_void.double(), self.found_inf.double(), self.grad_norm, zeros]))


def _decide(
    total_norm: torch.Tensor, *, loss_scale: torch.Tensor, void: torch.Tensor | None, clip_grad: float
) -> _Decision:
    """From the norm of scaled gradients, [], fp64, and their scale, [], fp64, on one device; reads neither.

    void: the step is void where any of it is above 0: any shape, any dtype. clip_grad: 0 does not clip.
    """
    # Rounded as read_norm_sync rounds it.
    scaled_norm = total_norm.float()
    found_inf = torch.isfinite(scaled_norm).logical_not()
    is_void = torch.zeros_like(found_inf) if void is None else (void > 0).any()
    grad_norm = scaled_norm.double() / loss_scale
    coefficient = clip_coefficient_on_device(clip_grad, grad_norm) if clip_grad else torch.ones_like(grad_norm)
    return _Decision(is_void, found_inf, grad_norm, divisor=loss_scale / coefficient)


# States for hooks on reduced gradients.


class _RunStates:
    """States of each bucket's parameters, for hooks on reduced gradients; rules: those of the optimizer."""

    def __init__(self, rules: Sequence[UpdateRule]) -> None:
        # By what wrappers know of a run: its buffer, the very object, and the place of its bucket there.
        self._found: dict[tuple[object, int], list[tuple[UpdateRule, FlatParamRange]]] = {}
        for rule in rules:
            for run in rule.runs:
                self._found.setdefault((run.buffer, run.bucket), []).append((rule, run))
        for pairs in self._found.values():
            pairs.sort(key=lambda pair: pair[1].span.start)

    def states(self, place: ReleasedBucket) -> Sequence[RunState]:
        """States of a bucket in the order of places: fp32 or fp64, views of what is stored so, else copies."""
        start = place.buffer.owned_spans()[place.layout.index].start
        found = self._found.get((place.buffer, place.layout.index), [])
        return [state for rule, run in found for state in _states_of(run, rule, bucket_start=start)]


def _states_of(run: FlatParamRange, rule: UpdateRule, *, bucket_start: int) -> Iterator[RunState]:
    moments = rule.flat_state(run)
    for part, settings in rule.settings_in(run):
        yield RunState(
            Span(run.span.start - bucket_start + part.start, part.numel),
            settings,
            run.main.read(part.start, part.end),
            {name: stored.read(part.start, part.end) for name, stored in moments.items()},
        )
