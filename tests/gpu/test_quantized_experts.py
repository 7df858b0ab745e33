"""Experts that compute in 8 bits on a GPU: each kernel of a layer is compared with the CPU's on the same operands, a
stash and graphs change no bit, and weights are quantized once in a step. Skipped without a GPU.
"""

import math
from collections import Counter as Multiset
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.checks.reporting import graphs_of
from megatron.core.block_scaled.format import BLOCKS, BlockFormat
from megatron.core.device import default_device, prepare_device
from megatron.core.transformer.moe.expert_function import ExpertMath
from megatron.core.transformer.moe.paged_stash import Counter, PagedStash, PagePool, PoolLayout
from megatron.core.transformer.moe.quantized_experts import QuantizedWeights
from tests.gpu.test_block_scaled import check_sums, exact
from tests.gpu.test_experts_in_pages import FFN, HIDDEN, LAYERS, Model, counters_of

triton_products = pytest.importorskip("megatron.core.block_scaled.triton_products")

pytestmark = pytest.mark.gpu

each_form = pytest.mark.parametrize("form", [BlockFormat(block) for block in BLOCKS], ids=lambda form: f"{form.block}s")
CAPACITY = 1536  # all rows of 500 tokens with two choices, and the padding of four experts to multiples of 128
# A difference in the last bit of bf16 may move an element to the next number of 8 bits.
ERROR = 4e-2
# Pages on the device and on the host in units of the pages that one layer needs at most, whether experts compute in
# them, and what happens.
POOLS: dict[str, tuple[float, float, bool, set[Counter]]] = {
    "copies": (3.0, 0.0, False, set()),
    "copies, on both": (0.4, 3.0, False, {Counter.SPILLED_PAGES}),
    "copies, few": (1.1, 0.0, False, {Counter.DROPPED_GATE_UP}),
    "pages": (3.0, 0.0, True, set()),
    "pages, on both": (0.4, 3.0, True, {Counter.SPILLED_PAGES}),
    "pages, few": (1.1, 0.0, True, {Counter.DROPPED_GATE_UP}),
}


class QuantizedModel(Model):
    """The same layers in 8 bits. step: number of the step; None quantizes weights in each forward."""

    capacity = CAPACITY

    step: int | None = None

    def __init__(self, device: torch.device, form: BlockFormat) -> None:
        super().__init__(device)
        self.alignment = form.block
        self.weights = [QuantizedWeights(form) for _ in range(LAYERS)]

    def math_of(self, number: int) -> ExpertMath:
        fc1, fc2 = self.layers[number]
        params = fc1.weight, fc2.weight
        quantized = self.weights[number].of_step(self.step, params[0].detach(), params[1].detach(), params=params)
        return self.math._replace(quantized=quantized)

    def renew(self) -> None:
        """Quantizes the weights for self.step, as `prepare` of captured experts does."""
        for number in range(LAYERS):
            self.math_of(number)

    def change(self) -> None:
        """Updates the weights."""
        with torch.no_grad():
            for fcs in self.layers:
                for fc in fcs:
                    fc.weight.mul_(-1.25)


