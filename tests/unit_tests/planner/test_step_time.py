"""Estimated step times in cases that can be computed by hand."""

from dataclasses import replace

import pytest

from megatron.core.block_scaled.format import BlockFormat
from megatron.core.pipeline_parallel.schedule import Pipeline, Schedule, ScheduleKind, passes, stage_orders
from megatron.planner.pair_time import PassWork, backward_parts, forward_parts, waits
from megatron.planner.step_time import Overlap, StepTime, estimate_step, overlap_of
from megatron.planner.work import (
    GRADS,
    PARAMS,
    ChunkWork,
    Kernel,
    Kernels,
    StageLoad,
    Traffic,
    Unit,
    kernel_seconds,
    message_seconds,
    ranks_in_node,
    scaled_dtype,
)
from megatron.training.arguments import parse_args
from megatron.training.command_line.config_builder import run_config_of
from megatron.training.compute.devices import Device, device_of_name

# Rates per second: 10^12 FLOPs, 10^9 bytes of memory, 10^9 bytes inside a node and half of that between nodes.
DEVICE = Device(
    name="round",
    bf16_tflops=2.0,
    fp8_tflops=None,
    fp32_tflops=1.0,
    attainable_matmul=0.5,
    attainable_attention=0.25,
    attainable_memory=1.0,
    attainable_link=0.5,
    memory_gib=1.0,
    memory_gb_s=1.0,
    host_gb_s=1.0,
    devices_per_node=8,
    node_gb_s=2.0,
    node_latency_us=0.0,
    network_gb_s=1.0,
    network_latency_us=0.0,
    kernel_us=0.0,
)


def _seconds(seconds: float, kind: str = "attention") -> Kernels:
    """Returns a matrix multiplication that takes that many seconds."""
    return Kernels({Kernel(kind, Unit.MATMUL, "bf16", seconds * 1e12, 0.0): 1})


def _stage(
    forward: float = 1.0, backward: float = 2.0, *, chunks: int = 1, traffic: tuple[Traffic, ...] = ()
) -> StageLoad:
    return StageLoad((ChunkWork(_seconds(forward), _seconds(backward)),) * chunks, traffic)


def _step(
    stages: list[StageLoad],
    microbatches: int,
    *,
    overlap: Overlap | None = None,
    in_node: dict[str, int] | None = None,
    paired: bool = False,
    kind: ScheduleKind = ScheduleKind.ONE_F_ONE_B,
) -> StepTime:
    return estimate_step(
        stages,
        microbatches,
        Schedule(kind, paired=paired),
        device=DEVICE,
        overlap=overlap or Overlap(),
        in_node=in_node or {},
        tokens=1000,
        flops_per_rank=3e12,
    )


def _adds_up(step: StepTime) -> bool:
    sums = [one.compute + sum(one.exposed.values()) + one.optimizer + one.bubble for one in step.stages]
    return [*sums, sum(step.split().values())] == pytest.approx([step.seconds] * (len(sums) + 1))


def test_a_kernel_takes_the_longest_of_arithmetic_bytes_and_launch() -> None:
    product = Kernel("experts", Unit.MATMUL, "bf16", 3e12, 1e9)
    assert kernel_seconds(product, DEVICE) == 3.0
    assert kernel_seconds(replace(product, unit=Unit.ATTENTION), DEVICE) == 6.0
    assert kernel_seconds(replace(product, dtype="fp32"), DEVICE) == 6.0
    assert kernel_seconds(replace(product, num_bytes=4e9), DEVICE) == 4.0
    assert kernel_seconds(replace(product, unit=Unit.MEMORY), DEVICE) == 1.0
    assert kernel_seconds(replace(product, unit=Unit.MEMORY), replace(DEVICE, kernel_us=2e6)) == 2.0
    with pytest.raises(ValueError, match="round does not support bf16 matrix multiplications"):
        kernel_seconds(product, replace(DEVICE, bf16_tflops=None))


@pytest.mark.parametrize(("name", "blockwise", "mxfp8"), [
    ("H100", "fp8", "bf16"),
    ("H800", "fp8", "bf16"),
    ("B200", "fp8", "fp8"),
    ("GB200", "fp8", "fp8"),
    ("L40S", "bf16", "bf16"),
    ("MI300X", "bf16", "bf16"),
    ("A100", "bf16", "bf16"),
    ("cpu", "bf16", "bf16"),
])  # fmt: skip
def test_products_in_8_bits_take_the_time_of_the_arithmetic_of_the_device(
    name: str, blockwise: str, mxfp8: str
) -> None:
    device = device_of_name(name, source="test")
    for block, dtype in ((128, blockwise), (32, mxfp8)):
        product = Kernel("experts", Unit.MATMUL, scaled_dtype(BlockFormat(block)), 3e15, 1e3)
        share = device.tflops(dtype) * 1e12 * device.attainable_matmul
        assert kernel_seconds(product, device) == pytest.approx(3e15 / share)


