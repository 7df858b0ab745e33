"""What a plan says of each rank's memory, against what the ranks of the same run hold."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import pretrain_gpt
from megatron.core.distributed.data_parallel_base import WrappedBuffer
from megatron.core.distributed.transient_buffer import TransientBuffer
from megatron.core.utils import unwrap_model
from megatron.training.arguments import parse_args, validate_args
from megatron.training.dry_run.activations import SavedBytes
from megatron.training.dry_run.plan import Plan, plan_run
from megatron.training.held_memory import HeldMemoryMeter
from megatron.training.run import TrainingRun
from tests.distributed.tiny_runs import SHARDED, started_run
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.harness import run_on_ranks
from tests.unit_tests.training.test_callbacks import STEP

RANKS = 4
KINDS = ("parameters", "gradients", "masters", "moments", "pages", "host_pages")
EXPERTS: Flags = {"expert-model-parallel-size": 2, "moe-grouped-gemm": True, "moe-expert-rank-capacity-factor": 2.0}
PAGES: Flags = {
    "moe-paged-stash": True,
    "moe-paged-stash-buffer-size-factor-cpu": 0.5,
    "moe-paged-stash-page-size": 2,
}
CHUNKS: Flags = {"num-layers": 4, "pipeline-model-parallel-size": 2, "num-virtual-stages-per-pipeline-rank": 2}
RECOMPUTE: Flags = {"recompute-granularity": "selective", "recompute-modules": ["core_attn", "layernorm"]}
NARROW: Flags = {"use-precision-aware-optimizer": True, "exp-avg-dtype": "bf16", "exp-avg-sq-dtype": "fp16"}
# Kernels of the CPU keep other statistics of 16-bit numbers than those of GPUs, and other parts of fused attention.
LIKE_GPUS: Flags = {"bf16": False, "attention-backend": "unfused"}
RUNS: dict[str, tuple[str, Flags]] = {
    "replicas": ("dense", {}),
    "saved": ("dense", {**LIKE_GPUS, "use-distributed-optimizer": True}),
    "saved by gated layers": ("llama", {**LIKE_GPUS, "tensor-model-parallel-size": 2, "sequence-parallel": True}),
    "saved by experts": ("moe", {**LIKE_GPUS, **EXPERTS}),
    "saved for recompute": ("dense", {**LIKE_GPUS, **RECOMPUTE}),
    "stages": ("dense", {"tensor-model-parallel-size": 2, "pipeline-model-parallel-size": 2, **SHARDED}),
    "chunks": ("dense", {**CHUNKS, **SHARDED}),
    "sequences": ("llama", {"tensor-model-parallel-size": 2, "sequence-parallel": True, "context-parallel-size": 2}),
    "experts": ("moe", {**EXPERTS, **SHARDED}),
    "dynamic experts": ("moe", {"expert-model-parallel-size": 2, "pipeline-model-parallel-size": 2}),
    "pages": ("moe", {**EXPERTS, **PAGES, **SHARDED}),
    "narrow states": ("dense", {**SHARDED, **NARROW}),
    "shards": ("dense", {"use-torch-fsdp2": True, "init-model-with-meta-device": True}),
    "in backward": ("dense", {"optimizer-in-backward": True, "clip-grad": 0.0}),
    "gradient shards": ("dense", {"optimizer": "distributed_fused_adam"}),
    "sgd": ("dense", {"optimizer": "sgd"}),
    "adapters": ("llama", {"lora-rank": 2}),
    "recompute": ("dense", {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}),
}


@dataclass(frozen=True)
class Held:
    """Bytes of one rank, as RankPlan has them. activations: of one microbatch of a rank's only chunk.
    logged: as the log has it.
    """

    stage: int
    parameters: int
    gradients: int
    masters: int
    moments: int
    pages: int
    host_pages: int
    activations: dict[str, int]
    logged: dict[str, Any]


def _argv(name: str) -> list[str]:
    base, flags = RUNS[name]
    return command_line({**read_bases()[base], "bf16": True, "global-batch-size": 16, **flags})


def _plan(name: str, rank_in_stage: int = 0) -> Plan:
    args = validate_args(parse_args(argv=[*_argv(name), "--dry-run", "--world-size", str(RANKS)]))
    provider, step = pretrain_gpt.model_provider, pretrain_gpt.forward_step
    return plan_run(args, provider, forward_step_func=step, rank_in_stage=rank_in_stage)


def _held_by_rank(names: list[str]) -> dict[str, Held]:
    held = {}
    for name in names:
        with started_run(_argv(name)) as run:
            held[name] = _held(run, _saved(run) if name.startswith("saved") else {})
    return held


def _saved(run: TrainingRun) -> dict[str, int]:
    """What autograd keeps of the first microbatch."""
    chunk = run.model[0]
    if run.expert_memory is not None:
        run.expert_memory.step.begin()
    flats = [flat for buffer in chunk.all_buffers for flat in (buffer.param_data, buffer.grad_data)]
    saved = SavedBytes(chunk, standing=[*chunk.parameters(), *chunk.module.buffers(), *flats])
    with saved.counting():
        output, loss_function = pretrain_gpt.forward_step(run.train_iterator, chunk)
        kept = loss_function(output)
    found = saved.by_kind()
    del kept
    return dict(found)


def _held(run: TrainingRun, activations: dict[str, int]) -> Held:
    flats = [buffer for chunk in run.model for buffer in chunk.all_buffers]
    params = [param for chunk in run.model for param in chunk.parameters()]
    buffers = [buffer for chunk in unwrap_model(run.model) for buffer in chunk.buffers()]
    pool = None if run.expert_memory is None or run.expert_memory.stash is None else run.expert_memory.stash.pool
    assert run.optimizer is not None
    return Held(
        torch.distributed.get_rank(run.groups.pp),
        _memory([*params, *buffers, *(flat.param_data for flat in flats if not flat.param_data.is_meta)]),
        _memory([grads for flat in flats for grads in _standing_grads(flat)]),
        **run.optimizer.state_bytes,
        pages=0 if pool is None else pool.layout.device_pages * pool.layout.page_bytes,
        host_pages=0 if pool is None else pool.layout.host_pages * pool.layout.page_bytes,
        activations=activations,
        logged=_logged(run),
    )


def _standing_grads(buffer: WrappedBuffer) -> list[torch.Tensor]:
    """What of a buffer's gradients has memory from step to step."""
    sums = [buffer.shard_grads] if isinstance(buffer, TransientBuffer) else []
    return [grads for grads in (buffer.grad_data, *sums) if not grads.is_meta]


