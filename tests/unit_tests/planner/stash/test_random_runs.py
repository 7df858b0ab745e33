"""Plans of random schedules, pools and traces, compared with the counters of real stashes."""

import random
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pretrain_gpt
from megatron.core.transformer.moe.paged_stash import Counter
from megatron.planner.stash import walk as walk_module
from megatron.planner.stash.routing import traced_spans
from megatron.planner.stash.stages import planned_run
from megatron.planner.stash.walk import walk
from megatron.training.arguments import read_run_config
from megatron.training.callbacks.routing_trace import RoutingHeader, read_routing
from megatron.training.config import RunConfig
from megatron.training.step import expert_memory
from tests.counts import long_count
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.routing_traces import write_trace
from tests.unit_tests.planner.stash.real_stashes import RealRank, run_together

STEPS = 3
SKEWED, BALANCED = [32, 32, 0, 0], [16, 16, 16, 16]  # tokens of each expert, with two choices for 32 tokens


@pytest.fixture(autouse=True)
def plans_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes plans assume the defaults of the runs with which they are compared."""
    monkeypatch.setenv("MEGATRON_PLAN_DEVICE", "cpu")


def random_flags(choose: random.Random) -> Flags:
    """Returns flags of a run with 1 to 4 stages, 1 or 2 chunks, and 1 or 2 expert-parallel or data-parallel ranks."""
    (num_stages, num_chunks), experts = choose.choice([(1, 1), (2, 1), (4, 1), (2, 2)]), choose.choice([1, 2])
    replicas = 2 if experts == 1 and num_stages < 4 and choose.random() < 0.3 else 1
    num_microbatches = num_stages * choose.randrange(1, 4)
    flags: Flags = {
        "num-layers": num_stages * num_chunks * choose.choice([1, 2] if num_stages > 1 else [2, 3]),
        "pipeline-model-parallel-size": num_stages,
        "expert-model-parallel-size": experts,
        "micro-batch-size": 1,
        "global-batch-size": num_microbatches * experts * replicas,
        "world-size": num_stages * experts * replicas,
        "moe-grouped-gemm": True,
        "moe-expert-rank-capacity-factor": float(2 * experts),
        "moe-paged-stash": True,
        "moe-paged-stash-page-size": choose.choice([1, 4, 16]),
        "moe-paged-stash-buffer-size-factor-cuda": choose.choice([0.0, 0.3, 0.5, 0.7, 0.9, 1.2, -0.6, -1.0]),
        "moe-paged-stash-buffer-size-factor-cpu": choose.choice([0.0, 0.1, 0.3, -0.2]),
        "moe-paged-stash-prefetch-layers": choose.choice([0, 1, 2]),
        "moe-paged-stash-overflow-policy": choose.choice(["recompute", "recompute", "rerun"]),
        "moe-paged-stash-compute": choose.choice(["pages", "copies"]),
    }
    if num_chunks > 1:
        flags["num-virtual-stages-per-pipeline-rank"] = num_chunks
    if flags["moe-paged-stash-buffer-size-factor-cuda"] == flags["moe-paged-stash-buffer-size-factor-cpu"] == 0.0:
        flags["moe-paged-stash-buffer-size-factor-cpu"] = 0.6
    return flags


def config_of_flags(flags: dict[str, Any], *, row_alignment: int = 1) -> RunConfig:
    words = [*command_line({**read_bases()["moe"], **flags}), "--dry-run"]
    return read_run_config(words).changed(moe_expert_row_alignment=row_alignment)


def random_trace(path: Path, run_config: RunConfig, choose: random.Random) -> None:
    """Writes a trace of a few steps with random skew."""
    header, chance = RoutingHeader.of(run_config), np.random.default_rng(choose.randrange(1 << 30))
    num_ranks = run_config.launch.world_size // run_config.transformer.pipeline_model_parallel_size
    shape = run_config.training.global_batch_size // num_ranks, num_ranks
    steps = []
    for _ in range(STEPS):
        skewed = [chance.dirichlet([choose.choice([0.5, 5.0, 500.0])] * header.num_experts) for _ in header.layers]
        counts = [chance.multinomial(header.tokens_of_microbatch * header.topk, one, size=shape) for one in skewed]
        steps.append(dict(zip(header.layers, map(torch.from_numpy, counts))))
    write_trace(path, header, steps)


def real_ranks(run_config: RunConfig) -> list[RealRank]:
    """Returns all ranks of the run in the order of a plan, with ranks of one group adjacent."""
    transformer = run_config.transformer
    stages, size = transformer.pipeline_model_parallel_size, transformer.expert_model_parallel_size
    places = product(range(stages), range(run_config.launch.data_parallel_size // size), range(size))
    return [RealRank(run_config, stage, group=group, number=number) for stage, group, number in places]


def test_the_reserve_follows_the_rows_of_recent_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve_over_two_steps(monkeypatch)
    flags: Flags = {
        "num-layers": 3,
        "expert-model-parallel-size": 2,
        "world-size": 2,
        "micro-batch-size": 1,
        "global-batch-size": 2,
        "moe-grouped-gemm": True,
        # gate_up is narrower than x: a reserve for an x that fills its buffer drops the gate_up of a balanced forward.
        "moe-ffn-hidden-size": 12,
        "moe-expert-rank-capacity-factor": 2.0,
        "moe-paged-stash": True,
        "moe-paged-stash-compute": "pages",
        "moe-paged-stash-page-size": 4,
        "moe-paged-stash-buffer-size-factor-cuda": 1.0,
    }
    run_config = config_of_flags(flags)
    header = RoutingHeader.of(run_config)
    tokens = [{layer: torch.tensor([[BALANCED] * 2]) for layer in header.layers} for _ in range(5)]
    tokens[1][1] = torch.tensor([[SKEWED] * 2])
    write_trace(tmp_path / "trace", header, tokens)
    run = planned_run(run_config, pretrain_gpt.model_provider)
    spans, _ = traced_spans(read_routing(tmp_path / "trace"), run, num_groups=1, seed=1)
    dropped = walk(run, run.flags, spans=spans, grows=True).stages[0].counters[Counter.DROPPED_GATE_UP]
    ranks, shares = real_ranks(run_config), []
    for step, of_step in enumerate(tokens):
        figures, _ = run_together(ranks, {layer: counts.numpy() for layer, counts in of_step.items()})
        assert [one.counters[Counter.DROPPED_GATE_UP] for one in figures] == dropped[step].tolist()
        shares.append([rank.memory.stash.reserved_share for rank in ranks if rank.memory.stash is not None])
    # The first rank has all rows of the skewed layer. Its effect ends two steps later.
    assert shares == [[0.5, 0.5], [0.999, 0.5], [0.999, 0.5], [0.5, 0.5], [0.5, 0.5]]
    assert dropped[0].tolist() == dropped[4].tolist() == [0, 0] and dropped[2, 0] > 0


def reserve_over_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (expert_memory, walk_module):
        monkeypatch.setattr(module, "RESERVE_STEPS", 2)


@pytest.mark.slow
def test_pages_and_rungs_of_random_runs_are_those_that_were_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve_over_two_steps(monkeypatch)
    seen, trace = dict.fromkeys(Counter, 0), tmp_path / "trace"
    all_voids = 0
    for case in range(long_count(12, soak=500)):
        choose = random.Random(case)
        flags = random_flags(choose)
        # The experts of half of the runs are padded, as on a GPU.
        run_config = config_of_flags(flags, row_alignment=choose.choice([1, 4]))
        random_trace(trace, run_config, choose)
        run = planned_run(run_config, pretrain_gpt.model_provider)
        spans, guesses = traced_spans(read_routing(trace), run, num_groups=run.ranks.num_groups, seed=1)
        planned = walk(run, run.flags, spans=spans, grows=True)
        assert not guesses
        ranks = real_ranks(run_config)
        for step, recorded in enumerate(read_routing(trace)):
            figures, discards = run_together(ranks, recorded.tokens)
            assert planned.discards[step] == discards, (case, flags)
            all_voids += discards
            for rank, real in zip(ranks, figures, strict=True):
                own, place = planned.stages[rank.stage], rank.group * run.ranks.expert_ranks + rank.number
                assert (own.layouts[step][place] if own.layouts[step] else None) == real.layout, (case, step)
                counted = {counter: int(of[step, place]) for counter, of in own.counters.items()}
                assert counted == {counter: real.counters[counter] for counter in counted}, (case, step, flags)
                assert own.pages_wanted[step, place] == real.pages_wanted
                assert own.balanced_pages == real.balanced_pages
                for counter in counted:
                    seen[counter] += counted[counter]
    # All other counters must have occurred.
    never = {counter for counter, count in seen.items() if count == 0}
    assert all_voids > 0 and never == {Counter.VOID, Counter.BAD_COUNT, Counter.DROPPED_ACT}
