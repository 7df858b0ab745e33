"""Lists the checks of `make gpu` in order of execution, with the claims that they test. Runs nothing.

Each check is a separate process with a time limit, so that a hang, a crash or a corrupted CUDA context costs only one
check. A call runs for at most nine minutes, the sum of its limits, because some machines end a command after ten.
Checks whose failure would explain all other failures come first.
"""

import enum
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

CALL_SECONDS = 540
NUM_CALLS = 3
# Exit statuses with which a program reports that it needs a GPU, or that something else is missing.
NEEDS_GPU, NOT_CHECKED = 76, 77
DRY_RUN = "GPU_CHECKS_DRY_RUN"  # environment variable set by a dry run; only then may a CPU replace the GPU
RESULT = "RESULT "  # begins an output line with results as a JSON object


class State(enum.Enum):
    """Evidence for a claim that has not been tested on a GPU yet."""

    MODELLED = "modelled on a CPU"
    COMPILED = "compiled only"
    NOT_YET = "not yet"


@dataclass(frozen=True)
class Check:
    """A program to run, with its time limit in seconds, including its shutdown.

    call: 1 to NUM_CALLS, or None if it runs only when named. part: heading on the page. claim: the property that a pass
    shows. words: its command, in which `python` is this interpreter and {out} the folder of results. small: additional
    arguments in a dry run, which may run on a CPU; None if nothing can be tested without a GPU. kernels: the Triton
    kernels that it launches. known: evidence without a GPU. is_elastic: may exceed its limit by the unused time of
    earlier checks.
    """

    name: str
    call: int | None
    part: str
    claim: str
    words: str
    limit: float
    small: str | None = ""
    kernels: tuple[str, ...] = ()
    known: State = State.NOT_YET
    is_elastic: bool = False

    def command(self, out: Path, *, is_dry: bool) -> list[str]:
        """Returns the command line. Python programs print their stacks when they are interrupted."""
        words = shlex.split(f"{self.words} {self.small or ''}" if is_dry else self.words)
        first, *rest = [sys.executable if word == "python" else word.format(out=out) for word in words]
        launcher = ["-m", "benchmarks.gpu.checks.launch"] if words[0] == "python" else []
        return [first, *launcher, *rest]


def _program(module: str, *arguments: str) -> str:
    return " ".join(["python", f"benchmarks.gpu.checks.{module}", *arguments])


def _tests(*arguments: str) -> str:
    """Returns the command that runs tests of tests/gpu, which are skipped without a GPU."""
    return _program("pytest_run", *(shlex.quote(argument) for argument in arguments))


def _benchmark(name: str) -> str:
    return f"python benchmarks.gpu.{name} --json {{out}}/{name}_gpu.json --plot {{out}}/{name}_gpu.svg"


KERNELS = "tests/gpu/test_kernels_against_reference.py"
PAGES = ("plan_kernel", "copy_kernel", "release_kernel")
PRODUCTS = ("grouped_gemm_kernel", "weight_grad_kernel")
ACTIVATIONS = ("act_kernel", "act_gradient_kernel")
BIASES = ("add_bias_kernel", "bias_grad_kernel", "bias_scale_grad_kernel")
HEADS = ("rotate_kernel", "rotate_grads_kernel", "sum_partials_kernel")
ROWS = ("choice_grad_kernel", "count_kernel", "order_kernel", "experts_kernel", "gather_kernel", "sum_kernel")
FIRST, EACH, STEPS = "First launches", "One small case for each kernel", "Training steps"
PARTS, COPIES, LONG, BENCHMARKS = "Module graphs and pool growth", "Copies and GEMMs", "Long checks", "Benchmarks"

