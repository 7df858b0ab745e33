"""Prepared launches of Triton kernels, on CPU tensors that look like a GPU's, with stubs of compiler and driver."""

import cProfile
import functools
import itertools
import pstats
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
from benchmarks import kernel_launches  # noqa: E402
from megatron.core.block_scaled import triton_products, triton_quantize  # noqa: E402
from megatron.core.block_scaled.format import BlockFormat  # noqa: E402
from megatron.core.device import triton_launch  # noqa: E402
from megatron.core.device.triton_launch import PreparedLaunch, is_known_run, known_knobs, next_power_of_2  # noqa: E402
from megatron.core.fusions.gated_activation import ActivationForm  # noqa: E402
from megatron.core.transformer.moe import triton_rows  # noqa: E402
from megatron.core.transformer.moe.paged_stash.triton_grouped_gemm import Loads  # noqa: E402
from tests.counts import long_count  # noqa: E402

BACKEND = triton.compiler.make_backend(triton.backends.compiler.GPUTarget("cuda", 90, 32))
WARPS = {"num_warps": 4}


@functools.cache
def binder(kernel: Any) -> Any:
    return triton.runtime.jit.create_function_from_signature(kernel.signature, kernel.params, BACKEND)


class Compiled:
    """A compiled kernel of one specialization. public, direct: arguments of its launches through each interface."""

    function, packed_metadata = 17, (4, 1, 0)

    def __init__(self, specialization: str) -> None:
        self.specialization = specialization
        self.public: list[tuple[Any, ...]] = []
        self.direct: list[tuple[Any, ...]] = []

    def run(self, gridX: int, gridY: int, gridZ: int, stream: int, function: int, *args: Any) -> None:
        assert (stream, function, args[:4]) == (7, self.function, (self.packed_metadata, None, None, None))
        self.direct.append((gridX, gridY, gridZ, *args[4:]))


class Gpu:
    """Stands for Triton's compiler and driver. compiled: by kernel and specialization."""

    def __init__(self) -> None:
        self.compiled: dict[tuple[Any, str], Compiled] = {}
        self.current = 0
        self.active = SimpleNamespace(get_current_device=lambda: self.current, get_current_stream=lambda device: 7)

    def of(self, kernel: Any, *args: Any, **named: Any) -> Compiled:
        """Returns the kernel that Triton compiles for these arguments."""
        _, specialization, options = binder(kernel)(*args, **named)
        words = f"{specialization} {options}"
        return self.compiled.setdefault((kernel, words), Compiled(words))

    def run(self, kernel: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **named: Any) -> Compiled:
        """Replaces JITFunction.run."""
        compiled = self.of(kernel, *args, **named)
        bound, _, _ = binder(kernel)(*args, **named)
        addresses = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in bound.values()]
        compiled.public.append((*grid, 1, *addresses))
        return compiled


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    one = Gpu()
    monkeypatch.setattr(triton_launch, "driver", one)
    monkeypatch.setattr(triton_launch, "num_processors", lambda device: 132)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 0)
    monkeypatch.setattr(torch.accelerator, "device_index", lambda index: nullcontext())
    monkeypatch.setattr(
        triton.runtime.jit.JITFunction, "run", lambda kernel, *args, **named: one.run(kernel, *args, **named)
    )
    yield one


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["flag"])
def four_kernel(x, out, flag, count, width, scale, TILE: triton.language.constexpr):
    """Never runs."""


def prepared(width: int = 16, scale: float | None = 2.0, per_processor: int | None = None) -> PreparedLaunch:
    fixed = {"TILE": 8, "width": width, "scale": scale}
    return PreparedLaunch(four_kernel, fixed, options=WARPS, per_processor=per_processor)


