"""Lists the checks of `make gpu` in order of execution. Runs nothing.

A check is a module whose main() runs in a process of its own, a fork of a server that has imported the slow modules, so
that a hang, a crash or a corrupted CUDA context costs only one check. Call A measures what a training step takes, and
call B tests the correctness of kernels, the stash and replays, and measures rows in 8 bits. Both fit into fifteen
minutes of a rented GPU, with its start, and each into the ten minutes after which some machines end a command.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path

# Seconds of a call, including imports and shutdown.
CALL_SECONDS = {"A": 480.0, "B": 170.0}
START_SECONDS, START_REASON = 12.0, "start: the server's imports once, 10.4 s on the H200's machine, and nvidia-smi"
END_SECONDS, END_REASON = 6.0, "end: 5 s for a process that cannot be killed, and the report"
MOST_FILES, MOST_FILE_BYTES, MOST_FOLDERS = 7, 16 << 20, 2  # of the folder of results
# Slow modules that checks need. None of them uses the GPU on import, since that does not survive a fork. The last one
# freezes all objects.
PRELOAD = (
    "hypothesis",
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.profiler",
    "torch.testing",
    "torch.utils.tensorboard",
    "triton.language",
    "pretrain_gpt",
    "megatron.core.optimizer.triton_adam",
    "megatron.core.transformer.moe.paged_stash.expert_ops",
    "tests.harness",
    "benchmarks.train_step",
    "benchmarks.gpu.graph_step",
    "tests.warm_server",
)
# Changes of these modules, which run the checks, keep results valid.
RUNNER = (
    "benchmarks.gpu.checks.pytest_run",
    "benchmarks.gpu.checks.reporting",
    "benchmarks.gpu.protocol",
    "benchmarks.gpu.registry",
    "benchmarks.source",
    "tests.structure.measure",
)


@dataclass(frozen=True)
class Check:
    """A module to run, with its time limit in seconds, including its shutdown.

    call: a key of CALL_SECONDS, or None if it runs only when named. purpose: shown by --list. words: the module and its
    arguments, in which {out} is the folder of results and {seconds} the time until it is interrupted. limit: most
    seconds, if enough are left. small: additional arguments in a dry run, which may run on a CPU; None if nothing can
    be tested without a GPU. expected: seconds, which earlier checks leave to it. reason: why it takes them. kernels:
    the Triton kernels of which it has a small case.
    """

    name: str
    call: str | None
    purpose: str
    words: str
    limit: float
    small: str | None = ""
    expected: float = 0.0
    reason: str = ""
    kernels: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """The module whose main() runs."""
        return self.words.split()[0]

    def arguments(self, out: Path, *, seconds: float, is_dry: bool) -> list[str]:
        """Returns the command-line arguments of the module."""
        words = shlex.split(f"{self.words} {self.small or ''}" if is_dry else self.words)
        return [word.format(out=out, seconds=f"{seconds:.0f}") for word in words[1:]]


def _check(module: str, *arguments: str) -> str:
    return " ".join([f"benchmarks.gpu.checks.{module}", *arguments])


def _tests(*arguments: str) -> str:
    """Returns the words that run tests of tests/gpu, which are skipped without a GPU."""
    return _check("pytest_run", *(shlex.quote(argument) for argument in arguments))


def _any_of(expressions: tuple[str, ...]) -> str:
    return " or ".join(f"({expression})" for expression in expressions)


def _benchmark(name: str) -> str:
    return f"benchmarks.gpu.{name} --json {{out}}/{name}_gpu.json --plot {{out}}/{name}_gpu.svg"


PAGES = ("plan_kernel", "copy_kernel", "release_kernel")
PRODUCTS = ("grouped_gemm_kernel", "weight_grad_kernel")
ACTIVATIONS = ("act_kernel", "act_gradient_kernel")
BIASES = ("add_bias_kernel", "bias_grad_kernel", "bias_scale_grad_kernel")
HEADS = ("rotate_kernel", "rotate_grads_kernel", "sum_partials_kernel")
ROWS = ("choice_grad_kernel", "count_kernel", "order_kernel", "experts_kernel", "gather_kernel", "sum_kernel")
QUANTIZERS = (
    "quantize_kernel",
    "act_quantize_kernel",
    "dequantize_kernel",
    "quantize_columns_kernel",
    "quantize_squares_kernel",
)
SCALED_PRODUCTS = ("scaled_gemm_kernel", "scaled_weight_grad_kernel")
ALL = PAGES + PRODUCTS + ACTIVATIONS + BIASES + ROWS + HEADS + QUANTIZERS + SCALED_PRODUCTS
# One small case for each kernel. Products of 8-bit rows have one for each kind of arithmetic. A GPU skips the kinds
# that its launchers do not choose.
CASES = (
    "pages_rings and bfloat16-1000",
    "products and bfloat16-1000-False and 129",
    "activations and swiglu and bfloat16-1000-33",
    "biases and bfloat16-1000",
    "gathered and bfloat16-1000-90",
    "slots and 5000 and dtype0",
    "experts_of_rows and 33",
    "choices and 70-6-2",
    "heads and plain and 128 and dtype1",
    "remainders",
    "near_that and params0",
    "block_scaled and every_bf16_number and 32s",
    "block_scaled and columns and 256-96-200-128s",
    "block_scaled and weights and stored-torch.bfloat16-128s",
    "block_scaled and activation0-1000-torch.bfloat16-128s",
    "block_scaled and products and forward and float32",
    "block_scaled and weight_gradients and bfloat16",
)

CHECKS = (
    # Section: call A, in the order of its value. The first one is short, and shows what a graph may capture.
    Check(
        "captured_pair",
        "A",
        "a graph of passes that take turns (--overlap-moe-expert-parallel-comm) has the bits of eager steps whose "
        "passes run alone, also with a stash",
        _check("captured_pair", "--cases", "'captured, stash'"),
        30,
        "--steps 4",
        expected=8,
        reason="two runs of six tiny steps, most of it compilation; it displaced the reserve of later issues",
    ),
    Check(
        "ceilings",
        "A",
        "measures copies, a large mm, and microseconds per operator, Triton launch, custom op, Function and graph node",
        _check("ceilings", "--seconds", "{seconds}"),
        30,
        "--small",
        expected=13,
        reason="two rates and six loops of 0.5 s each, two compilations",
    ),
    Check(
        "paged_products",
        "A",
        "experts' kernels in pages are bitwise equal to contiguous ones, and take at most 1.03 times as long (fc1), or "
        "1.05 times (its weight gradient); otherwise --moe-paged-stash-compute copies remains the default on a GPU",
        _check("paged_products", "--seconds", "{seconds}"),
        70,
        "--small",
        expected=39,
        reason="three shapes of 13 s, most of it compilation of six kernels with and without pages",
    ),
    Check(
        "qwen_short",
        "A",
        "Qwen3-30B-A3B, short sequences: a step of graph + stash + optimizer is faster than plain PyTorch",
        _check("steps", "short", "--seconds", "{seconds}"),
        120,
        "--small",
        expected=80,
        reason="five sides: builds of 3 to 5 s, 20 s of compilation in all, 14 steps of 0.07 to 0.5 s",
    ),
    Check(
        "qwen_4096",
        "A",
        "Qwen3-30B-A3B, 4096 x 2 tokens: time and reserved memory, also of experts in pages; kernel table of a replay, "
        "host profile of a step",
        _check("steps", "4096", "--seconds", "{seconds}"),
        140,
        "--small",
        expected=97,
        reason="six sides, compiled already, 12 to 17 s each; both profiles 14 s",
    ),
    Check(
        "stack48",
        "A",
        "one rank of Qwen3-30B-A3B at EP 8, 48 layers: graph + stash reaches an MFU of 36%",
        _check("stack48", "--seconds", "{seconds}"),
        175,
        "--small",
        expected=130,
        reason="three sides of 36 to 40 s in turn: 93 GB of states, a capture of 8 s, ten steps of 0.5 s; 14 s spare",
    ),
    Check(
        "deepseek",
        "A",
        "layers of DeepSeek-V3: dropless steps compared with graph + stash",
        _check("steps", "deepseek", "--seconds", "{seconds}"),
        50,
        "--small",
        expected=30,
        reason="two sides of 14 to 16 s: builds of 5 s, 14 steps of 0.16 s, new sizes of four kernels",
    ),
    Check(
        "local_graphs",
        "A",
        "measures what graphs of attention and MoE layers gain over eager steps",
        _check("steps", "local", "--seconds", "{seconds}"),
        45,
        "--small",
        expected=26,
        reason="two sides of 12 to 14 s: builds of 4 s, four steps of 0.7 s without graphs, 48 captures",
    ),
    Check(
        "kernels_of_later_issues",
        "A",
        "measures the bandwidth of the RoPE, row and activation kernels",
        _check("new_kernels"),
        40,
        "--small",
        expected=15,
        reason="three groups of kernels of 5 s, most of it compilation",
    ),
    # Section: call B, directly after call A on the same machine.
    Check(
        "replays",
        "B",
        "a replay is one launch without waits or allocations, a full pool grows and the step is repeated, and a "
        "capture that fails or is aborted changes no bit",
        _tests(
            "tests/gpu/test_replays_on_gpu.py",
            "tests/gpu/test_step_graphs_on_gpu.py",
            "-k",
            "test_replays_on_gpu or finds_no_pages or capture_that_fails",
        ),
        75,
        expected=60,
        reason="nine tests of 4 to 6 s, and 12 s of imports for the ranks",
    ),
    Check(
        "kernels",
        "B",
        "each kernel agrees with its CPU operator in one small case: bitwise, or to one rounding if it sums",
        _tests(
            "tests/gpu/test_kernels_against_reference.py",
            "tests/gpu/test_adam_kernel.py",
            "tests/gpu/test_block_scaled.py",
            "-k",
            _any_of(CASES),
        ),
        55,
        expected=36,
        reason="2 to 5 s for each of six groups of kernels, most of it compilation; 11 s for eleven of 8-bit rows",
        kernels=(*ALL, "adam_kernel"),
    ),
    Check(
        "block_scaled",
        "B",
        "measures kernels of 8-bit rows, a stash of 8 bits and 8-bit products, relative to the work that they replace",
        _check("block_scaled", "--seconds", "{seconds}"),
        50,
        "--small",
        expected=32,
        reason="25 compilations; displaced stash_late_streams, 28 s, which passed on an H200",
    ),
    Check(
        "experts_in_8_bits",
        "B",
        "experts in 8 bits: each kernel of a layer agrees with the CPU's on the same operands, and a replay with a "
        "stash, other rows and renewed weights has the bits of eager steps",
        _tests(
            "tests/gpu/test_quantized_experts.py",
            "-k",
            "(each_kernel and 128s) or (replay and few) or once_in_a_step",
        ),
        30,
        expected=14,
        reason="10 compilations; displaced full_graph, 28 s, which passed on an H200",
    ),
    # Section: checks that run only when named, because they passed, or because each takes most of a call or more.
    # Displaced from call B by 8-bit rows: block_scaled, and their small cases in kernels.
    Check(
        "full_graph",
        None,
        "replays of the full-iteration graph are bitwise equal to eager steps: with a stash, with pages on the "
        "host, and with gate_up recomputed",
        _check("full_graph", "--steps", "6"),
        45,
    ),
    Check(
        "stash_late_streams",
        None,
        "random stash operations on delayed streams preserve all bytes",
        _tests("tests/gpu/test_stash_kernels.py", "-k", "random_operations or two_streams"),
        40,
    ),
    Check(
        "environment",
        None,
        "torch, Triton, NCCL, the driver and the tools are installed, and the GPU computes a correct result",
        _check("environment"),
        45,
    ),
    Check(
        "launch_threads",
        None,
        "Triton kernels can be compiled and launched in the main thread and in autograd's thread",
        _check("launch_threads"),
        30,
    ),
    Check(
        "pinned_access",
        None,
        "kernels read and write pinned host memory by address, and host pages preserve their bytes; also measures "
        "sizes and rates of torch's pinned memory and of ours",
        _check("pinned_access"),
        25,
    ),
    Check(
        "capture_streams",
        None,
        "a CUDA graph captures work on two side streams, and replays are bitwise equal to eager execution",
        _check("capture_streams"),
        25,
    ),
    Check(
        "nccl_in_capture",
        None,
        "collectives of a single-rank group run inside a CUDA graph",
        _check("nccl_in_capture"),
        35,
    ),
    Check(
        "eager_steps",
        None,
        "losses of three eager training steps agree with the CPU: a dense model, experts, and experts with a stash",
        _check("eager_steps"),
        60,
    ),
    Check(
        "module_order",
        None,
        "module graphs replayed in the order F1 F2 B1 F3 B2 B3 are bitwise equal to eager passes",
        _check("module_order"),
        55,
    ),
    Check(
        "forced_growth",
        None,
        "a replay without enough pages is retried with a larger pool, and the old pool and the old graph are freed",
        _check("forced_growth"),
        45,
    ),
    Check(
        "copy_points",
        None,
        "stash and restore of large groups reach at least 0.9 times copy_'s rate with unlimited programs (six points)",
        _check("copy_points"),
        60,
        "--small",
    ),
    Check(
        "products",
        None,
        "measures our current and previous grouped GEMM and torch's grouped_mm: rates of forward and of both gradients",
        _check("products"),
        60,
        "--small",
    ),
    Check(
        "product_beside_copies",
        None,
        "measures how much three GEMMs slow down during copies, with the current and the previous copy programs and "
        "several limits on their number",
        _check("product_beside_copies"),
        70,
        "--small",
    ),
    Check(
        "sanitizer_memcheck",
        None,
        "compute-sanitizer finds no access of the kernels outside of allocated memory",
        _check("sanitizer", "memcheck"),
        400,
    ),
    Check(
        "sanitizer_races",
        None,
        "compute-sanitizer finds no shared-memory race and no incorrect barrier in the kernels",
        _check("sanitizer", "racecheck", "synccheck"),
        400,
    ),
    Check(
        "tests_kernels",
        None,
        "the kernels agree with the CPU operators for all sizes and dtypes",
        _tests("tests/gpu/test_kernels_against_reference.py"),
        180,
    ),
    Check(
        "tests_block_scaled",
        None,
        "rows in 8 bits have the reference's bytes for all sizes and dtypes, products are within their bounds, and a "
        "stash of 8 bits gives the same gradients on device and host; experts in 8 bits have the same bits with and "
        "without a stash",
        _tests("tests/gpu/test_block_scaled.py", "tests/gpu/test_quantized_experts.py"),
        260,
    ),
    Check(
        "tests_step_graphs",
        None,
        "a hundred replays of whole steps and of module graphs are bitwise equal to eager steps",
        _tests("tests/gpu/test_step_graphs_on_gpu.py", "tests/gpu/test_replays_on_gpu.py"),
        500,
    ),
    Check(
        "tests_training",
        None,
        "runs learn, save and resume in each precision, gradients are close to the CPU's, and data parallelism works "
        "on NCCL",
        _tests(
            "tests/gpu/test_training_on_gpu.py",
            "tests/gpu/test_data_parallel_on_gpu.py",
            "tests/gpu/test_process_groups.py",
            "tests/gpu/test_symmetric_rows.py",
            "tests/gpu/test_random_streams.py",
        ),
        200,
    ),
    Check(
        "tests_stash",
        None,
        "all tests of the stash pass: every width, delayed streams including in training, captured recomputation, "
        "experts in pages",
        _tests(
            "tests/gpu/test_experts_in_pages.py",
            "tests/gpu/test_stash_kernels.py",
            "tests/gpu/test_stash_races.py",
            "tests/gpu/test_stash_recompute.py",
            "tests/gpu/test_pinned_memory_on_gpu.py",
        ),
        240,
    ),
    Check(
        "tests_optimizer",
        None,
        "optimizer steps, including captured ones, agree with torch and with eager steps; attention kernels are "
        "close to fp64",
        _tests(
            "tests/gpu/test_adam_kernel.py",
            "tests/gpu/test_fused_adam_on_gpu.py",
            "tests/gpu/test_optimizer_graph.py",
            "tests/gpu/test_attention_kernels.py",
        ),
        80,
    ),
    Check(
        "trace",
        None,
        "profiles one eager step with a stash: its longest gaps without a launch, each with the host's activity in it",
        _check("trace", "--trace", "{out}/trace_of_step.json.gz"),
        60,
        "--small",
    ),
    Check(
        "launches",
        None,
        "counts the kernels launched per static MoE layer and step, and the operators of the same step on the CPU",
        _check("launches"),
        70,
    ),
    Check(
        "stash_copy",
        None,
        "stash and restore reach at least 0.9 times copy_'s rate with unlimited programs, for groups of at "
        "least 128 MiB",
        _benchmark("stash_copy"),
        120,
        "--small --rounds 2",
    ),
    Check(
        "gemm_beside_stash",
        None,
        "concurrent stash and restore do not slow down a matrix multiplication, or by at most 1.1 times the time of "
        "the two copies, with the best program limit",
        _benchmark("gemm_beside_stash"),
        60,
        "--small --rounds 2",
    ),
    Check(
        "stash_step",
        None,
        "measures memory and time of expert layers with a stash and with alternatives, without a target",
        "benchmarks.stash_step --device cuda --tokens 8192 --hidden 2048 --ffn 768 --json {out}/stash_step_gpu.json",
        60,
        "--device cpu --rounds 1 --layers 3 --tokens 64 --hidden 32 --ffn 16",
    ),
    Check(
        "host_waits",
        None,
        "measures captures of a step, the agreement on its plan, and checks of gradients, each compared with its "
        "previous version; a graph can capture torch's grouped GEMMs only in bf16",
        _check("host_waits"),
        60,
    ),
    Check(
        "ddp",
        None,
        "measures data parallelism on one GPU, compared with torch's, without a target",
        "benchmarks.gpu.ddp --json {out}/ddp_gpu.json",
        60,
        None,
    ),
)
