"""CommandLineError, and the rank that prints before process groups exist.

parser.py, yaml_config.py, validation.py and conflicts.py detect the mistakes.
"""

import os


class CommandLineError(ValueError):
    """Invalid flags or configuration file. The message has one line per problem."""


def is_first_rank() -> bool:
    """Tells from the launcher's environment whether this process prints for the run; True for a single process."""
    return os.environ.get("RANK", "0") == "0" or "WORLD_SIZE" not in os.environ
