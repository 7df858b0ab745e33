"""A launcher's restart goes on with the run that it restarts; which settings of the first start that overrules.

What is in checkpoints, and how one is found: checkpointing.py and checkpoint_folder.py.
"""

import argparse
import os
from pathlib import Path

from megatron.training.checkpointing.folder import complete_iterations, find_checkpoint
from megatron.training.checkpointing.run_values import load_run_values

# Set by torchrun on its ranks, and by examples/supervise.py, which starts torchrun itself anew.
RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SUPERVISOR_RESTART_COUNT")
# What chose where the first start began, or left parts of that behind.
_OF_FIRST_START = {"finetune": False, "ckpt_step": None, "no_load_optim": False, "no_load_rng": False}


def continue_after_restart(args: argparse.Namespace) -> str | None:
    """In a restart, points --load of `args` at what the run has saved since its first start; returns a line to print.

    Nothing changes in a first start, without --save, or before the run's first checkpoint: then the restart
    begins where the first start began. Call between parse_args and validate_args, on every rank by itself.
    """
    count = sum(int(os.environ.get(name, "0")) for name in RESTART_COUNTS)
    if count == 0 or args.save is None or args.skip_train or not complete_iterations(Path(args.save)):
        return None
    args.load = args.save
    vars(args).update(_OF_FIRST_START)
    return f"  restart {count}: going on from --save {args.save}"


def keep_global_batch_size(args: argparse.Namespace) -> str | None:
    """Sets an unset --global-batch-size to that of the run in --load; returns a line to print where it does.

    Else it would follow the number of ranks, and a run that goes on with fewer would train on other batches. As
    continue_after_restart; a checkpoint that cannot be read is for the load to complain about.
    """
    schedules = (args.global_batch_size, args.step_batch_size_schedule, args.rampup_batch_size)
    if args.load is None or args.finetune or any(value is not None for value in schedules):
        return None
    try:
        found = find_checkpoint(args.load, step=args.ckpt_step)
        stored = None if found is None or found.is_release else load_run_values(found.path)["args"]
    except (ValueError, OSError):
        return None
    if stored is None or stored.get("global_batch_size") is None:
        return None
    args.global_batch_size = stored["global_batch_size"]
    return f"  --global-batch-size {args.global_batch_size}: as in the checkpoint of --load"