def memory(offset: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(64, dtype=dtype)[offset:]


def test_a_repeated_launch_passes_what_triton_passed(gpu: Gpu) -> None:
    launch, tensors = prepared(), (memory(), None, memory())
    launch(5, tensors, (33,), columns=3)
    launch(5, tensors, (34,), columns=3)
    (compiled,) = gpu.compiled.values()
    (public,), (direct,) = compiled.public, compiled.direct
    x, flag = tensors[0].data_ptr(), tensors[2].data_ptr()
    assert public == (5, 3, 1, x, None, flag, 33, 16, 2.0, 8)
    assert direct == (5, 3, 1, x, 0, flag, 34, 16, 2.0, 8)  # 0: a null pointer, like None


def test_programs_are_limited_to_the_resident_ones_in_both_interfaces(gpu: Gpu) -> None:
    launch, tensors = prepared(per_processor=2), (memory(), memory(), memory())
    for programs in (1000, 1000, 263):
        launch(programs, tensors, (1,))
    (compiled,) = gpu.compiled.values()
    assert [grid[0] for grid in (*compiled.public, *compiled.direct)] == [264, 264, 263]


def test_each_specialization_of_triton_is_launched_with_its_own_kernel(gpu: Gpu) -> None:
    draw = random.Random(1)
    launches = [prepared(width, scale) for width, scale in itertools.product((1, 16, 17, 2**31), (None, 2.0))]
    number = long_count(2000, soak=20000)
    seen = 0
    for _ in range(number):
        launch = draw.choice(launches)
        x, out, flag = (memory(draw.choice((0, 1, 8)), draw.choice((torch.bfloat16, torch.float32))) for _ in range(3))
        tensors = (x, draw.choice((out, None)), flag)
        count = draw.choice((1, 15, 16, 2**31 - 1, 2**31, 2**40))
        wanted = gpu.of(four_kernel, *tensors, count, **launch._fixed, **WARPS)
        before = {key: len(one.direct) for key, one in gpu.compiled.items()}
        public = sum(len(one.public) for one in gpu.compiled.values())
        launch(1, tensors, (count,))
        launched = [one for key, one in gpu.compiled.items() if len(one.direct) > before.get(key, 0)]
        if sum(len(one.public) for one in gpu.compiled.values()) == public:
            seen += 1
            assert [one.specialization for one in launched] == [wanted.specialization]
    assert seen > number // 4


def every_launcher() -> None:
    """Runs the launcher of every kernel, with aligned and unaligned addresses."""
    for is_aligned, is_stored in itertools.product((True, False), repeat=2):
        product = kernel_launches.Product("bf16", 8, 64, 48, is_stored=is_stored, is_aligned=is_aligned)
        for run in (product.forward, product.added, product.weight_grad, product.added_weight_grad):
            run()
        kernel_launches.rows_moved("bf16", 96, is_aligned=is_aligned)
        kernel_launches.order(8, is_aligned=is_aligned)
    for page_rows in (16, 128):
        product = kernel_launches.Product("bf16", 8, 64, 48, page_rows=(page_rows, page_rows))
        for run in (product.forward, product.added, product.weight_grad, product.added_weight_grad):
            run()
        kernel_launches.gather_to_pages("bf16", 96, page_rows=page_rows)
        kernel_launches.bias_in_pages("bf16", 96, page_rows=page_rows)
        kernel_launches.activation("bf16", 96, form=ActivationForm(), scale="fp32", page_rows=page_rows)
    product.forward(Loads.DESCRIPTORS)
    kernel_launches.activation("bf16", 96, form=ActivationForm("swiglu", 7.0, 1.0), scale="fp32")
    kernel_launches.biases("bf16", 8, 96, scale="fp32")
    kernel_launches.choice(8)
    kernel_launches.stash(4096, 3)
    kernel_launches.stash(4096, 3, has_places=True)
    kernel_launches.Heads("bf16", 128, 64, norms="plain").launch()
    kernel_launches.rotated("bf16", 128, 64, first=0, is_interleaved=False)
    kernel_launches.adam("bf16 with remainders")
    kernel_launches.quantized("bf16", 96, 32)
    kernel_launches.quantized_act("bf16", 96, 32, form=ActivationForm())
    kernel_launches.quantized_columns(96, 32)
    scaled = kernel_launches.ScaledProduct(kernel_launches.Arithmetic.DEQUANTIZED, 32, 8, 64, 96)
    for run in (scaled.quantized_weights, scaled.forward, scaled.weight_grad):
        run()
    for page_rows in (16, 128):
        packed_rows_in_pages(page_rows)


def packed_rows_in_pages(page_rows: int) -> None:
    """Runs the launchers of block-scaled rows with operands in pages, and with an added weight gradient."""
    form, rows, inner, outer, bf16 = BlockFormat(32), 256, 128, 96, torch.bfloat16
    num_rows, offsets, table = torch.tensor([8]), torch.zeros(4, dtype=torch.int32), torch.arange(rows // page_rows)
    arenas = {"x": form.empty_rows(rows, inner).view(-1), "out": torch.empty(rows * outer, dtype=bf16)}
    row_bytes = form.row_bytes(inner)
    sizes = {"x": [page_rows * row_bytes, rows, row_bytes], "out": [page_rows * outer * 2, rows, outer]}
    columns = {width: form.empty_rows(width, rows) for width in (inner, outer)}
    triton_rows.gather_rows(
        form.empty_rows(8, inner),
        torch.zeros(rows, dtype=torch.int32),
        num_rows=num_rows,
        out=arenas["x"],
        out_table=table,
        out_sizes=sizes["x"],
    )
    for needed in (None, num_rows):
        triton_products.scaled_product(
            arenas["x"],
            form.empty_rows(4, inner, outer),
            block=32,
            offsets=offsets,
            width=outer,
            is_transposed=False,
            out=arenas["out"],
            needed=needed,
            x_table=table,
            x_sizes=sizes["x"],
            out_table=table,
            out_sizes=sizes["out"],
        )
    triton_quantize.gated_activation_quantize(
        arenas["out"],
        None,
        block=32,
        num_rows=num_rows,
        out=form.empty_rows(rows, outer // 2),
        activation="swiglu",
        gate_up_table=table,
        gate_up_sizes=sizes["out"],
    )
    triton_quantize.quantize_columns(
        arenas["x"], block=32, num_rows=num_rows, out=columns[inner], packed_table=table, packed_sizes=sizes["x"]
    )
    for dtype, scale in ((bf16, 1.0), (torch.float32, 0.5)):
        out = torch.empty(4, inner, outer, dtype=dtype)
        triton_products.scaled_weight_grad(
            columns[inner], columns[outer], block=32, offsets=offsets, rows=rows, out=out, scale=scale, is_added=True
        )


def test_launchers_pass_the_same_arguments_directly(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    call, compared = PreparedLaunch.__call__, []

    def both(launch: PreparedLaunch, programs: int, tensors: Any, counts: Any = (), *, columns: int = 1) -> None:
        for _ in range(2):
            call(launch, programs, tensors, counts, columns=columns)
        wanted = gpu.of(launch._kernel, *tensors, *counts, **launch._fixed, **launch._options)
        direct = wanted.direct.pop()
        launch._launch(programs, tensors, counts, columns=columns)
        public = [
            0 if value is None and is_tensor else value for value, is_tensor in flagged(wanted.public.pop(), tensors)
        ]
        assert direct == tuple(public)
        compared.append(launch._kernel.__name__)

    def flagged(values: tuple[Any, ...], tensors: Any) -> list[tuple[Any, bool]]:
        return [(value, 3 <= index < 3 + len(tensors)) for index, value in enumerate(values)]

    monkeypatch.setattr(PreparedLaunch, "__call__", both)
    every_launcher()
    assert set(compared) == set(kernel_launches.kernels())


CHANGES = ("enter hook", "exit hook", "debug", "unknown run", "another device", "a CPU", "unknown hooks")


@pytest.mark.parametrize("change", [*CHANGES, "no packed_metadata", "no function", "no run", "no get_current_stream"])
def test_a_launch_goes_through_triton_if(change: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    launch, tensors = prepared(), (memory(), memory(), memory())
    if change == "unknown run":
        monkeypatch.setattr(Compiled, "run", lambda compiled, grid, stream, *args: None)
    elif change == "no get_current_stream":
        del gpu.active.get_current_stream
    elif change.startswith("no "):
        monkeypatch.delattr(Compiled, change.removeprefix("no "))
    elif change == "unknown hooks":
        monkeypatch.setattr(triton_launch, "_KNOBS", None)
    launch(1, tensors, (1,))
    runtime = triton.knobs.runtime
    if change.endswith("hook"):
        monkeypatch.setattr(getattr(runtime, f"launch_{change.split()[0]}_hook"), "calls", [print])
    elif change == "debug":
        monkeypatch.setattr(runtime, "debug", True)
    elif change == "another device":
        gpu.current = 1
    elif change == "a CPU":
        monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: -1)
    launch(1, tensors, (1,))
    (compiled,) = gpu.compiled.values()
    assert len(compiled.public) == 2 and not compiled.direct


@pytest.mark.parametrize("change", ["", "unknown hooks", "enter hook", "debug"])
def test_triton_launches_on_the_tensors_device(change: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def device_index(index: int) -> Iterator[None]:
        before, gpu.current = gpu.current, index
        yield
        gpu.current = before

    gpu.current, seen = 1, []
    monkeypatch.setattr(torch.accelerator, "device_index", device_index)
    monkeypatch.setattr(
        triton.runtime.jit.JITFunction,
        "run",
        lambda kernel, *args, **named: (seen.append(gpu.current), gpu.run(kernel, *args, **named))[1],
    )
    if change == "unknown hooks":
        monkeypatch.setattr(triton_launch, "_KNOBS", None)
    elif change == "enter hook":
        monkeypatch.setattr(triton.knobs.runtime.launch_enter_hook, "calls", [print])
    elif change == "debug":
        monkeypatch.setattr(triton.knobs.runtime, "debug", True)
    launch = prepared()
    for _ in range(2):
        launch(1, (memory(), memory(), memory()), (1,))
    assert seen == [0, 0] and gpu.current == 1


def test_missing_hooks_are_an_unknown_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    assert known_knobs() == triton_launch._KNOBS is not None
    with monkeypatch.context() as patch:
        patch.delattr(triton.knobs, "HookChain")
        assert known_knobs() is None
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs, "runtime", SimpleNamespace(launch_enter_hook=print, launch_exit_hook=print))
        assert known_knobs() is None  # no debug
        triton.knobs.runtime.debug = False
        assert known_knobs() is None  # hooks without calls


def test_counts_that_a_kernel_is_specialized_on_are_refused(gpu: Gpu) -> None:
    launch = PreparedLaunch(four_kernel, {"TILE": 8, "scale": 1.0}, options=WARPS)
    with pytest.raises(AssertionError, match="is specialized on"):
        launch(1, (memory(), memory(), memory()), (3, 16))


def test_fixed_arguments_are_the_last_parameters() -> None:
    with pytest.raises(AssertionError, match=r"its last parameters are \['scale', 'TILE'\]"):
        PreparedLaunch(four_kernel, {"TILE": 8, "width": 1}, options=WARPS)


def test_the_installed_triton_has_the_known_interface() -> None:
    launcher = triton.backends.nvidia.driver.CudaLauncher
    assert is_known_run(functools.partial(launcher.__call__, None))
    assert not is_known_run(lambda grid, stream, *args: None)
    assert not is_known_run(lambda gridX, gridY, gridZ, stream, function: None)
    assert not is_known_run(lambda: None)
    assert not is_known_run(type)  # has no signature
    assert isinstance(triton.knobs.runtime.launch_enter_hook, triton.knobs.HookChain)


# Python and C functions called by a repeated launch, which cost most of its time. kernel[grid](...) makes 60 to 90.
CALLS, CALLS_OF_TENSOR = 10, 1


def test_a_repeated_launch_makes_few_calls(gpu: Gpu) -> None:
    launch, tensors = prepared(), (memory(), memory(), memory())
    assert calls_of(lambda: launch(1, tensors, (1,))) <= CALLS + CALLS_OF_TENSOR * len(tensors)
    rows, slots = torch.empty(64, 32, dtype=torch.bfloat16), torch.empty(16, 2, dtype=torch.int32)
    # Two more for the prepared launch and the result.
    assert calls_of(lambda: triton_rows.sum_rows(rows, slots)) <= CALLS + CALLS_OF_TENSOR * 3 + 3


def calls_of(launch: Any) -> int:
    """Returns the number of calls in a repeated launch, without those of the stubs."""
    launch()
    launch()
    profile = cProfile.Profile()
    profile.enable()
    launch()
    profile.disable()
    return int(pstats.Stats(profile).total_calls) - 2


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 1023, 1024, 1025])
def test_next_power_of_2_is_tritons(number: int) -> None:
    assert next_power_of_2(number) == triton.next_power_of_2(number)
