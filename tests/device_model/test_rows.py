"""The training program raises no alarm on modelled GPUs, in rows of the capture table and in cases of the gate.

`python -m tests.device_model.rows NAME` prints the alarms of a row.
"""

from collections import Counter
from functools import cache

import pytest

from tests.counts import long_count
from tests.device_model.host import on_modelled_gpus
from tests.device_model.rows import CAPTURED, ENCODED, PAGED, QUANTIZED, SUBJECTS_OF_GRAPHS, Modelled, all_rows, train

ROWS = all_rows()
# In addition to the capture table: each kind of parallelism, and each recompute level and tier of the stash. The other
# rows run in `make soak`.
USUAL = [
    "ddp: overlapped",
    "ZeRO-1: states on the host",
    "ZeRO-1: pp vpp ep",
    "ZeRO-1: two instances",
    "ZeRO-2: overlapped, fp16",
    "ZeRO-2: gradients in bf16",
    "FSDP2: bf16, meta device",
    "FSDP2: tp sp, fp16",
    "in backward: FSDP2, exact",
    "in backward: ZeRO-2, previous norm",
    "offload: parts, bf16",
    "stash: spills to the host",
    "stash: host pages alone, bf16",
    "stash: recomputes down to inputs",
    "stash: overflow of inputs and retry",
    "stash: rerun with more pages",
    "step graph: few pages",
    "step graph: overflow and retry",
    "layer graphs: pages",
]
# Events that must occur in a row, or the row would not test them: spilled pages, recomputed tensors, retried steps.
EVENTS = {
    "stash: spills to the host": {"spilled_pages"},
    "stash: recomputes down to inputs": {"dropped_gate_up"},
    "stash: overflow of inputs and retry": {"void_steps"},
    "stash: rerun with more pages": {"void_steps"},
    "step graph: few pages": {"spilled_pages", "dropped_gate_up"},
    "step graph: overflow and retry": {"void_steps"},
    "layer graphs: pages": {"spilled_pages", "dropped_gate_up"},
    "pages, step graph: few pages": {"spilled_pages", "dropped_gate_up"},
    "pages, layer graphs: pages": {"spilled_pages", "dropped_gate_up"},
    "pages, stash: spills to the host": {"spilled_pages"},
}
# How often the host waits for the device in a step, by function. Each wait leaves a GPU idle.
_OF_EVERY_STEP = {"StatisticsExchange._sum_sync": 2, "GradChecks.non_finite_sync": 1}
WAITS = {
    "full: dense, as Llama": {**_OF_EVERY_STEP, "read_norm_sync": 1},
    "full: ZeRO-1 in bf16, optimizer in the graph": {**_OF_EVERY_STEP, "DeviceStep.read_sync": 1},
    "full: stash, optimizer in the graph": {
        **_OF_EVERY_STEP,
        "DeviceStep.read_sync": 1,
        "ExpertMemory._figures_sync": 2,
        "PagePool.occupancy_sync": 2,
    },
}
# Configurations that `make test` also trains with graphs of parts. It trains each configuration at least once: with a
# graph of the whole step where possible, else with graphs of parts, else eagerly. `make soak` trains all forms.
ALSO_LOCAL = [
    "dense, as Llama",
    "the same with dropout",
    "pipeline",
    "experts, recompute of parts",
    "stash",
    "stash that spills to the host",
    "stash that drops to recompute",
    "stash, as DeepSeek-V3",
    "stash over ranks, ZeRO-1",
    "stash in a pipeline",
]


def _is_usual(name: str) -> bool:
    form, _, configuration = name.partition(": ")
    if not name.startswith(CAPTURED):
        return name in USUAL or name.startswith((PAGED, ENCODED, QUANTIZED))
    better = {"full": [], "local": ["full"], "eager": ["full", "local"]}[form]
    is_first = not any(f"{one}: {configuration}" in ROWS for one in better)
    return is_first or (form == "local" and configuration in ALSO_LOCAL)


NAMES = [name for name in ROWS if _is_usual(name) or long_count(0, soak=1)]


@cache
def records(ranks: int) -> dict[str, list[Modelled]]:
    """Trains all rows with this number of ranks in the same processes, and returns each rank's record by row."""
    rows = [(name, ROWS[name]) for name in NAMES if ROWS[name].ranks == ranks]
    by_rank = on_modelled_gpus(train, ranks, rows, timeout=long_count(400, soak=1500))
    return {name: [found[index] for found in by_rank] for index, (name, _) in enumerate(rows)}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_row_trains_on_modelled_gpus_without_an_alarm(name: str) -> None:
    for record in records(ROWS[name].ranks)[name]:
        assert record.error is None
        assert record.alarms == []
        assert len(record.losses) == ROWS[name].num_steps and record.num_launches > 500
        # A part whose capture fails would run eagerly, and the row would not test its graphs.
        assert record.failure is None
        assert (record.num_captures > 0) == name.removeprefix(PAGED).removeprefix(QUANTIZED).startswith(
            ("full: ", "local: ", *SUBJECTS_OF_GRAPHS)
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", EVENTS)
def test_a_row_of_the_stash_does_what_its_name_says(name: str) -> None:
    happened = set[str]().union(*(record.stash_events for record in records(ROWS[name].ranks)[name]))
    assert happened >= EVENTS[name]


def test_rows_have_every_configuration_of_the_table_that_needs_no_other_gpus() -> None:
    from megatron.tools.capture_configurations import CONFIGURATIONS

    expected = {name for name, one in CONFIGURATIONS.items() if not one.needs_gpu}
    expected -= {"Muon in the graph", "the same in the graph"}  # the command line rejects them
    for names in (ROWS, NAMES):
        assert {name.partition(": ")[2] for name in names if name.startswith(CAPTURED)} == expected


_AS_EAGER = ["dense, as Llama", "stash", "stash that drops to recompute", "pipeline"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [*(("", name) for name in _AS_EAGER), (QUANTIZED, "stash")])
def test_graphs_of_the_model_train_as_its_eager_steps_do(kind: str, name: str) -> None:
    """Replays are bitwise equal to eager steps. Otherwise the rows would test a different program.

    Experts in 8 bits would otherwise compute with stale copies of their weights.
    """
    row = ROWS[f"{kind}full: {name}"]
    eager = row.without_graphs()
    ((record,), *_) = on_modelled_gpus(train, row.ranks, [(name, eager)])
    for form in ("full", "local"):
        assert records(row.ranks)[f"{kind}{form}: {name}"][0].losses == record.losses
    if kind == QUANTIZED:
        assert records(row.ranks)[f"{PAGED}{kind}full: {name}"][0].losses == record.losses


@pytest.mark.slow
@pytest.mark.parametrize("name", WAITS)
def test_the_host_waits_where_it_must_and_nowhere_else(name: str) -> None:
    for record in records(ROWS[name].ranks)[name]:
        found: Counter[str] = Counter()
        for wait, count in record.waits_of_last_step.items():
            found[_function_of(wait)] += count
        assert found == WAITS[name]


def _function_of(wait: str) -> str:
    """Returns the project's innermost function in the name of a wait: "OPERATOR at FILE:LINE FUNCTION < ..."."""
    return wait.partition(" at ")[2].partition(" < ")[0].partition(" ")[2]
