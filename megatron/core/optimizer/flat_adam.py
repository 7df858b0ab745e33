"""Adam over flat runs of numbers in any form of storage: what is kept of a run, and one step of it.

Which elements a run has, where gradients come from and what they are divided by is the optimizers'.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch

from megatron.core.optimizer.adam_rates import AdamRates
from megatron.core.optimizer.stored_floats import (
    BLOCK,
    Plain,
    Rounded,
    ScaledHalf,
    StoredFloats,
    WithRemainder,
    piece_elements,
)
from megatron.core.optimizer.update_rules import GradScale

HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON:
    from megatron.core.optimizer import triton_adam

_NARROW = (torch.float16, torch.bfloat16)


class Masters(Enum):
    """The numbers that are stepped, and rounded to the parameters."""

    # The parameters themselves, as they are.
    NONE = auto()
    # A copy of them in the dtype of the states.
    COPY = auto()
    # bf16 parameters with the halves of fp32 that they lack.
    REMAINDERS = auto()


class GradUse(Enum):
    """How a step treats the gradients that it divides."""

    # They stay as they are.
    READ = auto()
    # They are divided in their memory where a step is not skipped: nothing is copied. Torch's kernel does it, where it
    # serves the whole run.
    DIVIDE = auto()


@dataclass(frozen=True)
class StateForm:
    """The storage of a run's state. dtype: of moments and masters, except that masters with remainders are fp32.

    is_scaled: 16-bit states with a scale for every 64 numbers. bf16 has the exponents of fp32, so that a scale would
    give it nothing: such states are kept as bf16 without.
    """

    dtype: torch.dtype = torch.float32
    masters: Masters = Masters.COPY
    is_scaled: bool = False

    def validate(self) -> None:
        """Raises ValueError naming the field, its value and what would be right."""
        if self.dtype not in (torch.float32, torch.float64, *_NARROW):
            raise ValueError(f"dtype is {self.dtype}: states are float32, float64, float16 or bfloat16")
        if self.is_scaled and self.dtype not in _NARROW:
            raise ValueError(f"is_scaled is True with dtype {self.dtype}: only float16 and bfloat16 states have scales")
        if self.masters is Masters.REMAINDERS and self.dtype != torch.float32:
            raise ValueError(f"dtype is {self.dtype} with masters {self.masters.name}: must be float32")


class FlatAdam:
    """The state of one run of N elements, a multiple of 64. step: [], fp32, the steps taken, on the run's device.

    model: [N], fp32, fp64, fp16 or bf16, the parameters' values. They are kept and stepped in place, unless the form
    asks for a copy. Raises ValueError for what form.validate refuses, for remainders of anything but bf16, and for
    scaled states of fp64 parameters that are stepped in place.
    """

    def __init__(self, model: torch.Tensor, form: StateForm) -> None:
        form.validate()
        if form.masters is Masters.REMAINDERS and model.dtype != torch.bfloat16:
            raise ValueError(f"masters is {form.masters.name} with parameters of {model.dtype}: these must be bfloat16")
        if form.masters is Masters.NONE and form.is_scaled and model.dtype == torch.float64:
            raise ValueError(
                f"is_scaled is True with masters NONE and parameters of {model.dtype}: masters must be COPY"
            )
        self.form = form
        self.main = _main_of(model, form)
        like = self.main.read(0, 0)
        # What is computed in, and read of all three.
        self.wide = like.dtype
        shape = (self.main.numel,)
        self.exp_avg = _stored(like.new_zeros(shape, dtype=form.dtype), form, wide=self.wide)
        self.exp_avg_sq = _stored(like.new_zeros(shape, dtype=form.dtype), form, wide=self.wide)
        self.step = like.new_zeros((), dtype=torch.float32)

    @property
    def stored(self) -> tuple[StoredFloats, StoredFloats, StoredFloats]:
        """The storage that a step changes in addition to the count of steps."""
        return self.main, self.exp_avg, self.exp_avg_sq


@dataclass(frozen=True)
class AdamUpdate:
    """One run to be stepped. grad: [N], any float dtype, what becomes of it is GradUse's.

    out: [N], any float dtype, where the new parameters are written, None if `state` steps them in place. A step that is
    skipped leaves it alone: it must hold the parameters before. ranges: see [Note: ends of parameters]; None for all.

    [Note: ends of parameters] A vectorised kernel takes the elements behind the last whole vector of a tensor one by
    one, with other last digits. To give a parameter the bits of torch.optim, its end must be one for the kernel too:
    ranges are those of the run that are stepped as tensors of their own, each from the grid of 64 elements on.
    """

    state: FlatAdam
    grad: torch.Tensor
    out: torch.Tensor | None = None
    ranges: Sequence[tuple[int, int]] | None = None


@torch.no_grad()
def adam_step(
    updates: Sequence[AdamUpdate], rates: AdamRates, *, scale: GradScale, grads: GradUse = GradUse.READ
) -> None:
    """Steps runs of one device, each by its gradient over the divisor, or none of them; nothing reads the device.

    Where all is of one dtype and nothing divides, one call of torch's fused kernel does it, to the bits of torch.optim
    with fused=True.
    """
    if not updates:
        return
    scaled = _Scaled(scale.on(updates[0].grad.device), scale.skip)
    steps = [update.state.step for update in updates]
    # After infinitely many steps nothing is left to correct: both corrections are exactly 1.
    counts = torch._foreach_add(steps, 1.0 if rates.bias_correction else torch.inf)
    whole: dict[torch.dtype, list[_Operands]] = {}
    for update, count in zip(updates, counts):
        operands = _whole(update, count) if scaled.divisor is None or grads is GradUse.DIVIDE else None
        assert operands is not None or grads is GradUse.READ, "only torch's kernel divides gradients in place"
        if operands is not None:
            whole.setdefault(operands.main.dtype, []).append(operands)
        elif HAS_TRITON and update.grad.is_cuda and update.state.wide == torch.float32:
            triton_adam.step_run(
                update.state.stored,
                update.grad,
                out=update.out,
                step=update.state.step,
                rates=rates,
                divisor=scaled.divisor,
                skip=scaled.skip,
            )
        else:
            _step_in_pieces(update, rates, count=count, scaled=scaled)
    for together in whole.values():
        _step_together(together, rates, scaled=scaled)
    torch._foreach_add_(steps, 1.0)
    if scaled.skip is not None:
        torch._foreach_sub_(steps, [scaled.skip] * len(steps))


@torch.no_grad()
def write_parameters(state: FlatAdam, out: torch.Tensor) -> None:
    """Rounds what is stepped to the parameters of a run; out: [N], any float dtype, perhaps the parameters' memory."""
    size = piece_elements(state.main)
    for start in range(0, state.main.numel, size):
        end = min(start + size, state.main.numel)
        out[start:end].copy_(_as_parameters(state.main, start, end=end))


