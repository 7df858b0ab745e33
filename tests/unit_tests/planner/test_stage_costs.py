"""Memory computed from single layers, compared with plans of the same runs that build whole stages."""

import random
from dataclasses import astuple

import pytest

import pretrain_gpt
from megatron.core.pipeline_parallel.schedule import Pair, Schedule, ScheduleKind, pipeline_of, stage_orders
from megatron.planner.activations import ChunkSaved, fullest, peak_bytes
from megatron.planner.layer_costs import measure_memory
from megatron.planner.layout_space import Layout, Recompute, Space
from megatron.planner.plan import plan_run
from megatron.planner.stage_costs import fullest_moments, quick_stages
from megatron.planner.work import END
from megatron.training.arguments import parse_args, read_run_config, validate_args
from megatron.training.command_line.errors import CommandLineError
from tests.counts import long_count, soak_only

RANKS, LAYERS, LAYOUTS = 16, 4, long_count(2, soak=5)
ALWAYS = (
    "--model-scale tiny --bf16 --mock-data --tokenizer-type NullTokenizer --seq-length 64 --global-batch-size 32 "
    f"--lr 1e-3 --train-iters 2 --dry-run --world-size {RANKS}"
)
IN_A_V = "--pipeline-schedule dualpipev --num-layers 8 --global-batch-size 64"
DISPATCH = ("--moe-token-dispatcher-type", "alltoall")
MODELS = {"llama3.2-1b": None, "mixtral-8x7b": 8, "deepseek-v3": 16, "gpt-oss-20b": 8}


def _layouts(model: str) -> list[tuple[Layout, list[str]]]:
    """Returns random layouts of a tiny model that the run accepts, with their flags."""
    latent, experts = model.startswith("deepseek"), MODELS[model]
    parts = {
        Recompute.CHEAP: ("layernorm", *(["mla_up_proj"] if latent else [])),
        Recompute.FEED_FORWARD: (*(["mlp"] if latent or not experts else []), *(["moe"] if experts else [])),
    }
    space = Space(
        RANKS,
        num_layers=LAYERS,
        num_heads=4,
        num_experts=experts,
        seq_length=64,
        global_batch=32,
        devices_per_node=4,
        layer_costs=(1.0,) * LAYERS,
        end_cost=0.7,
        recompute_modules=parts,
        further_layers=1 if latent else 0,
    )
    found = []
    every = list(space.layouts())
    random.Random(model).shuffle(every)
    for layout in every:
        words = ["--model", model, *ALWAYS.split(), *(DISPATCH if experts else ()), *space.flags(layout)]
        try:
            validate_args(parse_args(argv=words))
        except CommandLineError:
            continue
        found.append((layout, words))
        if len(found) == LAYOUTS:
            return found
    raise AssertionError(f"{model} has only {len(found)} layouts")


