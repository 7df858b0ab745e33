"""Defines CommandLineError, and determines which rank prints before process groups exist.

parser.py, yaml_config.py, validation.py and conflicts.py detect the errors.
"""

import os


class CommandLineError(ValueError):
    """Raised for invalid flags or an invalid configuration file. The message has one line per problem."""


def is_first_rank() -> bool:
    """Returns whether this process is rank 0 or the only process, according to the launcher's environment."""
    return os.environ.get("RANK", "0") == "0" or "WORLD_SIZE" not in os.environ