@dataclass(frozen=True)
class _Scaled:
    """A GradScale on the device of a step: [], fp32 each, or None."""

    divisor: torch.Tensor | None
    skip: torch.Tensor | None

    def put(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Rounds values to where they belong, unless nothing is to change; both [n], any float dtype."""
        target.copy_(values if self.skip is None else torch.where(self.skip == 0, values.to(target.dtype), target))


@dataclass(frozen=True)
class _Operands:
    """The operands of torch's kernel: [n] each, one dtype, fp32 or fp64. count: [], fp32, of this step."""

    main: torch.Tensor
    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    count: torch.Tensor
    out: torch.Tensor | None = None
    ranges: Sequence[tuple[int, int]] | None = None

    def parts(self) -> "list[_Operands]":
        """Those that the kernel takes as tensors, see [Note: ends of parameters]."""
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


def _main_of(model: torch.Tensor, form: StateForm) -> StoredFloats:
    if form.masters is Masters.REMAINDERS:
        return WithRemainder(model)
    if form.masters is Masters.NONE:
        # Wider parameters than the states are not computed in fewer digits than they have.
        wide = torch.promote_types(torch.promote_types(model.dtype, form.dtype), torch.float32)
        return Plain(model) if model.dtype == wide else Rounded(model, wide)
    wide = torch.promote_types(form.dtype, torch.float32)
    main = _stored(torch.empty_like(model, dtype=form.dtype), form, wide=wide)
    size = piece_elements(main)
    for start in range(0, main.numel, size):
        main.write(start, model[start : start + size].to(wide))
    return main


def _stored(tensor: torch.Tensor, form: StateForm, *, wide: torch.dtype) -> StoredFloats:
    if tensor.dtype == wide:
        return Plain(tensor)
    return ScaledHalf(tensor) if form.is_scaled and tensor.dtype == torch.float16 else Rounded(tensor, wide)


def _whole(update: AdamUpdate, count: torch.Tensor) -> _Operands | None:
    """All of a run as torch's kernel takes it, if it is kept so."""
    state, out = update.state, update.out
    tensors = [stored.tensor for stored in state.stored if isinstance(stored, Plain)]
    others = [update.grad] if out is None else [update.grad, out]
    if len(tensors) < 3 or any(tensor.dtype != state.wide for tensor in others):
        return None
    main, exp_avg, exp_avg_sq = tensors
    return _Operands(main, update.grad, exp_avg, exp_avg_sq, count, out, update.ranges)


def _step_together(operands: Sequence[_Operands], rates: AdamRates, *, scaled: _Scaled) -> None:
    """Runs of one dtype; the kernel writes the gradients that it divides."""
    _fused_kernel(operands, rates, skip=scaled.skip, divisor=scaled.divisor)
    for one in operands:
        if one.out is not None:
            scaled.put(one.out, one.main)


def _step_in_pieces(update: AdamUpdate, rates: AdamRates, *, count: torch.Tensor, scaled: _Scaled) -> None:
    """Any form, converted on the way through torch's kernel in pieces that stay in a core's cache."""
    state, size = update.state, _piece_elements(update.state)
    for start in range(0, state.main.numel, size):
        end = min(start + size, state.main.numel)
        grad = update.grad[start:end].to(state.wide)
        if scaled.divisor is not None:
            # The kernel would write what it divides, see GradUse.
            grad = grad / scaled.divisor
        main, exp_avg, exp_avg_sq = values = [stored.read(start, end) for stored in state.stored]
        operands = _Operands(main, grad, exp_avg, exp_avg_sq, count, ranges=_ranges_in(update.ranges, start, end=end))
        _fused_kernel([operands], rates, skip=scaled.skip)
        for stored, new in zip(state.stored, values):
            _write_back(stored, start, values=new, scaled=scaled)
        if update.out is not None:
            scaled.put(update.out[start:end], _as_parameters(state.main, start, end=end))


def _piece_elements(state: FlatAdam) -> int:
    size = piece_elements(state.main)
    is_plain = all(isinstance(stored, Plain) for stored in state.stored)
    # Gradients are then all that is copied: one tensor, where others are four of that size.
    return 4 * size if is_plain and state.step.device.type == "cpu" else size


def _ranges_in(ranges: Sequence[tuple[int, int]] | None, start: int, *, end: int) -> Sequence[tuple[int, int]] | None:
    """The parts of ranges in [start, end), counted from there."""
    if ranges is None:
        return None
    cut = ((max(first, start) - start, min(last, end) - start) for first, last in ranges)
    return [(first, last) for first, last in cut if first < last]


def _write_back(stored: StoredFloats, start: int, *, values: torch.Tensor, scaled: _Scaled) -> None:
    """Takes back what was read, [n], fp32 or fp64, and where nothing is to change to the same bytes."""
    end = start + values.numel()
    memory = []
    # A block whose largest number was rounded up gets another scale when it is written again, and NaNs another sign.
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
    """Returns masters rounded to their parameters' dtype: [n], fp32, fp64 or bf16."""
    # Rounded by torch, halves between two numbers of bf16 would differ from those that the remainders belong to.
    return main.upper[start:end].view(torch.bfloat16) if isinstance(main, WithRemainder) else main.read(start, end)


def _fused_kernel(
    operands: Sequence[_Operands], rates: AdamRates, *, skip: torch.Tensor | None, divisor: torch.Tensor | None = None
) -> None:
    # Below torch.optim.adamw.adamw, which would count the steps and take half as long again for a piece.
    kernel = torch._fused_adamw_ if rates.adam_w_mode else torch._fused_adam_
    beta1, beta2 = rates.betas
    parts = [part for one in operands for part in one.parts()]
    kernel(
        [one.main for one in parts],
        [one.grad for one in parts],
        [one.exp_avg for one in parts],
        [one.exp_avg_sq for one in parts],
        [],
        [one.count for one in parts],
        lr=rates.lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=rates.weight_decay,
        eps=rates.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=divisor,
        found_inf=skip,
    )
