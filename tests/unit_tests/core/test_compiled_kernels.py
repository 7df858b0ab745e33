"""Every Triton kernel compiles for three generations of GPUs, and its resource usage is printed at the end of the run.

The launches of benchmarks/kernel_launches.py are tested at the end of this file: hot shapes compile to the results
in the committed table, and assumptions of launchers that do not hold are listed here.
"""

import ast
import functools
import importlib
import inspect
import itertools
import pkgutil
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron.core import block_scaled, fusions, optimizer, transformer
from megatron.core.transformer import moe
from megatron.core.transformer.moe import paged_stash
from tests.counts import long_count

triton = pytest.importorskip("triton")
from benchmarks import compiled_kernels, kernel_launches  # noqa: E402
from benchmarks.compiled_kernels import ARCHITECTURES, BINARIES, Facts, Row  # noqa: E402


def kernel_files() -> Iterator[ModuleType]:
    for package in (fusions, paged_stash, moe, transformer, optimizer, block_scaled):
        for module in pkgutil.iter_modules(package.__path__):
            if module.name.startswith("triton_"):
                yield importlib.import_module(f"{package.__name__}.{module.name}")


CASES = [case for module in kernel_files() if "compile_cases" in vars(module) for case in module.compile_cases()]


def operator_of(case: Any) -> str:
    """Returns the operator's name, with which a case's name begins."""
    return str(case.name).partition(",")[0]


def architectures_of(index: int) -> tuple[int, ...]:
    """Returns a case's architectures: all for the first case of each operator, and one in turn for the other cases."""
    is_first = all(operator_of(case) != operator_of(CASES[index]) for case in CASES[:index])
    return all_or_one_of(CASES[index], index, has_all=is_first)


def all_or_one_of(case: Any, index: int, *, has_all: bool) -> tuple[int, ...]:
    """Returns the architectures that a launcher allows for a case: all, as under `make soak`, or one in turn."""
    allowed = tuple(each for each in ARCHITECTURES if each >= case.first_architecture)
    turn = index % len(allowed)
    return allowed if has_all or long_count(0, soak=1) else allowed[turn : turn + 1]


@functools.cache
def compiled(index: int, architecture: int) -> Any:
    target = triton.backends.compiler.GPUTarget("cuda", architecture, 32)
    return triton.compile(CASES[index].source, target=target, options=dict(CASES[index].options))


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(CASES)), ids=[case.name for case in CASES])
def test_a_kernel_keeps_to_its_registers(index: int, tmp_path: Path, compiled_kernels: dict[str, list[str]]) -> None:
    takes = dict.fromkeys(ARCHITECTURES, "-".rjust(24))
    for architecture in architectures_of(index):
        cubin = compiled(index, architecture).asm["cubin"]
        (tmp_path / "cubin").write_bytes(cubin)
        command = [BINARIES / "cuobjdump", "--dump-resource-usage", tmp_path / "cubin"]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        # Functions that are not inlined have separate lines. The maximum is the kernel's usage.
        used = {
            kind: max(map(int, re.findall(rf"{kind}:(\d+)", usage))) for kind in ("REG", "STACK", "SHARED", "LOCAL")
        }
        shared = max(used["SHARED"], compiled(index, architecture).metadata.shared)
        takes[architecture] = f"{used['REG']:4} {used['STACK']:3} {shared:7} {len(cubin):7}"
        assert used["STACK"] + used["LOCAL"] == 0, usage
    compiled_kernels[CASES[index].name] = list(takes.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "instructions"),
    [
        ("plan", ["ld.global.gpu.acquire.b64"]),
        ("release", ["atom.global.gpu.release.exch.b64"]),
        ("stash", ["ld.global.v2.b64", "st.global.v2.b64"]),  # 16 bytes at a time
        ("restore", ["ld.global.v2.b64", "st.global.v2.b64"]),
        # 16 bytes of fp32 or 8 bytes of four halves; one rounding per operation.
        ("adam", ["ld.global.v4.b32", "st.global.v4.b32", "mul.rn.f32", "add.rn.f32", "div.rn.f32", "sqrt.rn.f32"]),
    ],
)
def test_a_kernel_has_the_instructions_that_it_counts_on(name: str, instructions: list[str]) -> None:
    indices = [index for index, case in enumerate(CASES) if case.name.startswith(name)]
    codes = {
        (index, architecture): compiled(index, architecture).asm["ptx"]
        for index in indices
        for architecture in architectures_of(index)
    }
    assert {architecture for _, architecture in codes} == set(ARCHITECTURES)
    assert all(instruction in code for instruction in instructions for code in codes.values())


