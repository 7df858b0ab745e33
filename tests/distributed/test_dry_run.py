"""Tests that plans of a run match the run itself: what each rank stores and sends, and its peak memory."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch

import pretrain_gpt
from megatron.core.distributed import DistributedDataParallel, collectives
from megatron.core.distributed.bucket_storage import MessagePool
from megatron.core.distributed.iteration import CollectiveTrace
from megatron.core.distributed.layout import FlatBuffer
from megatron.core.pipeline_parallel.schedule import configured_schedule, pipeline_of
from megatron.core.pipeline_parallel.transfers import pipeline_programs
from megatron.core.process_groups_config import group_rank, group_size
from megatron.core.tensor_parallel import cross_entropy
from megatron.core.transformer.moe import dispatch_static
from megatron.core.transformer.moe.dispatch_static import padded_rank_rows
from megatron.core.transformer.moe.experts import GroupedMLP
from megatron.core.utils import get_model_config, unwrap_model
from megatron.planner.activations import SavedBytes
from megatron.planner.plan import Plan, RankPlan, plan_run
from megatron.planner.recorders import LiveBytes, MessageRecorder
from megatron.planner.traced_step import by_pass
from megatron.planner.work import Traffic, merged
from megatron.training.arguments import parse_args, validate_args
from megatron.training.command_line.config_builder import run_config_of
from megatron.training.meters.memory import HeldMemoryMeter
from megatron.training.run import TrainingRun
from megatron.training.training import run_step
from tests.counts import long_count, soak_only
from tests.distributed.tiny_runs import OVERLAPPED_SMALL_BUCKETS, started_run
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.harness import run_on_ranks
from tests.unit_tests.training.small_reports import STEP

KINDS = ("parameters", "gradients", "masters", "moments", "host_states", "pages", "host_pages")
EXPERTS: Flags = {"expert-model-parallel-size": 2, "moe-grouped-gemm": True, "moe-expert-rank-capacity-factor": 2.0}
PAGES: Flags = {
    "moe-paged-stash": True,
    "moe-paged-stash-buffer-size-factor-cpu": 0.5,
    "moe-paged-stash-page-size": 2,
}
# The first and the last of four layers compute in bf16.
IN_8_BITS: Flags = {
    **EXPERTS,
    "num-layers": 4,
    "fp8-format": "e4m3",
    "fp8-recipe": "mxfp8",
    "first-last-layers-bf16": True,
}
CHUNKS: Flags = {"num-layers": 4, "pipeline-model-parallel-size": 2, "num-virtual-stages-per-pipeline-rank": 2}
# The first stage has no experts.
UNEVEN: Flags = {
    "num-layers": 3,
    "moe-layer-freq": "[0,1,1]",
    "pipeline-model-parallel-size": 2,
    "decoder-first-pipeline-num-layers": 1,
}
TENSORS: Flags = {"tensor-model-parallel-size": 2, "sequence-parallel": True}
FULL: Flags = {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
RECOMPUTE: Flags = {"recompute-granularity": "selective", "recompute-modules": ["core_attn", "layernorm"]}
OFFLOAD: Flags = {
    "fine-grained-activation-offloading": True,
    "offload-modules": ["core_attn", "attn_proj"],
    "min-offloaded-tensor-size": 16,
}
PAIRS: Flags = {"moe-token-dispatcher-type": "alltoall", "overlap-moe-expert-parallel-comm": True}
ON_HOSTS: Flags = {"optimizer-cpu-offload": True, "optimizer-offload-fraction": 0.5}
NARROW: Flags = {"use-precision-aware-optimizer": True, "exp-avg-dtype": "bf16", "exp-avg-sq-dtype": "fp16"}
# CPU kernels save different statistics for 16-bit tensors than GPU kernels, and different parts of fused attention.
LIKE_GPUS: Flags = {"bf16": False, "attention-backend": "unfused"}
# Features that do not combine with others use a separate run; all other properties share runs.
ON_TWO: dict[str, tuple[str, Flags]] = {
    "saved by experts": ("moe", {**LIKE_GPUS, **EXPERTS}),
    "peak of experts in 8 bits": ("moe", {**LIKE_GPUS, **IN_8_BITS}),
    "peak of shards": ("dense", {**LIKE_GPUS, **OVERLAPPED_SMALL_BUCKETS}),
    "peak of recompute": ("dense", {**LIKE_GPUS, **FULL}),
    "peak of gradient shards on hosts": ("dense", {**LIKE_GPUS, **OFFLOAD, "optimizer": "distributed_fused_adam"}),
    "peak in backward of recompute": (
        "dense",
        {**LIKE_GPUS, **RECOMPUTE, "optimizer-in-backward": True, "clip-grad": 0.0},
    ),
    "peak of pairs": ("moe", {**LIKE_GPUS, **EXPERTS, **PAIRS, "num-layers": 4, "delay-wgrad-compute": True}),
    "even rows": ("moe", {"expert-model-parallel-size": 2, "moe-token-dispatcher-type": "alltoall"}),
    "dynamic experts": ("moe", {"expert-model-parallel-size": 2}),
    "experts in 8 bits": ("moe", {**IN_8_BITS, **PAGES}),
    "shards": ("dense", {"use-torch-fsdp2": True, "init-model-with-meta-device": True}),
    "in backward": ("dense", {"optimizer-in-backward": True, "clip-grad": 0.0}),
    "gradient shards": ("dense", {"optimizer": "distributed_fused_adam"}),
    "sgd": ("dense", {"optimizer": "sgd"}),
    "adapters": ("llama", {"lora-rank": 2}),
}
# Two kinds of parallelism together.
ON_FOUR: dict[str, tuple[str, Flags]] = {
    "peak of stages": ("dense", {**LIKE_GPUS, "pipeline-model-parallel-size": 2}),
    "peak of weight passes": (
        "dense",
        {**LIKE_GPUS, "pipeline-model-parallel-size": 2, "pipeline-schedule": "zb-h1"},
    ),
    "peak of weight passes in a V": (
        "dense",
        {**LIKE_GPUS, "num-layers": 4, "pipeline-model-parallel-size": 2, "pipeline-schedule": "zbv"},
    ),
    "peak of pairs in a V": (
        "moe",
        {
            **LIKE_GPUS,
            **EXPERTS,
            **PAIRS,
            "num-layers": 4,
            "pipeline-model-parallel-size": 2,
            "pipeline-schedule": "dualpipev",
            "global-batch-size": 24,
        },
    ),
    "peak of sequences": ("llama", {**LIKE_GPUS, **TENSORS, "context-parallel-size": 2, "global-batch-size": 4}),
    "peak of pairs of stages": (
        "moe",
        {**LIKE_GPUS, **EXPERTS, **PAIRS, "num-layers": 4, "pipeline-model-parallel-size": 2, "global-batch-size": 24},
    ),
    "states on hosts": (
        "dense",
        {
            "tensor-model-parallel-size": 2,
            "pipeline-model-parallel-size": 2,
            **OVERLAPPED_SMALL_BUCKETS,
            **ON_HOSTS,
            "global-batch-size": 6,
        },
    ),
    "chunks": ("dense", {**CHUNKS, **OVERLAPPED_SMALL_BUCKETS}),
    "sequences": ("llama", {"context-parallel-size": 2, **OVERLAPPED_SMALL_BUCKETS}),
    "experts": (
        "moe",
        {**EXPERTS, **OVERLAPPED_SMALL_BUCKETS, "moe-token-dispatcher-type": "alltoall", "global-batch-size": 16},
    ),
    "narrow instances": (
        "dense",
        {**OVERLAPPED_SMALL_BUCKETS, **NARROW, "num-distributed-optimizer-instances": 2, "global-batch-size": 16},
    ),
}
# Every kind of parallelism together, and paged stash.
ON_EIGHT: dict[str, tuple[str, Flags]] = {
    "eight with experts": ("moe", {**EXPERTS, **PAGES, **OVERLAPPED_SMALL_BUCKETS, **UNEVEN, **TENSORS}),
}
if long_count(0, soak=1):
    # Each tests a single property. In `make test`, the same tests cover it with one of the combined runs above.
    ON_TWO |= {
        "replicas": ("dense", {}),
        "saved": ("dense", {**LIKE_GPUS, "use-distributed-optimizer": True}),
        "saved by gated layers": ("llama", {**LIKE_GPUS, **TENSORS}),
        "saved for recompute": ("dense", {**LIKE_GPUS, **RECOMPUTE}),
        "saved on hosts": ("dense", {**LIKE_GPUS, **OFFLOAD}),
        "peak": ("dense", LIKE_GPUS),
        "peak of gradient shards": ("dense", {**LIKE_GPUS, "optimizer": "distributed_fused_adam"}),
        "peak in backward": ("dense", {**LIKE_GPUS, "optimizer-in-backward": True, "clip-grad": 0.0}),
        "padded rows": ("moe", {**EXPERTS, "moe-token-dispatcher-type": "alltoall"}),
        "pages": ("moe", {**EXPERTS, **PAGES, **OVERLAPPED_SMALL_BUCKETS}),
        "narrow states": ("dense", {**OVERLAPPED_SMALL_BUCKETS, **NARROW}),
        "sharded states on hosts": ("dense", {**OVERLAPPED_SMALL_BUCKETS, **ON_HOSTS}),
        "recompute": ("dense", FULL),
    }
    ON_FOUR |= {
        "stages": (
            "dense",
            {"tensor-model-parallel-size": 2, "pipeline-model-parallel-size": 2, **OVERLAPPED_SMALL_BUCKETS},
        ),
        "instances": (
            "dense",
            {**OVERLAPPED_SMALL_BUCKETS, "num-distributed-optimizer-instances": 2, "global-batch-size": 16},
        ),
        "rings": ("llama", {"context-parallel-size": 2, **TENSORS, **OVERLAPPED_SMALL_BUCKETS}),
        "two levels of sequences": (
            "llama",
            {
                "context-parallel-size": 4,
                "num-query-groups": 4,
                "cp-comm-type": "a2a+p2p",
                "hierarchical-context-parallel-sizes": [2, 2],
                **OVERLAPPED_SMALL_BUCKETS,
            },
        ),
        "dynamic experts of stages": ("moe", {"expert-model-parallel-size": 2, "pipeline-model-parallel-size": 2}),
    }
    # Properties of "rings" and "sequences" together.
    ON_EIGHT["eight with sequences"] = ("llama", {"context-parallel-size": 2, **TENSORS, **OVERLAPPED_SMALL_BUCKETS})
BY_RANKS = {2: ON_TWO, 4: ON_FOUR, 8: ON_EIGHT}
RUNS = {name: run for runs in BY_RANKS.values() for name, run in runs.items()}
# In these runs, shares of a stage's ranks differ. In the others, ranks are planned like the first rank of their stage.
UNEQUAL = ("shards", "gradient shards", "even rows", "experts", "narrow instances")
# Activations saved by the first microbatch are measured before the steps.
SAVED = [
    *(name for name in RUNS if name.startswith("saved")),
    "peak of experts in 8 bits",
    "peak of shards",
    "peak of sequences",
    "peak of gradient shards on hosts",
    "peak in backward of recompute",
]
# All runs share the processes of their number of ranks; each is planned once.
pytestmark = pytest.mark.slow


# (chunk, kind, bytes of gradients, first and last parameter)
Bucket = tuple[int, str, int, str, str]


@dataclass(frozen=True)
class Held:
    """Bytes of one rank, as planned.

    activations, host_activations: of one microbatch of its first chunk. logged: memory report of the log. links:
    traffic of its third step. launched: bytes of the collectives that the trace recorded in that step, by operation.
    beside, messages: peak of that step in addition to persistent memory, and the peak of communication buffers.
    """

    stage: int
    parameters: int
    gradients: int
    masters: int
    moments: int
    host_states: int
    pages: int
    host_pages: int
    activations: dict[str, int]
    host_activations: int
    logged: dict[str, Any]
    links: tuple[Traffic, ...] = ()
    launched: tuple[tuple[str, int], ...] = ()
    beside: int = 0
    messages: int = 0
    buckets: tuple[Bucket, ...] = ()
    paddings: tuple[int, ...] = ()


def _argv(name: str) -> list[str]:
    base, flags = RUNS[name]
    return command_line({**read_bases()[base], "bf16": True, "global-batch-size": 8, **flags})


def _num_ranks(name: str) -> int:
    return next(ranks for ranks, runs in BY_RANKS.items() if name in runs)


@pytest.fixture(autouse=True)
def plans_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes plans assume the defaults of the runs with which they are compared."""
    monkeypatch.setenv("MEGATRON_PLAN_DEVICE", "cpu")


