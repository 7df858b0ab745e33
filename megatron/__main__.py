"""`python -m megatron COMMAND ...` runs a program of the package, under torchrun too: `torchrun -m megatron train ...`.

The installed scripts `megatron-COMMAND` run the same programs (pyproject.toml).
"""

import difflib
import sys
from importlib import import_module

from megatron.version_flag import installed_versions

# Command to module and purpose. Modules are imported when they run, because most of them import torch.
COMMANDS = {
    "train": ("megatron.tools.train", "pretrain a GPT; on several processes: torchrun -m megatron train ..."),
    "quickstart": ("megatron.tools.quickstart", "train a small mixture of experts on real text, on this machine"),
    "preprocess": ("megatron.tools.preprocess_data", "turn text into tokens for --data-path"),
    "train-tokenizer": ("megatron.tools.train_tokenizer", "train a byte-level BPE tokenizer"),
    "plan": ("megatron.tools.plan_layout", "find a layout of the ranks by memory and estimated time"),
    "plan-stash": ("megatron.tools.plan_stash", "choose the sizes of the paged stash before a run"),
    "check-capture": ("megatron.tools.check_capture", "check without a GPU whether a step can be a CUDA graph"),
    "show-schedule": ("megatron.tools.show_schedule", "print or draw a pipeline schedule"),
    "convert": ("megatron.tools.checkpoint", "inspect, verify, compare, prune, convert and merge checkpoints"),
    "generate": ("megatron.tools.generate", "continue a prompt with a trained model"),
    "report": ("megatron.tools.report", "write or serve an HTML page about runs"),
    "compare-runs": ("megatron.tools.compare_runs", "find the step where the losses of two runs diverge"),
    "translate-flags": ("megatron.tools.translate_flags", "translate a launch script of Megatron-LM"),
}


def main(argv: list[str] | None = None) -> int | None:
    """Runs the command in `argv` and returns its exit status: None means 0; an unknown command returns 2."""
    name, *words = (sys.argv[1:] if argv is None else argv) or [""]
    if name in ("--version", "-V"):
        print(installed_versions())
        return None
    if name in ("--help", "-h"):
        print(_usage())
        return None
    if name not in COMMANDS:
        print(f"{_usage()}\n\nerror: {_problem_of(name)}", file=sys.stderr)
        return 2
    sys.argv = [f"megatron-{name}", *words]  # argparse shows it in messages
    status: int | None = import_module(COMMANDS[name][0]).main()
    return status


def _problem_of(name: str) -> str:
    nearest = difflib.get_close_matches(name, COMMANDS, n=1)
    if not name:
        return "COMMAND is missing"
    return f"there is no command {name}{f'; did you mean {nearest[0]}?' if nearest else ''}"


def _usage() -> str:
    lines = [f"  {name:16} {purpose}" for name, (_, purpose) in COMMANDS.items()]
    return "\n".join(["usage: python -m megatron COMMAND ... (each has --help)\n", *lines])


if __name__ == "__main__":
    sys.exit(main())