def made_stash(device: torch.device, form: BlockFormat, pool: str) -> PagedStash:
    """Builds a stash whose pages all contain NaN."""
    on_device, on_host, in_pages, _ = POOLS[pool]
    of_x, of_gate_up = form.row_bytes(HIDDEN), 2 * 2 * FFN
    page_bytes = 2 * math.lcm(of_x, of_gate_up)
    most = sum(-(-CAPACITY * row_bytes // page_bytes) for row_bytes in (of_x, of_gate_up))
    layout = PoolLayout(page_bytes, *(round(share * most) for share in (on_device, on_host)))
    scratch = {"scratch_pages": most, "scratch_sets": 2} if in_pages else {}
    memory = PagePool(device, layout, **scratch)
    for pages in (memory.arena, memory.host_pages):
        pages.fill_(0xFF)
    return PagedStash(memory, computes_in_pages=in_pages, prefetch_groups=0, reserved_share=0.0)


class Recorded(TorchDispatchMode):
    """Records calls of operators in 8 bits: name, result, operands and arguments, on the CPU. num: calls by name.

    The argument `out` is the memory of the result before the call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any, list[Tensor], dict[str, Any]]] = []
        self.num: Multiset[str] = Multiset()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "block_scaled":
            return func(*args, **(kwargs or {}))
        given = {name: _copy(one) for name, one in kwargs.items() if name != "out"}
        operands, out = [_copy(one) for one in args], kwargs["out"]
        given["out"] = _copy(out)
        func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        self.num[name] += 1
        self.calls.append((name, _copy(out), operands, {**given, "func": func}))
        return None


def _copy(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def check_product(found: Tensor, operands: list[Tensor], given: dict[str, Any], *, kind: Any) -> None:
    """Asserts that the live rows of a product are within the bound of its arithmetic. See docs/block_scaled.md."""
    (x, weight), form, width = operands, BlockFormat(given["block"]), given["width"]
    inner = width if given["is_transposed"] else weight.shape[1]
    start = 0
    for expert, end in enumerate(given["offsets"].tolist()):
        if end > start:
            left, right = exact(x[start:end], form, inner), exact(weight[expert], form, width)
            check_sums(found[start:end], left, right.t() if given["is_transposed"] else right, kind=kind)
        start = end


def check_weight_grad(found: Tensor, operands: list[Tensor], given: dict[str, Any], *, kind: Any) -> None:
    """Asserts that a gradient of weights is within the bound of its arithmetic. See docs/block_scaled.md."""
    form, rows, start = BlockFormat(given["block"]), given["rows"], 0
    left, right = (exact(one, form, rows) for one in operands)
    for expert, end in enumerate(given["offsets"].tolist()):
        check_sums(found[expert], left[:, start:end], right[:, start:end].t(), kind=kind)
        start = end


def check_bytes(name: str, found: Tensor, operands: list[Tensor], given: dict[str, Any]) -> None:
    """Asserts that a kernel wrote the bytes of the CPU's operator. An activation may round differently."""
    func, out = given.pop("func"), given["out"]
    func(*operands, **given)
    if name == "gated_activation_quantize":
        assert (found != out).float().mean() < 0.02
    else:
        assert torch.equal(found, out), name


@each_form
def test_each_kernel_of_a_layer_has_the_bytes_of_the_cpu_or_is_within_its_bound(form: BlockFormat) -> None:
    prepare_device(device := default_device())
    model, kind = QuantizedModel(device, form), triton_products.arithmetic_of(device, form.block)
    with Recorded() as recorded:
        model.gradients(None)
    of_layer = {"quantize_squares": 2, "quantize": 4, "scaled_product": 4, "gated_activation_quantize": 1}
    of_layer |= {"quantize_columns": 4, "scaled_weight_grad": 2}
    assert recorded.num == {name: LAYERS * number for name, number in of_layer.items()}
    for name, found, operands, given in recorded.calls:
        if name == "scaled_product":
            check_product(found, operands, given, kind=kind)
        elif name == "scaled_weight_grad":
            check_weight_grad(found, operands, given, kind=kind)
        else:
            check_bytes(name, found, operands, given)


@each_form
def test_layers_are_close_to_the_cpu(form: BlockFormat) -> None:
    prepare_device(device := default_device())
    found, expected = (QuantizedModel(one, form).gradients(None) for one in (device, torch.device("cpu")))
    for one, other in zip(found, expected, strict=True):
        distance = (one.cpu().double() - other).norm() / other.double().norm()
        print(f"distance from the CPU: {distance:.2e}")
        assert distance <= ERROR


@each_form
@pytest.mark.parametrize("pool", POOLS)
def test_a_stash_changes_no_bit(pool: str, form: BlockFormat) -> None:
    prepare_device(device := default_device())
    model, stash = QuantizedModel(device, form), made_stash(device, form, pool)
    model.gradients(stash)  # learns the order
    stash.reset()
    happened = set[Counter]()
    for seed in range(3):
        model.choose(seed=seed)
        found, expected = model.gradients(stash), model.gradients(None)
        counters = counters_of(stash)
        assert counters[Counter.VOID] == 0
        happened |= {one for one, count in counters.items() if count}
        assert all(map(torch.equal, found, expected))
        stash.reset()
    assert POOLS[pool][3] <= happened
    stash.pool.check_integrity_sync()


@pytest.mark.parametrize("pool", POOLS)
def test_a_replay_with_other_rows_and_renewed_weights_has_the_bits_of_eager_steps(pool: str) -> None:
    prepare_device(device := default_device())
    model, graphs = QuantizedModel(device, form := BlockFormat(128)), graphs_of(device)
    captured, eager = (made_stash(device, form, pool) for _ in range(2))
    model.step = 1
    for stash in (captured, eager):  # compiles the kernels and learns the order of groups
        with graphs.on_capture_stream():
            model.gradients(stash)
        stash.reset()
    with graphs.capturing() as graph, captured.captured():
        results = model.gradients(captured)
    for seed in range(4):
        model.choose(seed=seed)
        model.change()
        model.step = seed + 2
        model.renew()
        captured.reset()
        graph.replay()
        expected = model.gradients(eager)
        assert counters_of(captured) == counters_of(eager) and counters_of(eager)[Counter.VOID] == 0
        assert all(map(torch.equal, results, expected))
        eager.reset()


def test_weights_are_quantized_once_in_a_step_and_never_stale() -> None:
    prepare_device(device := default_device())
    model = QuantizedModel(device, BlockFormat(128))
    first: list[Tensor] = []
    for step in (1, 2):
        model.step = step
        with Recorded() as recorded:
            found = [model.gradients(None) for _ in range(2)]
        assert recorded.num["quantize_squares"] == 2 * LAYERS
        model.step = None
        assert all(map(torch.equal, found[1], model.gradients(None)))
        assert not first or not torch.equal(first[0], found[1][0])
        first = found[1]
        # Updates through memory that torch does not relate to the parameters, such as of a flat buffer.
        for fcs in model.layers:
            for fc in fcs:
                fc.weight.data.mul_(-1.25)