def test_one_stage_computes_all_the_time() -> None:
    step = _step([StageLoad((ChunkWork(_seconds(1), _seconds(2), _seconds(0.5, "experts")),), update=_seconds(4))], 3)
    (stage,) = step.stages
    assert (stage.forward, stage.recompute, stage.backward, stage.optimizer, stage.bubble) == (3.0, 1.5, 6.0, 4.0, 0.0)
    assert stage.by_kind == {"attention": 9.0, "experts": 1.5}
    assert step.seconds == 14.5 and step.tokens_per_second == pytest.approx(1000 / 14.5)
    assert step.mfu == pytest.approx(3 / 14.5 / 2) and step.tflops == pytest.approx(3 / 14.5)
    assert _adds_up(step)


@pytest.mark.parametrize("backward", [1.0, 2.0, 3.5])
@pytest.mark.parametrize(("stages", "chunks", "microbatches"), [(4, 1, 8), (4, 1, 1), (2, 3, 4), (4, 2, 8)])
def test_bubbles_follow_the_schedule(stages: int, chunks: int, microbatches: int, backward: float) -> None:
    step = _step([_stage(1.0, backward, chunks=chunks)] * stages, microbatches)
    share = (stages - 1) / (chunks * microbatches + stages - 1)
    assert [one.bubble / step.seconds for one in step.stages] == pytest.approx([share] * stages)
    assert step.seconds == pytest.approx((1 + backward) * (chunks * microbatches + stages - 1))
    assert _adds_up(step)


def test_weight_passes_fill_the_bubble_with_the_measured_part_of_a_backward() -> None:
    def load(weights: float) -> StageLoad:
        # One message for each of 8 backwards, of an eighth of a second, and one reduction of half a second.
        traffic = (
            Traffic("tp", 2, "all-gather", "backward", 8, 2_000_000_000),
            Traffic("dp_cp", 2, "reduce-scatter", "grad reduce", 1, 1_000_000_000),
        )
        return StageLoad((ChunkWork(_seconds(1.0), _seconds(2.0), weights=_seconds(weights)),), traffic)

    for weights, seconds in ((1.0, 27.0 + 11 / 8), (0.25, 31.5 + 11 / 8)):
        step = _step([load(weights)] * 4, 8, kind=ScheduleKind.ZB_H1)
        assert step.seconds == pytest.approx(seconds + 0.5) and _adds_up(step)
        # The sums over all passes are those of 1F1B.
        plain = _step([load(weights)] * 4, 8)
        assert step.stages[0].backward == pytest.approx(plain.stages[0].backward) == pytest.approx(16.0)
        assert step.stages[0].exposed["backward"] == plain.stages[0].exposed["backward"] == 1.0
    # The reduction of the last stage overlaps with its last weight pass alone, and with its bubble.
    step = _step([load(1.0)] * 4, 8, kind=ScheduleKind.ZB_H1, overlap=Overlap(gradients=True))
    assert step.stages[0].exposed["grad reduce"] == pytest.approx(0.5)
    # Chunks in a V wait for (P - 1) F and for (P - 1) (2 F + 2 B - W), each of half a stage.
    halves = StageLoad((ChunkWork(_seconds(0.5), _seconds(1.0), weights=_seconds(0.5)),) * 2)
    for kind, seconds in ((ScheduleKind.ZBV, 25.5), (ScheduleKind.DUALPIPEV, 27.0)):
        step = _step([halves] * 4, 8, kind=kind, paired=kind is ScheduleKind.DUALPIPEV)
        assert step.seconds == pytest.approx(seconds) and _adds_up(step)


def test_a_slow_stage_makes_the_others_wait() -> None:
    step = _step([_stage(), _stage(2.0, 4.0)], 5)
    # The slow stage's passes, and one forward and backward of the first stage.
    assert step.seconds == 5 * 6.0 + 3.0
    assert [one.bubble for one in step.stages] == pytest.approx([18.0, 3.0])