@pytest.mark.slow
def test_kernels_that_quantize_do_not_flush_subnormal_numbers() -> None:
    cases = [index for index, case in enumerate(CASES) if re.match(r"(de)?quantize|scaled_", case.name)]
    codes = [compiled(index, architectures_of(index)[-1]).asm["ptx"] for index in cases]
    assert len(codes) > 20 and not any(".ftz" in code for code in codes)


def launched_kernels() -> set[str]:
    """Returns the names of the kernels that launchers launch, which end with _kernel, unlike functions of kernels."""
    functions = [item for module in kernel_files() for item in vars(module).items()]
    kind = triton.runtime.jit.JITFunction
    return {name for name, value in functions if isinstance(value, kind) and name.endswith("_kernel")}


def test_kernels_are_launched_by_prepared_launches_alone() -> None:
    nodes = [node for module in kernel_files() for node in ast.walk(ast.parse(inspect.getsource(module)))]
    subscripted = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)]
    assert [ast.unparse(node) for node in subscripted] == []


def test_every_launched_kernel_is_compiled_here_for_every_architecture() -> None:
    launched = launched_kernels()
    for architecture in ARCHITECTURES:
        here = [case for index, case in enumerate(CASES) if architecture in architectures_of(index)]
        assert len(launched) >= 3 and launched == {case.source.fn.__name__ for case in here}


# --- The matrix and the hot shapes of benchmarks/compiled_kernels.py ---

# (kernel, miss) -> launches of hot shapes, with the architectures on which they miss. Remove entries that are fixed.
HOT_MISSES: dict[tuple[str, str], dict[str, tuple[int, ...]]] = {
    # 2 instructions, with 128 experts.
    ("grouped_gemm_kernel", "spills"): {"Qwen3-30B-A3B: fc1 backward": (80,)},
}
# (miss, kernel, dtype) -> launches of the matrix that miss on sm_80, sm_90 and sm_100.
MATRIX_MISSES: dict[tuple[str, str, str], tuple[int, int, int]] = {
    # Of a table's int64 entries in PTX, ptxas loads only the low words, which are wider than elements of odd widths.
    ("lost by ptxas", "grouped_gemm_kernel", "bf16"): (4, 4, 4),
    ("lost by ptxas", "grouped_gemm_kernel", "fp32"): (4, 4, 4),
    ("lost by ptxas", "weight_grad_kernel", "bf16"): (4, 4, 4),
    ("lost by ptxas", "weight_grad_kernel", "fp32"): (4, 4, 4),
    ("narrow", "gather_kernel", "bf16"): (3, 3, 3),
    ("narrow", "gather_kernel", "fp16"): (2, 2, 2),
    ("narrow", "gather_kernel", "fp32"): (3, 3, 3),
    ("narrow", "sum_kernel", "bf16"): (2, 2, 2),
    ("narrow", "sum_kernel", "fp16"): (2, 2, 2),
    ("narrow", "sum_kernel", "fp32"): (2, 2, 2),
    ("no async copies", "grouped_gemm_kernel", "bf16"): (40, 40, 40),
    ("no async copies", "grouped_gemm_kernel", "fp16"): (36, 36, 36),
    ("no async copies", "weight_grad_kernel", "bf16"): (10, 10, 10),
    ("no async copies", "weight_grad_kernel", "fp16"): (6, 6, 6),
    # Widths that are no multiple of 128.
    ("no async copies", "scaled_gemm_kernel", "bf16"): (12, 12, 12),
    ("no async copies", "scaled_gemm_kernel", "fp8e4nv"): (0, 6, 12),
    ("spills", "act_gradient_kernel", "bf16"): (0, 2, 0),
    # Two of them are squared_relu's, which spills one register when it also writes act, in pages or not.
    ("spills", "act_gradient_kernel", "fp32"): (3, 3, 4),
    # Width 2040 in blocks of 128: 2 instructions.
    ("spills", "act_quantize_kernel", "bf16"): (2, 0, 0),
    ("spills", "quantize_kernel", "fp32"): (1, 0, 0),
    ("spills", "copy_kernel", ""): (12, 0, 0),
    ("spills", "grouped_gemm_kernel", "bf16"): (7, 4, 4),
    ("spills", "grouped_gemm_kernel", "fp16"): (7, 4, 4),
    ("spills", "grouped_gemm_kernel", "fp32"): (2, 0, 0),
    # 256 experts and widths that are no multiple of 128: 2 instructions.
    ("spills", "scaled_gemm_kernel", "fp8e4nv"): (0, 0, 1),
    # Decoded in blocks of 128 with an odd width of the result.
    ("spills", "scaled_weight_grad_kernel", "bf16"): (1, 0, 0),
    ("spills", "weight_grad_kernel", "bf16"): (4, 2, 1),
    ("spills", "weight_grad_kernel", "fp16"): (4, 2, 1),
    # With aligned experts and transposed weights: 6 instructions.
    ("spills", "weight_grad_kernel", "fp32"): (0, 0, 1),
}
HOT = kernel_launches.hot()
# Asynchronous copies of both operands in an iteration, by threads: 16 bytes each.
COPIES_OF_ITERATION = {"grouped_gemm_kernel": 12, "weight_grad_kernel": 8}


