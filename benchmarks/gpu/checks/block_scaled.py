"""Compares kernels of block-scaled rows, a stash of 8 bits, and experts in 8 bits with the work in bf16 they replace.

    python -m benchmarks.gpu.checks.block_scaled [--seconds N] [--rounds N] [--small]

quantize, dequantize   rows of x in blocks of 32 or 128; copy_ that reads and writes as many bytes in all
activation             SwiGLU that quantizes its result in blocks of 128; SwiGLU alone
stash                  x and gate_up encoded, copied into pages and back, and decoded; the copies alone, in bf16
forward, grad_x        products of fc1 in blocks of 128, of operands that are quantized already; torch's grouped_mm
layer                  forward and backward of experts in blocks of 128, from tokens to their sums, with gradients of
                       weights added to fp32; the same experts in bf16. Weights are quantized before, as once in a step

The shape is a group of Qwen3-30B-A3B with 32,768 rows, H 2048 and F 768, in bf16, for 16 experts. The stash runs with
device pages and with host pages, without its plans, on one stream, so that nothing overlaps. us and other_us are
medians over rounds in which the two alternate. rate_x is the median ratio of the other time to ours: 8 bits are faster
above 1. gb_s counts bytes read and written, `bytes` is their number in 8 bits and `other_bytes` in the other
work; for the stash both are the bytes in pages. `arithmetic` names how products multiply (see triton_products.py).
There is no target.

Expected seconds on an H200: 32, of which the CUDA context takes 4 and 25 Triton kernels compile in about 1 s each.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu.checks import products
from benchmarks.gpu.checks.ceilings import run_tasks
from benchmarks.gpu.checks.products import WARM_TURNS, seconds_of
from benchmarks.gpu.checks.side_workers import Send, Task
from megatron.core.block_scaled import triton_products
from megatron.core.block_scaled.format import BLOCKS, BlockFormat
from megatron.core.block_scaled.operators import (
    activate_and_quantize,
    dequantize_rows,
    multiply,
    quantize_rows,
    quantize_weight,
)
from megatron.core.device import default_device, device_name
from megatron.core.fusions.gated_activation import ActivationForm, GatedActivation, activate_plainly
from megatron.core.tensor_parallel.weight_grads import GradOwner, WeightGrad, set_grad_owner
from megatron.core.transformer.module import LayerParts
from megatron.core.transformer.moe.expert_function import ExpertLinear, ExpertMath, expert_outputs
from megatron.core.transformer.moe.paged_stash.page_layout import Counter, PoolLayout, row_spec
from megatron.core.transformer.moe.paged_stash.page_pool import PagePool
from megatron.core.transformer.moe.paged_stash.row_encoding import decode, encode, encoded_bytes
from megatron.core.transformer.moe.quantized_experts import QuantizedWeights
from megatron.core.transformer.moe.static_rows import order_by_expert

HOPPER = BlockFormat(128)
PAGE_ROWS = 64  # rows of x in a page
# Relative to the norm of torch's result. Both operands have 4 significant bits: about 4%.
ERROR = 2.0**-4
LAYER_ERROR = 2.0**-3  # three roundings to 8 bits in a row


@dataclass(frozen=True)
class Shape:
    """Sizes of an expert group. rows: live rows of all experts together, of 9/8 as many in the buffers."""

    rows: int
    hidden: int
    ffn: int
    experts: int

    @property
    def capacity(self) -> int:
        """Number of rows of the buffers."""
        return self.rows + self.rows // 8


QWEN3 = Shape(32768, 2048, 768, 16)
SMALL = Shape(96, 64, 48, 3)


@dataclass(frozen=True)
class Compared:
    """Work in 8 bits, and other work that it is compared with.

    num_bytes: bytes that our work reads and writes, from which its rate follows, or 0. facts: further results.
    """

    ours: Callable[[], object]
    other: Callable[[], object]
    num_bytes: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)


def random(*sizes: int, device: torch.device) -> Tensor:
    """Returns random numbers, [*sizes], bf16, on the device."""
    return torch.randn(sizes, device=device, dtype=torch.bfloat16)


def copy_of(num_bytes: int, device: torch.device) -> Callable[[], Tensor]:
    """Returns a copy that reads and writes num_bytes in all. Its result is the target, [num_bytes // 2], uint8."""
    source, target = (torch.ones(num_bytes // 2, dtype=torch.uint8, device=device) for _ in range(2))
    return lambda: target.copy_(source)


def quantize(shape: Shape, device: torch.device, *, block: int) -> Compared:
    """Returns the quantization of x."""
    x, form = random(shape.rows, shape.hidden, device=device), BlockFormat(block)
    packed = form.empty_rows(*x.shape, device=device)
    num_bytes = x.nbytes + packed.nbytes
    return Compared(lambda: quantize_rows(x, form, out=packed), copy_of(num_bytes, device), num_bytes)


def dequantize(shape: Shape, device: torch.device, *, block: int) -> Compared:
    """Returns the decoding of x."""
    x, form = random(shape.rows, shape.hidden, device=device), BlockFormat(block)
    packed = quantize_rows(x, form)
    num_bytes = x.nbytes + packed.nbytes
    return Compared(lambda: dequantize_rows(packed, form, out=x), copy_of(num_bytes, device), num_bytes)


def activation(shape: Shape, device: torch.device) -> Compared:
    """Returns SwiGLU with the rows' weights, with and without quantization."""
    gate_up, weights = random(shape.rows, 2 * shape.ffn, device=device), torch.rand(shape.rows, device=device)
    packed, form = HOPPER.empty_rows(shape.rows, shape.ffn, device=device), ActivationForm()
    read = gate_up.nbytes + weights.nbytes
    return Compared(
        lambda: activate_and_quantize(gate_up, weights, HOPPER, activation=form, out=packed),
        lambda: activate_plainly(gate_up, weights, form=form),
        read + packed.nbytes,
        {"other_bytes": read + 2 * shape.rows * shape.ffn},
    )


class StashedGroup:
    """x and gate_up of a group that has pages. widths: bytes of a row of each in pages."""

    def __init__(self, shape: Shape, device: torch.device, widths: list[int], *, is_on_host: bool) -> None:
        specs = [row_spec(width, shape.capacity) for width in widths]
        unit = PoolLayout(2 * shape.hidden * PAGE_ROWS, device_pages=1)
        pages = sum(unit.pages_for(spec.max_bytes) for spec in specs)
        self._pool = PagePool(device, PoolLayout(unit.page_bytes, *((0, pages) if is_on_host else (pages, 0))))
        self._group = self._pool.open_group(specs)
        self._targets = [torch.empty(spec.max_bytes, dtype=torch.uint8, device=device) for spec in specs]
        self.num_rows = torch.full((1,), shape.rows, dtype=torch.int64, device=device)
        self._pool.plan(self._group, self.num_rows)
        assert self._pool.occupancy_sync().counters[Counter.VOID] == 0, "every tensor has pages"

    def there_and_back(self, sources: list[Tensor]) -> list[Tensor]:
        """Copies bytes of rows into pages and back, into other memory. sources, result: [C * width], uint8."""
        self._pool.stash(self._group, sources)
        self._pool.restore(self._group, self._targets)
        return self._targets


def stash(shape: Shape, device: torch.device, *, is_on_host: bool) -> Compared:
    """Returns copies of x and gate_up into pages and back, in 8 bits and in bf16.

    Raises AssertionError if they do not return what was encoded, or copied.
    """
    rows = [random(shape.capacity, width, device=device) for width in (shape.hidden, 2 * shape.ffn)]
    decoded = [torch.empty_like(one) for one in rows]
    widths = [encoded_bytes(one.shape[1]) for one in rows], [2 * one.shape[1] for one in rows]
    encoded, plain = (StashedGroup(shape, device, of_rows, is_on_host=is_on_host) for of_rows in widths)
    plain_bytes = [one.view(torch.uint8).view(-1) for one in rows]

    def ours() -> None:
        back = encoded.there_and_back([encode(one, encoded.num_rows) for one in rows])
        for one, out in zip(back, decoded, strict=True):
            decode(one, encoded.num_rows, out=out)

    ours()
    restored = plain.there_and_back(plain_bytes)
    for one, out, found, width in zip(rows, decoded, restored, widths[1], strict=True):
        expected = torch.empty_like(one)
        decode(encode(one, encoded.num_rows), encoded.num_rows, out=expected)
        assert torch.equal(out[: shape.rows], expected[: shape.rows]), "rows in 8 bits differ after the copies"
        live = shape.rows * width
        assert torch.equal(found[:live], one.view(torch.uint8).view(-1)[:live]), "rows in bf16 differ after the copies"
    in_pages, other_in_pages = (shape.rows * sum(of_rows) for of_rows in widths)
    facts = {"bytes": in_pages, "other_bytes": other_in_pages}
    return Compared(ours, lambda: plain.there_and_back(plain_bytes), facts=facts)


def product(shape: Shape, device: torch.device, *, name: str) -> Compared:
    """Returns a product of fc1. Raises AssertionError if it is not near torch's. name: "forward" or "grad_x"."""
    operands = products.Operands(products.Shape("fc1", shape.rows, shape.hidden, 2 * shape.ffn, shape.experts), device)
    rows, out = {"forward": (operands.x, operands.out), "grad_x": (operands.grad, operands.grad_x)}[name]
    packed, weight = quantize_rows(rows, HOPPER), quantize_weight(operands.weight, HOPPER)
    other = operands.theirs()[name]

    def ours() -> Tensor:
        is_transposed = name == "grad_x"
        options: dict[str, Any] = {"width": 2 * shape.ffn, "is_transposed": is_transposed, "out": out}
        return multiply(packed, weight, HOPPER, offsets=operands.offsets, **options)

    reference = other().float()
    distance = ((ours().float() - reference).norm() / reference.norm()).item()
    assert distance <= ERROR, f"{name}: a distance of {distance:.3f} from torch's result, must be at most {ERROR}"
    arithmetic = triton_products.arithmetic_of(device, HOPPER.block).name
    flops = 2 * shape.rows * shape.hidden * 2 * shape.ffn
    facts = {"arithmetic": arithmetic, "distance": round(distance, 5), "flops": flops}
    return Compared(ours, other, facts=facts)


class Experts:
    """The experts of a group as one layer. form: format in which they compute, or None for bf16.

    x: [N, H], bf16, and probs: [N, K], fp32, of tokens whose K choices give shape.rows rows.
    """

    def __init__(self, shape: Shape, device: torch.device, *, form: BlockFormat | None) -> None:
        generator, choices = torch.Generator().manual_seed(1), min(8, shape.experts)
        num_tokens, self._form, self._num_experts = shape.rows // choices, form, shape.experts
        chosen = torch.rand(num_tokens, shape.experts, generator=generator).topk(choices).indices
        alignment = HOPPER.block
        capacity = (-(-shape.capacity // alignment) + shape.experts) * alignment
        self._order = order_by_expert(chosen.to(device), shape.experts, capacity=capacity, alignment=alignment)
        self._offsets = self._order.rows_per_group.cumsum(0, dtype=torch.int32)

        def normal(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=generator).mul_(sizes[-1] ** -0.25).to(device, torch.bfloat16)

        self._x = normal(num_tokens, shape.hidden).requires_grad_()
        self._probs = torch.rand(num_tokens, choices, generator=generator).to(device).requires_grad_()
        self._grad = normal(num_tokens, shape.hidden)
        sizes = ((shape.hidden, 2 * shape.ffn), (shape.ffn, shape.hidden))
        weights = [nn.Parameter(normal(shape.experts, *size)) for size in sizes]
        self._fcs = [ExpertLinear(weight) for weight in weights]
        self._main_grads = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
        for weight, main_grad in zip(weights, self._main_grads, strict=True):
            set_grad_owner(weight, GradOwner(main_grad, partial(_add, main_grad)))
        self._math = ExpertMath(GatedActivation(F.silu, True), is_static=True, share=1.0, factors=(0.0, 0.0))
        if form is not None:
            fc1, fc2 = weights
            quantized = QuantizedWeights(form).of_step(1, fc1.detach(), fc2.detach(), params=(fc1, fc2))
            self._math = self._math._replace(quantized=quantized)

    def step(self) -> list[Tensor]:
        """Runs forward and backward; returns the output and the gradient of x, [N, H], bf16."""
        self._x.grad = self._probs.grad = None
        output = expert_outputs(
            self._x,
            self._probs,
            *self._fcs,
            math=self._math,
            parts=LayerParts(),
            offsets=self._offsets,
            order=self._order,
        )
        output.backward(self._grad)
        assert self._x.grad is not None, "x requires a gradient"
        return [output.detach(), self._x.grad]

    def weight_grads(self) -> list[Tensor]:
        """Returns the gradients of both weights, [e, I, O], summed over all steps: fp32, or bf16 on a CPU."""
        pairs = zip(self._fcs, self._main_grads, strict=True)
        return [main_grad if fc.weight.grad is None else fc.weight.grad for fc, main_grad in pairs]


def _add(main_grad: Tensor, grad: WeightGrad) -> None:
    grad.add_to(main_grad, scale=1.0, is_zero=False)


def layer(shape: Shape, device: torch.device) -> Compared:
    """Returns experts in 8 bits and in bf16. Raises AssertionError if their results are not near each other."""
    ours, other = (Experts(shape, device, form=form) for form in (HOPPER, None))
    results = ([*one.step(), *one.weight_grads()] for one in (ours, other))
    distances = []
    for found, expected in zip(*results, strict=True):
        distances.append(((found.float() - expected.float()).norm() / expected.float().norm()).item())
        limit = LAYER_ERROR
        assert distances[-1] <= limit, f"layer: a distance of {distances[-1]:.3f} from bf16, must be at most {limit}"
    arithmetic = triton_products.arithmetic_of(device, HOPPER.block).name
    flops = 3 * 2 * shape.rows * 3 * shape.hidden * shape.ffn
    facts = {"arithmetic": arithmetic, "distance": round(max(distances), 5), "flops": flops}
    return Compared(ours.step, other.step, facts=facts)


SIDES: Mapping[str, Callable[[Shape, torch.device], Compared]] = {
    **{f"quantize, blocks of {block}": partial(quantize, block=block) for block in BLOCKS},
    **{f"dequantize, blocks of {block}": partial(dequantize, block=block) for block in BLOCKS},
    "stash": partial(stash, is_on_host=False),
    "stash, host pages": partial(stash, is_on_host=True),
    "forward": partial(product, name="forward"),
    "grad_x": partial(product, name="grad_x"),
    "activation": activation,
    "layer": layer,
}
SIDE_SECONDS = 2


def main() -> None:
    """Measures each side. Exits with status 1 if one fails, INCOMPLETE if some were not started."""
    options = parse_options()
    shape = SMALL if options.small else QWEN3
    tasks = [
        Task(name, SIDE_SECONDS, partial(measure, build=build, shape=shape, rounds=options.rounds))
        for name, build in SIDES.items()
    ]
    sys.exit(run_tasks(tasks, seconds=options.seconds))


def measure(send: Send, *, build: Callable[[Shape, torch.device], Compared], shape: Shape, rounds: int) -> None:
    """Sends both times of a side, their ratio and rates."""
    device = default_device()
    one = build(shape, device)
    turns = [(seconds_of(one.ours, device), seconds_of(one.other, device)) for _ in range(rounds)][WARM_TURNS:]
    seconds, other_seconds = (statistics.median(column) for column in zip(*turns, strict=True))
    line: dict[str, Any] = {"us": round(1e6 * seconds, 2), "other_us": round(1e6 * other_seconds, 2)}
    line["rate_x"] = round(statistics.median(other / ours for ours, other in turns), 4)
    if one.num_bytes:
        line |= {"bytes": one.num_bytes, "gb_s": round(one.num_bytes / seconds / 1e9, 2)}
    if "flops" in one.facts:
        line["tflop_s"] = round(one.facts["flops"] / seconds / 1e12, 2)
    send(device=device_name(device), **line, **one.facts)


def parse_options() -> argparse.Namespace:
    """Parses the command line of this check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=25.0, help="no side starts without its expected seconds left")
    parser.add_argument("--small", action="store_true", help="tiny sizes, also on the CPU")
    parser.add_argument(
        "--rounds", type=int, default=23, help=f"rounds, of which {WARM_TURNS} are not counted (default: 23)"
    )
    options = parser.parse_args()
    if options.rounds <= WARM_TURNS:
        parser.error(f"--rounds is {options.rounds}: must be above {WARM_TURNS}, the number of warm-up rounds")
    return options


if __name__ == "__main__":
    main()
