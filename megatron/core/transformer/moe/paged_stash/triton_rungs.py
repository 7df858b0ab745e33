"""Launches the Triton kernels of the operators in rung_operators.py, with the same arguments on CUDA tensors.

One compiled kernel serves a rung and its forward function, so that both give the same bits. In forward it is needed if
there are any rows: `needed` is their number.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
from torch import Tensor

from megatron.core.transformer.moe.paged_stash.expert_activations import ActivationForm, Curve
from megatron.core.transformer.moe.paged_stash.triton_activations import act_gradient_kernel, act_kernel
from megatron.core.transformer.moe.paged_stash.triton_biases import add_bias_if
from megatron.core.transformer.moe.paged_stash.triton_grouped_gemm import grouped_gemm_kernel, weight_grad_kernel
from megatron.core.triton_compile import CompileCase, compile_case


def act_from_gate_up(
    gate_up: Tensor,
    scale: Tensor | None,
    *,
    num_rows: Tensor,
    needed: Tensor,
    out: Tensor,
    activation: str,
    clamp: float | None = None,
    offset: float = 0.0,
) -> None:
    """act again, if needed; gate_up: [C, 2F] or [C, F], float dtype; scale: [C] or None; out: [C, F], same dtype."""
    form = ActivationForm(activation, clamp, offset)
    _launch_act(gate_up, scale, num_rows=num_rows, needed=needed, out=out, form=form)


def gated_activation(
    gate_up: Tensor,
    scale: Tensor | None,
    *,
    num_rows: Tensor,
    out: Tensor,
    activation: str,
    clamp: float | None = None,
    offset: float = 0.0,
) -> None:
    """act in forward; gate_up: [C, 2F] or [C, F], float dtype; scale: [C] or None; out: [C, F], same dtype."""
    form = ActivationForm(activation, clamp, offset)
    _launch_act(gate_up, scale, num_rows=num_rows, needed=num_rows, out=out, form=form)


def gated_activation_backward(
    grad: Tensor,
    gate_up: Tensor,
    *,
    scale: Tensor | None,
    num_rows: Tensor,
    grad_gate_up: Tensor,
    grad_scale: Tensor | None,
    activation: str,
    clamp: float | None = None,
    offset: float = 0.0,
) -> None:
    """Gradients of gate_up and scale, of their shapes and dtypes; grad: [C, F], any strides, gate_up's dtype."""
    _refuse_what_no_kernel_takes(gate_up, grad_gate_up)
    form, (max_rows, ffn) = ActivationForm(activation, clamp, offset), grad.shape
    tile = _act_tile(ffn, _GRADIENT_ELEMENTS)
    with torch.accelerator.device_index(gate_up.device.index):
        act_gradient_kernel[(_programs(gate_up, triton.cdiv(max_rows, tile["ROWS"])),)](
            grad,
            gate_up,
            scale,
            num_rows,
            grad_gate_up,
            grad_scale,
            max_rows,
            ffn,
            *grad.stride(),
            gate_up.stride(0),
            grad_gate_up.stride(0),
            **_form_arguments(form),
            num_warps=4,
            **tile,
        )


def gate_up_from_x(
    x: Tensor, weight: Tensor, *, offsets: Tensor, needed: Tensor, out: Tensor, bias: Tensor | None = None
) -> None:
    """x times each row's expert's weight, plus its bias, if needed.

    x: [C, H]; weight: [e, H, O]; bias: [e, O] or None; out: [C, O]; one float dtype.
    """
    # As int32, low word first, because in forward the kernels get the last offset, int32, in its place.
    words = needed.view(torch.int32)
    _launch_grouped_gemm(x, weight, offsets=offsets, needed=words, out=out)
    if bias is not None:
        add_bias_if(words, out, bias=bias, scale=None, offsets=offsets, share=1.0)


