"""Splits of layers into pipeline parts, and the extrapolation of long steps."""

import pytest

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.schedule import Action, ActionKind, Pair, Pipeline, Schedule, stage_orders
from megatron.core.pipeline_parallel.timeline import timeline
from megatron.core.transformer.pipeline_split import layers_per_part
from megatron.planner.layout_space import even_parts, layout_text
from megatron.planner.step_time import StageTime, StepTime, long_step


@pytest.mark.parametrize(
    ("costs", "end_cost", "parts", "counts"),
    [
        ([1.0] * 8, 0.0, 4, (2, 2, 2, 2)),
        ([1.0] * 8, 2.0, 2, (5, 3)),
        ([1.0] * 61, 4.0, 32, (1, *[2] * 30, 0)),
        ([3.0, 1.0, 1.0, 1.0], 0.0, 2, (1, 3)),
        ([1.0] * 7, 0.0, 4, (1, 2, 2, 2)),
        ([1.0], 0.0, 1, (1,)),
        ([1.0, 1.0], 0.0, 4, None),
    ],
)
def test_a_cut_has_the_least_maximal_cost(
    costs: list[float], end_cost: float, parts: int, counts: tuple[int, ...] | None
) -> None:
    assert even_parts(tuple(costs), end_cost=end_cost, parts=parts) == counts


@pytest.mark.parametrize("counts", [(2, 2), (1, 2, 2, 0), (4, 4, 4, 1), (1, 1, 2, 2)])
def test_the_layout_flag_parses_a_formatted_cut(counts: tuple[int, ...]) -> None:
    text = layout_text(counts, further_layers=1)
    config = ModelParallelConfig(pipeline_model_parallel_size=len(counts), pipeline_model_parallel_layout=text)
    assert layers_per_part(config, num_layers=sum(counts)) == list(counts)


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("num_microbatches", [8, 35, 64])
def test_an_extrapolated_step_equals_its_full_timeline(chunks: int, num_microbatches: int, paired: bool) -> None:
    pipeline = Pipeline(4, chunks)
    forwards = (1.0, 1.25, 0.5, 1.5)

    def seconds(stage: int, step: Action | Pair) -> float:
        return sum(forwards[stage] * (1.0 if one.kind is ActionKind.FORWARD else 2.0) for one in step.passes)

    def estimate(number: int) -> StepTime:
        spans = timeline(stage_orders(pipeline, number, Schedule(paired=paired)), pipeline, seconds=seconds)
        end = max(span.end for stage in spans for span in stage.values())
        busy = [chunks * number * forward for forward in forwards]
        stages = tuple(StageTime(one, 0.0, 2 * one, {}, 0.0, 0.0, end - 3 * one, {}) for one in busy)
        return StepTime("any", end, number / end, 2 * number / end, None, stages, spans)

    long, whole = long_step(estimate, num_microbatches, group_size=4), estimate(num_microbatches)
    assert long.seconds == pytest.approx(whole.seconds)
    assert long.tflops == pytest.approx(whole.tflops)
    assert [one.bubble for one in long.stages] == pytest.approx([one.bubble for one in whole.stages])
