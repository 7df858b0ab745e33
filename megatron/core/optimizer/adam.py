"""Adam over flat ranges of numbers in any storage form: its state, one step, and FusedRule for AdamW and SGD.

adam_step updates whole ranges, for DistributedFusedAdam and for the rules of MegatronOptimizer. FusedRule updates state
on the host in chunks (_step_chunk) while other chunks are copied; both use the same kernels. Norm, clipping and loss
scale are handled in optimizer.py for MegatronOptimizer, and by ShardScaling (fused_adam_grads.py) for
DistributedFusedAdam. Storage forms are in stored_floats.py.

[Note: ends of parameters] A vectorised kernel computes the elements after the last whole vector of a tensor one by one,
and rounds them differently. To be bit-identical to torch.optim, the kernel must see where each parameter ends. The
`ranges` of an AdamUpdate are therefore updated as separate tensors, each of which starts at a multiple of 64 elements.
"""

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any, Protocol

import torch
from torch.optim.sgd import sgd

from megatron.core.device import CopyStream, host_bytes
from megatron.core.distributed.layout import Span
from megatron.core.optimizer.flat_params import FlatParamRange
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_groups import GroupKey
from megatron.core.optimizer.stored_floats import (
    BLOCK,
    Plain,
    Rounded,
    ScaledHalf,
    StoredFloats,
    WithRemainder,
    piece_elements,
    zeros_beside,
)

HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON:
    from megatron.core.optimizer import triton_adam

_NARROW = (torch.float16, torch.bfloat16)
# Names of the moments in checkpoints, which torch.optim's Adam and SGD also use.
EXP_AVG, EXP_AVG_SQ, _MOMENTUM = "exp_avg", "exp_avg_sq", "momentum_buffer"
# Elements in one copy to or from the host, enough to hide the cost of its launch; a multiple of 64.
HOST_CHUNK = 1 << 20


# State.


class Masters(Enum):
    """Storage of the masters: the high-precision numbers that are updated and then rounded to the parameters."""

    # No masters: the parameters themselves are updated.
    NONE = auto()
    # A copy of the parameters in the dtype of the states.
    COPY = auto()
    # For bf16 parameters, the lower halves of fp32 numbers whose upper halves are the parameters.
    REMAINDERS = auto()


@dataclass(frozen=True)
class StateForm:
    """Settings that select the storage form (see stored_floats.py) of a flat range's state; for FlatAdam.of_form.

    dtype: dtype of moments and masters, except that masters with remainders are fp32. is_scaled: store 16-bit states
    with a scale for every 64 numbers. It has no effect on bf16 states, because bf16 has the exponent range of fp32.
    """

    dtype: torch.dtype = torch.float32
    masters: Masters = Masters.COPY
    is_scaled: bool = False

    def validate(self) -> None:
        """Raises ValueError for invalid or contradictory fields."""
        if self.dtype not in (torch.float32, torch.float64, *_NARROW):
            raise ValueError(f"dtype is {self.dtype}: must be float32, float64, float16 or bfloat16")
        if self.is_scaled and self.dtype not in _NARROW:
            raise ValueError(f"is_scaled is True with dtype {self.dtype}: dtype must be float16 or bfloat16")
        if self.masters is Masters.REMAINDERS and self.dtype != torch.float32:
            raise ValueError(f"dtype is {self.dtype} with masters {self.masters.name}: must be float32")


