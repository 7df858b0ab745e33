"""StageTrace of stages that are built alike are step once for all of them."""

from typing import Any

import pretrain_gpt
from megatron.planner.plan import plan_run
from megatron.training.arguments import parse_args, validate_args
from tests.functional_tests.case import Flags, command_line, read_bases


def _rehearsed_microbatches(*, stages: int, **flags: str) -> int:
    """How many times a forward step is called to plan a pipeline with two layers in a stage."""
    calls = 0

    def forward_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return pretrain_gpt.forward_step(*args, **kwargs)

    layout: Flags = {"pipeline-model-parallel-size": stages, "num-layers": 2 * stages, "global-batch-size": 8}
    argv = command_line({**read_bases()["moe"], **layout, **{name.replace("_", "-"): flags[name] for name in flags}})
    args = validate_args(parse_args(argv=[*argv, "--dry-run", "--world-size", str(stages)]))
    plan_run(args, pretrain_gpt.model_provider, forward_step_func=forward_step)
    return calls


def test_more_stages_of_the_same_layers_are_rehearsed_no_more_often() -> None:
    assert _rehearsed_microbatches(stages=5) == _rehearsed_microbatches(stages=3)


def test_a_stage_with_other_layers_is_rehearsed_by_itself() -> None:
    alike = _rehearsed_microbatches(stages=4)
    assert _rehearsed_microbatches(stages=4, moe_layer_freq="([1]*2+[0]*2+[1]*4)") * 3 == alike * 4
