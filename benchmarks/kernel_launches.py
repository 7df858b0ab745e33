"""Records the launches of every Triton kernel without a GPU: the matrix of all choices of the launchers, and the hot
shapes.

Launchers run on CPU tensors whose memory is never accessed, and each kernel's run() is recorded instead. Triton's own
binder then determines the signature, the constants and the divisibilities of the launch, so that a case is exactly what
a GPU would compile. Neither compiles nor measures; compiled_kernels.py does.

Shapes: C rows of the buffers, e experts, H hidden, F ffn, T tokens, K choices, W elements in a row.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from megatron.core.block_scaled import triton_products, triton_quantize
from megatron.core.block_scaled.format import BLOCKS, BlockFormat
from megatron.core.block_scaled.triton_products import Arithmetic
from megatron.core.device.triton_compile import CompileCase
from megatron.core.fusions import triton_activations
from megatron.core.fusions.gated_activation import ActivationForm
from megatron.core.optimizer import triton_adam
from megatron.core.optimizer.stored_floats import Plain, Rounded, ScaledHalf, StoredFloats, WithRemainder
from megatron.core.transformer import triton_rope
from megatron.core.transformer.moe import triton_router, triton_rows
from megatron.core.transformer.moe.paged_stash import triton_biases, triton_grouped_gemm, triton_kernels
from megatron.core.transformer.moe.paged_stash.page_layout import (
    Held,
    PlacedTensor,
    PoolLayout,
    Priority,
    TensorSpec,
    encode_tensors,
)
from megatron.core.transformer.moe.paged_stash.triton_grouped_gemm import Loads
from megatron.core.transformer.moe_config import GPU_ROW_ALIGNMENT

MODULES: tuple[ModuleType, ...] = (
    triton_grouped_gemm,
    triton_activations,
    triton_biases,
    triton_router,
    triton_rows,
    triton_kernels,
    triton_rope,
    triton_adam,
    triton_quantize,
    triton_products,
)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
EXPERTS = (1, 8, 32, 128, 256)
PAGES = tuple(16 * block for block in (128, 256, 512, 1024, 2048, 4096))  # in bytes; each selects a different BLOCK
ROWS, TOKENS = 4096, 2048
NUM_ROWS = torch.empty(1, dtype=torch.int64)
# Kernels that copy rows or pages, or add or rotate rows.
MOVING = ("copy_kernel", "gather_kernel", "sum_kernel", "rotate_kernel", "rotate_grads_kernel")
# The oldest architecture on which launchers choose an arithmetic, and the blocks with which they do.
FIRST_ARCHITECTURES = {Arithmetic.PROMOTED: 90, Arithmetic.NATIVE: 100, Arithmetic.DEQUANTIZED: 80}
SCALED_KINDS = ((Arithmetic.PROMOTED, 128), (Arithmetic.NATIVE, 32), *((Arithmetic.DEQUANTIZED, one) for one in BLOCKS))
# Options of a launch that are not arguments of its kernel.
_OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")


@dataclass(frozen=True)
class Launch:
    """One recorded launch.

    module: module of the kernel's launcher. key: equal for launches that share a compiled kernel. sizes: arguments
    passed by name, i.e. sizes and constants. can_be_wide: whether it moves rows or pages that start at multiples of 16
    bytes, so that 16 bytes can be accessed at a time.
    """

    module: ModuleType
    kernel: JITFunction
    case: CompileCase
    key: tuple[Any, ...]
    sizes: Mapping[str, Any]
    can_be_wide: bool = False

    @property
    def kernel_name(self) -> str:
        """Name of the kernel's function."""
        return str(self.kernel.__name__)


@functools.cache
def kernels() -> Mapping[str, ModuleType]:
    """Returns the module of the launcher for each launched kernel."""
    return {name: module for module in MODULES for name in module.residencies(num_warps=4)}