@dataclass(frozen=True, eq=False)
class FlatAdam:
    """Adam state of a flat range of N elements, a multiple of 64. step: number of steps taken, [], fp32, on device."""

    main: StoredFloats
    exp_avg: StoredFloats
    exp_avg_sq: StoredFloats
    step: torch.Tensor

    @classmethod
    def of_form(cls, model: torch.Tensor, form: StateForm) -> "FlatAdam":
        """Builds the state of flat parameters in the storage form that `form` selects.

        model: the parameters, [N], fp32, fp64, fp16 or bf16, referenced and updated in place unless masters are a copy.
        Raises ValueError for an invalid form, for remainders of parameters other than bf16, and for scaled states of
        fp64 parameters that are updated in place.
        """
        form.validate()
        if form.masters is Masters.REMAINDERS and model.dtype != torch.bfloat16:
            raise ValueError(
                f"masters is {form.masters.name} with parameters of {model.dtype}: must be COPY or NONE, or the "
                "parameters must be bfloat16"
            )
        if form.masters is Masters.NONE and form.is_scaled and model.dtype == torch.float64:
            raise ValueError(f"masters is NONE with is_scaled True and parameters of {model.dtype}: must be COPY")
        main = _main_of(model, form)
        like, shape = main.read(0, 0), (main.numel,)
        return cls(
            main,
            _storage(like.new_zeros(shape, dtype=form.dtype), form, wide=like.dtype),
            _storage(like.new_zeros(shape, dtype=form.dtype), form, wide=like.dtype),
            like.new_zeros((), dtype=torch.float32),
        )

    @classmethod
    def of_masters(cls, main: StoredFloats, *, exp_avg_dtype: torch.dtype, exp_avg_sq_dtype: torch.dtype) -> "FlatAdam":
        """Builds the state for given masters, with zero moments in fp32, bf16 or scaled fp16 (see zeros_beside)."""
        step = main.read(0, 0).new_zeros((), dtype=torch.float32)
        return cls(main, zeros_beside(main, exp_avg_dtype), zeros_beside(main, exp_avg_sq_dtype), step)

    @property
    def stored(self) -> tuple[StoredFloats, StoredFloats, StoredFloats]:
        """Masters and both moments, which a step changes in addition to the step count."""
        return self.main, self.exp_avg, self.exp_avg_sq

    @property
    def moments(self) -> dict[str, StoredFloats]:
        """Both moments by their names in checkpoints."""
        return {EXP_AVG: self.exp_avg, EXP_AVG_SQ: self.exp_avg_sq}

    @property
    def wide(self) -> torch.dtype:
        """Dtype in which a step computes, and in which masters and moments are read: fp32 or fp64."""
        return self.main.read(0, 0).dtype


# One step.


@dataclass(frozen=True)
class AdamRates:
    """Settings of a step, named as in torch.optim.Adam and AdamW.

    lr: [], fp64 on the CPU, else fp32, on the device of the state. adam_w_mode: decouples weight decay from gradients
    (Loshchilov & Hutter, 2019, Decoupled Weight Decay Regularization). bias_correction: divides moments by 1 - beta^t
    (Kingma & Ba, 2015, Adam: A Method for Stochastic Optimization).
    """

    lr: torch.Tensor
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    adam_w_mode: bool = True
    bias_correction: bool = True


@dataclass(frozen=True)
class GradScale:
    """Divisor of a step's gradients, and the device's decision whether to skip the step.

    divisor: a number, or [], fp32, on the gradients' device. skip: 1 to skip the update, else 0, as [], fp32, on that
    device; None if the host has decided to update.
    """

    divisor: float | torch.Tensor
    skip: torch.Tensor | None = None


class GradUse(Enum):
    """Whether an update may overwrite the gradients that it divides."""

    # The gradients keep their values.
    READ = auto()
    # If the step is not skipped, the gradients may afterwards contain the quotients, which saves a copy. Torch's kernel
    # overwrites gradients whose dtype is the compute dtype.
    DIVIDE = auto()


@dataclass(frozen=True)
class AdamUpdate:
    """One flat range to update.

    grad: [N], any float dtype; GradUse decides whether it may be overwritten. out: receives the new parameters, [N],
    any float dtype; None if `state` updates them in place. A skipped step does not write it, so it must already hold
    the parameters. ranges: start and end of parts to update as separate tensors, see [Note: ends of parameters]; None
    for one tensor.
    """

    state: FlatAdam
    grad: torch.Tensor
    out: torch.Tensor | None = None
    ranges: Sequence[tuple[int, int]] | None = None


