"""Block-scaled rows on a GPU: kernels write the bytes of the CPU's reference, products are within the bound of their
arithmetic, and a stash of 8 bits gives the same gradients with pages on the device and on the host. Skipped without a
GPU.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.checks.reporting import graphs_of
from megatron.core.block_scaled.format import BLOCKS, BlockFormat
from megatron.core.block_scaled.operators import (
    activate_and_quantize,
    dequantize_rows,
    multiply,
    quantize_columns,
    quantize_rows,
    quantize_weight,
    weight_gradient,
)
from megatron.core.device import default_device, prepare_device
from megatron.core.fusions.gated_activation import ActivationForm, activate_plainly
from megatron.core.transformer.moe.paged_stash import Counter, PagedStash, PagePool, PoolLayout
from tests.gpu.test_experts_in_pages import CAPACITY, Model
from tests.unit_tests.core.block_scaled.codes import rows_of_codes

triton_products = pytest.importorskip("megatron.core.block_scaled.triton_products")
Arithmetic = triton_products.Arithmetic

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BF16, FP32 = torch.bfloat16, torch.float32
each_form = pytest.mark.parametrize("form", [BlockFormat(block) for block in BLOCKS], ids=lambda form: f"{form.block}s")
# Numbers of rows, elements of a row and live rows. Widths are odd, smaller than a block, or larger than a tile.
SIZES = [(7, 1, 5), (5, 45, None), (9, 1000, 4), (4, 1024, 9), (3, 96, 0)]
# Kinds of arithmetic with the blocks for which a launcher can choose them.
KINDS = [(Arithmetic.PROMOTED, 128), (Arithmetic.DEQUANTIZED, 128), (Arithmetic.DEQUANTIZED, 32)]
KINDS += [(Arithmetic.NATIVE, 32)]
each_kind = pytest.mark.parametrize(("kind", "block"), KINDS, ids=[f"{kind.name}-{block}" for kind, block in KINDS])
EXPERTS = 3


def random(*shape: int, seed: int = 0) -> Tensor:
    """Returns fp32 values on the CPU, whose magnitudes differ among columns."""
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return torch.randn(shape, generator=generator) * torch.logspace(-4, 4, shape[-1])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


def filled(form: BlockFormat, *shape: int, device: str = "cpu") -> Tensor:
    """Returns packed rows for elements of a shape, which are not written yet."""
    return form.empty_rows(*shape, device=torch.device(device)).fill_(0xAA)


def on_both(num_rows: int | None) -> tuple[Tensor | None, Tensor | None]:
    """Returns a number of live rows on the GPU and on the CPU."""
    if num_rows is None:
        return None, None
    return torch.tensor([num_rows], device=DEVICE), torch.tensor([num_rows])


def same_numbers(found: Tensor, expected: Tensor) -> bool:
    """Returns whether two tensors have equal bits, except that all NaN are equal. Any device and float dtype."""
    bits = torch.int16 if expected.dtype is BF16 else torch.int32
    found = found.cpu()
    is_nan = expected.isnan()
    return torch.equal(found.isnan(), is_nan) and torch.equal(found.view(bits)[~is_nan], expected.view(bits)[~is_nan])


@each_form
def test_every_bf16_number_has_the_bytes_of_the_reference(form: BlockFormat) -> None:
    rows = rows_of_codes(form.block)
    expected, found = quantize_rows(rows, form), quantize_rows(rows.to(DEVICE), form)
    assert torch.equal(found.cpu(), expected)
    for dtype in (BF16, FP32):
        whole = dequantize_rows(expected, form, out=torch.zeros(rows.shape, dtype=dtype))
        assert same_numbers(dequantize_rows(found, form, out=torch.zeros_like(whole, device=DEVICE)), whole)


@each_form
def test_every_byte_decodes_under_every_scale_as_in_the_reference(form: BlockFormat) -> None:
    packed = form.empty_rows(256, 256).zero_()
    form.values(packed, 256).view(torch.uint8)[:] = torch.arange(256)
    form.scales(packed, 256)[:] = torch.arange(256)[:, None]
    expected = dequantize_rows(packed, form, out=torch.zeros(256, 256))
    assert same_numbers(dequantize_rows(packed.to(DEVICE), form, out=torch.zeros(256, 256, device=DEVICE)), expected)


@each_form
@pytest.mark.parametrize(("rows", "width", "live"), SIZES)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_only_live_rows_are_written_and_have_the_bytes_of_the_reference(
    dtype: torch.dtype, rows: int, width: int, live: int | None, form: BlockFormat
) -> None:
    x = random(rows, width).to(dtype)
    x[0, -1] = torch.nan
    expected, found = filled(form, rows, width), filled(form, rows, width, device=DEVICE)
    on_device, on_cpu = on_both(live)
    quantize_rows(x, form, num_rows=on_cpu, out=expected)
    quantize_rows(x.to(DEVICE), form, num_rows=on_device, out=found)
    assert torch.equal(found.cpu(), expected)
    whole = dequantize_rows(expected, form, num_rows=on_cpu, out=torch.full((rows, width), -1.0, dtype=dtype))
    back = torch.full((rows, width), -1.0, dtype=dtype, device=DEVICE)
    assert same_numbers(dequantize_rows(found, form, num_rows=on_device, out=back), whole)


@each_form
@pytest.mark.parametrize(("rows", "width", "live"), [(256, 96, 200), (100, 33, None), (31, 130, 0)])
def test_columns_have_the_bytes_of_the_reference(rows: int, width: int, live: int | None, form: BlockFormat) -> None:
    x = random(rows, width)
    x[1, 2] = torch.inf
    packed, (on_device, on_cpu) = quantize_rows(x, form), on_both(live)
    expected, found = filled(form, width, rows), filled(form, width, rows, device=DEVICE)
    quantize_columns(packed, form, width=width, num_rows=on_cpu, out=expected)
    quantize_columns(packed.to(DEVICE), form, width=width, num_rows=on_device, out=found)
    assert torch.equal(found.cpu(), expected)


@each_form
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("is_stored", [True, False], ids=["stored", "transposed"])
def test_weights_have_the_bytes_of_the_reference(is_stored: bool, dtype: torch.dtype, form: BlockFormat) -> None:
    weight = random(2, 150, 100).to(dtype)
    weight[1, 140, 3] = -torch.inf
    weight = weight if is_stored else weight.transpose(1, 2)
    assert torch.equal(quantize_weight(weight.to(DEVICE), form).cpu(), quantize_weight(weight, form))


@each_form
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("width", [1000, 104])
@pytest.mark.parametrize("activation", [ActivationForm(), ActivationForm("swiglu", 1.5, 1.0), ActivationForm("gelu")])
def test_an_activation_has_the_bytes_of_its_kernel_and_the_reference(
    activation: ActivationForm, dtype: torch.dtype, width: int, form: BlockFormat
) -> None:
    gate_up, scale, num_rows = (random(9, 2 * width) % 3).to(dtype).to(DEVICE), torch.rand(9, device=DEVICE), 7
    on_device, on_cpu = on_both(num_rows)
    # The CPU's exponential function may round differently from the GPU's, so only the quantization runs on the CPU.
    act = activate_plainly(gate_up, scale, form=activation, num_rows=on_device).cpu()
    act[num_rows:] = torch.nan
    expected = quantize_rows(act, form, num_rows=on_cpu, out=filled(form, *act.shape))
    found = filled(form, *act.shape, device=DEVICE)
    activate_and_quantize(gate_up, scale, form, activation=activation, num_rows=on_device, out=found)
    assert torch.equal(found.cpu(), expected)


def exact(packed: Tensor, form: BlockFormat, width: int) -> Tensor:
    """Returns decoded rows in fp64. packed: on the CPU."""
    return dequantize_rows(packed, form, out=torch.empty(packed.shape[0], width)).double()


def require(kind: Any, block: int) -> None:
    """Skips a test unless launchers choose this arithmetic, and prints that they did."""
    chosen = triton_products.arithmetic_of(torch.device(DEVICE), block)
    if chosen != kind:
        pytest.skip(f"products of blocks of {block} are {chosen.name} on this device")
    print(f"arithmetic of blocks of {block}: {chosen.name}")


def error_bound(kind: Any, num_terms: int, size: Tensor) -> Tensor:
    """Returns the error of sums that [Note: accuracy] of triton_products.py states.

    num_terms: K. size: S, the sums of magnitudes, fp64.
    """
    of_fp32 = 2 * num_terms * 2.0**-24 * size
    return of_fp32 if kind == Arithmetic.DEQUANTIZED else of_fp32 + 132 * 2.0**-13 * size


def check_sums(found: Tensor, left: Tensor, right: Tensor, *, kind: Any) -> None:
    """Asserts that found, [M, N], bf16 or fp32, is left @ right in fp64 up to the bound, and prints the largest error.

    left: [M, K]; right: [K, N], fp64.
    """
    sums, size = left @ right, left.abs() @ right.abs()
    # bf16 rounds results to half of their last of 8 bits.
    rounding = 2.0**-8 * sums.abs() if found.dtype is BF16 else 0.0
    error = ((found.double() - sums).abs() - rounding).clamp(min=0)
    # Rows and experts without terms have a size of 0.
    print(f"largest error / sum of magnitudes: {(error / size).nan_to_num().max().item():.2e}")
    assert (error <= error_bound(kind, left.shape[1], size) * (1 + 2.0**-8)).all()


@each_kind
@pytest.mark.parametrize("is_transposed", [False, True], ids=["forward", "transposed"])
@pytest.mark.parametrize(("dtype", "height", "width"), [(FP32, 256, 384), (BF16, 200, 1000)], ids=str)
def test_products_are_within_the_bound_of_their_arithmetic(
    dtype: torch.dtype, height: int, width: int, is_transposed: bool, kind: Any, block: int
) -> None:
    require(kind, block)
    form, offsets = BlockFormat(block), torch.tensor([70, 70, 331], dtype=torch.int32)
    inner, outer = (width, height) if is_transposed else (height, width)
    rows = normal(400, inner)
    rows[3, 1] = torch.nan
    x, weight = quantize_rows(rows, form), quantize_weight(normal(EXPERTS, height, width), form)
    out = torch.full((400, outer), -1.0, dtype=dtype, device=DEVICE)
    options: dict[str, Any] = {"width": width, "is_transposed": is_transposed}
    multiply(x.to(DEVICE), weight.to(DEVICE), form, offsets=offsets.to(DEVICE), out=out, **options)
    found, left = out.cpu(), exact(x, form, inner)
    assert found[3].isnan().all() and found[331:].eq(-1).all()
    found[3], left[3] = 0, 0
    for expert, live in ((0, slice(0, 70)), (2, slice(70, 331))):
        right = exact(weight[expert], form, width)
        check_sums(found[live], left[live], right.t() if is_transposed else right, kind=kind)


@each_kind
@pytest.mark.parametrize(("dtype", "inner", "outer"), [(FP32, 128, 256), (BF16, 72, 1000)], ids=str)
def test_weight_gradients_are_within_the_bound_of_their_arithmetic(
    dtype: torch.dtype, inner: int, outer: int, kind: Any, block: int
) -> None:
    require(kind, block)
    form, offsets = BlockFormat(block), torch.tensor([128, 128, 640], dtype=torch.int32)
    rows = [quantize_rows(normal(768, width), form) for width in (inner, outer)]
    columns = [quantize_columns(one, form, width=width) for one, width in zip(rows, (inner, outer), strict=True)]
    out = torch.full((EXPERTS, inner, outer), -1.0, dtype=dtype, device=DEVICE)
    weight_gradient(*(one.to(DEVICE) for one in columns), form, offsets=offsets.to(DEVICE), rows=768, out=out)
    left, right = (exact(one, form, 768) for one in columns)
    for expert, live in enumerate((slice(0, 128), slice(0, 0), slice(128, 640))):
        check_sums(out[expert].cpu(), left[:, live], right[:, live].t(), kind=kind)


# A stash of 8 bits.

# Pages on the device and on the host, of PAGE_BYTES. One layer needs at most 75 pages, and 143 in bf16.
PAGE_BYTES = 8192
POOLS = {"device": (600, 0), "host": (0, 600), "both": (40, 600)}
ERROR = 2e-2  # several roundings to bf16, in other orders; on a CPU, decoded rows change gradients by 3e-2 to 6e-2
FORM = BlockFormat(32)


def made_stash(device: torch.device, pool: str, *, dtype: str | None = "mxfp8", prefetch: int = 1) -> PagedStash:
    """Builds a stash that copies rows into pages, all of which contain NaN."""
    memory = PagePool(device, PoolLayout(PAGE_BYTES, *POOLS[pool]))
    for pages in (memory.device_pages, memory.host_pages):
        pages.fill_(0xFF)
    return PagedStash(memory, dtype=dtype, prefetch_groups=prefetch)


def round_trip(rows: Tensor) -> Tensor:
    """Returns what backward reads in place of saved rows, any dtype: [C, W] in bf16 are encoded and decoded."""
    if rows.shape[:1] != (CAPACITY,) or rows.dim() != 2 or rows.dtype is not BF16:
        return rows
    return dequantize_rows(quantize_rows(rows.detach(), FORM), FORM, out=torch.empty_like(rows))


def distance(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def test_a_stash_of_8_bits_gives_the_same_gradients_wherever_its_pages_are() -> None:
    prepare_device(device := default_device())
    model = Model(device)
    plain = model.gradients(made_stash(device, "device", dtype=None))
    with torch.autograd.graph.saved_tensors_hooks(round_trip, lambda rows: rows):
        decoded = model.gradients(None)
    first: list[Tensor] = []
    for pool in POOLS:
        for prefetch in (0, 1):
            stash = made_stash(device, pool, prefetch=prefetch)
            for _ in range(2):  # the second step knows the order of groups
                found = model.gradients(stash)
                counters = stash.pool.occupancy_sync().counters
                assert not counters[Counter.VOID] and bool(counters[Counter.SPILLED_PAGES]) == (pool != "device")
                stash.reset()
                first = first or found
                assert all(map(torch.equal, found, first)), (pool, prefetch)
            stash.pool.check_integrity_sync()
    assert torch.equal(first[0], plain[0]), "forward is exact"
    for one, near in zip(first[1:], decoded[1:], strict=True):
        assert distance(one, near) <= ERROR
    # Gradients of weights are products with the decoded rows.
    assert all(distance(one, other) > ERROR for one, other in zip(first[3:], plain[3:], strict=True))


@pytest.mark.parametrize("pool", POOLS)
def test_a_replay_of_a_stash_of_8_bits_with_other_rows_has_the_bits_of_eager_steps(pool: str) -> None:
    prepare_device(device := default_device())
    model, graphs = Model(device), graphs_of(device)
    captured, eager = made_stash(device, pool), made_stash(device, pool)
    for stash in (captured, eager):  # compiles the kernels and learns the order of groups
        with graphs.on_capture_stream():
            model.gradients(stash)
        stash.reset()
    with graphs.capturing() as graph, captured.captured():
        results = model.gradients(captured)
    for seed in range(4):
        model.choose(seed=seed)
        captured.reset()
        graph.replay()
        expected = model.gradients(eager)
        assert all(map(torch.equal, results, expected))
        eager.reset()
