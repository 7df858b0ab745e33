"""Counts the operators of layers and of a training step that would launch GPU kernels, by phase and by kind.

    PYTHONPATH=. .venv/bin/python tests/distributed/launch_budget.py [operators]

prints the counts; `operators` adds each operator and the function that calls it. Holds no tests; the budget is in
test_launch_budget.py.

[Note: what counts]
Each operator that the CPU dispatcher sees below autograd counts once. Views, empty tensors and operators without
tensors launch nothing and do not count. A torch operator may launch more than one kernel on a GPU (a sort does). Each
of this project's operators launches one kernel, except that order_slots launches two, as do rotate_qkv_grads with norms
and copies of a stash with pages on the host. The grouped GEMMs of experts and the rows of a pair of ranks use the GPU
code path (see gpu_paths). Other device-dependent code runs its CPU path: RMSNorm (several operators instead of one),
attention, the accumulation of dense weight gradients, the softmax of the loss, the optimizer.

[Note: phases]
A forward operator belongs to the phase of the innermost function on the stack that matches PHASES. A backward operator
belongs to the phase of the innermost matching function called by the autograd engine. If there is none, it belongs to
the phase of the forward operator whose gradient it computes; torch's anomaly mode records where each graph node was
created. Gradients that the engine adds because a tensor was used twice belong to `accumulation`.
"""

import contextlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.transformer.moe import dispatch_static, expert_function, grouped_gemm
from megatron.training.training import run_step
from tests.distributed.tiny_runs import started_run
from tests.distributed.walks import ROOT
from tests.harness import run_on_ranks

FORWARD, BACKWARD = "forward", "backward"
MOE = "core/transformer/moe"
# (path below megatron/, function) as a regular expression -> phase. The first matching pattern decides for a frame.
PHASES = {
    rf"{MOE}/static_rows\.py order_by_(expert|rank)": "order_by_expert",
    rf"{MOE}/paged_stash/(group_memory|page_pool|reserve|saved_tensors|stash|stash_order)\.py .*": "stash",
    rf"{MOE}/paged_stash/expert_ops\.py recompute.*": "stash",  # recomputes tensors that the stash dropped
    rf"{MOE}/aux_losses\.py .*": "router losses",
    rf"{MOE}/router\.py .*": "router",
    rf"{MOE}/(expert_step\.py record_demand|dispatch_static\.py (_demand_of_both|demand_on_\w+))": "demand",
    rf"{MOE}/dispatch(_static)?\.py (combine_preprocess|token_combine|combine_postprocess|_end)": "combine",
    rf"{MOE}/dispatch_static\.py (order_rows|order_received|_begin|token_dispatch|dispatch_postprocess)": "dispatch",
    rf"{MOE}/expert_function\.py _dispatched\w*": "dispatch",
    rf"{MOE}/expert_function\.py _combined\w*": "combine",
    rf"{MOE}/(expert_function|experts|grouped_gemm|quantized_experts|paged_stash/expert_ops)\.py .*": "experts",
    rf"{MOE}/moe_layer\.py _run_(static_)?experts": "experts",
    rf"{MOE}/expert_step\.py .*": "experts",
    rf"{MOE}/shared_experts\.py .*": "shared expert",
    r"core/datasets/.*": "on the host",  # sample tensors, which never reach a GPU
    r"core/transformer/norms\.py .*": "norms",
    r"core/transformer/(rope|(multi_latent_)?attention|dot_product_attention|attention_tiles)\.py .*": "attention",
    r"core/transformer/mlp\.py .*": "dense layer",
    r"core/transformer/transformer_layer\.py .*": "residuals",
    r"core/tensor_parallel/cross_entropy\.py .*": "loss",
    r"core/models/.*_embedding\.py .*": "embedding",
    r"core/models/.* _?(compute_)?loss\w*": "loss",
    r"core/models/.*": "embedding, output layer",
    r"core/optimizer/clip_grads\.py .*": "gradient norm",
    r"core/optimizer/.*": "optimizer",
    r"core/distributed/consistency\.py .*": "checks",
    r"core/distributed/.*": "gradient buffers",
    r"core/pipeline_parallel/.*": "loss",
    r"training/.*": "report",
    r"\.\./pretrain_gpt\.py .*": "loss",
}
ELSEWHERE, ACCUMULATION, ON_HOST = "elsewhere", "accumulation", "on the host"
# The phases of an expert layer, without its stash.
MOE_PHASES = ("router", "router losses", "order_by_expert", "demand", "dispatch", "experts", "combine")