def adam_step(
    updates: Sequence[AdamUpdate], rates: AdamRates, *, scale: GradScale, grads: GradUse = GradUse.READ
) -> None:
    """Updates flat ranges of one device from their gradients, or skips them all. Never waits for the device.

    Gradients are divided by the divisor of `scale`. Ranges whose tensors all have one dtype, and whose gradients
    require no division or may be overwritten, are updated by one call of torch's fused kernel, bit-identical to
    torch.optim with fused=True.
    """
    if not updates:
        return
    with torch.no_grad():
        scaled = _Scaled(_divisor_on(scale, updates[0].state.step.device), scale.skip)
        states = [update.state for update in updates]
        in_place: dict[torch.dtype, list[_Operands]] = {}
        for update, count in zip(updates, _next_counts(states, rates)):
            operands = _operands_in_place(update, count) if scaled.divisor is None or grads is GradUse.DIVIDE else None
            if operands is not None:
                in_place.setdefault(operands.main.dtype, []).append(operands)
            elif HAS_TRITON and update.grad.is_cuda and update.state.step.is_cuda and _is_one_pass(update.state):
                triton_adam.step_run(
                    update.state.stored,
                    update.grad,
                    out=update.out,
                    step=update.state.step,
                    lr=rates.lr,
                    betas=rates.betas,
                    eps=rates.eps,
                    weight_decay=rates.weight_decay,
                    adam_w_mode=rates.adam_w_mode,
                    bias_correction=rates.bias_correction,
                    divisor=scaled.divisor,
                    skip=scaled.skip,
                )
            else:
                _step_in_pieces(update, rates, count=count, scaled=scaled, grads=grads)
        for together in in_place.values():
            # Overwrites gradients that it divides.
            _fused_kernel(rates, skip=scaled.skip)(*_operand_lists(together), grad_scale=scaled.divisor)
            for one in together:
                if one.out is not None:
                    scaled.put(one.out, one.main)
        _count(states, skip=scaled.skip)


# Parts of a step.


