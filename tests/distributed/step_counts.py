"""Counts the overhead of one training step besides its arithmetic, on two ranks. Holds no tests.

PYTHONPATH=. .venv/bin/python tests/distributed/step_counts.py [FLAGS]

prints the counts of a tiny model trained with the flags, and the functions that are called most often.
"""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.training.run import TrainingRun
from megatron.training.training import run_step
from tests.distributed.tiny_runs import started_run
from tests.distributed.walks import ROOT
from tests.harness import run_on_ranks

RANKS, WARM_UP_STEPS = 2, 3
TINY = """
--num-layers 1 --hidden-size 16 --num-attention-heads 2 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16
--moe-grouped-gemm --moe-router-load-balancing-type none --swiglu --disable-bias-linear --normalization RMSNorm
--position-embedding-type rope --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
--seq-length 16 --max-position-embeddings 16 --micro-batch-size 2 --mock-data --tokenizer-type NullTokenizer
--vocab-size 64 --num-workers 0 --lr 1e-4 --lr-decay-style constant --train-iters 100 --eval-iters 0
""".split()
# Methods that read a tensor's values without an operator.
_READS = ("tolist", "numpy")


@dataclass
class StepCounts:
    """Counts of one step on one rank.

    collectives: c10d operators, by name. operators: torch operators below autograd, including collectives. calls: calls
    of Python functions of all packages, by file and name. reads: reads of tensors by the host, by file and function.
    Copies to the host (`.cpu()`) are not counted, because they do nothing on a CPU.
    """

    collectives: Counter[str] = field(default_factory=Counter)
    operators: Counter[str] = field(default_factory=Counter)
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    reads: Counter[tuple[str, str]] = field(default_factory=Counter)

    def calls_of(self, *names: str) -> int:
        """Returns the number of calls of all functions with these names."""
        return sum(count for (_, name), count in self.calls.items() if name in names)

    def own_calls(self) -> int:
        """Returns the number of calls of this project's functions."""
        return sum(count for (path, _), count in self.calls.items() if path.startswith(("megatron/", "pretrain")))

    def __str__(self) -> str:
        totals = f"{self.operators.total()} operators, {self.calls.total()} calls, {self.own_calls()} of them of ours"
        often = "\n".join(f"{count:6} {path}: {name}" for (path, name), count in self.calls.most_common(60))
        return f"{dict(self.collectives)}\n{dict(self.reads)}\n{totals}\n{often}"


class _Operators(TorchDispatchMode):
    def __init__(self, counts: StepCounts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Trace ranges, which are recorded while a dispatch mode is active.
        if func.namespace != "profiler":
            self._counts.operators[func.name()] += 1
        if func.namespace == "c10d":
            self._counts.collectives[func._opname] += 1
        if func.name() == "aten::_local_scalar_dense":
            self._counts.reads[_reader(sys._getframe(1))] += 1
        return func(*args, **(kwargs or {}))


def counts_of(flags: Sequence[str]) -> list[StepCounts]:
    """Returns each rank's counts for the tiny model with these additional flags."""
    return run_on_ranks(_count, RANKS, [*TINY, *flags])


def _count(argv: list[str]) -> StepCounts:
    counts = StepCounts()
    with started_run(argv) as run:
        for _ in range(WARM_UP_STEPS):
            run_step(run)
        with _Operators(counts):
            run_step(run)
        # In a separate step, because the dispatch mode is itself a Python function.
        _profiled(run, counts)
    return counts


def _profiled(run: TrainingRun, counts: StepCounts) -> None:
    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            counts.calls[_place(frame)] += 1
        elif event == "c_call" and getattr(argument, "__name__", "") in _READS:
            if isinstance(getattr(argument, "__self__", None), Tensor):
                counts.reads[_reader(frame)] += 1

    before: Callable[..., Any] | None = sys.getprofile()
    sys.setprofile(profile)
    try:
        run_step(run)
    finally:
        sys.setprofile(before)


def _reader(frame: FrameType | None) -> tuple[str, str]:
    """Returns the file and name of this project's innermost function that waits for a value."""
    while frame is not None and not _place(frame)[0].startswith(("megatron/", "pretrain")):
        frame = frame.f_back
    return ("", "") if frame is None else _place(frame)


def _place(frame: FrameType) -> tuple[str, str]:
    path = Path(frame.f_code.co_filename)
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) and ".venv" not in path.parts else path
    return shown.as_posix(), frame.f_code.co_name


if __name__ == "__main__":
    for counts in counts_of(sys.argv[1:]):
        print(counts)