def test_transfers_between_stages_are_no_bubbles() -> None:
    sends = tuple(
        Traffic("pp", 2, operation, phase, 4, 1_000_000_000)
        for operation, phase in (("send", "forward"), ("receive", "backward"))
    )
    stages = [_stage(traffic=sends)] * 2
    step = _step(stages, 4)
    # A transfer has a quarter of 10^9 bytes, at 10^9 bytes per second. 1F1B waits for both directions.
    assert step.seconds > 3 * 5 and step.stages[0].exposed["pipeline"] == pytest.approx(step.seconds - 3 * 5)
    assert step.stages[0].bubble == pytest.approx(3.0) and _adds_up(step)
    assert _step(stages, 4, overlap=Overlap(transfers=False)).seconds >= step.seconds
    assert _step(stages, 4, in_node={"pp": 1}).seconds > step.seconds
    assert _step(stages, 1).seconds == pytest.approx(2 * 3.0 + 2 * 0.25)


def test_messages_of_passes_are_exposed_unless_modules_overlap_them() -> None:
    traffic = (
        Traffic("ep", 4, "all-to-all", "forward", 2, 8_000_000_000),
        Traffic("tp", 2, "all-gather", "backward", 1, 1_000_000_000),
    )
    # 8 GB x 3/4 at 1 GB/s, and 1 GB x 1/2.
    step = _step([_stage(traffic=traffic)], 2)
    assert step.stages[0].exposed == {"forward": 6.0, "backward": 0.5} | dict.fromkeys(
        ("pipeline", "grad reduce", "param gather", "optimizer"), 0.0
    )
    overlap = Overlap(overlapped_by={"ep": ("attention",), "tp": ("experts",)})
    overlapped = _step([_stage(traffic=traffic)], 2, overlap=overlap)
    # One second in each of two forwards.
    assert (overlapped.stages[0].exposed["forward"], overlapped.stages[0].exposed["backward"]) == (4.0, 0.5)
    assert overlapped.stages[0].hidden == 2.0 and overlapped.seconds == step.seconds - 2.0
    assert _adds_up(step) and _adds_up(overlapped)


def test_a_ring_of_two_levels_overlaps_attention_and_exchanges_of_heads_do_not() -> None:
    words = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    words += " --attention-dropout 0"
    levels = "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"
    run_config = run_config_of(parse_args(argv=[*words.split(), *levels.split()]))
    assert overlap_of(run_config).overlapped_by == {"hcp_1": ("attention",)}


def test_reductions_overlap_only_with_the_rest_of_backward() -> None:
    def exposed(num_bytes: int, buckets: int, overlap: bool) -> tuple[float, float]:
        traffic = (Traffic("dp_cp", 2, "reduce-scatter", "grad reduce", buckets, num_bytes),)
        step = _step([_stage(traffic=traffic)], 3, overlap=Overlap(gradients=overlap))
        assert _adds_up(step) and step.seconds == 9.0 + step.stages[0].exposed["grad reduce"]
        return step.stages[0].exposed["grad reduce"], step.stages[0].hidden

    # Half of the bytes cross the link, at 10^9 per second. The last backward takes 2 seconds.
    assert exposed(2_000_000_000, 4, False) == (1.0, 0.0)
    # All but the last bucket overlap.
    assert exposed(2_000_000_000, 4, True) == (0.25, 0.75)
    # The first bucket is ready after half a second. From then on the link is busy.
    assert exposed(20_000_000_000, 4, True) == (8.5, 1.5)


def test_reductions_overlap_with_the_bubble_of_late_stages() -> None:
    traffic = (Traffic("dp_cp", 2, "reduce-scatter", "grad reduce", 1, 3_000_000_000),)
    step = _step([_stage(), _stage(traffic=traffic)], 4)
    # The last stage ends two seconds before the first.
    assert step.seconds == pytest.approx(3 * 5) and step.stages[1].hidden == pytest.approx(1.5)


def test_gathers_overlap_with_the_first_forward() -> None:
    def step(num_bytes: int, overlap: bool) -> StepTime:
        traffic = (Traffic("dp_cp", 2, "all-gather", "param gather", 4, num_bytes),)
        found = _step([_stage(traffic=traffic)], 3, overlap=Overlap(parameters=overlap))
        assert _adds_up(found) and found.seconds == 9.0 + found.stages[0].exposed["param gather"]
        return found

    assert step(1_000_000_000, False).stages[0].exposed["param gather"] == 0.5
    # The first of four buckets is exposed.
    assert step(1_000_000_000, True).stages[0].exposed["param gather"] == 0.125
    # The last quarter of the pass runs after the last bucket.
    assert step(8_000_000_000, True).stages[0].exposed["param gather"] == 4.0 + 0.25 - 1.0


