"""Triton kernel that updates a flat range in one pass: divides gradients, applies Adam, rounds to the storage forms.

Arithmetic is in fp32 with one rounding per operation, in the order of torch's kernel for CPUs. Stored values are
bit-identical to stored_floats.py.

[Note: no fused multiply-add] The compiler would fuse multiplications and additions differently for each form. Without
fusion all forms are bit-identical, so this kernel computes the same parameters with remainders as with fp32 masters.
The cost is small, because the kernel is memory-bound. adam_step uses it only for remainders and scaled states. Torch's
kernel, which updates the other forms on a GPU, rounds betas and their powers to fp32 before it subtracts them from 1.
With the default betas its second moments may be off by 110 eps of fp32, compared with 2 eps for this kernel. See
tests/unit_tests/core/optimizer/adam_run.py.
"""
# mypy: allow-untyped-defs

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from ctypes import c_float

import torch
import triton
import triton.language as tl

from megatron.core.device.triton_compile import CompileCase, Residency, compile_case
from megatron.core.device.triton_launch import MAX_PREPARED, PreparedLaunch
from megatron.core.optimizer.stored_floats import (
    BLOCK,
    LOWEST_EXPONENT,
    TOP_EXPONENT,
    Plain,
    Rounded,
    ScaledHalf,
    StoredFloats,
    WithRemainder,
)

NUMBERS = tl.constexpr(BLOCK)  # elements that share a scale
TOP, LOWEST = tl.constexpr(TOP_EXPONENT), tl.constexpr(LOWEST_EXPONENT)
# See [Note: no fused multiply-add].
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
# Several times the number of resident programs, for an even load at the end. Not more, because each program computes
# the bias corrections in fp64.
_PROGRAMS_PER_PROCESSOR = 32


@triton.jit
def _read(memory, more, block, is_there):
    """Loads values of any storage form as fp32, [blocks, 64]. more: exponents (int8), lower halves (int16) or None."""
    at = block[:, None] * NUMBERS + tl.arange(0, NUMBERS)[None, :]
    kept = tl.load(memory + at, mask=is_there[:, None], other=0)
    if more is None:
        values = kept.to(tl.float32)
    elif more.dtype.element_ty == tl.int8:
        exponent = tl.load(more + block, mask=is_there, other=0).to(tl.int32)
        values = kept.to(tl.float32) * _power_of_two(-exponent)[:, None]
    else:
        lower = tl.load(more + at, mask=is_there[:, None], other=0).to(tl.int32)
        values = ((kept.to(tl.int32) << 16) + lower).to(tl.float32, bitcast=True)
    return values


@triton.jit
def _write(memory, more, block, is_there, values):
    """Stores fp32 values, [blocks, 64], in any storage form and returns the rounded parameters as fp32."""
    at = block[:, None] * NUMBERS + tl.arange(0, NUMBERS)[None, :]
    if more is None:
        kept = values.to(memory.dtype.element_ty)
        result = kept.to(tl.float32)
    elif more.dtype.element_ty == tl.int8:
        bits = values.to(tl.int32, bitcast=True)
        # Compared as integers, so that NaN is the largest.
        exponent = TOP - _exponent(tl.max(bits & 0x7FFFFFFF, axis=1))
        tl.store(more + block, exponent.to(tl.int8), mask=is_there)
        kept = (values * _power_of_two(exponent)[:, None]).to(memory.dtype.element_ty)
        result = kept.to(tl.float32) * _power_of_two(-exponent)[:, None]
    else:
        bits = values.to(tl.int32, bitcast=True)
        lower = bits.to(tl.int16)
        tl.store(more + at, lower, mask=is_there[:, None])
        upper = bits - lower.to(tl.int32)
        kept = (upper >> 16).to(tl.int16)
        result = upper.to(tl.float32, bitcast=True)
    tl.store(memory + at, kept, mask=is_there[:, None])
    return result


@triton.jit
def _power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _exponent(bits):
    """Returns the frexp exponent of an absolute value, passed as bits, but at least LOWEST.

    Returns 0 for zero, infinity and NaN, like frexp.
    """
    field = bits >> 23
    return tl.where((bits == 0) | (field == 255), 0, tl.maximum(field - 126, LOWEST))


