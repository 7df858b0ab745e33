"""Step times computed from single layers, compared with dry runs of the same layouts."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

import pretrain_gpt
from megatron.planner.layer_costs import layer_kinds
from megatron.planner.layout_search import LayoutCosts
from megatron.planner.layout_space import Experts, Request, Sharding, layer_flops, read_request
from megatron.planner.plan import plan_run
from megatron.planner.report import pair_line
from megatron.planner.step_time import run_time
from megatron.training.arguments import read_run_config
from megatron.training.command_line.errors import CommandLineError
from megatron.training.compute.devices import Device, known_devices
from megatron.training.compute.flops import num_floating_point_operations
from megatron.training.setup import setup_tokenizer

RANKS = 16
# Few layers of full width. If kernels were as short as a launch, the number of launches per bucket would matter.
FLAGS = "--seq-length 2048 --global-batch-size 64"
DENSE, MIXTURE = ("llama3-8b", "--num-layers", "4"), ("mixtral-8x7b", "--num-layers", "4")
LATENT = ("deepseek-v2-lite", "--num-layers", "4", "--moe-layer-freq", "[0]+[1]*3")
# A short model has fewer buckets, and so fewer launches, which matters most with ZeRO-2.
TOLERANCE = 0.005
EXPERTS = "--expert-model-parallel-size"
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
PIPE = "--pipeline-model-parallel-size"
ZERO_1 = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
ZERO_2 = "--optimizer distributed_fused_adam --overlap-grad-reduce --overlap-param-gather"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
IN_A_V_WITH_PAIRS = "--pipeline-schedule dualpipev --overlap-moe-expert-parallel-comm"
PAGED = "--moe-expert-rank-capacity-factor 2 --moe-paged-stash"
LAYOUTS = [
    (DENSE, f"--micro-batch-size 2 {ZERO_1}"),
    (DENSE, f"{TENSOR} --micro-batch-size 1 {ZERO_2}"),
    (DENSE, f"{TENSOR} {PIPE} 2 --num-virtual-stages-per-pipeline-rank 2 --micro-batch-size 1 {FULL} {ZERO_1}"),
    (DENSE, f"--context-parallel-size 2 {PIPE} 4 --micro-batch-size 1"),
    (MIXTURE, f"{TENSOR} --expert-tensor-parallel-size 2 {EXPERTS} 4 {PIPE} 2 --micro-batch-size 1 {ZERO_1}"),
    (MIXTURE, f"{EXPERTS} 8 --micro-batch-size 1 {PIPE} 2 {PAGED} {ZERO_1}"),
    (MIXTURE, f"{EXPERTS} 8 --micro-batch-size 1 {PIPE} 2 --overlap-moe-expert-parallel-comm {ZERO_1}"),
    (MIXTURE, f"{EXPERTS} 4 --micro-batch-size 1 {PIPE} 4 --pipeline-schedule zb-h1 {ZERO_1}"),
    (DENSE, f"--micro-batch-size 1 {PIPE} 2 --pipeline-schedule zbv {ZERO_1}"),
    (MIXTURE, f"{EXPERTS} 8 --micro-batch-size 1 {PIPE} 2 {IN_A_V_WITH_PAIRS} {ZERO_1}"),
    (LATENT, f"{EXPERTS} 4 --micro-batch-size 1 {PIPE} 2 --pipeline-model-parallel-layout Ettt|tL {ZERO_1}"),
]


def _device() -> Device:
    return next(device for device in known_devices() if device.name == "H100")


def _costs(request: Request, device: Device) -> LayoutCosts:
    """Returns costs with empty caches."""
    return LayoutCosts(
        request.words,
        request.run_config,
        space=request.space,
        device=device,
        model_provider=pretrain_gpt.model_provider,
        forward_step=pretrain_gpt.forward_step,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("model", "words"), LAYOUTS)
def test_measured_steps_equal_dry_runs(model: tuple[str, ...], words: str) -> None:
    device = _device()
    given = ["--model", *model, *FLAGS.split(), *words.split()]
    request = read_request(given, world_size=RANKS, devices_per_node=device.devices_per_node)
    costs = _costs(request, device)
    # In the first layout, all sizes that the flags do not set are 1.
    layout = next(iter(request.space.layouts()))
    advice = costs.advice(layout)
    assert advice is not None, costs.last_refusal
    run_config = read_run_config([*advice.words, "--dry-run", "--world-size", str(RANKS)])
    plan = plan_run(run_config, pretrain_gpt.model_provider, forward_step_func=pretrain_gpt.forward_step)
    step = run_time(plan, run_config, device=device)
    assert step is not None
    assert advice.time.seconds == pytest.approx(step.seconds, rel=TOLERANCE)
    for name, seconds in step.split().items():
        assert advice.time.split()[name] == pytest.approx(seconds, abs=TOLERANCE * step.seconds), name
    # The estimate that ranks all layouts.
    about = costs.cost(layout, limit=1 << 40)
    assert about is not None and about.seconds == pytest.approx(step.seconds, rel=0.1)


def test_a_zero_2_layout_is_estimated_as_it_is_measured() -> None:
    device = _device()
    given = ["--model", *DENSE, *FLAGS.split(), *TENSOR.split(), "--micro-batch-size", "1"]
    request = read_request(given, world_size=RANKS, devices_per_node=device.devices_per_node)
    costs = _costs(request, device)
    layout = next(one for one in request.space.layouts() if one.sharding is Sharding.GRADIENTS)
    about, planned = costs.cost(layout, limit=1 << 40), costs.advice(layout)
    assert about is not None and planned is not None
    assert about.seconds == pytest.approx(planned.time.seconds, rel=0.1)


def test_a_layout_with_pairs_tells_what_they_gain() -> None:
    device = _device()
    words = f"--num-experts 16 {EXPERTS} 16 {PIPE} 1 --micro-batch-size 1 --overlap-moe-expert-parallel-comm {ZERO_1}"
    given = ["--model", *MIXTURE, *FLAGS.split(), *words.split()]
    request = read_request(given, world_size=RANKS, devices_per_node=device.devices_per_node)
    costs = _costs(request, device)
    layout = next(iter(request.space.layouts()))
    about, advice = costs.cost(layout, limit=1 << 40), costs.advice(layout)
    assert advice is not None, costs.last_refusal
    assert advice.alone is not None and advice.time.seconds < 0.95 * advice.alone.seconds
    assert about is not None and about.seconds == pytest.approx(advice.time.seconds, rel=0.1)
    line = pair_line(advice)
    assert line is not None and re.fullmatch(
        r"passes in turns: (\S+ m?s a step, \S+% exposed(; without pairs: )?){2}", line
    )


def test_a_schedule_is_searched_with_the_chunks_that_it_can_have() -> None:
    words = ["--model", *DENSE, *FLAGS.split(), *ZERO_1.split(), PIPE, "2"]
    for kind, chunks, is_flagged in (("1f1b", {1, 2}, True), ("zb-h1", {1}, False), ("zbv", {2}, False)):
        space = read_request([*words, "--pipeline-schedule", kind], world_size=RANKS, devices_per_node=8).space
        # Equal parts need no layout flag.
        space = replace(space, end_cost=0.0)
        layouts = [*space.layouts()]
        assert {one.chunks for one in layouts} == chunks
        assert any("--num-virtual-stages-per-pipeline-rank" in space.flags(one) for one in layouts) == is_flagged
    # Two chunks in each of four stages need more than four layers.
    assert not [*replace(space, fixed=space.fixed | {"stages": 4}).layouts()]


def test_levels_of_context_parallelism_are_refused_by_name() -> None:
    words = "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"
    with pytest.raises(CommandLineError, match=r"--hierarchical-context-parallel-sizes is \[2, 2\]: .* use --dry-run"):
        read_request(["--model", *DENSE, *FLAGS.split(), *words.split()], world_size=RANKS, devices_per_node=8)


@pytest.mark.parametrize(
    "words", [DENSE, MIXTURE, (*DENSE, *f"{PIPE} 2 --decoder-first-pipeline-num-layers 3 --lr 1e-3".split())]
)
def test_assumed_values_equal_those_of_a_complete_command_line(words: tuple[str, ...]) -> None:
    request = read_request(["--model", *words], world_size=RANKS, devices_per_node=8)
    complete = read_request(request.words, world_size=RANKS, devices_per_node=8)
    assert request.assumed and request.words == ("--model", *words, *request.assumed)
    assert complete == replace(request, assumed=())
    assert complete.run_config.values == request.run_config.values


def test_only_the_command_line_fixes_a_size(tmp_path: Path) -> None:
    file = tmp_path / "sizes.yaml"
    file.write_text("tensor_model_parallel_size: 2\nmicro_batch_size: 2\nmoe_token_dispatcher_type: allgather\n")
    words = ["--model", *MIXTURE, "--config", str(file), "--micro-batch-size", "4"]
    request = read_request(words, world_size=RANKS, devices_per_node=8)
    assert request.space.fixed == {"micro_batch": 4}
    assert request.run_config.transformer.moe_token_dispatcher_type == "alltoall"


@pytest.mark.parametrize("model", ["llama3-8b", "mixtral-8x7b", "deepseek-v3", "gpt-oss-20b"])
def test_flops_of_layers_and_end_add_up_to_the_model(model: str) -> None:
    words = f"--model {model} --bf16 --mock-data --tokenizer-type NullTokenizer --seq-length 512 --lr 1e-3"
    run_config = read_run_config([*words.split(), "--micro-batch-size", "1", "--train-iters", "2"])
    setup_tokenizer(run_config)
    kinds = layer_kinds(run_config.transformer)
    flops, end = layer_flops(run_config, kinds)
    forward = sum(flops[kind] for kind in kinds) + end
    assert min(*flops.values(), end) > 0 and 3 * forward == pytest.approx(num_floating_point_operations(run_config, 1))


def test_scaled_costs_equal_own_costs() -> None:
    device = _device()
    # With full recompute, saved tensors do not show which recomputed kernels belong to experts.
    words = ["--model", *MIXTURE, *FLAGS.split(), *f"{ZERO_1} {FULL}".split()]
    request = read_request(words, world_size=RANKS, devices_per_node=device.devices_per_node)

    layouts = {
        (one.expert, one.micro_batch): one
        for one in request.space.layouts()
        if (one.tensor, one.stages, one.context) == (1, 1, 1) and one.experts is Experts.DYNAMIC
    }
    scaled = _costs(request, device)
    assert scaled.cost(layouts[2, 1], limit=1 << 40) is not None
    for place in ((8, 1), (4, 2)):
        about, own = (one.cost(layouts[place], limit=1 << 40) for one in (scaled, _costs(request, device)))
        assert about is not None and own is not None
        # The tolerance that the search allows.
        assert about.seconds == pytest.approx(own.seconds, rel=0.02)


@pytest.mark.slow
def test_estimates_are_independent_of_the_layout_that_they_are_scaled_from() -> None:
    # In the first layout, tensor parallel ranks share experts, and its messages have their name. Others cross nodes.
    device = replace(_device(), devices_per_node=2)
    words = f"{TENSOR} --expert-tensor-parallel-size 1 {PIPE} 2 {FULL} {ZERO_1} --moe-expert-rank-capacity-factor 2"
    given = ["--model", *MIXTURE, *FLAGS.split(), *words.split()]
    request = read_request(given, world_size=RANKS, devices_per_node=2)
    costs = _costs(request, device)
    found = {}
    for layout in request.space.layouts():
        if layout.chunks == 1 and layout.expert > 1 and layout.micro_batch < 4:
            cost = costs.cost(layout, limit=1 << 40)
            assert cost is not None, costs.last_refusal
            found[layout.expert, layout.micro_batch] = layout, cost.seconds
    assert {expert for expert, _ in found} == {2, 4, 8} and len(found) == 6
    for layout, seconds in found.values():
        advice = costs.advice(layout)
        assert advice is not None and seconds == pytest.approx(advice.time.seconds, rel=0.1), layout