@cache
def _plan(name: str, rank_in_stage: int = 0) -> Plan:
    run_config = run_config_of(
        validate_args(parse_args(argv=[*_argv(name), "--dry-run", "--world-size", str(_num_ranks(name))]))
    )
    provider, step = pretrain_gpt.model_provider, pretrain_gpt.forward_step
    return plan_run(run_config, provider, forward_step_func=step, rank_in_stage=rank_in_stage)


def _planned_by_rank(name: str) -> dict[int, RankPlan]:
    """Plans the first rank of each stage and, if it may differ, the last one; all ranks under `make soak`."""
    last = _num_ranks(name) // len(_plan(name).stages) - 1
    places = range(last + 1) if long_count(0, soak=1) else {0, last} if name in UNEQUAL else {0}
    planned = {one.rank: one for place in places for one in _plan(name, place).stages}
    assert len(planned) == len(places) * len(_plan(name).stages)
    return planned


def _planned_kinds(plan: RankPlan) -> dict[str, int]:
    """Returns the planned bytes by kind, with the names in KINDS."""
    pages = plan.memory.pages
    return {**asdict(plan.memory.states), "pages": pages.device, "host_pages": pages.host}


def _held_by_rank(names: list[str]) -> dict[str, Held]:
    held = {}
    for name in names:
        # Padded rows, as on GPUs; on the CPU no padding is sent.
        padded = patch.dict(vars(dispatch_static), rank_row_layout=lambda device: padded_rank_rows)
        with padded, _as_on_gpus(name.startswith("peak")), started_run(_argv(name)) as run:
            held[name] = _held(run, *(_saved(run) if name in SAVED else ({}, 0)))
            if not name.startswith("saved"):
                held[name] = replace(held[name], **_third_step(run))
    return held