@pytest.fixture(scope="module")
def table() -> list[Row]:
    return compiled_kernels.read_table()


def hot_architectures(index: int) -> tuple[int, ...]:
    """Returns the architectures of a hot launch: all for each kernel's first or under `make soak`, else one in turn."""
    is_first = all(launch.kernel_name != HOT[index].kernel_name for launch in HOT[:index])
    return all_or_one_of(HOT[index].case, index, has_all=is_first)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(HOT)), ids=[f"{launch.kernel_name} {launch.case.name}" for launch in HOT])
def test_a_hot_shape_compiles_to_what_the_table_says(index: int, table: list[Row]) -> None:
    rows = compiled_kernels.rows_of(HOT[index : index + 1], hot=True, architectures=hot_architectures(index))
    for row in rows:
        pinned = {
            miss
            for (kernel, miss), launches in HOT_MISSES.items()
            if kernel == row.kernel and row.architecture in launches.get(row.name, ())
        }
        assert set(row.misses()) == pinned, row
        if triton.__version__ == compiled_kernels.table_version():
            assert row in table, f"run benchmarks/compiled_kernels.py --hot, and review what it changes: {row}"
        if row.kernel in compiled_kernels.PRODUCTS and row.architecture > 80:
            listing = compiled_kernels.listing_of(HOT[index], row.architecture)
            copies = 2 if row.name.endswith("by descriptors") else COPIES_OF_ITERATION[row.kernel]
            assert compiled_kernels.copies_of_iteration(listing) == copies, row


def test_the_table_has_each_launch_and_no_other(table: list[Row]) -> None:
    for hot, launches in ((True, HOT), (False, kernel_launches.matrix())):
        listed = [(row.kernel, row.name) for row in table if row.hot == hot and row.architecture == ARCHITECTURES[-1]]
        assert listed == [(launch.kernel_name, launch.case.name) for launch in launches], (
            "run benchmarks/compiled_kernels.py"
        )
    assert {row.kernel for row in table if not row.hot} == kernel_launches.kernels().keys() == launched_kernels()


def test_no_miss_is_new_and_none_that_is_gone_is_listed(table: list[Row]) -> None:
    found: dict[tuple[str, str], dict[str, tuple[int, ...]]] = {}
    for row in table:
        for miss in row.misses() if row.hot else ():
            launches = found.setdefault((row.kernel, miss), {})
            launches[row.name] = (*launches.get(row.name, ()), row.architecture)
    assert found == HOT_MISSES
    counts = compiled_kernels.misses_by_kind(row for row in table if not row.hot)
    keys = {key[:3] for key in counts}
    assert {key: tuple(counts[*key, architecture] for architecture in ARCHITECTURES) for key in keys} == MATRIX_MISSES


def test_the_page_is_that_of_the_table(table: list[Row]) -> None:
    page = compiled_kernels.page_of(table, compiled_kernels.table_version())
    assert compiled_kernels.PAGE.read_text() == page, "run benchmarks/compiled_kernels.py"


# `make test` compiles only the hot shapes above.
@pytest.mark.soak
@pytest.mark.parametrize("kernel", kernel_launches.kernels())
def test_the_matrix_compiles_to_what_the_table_says(kernel: str, table: list[Row]) -> None:
    launches = [launch for launch in kernel_launches.matrix() if launch.kernel_name == kernel]
    found = compiled_kernels.misses_by_kind(compiled_kernels.rows_of(launches, hot=False))
    assert found == compiled_kernels.misses_by_kind(row for row in table if row.kernel == kernel and not row.hot)


