"""CommandLineError, and the rank that prints before process groups exist.

parser.py, yaml_config.py, validation.py and conflicts.py find the mistakes.
"""

import os


class CommandLineError(ValueError):
    """Invalid flags or configuration file. The message has a line for each problem."""


def is_first_rank() -> bool:
    """Whether this process prints for the run, judged by the launcher's environment; True for a single process."""
    return os.environ.get("RANK", "0") == "0" or "WORLD_SIZE" not in os.environ
