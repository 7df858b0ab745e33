"""A training framework for GPT and mixture-of-experts models under the names that Megatron-LM users know."""

import os
import sys
import warnings
from contextlib import suppress

__version__ = "0.1.0"


def megatron_core_version() -> str | None:
    """Returns the version of NVIDIA's megatron-core, which is imported under the same name; None if not installed.

    Reads folder names only: importing importlib.metadata takes 20 ms.
    """
    for folder in sys.path:
        with suppress(OSError):
            for name in os.listdir(folder or os.curdir):
                if name.startswith("megatron_core-") and name.endswith(".dist-info"):
                    return name.removeprefix("megatron_core-").removesuffix(".dist-info")
    return None


def _warn_of_megatron_core() -> None:
    theirs = megatron_core_version()
    # One line for all ranks that torchrun starts on this machine.
    if theirs is not None and os.environ.get("LOCAL_RANK", "0") == "0":
        warnings.warn(
            f"megatron-stash {__version__} and NVIDIA's megatron-core {theirs} are both installed, and both provide "
            "megatron.core: keep them in separate environments (docs/install.md)",
            stacklevel=3,
        )


_warn_of_megatron_core()