@pytest.mark.parametrize(
    ("architecture", "registers", "warps", "shared", "programs"),
    [
        (80, 255, 8, 65536, 1),  # registers: 65,280 of 65,536
        (80, 128, 8, 65536, 2),
        (90, 129, 8, 0, 1),  # 136 when rounded up
        (90, 200, 1, 0, 8),  # 2 warps in each quarter; ten would fit in an undivided register file
        (80, 32, 4, 82 * 1024, 1),  # shared memory: 83 of 164 KiB, including the reserved KiB
        (90, 32, 4, 82 * 1024, 2),  # 83 of 228 KiB
        (90, 32, 4, 0, 16),  # threads: 2048
        (100, 16, 1, 0, 32),  # resident blocks: 32
        (90, 128, 16, 0, 1),
    ],
)
def test_occupancy_is_the_least_of_the_limits(
    architecture: int, registers: int, warps: int, shared: int, programs: int
) -> None:
    found = compiled_kernels.occupancy(architecture, registers=registers, warps=warps, shared=shared)
    assert found == programs


def test_tensor_memory_limits_occupancy() -> None:
    assert compiled_kernels.occupancy(100, registers=32, warps=4, shared=0, tensor_columns=256) == 2


def test_instructions_are_read_from_listings_with_and_without_predicates() -> None:
    listing = """
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/             @!UP1 UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8] ;
        /*10000*/                  STL.64 [R1+0x8], R4 ;
    """
    assert compiled_kernels.machine_instructions(listing) == ["LDC", "LDG.E.128", "UTCHMMA", "STL.64"]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("", 0),
        ("LDG.E.128 R4, desc[UR4][R2.64]\nLDG.E.128 R8, desc[UR4][R2.64+0x800]\nFADD R4, R4, R8", 32),
        # The first is used before the second is loaded.
        ("LDG.E.128 R4, desc[UR4][R2.64]\nFADD R12, R7, R7\nLDG.E.128 R8, desc[UR4][R2.64]", 16),
        # The address of the third is the first: it waits for the first alone.
        ("LDG.E R4, desc[UR4][R2.64]\nLDG.E.64 R8, desc[UR4][R2.64]\n@P0 LDG.E R6, desc[UR4][R4.64]", 12),
        # Loads complete in order, so the use of the second also ends the first.
        ("LDG.E.64 R4, desc[UR4][R2.64]\nLDG.E.U16 R8, desc[UR4][R2.64]\nFADD R9, R8, R8\nLDG.E.64 R10, [R2.64]", 10),
        ("LDS.128 R4, [R2]\nSTG.E.128 desc[UR4][R2.64], R4", 0),
    ],
)
def test_loads_before_their_use_are_read_from_listings(lines: str, expected: int) -> None:
    listing = "".join(f"        /*{16 * index:04x}*/  {line} ;\n" for index, line in enumerate(lines.splitlines()))
    assert compiled_kernels.loaded_before_use(listing) == expected


def test_copies_of_an_iteration_are_those_of_the_shortest_loop_with_a_tensor_instruction() -> None:
    listing = """
.L_x_0:
        /*0000*/                   LDGSTS.E.128 [R2], [R4.64] ;
.L_x_1:
        /*0010*/                   LDGSTS.E.128 [R2], [R4.64] ;
        /*0020*/               @P1 UTMALDG.2D [UR4], [UR6] ;
        /*0030*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0040*/              @!P0 BRA `(.L_x_1) ;
.L_x_2:
        /*0050*/                   LDGSTS.E.128 [R2], [R4.64] ;
        /*0060*/               @P0 BRA `(.L_x_2) ;
        /*0070*/               @P0 BRA `(.L_x_3) ;
        /*0080*/                   BRA `(.L_x_0) ;
.L_x_3:
"""
    assert compiled_kernels.copies_of_iteration(listing) == 2


WIDE = compiled_kernels.wide_launches()


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(WIDE)), ids=[f"{one.kernel_name} {one.case.name}" for one in WIDE])
def test_a_memory_bound_kernel_keeps_more_bytes_in_flight_than_little_needs(index: int) -> None:
    found = compiled_kernels.in_flight(WIDE[index])
    assert found.bytes_of_processor > compiled_kernels.NEEDED_BYTES == 22803, found
    assert {one.kernel_name for one in WIDE} == set(compiled_kernels.MEMORY_BOUND)


