"""Compiles every Triton kernel for sm_80, sm_90 and sm_100 without a GPU, and reads its resources from machine code.

    python benchmarks/compiled_kernels.py [--hot | --only KERNEL ... | --in-flight | --products]

Writes benchmarks/results/compiled_kernels.csv (the whole matrix, which takes about half an hour on one core; --hot
recompiles only the hot shapes) and docs/compiled_kernels.md (its worst cases, hot shapes and misses). --in-flight only
prints the bytes that memory-bound kernels have in flight. --products only prints the GEMMs of hot shapes on sm_90 and
sm_100, also with another version of Triton than the table's. kernel_launches.py defines the launches of the matrix.
Needs no GPU: Triton includes ptxas, cuobjdump and nvdisasm.

[Note: occupancy]
The number of programs resident on an SM is limited by registers, shared memory, tensor memory and threads. From
the tables "Technical Specifications per Compute Capability" of the CUDA C++ Programming Guide: each of the three
architectures has 65,536 registers, 2048 threads and 32 blocks per SM, and 164, 228 and 228 KiB of shared memory, of
which 1 KiB is reserved for each block. Registers of a thread are allocated in units of 8, i.e. 256 for each
warp, and warps in groups of four, one for each quarter of an SM. Shared memory is allocated in units of 128 bytes.
sm_100 has 512 columns of tensor memory per SM.

[Note: bytes in flight] By Little's law, bandwidth is bytes in flight over latency. An H200 has 132 SMs and reads
4.3 TB/s with a latency of about 0.7 us, so each SM needs 23 KB of loads in flight on average. The maximum of a kernel
is computed from machine code: bytes that a thread has loaded before it uses the first of them, times the threads of
resident programs, times the share of a tile's columns that exist. Kernels need more than the average, because they also
compute and store.
"""

import argparse
import csv
import dataclasses
import io
import itertools
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from benchmarks import kernel_launches  # noqa: E402
from benchmarks.kernel_launches import Launch  # noqa: E402
from megatron.core.device.triton_compile import Residency  # noqa: E402

ARCHITECTURES = (80, 90, 100)
BINARIES = Path(triton.__file__).parent / "backends/nvidia/bin"
TABLE = ROOT / "benchmarks/results/compiled_kernels.csv"
PAGE = ROOT / "docs/compiled_kernels.md"

# Per SM. See [Note: occupancy].
REGISTERS, THREADS, BLOCKS, TENSOR_COLUMNS = 65536, 2048, 32, 512
SHARED_BYTES = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}
RESERVED_BYTES = 1024  # shared memory reserved for each block
# Tensor-core instructions of each architecture at full rate. sm_90 and sm_100 run older ones at a lower rate.
TENSOR_CORES = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}
# The same for 8-bit floats. An emulation in bf16 would have the instruction of TENSOR_CORES.
FP8_TENSOR_CORES = {90: "QGMMA", 100: "UTCQMMA"}
_TENSOR_CORE = r"(HMMA|HGMMA|QGMMA|UTC\w*MMA)\b"
PRODUCTS = ("grouped_gemm_kernel", "weight_grad_kernel")
SCALED_PRODUCTS = ("scaled_gemm_kernel", "scaled_weight_grad_kernel")
_ASYNCHRONOUS = ("LDGSTS", "UTMALDG", "UBLKCP")


@dataclass(frozen=True)
class Facts:
    """Resources and instructions of one compiled kernel.

    registers: registers per thread. stack: bytes per thread, including spills. spills: number of STL and LDL
    instructions. shared: dynamic shared memory of a program in bytes. tensor_columns: columns of tensor memory. loads,
    stores: widest access to global memory, in bits. asynchronous: number of instructions that copy global to shared
    memory. tensor: tensor-core instructions by name. programs: number of programs resident on an SM. All of these are
    read or computed from the machine code (SASS). ptx_loads, ptx_stores, ptx_tensor: the same for PTX, the input of
    ptxas.
    """

    warps: int
    registers: int
    stack: int
    spills: int
    shared: int
    tensor_columns: int
    loads: int
    stores: int
    asynchronous: int
    tensor: str
    programs: int
    ptx_loads: int
    ptx_stores: int
    ptx_tensor: str