@dataclass(frozen=True)
class _Scaled:
    """A GradScale on the device of a step. Both fields are [], fp32, or None."""

    divisor: torch.Tensor | None
    skip: torch.Tensor | None

    def put(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Copies values to a target and rounds them, unless the step is skipped; both [n], any float dtype."""
        target.copy_(values if self.skip is None else torch.where(self.skip == 0, values.to(target.dtype), target))


@dataclass(frozen=True)
class _Operands:
    """Operands of torch's fused kernel: [n] each, all fp32 or all fp64. count: number of this step, [], fp32."""

    main: torch.Tensor
    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    count: torch.Tensor
    out: torch.Tensor | None = None
    ranges: Sequence[tuple[int, int]] | None = None

    def parts(self) -> "list[_Operands]":
        """Splits the operands where parameters end; see [Note: ends of parameters]."""
        if self.ranges is None:
            return [self]
        return [
            _Operands(
                self.main[start:end],
                self.grad[start:end],
                self.exp_avg[start:end],
                self.exp_avg_sq[start:end],
                self.count,
            )
            for start, end in self.ranges
        ]


def _operands_in_place(update: AdamUpdate, count: torch.Tensor) -> _Operands | None:
    """Returns the operands with which the kernel updates a range in place, or None if numbers must be converted.

    The kernel requires plain masters and moments, and a gradient and parameters of their dtype and device.
    """
    main, exp_avg, exp_avg_sq = update.state.stored
    if not (isinstance(main, Plain) and isinstance(exp_avg, Plain) and isinstance(exp_avg_sq, Plain)):
        return None
    for tensor in (update.grad, update.out):
        if tensor is not None and (tensor.dtype != main.tensor.dtype or tensor.device != main.tensor.device):
            return None
    return _Operands(
        main.tensor, update.grad, exp_avg.tensor, exp_avg_sq.tensor, count, out=update.out, ranges=update.ranges
    )


def _is_one_pass(state: FlatAdam) -> bool:
    """Returns whether the Triton kernel updates a state on a GPU: fp32 states with remainders or scaled fp16."""
    stored = state.stored
    is_converted = isinstance(state.main, WithRemainder) or any(isinstance(one, ScaledHalf) for one in stored)
    return is_converted and state.wide == torch.float32


def _step_in_pieces(
    update: AdamUpdate, rates: AdamRates, *, count: torch.Tensor, scaled: _Scaled, grads: GradUse
) -> None:
    """Updates a state of any form with torch's kernel, converting it in pieces that fit into a core's cache."""
    state, size = update.state, _piece_elements(update.state)
    for start in range(0, state.main.numel, size):
        end = min(start + size, state.main.numel)
        _step_piece(
            state,
            update.grad[start:end],
            rates,
            start=start,
            count=count,
            scaled=scaled,
            grads=grads,
            ranges=_ranges_in(update.ranges, start, end=end),
        )
        if update.out is not None:
            scaled.put(update.out[start:end], _as_parameters(state.main, start, end=end))


def _step_piece(
    state: FlatAdam,
    grad: torch.Tensor,
    rates: AdamRates,
    *,
    start: int,
    count: torch.Tensor,
    scaled: _Scaled,
    grads: GradUse,
    ranges: Sequence[tuple[int, int]] | None = None,
) -> None:
    """Updates n elements of a state from `start` on. grad: [n], any float dtype and device."""
    main, exp_avg, exp_avg_sq = values = [stored.read(start, start + grad.numel()) for stored in state.stored]
    grad, divisor = grad.to(main), scaled.divisor
    if divisor is not None and grads is GradUse.READ:
        # The kernel would overwrite the gradients that it divides.
        grad, divisor = grad / divisor, None
    operands = _Operands(main, grad, exp_avg, exp_avg_sq, count, ranges=ranges)
    _fused_kernel(rates, skip=scaled.skip)(*_operand_lists([operands]), grad_scale=divisor)
    for stored, new in zip(state.stored, values):
        _write_back(stored, start, values=new, scaled=scaled)


def _next_counts(states: Sequence[FlatAdam], rates: AdamRates) -> list[torch.Tensor]:
    """Returns the step number of each state's next update: [], fp32 each; infinity without bias correction."""
    # For an infinite number of steps both bias corrections are exactly 1.
    steps = [state.step for state in states]
    return list(torch._foreach_add(steps, 1.0 if rates.bias_correction else torch.inf))


def _count(states: Sequence[FlatAdam], *, skip: torch.Tensor | None) -> None:
    steps = [state.step for state in states]
    if not steps:
        return
    torch._foreach_add_(steps, 1.0)
    if skip is not None:
        torch._foreach_sub_(steps, [skip] * len(steps))


def _divisor_on(scale: GradScale, device: torch.device) -> torch.Tensor | None:
    """Returns the divisor as a kernel argument, equivalent to torch.amp.GradScaler's scale: [], fp32; None for 1."""
    if isinstance(scale.divisor, torch.Tensor):
        return scale.divisor
    # Filled on the device, because a copy from the host would wait for the stream.
    return None if scale.divisor == 1.0 else torch.full((), scale.divisor, dtype=torch.float32, device=device)


def _sgd_divisor_on(scale: GradScale, device: torch.device) -> torch.Tensor | None:
    """Returns the divisor for torch's SGD kernel: [], fp32; on the CPU None for 1.

    On a GPU, torch's kernel with a divisor of 1 rounded the last digits differently than without a divisor (H200, torch
    2.11). Host-decided steps could omit a divisor of 1, but graphs, whose arguments are fixed, cannot. On a GPU both
    therefore pass it.
    """
    divisor = _divisor_on(scale, device)
    if divisor is None and device.type != "cpu":
        return torch.ones((), dtype=torch.float32, device=device)
    return divisor


def _piece_elements(state: FlatAdam) -> int:
    size = piece_elements(state.main)
    is_plain = all(isinstance(stored, Plain) for stored in state.stored)
    # Plain states are not copied, so only the gradient must fit into the cache, instead of four tensors.
    return 4 * size if is_plain and state.step.device.type == "cpu" else size


def _ranges_in(ranges: Sequence[tuple[int, int]] | None, start: int, *, end: int) -> Sequence[tuple[int, int]] | None:
    """Clips ranges to [start, end) and returns them relative to `start`; None remains None."""
    if ranges is None:
        return None
    cut = ((max(first, start) - start, min(last, end) - start) for first, last in ranges)
    return [(first, last) for first, last in cut if first < last]


def _write_back(stored: StoredFloats, start: int, *, values: torch.Tensor, scaled: _Scaled) -> None:
    """Stores updated numbers, [n], fp32 or fp64; if the step is skipped, restores the previous bytes."""
    end = start + values.numel()
    memory = []
    # Writing back the values that were read does not always restore the bytes: a block whose largest number was rounded
    # up may get a different scale, and NaNs a different sign.
    if isinstance(stored, (Rounded, ScaledHalf)) and scaled.skip is not None:
        memory.append(stored.tensor[start:end])
    if isinstance(stored, ScaledHalf) and scaled.skip is not None:
        memory.append(stored.exponents[start // BLOCK : end // BLOCK])
    before = [part.clone() for part in memory]
    stored.write(start, values)
    for part, old in zip(memory, before):
        assert scaled.skip is not None
        part.copy_(torch.where(scaled.skip == 0, part, old))


def _as_parameters(main: StoredFloats, start: int, *, end: int) -> torch.Tensor:
    """Returns the numbers from which parameters are written: [n], bf16 for remainders, else fp32 or fp64."""
    # Not rounded from fp32, because torch rounds ties to even, and remainders refer to ties rounded away from zero.
    return main.upper[start:end].view(torch.bfloat16) if isinstance(main, WithRemainder) else main.read(start, end)


def _fused_kernel(rates: AdamRates, *, skip: torch.Tensor | None) -> Callable[..., None]:
    """Returns torch's fused kernel with the settings of a step. The caller adds _operand_lists and `grad_scale`."""
    # torch.optim.adamw.adamw is not used, because it also counts steps and takes 1.5 times as long for a piece.
    kernel = torch._fused_adamw_ if rates.adam_w_mode else torch._fused_adam_
    beta1, beta2 = rates.betas
    return partial(
        kernel,
        lr=rates.lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=rates.weight_decay,
        eps=rates.eps,
        amsgrad=False,
        maximize=False,
        found_inf=skip,
    )


def _operand_lists(operands: Sequence[_Operands]) -> tuple[list[torch.Tensor], ...]:
    """Returns the operands in the order of the fused kernel's arguments, split where parameters end."""
    parts = [part for one in operands for part in one.parts()]
    return (
        [one.main for one in parts],
        [one.grad for one in parts],
        [one.exp_avg for one in parts],
        [one.exp_avg_sq for one in parts],
        [],
        [one.count for one in parts],
    )


# Construction of storage.


def _main_of(model: torch.Tensor, form: StateForm) -> StoredFloats:
    if form.masters is Masters.REMAINDERS:
        return WithRemainder(model)
    if form.masters is Masters.NONE:
        # Parameters that are wider than the states are updated in the parameter dtype.
        wide = torch.promote_types(torch.promote_types(model.dtype, form.dtype), torch.float32)
        return Plain(model) if model.dtype == wide else Rounded(model, wide)
    wide = torch.promote_types(form.dtype, torch.float32)
    main = _storage(torch.empty_like(model, dtype=form.dtype), form, wide=wide)
    size = piece_elements(main)
    for start in range(0, main.numel, size):
        main.write(start, model[start : start + size].to(wide))
    return main


def _storage(tensor: torch.Tensor, form: StateForm, *, wide: torch.dtype) -> StoredFloats:
    if tensor.dtype == wide:
        return Plain(tensor)
    return ScaledHalf(tensor) if form.is_scaled and tensor.dtype == torch.float16 else Rounded(tensor, wide)


# Update rules: torch's optimizers over flat ranges. Each rule updates some ranges and owns their state.


class UpdateRule(Protocol):
    """Interface of update rules.

    is_collective: whether `update` communicates between ranks, so that one call must receive all ranges.
    """

    is_collective: bool
    optimizer: torch.optim.Optimizer
    ranges: list[FlatParamRange]

    def refresh_rates(self) -> None:
        """Copies the groups' current learning rates for subsequent updates, including updates in graphs."""
        ...

    def update(self, scale: GradScale, ranges: Set[FlatParamRange]) -> None:
        """Updates those of the rule's ranges that are in `ranges` from scaled gradients, and writes their parameters.

        Called once per step for each range.
        """
        ...

    def flat_state(self, run: FlatParamRange) -> dict[str, StoredFloats]:
        """Returns the state of a range under torch's names, such as exp_avg, N numbers each."""
        ...

    def settings_in(self, run: FlatParamRange) -> list[tuple[Span, Mapping[str, Any]]]:
        """Returns the current group settings of each part of a range.

        The parts are sorted and start at multiples of 64.
        """
        ...

    def step_counts(self) -> list[torch.Tensor]:
        """Returns the step counters, which callers may read or overwrite: [], fp32 each."""
        ...


@dataclass(frozen=True)
class _Chunk:
    """Elements [start, end) of a range."""

    param_range: FlatParamRange
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class _Batch:
    """Ranges of the parameter group `number` whose states are on one device.

    lr: the group's learning rate, for kernels: [], fp64 on the CPU, else fp32, on that device.
    """

    number: int
    ranges: list[FlatParamRange]
    lr: torch.Tensor


class FusedRule:
    """Update rule of AdamW or SGD, whose kernel updates whole ranges and divides gradients while it reads them.

    Ranges whose state is not in the kernel's form are converted and updated in pieces.
    """

    is_collective = False

    def __init__(
        self, config: OptimizerConfig, ranges: Sequence[FlatParamRange], *, groups: Sequence[GroupKey]
    ) -> None:
        self.ranges = list(ranges)
        members = [[one for one in ranges if one.group == key] for key in groups]
        torch_groups = [
            {"params": [one.stepped for one in ranges], **key.values(config)} for key, ranges in zip(groups, members)
        ]
        # AdamW's state of each range; empty for SGD.
        self._adam: dict[FlatParamRange, FlatAdam] = {}
        self._is_sgd = config.optimizer == "sgd"
        if self._is_sgd:
            # SGD adds weight decay to the gradient, as in Megatron; only Adam decouples it.
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
                torch_groups, lr=config.lr, momentum=config.sgd_momentum, fused=True
            )
            # A zero momentum gives the same first step as torch, which begins without a momentum.
            names = [_MOMENTUM] if config.sgd_momentum > 0 else []
            self._moments = {one: {name: zeros_beside(one.main, torch.float32) for name in names} for one in ranges}
        else:
            betas = (config.adam_beta1, config.adam_beta2)
            self.optimizer = torch.optim.AdamW(torch_groups, lr=config.lr, betas=betas, eps=config.adam_eps, fused=True)
            dtypes = {"exp_avg_dtype": config.exp_avg_dtype, "exp_avg_sq_dtype": config.exp_avg_sq_dtype}
            self._adam = {one: FlatAdam.of_masters(one.main, **dtypes) for one in ranges}
            self._moments = {one: state.moments for one, state in self._adam.items()}
        # For scripts that look up moments in torch's optimizer; the kernels do not use it.
        for one, moments in self._moments.items():
            self.optimizer.state[one.stepped] = {
                name: kept.tensor for name, kept in moments.items() if isinstance(kept, Plain)
            }
        self._batches = _batches_of(members)
        self._batch_of = {one: batch for batch in self._batches for one in batch.ranges}
        self.refresh_rates()
        on_host = [one for one in self.ranges if self._batch_of[one].lr.device.type == "cpu"]
        self._overlapped = frozenset(on_host if config.overlap_cpu_optimizer_d2h_h2d else [])
        self._copies = _HostCopies(on_host) if self._overlapped else None

    def refresh_rates(self) -> None:
        # Groups hold plain numbers, which a schedule computes; graphs read these tensors in each replay.
        for batch in self._batches:
            batch.lr.fill_(self.optimizer.param_groups[batch.number]["lr"])

    def update(self, scale: GradScale, ranges: Set[FlatParamRange]) -> None:
        """Updates those of the rule's ranges that are in `ranges`. State on the host does not support scale.skip."""
        with torch.no_grad():
            for batch in self._batches:
                chosen = [one for one in batch.ranges if one in ranges and one not in self._overlapped]
                if self._is_sgd:
                    for together in _sgd_calls(chosen):
                        self._step_sgd(together, batch, scale=scale)
                else:
                    updates = [AdamUpdate(self._adam[one], one.grad) for one in chosen]
                    adam_step(updates, self._adam_rates(batch), scale=scale, grads=GradUse.DIVIDE)
                for one in chosen:
                    one.write_model()
            if self._copies is not None:
                # Last, so that updates on a GPU run while the host computes.
                chosen = [one for one in self.ranges if one in ranges and one in self._overlapped]
                for chunk, grad in self._copies.chunks(chosen):
                    self._step_chunk(chunk, grad, scale=scale)
                _count([self._adam[one] for one in chosen if one in self._adam], skip=scale.skip)

    def _step_chunk(self, chunk: _Chunk, grad: torch.Tensor, *, scale: GradScale) -> None:
        """Updates one chunk without counting a step. grad: [n], any float dtype."""
        batch = self._batch_of[chunk.param_range]
        if self._is_sgd:
            self._step_sgd([(chunk, grad)], batch, scale=scale)
            return
        state, rates = self._adam[chunk.param_range], self._adam_rates(batch)
        (count,) = _next_counts([state], rates)
        scaled = _Scaled(_divisor_on(scale, batch.lr.device), scale.skip)
        _step_piece(state, grad, rates, start=chunk.start, count=count, scaled=scaled, grads=GradUse.DIVIDE)

    def _adam_rates(self, batch: _Batch) -> AdamRates:
        group = self.optimizer.param_groups[batch.number]
        return AdamRates(batch.lr, betas=group["betas"], eps=group["eps"], weight_decay=group["weight_decay"])

    def _step_sgd(self, chunks: Sequence[tuple[_Chunk, torch.Tensor]], batch: _Batch, *, scale: GradScale) -> None:
        """Updates chunks in one kernel call. chunks: each with its gradient, [n], any float dtype and device."""
        group = self.optimizer.param_groups[batch.number]
        # `read` returns views of the storage, which the kernel changes in place.
        mains = [chunk.param_range.main.read(chunk.start, chunk.end) for chunk, _ in chunks]
        momenta = [self._moments[chunk.param_range].get(_MOMENTUM) for chunk, _ in chunks]
        sgd(
            mains,
            [grad.to(main) for (_, grad), main in zip(chunks, mains)],
            [None if kept is None else kept.read(chunk.start, chunk.end) for kept, (chunk, _) in zip(momenta, chunks)],
            fused=True,
            grad_scale=_sgd_divisor_on(scale, batch.lr.device),
            found_inf=scale.skip,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=batch.lr,  # type: ignore[arg-type]  # torch.optim.SGD passes tensors as well
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )

    def flat_state(self, run: FlatParamRange) -> dict[str, StoredFloats]:
        return self._moments[run]

    def settings_in(self, run: FlatParamRange) -> list[tuple[Span, Mapping[str, Any]]]:
        """Returns the settings of the range's group, which apply to the whole range."""
        return [(Span(0, run.span.numel), self.optimizer.param_groups[self._batch_of[run].number])]

    def step_counts(self) -> list[torch.Tensor]:
        """Returns the step counter of each range, which callers may overwrite: [], fp32 each. SGD has none."""
        return [state.step for state in self._adam.values()]


def _batches_of(members: Sequence[Sequence[FlatParamRange]]) -> list[_Batch]:
    """Divides the ranges of each parameter group by the device of their masters, which may be the host."""
    found: dict[tuple[int, torch.device], list[FlatParamRange]] = {}
    for number, ranges in enumerate(members):
        for one in ranges:
            found.setdefault((number, one.main.read(0, 0).device), []).append(one)
    dtypes = {device: torch.float64 if device.type == "cpu" else torch.float32 for _, device in found}
    return [
        _Batch(number, ranges, torch.zeros((), dtype=dtypes[device], device=device))
        for (number, device), ranges in found.items()
    ]


def _sgd_calls(ranges: Sequence[FlatParamRange]) -> Iterator[list[tuple[_Chunk, torch.Tensor]]]:
    """Yields the chunks that one kernel call updates, each with its gradient: [n], the buffer's dtype.

    Gradients that must be converted are passed in pieces that fit into a core's cache.
    """
    whole = []
    for one in ranges:
        grad, like, size = one.grad, one.main.read(0, 0), piece_elements(one.main)
        if (grad.dtype, grad.device) == (like.dtype, like.device):
            whole.append((_Chunk(one, 0, one.main.numel), grad))
            continue
        for start in range(0, one.main.numel, size):
            chunk = _Chunk(one, start, min(start + size, one.main.numel))
            yield [(chunk, grad[chunk.start : chunk.end])]
    if whole:
        yield whole


# State in host memory (overlap_cpu_optimizer_d2h_h2d).


class _HostCopies:
    """Copies gradients to the host and updated parameters back, for ranges whose masters are in host memory.

    While a chunk is updated, the gradient of the next chunk and the parameters of the previous chunk are copied. Each
    direction has two buffers and, on a GPU, a stream.
    """

    def __init__(self, param_ranges: Sequence[FlatParamRange]) -> None:
        device = next((one.grad.device for one in param_ranges), torch.device("cpu"))
        longest = min(HOST_CHUNK, max((one.main.numel for one in param_ranges), default=0))
        self._to_host, self._to_device = CopyStream(device), CopyStream(device)
        grad_bytes = longest * max((one.grad.element_size() for one in param_ranges), default=0)
        param_bytes = longest * max((one.model.element_size() for one in param_ranges), default=0)
        self._grads = [host_bytes(grad_bytes, device) for _ in range(2)]
        self._params = [host_bytes(param_bytes, device) for _ in range(2)]
        # The last copy out of each parameter buffer.
        self._sent: list[Any] = [None, None]

    def chunks(self, param_ranges: Sequence[FlatParamRange]) -> Iterator[tuple[_Chunk, torch.Tensor]]:
        """Yields the chunks of ranges, each with its gradient on the host: [n], the buffer's dtype.

        The caller must update a chunk's masters before it requests the next chunk, because the parameters are then
        copied from the masters. Work launched on the device after the last chunk sees all new parameters.
        """
        todo = [
            _Chunk(one, start, min(start + HOST_CHUNK, one.main.numel))
            for one in param_ranges
            for start in range(0, one.main.numel, HOST_CHUNK)
        ]
        fetched = [self._fetch(chunk, slot) for slot, chunk in enumerate(todo[:1])]
        for index, chunk in enumerate(todo):
            grad, copied = fetched.pop()
            # The next gradient overwrites the previous one, which has already been read.
            fetched += [self._fetch(later, (index + 1) % 2) for later in todo[index + 1 : index + 2]]
            self._to_host.host_waits_for(copied)
            yield chunk, grad
            self._send(chunk, index % 2)
        for sent in self._sent:
            self._to_device.main_waits_for(sent)

    def _fetch(self, chunk: _Chunk, slot: int) -> tuple[torch.Tensor, Any]:
        grad = chunk.param_range.grad[chunk.start : chunk.end]
        on_host = self._grads[slot][: grad.nbytes]
        return on_host.view(grad.dtype), self._to_host.copy(on_host, grad.view(torch.uint8))

    def _send(self, chunk: _Chunk, slot: int) -> None:
        param_range = chunk.param_range
        if not param_range.is_copy or isinstance(param_range.main, WithRemainder):
            return
        params = param_range.model[chunk.start : chunk.end]
        on_host = self._params[slot][: params.nbytes]
        # The previous copy out of this buffer may still be running.
        self._to_device.host_waits_for(self._sent[slot])
        on_host.view(params.dtype).copy_(param_range.main.read(chunk.start, chunk.end))
        self._sent[slot] = self._to_device.copy(params.view(torch.uint8), on_host)
