"""The error for mistakes in flags and configuration files, and which rank speaks before process groups exist.

What counts as a mistake is decided in parser.py, yaml_config.py and validation.py.
"""

import os


class CommandLineError(ValueError):
    """Flags or a configuration file that cannot be honoured; the text has a line for each problem."""


def is_first_rank() -> bool:
    """Whether this process speaks for the run; read from what the launcher sets. One that was started alone does."""
    return os.environ.get("RANK", "0") == "0" or "WORLD_SIZE" not in os.environ