@contextmanager
def _as_on_gpus(does: bool) -> Iterator[None]:
    """Makes collectives and the loss use the same memory as on GPUs; collectives free their memory when they end."""
    made = MessagePool.__init__

    def make(memory: MessagePool, dtype: torch.dtype, device: torch.device, *, is_kept: bool) -> None:
        made(memory, dtype, device, is_kept=False)

    if not does:
        yield
        return
    sent_by_devices = patch.dict(vars(collectives), _is_on_host=lambda flat: False)
    with_copies = patch.object(cross_entropy, "_can_overwrite", lambda rows: False)
    with sent_by_devices, with_copies, patch.object(MessagePool, "__init__", make):
        yield


def _third_step(run: TrainingRun) -> dict[str, Any]:
    """Returns the traffic and the non-persistent peak memory of the third step.

    By then ranks have exchanged their launch orders and the names of their losses.
    """
    launched: list[tuple[str, int]] = []
    record = CollectiveTrace.record

    def note(trace: CollectiveTrace, *, op: str, flat: torch.Tensor, **rest: Any) -> None:
        launched.append((op, flat.nbytes))
        record(trace, op=op, flat=flat, **rest)

    run_step(run)
    run_step(run)
    recorder, live = MessageRecorder(run.groups), LiveBytes("cpu")
    with patch.object(CollectiveTrace, "record", note), recorder, live:
        run_step(run)
    schedule = configured_schedule(get_model_config(run.model[0]))
    pipeline = pipeline_of(schedule, group_size(run.groups.pp), len(run.model))
    program = pipeline_programs(pipeline, run.num_microbatches, schedule)[group_rank(run.groups.pp)]
    return {
        "links": merged(by_pass(recorder.take(), program)),
        "launched": tuple(launched),
        "beside": live.peaks[""],
        "messages": live.messages_peak,
    }


