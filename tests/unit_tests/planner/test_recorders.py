"""Messages, buffers and temporary memory of plans. tests/distributed/test_dry_run.py compares them with runs."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from megatron.core.device.trace_ranges import trace_range
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.schedule import ScheduleKind
from megatron.planner.plan import buffer_layouts
from megatron.planner.recorders import LiveBytes, PassBytes, TurnBytes, TurnRecorder
from megatron.planner.work import Traffic, Unit, link_bytes, merged
from tests.functional_tests.case import Flags
from tests.unit_tests.planner.plans import planned

ROOT = Path(__file__).parents[4]
DEEPSEEK = """
--model deepseek-v3 --dry-run --world-size 16384 --pipeline-model-parallel-size 16 --expert-model-parallel-size 64
--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 2 --micro-batch-size 1
--global-batch-size 16384 --seq-length 4096 --train-iters 10 --lr 1e-4 --bf16 --use-distributed-optimizer
--overlap-grad-reduce --overlap-param-gather --moe-token-dispatcher-type alltoall --mock-data
--tokenizer-type NullTokenizer --vocab-size 129280
--recompute-granularity selective --recompute-modules moe layernorm mla_up_proj
""".split()


@pytest.mark.parametrize(
    ("operation", "share"),
    [("all-reduce", 1.5), ("all-gather", 0.75), ("reduce-scatter", 0.75), ("all-to-all", 0.75), ("send", 1.0)],
)
def test_link_bytes_are_those_of_rings(operation: str, share: float) -> None:
    assert link_bytes(Traffic("dp", 4, operation, "forward", 2, 1000)) == share * 1000


def test_merged_has_one_entry_per_kind_of_message() -> None:
    one, other = Traffic("tp", 2, "all-gather", "forward", 1, 10), Traffic("tp", 2, "all-gather", "backward", 1, 10)
    assert merged([one, other, one]) == (other, Traffic("tp", 2, "all-gather", "forward", 2, 20))


def test_live_bytes_count_from_allocation_to_the_last_tensor() -> None:
    given = torch.empty(100, device="meta")
    with LiveBytes() as live:
        first = given + 1
        view = first[:10]
        del first
        second = given + given[:1]
        del view
        third = given * 2
        del second, third
        given.mul_(2)
    assert live.peaks == {"": 2 * 400} and live.messages_peak == 0


def test_turns_of_passes_exclude_what_is_live_before_a_forward_or_after_a_backward() -> None:
    saved: list[torch.Tensor] = []

    def empty(num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="meta")

    @trace_range("PassTurns.hand_over")
    def hand_over() -> None:
        pass

    @trace_range("ScheduleRunner._forward")
    def forward() -> None:
        saved.append(empty(10))
        sent = empty(5)
        hand_over()
        del sent
        saved.append(empty(3))

    @trace_range("ScheduleRunner._backward")
    def backward() -> None:
        gradient = empty(2)
        saved.pop()
        hand_over()
        saved.pop()
        del gradient

    with TurnRecorder() as recorder:
        persistent = empty(100)
        forward()
        backward()
    assert recorder.passes == [
        PassBytes(0, (TurnBytes(15, 15), TurnBytes(15, 13))),
        PassBytes(13, (TurnBytes(15, 12), TurnBytes(12, 0))),
    ]
    assert recorder.rest == persistent.nbytes == 100
    assert recorder.messages == [PassBytes(0, (TurnBytes(0, 0),) * 2)] * 2


@pytest.mark.slow
def test_weight_passes_have_the_products_of_weight_gradients_and_no_attention() -> None:
    flags: Flags = {"pipeline-model-parallel-size": 2, "num-layers": 4, "global-batch-size": 8}
    of_one_chunk = {ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZB_H1}
    kinds = {"1f1b": of_one_chunk, "zb-h1": of_one_chunk, "zbv": {ScheduleKind.ZBV}}
    for name, possible in kinds.items():
        plan, _ = planned("dense", {**flags, "pipeline-schedule": name}, ranks=2)
        assert all(stage.activations_by_schedule.keys() == possible for stage in plan.stages)
        for chunk in (chunk for stage in plan.stages for chunk in stage.load.chunks):
            flops = [
                {unit: sum(count * one.flops for one, count in work.items() if one.unit is unit) for unit in Unit}
                for work in (chunk.forward, chunk.weights, chunk.split_backward, chunk.backward)
            ]
            forward, weights, split, backward = flops
            # The GEMMs of a forward, of weight gradients and of gradients of inputs have equal FLOPs.
            assert weights[Unit.MATMUL] == split[Unit.MATMUL] == forward[Unit.MATMUL] > 0
            assert weights[Unit.ATTENTION] == 0 < split[Unit.ATTENTION] == backward[Unit.ATTENTION]


@pytest.mark.slow
def test_messages_of_passes_scale_with_microbatches_and_others_do_not() -> None:
    flags: Flags = {"tensor-model-parallel-size": 2, "sequence-parallel": True, "use-distributed-optimizer": True}
    few, _ = planned("llama", {**flags, "global-batch-size": 8}, ranks=4)
    many, _ = planned("llama", {**flags, "global-batch-size": 40}, ranks=4)
    assert many.num_microbatches == 5 * few.num_microbatches
    sent = [
        {(one.group, one.operation, one.phase): one.num_bytes for one in plan.stages[0].load.traffic}
        for plan in (few, many)
    ]
    assert sent[0].keys() == sent[1].keys()
    for (_, _, phase), before, after in zip(sent[0], sent[0].values(), sent[1].values(), strict=True):
        assert after == before * (5 if phase in ("forward", "backward") else 1)


@pytest.mark.slow
def test_messages_of_two_levels_of_context_parallelism_are_on_the_groups_of_the_levels() -> None:
    flags: Flags = {"context-parallel-size": 4, "num-query-groups": 4, "global-batch-size": 8}
    levels: Flags = {"cp-comm-type": "a2a+p2p", "hierarchical-context-parallel-sizes": [2, 2]}
    sent, stages = [], []
    for more in (levels, {"cp-comm-type": "a2a"}, {"cp-comm-type": "p2p"}):
        plan, _ = planned("llama", {**flags, **more}, ranks=4)
        stages.append(plan.stages[0])
        sent.append(
            {
                (one.group, one.operation): one
                for one in plan.stages[0].load.traffic
                if one.phase == "forward" and one.operation in ("all-to-all", "send")
            }
        )
    both, heads, ring = sent
    assert both.keys() == {("hcp_0", "all-to-all"), ("hcp_1", "send")}
    assert stages[0].groups["hcp_0"] == (0, 1) and stages[0].groups["hcp_1"] == (0, 2)
    # The same tensors are exchanged. A block of the ring has twice the tokens and half the heads, and needs one step
    # instead of three.
    exchanged, passed = both["hcp_0", "all-to-all"], both["hcp_1", "send"]
    assert (exchanged.group_size, exchanged.num_bytes) == (2, heads["cp", "all-to-all"].num_bytes)
    assert (passed.group_size, 3 * passed.num_bytes) == (2, ring["cp", "send"].num_bytes)
    assert 3 * passed.count == ring["cp", "send"].count


@pytest.mark.slow
def test_lines_of_a_plan_name_messages_buckets_and_padding() -> None:
    flags: Flags = {"expert-model-parallel-size": 2, "use-distributed-optimizer": True, "global-batch-size": 8}
    plan, lines = planned("moe", flags, ranks=4)
    stage = plan.stages[0]
    assert {one.kind for one in stage.buffers} == {"dense", "expert"}
    for one in stage.buffers:
        padded = sum(one.bucket_bytes)
        assert 0 <= one.padding_bytes < one.num_bytes and one.num_bytes >= padded
    assert sum(one.num_bytes for one in stage.buffers) >= stage.memory.states.gradients
    temporary = stage.memory.temporary
    assert temporary.passes > 0 and temporary.messages >= max(sum(one.bucket_bytes) for one in stage.buffers)
    assert any(line.startswith("sent in a step by rank 0") for line in lines)
    assert any("is padding" in line for line in lines)


def test_bucket_bytes_are_those_of_gradients() -> None:
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True, bucket_size=8)
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).bfloat16()
    [layout] = buffer_layouts([DistributedDataParallel(ModelParallelConfig(), settings, layers)])
    assert (layout.param_dtype, layout.grad_dtype) == ("bfloat16", "float32")
    assert len(layout.bucket_bytes) > 1 and sum(layout.bucket_bytes) == layout.num_bytes * 4 // 6


def test_an_evaluation_sends_nothing() -> None:
    plan, lines = planned("dense", {"skip-train": True, "load": "nowhere", "global-batch-size": 8}, ranks=2)
    assert plan.stages[0].load.traffic == () and plan.stages[0].memory.temporary.passes == 0
    assert not any(line.startswith("sent in a step") for line in lines)


# Other tests check plans of fewer ranks. This one checks the cost of planning.
@pytest.mark.soak
def test_deepseek_v3_on_16384_ranks_takes_less_than_a_minute_and_two_gibibytes() -> None:
    # VmHWM is the peak of this program alone, while ru_maxrss includes its parent's memory at the fork.
    script = """
import pretrain_gpt, re, sys, time
pretrain_gpt.main(sys.argv[1:])
status = open("/proc/self/status").read()
print(time.process_time(), re.search(r"VmHWM:\\s+(\\d+)", status)[1])
"""
    found = subprocess.run(
        [sys.executable, "-c", script, *DEEPSEEK], cwd=ROOT, capture_output=True, text=True, check=True, timeout=600
    )
    *words, last = found.stdout.splitlines()
    seconds, kibibytes = map(float, last.split())
    # Time of one core, since other processes share the machine.
    assert seconds < 60 and kibibytes < 2 * 2**20
    assert words[0].startswith("plan of 16384 ranks: pipeline 16, expert 64, data 1024;")
    # Only plans that fit end here. Others are followed by further plans.
    assert words[-1].startswith("fits H100: ")
