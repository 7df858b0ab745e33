"""What --dry-run does: plans the run, prints the plan, and writes it where --tensorboard-dir says."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from torch import nn

from megatron.core.optimizer.param_groups import ConfigOverrides
from megatron.training.command_line.errors import CommandLineError
from megatron.training.device_table import planned_device
from megatron.training.dry_run.document import plan_document, time_lines, write_plan
from megatron.training.dry_run.plan import ForwardStep, place_of, plan_run
from megatron.training.dry_run.run_time import run_time
from megatron.training.dry_run.table import plan_lines


def print_plan(
    args: argparse.Namespace,
    model_provider: Callable[..., nn.Module],
    *,
    forward_step_func: ForwardStep,
    config_overrides: ConfigOverrides | None = None,
) -> None:
    """As plan_run, of the pipeline of RANK where torchrun has not set that; under torchrun the first rank alone plans.

    Raises ValueError also for a rank and a device that are not there, and for a folder that cannot be written to.
    """
    if "WORLD_SIZE" in os.environ and args.rank != 0:
        return
    number, device = place_of(args, args.rank), planned_device()
    plan = plan_run(
        args,
        model_provider,
        forward_step_func=forward_step_func,
        config_overrides=config_overrides,
        rank_in_stage=number,
    )
    step = run_time(plan, args, device=device)
    lines = plan_lines(plan, args) + ([] if step is None else time_lines(step))
    if args.tensorboard_dir is not None:
        folder = Path(args.tensorboard_dir)
        try:
            files = write_plan(plan_document(plan, args, device=device, step=step), folder)
        except OSError as error:
            raise CommandLineError(
                f"--tensorboard-dir is {folder}: the plan cannot be written there ({error.strerror}); "
                "must be a folder that is or can be made"
            ) from None
        lines.append(f"written: {' and '.join(map(str, files))}")
    print("\n".join(lines))