def occupancy(architecture: int, *, registers: int, warps: int, shared: int, tensor_columns: int = 0) -> int:
    """Returns the number of programs that are resident on an SM at the same time. See [Note: occupancy]."""
    registers_of_warp = -(-registers // 8) * 8 * 32
    # Each quarter of an SM has a quarter of the registers.
    warps_that_fit = REGISTERS // 4 // registers_of_warp * 4
    per_block = -(-(shared + RESERVED_BYTES) // 128) * 128
    limits = [warps_that_fit // warps, SHARED_BYTES[architecture] // per_block, THREADS // (32 * warps), BLOCKS]
    if tensor_columns:
        limits.append(TENSOR_COLUMNS // tensor_columns)
    return min(limits)


def compile_launch(launch: Launch, architecture: int) -> Facts:
    """Compiles the kernel of a launch and reads its resources from the machine code."""
    compiled = _compiled(launch, architecture)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cubin"
        path.write_bytes(compiled.asm["cubin"])
        usage = _run("cuobjdump", "--dump-resource-usage", path)
        instructions = machine_instructions(_run("nvdisasm", "-c", path))
    # Functions that are not inlined have separate lines. The kernel's registers include theirs.
    most = {name: max(map(int, re.findall(rf"{name}:(\d+)", usage))) for name in ("REG", "STACK", "LOCAL")}
    warps, shared = compiled.metadata.num_warps, compiled.metadata.shared
    columns = getattr(compiled.metadata, "tmem_size", 0) or 0
    return Facts(
        warps=warps,
        registers=most["REG"],
        stack=most["STACK"] + most["LOCAL"],
        spills=sum(name.startswith(("STL", "LDL")) for name in instructions),
        shared=shared,
        tensor_columns=columns,
        loads=max([0, *(_bits(name) for name in instructions if name.startswith(("LDG.", "LDGSTS.", "UTMALDG.")))]),
        stores=max([0, *(_bits(name) for name in instructions if name.startswith("STG."))]),
        asynchronous=sum(name.startswith(_ASYNCHRONOUS) for name in instructions),
        tensor=_tensor_instructions(instructions, _TENSOR_CORE),
        programs=occupancy(architecture, registers=most["REG"], warps=warps, shared=shared, tensor_columns=columns),
        **ptx_facts(compiled.asm["ptx"]),
    )


def listing_of(launch: Launch, architecture: int) -> str:
    """Returns the machine code of a compiled launch, as nvdisasm lists it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cubin"
        path.write_bytes(_compiled(launch, architecture).asm["cubin"])
        return _run("nvdisasm", "-c", path)


def _compiled(launch: Launch, architecture: int) -> Any:
    target = GPUTarget("cuda", architecture, 32)
    return triton.compile(launch.case.source, target=target, options=dict(launch.case.options))


def ptx_facts(ptx: str) -> dict[str, Any]:
    """Returns the widest accesses to global memory, in bits, and the tensor-core instructions of a kernel's PTX."""
    widest = {"ld": 0, "st": 0}
    for kind, vector, bits in re.findall(r"\b(ld|st)\.global[\w.:]*?(?:\.v(\d))?\.[busf](\d+)\s", ptx):
        widest[kind] = max(widest[kind], int(vector or 1) * int(bits))
    for size in re.findall(r"\bcp\.async\.c[ag]\.shared\.global\S* \[[^]]*\], \[[^]]*\], (0x[0-9a-f]+|\d+)", ptx):
        widest["ld"] = max(widest["ld"], 8 * int(size, 0))
    instructions = re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b", ptx)
    names = _tensor_instructions(instructions, ".*")
    return {"ptx_loads": widest["ld"], "ptx_stores": widest["st"], "ptx_tensor": names}


def _tensor_instructions(names: Iterable[str], pattern: str) -> str:
    """Counts instructions whose name matches `pattern`, as in "HMMA 12". Cuts machine instructions at the first dot."""
    short = (name if name.islower() else name.partition(".")[0] for name in names)
    counts = Counter(name for name in short if re.match(pattern, name))
    return " ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def _run(program: str, *arguments: object) -> str:
    return subprocess.run([BINARIES / program, *map(str, arguments)], check=True, capture_output=True, text=True).stdout


# Address, predicate, name and operands in a line of nvdisasm.
_INSTRUCTION = r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*)"


def machine_instructions(listing: str) -> list[str]:
    """Returns the names of the instructions in a listing of nvdisasm, such as LDG.E.128."""
    return [name for name, _ in re.findall(_INSTRUCTION, listing, re.MULTILINE)]


def loaded_before_use(listing: str) -> int:
    """Returns the maximum number of bytes per thread that loads of global memory have in flight.

    listing: of nvdisasm. Loads complete in order, at the first use of a register of theirs or of a later load.
    """
    in_flight: list[tuple[range, int]] = []
    most = 0
    for name, operands in re.findall(_INSTRUCTION, listing, re.MULTILINE):
        used = [int(number) for number in re.findall(r"\bR(\d+)\b", operands)]
        waits = [index for index, (registers, _) in enumerate(in_flight) if any(one in registers for one in used)]
        in_flight = in_flight[max(waits, default=-1) + 1 :]
        if name.startswith("LDG."):
            size = _bits(name) // 8
            in_flight.append((range(used[0], used[0] + max(size // 4, 1)), size))
            most = max(most, sum(size for _, size in in_flight))
    return most


def copies_of_iteration(listing: str) -> int:
    """Returns the number of asynchronous copies in the main loop of a GEMM, the shortest with a tensor instruction.

    listing: of nvdisasm.
    """
    lines = listing.splitlines()
    labels = {line.strip().rstrip(":"): number for number, line in enumerate(lines) if line.startswith(".L_")}
    loops = []
    for number, line in enumerate(lines):
        target = re.search(r"\bBRA\b.*`\((\.L_\w+)\)", line)
        if target and labels.get(target[1], number) < number:
            names = machine_instructions("\n".join(lines[labels[target[1]] : number + 1]))
            if _tensor_instructions(names, _TENSOR_CORE):
                loops.append(names)
    return sum(name.startswith(_ASYNCHRONOUS) for name in min(loops, key=len))


def _bits(name: str) -> int:
    """Returns the width of a memory access from the instruction's name; 32 if the name does not contain it.

    Boxes of descriptors have rows of at least 16 bytes.
    """
    if name.startswith("UTMALDG"):
        return 128
    parts = name.split(".")
    widths = {"128": 128, "64": 64, "U16": 16, "S16": 16, "U8": 8, "S8": 8}
    return next((widths[part] for part in parts if part in widths), 32)


# Section: assumptions of launchers.


@dataclass(frozen=True)
class Row:
    """One launch, compiled for one architecture. hot: whether it belongs to the hot shapes."""

    hot: bool
    kernel: str
    name: str
    dtype: str
    can_be_wide: bool
    architecture: int
    facts: Facts

    def residency(self) -> Residency:
        """Returns the number of resident programs that the launcher assumes."""
        module = kernel_launches.kernels()[self.kernel]
        residency: Residency = module.residencies(self.facts.warps)[self.kernel]
        return residency

    def misses(self) -> list[str]:
        """Returns the violated assumptions, as keys of MISSES."""
        return [kind for kind, miss in MISSES.items() if miss.holds_not(self)]


@dataclass(frozen=True)
class Miss:
    """A kind of violated assumption. words: its description on the page."""

    words: str
    holds_not: Callable[[Row], bool]


def _has_wrong_residency(row: Row) -> bool:
    assumed = row.residency()
    return row.facts.programs < assumed.at_least or row.facts.programs > (assumed.at_most or BLOCKS)


def _is_tensor_product(row: Row) -> bool:
    return row.kernel in (*PRODUCTS, *SCALED_PRODUCTS) and row.dtype in ("bf16", "fp16", "fp8e4nv")


def _tensor_core_of(row: Row) -> str:
    """Returns the tensor-core instruction at full rate. Block-scaled products that decode operands have out's dtype."""
    return (FP8_TENSOR_CORES if row.dtype == "fp8e4nv" else TENSOR_CORES)[row.architecture]


def registers_of(facts: Facts) -> int:
    """Returns the number of registers of one program."""
    return -(-facts.registers // 8) * 8 * 32 * facts.warps


def _fills_processor(row: Row) -> bool:
    return row.residency().runs_beside and registers_of(row.facts) > REGISTERS // 4


MISSES = {
    "spills": Miss("registers spilled to memory", lambda row: row.facts.stack + row.facts.spills > 0),
    "programs": Miss("fewer (or more) programs are resident on an SM than the launcher assumes", _has_wrong_residency),
    "fills the SM": Miss(
        "runs concurrently with GEMMs, but a program occupies more than a quarter of an SM's registers",
        _fills_processor,
    ),
    "narrow": Miss(
        "accesses less than 16 bytes at a time although the row size is a multiple of 16 bytes",
        lambda row: row.can_be_wide and min(row.facts.loads, row.facts.stores) < 128,
    ),
    "no tensor cores": Miss(
        "a GEMM in half precision or 8 bits without its architecture's tensor-core instruction",
        lambda row: _is_tensor_product(row) and _tensor_core_of(row) not in row.facts.tensor.split(),
    ),
    "lost by ptxas": Miss(
        "memory accesses are narrower than in PTX, or tensor-core instructions of PTX are missing",
        lambda row: (
            row.facts.loads < row.facts.ptx_loads
            or row.facts.stores < row.facts.ptx_stores
            or bool(row.facts.ptx_tensor and not row.facts.tensor)
        ),
    ),
    "no async copies": Miss(
        "a GEMM in half precision or 8 bits whose operands all pass through registers",
        lambda row: _is_tensor_product(row) and row.facts.asynchronous == 0,
    ),
}


def rows_of(launches: Iterable[Launch], *, hot: bool, architectures: Sequence[int] = ARCHITECTURES) -> list[Row]:
    """Compiles the launches for each architecture that their launchers allow."""
    return [
        Row(
            hot,
            launch.kernel_name,
            launch.case.name,
            _dtype(launch),
            launch.can_be_wide,
            architecture,
            compile_launch(launch, architecture),
        )
        for launch, architecture in itertools.product(launches, architectures)
        if architecture >= launch.case.first_architecture
    ]


def _dtype(launch: Launch) -> str:
    """Returns the dtype of the kernel's first floating-point argument, or "" if there is none."""
    types = [str(kind).removeprefix("*") for kind in launch.case.source.signature.values()]
    return next((kind for kind in types if kind.startswith(("bf", "fp"))), "")


# Section: bytes in flight of memory-bound kernels. See [Note: bytes in flight].

NEEDED_BYTES = round(4.3e12 * 0.7e-6 / 132)
MEMORY_BOUND = ("act_kernel", "act_gradient_kernel", "gather_kernel", "sum_kernel")


@dataclass(frozen=True)
class InFlight:
    """Loads that a kernel has in flight on an SM of sm_90. programs: resident and launched; share: of the columns."""

    launch: Launch
    programs: int
    bytes_of_program: int
    share: float

    @property
    def bytes_of_processor(self) -> int:
        """Bytes in flight on an SM."""
        return int(self.programs * self.bytes_of_program * self.share)


def in_flight(launch: Launch) -> InFlight:
    """Compiles a launch of a memory-bound kernel for sm_90 and computes its bytes in flight."""
    facts, of_thread = compile_launch(launch, 90), loaded_before_use(listing_of(launch, 90))
    module = kernel_launches.kernels()[launch.kernel_name]
    residency: Residency = module.residencies(facts.warps)[launch.kernel_name]
    width, columns = launch.sizes.get("ffn") or launch.sizes["width"], launch.sizes["COLUMNS"]
    share = width / (-(-width // columns) * columns)
    return InFlight(
        launch, min(facts.programs, residency.at_most_launched or BLOCKS), 32 * facts.warps * of_thread, share
    )


def wide_launches() -> list[Launch]:
    """Returns the hot launches of memory-bound kernels whose rows have more than one element."""
    return [
        launch
        for launch in kernel_launches.hot()
        if launch.kernel_name in MEMORY_BOUND and launch.sizes.get("width") != 1
    ]


def print_in_flight() -> None:
    """Prints the bytes in flight of all wide launches."""
    print(f"needed on average: {NEEDED_BYTES / 1e3:.1f} KB per SM")
    for one in map(in_flight, wide_launches()):
        print(
            f"{one.launch.kernel_name:20} {one.launch.case.name:32} {one.programs:2} programs x "
            f"{one.bytes_of_program / 1e3:4.1f} KB x {one.share:.2f} = {one.bytes_of_processor / 1e3:5.1f} KB"
        )


def print_products() -> None:
    """Prints resources of the GEMMs of hot shapes, and their asynchronous copies per iteration."""
    print(f"Triton {triton.__version__}")
    launches = [launch for launch in kernel_launches.hot() if launch.kernel_name in PRODUCTS]
    for launch, architecture in itertools.product(launches, (90, 100)):
        facts, copies = compile_launch(launch, architecture), copies_of_iteration(listing_of(launch, architecture))
        print(
            f"{launch.case.name:68} sm_{architecture:<3} {facts.registers} registers, {facts.spills} spills, "
            f"{copies:2} copies per iteration, {facts.programs} programs",
            flush=True,
        )


# Section: the table.

_FACTS = {field.name: field.type for field in dataclasses.fields(Facts)}
_LAUNCH = ("hot", "kernel", "name", "dtype", "can_be_wide")


def write_table(rows: Iterable[Row], path: Path = TABLE) -> None:
    """Writes the rows as CSV, with one line per launch for all architectures.

    The second line of the file names the values in a cell. Cells of architectures without the launch are empty.
    """
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow([*_LAUNCH, *(f"sm_{architecture}" for architecture in ARCHITECTURES)])
    for launch, found in itertools.groupby(rows, lambda row: tuple(getattr(row, name) for name in _LAUNCH)):
        flags = (int(value) if isinstance(value, bool) else value for value in launch)
        cells = {row.architecture: "/".join(map(str, dataclasses.astuple(row.facts))) for row in found}
        writer.writerow([*flags, *(cells.get(architecture, "") for architecture in ARCHITECTURES)])
    path.write_text(f"# Triton {triton.__version__}\n# sm_80, sm_90, sm_100: {'/'.join(_FACTS)}\n{lines.getvalue()}")


def read_table(path: Path = TABLE) -> list[Row]:
    """Reads the rows that write_table wrote."""
    records = csv.DictReader(path.read_text().splitlines()[2:])
    cells = itertools.product(records, ARCHITECTURES)
    return [_row(record, architecture) for record, architecture in cells if record[f"sm_{architecture}"]]


def _row(record: dict[str, str], architecture: int) -> Row:
    values = zip(_FACTS.items(), record[f"sm_{architecture}"].split("/"), strict=True)
    facts: dict[str, Any] = {name: value if kind is str else int(value) for (name, kind), value in values}
    return Row(
        hot=record["hot"] == "1",
        kernel=record["kernel"],
        name=record["name"],
        dtype=record["dtype"],
        can_be_wide=record["can_be_wide"] == "1",
        architecture=architecture,
        facts=Facts(**facts),
    )


def table_version(path: Path = TABLE) -> str:
    """Returns the Triton version that compiled the table."""
    return path.read_text().partition("\n")[0].removeprefix("# Triton ")


INTRODUCTION = """# Compiled kernels

Resources of each Triton kernel on sm_80, sm_90 and sm_100, read from machine code.
`benchmarks/compiled_kernels.py` writes this page. It compiles {launches} launches of {kernels} kernels with Triton
{version}, without a GPU, and stores the results in `benchmarks/results/compiled_kernels.csv`. Nothing here was measured
on a GPU. `tests/unit_tests/core/test_compiled_kernels.py` pins the misses.

- **Matrix**: all launches that the launchers can choose, over dtypes, sizes, layouts and options, one per compiled
  kernel. `matrix()` in `benchmarks/kernel_launches.py` lists them.
- **Hot shapes**: the launches of known models, listed by `hot()` in the same file.
- **Miss**: an assumption of a launcher that a compiled kernel violates. Results remain correct, but the kernel may be
  slow.
- **Program**: a thread block. **SM**: streaming multiprocessor.

| column | content |
|---|---|
| launch | name of the launch, explained below |
| registers | registers per thread |
| spills | bytes of stack per thread, number of instructions that access the stack |
| shared | bytes of shared memory per program |
| programs | programs resident on an SM, limited by registers, shared memory, tensor memory and threads |
| assumed | resident programs that the launcher assumes for its grid, from `residencies()` next to the launcher |
| bits | widest load / store of global memory, in bits |
| async | number of instructions that copy from global to shared memory without registers |
| tensor | tensor-core instructions: HMMA on sm_80, HGMMA on sm_90, UTCHMMA on sm_100; in 8 bits QGMMA, UTCQMMA |
| misses | kinds of misses, explained in the next section |

Names of launches:

- *product*: a grouped GEMM, in which each expert's rows are multiplied with its weights. *added product*: scaled and
  added to the output, as for low-rank adapters. *weight gradient*: the grouped GEMM for the gradient of the weights.
  *2048 x 1536*: sizes of an expert's weights. *stored*: contiguous weights; *transposed*: a transposed view of them.
  *fc1*, *fc2*: the experts' two linear layers.
- *swiglu*, *geglu* ...: an activation and its gradient, with the width *ffn*. *scaled*: multiplied by the routing
  weights. *all rows*: of dense layers and dynamic buffers; the others are of live rows.
- *width*: elements of a row. *addresses + 1*: tensors that start one element after a multiple of 16 bytes. *odd rows*:
  an odd number of rows. *one gradient*: a gradient with stride 0, as of a sum. *gradient by columns*: a transposed
  gradient.
- *order*, *choice*, *tokens*, *weights*: sorting slots by expert, gradients of the router's choices, and moving rows of
  tokens or weights.
- *pages of N bytes, n tensors*: a group of n tensors in the paged stash. *to pages*: the stash; *from pages*: the
  restore. *places*, *with places*: the plan of tensors that are computed in pages.
- *in pages*: rows of x and *gate_up* in pages of the stash's arena; gradients, and x of an added product, are not. The
  gradient of an activation then also writes *act*. *by descriptors*: a product that reads x and the weights by tensor
  descriptors, on sm_90 and later. Only measurements launch it, because no GPU has run it yet.
- *blocks of n*: kernels on block-scaled rows ([block_scaled.md](block_scaled.md)). *promoted*, *native* and
  *dequantized*: the arithmetic of their products, of which only the first two use 8-bit tensor cores. *backward*: a
  product with transposed weights. *columns*: packed columns from packed rows. *weights*: quantized in square blocks.
- Storage formats of `adam_kernel`, such as *bf16 with remainders*, are listed in `ADAM_FORMS`. *divided*: gradients are
  divided by a number on the device. *can skip*: a device flag can skip the update. *decoupled*: weight decay as in
  AdamW.
"""


# By hand from print_products(), whose output has one line per launch.
OTHER_VERSIONS = """## Other versions of Triton

`python benchmarks/compiled_kernels.py --products` compiles the 48 GEMMs of hot shapes on sm_90 and sm_100 with the
installed version. With 3.6.0, 3.7.1 and 3.8.0 none spills, and all have the same number of asynchronous copies per
iteration. [Note: registers] in `triton_grouped_gemm.py` explains what prevents spills. No GPU has run these kernels
with 3.7.1 or 3.8.0. Least and most registers per thread:

| GEMMs | copies | arch | 3.6.0 | 3.7.1 | 3.8.0 |
|---|---|---|---|---|---|
| products without pages | 12 | sm_90 | 202-246 | 194-244 | 194-238 |
|  |  | sm_100 | 220-250 | 206-246 | 206-246 |
| products in pages | 12 | sm_90 | 206-224 | 204-220 | 224-232 |
|  |  | sm_100 | 230-238 | 200-232 | 200-232 |
| products in pages, by descriptors | 2 | sm_90 | 186-210 | 186-210 | 194-224 |
|  |  | sm_100 | 202-210 | 193-206 | 193-206 |
| weight gradients | 8 | sm_90 | 168-182 | 168-186 | 168-182 |
|  |  | sm_100 | 160-212 | 160-215 | 160-215 |
"""


def page_of(rows: Sequence[Row], version: str) -> str:
    """Returns the text of docs/compiled_kernels.md. version: Triton version."""
    matrix, hot = [row for row in rows if not row.hot], [row for row in rows if row.hot]
    launches = len({(row.kernel, row.name) for row in matrix})
    kernels = list(dict.fromkeys(row.kernel for row in matrix))
    lines = [
        INTRODUCTION.format(launches=launches, kernels=len(kernels), version=version),
        "## Misses",
        "",
        "Number of launches in the matrix with each kind of miss, out of all launches of that kernel and dtype.",
        "",
        *_misses_table(matrix),
        "",
        "## Hot shapes",
        "",
        "Kernels that a static MoE layer with a paged stash, its optimizer and the activation of a dynamic MoE layer",
        "launch, in bf16, and those of the same layer on block-scaled rows, which training does not use yet. A launch",
        "with the same compiled kernel as an earlier launch has no row.",
        "",
        *_rows_table(hot),
        "",
        OTHER_VERSIONS,
        "## Worst cases",
        "",
        "For each kernel, dtype and architecture, the launch in the matrix with the most misses. Ties are resolved by",
        "the fewest programs, then by the most registers.",
        "",
        *_worst_table(matrix),
    ]
    return "\n".join(lines) + "\n"


_HEAD = "| arch | registers | spills | shared | programs | assumed | bits | async | tensor | misses |"


def _rows_table(rows: Sequence[Row]) -> list[str]:
    lines = [f"| kernel | launch {_HEAD}", "|---" * 12 + "|"]
    before = ("", "")
    for row in rows:
        shown = ("", "") if (row.kernel, row.name) == before else (f"`{row.kernel}`", row.name)
        before = (row.kernel, row.name)
        lines.append(f"| {shown[0]} | {shown[1]} | {_cells(row)} |")
    return lines


def _cells(row: Row) -> str:
    facts, assumed = row.facts, row.residency()
    least = f"at least {assumed.at_least}" if assumed.at_most is None else f"at most {assumed.at_most}"
    spilled = f"{facts.stack} B, {facts.spills}" if facts.stack + facts.spills else "0"
    cells = (
        *(f"sm_{row.architecture}", facts.registers, spilled, facts.shared, facts.programs, least),
        *(f"{facts.loads} / {facts.stores}", facts.asynchronous, facts.tensor or "-", ", ".join(row.misses())),
    )
    return " | ".join(map(str, cells))


def _worst_table(rows: Sequence[Row]) -> list[str]:
    def badness(row: Row) -> tuple[int, int, int]:
        return len(row.misses()), -row.facts.programs, row.facts.registers

    groups: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.kernel, row.dtype, row.architecture), []).append(row)
    return _rows_table([max(group, key=badness) for group in groups.values()])


def misses_by_kind(rows: Iterable[Row]) -> Counter[tuple[str, str, str, int]]:
    """Counts the violated assumptions by kind, kernel, dtype and architecture."""
    return Counter((kind, row.kernel, row.dtype, row.architecture) for row in rows for kind in row.misses())


def _misses_table(rows: Sequence[Row]) -> list[str]:
    found, all_rows = misses_by_kind(rows), Counter((row.kernel, row.dtype, row.architecture) for row in rows)
    lines = ["| miss | kernel | dtype | sm_80 | sm_90 | sm_100 |", "|---" * 6 + "|"]
    for kind, miss in MISSES.items():
        for kernel, dtype in dict.fromkeys((row.kernel, row.dtype) for row in rows):
            counts = [found[kind, kernel, dtype, architecture] for architecture in ARCHITECTURES]
            if any(counts):
                of = [all_rows[kernel, dtype, architecture] for architecture in ARCHITECTURES]
                cells = " | ".join(f"{count} of {total}" if count else "-" for count, total in zip(counts, of))
                lines.append(f"| {kind}: {miss.words} | `{kernel}` | {dtype or '-'} | {cells} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hot", action="store_true", help="recompile only the hot shapes")
    parser.add_argument("--only", nargs="+", help="recompile only the hot shapes and these kernels of the matrix")
    parser.add_argument("--in-flight", action="store_true", help="print bytes in flight and write nothing")
    parser.add_argument("--products", action="store_true", help="print GEMMs of hot shapes and write nothing")
    arguments = parser.parse_args()
    if arguments.in_flight or arguments.products:
        print_in_flight() if arguments.in_flight else print_products()
        return
    hot = rows_of(kernel_launches.hot(), hot=True)
    known: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in read_table() if TABLE.exists() else ():
        if not row.hot:
            known[row.kernel, row.name].append(row)
    if arguments.hot:
        matrix = [row for rows in known.values() for row in rows]
    else:
        found = kernel_launches.matrix()
        matrix = []
        for index, launch in enumerate(found):
            kept = known.get((launch.kernel_name, launch.case.name))
            if kept and arguments.only and launch.kernel_name not in arguments.only:
                matrix += kept
                continue
            matrix += rows_of([launch], hot=False)
            print(f"{index + 1}/{len(found)} {launch.kernel_name} {launch.case.name}", flush=True)
    write_table([*hot, *matrix])
    PAGE.write_text(page_of([*hot, *matrix], triton.__version__))
    print(f"wrote {TABLE.relative_to(ROOT)} and {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