KINDS = {
    "own kernels": r"(static_rows|activation|paged_stash|router|rope|block_scaled)::.*",
    "collectives": r"c10d::.*",
    "products": r"aten::(mm|addmm|bmm|baddbmm|_grouped_mm|_scaled_dot_product\w*)\b.*",
    "sorts, scans": r"aten::(sort|topk|cumsum|searchsorted|bincount)\b.*",
    "indexing": r"aten::(index\w*|gather|scatter\w*|embedding\w*|masked_fill\w*)\b.*",
    "reductions": r"aten::(sum|mean|amax|max|norm|_?linalg_vector_norm|linalg_vector_norm|_(log_)?softmax\w*"
    r"|_fused_rms_norm\w*|_foreach_norm|all|any)\b.*",
    "fills": r"aten::(new_zeros|zeros\w*|new_ones|ones\w*|new_full|full\w*|fill_?|zero_|arange|scalar_tensor"
    r"|_foreach_zero_)\b.*",
    "copies": r"aten::(copy_|_to_copy|clone|cat|stack|_foreach_copy_)\b.*",
    "reads": r"aten::_local_scalar_dense",
}
ELEMENTWISE = "elementwise"
# Operators that only allocate memory or return an alias of their input.
_NO_LAUNCH = re.compile(
    r"aten::(empty\w*|new_empty\w*|detach\w*|_unsafe_view|lift_fresh\w*|set_|resize_|_nested\w*)\b.*"
)
_TRACED = re.compile(r'File "(?P<path>[^"]+)", line \d+, in (?P<function>\S+)')
_ENGINE = "_engine_run_backward"


@dataclass(frozen=True)
class Launched:
    """An operator that launches a kernel. place: this project's innermost function on the stack."""

    direction: str
    phase: str
    operator: str
    place: str

    @property
    def kind(self) -> str:
        """The operator's kind, a key of KINDS or ELEMENTWISE."""
        return next((kind for kind, names in KINDS.items() if re.fullmatch(names, self.operator)), ELEMENTWISE)


class _Launches(TorchDispatchMode):
    """Records the operators that launch kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Launched] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if launches(func):
            launched = _launched(func.name(), sys._getframe(1))
            if launched.phase != ON_HOST:
                self.found.append(launched)
        return func(*args, **(kwargs or {}))


def launches(func: Any) -> bool:
    """Returns whether an operator launches work on a GPU. See [Note: what counts]."""
    schema = func._schema
    tensors = any("Tensor" in str(part.type) for part in (*schema.arguments, *schema.returns))
    return func.namespace != "profiler" and tensors and not func.is_view and not _NO_LAUNCH.fullmatch(func.name())


def _launched(operator: str, frame: FrameType | None) -> Launched:
    node = torch._C._current_autograd_node()
    places = list(_places(frame))
    direction = BACKWARD if _ENGINE in places else FORWARD
    if direction == BACKWARD:
        places = places[: places.index(_ENGINE)]
    place = next((one for one in places if "megatron/" in one), "")
    phase = _phase(places)
    if phase is None and direction == BACKWARD:
        recorded = node.metadata.get("traceback_", []) if node is not None else []
        phase = _phase(_recorded_places(recorded)) or (ACCUMULATION if node is None else None)
    return Launched(direction, phase or ELSEWHERE, operator, place)


def _places(frame: FrameType | None) -> Iterator[str]:
    """Yields "path function" for this project's functions on the stack, innermost first, and the engine."""
    while frame is not None:
        if frame.f_code.co_name == _ENGINE:
            yield _ENGINE
        elif frame.f_code.co_filename.startswith(str(ROOT)):
            yield _place(frame.f_code.co_filename, frame.f_code.co_name)
        frame = frame.f_back


def _recorded_places(recorded: Iterable[str]) -> list[str]:
    found = [match for line in recorded if (match := _TRACED.search(line))]
    ours = [match for match in found if match["path"].startswith(str(ROOT))]
    return [_place(match["path"], match["function"]) for match in reversed(ours)]


def _place(path: str, function: str) -> str:
    return f"{Path(path).relative_to(ROOT).as_posix()} {function}"


def _phase(places: Iterable[str]) -> str | None:
    for place in places:
        within = place.removeprefix("megatron/") if place.startswith("megatron/") else f"../{place}"
        for pattern, phase in PHASES.items():
            if re.fullmatch(pattern, within):
                return phase
    return None


@contextlib.contextmanager
def recorded_launches() -> Iterator[list[Launched]]:
    """Records the operators launched inside the context, on GPU code paths."""
    mode = _Launches()
    with gpu_paths(), torch.autograd.set_detect_anomaly(True, check_nan=False), mode:
        yield mode.found


@contextlib.contextmanager
def gpu_paths() -> Iterator[None]:
    """Selects the GPU code paths for the grouped GEMMs of experts and the rows of a pair of ranks."""

    def own(*_: object, **__: object) -> grouped_gemm.ProductKernel:
        return grouped_gemm.ProductKernel.STASH

    with (
        mock.patch.object(expert_function, "product_kernel", own),
        mock.patch.object(grouped_gemm, "product_kernel", own),
        mock.patch.object(grouped_gemm, "_adds_in_kernel", lambda _: True),
        mock.patch.object(dispatch_static, "rank_row_layout", lambda _: dispatch_static.padded_rank_rows),
    ):
        yield


