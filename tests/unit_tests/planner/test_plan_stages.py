"""Stages with equal structure share one traced step."""

from typing import Any

import pretrain_gpt
from megatron.planner.plan import plan_run
from megatron.training.arguments import read_run_config
from tests.functional_tests.case import Flags, command_line, read_bases


def _num_forward_steps(*, stages: int, **flags: str) -> int:
    """Returns the number of forward steps that a plan of a pipeline with two layers per stage calls."""
    calls = 0

    def forward_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return pretrain_gpt.forward_step(*args, **kwargs)

    layout: Flags = {"pipeline-model-parallel-size": stages, "num-layers": 2 * stages, "global-batch-size": 8}
    argv = command_line({**read_bases()["moe"], **layout, **{name.replace("_", "-"): flags[name] for name in flags}})
    run_config = read_run_config([*argv, "--dry-run", "--world-size", str(stages)])
    plan_run(run_config, pretrain_gpt.model_provider, forward_step_func=forward_step)
    return calls


def test_stages_of_equal_layers_are_traced_once() -> None:
    assert _num_forward_steps(stages=5) == _num_forward_steps(stages=3)


def test_a_stage_of_other_layers_is_traced_separately() -> None:
    equal = _num_forward_steps(stages=4)
    assert _num_forward_steps(stages=4, moe_layer_freq="([1]*2+[0]*2+[1]*4)") * 3 == equal * 4