def add_low_rank(
    rows: Tensor, low: Tensor, *, weight: Tensor, offsets: Tensor, scale: float, needed: Tensor | None = None
) -> None:
    """Adds scale times `low` times each row's expert's weight, if needed; None: in forward.

    rows: [C, O]; low: [C, r]; weight: [e, r, O]; one float dtype.
    """
    words = offsets[-1:] if needed is None else needed.view(torch.int32)
    _launch_grouped_gemm(low, weight, offsets=offsets, needed=words, out=rows, scale=scale)


def grouped_gemm(x: Tensor, weight: Tensor, *, offsets: Tensor, out: Tensor) -> None:
    """x times each row's expert's weight in forward; x: [C, H]; weight: [e, H, O]; out: [C, O]; one float dtype."""
    _launch_grouped_gemm(x, weight, offsets=offsets, needed=offsets[-1:], out=out)


def grouped_gemm_weight_grad(x: Tensor, grad: Tensor, *, offsets: Tensor, out: Tensor) -> None:
    """Each expert's x^T grad, zeros for one without rows; x: [C, H]; grad: [C, O]; out: [e, H, O]; one float dtype."""
    _refuse_what_no_kernel_takes(x)
    experts, inner, outer = out.shape
    tile = gemm_tile(x.dtype)
    programs = experts * triton.cdiv(inner, tile["ROWS"]) * triton.cdiv(outer, tile["COLUMNS"])
    if programs == 0:
        return
    with torch.accelerator.device_index(x.device.index):
        strides = (*x.stride(), *grad.stride(), *out.stride())
        weight_grad_kernel[(programs,)](x, grad, offsets, out, x.shape[0], inner, outer, *strides, **tile)


# Elements of one tile: 32 for each thread of 4 warps, and 8 where registers hold several of each.
_ACT_ELEMENTS, _GRADIENT_ELEMENTS = 4096, 1024