# --- Counted models ---

WARM_UP_STEPS = 2
_MODEL = """
--hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --swiglu --disable-bias-linear --normalization RMSNorm
--position-embedding-type rope --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
--seq-length 16 --max-position-embeddings 16 --micro-batch-size 2 --mock-data --tokenizer-type NullTokenizer
--vocab-size 96 --num-workers 0 --lr 1e-4 --lr-decay-style constant --train-iters 100 --eval-iters 0 --bf16
--use-distributed-optimizer
""".split()
_STATIC = """
--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --moe-grouped-gemm --moe-expert-rank-capacity-factor 2
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01
""".split()
_STASH = "--moe-paged-stash --moe-paged-stash-page-size 4 --moe-paged-stash-buffer-size-factor-cuda 4".split()
_IN_8_BITS = "--fp8-format e4m3 --fp8-recipe mxfp8".split()
_EXPERT_PARALLEL = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall".split()


@dataclass(frozen=True)
class Setting:
    """A small model whose steps are counted. flags: in addition to the common flags. ranks: number of ranks."""

    flags: Sequence[str]
    ranks: int = 1


SETTINGS = {
    "dense": Setting(()),
    "static experts": Setting(_STATIC),
    "static experts, stash": Setting([*_STATIC, *_STASH]),
    "static experts, stash of copies": Setting([*_STATIC, *_STASH, "--moe-paged-stash-compute", "copies"]),
    "experts in 8 bits": Setting([*_STATIC, *_IN_8_BITS]),
    "static experts, two expert ranks": Setting([*_STATIC, *_EXPERT_PARALLEL], ranks=2),
}


@dataclass(frozen=True)
class StepLaunches:
    """Launches of one layer, and of one step of a model with two layers."""

    layer: Counter[Launched]
    step: Counter[Launched]


def count(setting: Setting) -> StepLaunches:
    """Counts the launches of the third training step on the first rank.

    A layer's launches are the difference between three layers and two, since a stash leaves the last layer's rows in
    place.
    """
    two, three = (
        run_on_ranks(_count, setting.ranks, [*_MODEL, *setting.flags, "--num-layers", str(layers)])[0]
        for layers in (2, 3)
    )
    layer = Counter(three)
    layer.subtract(two)
    return StepLaunches(Counter({launched: number for launched, number in layer.items() if number}), two)


def _count(argv: list[str]) -> Counter[Launched]:
    # The paths are patched first, because dispatchers choose theirs when they are built.
    with gpu_paths(), started_run(argv) as run:
        for _ in range(WARM_UP_STEPS):
            run_step(run)
        with recorded_launches() as found:
            run_step(run)
    return Counter(found)


# Name -> (forward, backward) launches.
Table = dict[str, tuple[int, int]]


def by(counts: Counter[Launched], key: Callable[[Launched], str]) -> Table:
    """Sums forward and backward launches by a key, in descending order of the totals."""
    sums: dict[str, Counter[str]] = {}
    for launched, number in counts.items():
        sums.setdefault(key(launched), Counter())[launched.direction] += number
    largest = sorted(sums, key=lambda name: (-sums[name].total(), name))
    return {name: (sums[name][FORWARD], sums[name][BACKWARD]) for name in largest}


def by_phase(counts: Counter[Launched]) -> Table:
    """Sums launches by the phase of a step."""
    return by(counts, lambda launched: launched.phase)


def by_kind(counts: Counter[Launched]) -> Table:
    """Sums launches by the kind of operator."""
    return by(counts, lambda launched: launched.kind)


def of_moe(table: Table) -> tuple[int, int]:
    """Sums the rows of a table by phase over MOE_PHASES."""
    forward, backward = (sum(table.get(phase, (0, 0))[side] for phase in MOE_PHASES) for side in (0, 1))
    return forward, backward


def text_of(table: Table) -> str:
    """Formats a table as lines, with the sum as the last line."""
    total = tuple(sum(pair[side] for pair in table.values()) for side in (0, 1))
    return "\n".join(f"   {name:24} {pair[0]:4} {pair[1]:4}" for name, pair in [*table.items(), ("sum", total)])


def operators_of(counts: Counter[Launched]) -> str:
    """Lists each operator with its count, direction, phase and this project's innermost function, as lines."""
    return "\n".join(
        f"   {number:3} {launched.direction:8} {launched.phase:24} {launched.operator:40} {launched.place}"
        for launched, number in counts.items()
    )


def main() -> None:
    """Prints the launches of a layer and of a step for each setting."""
    for name, setting in SETTINGS.items():
        counts = count(setting)
        for part, found in {"a layer": counts.layer, "a step of two layers": counts.step}.items():
            print(f"{name}: {part}, forward and backward")
            print(text_of(by_phase(found)), text_of(by_kind(found)), sep="\n\n", end="\n\n")
            if "operators" in sys.argv[1:]:
                print(operators_of(found))


if __name__ == "__main__":
    main()