CHECKS = (
    # Section: call 1.
    Check(
        "environment",
        1,
        FIRST,
        "torch, Triton, NCCL, the driver and the tools are installed, and the GPU computes a correct result",
        _program("environment"),
        45,
        known=State.NOT_YET,
    ),
    Check(
        "launch_threads",
        1,
        FIRST,
        "Triton kernels can be compiled and launched in the main thread and in autograd's thread",
        _program("launch_threads"),
        30,
        known=State.COMPILED,
    ),
    Check(
        "pinned_access",
        1,
        FIRST,
        "kernels read and write pinned host memory by address, and host pages preserve their bytes; also measures "
        "sizes and rates of torch's pinned memory and of ours",
        _program("pinned_access"),
        25,
        kernels=PAGES,
        known=State.COMPILED,
    ),
    Check(
        "capture_streams",
        1,
        FIRST,
        "a CUDA graph captures work on two side streams, and replays are bitwise equal to eager execution",
        _program("capture_streams"),
        25,
        known=State.MODELLED,
    ),
    Check(
        "nccl_in_capture",
        1,
        FIRST,
        "collectives of a single-rank group run inside a CUDA graph",
        _program("nccl_in_capture"),
        35,
        known=State.NOT_YET,
    ),
    Check(
        "kernels_pages",
        1,
        EACH,
        "page tables, rings of free pages and copied rows are bitwise equal to the results of the CPU operators",
        _tests(KERNELS, "-k", "pages_rings and bfloat16-1000"),
        30,
        kernels=PAGES,
        known=State.MODELLED,
    ),
    Check(
        "kernels_products",
        1,
        EACH,
        "grouped GEMMs and their gradients are correct to one rounding, and recomputed gate_up is bitwise equal",
        _tests(KERNELS, "-k", "products and bfloat16-1000-False and 129"),
        30,
        kernels=PRODUCTS,
        known=State.MODELLED,
    ),
    Check(
        "kernels_activations",
        1,
        EACH,
        "activations and their gradients are correct to one rounding, and recomputed act is bitwise equal",
        _tests(KERNELS, "-k", "activations and swiglu and bfloat16-1000-33"),
        25,
        kernels=ACTIVATIONS,
        known=State.MODELLED,
    ),
    Check(
        "kernels_biases",
        1,
        EACH,
        "expert biases are added correctly, and the gradients of biases and scales are correct to one rounding",
        _tests(KERNELS, "-k", "biases and bfloat16-1000"),
        25,
        kernels=BIASES,
        known=State.MODELLED,
    ),
    Check(
        "kernels_rows",
        1,
        EACH,
        "slots have the same order as on the CPU, gathered rows are bitwise equal, and sums of rows, gradients, and "
        "normalized and rotated heads are correct to one rounding",
        _tests(
            KERNELS,
            "-k",
            "(gathered and bfloat16-1000-90) or (slots and 5000 and dtype0) or (experts_of_rows and 33) "
            "or (choices and 70-6-2) or (heads and plain and 128 and dtype1)",
        ),
        25,
        kernels=ROWS + HEADS,
        known=State.MODELLED,
    ),
    Check(
        "kernels_adam",
        1,
        EACH,
        "a step of the Adam kernel agrees with torch, and bf16 with remainders is bitwise equal to the fp32 run",
        _tests("tests/gpu/test_adam_kernel.py", "-k", "remainders or (near_that and params0)"),
        25,
        kernels=("adam_kernel",),
        known=State.MODELLED,
    ),
    Check(
        "stash_late_streams",
        1,
        EACH,
        "random stash operations on delayed streams preserve all bytes",
        _tests(
            "tests/gpu/test_stash_kernels.py",
            "tests/gpu/test_stash_races.py",
            "-k",
            "random_operations or two_streams or (run_that_waits and 0-late and 0.55)",
        ),
        60,
        kernels=PAGES,
        known=State.MODELLED,
    ),
    Check(
        "eager_steps",
        1,
        STEPS,
        "losses of three eager training steps agree with the CPU: a dense model, experts, and experts with a stash",
        _program("eager_steps"),
        60,
        known=State.MODELLED,
    ),
    Check(
        "full_graph",
        1,
        STEPS,
        "replays of the full-iteration graph are bitwise equal to eager steps: with a stash, with pages on the "
        "host, and with tensors of both recompute levels recomputed",
        _program("full_graph"),
        100,
        "--steps 6",
        known=State.MODELLED,
    ),
    # Section: call 2.
    Check(
        "module_order",
        2,
        PARTS,
        "module graphs replayed in the order F1 F2 B1 F3 B2 B3 are bitwise equal to eager passes",
        _program("module_order"),
        55,
        known=State.MODELLED,
    ),
    Check(
        "forced_growth",
        2,
        PARTS,
        "a replay without enough pages is retried with a larger pool, and the old pool and the old graph are freed",
        _program("forced_growth"),
        45,
        known=State.MODELLED,
    ),
    Check(
        "copy_points",
        2,
        COPIES,
        "stash and restore of large groups reach at least 0.9 times copy_'s rate with unlimited programs (six points)",
        _program("copy_points"),
        60,
        "--small",
        known=State.NOT_YET,
    ),
    Check(
        "products",
        2,
        COPIES,
        "measures our current and previous grouped GEMM and torch's grouped_mm: rates of forward and of both gradients",
        _program("products"),
        60,
        "--small",
        kernels=PRODUCTS,
        known=State.NOT_YET,
    ),
    Check(
        "product_beside_copies",
        2,
        COPIES,
        "measures how much three GEMMs slow down during copies, with the current and the previous copy programs and "
        "several limits on their number",
        _program("product_beside_copies"),
        70,
        "--small",
        known=State.NOT_YET,
    ),
    Check(
        "sanitizer_memcheck",
        2,
        LONG,
        "compute-sanitizer finds no access of the kernels outside of allocated memory",
        "sh tests/gpu/sanitize.sh python memcheck",
        80,
        known=State.NOT_YET,
        is_elastic=True,
    ),
    Check(
        "sanitizer_races",
        2,
        LONG,
        "compute-sanitizer finds no shared-memory race and no incorrect barrier in the kernels",
        "sh tests/gpu/sanitize.sh python racecheck synccheck",
        80,
        known=State.NOT_YET,
        is_elastic=True,
    ),
    Check(
        "tests_kernels",
        2,
        LONG,
        "the kernels agree with the CPU operators for all sizes and dtypes",
        _tests(KERNELS),
        90,
        kernels=PAGES + PRODUCTS + ACTIVATIONS + BIASES + ROWS + HEADS,
        is_elastic=True,
        known=State.MODELLED,
    ),
    # Section: call 3.
    Check(
        "tests_step_graphs",
        3,
        LONG,
        "a hundred replays of whole steps and of module graphs are bitwise equal to eager steps",
        _tests("tests/gpu/test_step_graphs_on_gpu.py", "tests/gpu/test_replays_on_gpu.py"),
        150,
        is_elastic=True,
        known=State.MODELLED,
    ),
    Check(
        "tests_training",
        3,
        LONG,
        "runs learn, save and resume in each precision, gradients are close to the CPU's, and data parallelism works "
        "on NCCL",
        _tests(
            "tests/gpu/test_training_on_gpu.py",
            "tests/gpu/test_data_parallel_on_gpu.py",
            "tests/gpu/test_process_groups.py",
            "tests/gpu/test_symmetric_rows.py",
            "tests/gpu/test_random_streams.py",
        ),
        110,
        is_elastic=True,
        known=State.NOT_YET,
    ),
    Check(
        "tests_stash",
        3,
        LONG,
        "all tests of the stash pass: every width, delayed streams including in training, captured recomputation",
        _tests(
            "tests/gpu/test_stash_kernels.py",
            "tests/gpu/test_stash_races.py",
            "tests/gpu/test_stash_recompute.py",
            "tests/gpu/test_pinned_memory_on_gpu.py",
        ),
        90,
        kernels=PAGES + PRODUCTS + ACTIVATIONS,
        is_elastic=True,
        known=State.MODELLED,
    ),
    Check(
        "tests_optimizer",
        3,
        LONG,
        "optimizer steps, including captured ones, agree with torch and with eager steps; attention kernels are "
        "close to fp64",
        _tests(
            "tests/gpu/test_adam_kernel.py",
            "tests/gpu/test_fused_adam_on_gpu.py",
            "tests/gpu/test_optimizer_graph.py",
            "tests/gpu/test_attention_kernels.py",
        ),
        50,
        kernels=("adam_kernel",),
        is_elastic=True,
        known=State.NOT_YET,
    ),
    Check(
        "trace",
        3,
        LONG,
        "profiles one eager step with a stash: its longest gaps without a launch, each with the host's activity in it",
        _program("trace", "--trace", "{out}/trace_of_step.json.gz"),
        60,
        "--small",
        known=State.NOT_YET,
        is_elastic=True,
    ),
    Check(
        "launches",
        3,
        LONG,
        "counts the kernels launched per static MoE layer and step, and the operators of the same step on the CPU",
        _program("launches"),
        70,
        known=State.NOT_YET,
    ),
    # Section: benchmarks that run only when named, because each takes most of a call or more.
    Check(
        "stash_copy",
        None,
        BENCHMARKS,
        "stash and restore reach at least 0.9 times copy_'s rate with unlimited programs, for groups of at "
        "least 128 MiB",
        _benchmark("stash_copy"),
        120,
        "--small --rounds 2",
        known=State.NOT_YET,
    ),
    Check(
        "gemm_beside_stash",
        None,
        BENCHMARKS,
        "concurrent stash and restore do not slow down a matrix multiplication, or by at most 1.1 times the time of "
        "the two copies, with the best program limit",
        _benchmark("gemm_beside_stash"),
        60,
        "--small --rounds 2",
        known=State.NOT_YET,
    ),
    Check(
        "graph_step",
        None,
        BENCHMARKS,
        "a step with a CUDA graph and a stash takes at most 0.75 times an eager dropless step for launch-bound shapes, "
        "and at most (phi + w c / S) times its memory in addition to weights and states (phi: pages / live rows, w: 1 "
        "+ prefetched layers, c: capacity / live rows, S: layers)",
        _benchmark("graph_step"),
        420,
        "--small --rounds 1 --steps 1 --routings skewed",
        known=State.NOT_YET,
    ),
    Check(
        "stash_step",
        None,
        BENCHMARKS,
        "measures memory and time of expert layers with a stash and with alternatives, without a target",
        "python benchmarks.stash_step --device cuda --tokens 8192 --hidden 2048 --ffn 768 "
        "--json {out}/stash_step_gpu.json",
        60,
        "--device cpu --rounds 1 --layers 3 --tokens 64 --hidden 32 --ffn 16",
        known=State.NOT_YET,
    ),
    Check(
        "host_waits",
        None,
        BENCHMARKS,
        "measures captures of a step, the agreement on its plan, and checks of gradients, each compared with its "
        "previous version; a graph can capture torch's grouped GEMMs only in bf16",
        _program("host_waits"),
        60,
        known=State.NOT_YET,
    ),
    Check(
        "ddp",
        None,
        BENCHMARKS,
        "measures data parallelism on one GPU, compared with torch's, without a target",
        "python benchmarks.gpu.ddp --json {out}/ddp_gpu.json",
        60,
        None,
        known=State.NOT_YET,
    ),
)