def _saved(run: TrainingRun) -> tuple[dict[str, int], int]:
    """Returns the bytes that autograd saves for the first microbatch by kind, and the bytes offloaded to the host."""
    chunk = run.model[0]
    if run.expert_memory is not None:
        run.expert_memory.step.begin()
    flats = [flat for buffer in chunk.all_buffers for flat in (buffer.param_data, buffer.grad_data)]
    saved = SavedBytes(chunk, persistent=[*chunk.parameters(), *chunk.module.buffers(), *flats])
    with saved.counting():
        output, loss_function = pretrain_gpt.forward_step(run.train_iterator, chunk)
        kept = loss_function(output)
    found = saved.by_kind()
    offloader = unwrap_model(run.model)[0].decoder.arrangement.offloader
    on_host = 0 if offloader is None else offloader.buffers.lent_bytes
    del kept
    return dict(found), on_host


def _held(run: TrainingRun, activations: dict[str, int], host_activations: int) -> Held:
    flats = [buffer for chunk in run.model for buffer in chunk.all_buffers]
    params = [param for chunk in run.model for param in chunk.parameters()]
    buffers = [buffer for chunk in unwrap_model(run.model) for buffer in chunk.buffers()]
    experts = [part for chunk in run.model for part in chunk.modules() if isinstance(part, GroupedMLP)]
    in_8_bits = [linear.packed for part in experts if part.quantized for linear in part.quantized_weights()]
    pool = None if run.expert_memory is None or run.expert_memory.stash is None else run.expert_memory.stash.pool
    assert run.optimizer is not None
    return Held(
        torch.distributed.get_rank(run.groups.pp),
        _memory([*params, *buffers, *in_8_bits, *(flat.param_data for flat in flats if not flat.param_data.is_meta)]),
        _memory([grads for flat in flats for grads in _standing_grads(flat)]),
        **run.optimizer.state_bytes,
        pages=0 if pool is None else pool.arena.nbytes,
        host_pages=0 if pool is None else pool.layout.host_pages * pool.layout.page_bytes,
        activations=activations,
        host_activations=host_activations,
        logged=_logged(run),
        buckets=tuple(sorted(_buckets(run))),
        paddings=tuple(sorted(_paddings(run))),
    )