# Layers of gpt-oss-20b differ from those of the other models only in size.
@pytest.mark.slow
@pytest.mark.parametrize("model", [soak_only(model) if model == "gpt-oss-20b" else model for model in MODELS])
def test_memory_of_layers_adds_up_to_stages(model: str) -> None:
    for layout, words in _layouts(model):
        run_config = read_run_config(words)
        provider, step = pretrain_gpt.model_provider, pretrain_gpt.forward_step
        planned = plan_run(run_config, provider, forward_step_func=step).stages
        quick = quick_stages(run_config, measure_memory(run_config, provider, forward_step=step))
        for whole, added in zip(planned, quick, strict=True):
            assert added.states == whole.memory.states, (layout, whole.stage)
            assert added.pages == whole.memory.pages, layout
            kept = {kind: size for kind, size in whole.memory.activations.by_kind.items() if size}
            assert {kind: size for kind, size in added.activations.by_kind.items() if size} == kept, layout


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--moe-paged-stash --moe-paged-stash-compute pages",
        "--moe-paged-stash --moe-paged-stash-dtype mxfp8",
        "--overlap-moe-expert-parallel-comm",
        "--overlap-moe-expert-parallel-comm --moe-paged-stash",
        f"--overlap-moe-expert-parallel-comm --moe-paged-stash {IN_A_V}",
    ],
)
@pytest.mark.parametrize("ends", [(1, 1), (3, 0)])
def test_memory_of_layers_in_two_precisions_adds_up_to_stages(flags: str, ends: tuple[int, int]) -> None:
    layout = "--num-layers 6 --pipeline-model-parallel-size 2 --expert-model-parallel-size 8 --micro-batch-size 1"
    precision = "--moe-expert-rank-capacity-factor 2 --fp8-format e4m3 --fp8-recipe mxfp8 --first-last-layers-bf16"
    precision += f" --num-layers-at-start-in-bf16 {ends[0]} --num-layers-at-end-in-bf16 {ends[1]}"
    words = ["--model", "mixtral-8x7b", *ALWAYS.split(), *DISPATCH, *f"{layout} {precision} {flags}".split()]
    run_config = read_run_config(words)
    provider, step = pretrain_gpt.model_provider, pretrain_gpt.forward_step
    planned = plan_run(run_config, provider, forward_step_func=step).stages
    quick = quick_stages(run_config, measure_memory(run_config, provider, forward_step=step))
    for whole, added in zip(planned, quick, strict=True):
        assert added.states == whole.memory.states and added.pages == whole.memory.pages
        # Only a plan of whole stages knows what microbatches hold until their weight pass.
        if IN_A_V not in flags:
            assert +added.activations.by_kind == +whole.memory.activations.by_kind


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", ["--use-distributed-optimizer", "--use-distributed-optimizer --ddp-num-buckets 3", ""]
)
def test_offloaded_states_add_up_to_stages(flags: str) -> None:
    offload = "--micro-batch-size 1 --optimizer-cpu-offload --optimizer-offload-fraction 0.4"
    words = ["--model", "llama3.2-1b", *ALWAYS.split(), *offload.split(), *flags.split()]
    run_config = read_run_config(words)
    provider, step = pretrain_gpt.model_provider, pretrain_gpt.forward_step
    (whole,) = plan_run(run_config, provider, forward_step_func=step).stages
    (added,) = quick_stages(run_config, measure_memory(run_config, provider, forward_step=step))
    states = astuple(added.states)
    assert states == astuple(whole.memory.states) and min(states) > 0
    assert (
        added.total
        == whole.memory.total
        == sum(states) - added.states.host_states + sum(whole.memory.activations.by_kind.values())
    )


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [
        *((Schedule(paired=paired), chunks) for paired in (False, True) for chunks in (1, 3)),
        (Schedule(ScheduleKind.ZBV), 2),
        (Schedule(ScheduleKind.DUALPIPEV, paired=True), 2),
    ],
)
@pytest.mark.parametrize("num_microbatches", [3, 8, 41])
def test_a_short_step_has_the_peak_of_the_long_one(schedule: Schedule, chunks: int, num_microbatches: int) -> None:
    pipeline = pipeline_of(schedule, 4, chunks)
    sizes = [{"a": 7, "b": 1}, {"a": 2, "b": 5}, {"a": 3, "b": 0}][:chunks]
    saved = [
        ChunkSaved({"layer 0": own, "layer 1": own, END: {"a": 1}}, {"layer 0": 1, "layer 1": 1}, held={"b": 6})
        for own in sizes
    ]
    for stage, order in enumerate(stage_orders(pipeline, num_microbatches, schedule)):
        moments = fullest_moments(pipeline, stage, num_microbatches=num_microbatches, schedule=schedule)
        assert fullest(moments, saved) == peak_bytes(order, saved)
        assert any(one.pair is not None for one in moments) == any(isinstance(step, Pair) for step in order)


def test_unsupported_optimizers_are_refused() -> None:
    words = ["--model", "llama3.2-1b", *ALWAYS.split(), "--micro-batch-size", "1", "--optimizer", "muon"]
    run_config = read_run_config(words)
    costs = measure_memory(run_config, pretrain_gpt.model_provider, forward_step=pretrain_gpt.forward_step)
    with pytest.raises(CommandLineError, match="--optimizer is muon: .* must be one of adam, sgd"):
        quick_stages(run_config, costs)