def test_gathers_in_every_pass_overlap_with_each_pass() -> None:
    traffic = (
        Traffic("dp_cp", 2, "all-gather", "param gather", 6, 12_000_000_000),
        Traffic("dp_cp", 2, "reduce-scatter", "grad reduce", 3, 9_000_000_000),
    )
    step = _step([_stage(traffic=traffic)], 3, overlap=Overlap(in_every_pass=frozenset((GRADS, PARAMS))))
    # Gathers take 1 second in each of six passes, and reductions 1.5 in each of three backwards of 2 seconds.
    assert step.stages[0].exposed["forward"] == 0.0 and step.stages[0].exposed["backward"] == pytest.approx(1.5)
    assert step.seconds == pytest.approx(10.5) and step.stages[0].hidden == pytest.approx(9.0) and _adds_up(step)
    # Reductions overlap with each backward, and parameters are gathered once, after the update.
    step = _step([_stage(traffic=traffic)], 3, overlap=Overlap(gradients=True, in_every_pass=frozenset((GRADS,))))
    assert step.stages[0].exposed["backward"] == 0.0 and step.stages[0].exposed["param gather"] == 6.0
    assert step.seconds == pytest.approx(15.0) and step.stages[0].hidden == pytest.approx(4.5) and _adds_up(step)


def test_groups_across_nodes_use_the_network() -> None:
    gather = Traffic("dp_cp", 16, "all-gather", "param gather", 1, 16_000_000_000)
    assert message_seconds(gather, DEVICE, in_node=16) == 15.0
    # One ring per rank of a node. The network is slower than a node's links with one port, but not with 8.
    assert message_seconds(gather, DEVICE, in_node=8) == 15.0
    assert message_seconds(gather, DEVICE, in_node=1) == 30.0
    assert message_seconds(replace(gather, operation="all-reduce"), DEVICE, in_node=1) == 60.0
    # 7 of 16 parts stay in the node, at 10^9 bytes per second, and 8 leave it, at half of that.
    assert message_seconds(replace(gather, operation="all-to-all"), DEVICE, in_node=8) == 16.0
    assert message_seconds(replace(gather, operation="send"), DEVICE, in_node=1) == 32.0
    assert message_seconds(replace(gather, group_size=1), DEVICE, in_node=1) == 0.0
    late = replace(DEVICE, network_latency_us=1e6, node_latency_us=5e5)
    assert message_seconds(gather, late, in_node=1) == 34.0 and message_seconds(gather, late, in_node=16) == 17.0
    assert message_seconds(replace(gather, count=3), late, in_node=1) == 42.0


def test_latencies_are_those_of_a_tree() -> None:
    late, nothing = replace(DEVICE, node_latency_us=1e6), Traffic("dp_cp", 2, "all-gather", "param gather", 1, 0)
    sizes = {2: 1.0, 3: 2.0, 4: 2.0, 5: 3.0, 6: 3.0, 8: 3.0}
    found = {size: message_seconds(replace(nothing, group_size=size), late, in_node=size) for size in sizes}
    assert found == sizes


def test_nodes_hold_consecutive_ranks() -> None:
    assert ranks_in_node(range(8), 8) == 8
    assert ranks_in_node(range(0, 64, 8), 8) == 1
    assert ranks_in_node(range(0, 64, 4), 8) == 2
    assert ranks_in_node([6, 7, 8, 9, 10], 8) == 3


def test_spans_are_the_times_of_passes() -> None:
    (spans,) = _step([_stage()], 2).spans
    (order,) = stage_orders(Pipeline(1), 2)
    assert [tuple(spans[action]) for action in passes(order)] == [(0, 1), (1, 3), (3, 4), (4, 6)]


def _mixture(microbatches: int, message: float) -> StageLoad:
    """Returns a stage with 2 layers with experts. message: seconds of each exchange of rows.

    Per layer, attention and experts take half a second each in forward, and a second each in backward.
    """
    forward, backward = _seconds(1.0) + _seconds(1.0, "experts"), _seconds(2.0) + _seconds(2.0, "experts")
    # Half of the bytes cross the link, at 10^9 per second.
    traffic = tuple(
        Traffic("ep", 2, "all-to-all", phase, 4 * microbatches, round(4 * microbatches * message * 2e9))
        for phase in ("forward", "backward")
    )
    return StageLoad((ChunkWork(forward, backward, expert_layers=2),), traffic)