def _logged(run: TrainingRun) -> dict[str, Any]:
    (meter,) = (meter for meter in run.meters if isinstance(meter, HeldMemoryMeter))
    held = meter.measure(STEP).held
    assert held is not None, "after the first step"
    return held


def _memory(tensors: Iterable[torch.Tensor]) -> int:
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in local}.values())


@pytest.fixture(scope="module")
def held() -> list[dict[str, Held]]:
    return run_on_ranks(_held_by_rank, RANKS, list(RUNS))


@pytest.mark.parametrize("name", RUNS)
def test_ranks_hold_what_was_planned_to_the_byte(name: str, held: list[dict[str, Held]]) -> None:
    stages = 1 + max(of_rank[name].stage for of_rank in held)
    planned = {one.rank: one for number in range(RANKS // stages) for one in _plan(name, number).stages}
    assert sorted(planned) == list(range(RANKS))
    for rank, of_rank in enumerate(held):
        assert planned[rank].stage == of_rank[name].stage
        for kind in KINDS:
            assert getattr(planned[rank], kind) == getattr(of_rank[name], kind), (rank, kind)
            assert getattr(planned[rank], kind) <= getattr(planned[rank // (RANKS // stages) * (RANKS // stages)], kind)


@pytest.mark.parametrize("name", ["stages", "experts", "pages", "shards", "in backward"])
def test_the_log_has_what_the_first_rank_and_the_fullest_of_each_stage_hold(
    name: str, held: list[dict[str, Held]]
) -> None:
    ranks, logged = [of_rank[name] for of_rank in held], held[0][name].logged
    assert all(one.logged == logged for one in ranks) and set(logged) == {"rank_0", "max", "stages"}
    for kind in KINDS:
        assert logged["rank_0"][kind] == getattr(ranks[0], kind)
        assert logged["max"][kind] == max(getattr(one, kind) for one in ranks)
        by_stage = {one.stage: max(getattr(own, kind) for own in ranks if own.stage == one.stage) for one in ranks}
        assert {stage: row[kind] for stage, row in logged["stages"].items()} == by_stage
    assert logged["max"]["peak_rss"] >= logged["rank_0"]["peak_rss"] > sum(logged["rank_0"][kind] for kind in KINDS)


@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith("saved")])
def test_passes_with_memory_save_what_was_planned(name: str, held: list[dict[str, Held]]) -> None:
    planned = _plan(name).stages[0].activations
    assert planned == held[0][name].activations and planned["attention"] > 0