def test_widths_and_tensor_instructions_are_read_from_ptx() -> None:
    ptx = """
        @%p1 ld.global.L1::evict_last.v4.b32 {%r1, %r2, %r3, %r4}, [ %rd1 + 0 ];
        st.global.v2.b64 [ %rd2 + 0 ], { %rd5, %rd6 };
        ld.global.gpu.acquire.b64 %rd7, [%rd8];
        wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%r1}, %rd1, %rd2, p, 1, 1;
    """
    facts = {"ptx_loads": 128, "ptx_stores": 128, "ptx_tensor": "wgmma.mma_async 1"}
    assert compiled_kernels.ptx_facts(ptx) == facts
    copy = "cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;"
    assert compiled_kernels.ptx_facts(copy)["ptx_loads"] == 128


ROW = Row(
    hot=True,
    kernel="grouped_gemm_kernel",
    name="product",
    dtype="bf16",
    can_be_wide=False,
    architecture=90,
    facts=Facts(8, 128, 0, 0, 0, 0, 128, 128, 24, "HGMMA 4", 2, 128, 128, "wgmma.mma_async 4"),
)


@pytest.mark.parametrize(
    ("changes", "misses"),
    [
        ({}, []),
        ({"stack": 8}, ["spills"]),
        ({"spills": 1}, ["spills"]),
        ({"programs": 0}, ["programs"]),
        ({"tensor": "HMMA 64"}, ["no tensor cores"]),
        ({"asynchronous": 0}, ["no async copies"]),
        ({"stores": 64}, ["lost by ptxas"]),
    ],
)
def test_a_product_misses_what_it_lacks(changes: dict[str, Any], misses: list[str]) -> None:
    assert replace(ROW, facts=replace(ROW.facts, **changes)).misses() == misses


def test_a_product_in_8_bits_misses_tensor_cores_if_it_is_emulated_in_bf16() -> None:
    row = replace(ROW, kernel="scaled_gemm_kernel", dtype="fp8e4nv")
    assert row.misses() == ["no tensor cores"]
    assert replace(row, facts=replace(row.facts, tensor="QGMMA 4")).misses() == []
    decoded = replace(row, dtype="bf16", architecture=100, facts=replace(row.facts, tensor="UTCHMMA 8"))
    assert decoded.misses() == [] and replace(decoded, dtype="fp8e4nv").misses() == ["no tensor cores"]


def test_a_copy_misses_wide_accesses_and_room_for_products() -> None:
    copy = replace(ROW, kernel="copy_kernel", can_be_wide=True, dtype="")
    narrow = replace(copy, facts=replace(copy.facts, warps=4, registers=136, programs=6, loads=64, ptx_loads=64))
    assert narrow.misses() == ["fills the SM", "narrow"]
    lean = replace(copy, facts=replace(copy.facts, warps=4, registers=128, programs=6))
    assert lean.misses() == []


# Hot GEMMs with 224 to 246 registers; at most 216 would leave capacity for a copy. The one in pages overlaps only with
# copies of the host tier.
WITHOUT_ROOM = {"Qwen3-30B-A3B: fc1", "Mixtral-8x7B, EP 8: fc1", "Qwen3-30B-A3B: fc1, in pages"}


def test_a_copy_leaves_room_for_a_product_on_an_sm_of_a_hopper(table: list[Row]) -> None:
    """Adds up registers per SM quarter, and shared memory, over one program of each of the two kernels."""
    hopper = [row for row in table if row.hot and row.architecture == 90]
    products = [row for row in hopper if row.kernel in compiled_kernels.PRODUCTS]
    copies = [row for row in hopper if row.kernel == "copy_kernel"]
    assert len(products) > len(WITHOUT_ROOM) and copies
    without_room = set()
    for product, copy in itertools.product(products, copies):
        both = (product.facts, copy.facts)
        # Warps are assigned to the quarters round-robin.
        in_quarter = sum(-(-facts.warps // 4) * compiled_kernels.registers_of(facts) // facts.warps for facts in both)
        taken = sum(facts.shared + compiled_kernels.RESERVED_BYTES for facts in both)
        if in_quarter > compiled_kernels.REGISTERS // 4 or taken > compiled_kernels.SHARED_BYTES[90]:
            without_room.add(product.name)
    assert without_room == WITHOUT_ROOM


def test_optimizer_programs_are_several_times_those_that_an_sm_runs() -> None:
    row = replace(ROW, kernel="adam_kernel", facts=replace(ROW.facts, warps=4, programs=16))
    assert row.misses() == [] and replace(row, facts=replace(row.facts, programs=17)).misses() == ["programs"]
