"""Random training runs in which many sizes are equal: the paged stash leaves each run bit-identical.

C is the number of rows of an expert buffer, e the number of experts of a rank, H the hidden size, F the width of an
expert's shard, r the rank of adapters. The stash recognizes rows by their outermost size, C, so that mistakes show
where other sizes equal C too. Layers without fixed-size buffers cannot serve as a reference: they sum in a different
order, so last digits differ.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import pytest

from megatron.core.distributed import DistributedDataParallel
from megatron.training.run import TrainingRun
from tests.counts import long_count, soak_only
from tests.distributed.pair_runs import DELAYED, PAIRS
from tests.distributed.parity import layout
from tests.distributed.stash_runs import Trained, argv_of, stash, train_here
from tests.distributed.tiny_runs import OVERLAPPED_SMALL_BUCKETS, digest_of
from tests.functional_tests.case import Flags
from tests.harness import run_on_ranks

STEPS = 2
COMMON = (4, 8, 16)


@dataclass(frozen=True)
class Layout:
    """Parallel sizes of a run: tensor, pipeline and expert parallel, and ranks that share each expert."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1


# Layouts by number of ranks.
LAYOUTS: dict[int, Sequence[Layout]] = {
    1: [Layout()],
    2: [Layout(ep=2), Layout(ep=2), Layout(pp=2), Layout(tp=2), Layout(tp=2, ep=2), Layout(tp=2, etp=2)],
    4: [Layout(ep=4), Layout(ep=4), Layout(pp=2, ep=2), Layout(tp=2, ep=2, etp=2), Layout(tp=2, pp=2, etp=2)],
}
# Mostly on several ranks: one rank always receives C rows, so that all rows of its buffers are live.
COUNTS = {1: long_count(3, soak=60), 2: long_count(9, soak=330), 4: long_count(0, soak=110)}
MOST_REFUSALS = 8  # draws per number that the program may reject, each with an error that names flags
PER_CALL = 25  # numbers that run in the same processes
RECOMPUTE: Sequence[Flags] = [
    {},
    {},
    {"recompute-granularity": "selective", "recompute-modules": ["core_attn"]},
    {"recompute-granularity": "full", "recompute-method": "block", "recompute-num-layers": 1},
]
GATED: Sequence[Flags] = [
    {},
    {},
    {"swiglu": None, "quick-geglu": True, "activation-func-clamp-value": 0.3, "glu-linear-offset": 1.0},
]
PLAIN: Sequence[Flags] = [{"swiglu": None}, {"swiglu": None, "squared-relu": True}]
# Size factors of the device's and the host's pages; negative factors apply to measured needs.
POOLS = [(8.0, 0.0), (1.1, 0.0), (0.6, 0.0), (0.3, 0.3), (0.4, 8.0), (0.0, 8.0), (-0.9, 0.0), (0.05, 0.0)]
AROUND: Sequence[Flags] = [{}, {}, {"hidden-dropout": 0.1}, OVERLAPPED_SMALL_BUCKETS]
OFFLOADED: Flags = {
    "fine-grained-activation-offloading": True,
    "offload-modules": ["attn_norm"],
    "min-offloaded-tensor-size": 1,
}


@dataclass(frozen=True)
class Draw:
    """A run without a stash, and the flags that add a stash, and passes that take turns.

    sizes: sizes of tensors other than C, by name.
    """

    flags: Flags
    pool: Flags
    sizes: dict[str, int]


@dataclass
class Outcome:
    """Results of one number on a rank.

    refusals: errors of draws before the one that ran. different: differences that the stash caused. rows: C. happened:
    counts of discarded steps, dropped and spilled tensors.
    """

    number: int
    refusals: list[str] = field(default_factory=list)
    draw: Draw | None = None
    different: list[str] = field(default_factory=list)
    rows: int = 0
    happened: Counter[str] = field(default_factory=Counter)