@contextmanager
def _recording() -> Iterator[list[tuple[JITFunction, tuple[Any, ...], dict[str, Any]]]]:
    records: list[tuple[JITFunction, tuple[Any, ...], dict[str, Any]]] = []

    def record(kernel: JITFunction, *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> None:
        records.append((kernel, args, kwargs))

    # Prepared launches of CPU tensors go through kernel[grid](...), which calls run.
    with mock.patch.object(JITFunction, "run", record):
        yield records


def launches(name: str, launcher: Callable[[], Any], *, can_be_wide: bool = False) -> list[Launch]:
    """Runs a launcher and returns the launches that it made. name: name of the launches."""
    with _recording() as records:
        launcher()
    found = [_launch(name, *record) for record in records]
    return [replace(launch, can_be_wide=can_be_wide and launch.kernel_name in MOVING) for launch in found]


@functools.cache
def _binder(kernel: JITFunction) -> tuple[Any, Any]:
    # Specialization does not depend on the architecture.
    backend = make_backend(GPUTarget("cuda", 90, 32))
    return backend, create_function_from_signature(kernel.signature, kernel.params, backend)


def _launch(name: str, kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    backend, bind = _binder(kernel)
    bound, specialization, extra = bind(*args, **kwargs)
    _, signature, constants, attributes = kernel._pack_args(backend, kwargs, bound, specialization, extra)
    options = {key: value for key, value in kwargs.items() if key in _OPTIONS}
    source = ASTSource(kernel, signature, constants, attributes)
    if "TO_PAGES" in kwargs:
        name += ", to pages" if kwargs["TO_PAGES"] else ", from pages"
    parts = (signature, constants, attributes, options)
    key = (kernel.__name__, *(repr(sorted(part.items(), key=str)) for part in parts))
    return Launch(kernels()[kernel.__name__], kernel, CompileCase(name, source, options), key, kwargs)


def distinct(found: Iterator[Launch]) -> list[Launch]:
    """Returns one launch per compiled kernel, the first one found."""
    by_key: dict[tuple[Any, ...], Launch] = {}
    for launch in found:
        by_key.setdefault(launch.key, launch)
    return list(by_key.values())


def _empty(*shape: int, dtype: torch.dtype, is_aligned: bool = True) -> Tensor:
    """Returns memory that is never accessed, aligned to 16 bytes, or shifted by one element."""
    if is_aligned:
        return torch.empty(shape, dtype=dtype)
    return torch.empty(torch.Size(shape).numel() + 1, dtype=dtype)[1:].view(shape)


def _rows_of(shape: tuple[int, int], page_rows: int, *, dtype: torch.dtype, is_aligned: bool = True) -> Tensor:
    """Returns memory of rows, [C, W], or with page_rows > 0 an arena for pages of that many rows, [C * W]."""
    memory = _empty(*shape, dtype=dtype, is_aligned=is_aligned)
    return memory.view(-1) if page_rows else memory


def _pages_of(name: str, shape: tuple[int, int], page_rows: int, *, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the table and the sizes of an operand [C, W] with pages of page_rows rows; nothing for 0."""
    if not page_rows:
        return {}
    table = torch.empty(-(-shape[0] // page_rows), dtype=torch.int64)
    return {f"{name}_table": table, f"{name}_sizes": [page_rows * shape[1] * dtype.itemsize, *shape]}


# Section: launches of each operator.


@dataclass(frozen=True)
class Product:
    """Sizes of a grouped GEMM [C, inner] x [e, inner, outer]. is_stored: whether rows of weights are contiguous.

    page_rows: rows of a page of x and of out, 0 without pages. row_alignment: a divisor of the rows of each expert.
    """

    dtype: str
    experts: int
    inner: int
    outer: int
    rows: int = ROWS
    is_stored: bool = True
    is_aligned: bool = True
    page_rows: tuple[int, int] = (0, 0)
    row_alignment: int = 1

    def pages(self, *names: str) -> dict[str, Any]:
        """Returns tables and sizes of x and out. names: of x and out, or of x alone."""
        sizes = zip(names, (self.inner, self.outer), self.page_rows)
        found = [
            _pages_of(name, (self.rows, width), page, dtype=DTYPES[self.dtype]) for name, width, page in sizes if name
        ]
        return {key: value for one in found for key, value in one.items()}

    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns x: [C, inner], weight: [e, inner, outer], offsets: [e], int32, and out: [C, outer]."""
        dtype, aligned = DTYPES[self.dtype], self.is_aligned
        shape = (self.inner, self.outer) if self.is_stored else (self.outer, self.inner)
        weight = _empty(self.experts, *shape, dtype=dtype, is_aligned=aligned)
        return (
            _rows_of((self.rows, self.inner), self.page_rows[0], dtype=dtype, is_aligned=aligned),
            weight if self.is_stored else weight.transpose(1, 2),
            torch.empty(self.experts, dtype=torch.int32),
            _rows_of((self.rows, self.outer), self.page_rows[1], dtype=dtype, is_aligned=aligned),
        )

    def forward(self, loads: Loads = Loads.POINTERS) -> None:
        """Launches the grouped GEMM."""
        x, weight, offsets, out = self.operands()
        triton_grouped_gemm.grouped_gemm(x, weight, offsets=offsets, out=out, **self.pages("x", "out"), loads=loads)

    def by_descriptors(self, name: str) -> Iterator[Launch]:
        """Yields the launch of the grouped GEMM with descriptors of x, which is in pages, and of the weights."""
        for launch in launches(name, functools.partial(self.forward, Loads.DESCRIPTORS)):
            yield replace(launch, case=replace(launch.case, first_architecture=90))

    def added(self) -> None:
        """Launches the scaled and accumulated GEMM of low-rank adapters, whose x is contiguous."""
        one = replace(self, page_rows=(0, self.page_rows[1]))
        x, weight, offsets, out = one.operands()
        pages = one.pages("low", "rows")
        triton_grouped_gemm.add_low_rank(out, x, weight=weight, offsets=offsets, scale=2.0, **pages)

    def weight_grad(self) -> None:
        """Launches the weight gradient, with the strides of the weights, from a contiguous gradient."""
        one = replace(self, page_rows=(self.page_rows[0], 0))
        x, weight, offsets, grad = one.operands()
        more = {"row_alignment": self.row_alignment, **one.pages("x")}
        triton_grouped_gemm.grouped_gemm_weight_grad(x, grad, offsets=offsets, out=weight, **more)

    def added_weight_grad(self) -> None:
        """Launches the weight gradient, scaled and accumulated into fp32 memory."""
        one = replace(self, page_rows=(self.page_rows[0], 0))
        x, weight, offsets, grad = one.operands()
        main_grad = torch.empty_like(weight, dtype=torch.float32)
        more = {"scale": 0.5, "is_added": True, "row_alignment": self.row_alignment, **one.pages("x")}
        triton_grouped_gemm.grouped_gemm_weight_grad(x, grad, offsets=offsets, out=main_grad, **more)


def activation(
    dtype: str,
    ffn: int,
    *,
    form: ActivationForm,
    scale: str | None,
    num_rows: Tensor | None = NUM_ROWS,
    page_rows: int = 0,
) -> None:
    """Launches an activation and its gradient, of live rows or, without num_rows, of all rows.

    scale: dtype of the rows' weights, or None. num_rows: [1], int64, or None. page_rows: rows of a page of gate_up, 0
    without pages. With pages, the gradient's kernel also writes act.
    """
    element, shape = DTYPES[dtype], (ROWS, ffn * (2 if form.activation.is_gated else 1))
    gate_up, act = _rows_of(shape, page_rows, dtype=element), _empty(ROWS, ffn, dtype=element)
    weights = None if scale is None else torch.empty(ROWS, dtype=DTYPES[scale])
    pages = _pages_of("gate_up", shape, page_rows, dtype=element)
    triton_activations.gated_activation(gate_up, weights, num_rows=num_rows, out=act, **form.arguments, **pages)
    triton_activations.gated_activation_backward(
        act,
        gate_up,
        scale=weights,
        num_rows=num_rows,
        grad_gate_up=_empty(*shape, dtype=element),
        grad_scale=None if weights is None else torch.empty_like(weights),
        act=act if page_rows else None,
        **form.arguments,
        **pages,
    )


def bias_in_pages(dtype: str, width: int, *, page_rows: int) -> None:
    """Launches the addition of biases to rows in pages. page_rows: rows of a page."""
    element, shape, offsets = DTYPES[dtype], (ROWS, width), torch.empty(32, dtype=torch.int32)
    rows, bias = _rows_of(shape, page_rows, dtype=element), _empty(32, width, dtype=element)
    pages = _pages_of("rows", shape, page_rows, dtype=element)
    triton_biases.add_expert_bias(rows, bias, scale=None, offsets=offsets, share=1.0, **pages)


def biases(dtype: str, experts: int, width: int, *, scale: str | None) -> None:
    """Launches the addition of biases and their gradients. scale: dtype of the rows' weights, or None."""
    element = DTYPES[dtype]
    values, bias = _empty(ROWS, width, dtype=element), _empty(experts, width, dtype=element)
    weights = None if scale is None else torch.empty(ROWS, dtype=DTYPES[scale])
    offsets = torch.empty(experts, dtype=torch.int32)
    triton_biases.add_expert_bias(values, bias, scale=weights, offsets=offsets, share=1.0)
    triton_biases.expert_bias_grad(values, scale=weights, offsets=offsets, out=bias)
    if weights is not None:
        triton_biases.expert_bias_scale_grad(values, bias, offsets=offsets, share=1.0, out=weights)


def backward_of(grad: Tensor, *, experts: int = 32) -> None:
    """Launches the kernels that accept gradients with any strides. grad: [C, W], float dtype."""
    width = grad.shape[1]
    offsets, num_rows = torch.empty(experts, dtype=torch.int32), torch.empty(1, dtype=torch.int64)
    gate_up, bias = (
        torch.empty(rows, columns, dtype=grad.dtype) for rows, columns in ((ROWS, 2 * width), (experts, width))
    )
    weights = torch.empty(ROWS, dtype=torch.float32)
    triton_activations.gated_activation_backward(
        grad,
        gate_up,
        scale=weights,
        num_rows=num_rows,
        grad_gate_up=gate_up,
        grad_scale=weights,
        activation="swiglu",
    )
    weight_grad = torch.empty(experts, 2 * width, width, dtype=grad.dtype)
    triton_grouped_gemm.grouped_gemm_weight_grad(gate_up, grad, offsets=offsets, out=weight_grad)
    triton_biases.expert_bias_grad(grad, scale=weights, offsets=offsets, out=bias)
    triton_biases.expert_bias_scale_grad(grad, bias, offsets=offsets, share=1.0, out=weights)


def rows_moved(dtype: str, width: int, *, is_aligned: bool = True, topk: int = 8) -> None:
    """Launches the gather of tokens' rows into a buffer, and their sum per token."""
    tokens, rows = (_empty(size, width, dtype=DTYPES[dtype], is_aligned=is_aligned) for size in (TOKENS, ROWS))
    source, slots = torch.empty(ROWS, dtype=torch.int32), torch.empty(TOKENS, topk, dtype=torch.int32)
    triton_rows.gather_rows(tokens, source, num_rows=torch.empty(1, dtype=torch.int64), out=rows)
    triton_rows.sum_rows(rows, slots)


def gather_to_pages(dtype: str, width: int, *, page_rows: int) -> None:
    """Launches the gather of tokens' rows into pages. page_rows: rows of a page."""
    element, shape = DTYPES[dtype], (ROWS, width)
    tokens, rows = _empty(TOKENS, width, dtype=element), _rows_of(shape, page_rows, dtype=element)
    source, pages = torch.empty(ROWS, dtype=torch.int32), _pages_of("out", shape, page_rows, dtype=element)
    triton_rows.gather_rows(tokens, source, num_rows=NUM_ROWS, out=rows, **pages)


def choice(experts: int, *, topk: int = 8, dtype: str = "fp32", is_row: bool = True) -> None:
    """Launches the gradient of the logits.

    is_row: whether the gradient of the scores is one row, as for a balancing loss.
    """
    topk, element = min(topk, experts), {**DTYPES, "fp64": torch.float64}[dtype]
    weights, scores = (torch.empty(TOKENS, width, dtype=element) for width in (topk, experts))
    grad_scores = torch.empty(experts, dtype=element).expand(TOKENS, -1) if is_row else torch.empty_like(scores)
    indices = torch.empty(TOKENS, topk, dtype=torch.int64)
    triton_router.choice_grad(torch.empty_like(weights), weights, indices, grad_scores=grad_scores, scores=scores)


def order(experts: int, *, topk: int = 8, dtype: torch.dtype = torch.int64, is_aligned: bool = True) -> None:
    """Launches the kernels that order slots by expert and find the experts of received rows."""
    indices = _empty(TOKENS, topk, dtype=dtype, is_aligned=is_aligned)
    sizes = {"first_expert": 0, "num_experts": experts, "num_parts": 1, "rows_per_part": ROWS, "alignment": 1}
    triton_rows.order_slots(indices, **sizes)
    triton_rows.experts_of_rows(torch.empty(8, experts, dtype=torch.int64), rows_per_rank=ROWS // 8)


def stash(page_bytes: int, num_tensors: int, *, has_places: bool = False) -> None:
    """Launches the four operators of a page pool for a group of tensors.

    page_bytes: page size. has_places: whether tensors are computed in pages.
    """
    layout = PoolLayout(page_bytes, device_pages=64, host_pages=64)
    row_bytes = 4096
    specs = [
        TensorSpec(row_bytes, pitch_bytes=row_bytes, max_rows=ROWS, priority=Priority.INPUT) for _ in range(num_tensors)
    ]
    per_tensor = layout.pages_for(specs[0].max_bytes)
    tensors = encode_tensors(
        PlacedTensor(spec, table_start=index * per_tensor, slot=index) for index, spec in enumerate(specs)
    )
    moved = [torch.empty(ROWS * row_bytes, dtype=torch.uint8) for _ in specs]
    pages = [torch.empty(layout.page_bytes * 64, dtype=torch.uint8) for _ in range(2)]
    table = torch.empty(num_tensors * per_tensor, dtype=torch.int64)
    ring = torch.empty(layout.num_pages, dtype=torch.int32)
    held = torch.empty(num_tensors, len(Held), dtype=torch.int64)
    ends = [torch.empty(2, dtype=torch.int64) for _ in range(2)]
    numbers = {"layout": layout.numbers, "tensors": tensors}
    state: dict[str, Any] = {"table": table, "held": held, **numbers}
    one, three = (torch.empty(size, dtype=torch.int64) for size in (1, 3))
    counters = torch.empty(len(triton_kernels.Counter), dtype=torch.int64)
    places: dict[str, Any] = {}
    if has_places:
        places = {"places": torch.empty_like(table), "scratch": [0] * num_tensors}
    triton_kernels.plan(one, three, heads=ends[0], tails=ends[1], ring=ring, counters=counters, **state, **places)
    triton_kernels.stash(moved, pages[0], host_pages=pages[1], num_programs=0, **state)
    triton_kernels.restore(pages[0], pages[1], targets=moved, num_programs=0, **state)
    triton_kernels.release(ring, ends[1], **state)


@dataclass(frozen=True)
class Heads:
    """Heads of self-attention on a rank: D = width channels, of which 2 * half are rotated.

    norms: "plain" or "zero-centered" RMSNorms of queries and keys, or None.
    """

    dtype: str
    width: int
    half: int
    groups: int = 4
    queries: int = 8
    gates: int = 0
    norms: str | None = None
    is_interleaved: bool = False
    is_aligned: bool = True

    @property
    def can_be_wide(self) -> bool:
        """Whether rows and pairs start at multiples of 16 bytes."""
        element = _ALL_DTYPES[self.dtype].itemsize
        return self.is_aligned and self.width * element % 16 == self.half * element % 16 == 0

    def launch(self) -> None:
        """Launches norm and rotation of queries and keys, and their gradients."""
        element, groups, width = _ALL_DTYPES[self.dtype], self.groups, self.width
        parts = self.queries + self.gates + 2
        mixed = _empty(_SEQ, 2, groups, parts, width, dtype=element, is_aligned=self.is_aligned)
        weights = [None if self.norms is None else torch.empty(width, dtype=element) for _ in range(2)]
        table = [torch.empty(_SEQ, self.half, dtype=torch.promote_types(element, torch.float32)) for _ in range(2)]
        options: dict[str, Any] = {"eps": 1e-6, "interleaved": self.is_interleaved}
        options["zero_centered"] = self.norms == "zero-centered"
        query, key = triton_rope.rotate_qkv(mixed, *table, *weights, gates=self.gates, **options)
        gate = torch.empty(_SEQ, 2, groups, self.gates, width, dtype=element) if self.gates else None
        kept = None if self.norms is None else mixed
        triton_rope.rotate_qkv_grads(query, key, key, gate, kept, *table, *weights, **options)


_SEQ = 512


def rotated(dtype: str, width: int, half: int, *, first: int, is_interleaved: bool) -> None:
    """Launches the rotation of all heads, of which `first` channels come before the rotated ones, and its inverse."""
    t = torch.empty(_SEQ, 2, 16, width, dtype=DTYPES[dtype])
    table = [torch.empty(_SEQ, half, dtype=torch.float32) for _ in range(2)]
    for inverse in (False, True):
        triton_rope.rotate(t, *table, first=first, interleaved=is_interleaved, inverse=inverse)


# Storage formats by name: (masters, each moment, dtype of gradients, dtype of parameters or None if they are masters).
ADAM_FORMS: Mapping[str, tuple[str, str, str, str | None]] = {
    "fp32": ("fp32", "fp32", "fp32", None),
    "fp32, gradients in bf16": ("fp32", "fp32", "bf16", None),
    "fp32 masters of bf16": ("fp32", "fp32", "bf16", "bf16"),
    "fp32 masters of bf16, gradients in fp32": ("fp32", "fp32", "fp32", "bf16"),
    "fp32 masters of fp16": ("fp32", "fp32", "fp16", "fp16"),
    "fp32 masters of fp64": ("fp32", "fp32", "fp32", "fp64"),
    "bf16 with remainders": ("remainders", "fp32", "bf16", None),
    "bf16 with remainders, gradients in fp32": ("remainders", "fp32", "fp32", "bf16"),
    "bf16 states of fp32": ("bf16", "bf16", "fp32", "fp32"),
    "bf16 states": ("bf16", "bf16", "bf16", None),
    "fp16 states": ("fp16", "fp16", "fp16", "fp16"),
    "scaled fp16 states": ("scaled", "scaled", "fp16", "fp16"),
    "scaled fp16 states of bf16": ("scaled", "scaled", "bf16", "bf16"),
    "fp32 with scaled moments, gradients in fp64": ("fp32", "scaled", "fp64", None),
    "bf16 moments, fp32 masters of bf16": ("fp32", "bf16", "fp32", "bf16"),
}
_ALL_DTYPES = {**DTYPES, "fp64": torch.float64}


def adam(form: str, *, is_divided: bool = True, can_skip: bool = True, is_decoupled: bool = True) -> None:
    """Launches a step of Adam over one flat range. form: a storage format in ADAM_FORMS."""
    main, moment, grad, out = ADAM_FORMS[form]
    numel = 1 << 20
    number = torch.empty((), dtype=torch.float32)
    triton_adam.step_run(
        [_stored(kind, numel) for kind in (main, moment, moment)],
        torch.empty(numel, dtype=_ALL_DTYPES[grad]),
        out=None if out is None else torch.empty(numel, dtype=_ALL_DTYPES[out]),
        step=number,
        lr=number,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
        adam_w_mode=is_decoupled,
        bias_correction=True,
        divisor=number if is_divided else None,
        skip=number if can_skip else None,
    )


def quantized(dtype: str, width: int, block: int, *, num_rows: Tensor | None = NUM_ROWS) -> None:
    """Launches the quantization of rows, and their decoding. num_rows: [1], int64, or None."""
    rows, packed = _empty(ROWS, width, dtype=DTYPES[dtype]), BlockFormat(block).empty_rows(ROWS, width)
    triton_quantize.quantize(rows, block=block, num_rows=num_rows, out=packed)
    triton_quantize.dequantize(packed, block=block, num_rows=num_rows, out=rows)


def quantized_act(dtype: str, ffn: int, block: int, *, form: ActivationForm, scale: str | None = "fp32") -> None:
    """Launches an activation whose result is quantized. scale: dtype of the rows' weights, or None."""
    width = ffn * (2 if form.activation.is_gated else 1)
    gate_up, packed = _empty(ROWS, width, dtype=DTYPES[dtype]), BlockFormat(block).empty_rows(ROWS, ffn)
    weights = None if scale is None else torch.empty(ROWS, dtype=DTYPES[scale])
    triton_quantize.gated_activation_quantize(
        gate_up, weights, block=block, num_rows=NUM_ROWS, out=packed, **form.arguments
    )


def quantized_columns(width: int, block: int, *, rows: int = ROWS) -> None:
    """Launches the quantization of the columns of packed rows."""
    form = BlockFormat(block)
    packed, columns = form.empty_rows(rows, width), form.empty_rows(width, rows)
    triton_quantize.quantize_columns(packed, block=block, num_rows=NUM_ROWS, out=columns)


@dataclass(frozen=True)
class ScaledProduct:
    """Sizes of a grouped GEMM of block-scaled rows with weights [e, inner, outer]."""

    arithmetic: Arithmetic
    block: int
    experts: int
    inner: int
    outer: int

    @property
    def words(self) -> str:
        """Arithmetic and block for names of launches."""
        return f"{self.arithmetic.name.lower()}, blocks of {self.block}"

    def launches(self, name: str, launcher: Callable[[], None]) -> Iterator[Launch]:
        """Yields the launches of one of the methods below, for architectures that have the arithmetic."""
        for launch in launches(f"{name}, {self.words}", launcher):
            first = FIRST_ARCHITECTURES[self.arithmetic]
            yield replace(launch, case=replace(launch.case, first_architecture=first))

    def quantized_weights(self, dtype: str = "bf16", *, is_stored: bool = True) -> None:
        """Launches the quantization of the weights, or of a transposed view."""
        shape = (self.inner, self.outer) if is_stored else (self.outer, self.inner)
        weight, packed = _empty(self.experts, *shape, dtype=DTYPES[dtype]), self._weights()
        triton_quantize.quantize_squares(weight if is_stored else weight.transpose(1, 2), block=self.block, out=packed)

    def forward(self) -> None:
        """Launches the product with the weights."""
        self._product(self.inner, self.outer, is_transposed=False)

    def backward(self) -> None:
        """Launches the product with the transposed weights."""
        self._product(self.outer, self.inner, is_transposed=True)

    def weight_grad(self) -> None:
        """Launches the gradient of the weights."""
        form = BlockFormat(self.block)
        x, grad = form.empty_rows(self.inner, ROWS), form.empty_rows(self.outer, ROWS)
        out = _empty(self.experts, self.inner, self.outer, dtype=torch.bfloat16)
        offsets = torch.empty(self.experts, dtype=torch.int32)
        triton_products.scaled_weight_grad(
            x, grad, block=self.block, offsets=offsets, rows=ROWS, out=out, arithmetic=self.arithmetic
        )

    def _product(self, inner: int, outer: int, *, is_transposed: bool) -> None:
        x, out = BlockFormat(self.block).empty_rows(ROWS, inner), _empty(ROWS, outer, dtype=torch.bfloat16)
        triton_products.scaled_product(
            x,
            self._weights(),
            block=self.block,
            offsets=torch.empty(self.experts, dtype=torch.int32),
            width=self.outer,
            is_transposed=is_transposed,
            out=out,
            arithmetic=self.arithmetic,
        )

    def _weights(self) -> Tensor:
        return BlockFormat(self.block).empty_rows(self.experts, self.inner, self.outer)


def _stored(kind: str, numel: int) -> StoredFloats:
    if kind == "remainders":
        return WithRemainder(torch.zeros(numel, dtype=torch.bfloat16))
    if kind == "scaled":
        return ScaledHalf(torch.empty(numel, dtype=torch.float16))
    tensor = torch.empty(numel, dtype=_ALL_DTYPES[kind])
    return Plain(tensor) if kind == "fp32" else Rounded(tensor)


# Section: the matrix.


def matrix() -> list[Launch]:
    """Returns all launches that the launchers can choose, one per compiled kernel.

    Axes are crossed if they interact: dtype, sizes that are or are not multiples of 16, optional arguments, layout of
    weights, and the constants COUNT, BLOCK and GROUPS. Alignment of addresses and of the number of rows is varied for
    one value of GROUPS, and strides of gradients for one case of each kernel that accepts any strides.
    """
    found = (
        _products(),
        _activations(),
        _biases(),
        _strided_grads(),
        _choices(),
        _orders(),
        _rows(),
        _stashes(),
        _paged(),
        _heads(),
        _adams(),
        _block_scaled(),
    )
    return distinct(itertools.chain.from_iterable(found))


def _products() -> Iterator[Launch]:
    sizes = list(itertools.product((2048, 2040), (1536, 1544)))
    for dtype, experts, (inner, outer), is_stored in itertools.product(DTYPES, EXPERTS, sizes, (True, False)):
        product = Product(dtype, experts, inner, outer, is_stored=is_stored)
        yield from _product(product, "")
    for dtype, is_stored in itertools.product(DTYPES, (True, False)):
        yield from _product(Product(dtype, 32, 2048, 1536, is_stored=is_stored, is_aligned=False), ", addresses + 1")
        yield from _product(Product(dtype, 32, 2048, 1536, rows=ROWS - 1, is_stored=is_stored), ", odd rows")
        # The smallest rank of an adapter.
        yield from _product(Product(dtype, 32, 1, 1536, is_stored=is_stored), "")


def _product(product: Product, more: str) -> Iterator[Launch]:
    layout = "stored" if product.is_stored else "transposed"
    words = f"{product.dtype}, {product.experts} experts, {product.inner} x {product.outer} {layout}{more}"
    yield from launches(f"product, {words}", product.forward)
    yield from launches(f"added product, {words}", product.added)
    yield from launches(f"weight gradient, {words}", product.weight_grad)
    # Padded experts are in buffers, whose addresses are aligned.
    if product.is_aligned and product.rows % GPU_ROW_ALIGNMENT == 0:
        padded = replace(product, row_alignment=GPU_ROW_ALIGNMENT)
        yield from launches(f"weight gradient, padded, {words}", padded.weight_grad)


GATED = ("swiglu", "geglu", "geglu_tanh", "quick_geglu")
PLAIN = ("silu", "gelu", "gelu_tanh", "quick_gelu", "squared_relu")


def _activations() -> Iterator[Launch]:
    forms = [ActivationForm(name) for name in (*GATED, *PLAIN)] + [ActivationForm(name, 7.0, 1.0) for name in GATED]
    for dtype, form, scale, ffn in itertools.product(("bf16", "fp32"), forms, (None, "fp32"), (2048, 2040)):
        name = f"{form.name}{'' if form.clamp is None else ' clamped'}"
        words = f"{name}, {dtype}{', scaled' if scale else ''}, ffn {ffn}"
        run = functools.partial(activation, dtype, ffn, form=form, scale=scale)
        yield from launches(words, run)
    for dtype, ffn in itertools.product(DTYPES, (1, 16, 96, 2040, 4096)):
        run = functools.partial(activation, dtype, ffn, form=ActivationForm(), scale=dtype)
        yield from launches(f"swiglu, {dtype}, scaled in {dtype}, ffn {ffn}", run)
    # Of dense layers and of dynamic buffers.
    for dtype, form, scale in itertools.product(("bf16", "fp32"), forms, (None, "fp32")):
        if dtype == "bf16" or form == ActivationForm():
            name = f"{form.name}{'' if form.clamp is None else ' clamped'}"
            run = functools.partial(activation, dtype, 2048, form=form, scale=scale, num_rows=None)
            yield from launches(f"{name}, {dtype}{', scaled' if scale else ''}, ffn 2048, all rows", run)


def _biases() -> Iterator[Launch]:
    for dtype, experts, scale, width in itertools.product(DTYPES, EXPERTS, (None, "fp32"), (2048, 2040)):
        run = functools.partial(biases, dtype, experts, width, scale=scale)
        yield from launches(f"{dtype}, {experts} experts, width {width}{', scaled' if scale else ''}", run)


def _strided_grads() -> Iterator[Launch]:
    for dtype in DTYPES:
        # Gradients of a sum, an expanded number, and of a transposed output.
        grads = {
            "one gradient": torch.empty(1, 1, dtype=DTYPES[dtype]).expand(ROWS, 2048),
            "gradient by columns": torch.empty(2048, ROWS, dtype=DTYPES[dtype]).t(),
        }
        for words, grad in grads.items():
            yield from launches(f"{dtype}, {words}", functools.partial(backward_of, grad))


def _rows() -> Iterator[Launch]:
    for dtype, width, is_aligned in itertools.product(DTYPES, (1, 8, 96, 2040, 2048), (True, False)):
        run = functools.partial(rows_moved, dtype, width, is_aligned=is_aligned)
        words = f"{dtype}, width {width}{'' if is_aligned else ', addresses + 1'}"
        can_be_wide = is_aligned and width * DTYPES[dtype].itemsize % 16 == 0
        yield from launches(words, run, can_be_wide=can_be_wide)


def _choices() -> Iterator[Launch]:
    for experts, dtype, is_row in itertools.product((*EXPERTS, 512), ("fp32", "fp64"), (True, False)):
        words = f"{dtype}, {experts} experts{'' if is_row else ', a gradient for each token'}"
        yield from launches(words, functools.partial(choice, experts, dtype=dtype, is_row=is_row))


def _orders() -> Iterator[Launch]:
    for experts, dtype, is_aligned in itertools.product((*EXPERTS, 512), (torch.int64, torch.int32), (True, False)):
        kind = "" if dtype == torch.int64 else ", int32"
        words = f"{experts} experts{kind}{'' if is_aligned else ', addresses + 1'}"
        yield from launches(words, functools.partial(order, experts, dtype=dtype, is_aligned=is_aligned))


def _stashes() -> Iterator[Launch]:
    for page_bytes, count in itertools.product(PAGES, triton_kernels.COUNTS):
        run = functools.partial(stash, page_bytes, count)
        yield from launches(f"pages of {page_bytes} bytes, {count} tensors", run, can_be_wide=True)


def _paged() -> Iterator[Launch]:
    # Pages with fewer rows than a tile, and with more.
    sizes, page_rows = ((2048, 1536), (2040, 1544)), (16, 128)
    for dtype, (inner, outer), rows in itertools.product(("bf16", "fp32"), sizes, page_rows):
        product = Product(dtype, 32, inner, outer, page_rows=(rows, rows))
        yield from _product(product, f", in pages of {rows} rows")
    for dtype in DTYPES:
        product = Product(dtype, 32, 2048, 1536, page_rows=(128, 128))
        yield from product.by_descriptors(f"product, {dtype}, 32 experts, 2048 x 1536 stored, by descriptors")
    for dtype, width in itertools.product(("bf16", "fp32"), (2048, 2040)):
        words = f"{dtype}, width {width}, in pages of 96 rows"
        can_be_wide = width * DTYPES[dtype].itemsize % 16 == 0
        run = functools.partial(gather_to_pages, dtype, width, page_rows=96)
        yield from launches(words, run, can_be_wide=can_be_wide)
        yield from launches(words, functools.partial(bias_in_pages, dtype, width, page_rows=96))
    forms = (ActivationForm(), ActivationForm("swiglu", 7.0, 1.0), ActivationForm("squared_relu"))
    for dtype, form, rows in itertools.product(("bf16", "fp32"), forms, (96, 128)):
        name = f"{form.name}{'' if form.clamp is None else ' clamped'}"
        run = functools.partial(activation, dtype, 2048, form=form, scale="fp32", page_rows=rows)
        yield from launches(f"{name}, {dtype}, scaled, ffn 2048, in pages of {rows} rows", run)
    for count in triton_kernels.COUNTS:
        run = functools.partial(stash, PAGES[0], count, has_places=True)
        yield from launches(f"pages of {PAGES[0]} bytes, {count} tensors, with places", run)


def _heads() -> Iterator[Launch]:
    # (D, D_rot / 2): whole heads, heads without a power of two of pairs, and heads with other channels.
    widths = ((128, 64), (64, 32), (256, 128), (80, 40), (256, 32), (13, 3))
    norms = (None, "plain")
    for (width, half), norm in itertools.product(widths, norms):
        yield from _of_heads(Heads("bf16", width, half, norms=norm), "")
    for (width, half), norm in itertools.product((widths[0], *widths[-3:]), norms):
        yield from _of_heads(Heads("fp32", width, half, norms=norm), "")
    for (width, half), norm in itertools.product((widths[0], *widths[-2:]), norms):
        yield from _of_heads(Heads("bf16", width, half, norms=norm, is_interleaved=True), ", interleaved")
    yield from _of_heads(Heads("bf16", 128, 64, norms="zero-centered"), "")
    for norm in norms:
        yield from _of_heads(Heads("bf16", 128, 64, norms=norm, gates=8), ", gates")
        yield from _of_heads(Heads("bf16", 128, 64, norms=norm, is_aligned=False), ", addresses + 1")
    for dtype, norm in itertools.product(("fp16", "fp64"), norms):
        yield from _of_heads(Heads(dtype, 128, 64, norms=norm), "")
    parts = (("bf16", False), ("bf16", True), ("fp32", True)), ((128, 64, 0), (192, 32, 128), (64, 32, 0))
    for (dtype, is_interleaved), (width, half, first) in itertools.product(*parts):
        words = f"heads, {dtype}, width {width}, {half} pairs from {first}{', interleaved' if is_interleaved else ''}"
        run = functools.partial(rotated, dtype, width, half, first=first, is_interleaved=is_interleaved)
        for name, launch in zip(("", ", back"), launches(words, run, can_be_wide=True), strict=True):
            yield replace(launch, case=replace(launch.case, name=launch.case.name + name))


def _of_heads(heads: Heads, more: str) -> Iterator[Launch]:
    norms = "" if heads.norms is None else f", {heads.norms} norms"
    words = f"qkv, {heads.dtype}, width {heads.width}, {heads.half} pairs{norms}{more}"
    yield from launches(words, heads.launch, can_be_wide=heads.can_be_wide)


def _adams() -> Iterator[Launch]:
    # Decoupled decay, a divisor and a flag that skips the update are independent.
    flags = ((True, True, True), (False, False, True), (True, True, False), (False, False, False))
    for form, (is_divided, can_skip, is_decoupled) in itertools.product(ADAM_FORMS, flags):
        kinds = {"divided": is_divided, "can skip": can_skip, "decoupled": is_decoupled}
        words = ", ".join([form, *(kind for kind, holds in kinds.items() if holds)])
        run = functools.partial(adam, form, is_divided=is_divided, can_skip=can_skip, is_decoupled=is_decoupled)
        yield from launches(words, run)


def _block_scaled() -> Iterator[Launch]:
    for dtype, width, block in itertools.product(("bf16", "fp32"), (2048, 2040, 96, 1), BLOCKS):
        words = f"{dtype}, width {width}, blocks of {block}"
        yield from launches(words, functools.partial(quantized, dtype, width, block))
        yield from launches(f"{words}, all rows", functools.partial(quantized, dtype, width, block, num_rows=None))
    forms = (ActivationForm(), ActivationForm("swiglu", 7.0, 1.0), ActivationForm("squared_relu"))
    for dtype, form, width, block in itertools.product(("bf16", "fp32"), forms, (2048, 2040), BLOCKS):
        name = f"{form.name}{'' if form.clamp is None else ' clamped'}"
        run = functools.partial(quantized_act, dtype, width, block, form=form)
        yield from launches(f"{name}, {dtype}, scaled, ffn {width}, blocks of {block}", run)
    for width, rows, block in itertools.product((2048, 2040), (ROWS, ROWS - 1), BLOCKS):
        run = functools.partial(quantized_columns, width, block, rows=rows)
        yield from launches(f"columns of {rows} rows, width {width}, blocks of {block}", run)
    for (arithmetic, block), experts, outer in itertools.product(SCALED_KINDS, (1, 32, 256), (1536, 1544)):
        product = ScaledProduct(arithmetic, block, experts, outer + 512, outer)
        words = f"{experts} experts, {product.inner} x {outer}"
        yield from product.launches(f"product, {words}", product.forward)
        yield from product.launches(f"backward, {words}", product.backward)
        yield from product.launches(f"weight gradient, {words}", product.weight_grad)
        if arithmetic is Arithmetic.DEQUANTIZED:
            for dtype, is_stored in itertools.product(("bf16", "fp32"), (True, False)):
                layout = "stored" if is_stored else "transposed"
                run = functools.partial(product.quantized_weights, dtype, is_stored=is_stored)
                yield from launches(f"weights, {dtype}, {words} {layout}, blocks of {block}", run)


# Section: hot shapes.


@dataclass(frozen=True)
class HotModel:
    """An MoE model as run by one rank in bf16.

    experts: number of the rank's experts. page_tokens: moe_paged_stash_page_size. heads: None for latent attention.
    """

    name: str
    hidden: int
    ffn: int
    experts: int
    topk: int
    page_tokens: int
    heads: Heads | None = None

    def launches(self) -> Iterator[Launch]:
        """Yields the launches of a layer with static experts and a stash: forward, recomputation and backward.

        They include the activation of dynamic experts.
        """
        fc1 = Product("bf16", self.experts, self.hidden, 2 * self.ffn, row_alignment=GPU_ROW_ALIGNMENT)
        fc2 = Product("bf16", self.experts, self.ffn, self.hidden, row_alignment=GPU_ROW_ALIGNMENT)
        # Gradients of rows are GEMMs with the transposed weights.
        back1 = Product("bf16", self.experts, 2 * self.ffn, self.hidden, is_stored=False)
        back2 = Product("bf16", self.experts, self.hidden, self.ffn, is_stored=False)
        for name, product in {"fc1": fc1, "fc2": fc2, "fc1 backward": back1, "fc2 backward": back2}.items():
            yield from launches(f"{self.name}: {name}", product.forward)
        for name, product in {"fc1": fc1, "fc2": fc2}.items():
            yield from launches(f"{self.name}: {name} weight gradient", product.weight_grad)
            yield from launches(f"{self.name}: {name} weight gradient, added to fp32", product.added_weight_grad)
        run = functools.partial(activation, "bf16", self.ffn, form=ActivationForm(), scale="fp32")
        yield from launches(f"{self.name}: swiglu", run)
        run = functools.partial(activation, "bf16", self.ffn, form=ActivationForm(), scale="fp32", num_rows=None)
        yield from launches(f"{self.name}: swiglu of all rows", run)
        yield from launches(f"{self.name}: choice", functools.partial(choice, self.experts, topk=self.topk))
        yield from launches(f"{self.name}: order", functools.partial(order, self.experts, topk=self.topk))
        run = functools.partial(rows_moved, "bf16", self.hidden, topk=self.topk)
        yield from launches(f"{self.name}: tokens", run, can_be_wide=True)
        yield from launches(f"{self.name}: weights", functools.partial(rows_moved, "fp32", 1, topk=self.topk))
        page_bytes = self.page_tokens * self.hidden * 2
        yield from launches(f"{self.name}: stash", functools.partial(stash, page_bytes, 4), can_be_wide=True)
        yield from self._paged_launches()
        yield from self._scaled_launches()
        if self.heads is not None:
            yield from launches(f"{self.name}: heads", self.heads.launch, can_be_wide=True)
        else:
            # Queries, and the key that all heads share.
            for width, first in ((192, 128), (64, 0)):
                run = functools.partial(rotated, "bf16", width, 32, first=first, is_interleaved=True)
                for direction, launch in zip(("", " back"), launches("", run, can_be_wide=True), strict=True):
                    name = f"{self.name}: heads of {width}{direction}"
                    yield replace(launch, case=replace(launch.case, name=name))

    def _paged_launches(self) -> Iterator[Launch]:
        """Yields the launches that read or write x and gate_up in pages of at least 128 rows of each."""
        elements = 128 * math.lcm(self.hidden, 2 * self.ffn)
        x_rows, gate_up_rows = elements // self.hidden, elements // (2 * self.ffn)
        fc1 = Product(
            "bf16",
            self.experts,
            self.hidden,
            2 * self.ffn,
            page_rows=(x_rows, gate_up_rows),
            row_alignment=GPU_ROW_ALIGNMENT,
        )
        run = functools.partial(
            activation, "bf16", self.ffn, form=ActivationForm(), scale="fp32", page_rows=gate_up_rows
        )
        tokens = functools.partial(gather_to_pages, "bf16", self.hidden, page_rows=x_rows)
        plan = functools.partial(stash, 2 * elements, 4, has_places=True)
        yield from launches(f"{self.name}: fc1, in pages", fc1.forward)
        yield from fc1.by_descriptors(f"{self.name}: fc1, in pages, by descriptors")
        yield from launches(f"{self.name}: fc1 weight gradient, in pages", fc1.weight_grad)
        yield from launches(f"{self.name}: fc1 weight gradient, added to fp32, in pages", fc1.added_weight_grad)
        yield from launches(f"{self.name}: swiglu, in pages", run)
        yield from launches(f"{self.name}: tokens, in pages", tokens, can_be_wide=True)
        yield from (one for one in launches(f"{self.name}: places", plan) if one.kernel_name == "plan_kernel")

    def _scaled_launches(self) -> Iterator[Launch]:
        """Yields the launches of block-scaled experts: rows and weights are quantized, and products run in 8 bits."""
        for block in BLOCKS:
            name = f"{self.name}: blocks of {block}"
            yield from launches(f"{name}, x", functools.partial(quantized, "bf16", self.hidden, block))
            yield from launches(f"{name}, gate_up", functools.partial(quantized, "bf16", 2 * self.ffn, block))
            run = functools.partial(quantized_act, "bf16", self.ffn, block, form=ActivationForm())
            yield from launches(f"{name}, swiglu", run)
            yield from launches(f"{name}, columns of x", functools.partial(quantized_columns, self.hidden, block))
        for arithmetic, block in SCALED_KINDS:
            fc1 = ScaledProduct(arithmetic, block, self.experts, self.hidden, 2 * self.ffn)
            fc2 = ScaledProduct(arithmetic, block, self.experts, self.ffn, self.hidden)
            for name, product in {"fc1": fc1, "fc2": fc2}.items():
                yield from product.launches(f"{self.name}: {name}", product.forward)
                yield from product.launches(f"{self.name}: {name} backward", product.backward)
                yield from product.launches(f"{self.name}: {name} weight gradient", product.weight_grad)
                if arithmetic is Arithmetic.DEQUANTIZED:
                    words = f"{self.name}: blocks of {block}, weights of {name}"
                    yield from launches(words, product.quantized_weights)


_QWEN3_HEADS = Heads("bf16", 128, 64, groups=4, queries=8, norms="plain")
_MIXTRAL_HEADS = Heads("bf16", 128, 64, groups=8, queries=4)
HOT_MODELS: Sequence[HotModel] = (
    # On one GPU.
    HotModel("Qwen3-30B-A3B", hidden=2048, ffn=768, experts=128, topk=8, page_tokens=16, heads=_QWEN3_HEADS),
    HotModel("Qwen3-30B-A3B, EP 8", hidden=2048, ffn=768, experts=16, topk=8, page_tokens=16, heads=_QWEN3_HEADS),
    HotModel("Mixtral-8x7B, EP 8", hidden=4096, ffn=14336, experts=1, topk=2, page_tokens=8, heads=_MIXTRAL_HEADS),
    HotModel("DeepSeek-V3, EP 64", hidden=7168, ffn=2048, experts=4, topk=8, page_tokens=16),
)
HOT_ADAM = ("bf16 with remainders, gradients in fp32", "scaled fp16 states of bf16", "fp32 masters of bf16")


def hot() -> list[Launch]:
    """Returns the launches of HOT_MODELS and of their optimizers, one per compiled kernel."""
    models = itertools.chain.from_iterable(model.launches() for model in HOT_MODELS)
    steps = itertools.chain.from_iterable(launches(f"Adam: {form}", functools.partial(adam, form)) for form in HOT_ADAM)
    return distinct(itertools.chain(models, steps))
