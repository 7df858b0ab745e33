"""The --dry-run command: plans the run, prints the plan, and writes it to --tensorboard-dir."""

import argparse
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from torch import nn

from megatron.core.optimizer.param_groups import ConfigOverrides
from megatron.planner.document import plan_document, time_lines, write_plan
from megatron.planner.fit import Planner, fit_of, with_change
from megatron.planner.plan import ForwardStep, place_of, plan_run
from megatron.planner.run_time import run_time
from megatron.planner.table import plan_lines
from megatron.training.command_line.errors import CommandLineError
from megatron.training.compute.devices import planned_device


def print_plan(
    args: argparse.Namespace,
    model_provider: Callable[..., nn.Module],
    *,
    reread: Callable[[Sequence[str]], argparse.Namespace],
    forward_step_func: ForwardStep,
    config_overrides: ConfigOverrides | None = None,
) -> None:
    """Prints the plan of RANK's pipeline and whether it fits; under torchrun only rank 0 does.

    reread: parses the same command line with further words. Raises ValueError for an unknown rank or device, and for a
    folder that cannot be written.
    """
    if "WORLD_SIZE" in os.environ and args.rank != 0:
        return
    number, device = place_of(args, args.rank), planned_device()
    planner = Planner(
        reread=reread,
        plan=partial(
            plan_run,
            model_provider=model_provider,
            forward_step_func=forward_step_func,
            config_overrides=config_overrides,
            rank_in_stage=number,
        ),
        model_provider=model_provider,
        forward_step=forward_step_func,
    )
    plan = planner.plan(args)
    step = run_time(plan, args, device=device)
    fit = fit_of(plan, device)
    if not fit.fits:
        fit = with_change(fit, plan, args, planner)
    lines = [*plan_lines(plan, args), *([] if step is None else time_lines(step)), fit.line]
    if args.tensorboard_dir is not None:
        folder = Path(args.tensorboard_dir)
        try:
            files = write_plan(plan_document(plan, args, device=device, step=step, fit=fit), folder)
        except OSError as error:
            raise CommandLineError(
                f"--tensorboard-dir is {folder}: the plan cannot be written there ({error.strerror}); "
                "must be a folder that is or can be made"
            ) from None
        lines.append(f"written: {' and '.join(map(str, files))}")
    print("\n".join(lines))