def drawn(ranks: int, number: int, attempt: int) -> Draw:
    """Draws a run in which most sizes are equal."""
    choose = random.Random(f"{ranks} ranks, {number}, {attempt}")
    bf16 = choose.random() < 0.2
    word = 8 if bf16 else 4  # columns that a grouped GEMM reads at a time
    common = choose.choice([size for size in COMMON if size >= word])

    def size(*others: int) -> int:
        return common if choose.random() < 0.6 else choose.choice(others)

    one = choose.choice(LAYOUTS[ranks])
    is_gated = choose.random() < 0.7
    hidden, experts = size(8, 16), size(1, 2, 4, 8)
    # With half of the common size as F, 2F equals it.
    is_half = is_gated and common >= 2 * word and choose.random() < 0.4
    ffn = common // 2 if is_half else size(8, 16)
    rows, factor = size(4, 8, 16, 32), choose.choice([1, 2, 4][: one.ep])
    topk = choose.choice([k for k in (1, 2, 4) if k <= experts * one.ep and k * one.etp * factor <= max(rows, 4)])
    tokens = max(1, rows // (topk * one.etp * factor))
    micro_batch = choose.choice([1, 2]) if tokens % 2 == 0 else 1
    rank = size(8, 16) if choose.random() < 0.2 else None
    recompute = choose.choice(RECOMPUTE)
    # Frozen layers, and layers recomputed as a whole, may save no activations that could be offloaded.
    saves = rank is None and recompute.get("recompute-granularity") != "full"
    around = choose.choice([*AROUND, OFFLOADED] if saves else AROUND)
    page, replicas, num_microbatches = size(1, 2, 4), ranks // (one.tp * one.pp), choose.choice([1, 2, 3])
    flags: Flags = {
        **layout(one.tp, pp=one.pp, ep=one.ep, etp=one.etp),
        "bf16": bf16,
        "num-layers": choose.choice([2, 3] if one.pp == 1 else [4]),
        "hidden-size": hidden,
        "num-attention-heads": 2,
        "moe-ffn-hidden-size": ffn * one.etp,
        "num-experts": experts * one.ep,
        "moe-router-topk": topk,
        "moe-router-pre-softmax": topk == 1,
        "moe-expert-rank-capacity-factor": max(1.0, rows / (tokens * topk * one.etp)),
        "moe-token-dispatcher-type": choose.choice(["allgather", "alltoall"]),
        "moe-shared-expert-intermediate-size": size(8, 16) if choose.random() < 0.15 else None,
        "disable-bias-linear": None if choose.random() < 0.3 else True,
        "lora-rank": rank,
        "seq-length": tokens * one.tp // micro_batch,
        "max-position-embeddings": tokens * one.tp // micro_batch,
        "micro-batch-size": micro_batch,
        "global-batch-size": micro_batch * replicas * num_microbatches,
        "train-iters": STEPS,
        **choose.choice(GATED if is_gated else PLAIN),
        **recompute,
        **around,
    }
    device, host = choose.choice(POOLS)
    policy = choose.choice(["recompute", "recompute", "rerun"])
    pool = stash(device, host, page_size=page, prefetch_layers=choose.choice([0, 1, 2]), overflow_policy=policy)
    pool["moe-paged-stash-compute"] = choose.choice(["pages", "pages", "copies"])
    if rank is None and choose.random() < 0.3:
        flags |= _in_8_bits(choose, num_layers=int(flags["num-layers"]), sends=one.ep > 1)
    if one.ep * one.etp > 1 and flags["moe-token-dispatcher-type"] == "alltoall":
        # Only with the stash, so that the run without it also shows that overlap changes nothing.
        pool |= choose.choice([{}, PAIRS, {**PAIRS, **DELAYED}])
    if one.pp > 1 and not pool.keys() & PAIRS.keys():
        # Likewise, and the parts of the model remain where they are.
        pool |= choose.choice([{}, {"pipeline-schedule": "zb-h1"}])
    sizes = {"e": experts, "H": hidden, "F": ffn, "2F": 2 * ffn if is_gated else 0, "r": rank or 0, "page": page}
    return Draw(flags, pool, sizes)


def _in_8_bits(choose: random.Random, *, num_layers: int, sends: bool) -> Flags:
    """Draws how experts compute in 8 bits. sends: whether rows may be sent to other ranks."""
    recipe = choose.choice(["blockwise", "mxfp8"])
    flags: Flags = {"fp8-format": "e4m3", "fp8-recipe": recipe}
    if sends and choose.random() < 0.5:
        flags |= {"moe-token-dispatcher-type": "alltoall", "moe-dispatch-fwd-dtype": recipe}
    if num_layers > 2 and choose.random() < 0.3:
        flags |= {"first-last-layers-bf16": True, "num-layers-at-start-in-bf16": choose.choice([0, 1])}
    return flags


class _Watch:
    """Records digests of a run's reduced gradients by iteration and name. A rerun replaces the digests of its step."""

    def __init__(self) -> None:
        self.gradients: dict[int, dict[str, str]] = {}
        self.has_started, self.rows = False, 0

    @contextmanager
    def watch(self, run: TrainingRun) -> Iterator[None]:
        """Records the gradients of a run while it trains."""
        self.has_started = True
        for index, chunk in enumerate(run.model):
            vars(chunk)["finish_grad_sync"] = partial(self._finish, run, chunk, index, chunk.finish_grad_sync)
        yield
        assert run.expert_memory is not None and run.expert_memory.last_step is not None
        self.rows = run.expert_memory.last_step.buffer_rows

    def _finish(
        self,
        run: TrainingRun,
        chunk: DistributedDataParallel,
        index: int,
        finish_grad_sync: Callable[[bool], None],
        force_all_reduce: bool = False,
    ) -> None:
        finish_grad_sync(force_all_reduce)
        found = self.gradients.setdefault(run.state.iteration, {})
        found |= {f"{index} {name}": digest_of(grad) for name, grad in chunk.named_main_grads()}


def _train(*flags: Flags) -> tuple[Trained, _Watch] | str:
    """Returns the record of a run, or the error that rejected it before its first step."""
    watch = _Watch()
    try:
        return train_here(argv_of(*flags), watch.watch), watch
    except ValueError as error:
        if watch.has_started or "--" not in str(error):
            raise
        return str(error)


def _compare_all(ranks: int, numbers: Sequence[int]) -> list[Outcome]:
    """Runs the draws of `numbers` on this rank, continuing after a difference."""
    outcomes = []
    for number in numbers:
        try:
            outcomes.append(_compare(ranks, number))
        except BaseException as error:
            error.add_note(f"number {number} of {ranks} ranks; {how_to_repeat(ranks, number)}")
            raise
    return outcomes


def _compare(ranks: int, number: int) -> Outcome:
    outcome = Outcome(number)
    for attempt in range(MOST_REFUSALS):
        draw = drawn(ranks, number, attempt)
        stashed = _train(draw.flags, draw.pool)
        if isinstance(stashed, str):
            outcome.refusals.append(stashed)
            continue
        without = _train(draw.flags)
        assert not isinstance(without, str), without
        outcome.draw, outcome.rows = draw, stashed[1].rows
        for step in stashed[0].pages:
            outcome.happened.update(voids=step.voids, dropped=step.dropped, spilled=step.spilled)
        outcome.different = _differences(stashed, without)
        break
    return outcome


def _differences(stashed: tuple[Trained, _Watch], without: tuple[Trained, _Watch]) -> list[str]:
    """Names each result that is not bit-identical: gradients of each step, then reports and final states."""
    found, expected = stashed[1].gradients, without[1].gradients
    assert found.keys() == expected.keys() and len(expected) == STEPS and all(expected.values())
    different = [] if stashed[1].rows == without[1].rows else ["C"]
    for step, digests in expected.items():
        assert found[step].keys() == digests.keys()
        different += [f"gradient {name} of step {step}" for name in digests if found[step][name] != digests[name]]
    try:
        stashed[0].assert_same(without[0], "with the stash")
    except AssertionError as error:
        different.append(str(error))
    return different


def how_to_repeat(ranks: int, number: int) -> str:
    """Returns the command that runs one number alone."""
    return f'alone: python -c "from {__name__} import *; assert_no_bit_changes({ranks}, [{number}])"'


def assert_no_bit_changes(ranks: int, numbers: Sequence[int]) -> list[Outcome]:
    """Runs the draws of `numbers`, asserts that the stash changes no results, and returns the outcomes of rank 0."""
    by_rank = run_on_ranks(_compare_all, ranks, ranks, numbers, timeout=60 + 30 * len(numbers))
    failures = []
    for outcomes in zip(*by_rank, strict=True):
        number, draw = outcomes[0].number, outcomes[0].draw
        alone = how_to_repeat(ranks, number)
        assert draw is not None, f"{outcomes[0].refusals}\n{alone}"
        assert all(one.refusals == outcomes[0].refusals for one in outcomes), alone
        for rank, one in enumerate(outcomes):
            failures += [f"rank {rank}: {one.different}\n{draw}\n{alone}"] if one.different else []
    assert not failures, "\n".join(failures)
    return by_rank[0]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, soak_only(4)])
def test_no_bit_changes_where_sizes_coincide(ranks: int) -> None:
    numbers, ran = range(COUNTS[ranks]), list[Outcome]()
    for first in numbers[::PER_CALL]:
        ran += assert_no_bit_changes(ranks, numbers[first : first + PER_CALL])
    num_refused = sum(len(one.refusals) for one in ran)
    met = Counter(name for one in ran if one.draw for name, size in one.draw.sizes.items() if size == one.rows)
    happened = sum((one.happened for one in ran), Counter[str]())
    print(f"{ranks} ranks: {len(ran)} ran, {num_refused} refused; C was {dict(met)}; pages: {dict(happened)}")
    assert num_refused < len(ran) and {"H", "F"} <= met.keys()
    assert happened["dropped"] + happened["spilled"] > 0