def _act_tile(ffn: int, elements: int) -> dict[str, int]:
    columns = min(elements, triton.next_power_of_2(ffn))
    return {"ROWS": elements // columns, "COLUMNS": columns}


def gemm_tile(dtype: torch.dtype) -> dict[str, int]:
    """Sizes of tiles, warps and stages for matrix products; larger ones would spill registers on sm_80 or sm_90."""
    if dtype == torch.float32:
        return {"ROWS": 64, "COLUMNS": 64, "TERMS": 16, "num_warps": 4, "num_stages": 3}
    return {"ROWS": 128, "COLUMNS": 128, "TERMS": 64, "num_warps": 8, "num_stages": 3}


def _form_arguments(form: ActivationForm) -> dict[str, Any]:
    # None instead of 0, so that the usual kernels have no line of it.
    return {
        "clamp": form.clamp,
        "offset": form.offset or None,
        "CURVE": int(form.activation.curve),
        "IS_GATED": form.activation.is_gated,
    }


def _launch_act(
    gate_up: Tensor,
    scale: Tensor | None,
    *,
    num_rows: Tensor,
    needed: Tensor,
    out: Tensor,
    form: ActivationForm,
) -> None:
    _refuse_what_no_kernel_takes(gate_up, out)
    max_rows, ffn = out.shape
    tile = _act_tile(ffn, _ACT_ELEMENTS)
    tiles = triton.cdiv(max_rows, tile["ROWS"]) * triton.cdiv(ffn, tile["COLUMNS"])
    with torch.accelerator.device_index(gate_up.device.index):
        act_kernel[(_programs(gate_up, tiles),)](
            gate_up,
            scale,
            num_rows,
            needed,
            out,
            max_rows,
            ffn,
            gate_up.stride(0),
            out.stride(0),
            **_form_arguments(form),
            num_warps=4,
            **tile,
        )


def _launch_grouped_gemm(
    x: Tensor, weight: Tensor, *, offsets: Tensor, needed: Tensor, out: Tensor, scale: float | None = None
) -> None:
    """scale: of what is added to `out`; None: the product takes its place."""
    _refuse_what_no_kernel_takes(x, out)
    experts, inner, outer = weight.shape
    if experts == 0:
        return
    tile = gemm_tile(x.dtype)
    # The last tile of each expert's rows may be partly empty.
    tiles = (triton.cdiv(x.shape[0], tile["ROWS"]) + experts) * triton.cdiv(outer, tile["COLUMNS"])
    with torch.accelerator.device_index(x.device.index):
        grouped_gemm_kernel[(_programs(x, tiles),)](
            x,
            weight,
            offsets,
            needed,
            out,
            scale,
            experts,
            x.shape[0],
            inner,
            outer,
            *x.stride(),
            *weight.stride(),
            out.stride(0),
            GROUPS=triton.next_power_of_2(experts),
            **tile,
        )


def _refuse_what_no_kernel_takes(*tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"{tensor.dtype} on {tensor.device}: only fp32, bf16 and fp16 have kernels")
        assert tensor.dim() != 2 or tensor.stride(1) in (0, 1) or tensor.shape[1] <= 1, "columns must be neighbours"


def _programs(tensor: Tensor, tiles: int) -> int:
    """Programs to launch: as many as run at once, so that a rung that is not needed costs little; interpreted: two."""
    if tensor.device.type == "cpu":
        return 2
    device: Any = torch.get_device_module(tensor.device).get_device_properties(tensor.device)
    return max(1, min(tiles, 2 * device.multi_processor_count))


def compile_cases() -> Iterator[CompileCase]:
    """Weights as stored and transposed, widths that 16 divides, and the simplest and the costliest activation."""
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        yield from _gemm_cases(dtype, name)
        yield from _act_cases(name, Curve.SILU, clamp=None, offset=None)
        yield from _act_cases(name, Curve.GELU_TANH, clamp=None, offset=None)
        yield from _act_cases(name, Curve.QUICK_GELU, clamp="fp32", offset="fp32")


def _gemm_cases(dtype: torch.dtype, name: str) -> Iterator[CompileCase]:
    tile = gemm_tile(dtype)
    options = {key: tile.pop(key) for key in ("num_warps", "num_stages")}
    data, size = f"*{name}:16", "i32:16"
    shapes = {"inner": size, "outer": size, "max_rows": "i32", "x": data, "x_row": size, "x_column": 1, **tile}
    weights = ((size, 1, None, "as stored"), (1, size, None, "transposed"), (size, 1, "fp32", "added"))
    for row, column, scale, words in weights:
        yield compile_case(
            grouped_gemm_kernel,
            f"grouped_gemm, {name}, weights {words}",
            options=options,
            weight=data,
            offsets="*i32:16",
            needed="*i32",
            out=data,
            scale=scale,
            num_experts="i32",
            weight_expert=size,
            weight_row=row,
            weight_column=column,
            out_row=size,
            GROUPS=32,
            **shapes,
        )
    yield compile_case(
        weight_grad_kernel,
        f"grouped_gemm_weight_grad, {name}",
        options=options,
        grad=data,
        offsets="*i32:16",
        out=data,
        grad_row=size,
        grad_column=1,
        out_expert=size,
        out_row=size,
        out_column=1,
        **shapes,
    )


def _act_cases(name: str, curve: Curve, **form: str | None) -> Iterator[CompileCase]:
    data, size = f"*{name}:16", "i32:16"
    sizes = {"max_rows": "i32", "ffn": size, "gate_up_pitch": size, **form, "CURVE": int(curve), "IS_GATED": True}
    shared = {"gate_up": data, "scale": "*fp32:16", "num_rows": "*i64", **sizes}
    yield compile_case(
        act_kernel,
        f"act_from_gate_up, {name}, {curve.name}",
        options={"num_warps": 4},
        needed="*i64",
        out=data,
        out_pitch=size,
        **shared,
        **_act_tile(1024, _ACT_ELEMENTS),
    )
    yield compile_case(
        act_gradient_kernel,
        f"gated_activation_backward, {name}, {curve.name}",
        options={"num_warps": 4},
        grad=data,
        grad_gate_up=data,
        grad_scale="*fp32:16",
        grad_row=size,
        grad_column=1,
        grad_gate_up_pitch=size,
        **shared,
        **_act_tile(1024, _GRADIENT_ELEMENTS),
    )