def _buckets(run: TrainingRun) -> Iterator[Bucket]:
    """Yields the buckets that are reduced."""
    for number, chunk in enumerate(run.model):
        if isinstance(chunk, DistributedDataParallel):
            for kind, groups in (("dense", chunk.bucket_groups), ("expert", chunk.expert_parallel_bucket_groups)):
                for bucket in (bucket for group in groups for bucket in group.buckets):
                    names = [slot.name for slot in sorted(bucket.slots, key=lambda slot: slot.span.start)]
                    yield number, kind, bucket.grad_data.nbytes, names[0], names[-1]


def _paddings(run: TrainingRun) -> Iterator[int]:
    for chunk in run.model:
        for buffer in chunk.all_buffers if isinstance(chunk, DistributedDataParallel) else ():
            params = {id(slot.param): slot.param for slot in buffer.slots}.values()
            of_params = sum(param.numel() for param in params)
            sizes = buffer.param_data.element_size() + buffer.grad_data.element_size()
            yield (buffer.param_data.numel() - of_params) * sizes


def _standing_grads(buffer: FlatBuffer) -> list[torch.Tensor]:
    """Returns the gradient tensors of a buffer whose memory is persistent."""
    return [grads for grads in (buffer.grad_data, *buffer.persistent_grads) if not grads.is_meta]