@triton.jit(do_not_specialize=["numel"], do_not_specialize_on_alignment=["step", "lr", "divisor", "skip"])
def adam_kernel(
    main, main_more, exp_avg, exp_avg_more, exp_avg_sq, exp_avg_sq_more, grad, out, step, lr, divisor, skip, numel,
    beta2, one_minus_beta1, one_minus_beta2, log_beta1, log_beta1_rest, log_beta2, log_beta2_rest, eps, weight_decay,
    IS_DECOUPLED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Updates tiles of a flat range with Adam; writes nothing if `skip` is not 0.

    log_...: natural logarithms of the betas, in two parts each; minus infinity disables bias correction. step, lr,
    divisor, skip: one element each; divisor, skip and `out` may be None.
    """
    if skip is not None:
        if tl.load(skip) != 0:
            return
    count = tl.load(step).to(tl.float64) + 1
    rate = tl.load(lr).to(tl.float64)
    # Scalars are passed as fp32, so each logarithm is split into two. The bias corrections of the first steps require
    # the precision.
    correction1 = 1 - tl.exp(count * log_beta1 + count * log_beta1_rest)
    correction2 = 1 - tl.exp(count * log_beta2 + count * log_beta2_rest)
    step_size = (rate / correction1).to(tl.float32)
    root_correction2 = tl.sqrt(correction2).to(tl.float32)
    kept_share = (1 - rate * weight_decay).to(tl.float32)
    blocks = numel // NUMBERS
    for tile in tl.range(tl.program_id(0), tl.cdiv(blocks, TILE), tl.num_programs(0)):
        block = (tile * TILE + tl.arange(0, TILE)).to(tl.int64)
        is_there = block < blocks
        value = _read(main, main_more, block, is_there)
        slope = _read(grad, None, block, is_there)
        if divisor is not None:
            slope = tl.div_rn(slope, tl.load(divisor))
        if IS_DECOUPLED:
            value *= kept_share
        else:
            slope += value * weight_decay
        mean = _read(exp_avg, exp_avg_more, block, is_there)
        # Interpolates from the nearer end, like torch's lerp.
        from_mean = one_minus_beta1 < 0.5
        mean = tl.where(from_mean, mean, slope) + tl.where(from_mean, one_minus_beta1, one_minus_beta1 - 1) * (
            slope - mean
        )
        square = _read(exp_avg_sq, exp_avg_sq_more, block, is_there) * beta2 + one_minus_beta2 * slope * slope
        value -= tl.div_rn(step_size * mean, tl.div_rn(tl.sqrt_rn(square), root_correction2) + eps)
        _write(exp_avg, exp_avg_more, block, is_there, mean)
        _write(exp_avg_sq, exp_avg_sq_more, block, is_there, square)
        parameters = _write(main, main_more, block, is_there, value)
        if out is not None:
            _write(out, None, block, is_there, parameters)


def step_run(
    stored: Sequence[StoredFloats],
    grad: torch.Tensor,
    *,
    out: torch.Tensor | None,
    step: torch.Tensor,
    lr: torch.Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    adam_w_mode: bool,
    bias_correction: bool,
    divisor: torch.Tensor | None,
    skip: torch.Tensor | None,
) -> None:
    """Updates one flat range in one launch; does not increment the step count.

    stored: masters and both moments, N numbers each, read as fp32. grad, out: [N], any float dtype. step: number of
    previous steps, [], fp32. lr, divisor, skip: [], fp32. The remaining settings are described in AdamRates.
    """
    numel = grad.numel()
    if numel == 0:
        return
    tile = _tile_blocks(grad.dtype.itemsize, 0 if out is None else out.dtype.itemsize)
    launch = _update(betas, eps, weight_decay, adam_w_mode, bias_correction, tile)
    memory = [tensor for one in stored for tensor in _tensors(one)]
    launch(-(-numel // (BLOCK * tile)), (*memory, grad, out, step, lr, divisor, skip), (numel,))


@functools.lru_cache(MAX_PREPARED)
def _update(
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    adam_w_mode: bool,
    bias_correction: bool,
    tile: int,
) -> PreparedLaunch:
    """Returns a launch of adam_kernel. tile: number of blocks of a tile."""
    beta1, beta2 = betas
    logs = [part for beta in betas for part in _log_parts(beta if bias_correction else 0.0)]
    names = ("log_beta1", "log_beta1_rest", "log_beta2", "log_beta2_rest")
    rates = {"beta2": beta2, "one_minus_beta1": 1.0 - beta1, "one_minus_beta2": 1.0 - beta2, **dict(zip(names, logs))}
    fixed = {**rates, "eps": eps, "weight_decay": weight_decay, "IS_DECOUPLED": adam_w_mode, "TILE": tile}
    return PreparedLaunch(adam_kernel, fixed, options=_OPTIONS, per_processor=_PROGRAMS_PER_PROCESSOR)


def _tensors(stored: StoredFloats) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the tensors of a storage form as kernel arguments: values, and exponents or lower halves if any."""
    if isinstance(stored, ScaledHalf):
        return stored.tensor, stored.exponents
    if isinstance(stored, WithRemainder):
        return stored.upper, stored.lower
    assert isinstance(stored, (Plain, Rounded)), f"{type(stored).__name__}: the kernel does not support this form"
    return stored.tensor, None


def _log_parts(beta: float) -> tuple[float, float]:
    """Splits log(beta) into two fp32 numbers whose sum is more precise than fp32."""
    if beta == 0.0:
        return -math.inf, 0.0
    log = math.log(beta)
    first = c_float(log).value
    return first, c_float(log - first).value


def _tile_blocks(*item_bytes: int) -> int:
    """Returns the number of blocks that a program updates per iteration, so that their values fit into registers.

    8 numbers per thread, or 4 with fp64.
    """
    return 8 if max(item_bytes) == 8 else 16


def residencies(num_warps: int) -> Mapping[str, Residency]:
    """Returns the residency that the launcher assumes: at most half of the programs per multiprocessor are resident."""
    assert num_warps == _OPTIONS["num_warps"]
    return {"adam_kernel": Residency(at_most=_PROGRAMS_PER_PROCESSOR // 2)}


def compile_cases() -> Iterator[CompileCase]:
    """Yields a compile case for each storage form, with the dtypes of gradients and parameters used with it."""
    plain, halves, scaled = ("*fp32:16", None), ("*bf16:16", None), ("*fp16:16", "*i8:16")
    remainders = ("*i16:16", "*i16:16")
    yield _case("fp32, divided", (plain, plain), grad="fp32")
    yield _case("bf16 with remainders", (remainders, plain), grad="bf16")
    yield _case("fp32 masters of bf16", (plain, plain), grad="bf16", out="bf16")
    yield _case("bf16 states", (halves, halves), grad="bf16", out="bf16")
    yield _case("scaled fp16 states", (scaled, scaled), grad="fp16", out="fp16")
    yield _case("decay in the gradient, fp32 masters of fp64", (plain, plain), grad="fp64", out="fp64")


def _case(
    name: str, forms: tuple[tuple[str, str | None], tuple[str, str | None]], *, grad: str, out: str | None = None
) -> CompileCase:
    """Builds a compile case. forms: the storage form of masters, then the storage form of both moments."""
    (main, main_more), (moment, moment_more) = forms
    arguments = {"main": main, "main_more": main_more, "grad": f"*{grad}:16", "out": out and f"*{out}:16"}
    for moments in ("exp_avg", "exp_avg_sq"):
        arguments |= {moments: moment, f"{moments}_more": moment_more}
    arguments |= dict.fromkeys(("step", "lr", "divisor", "skip"), "*fp32")
    given = {"numel": "i32:16", "IS_DECOUPLED": not name.startswith("decay"), "TILE": _tile_blocks(4)}
    if "fp64" in (grad, out):
        given["TILE"] = _tile_blocks(8)
    numbers = [number for number in adam_kernel.arg_names if number not in arguments | given]
    return compile_case(
        adam_kernel, f"adam, {name}", options=_OPTIONS, **arguments, **given, **dict.fromkeys(numbers, "fp32")
    )