def test_without_messages_pairs_take_as_long_as_their_passes() -> None:
    for stages in (1, 4):
        loads = [_mixture(8, 0.0)] * stages
        step = _step(loads, 8, paired=True)
        assert step.seconds == _step(loads, 8).seconds == 6.0 * (8 + stages - 1) and _adds_up(step)


def test_exchanges_below_the_cover_are_exposed_only_outside_of_pairs() -> None:
    step = _step([_mixture(5, 0.4)], 5, paired=True)
    # The first forward and the last backward run alone.
    (stage,) = step.stages
    assert (stage.exposed["forward"], stage.exposed["backward"]) == pytest.approx((4 * 0.4, 4 * 0.4))
    assert stage.hidden == pytest.approx(4 * 8 * 0.4) and step.seconds == pytest.approx(5 * 6.0 + 8 * 0.4)
    assert _adds_up(step) and _step([_mixture(5, 0.4)], 5).seconds == pytest.approx(5 * (6.0 + 8 * 0.4))


def test_longer_exchanges_expose_the_rest() -> None:
    step = _step([_mixture(3, 1.7)], 3, paired=True)
    forward = PassWork(2, experts=1.0, rest=1.0, exchanged=4 * 1.7)
    backward = PassWork(2, experts=2.0, rest=2.0, exchanged=4 * 1.7)
    exposed = sum(waits(backward_parts(backward), forward_parts(forward)))
    assert 0 < exposed < 8 * 1.7
    assert step.seconds == pytest.approx(3 * 6.0 + 2 * exposed + 8 * 1.7) and _adds_up(step)
    # Other messages of a pair, which it waits for, cover exchanges as computation does.
    others = (Traffic("tp", 2, "all-gather", "backward", 3, 6_000_000_000),)
    load = _mixture(3, 1.7)
    both = _step([replace(load, traffic=load.traffic + others)], 3, paired=True)
    assert step.seconds < both.seconds < step.seconds + 3.0 and _adds_up(both)


def test_weight_gradients_of_experts_cover_the_gradients_of_dispatch_in_passes_that_run_alone() -> None:
    overlap = Overlap(holds_expert_grads=True)
    # Half of the products of experts in backward, half a second per layer.
    step = _step([_mixture(1, 0.7)], 1, overlap=overlap)
    assert step.stages[0].exposed["backward"] == pytest.approx(2 * (0.7 + 0.7 - 0.5))
    assert step.stages[0].exposed["forward"] == pytest.approx(4 * 0.7) and _adds_up(step)
    # With those of all modules, the products of attention cover the gradients of combine.
    step = _step([_mixture(1, 0.7)], 1, overlap=replace(overlap, holds_grads=True))
    assert step.stages[0].exposed["backward"] == pytest.approx(4 * (0.7 - 0.5))


def test_exchanges_of_heads_are_not_exchanges_of_rows() -> None:
    load = _mixture(3, 0.0)
    traffic = (Traffic("cp", 2, "all-to-all", "forward", 3, 6_000_000_000),)
    stages = [replace(load, traffic=traffic)]
    step = _step(stages, 3, paired=True, overlap=Overlap(head_groups=frozenset(("cp",))))
    assert step.stages[0].exposed["forward"] == pytest.approx(3.0)
    assert _step(stages, 3, paired=True).stages[0].exposed["forward"] < 3.0


def test_flags_select_what_overlaps_with_exchanges_of_rows() -> None:
    words = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    words += " --num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
    words += " --overlap-moe-expert-parallel-comm"
    heads = "--context-parallel-size 2 --cp-comm-type a2a --attention-dropout 0"
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    full += " --moe-expert-rank-capacity-factor 2 --moe-grouped-gemm"
    found = {
        flags: overlap_of(run_config_of(parse_args(argv=[*words.split(), *flags.split()])))
        for flags in ("--delay-wgrad-compute", "--overlap-dispatch-backward-with-experts-wgrad", heads, full)
    }
    held = [(one.holds_expert_grads, one.holds_grads, one.counts_rows) for one in found.values()]
    assert held == [(True, True, True), (True, True, True), (True, True, True), (False, False, False)]
    assert found[heads].head_groups == {"cp"} and not found[full].head_groups
    assert found[heads].recompute_in_turns and not found[full].recompute_in_turns