def _logged(run: TrainingRun) -> dict[str, Any]:
    (meter,) = (meter for meter in run.meters if isinstance(meter, HeldMemoryMeter))
    held = meter.measure(STEP).held
    assert held is not None, "held memory must be known after the first step"
    return held


def _memory(tensors: Iterable[torch.Tensor]) -> int:
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in local}.values())


@pytest.fixture(scope="module")
def held() -> dict[str, list[Held]]:
    """Returns the measurements of each run's ranks."""
    found: dict[str, list[Held]] = {}
    for ranks, runs in BY_RANKS.items():
        by_rank = run_on_ranks(_held_by_rank, ranks, list(runs))
        found |= {name: [of_rank[name] for of_rank in by_rank] for name in runs}
    return found


@pytest.mark.parametrize("name", ON_EIGHT)
def test_eight_ranks_hold_and_send_what_was_planned(name: str, held: dict[str, list[Held]]) -> None:
    for rank, planned in _planned_by_rank(name).items():
        for kind, num_bytes in _planned_kinds(planned).items():
            assert num_bytes == getattr(held[name][rank], kind), (rank, kind)
        assert planned.load.traffic == held[name][rank].links, rank


# Runs named "saved" are for test_passes_with_memory_save_what_was_planned; persistent memory is covered by the others.
@pytest.mark.parametrize(
    "name",
    [soak_only(name) if name.startswith("saved") else name for name in {**ON_TWO, **ON_FOUR}],
)
def test_ranks_hold_what_was_planned_to_the_byte(name: str, held: dict[str, list[Held]]) -> None:
    plans, ranks = _planned_by_rank(name), held[name]
    ranks_in_stage = len(ranks) // (1 + max(of_rank.stage for of_rank in ranks))
    for rank, planned in plans.items():
        assert planned.stage == ranks[rank].stage
        assert (planned.memory.states.host_states > 0) == ("states on hosts" in name)
        for kind, num_bytes in _planned_kinds(planned).items():
            assert num_bytes == getattr(ranks[rank], kind), (rank, kind)
    for rank, of_rank in enumerate(ranks):
        for kind in KINDS:
            first = plans[rank // ranks_in_stage * ranks_in_stage]
            assert getattr(of_rank, kind) <= _planned_kinds(first)[kind]


@pytest.mark.parametrize(
    "name",
    [name for name in {**ON_TWO, **ON_FOUR} if not name.startswith("saved") and name != "even rows"],
)
def test_ranks_send_what_was_planned_to_the_byte(name: str, held: dict[str, list[Held]]) -> None:
    for rank, planned in _planned_by_rank(name).items():
        assert planned.load.traffic and planned.load.traffic == held[name][rank].links, rank


def test_experts_that_are_chosen_unevenly_get_the_planned_rows_of_all_ranks_together(
    held: dict[str, list[Held]],
) -> None:
    planned, sent = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
    for rank, plan in _planned_by_rank("even rows").items():
        for found, links in ((planned, plan.load.traffic), (sent, held["even rows"][rank].links)):
            found.update({(one.group, one.operation, one.phase, str(one.count)): one.num_bytes for one in links})
    assert planned == sent and any(operation == "all-to-all" for _, operation, *_ in sent)


@pytest.mark.parametrize("name", ["chunks", "sequences", "experts", "narrow instances", "gradient shards"])
def test_reductions_and_gathers_are_those_that_the_trace_recorded(name: str, held: dict[str, list[Held]]) -> None:
    for of_rank in held[name]:
        sent = [one for one in of_rank.links if one.group in ("dp", "dp_cp", "edp", "intra_dp_cp")]
        for operation in ("reduce-scatter", "all-gather"):
            launched = [num_bytes for op, num_bytes in of_rank.launched if op == operation]
            phases = [
                one for one in sent if one.operation == operation and one.phase in ("grad reduce", "param gather")
            ]
            assert launched and sum(one.count for one in phases) == len(launched)
            assert sum(one.num_bytes for one in phases) == sum(launched)


@pytest.mark.parametrize("name", ["states on hosts", "experts", "eight with experts", "shards", "in backward"])
def test_the_log_has_what_the_first_rank_and_the_fullest_of_each_stage_hold(
    name: str, held: dict[str, list[Held]]
) -> None:
    ranks, logged = held[name], held[name][0].logged
    assert all(one.logged == logged for one in ranks) and set(logged) == {"rank_0", "max", "stages"}
    for kind in KINDS:
        assert logged["rank_0"][kind] == getattr(ranks[0], kind)
        assert logged["max"][kind] == max(getattr(one, kind) for one in ranks)
        by_stage = {one.stage: max(getattr(own, kind) for own in ranks if own.stage == one.stage) for one in ranks}
        assert {stage: row[kind] for stage, row in logged["stages"].items()} == by_stage
    assert logged["max"]["peak_rss"] >= logged["rank_0"]["peak_rss"] > sum(logged["rank_0"][kind] for kind in KINDS)


@pytest.mark.parametrize(
    "name", ["sgd", "states on hosts", "chunks", "experts", "narrow instances", "gradient shards", "adapters"]
)
def test_buckets_of_a_run_are_the_planned_ones(name: str, held: dict[str, list[Held]]) -> None:
    for plan in _plan(name).stages:
        planned = sorted(
            (one.chunk, one.kind, num_bytes, *ends)
            for one in plan.buffers
            for num_bytes, ends in zip(one.bucket_bytes, one.bucket_ends, strict=True)
        )
        assert planned and tuple(planned) == held[name][plan.rank].buckets
        assert tuple(sorted(one.padding_bytes for one in plan.buffers)) == held[name][plan.rank].paddings


@pytest.mark.parametrize("name", SAVED)
def test_passes_with_memory_save_what_was_planned(name: str, held: dict[str, list[Held]]) -> None:
    planned, found = _plan(name).stages[0], held[name][0]
    saved = planned.memory.activations
    assert dict(saved.by_kind) == found.activations and saved.by_kind["attention"] > 0
    assert saved.on_host == found.host_activations and (saved.on_host > 0) == ("hosts" in name)


@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith("peak") and "pairs" not in name])
def test_a_step_has_as_much_at_once_as_was_planned(name: str, held: dict[str, list[Held]]) -> None:
    for plan in _plan(name).stages:
        found, memory = held[name][plan.rank], plan.memory
        assert memory.peak - memory.persistent == found.beside > memory.activations.by_kind.total(), plan.rank
        # In a run, the vector of statistics also carries names.
        messages = memory.temporary.messages
        assert 0 < messages <= found.messages <= messages + 200, plan.rank


@pytest.mark.parametrize("name", [name for name in RUNS if "pairs" in name])
def test_a_step_with_pairs_has_at_most_as_much_at_once_as_was_planned(name: str, held: dict[str, list[Held]]) -> None:
    for plan in _plan(name).stages:
        found, memory = held[name][plan.rank], plan.memory
        # gloo may free the messages of an all-to-all after the run has waited for it.
        assert found.beside - found.messages <= memory.peak - memory.persistent <= 1.05 * found.beside, plan.rank
        assert memory.temporary.messages <= found.messages, plan.rank
