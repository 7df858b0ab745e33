"""TRAPS 6, 8, 11 and 15 through the training program.

With fixed-size expert buffers, a stash leaves a run bit-identical, whatever other features it uses and however few
pages it has, and the stash occupies as many pages as planned.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from typing import Any
from unittest.mock import patch

import pytest

from megatron.core.transformer.moe_config import GPU_ROW_ALIGNMENT, CapacityConfig
from megatron.training.run import TrainingRun
from tests.counts import long_count, slow, soak_only
from tests.distributed.pair_runs import DELAYED, PAIRS
from tests.distributed.parity import layout
from tests.distributed.stash_runs import ROUTER, STEPS, StepPages, argv_of, stash, train_here
from tests.distributed.tiny_runs import OVERLAPPED_SMALL_BUCKETS
from tests.functional_tests.case import Flags
from tests.harness import run_on_ranks
from tests.pairwise import Case, covering

# Number of ranks, number of ranks with different batches, and flags.
ALL_LAYOUTS: dict[str, tuple[int, int, Flags]] = {
    "one": (1, 1, {}),
    "ep 2": (2, 2, layout(ep=2)),
    "ep 4": (4, 4, layout(ep=4)),
    "pp 2": (2, 1, layout(pp=2)),
    "pp 2, vpp 2": (2, 1, layout(pp=2, vpp=2)),
    "pp 4": (4, 1, layout(pp=4)),
    "pp 2, vpp 2, ep 2": (4, 2, layout(pp=2, vpp=2, ep=2)),
    "tp 2": (2, 1, layout(2)),
    "etp 2": (2, 1, layout(2, etp=2)),
    "cp 2": (2, 1, layout(1, 2)),
    "dp 2": (2, 2, {}),
}
# Two ranks cover the same cases as four; `make soak` runs the layouts of four ranks.
LAYOUTS = {name: one for name, one in ALL_LAYOUTS.items() if one[0] <= long_count(2, soak=4)}
ONE_LAYER_A_CHUNK = ("pp 2, vpp 2", "pp 4", "pp 2, vpp 2, ep 2")
RECOMPUTE: dict[str, Flags] = {
    "none": {},
    "core_attn": {"recompute-granularity": "selective", "recompute-modules": ["core_attn"]},
    "full": {"recompute-granularity": "full", "recompute-method": "block", "recompute-num-layers": 1},
}
# With balanced routing, x and its routing weights use a third of the balanced pages, gate_up two thirds.
POOLS: dict[str, Flags] = {
    "large": stash(8),
    "without some gate_up": stash(0.8),
    "without most gate_up": stash(0.45),
    "without x": stash(0.05),
    "host alone": stash(0, 8),
    "spill": stash(0.4, 8),
    "spill and recompute": stash(0.3, 0.3),
    "rerun": stash(0.6, overflow_policy="rerun"),
    "measured": stash(-0.9),
    "over budget": {**stash(1.1), "moe-expert-rank-capacity-factor": 1},
}
# Names of the pools in which each effect must occur.
EFFECTS = {
    "voids": {"without x", "over budget"},
    "dropped": {"without some gate_up", "without most gate_up", "spill and recompute"},
    "spilled": {"host alone", "spill", "spill and recompute"},
}
AROUND: dict[str, Flags] = {
    "nothing": {},
    "router": {"hidden-dropout": 0.1, **ROUTER},
    "offloading": {
        "fine-grained-activation-offloading": True,
        "offload-modules": ["attn_norm", "mlp_norm"],
        "min-offloaded-tensor-size": 1,
    },
    "shards": OVERLAPPED_SMALL_BUCKETS,
    "gpt-oss": {
        "disable-bias-linear": None,
        "swiglu": None,
        "quick-geglu": True,
        "activation-func-clamp-value": 0.3,
        "glu-linear-offset": 1.0,
        "softmax-type": "learnable",
        "window-size": "4,0",
    },
    "adapters": {"lora-rank": 8},
    "dense layers": {"moe-layer-freq": "[0,1,1,1]", "moe-shared-expert-intermediate-size": 16},
    "ramp-up": {"global-batch-size": None},
}
MOST_MICROBATCHES = long_count(4, soak=9)
DIMENSIONS: dict[str, Sequence[Any]] = {
    "layout": list(LAYOUTS),
    "pool": list(POOLS),
    "microbatches": range(1, MOST_MICROBATCHES + 1),
    "around": list(AROUND),
    "recompute": list(RECOMPUTE),
    "prefetch": range(3),
    "bf16": (False, True),
    "dispatcher": ("allgather", "alltoall"),
    "alignment": (1, GPU_ROW_ALIGNMENT),
    "experts": ("plain", "mxfp8", "blockwise", "mixed"),
    "overlap": ("none", "pairs", "pairs, delayed"),
}
EXPERTS: dict[str, Flags] = {
    "plain": {},
    "mxfp8": {"fp8-format": "e4m3", "fp8-recipe": "mxfp8"},
    "blockwise": {"fp8-format": "e4m3", "fp8-recipe": "blockwise"},
    "mixed": {"fp8-format": "e4m3", "fp8-recipe": "mxfp8", "first-last-layers-bf16": True},
}
# Only with the stash, so that the run without it also shows that overlap changes nothing.
OVERLAP: dict[str, Flags] = {"none": {}, "pairs": PAIRS, "pairs, delayed": {**PAIRS, **DELAYED}}


def _is_possible(choice: Case) -> bool:
    """Returns whether a choice saves activations to stash and, with offloading, activations to offload.

    At least one layer must wait for the backward of another. Experts with adapters cannot be split over ranks, and
    compute in the precision of the parameters. Only all-to-all exchanges overlap.
    """
    again, around = choice.get("recompute") == "full", choice.get("around")
    exchanges = "ep" in choice.get("layout", "ep") or choice["layout"] == "etp 2"
    if choice.get("overlap", "none") != "none" and not (exchanges and choice.get("dispatcher") != "allgather"):
        return False
    if around == "adapters" and (choice.get("layout") == "etp 2" or choice.get("experts", "plain") != "plain"):
        return False
    if choice.get("layout") in ONE_LAYER_A_CHUNK:
        waits = choice["layout"] != "pp 4" or choice.get("microbatches") != 1
        return waits and not again and around != "offloading"
    return not (again and around == "offloading")


def _flags(choice: Case) -> Flags:
    """Returns the flags of the run without a stash."""
    _, replicas, flags = LAYOUTS[choice["layout"]]
    num, other = replicas * choice["microbatches"], replicas * (MOST_MICROBATCHES + 1 - choice["microbatches"])
    if choice["around"] == "ramp-up":
        # Two steps of each batch size, then the first size again. Thresholds count tokens, 16 a sample.
        sizes: Flags = {"step-batch-size-schedule": f"0:{num} {32 * num}:{other} {32 * (num + other)}:{num}"}
    else:
        sizes = {"global-batch-size": num}
    dtype, kind = {"bf16": choice["bf16"]}, {"moe-token-dispatcher-type": choice["dispatcher"]}
    around = {**RECOMPUTE[choice["recompute"]], **AROUND[choice["around"]], **EXPERTS[choice["experts"]]}
    if "fp8-format" in around and "ep" in choice["layout"] and choice["dispatcher"] == "alltoall":
        kind["moe-dispatch-fwd-dtype"] = around["fp8-recipe"]
    return {**flags, **dtype, **kind, **around, **sizes}


def _compare_all(choices: Sequence[Case]) -> list[list[StepPages]]:
    """Checks that the stash changes no results, and returns its page statistics on this rank for each choice."""
    return [_compare(choice) for choice in choices]


def _compare(choice: Case) -> list[StepPages]:
    flags, pool = _flags(choice), {**POOLS[choice["pool"]], **OVERLAP[choice["overlap"]]}
    # On a GPU the experts of static buffers are padded.
    with patch.object(CapacityConfig, "row_alignment", choice["alignment"]):
        without = train_here(argv_of(flags))
        stashed = train_here(argv_of(flags, pool, {"moe-paged-stash-prefetch-layers": choice["prefetch"]}))
    stashed.assert_same(without, str(choice))
    assert len({step["grad_norm"] for step in without.steps}) == STEPS
    return stashed.pages


ALL = list(islice(covering(DIMENSIONS, draws=long_count(14, soak=40), allowed=_is_possible), long_count(10, soak=1000)))
BY_RANKS = {
    ranks: [choice for choice in ALL if LAYOUTS[choice["layout"]][0] == ranks]
    for ranks in sorted({one[0] for one in LAYOUTS.values()})
}


def test_every_value_is_among_the_choices() -> None:
    assert {item for choice in ALL for item in choice.items()} == {
        (name, value) for name, values in DIMENSIONS.items() for value in values
    }


@pytest.mark.parametrize("ranks", BY_RANKS)
@pytest.mark.slow
def test_a_stash_changes_no_bit(ranks: int) -> None:
    choices = BY_RANKS[ranks]
    by_rank = run_on_ranks(_compare_all, ranks, choices, timeout=60 + 60 * len(choices))
    for choice, *of_ranks in zip(choices, *by_rank, strict=True):
        steps = [step for of_rank in of_ranks for step in of_rank]
        _assert_effect(choice, steps)
        _assert_planned(choice, steps)


def _assert_effect(choice: Case, steps: list[StepPages]) -> None:
    """Checks that the pools caused the effects listed for their name, over all ranks."""
    pool = choice["pool"]
    totals = {name: sum(vars(step)[name] for step in steps) for name in EFFECTS}
    # The room for padding is larger than the rows of these batches.
    is_padded = choice["alignment"] > 1 or choice["experts"] != "plain"
    may_lack_rows = pool != "over budget" or ("ep" in choice["layout"] and not is_padded)
    lacking = [name for name, pools in EFFECTS.items() if pool in pools and may_lack_rows and not totals[name]]
    assert not lacking, (choice, totals)
    assert pool != "large" or not any(totals.values()), (choice, totals)
    assert pool != "rerun" or totals["dropped"] == 0, (choice, totals)
    # The first rerun knows the number of rows, the second has pages for all of them.
    assert pool != "without x" or max(step.voids for step in steps) in (1, 2), choice


def _assert_planned(choice: Case, steps: list[StepPages]) -> None:
    # Activations prefetched before their backward free their pages earlier than planned.
    is_exact = choice["pool"] == "large" and choice["prefetch"] == 0
    saved = [step.wanted - step.high_water for step in steps]
    assert min(saved) >= 0 and (max(saved) == 0 or not is_exact), choice


ENCODED: Flags = {"bf16": True, "moe-paged-stash-dtype": "mxfp8", "global-batch-size": 4}


def _compare_encoded(flags: Flags) -> list[StepPages]:
    """Checks that a stash of 8 bits gives one result with all pools, and returns the page statistics of all runs."""
    exact = train_here(argv_of(flags, ENCODED, {"moe-paged-stash-dtype": None}))
    first = train_here(argv_of(flags, ENCODED, stash(8, prefetch_layers=0)))
    pages = list(first.pages)
    assert all(step.high_water == step.wanted for step in pages), "planned in encoded bytes"
    for name in ("without x", "without most gate_up", "host alone", "spill", "measured"):
        trained = train_here(argv_of(flags, ENCODED, POOLS[name]))
        trained.assert_same(first, name)
        pages += trained.pages
    assert first.steps[0]["losses"] == exact.steps[0]["losses"], "forward reads the rows themselves"
    assert first.steps[-1]["losses"] != exact.steps[-1]["losses"]
    return pages


@pytest.mark.parametrize("name", ["ep 2", "pp 2, vpp 2"])
def test_a_stash_of_8_bits_has_one_result_with_any_pool(name: str) -> None:
    ranks, _, flags = LAYOUTS[name]
    steps = [step for of_rank in run_on_ranks(_compare_encoded, ranks, flags) for step in of_rank]
    assert sum(step.spilled for step in steps) and sum(step.voids for step in steps)
    assert not any(step.dropped for step in steps), "a recomputed gate_up would have other bits"


# Steps of 1, 2 and this many microbatches.
MOST_OF_A_STEP = long_count(5, soak=9)
# Stages, chunks, flags, the number of stages that stash anything, and whether they do with one microbatch. They do not
# if a stage has one such layer whose backward follows its forward directly, as on the last stage.
SCHEDULES: list[tuple[int, int, Flags, int, bool]] = [
    (2, 1, {}, 1, False),
    (2, 2, {}, 2, True),
    (3, 1, {"moe-layer-freq": "[0,1,0]"}, 1, False),
    (3, 2, {}, 3, True),
    (4, 1, {}, 3, False),
    (4, 2, {}, 4, True),
    (4, 2, {"moe-layer-freq": "[1,0,1,1]*2"}, 3, True),
]


def _grow_batches(argv: list[str]) -> list[tuple[int, int]]:
    return [(step.high_water, step.wanted) for step in train_here(argv).pages]


# Three stages already include a first, a middle and a last stage.
@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, slow(3), soak_only(4)])
def test_planned_pages_are_those_of_every_schedule_and_number_of_microbatches(stages: int) -> None:
    for num_stages, chunks, flags, num_waiting, is_one_enough in SCHEDULES:
        if num_stages == stages:
            sizes = " ".join(f"{16 * size * (size - 1) // 2}:{size}" for size in range(1, MOST_OF_A_STEP + 1))
            batches: Flags = {"global-batch-size": None, "step-batch-size-schedule": sizes}
            batches["train-iters"] = MOST_OF_A_STEP
            layers = {"num-layers": stages * chunks}
            argv = argv_of(layers, layout(pp=stages, vpp=chunks), batches, stash(8, prefetch_layers=0), flags)
            steps = [step for of_rank in run_on_ranks(_grow_batches, stages, argv) for step in of_rank]
            assert len(steps) == num_waiting * (MOST_OF_A_STEP - (not is_one_enough)), flags
            assert all(high_water == wanted for high_water, wanted in steps)


PAIRED_LAYOUTS: dict[str, tuple[int, Flags]] = {
    "ep 2": (2, layout(ep=2)),
    "pp 2, ep 2": (4, layout(pp=2, ep=2)),
    "pp 2, vpp 2, ep 2": (4, {**layout(pp=2, vpp=2, ep=2), "num-layers": 8}),
}
PAIRED: list[Flags] = [PAIRS, {**PAIRS, **DELAYED, "mtp-num-layers": 1}, {**PAIRS, **RECOMPUTE["full"]}]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ep 2", soak_only("pp 2, ep 2"), soak_only("pp 2, vpp 2, ep 2")])
def test_planned_pages_are_those_of_pairs_of_any_number_of_microbatches(name: str) -> None:
    ranks, flags = PAIRED_LAYOUTS[name]
    sizes = " ".join(f"{16 * size * (size - 1)}:{2 * size}" for size in range(1, MOST_OF_A_STEP + 1))
    batches: Flags = {"global-batch-size": None, "step-batch-size-schedule": sizes, "train-iters": MOST_OF_A_STEP}
    for more in PAIRED:
        kind: Flags = {"moe-token-dispatcher-type": "alltoall", **stash(8, prefetch_layers=0)}
        argv = argv_of(flags, batches, kind, more)
        steps = [step for of_rank in run_on_ranks(_grow_batches, ranks, argv) for step in of_rank]
        assert len(steps) >= ranks // 2 * MOST_OF_A_STEP
        assert all(high_water == wanted > 0 for high_water, wanted in steps), more


def _repeat_step(argv: list[str]) -> list[StepPages]:
    """Trains with hardly any learning rate on the same batches in every step, so that experts receive the same rows."""

    @contextmanager
    def repeated(run: TrainingRun) -> Iterator[None]:
        assert run.train_iterator is not None
        run.train_iterator = cycle([next(run.train_iterator) for _ in range(run.num_microbatches)])
        yield

    return train_here(argv, repeated).pages


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ep 2", soak_only("pp 2, ep 2"), soak_only("pp 2, vpp 2, ep 2")])
def test_pages_suffice_for_pairs_once_rows_are_known(name: str) -> None:
    ranks, flags = PAIRED_LAYOUTS[name]
    for prefetch, more in enumerate(PAIRED):
        pool = stash(0.4, prefetch_layers=prefetch)
        kind: Flags = {"moe-token-dispatcher-type": "alltoall", "global-batch-size": 10, "lr": 1e-30, "min-lr": 0}
        by_rank = run_on_ranks(_repeat_step, ranks, argv_of(flags, kind, pool, more))
        later = [step for of_rank in by_rank for step in of_rank[1:]]
        # Pages for inputs are reserved, so that only gate_up lacks pages.
        assert not any(step.voids for step in later) and any(step.dropped for step in later), (more, by_rank)
