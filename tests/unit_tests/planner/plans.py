"""Builds plans of the functional tests' base configurations. Contains no tests."""

import pretrain_gpt
from megatron.planner.plan import Plan, plan_run
from megatron.planner.report import plan_lines
from megatron.training.arguments import read_run_config
from tests.functional_tests.case import Flags, command_line, read_bases


def planned(base: str, flags: Flags, *, ranks: int = 1) -> tuple[Plan, list[str]]:
    """Returns the plan of a base configuration with these flags, and its printed lines."""
    argv = command_line({**read_bases()[base], **flags})
    run_config = read_run_config([*argv, "--dry-run", "--world-size", str(ranks)])
    plan = plan_run(run_config, pretrain_gpt.model_provider, forward_step_func=pretrain_gpt.forward_step)
    return plan, plan_lines(plan, run_config)
