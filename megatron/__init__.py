"""A training framework for GPT and mixture-of-experts models under the names that Megatron-LM users know."""

import os
import sys
from contextlib import suppress

__version__ = "0.1.0"

# The first and the last minor version of torch on which the tests pass. pyproject.toml requires the first.
TESTED_TORCH = ((2, 11), (2, 14))


def torch_range() -> str:
    """Returns the tested minor versions of torch as text: the first, "to", and the last."""
    return " to ".join(".".join(map(str, version)) for version in TESTED_TORCH)


def untested_torch(version: str) -> str | None:
    """Returns a warning of one line if this version of torch is older or newer than the tested ones, else None."""
    first, last = TESTED_TORCH
    major, minor = version.split(".")[:2]
    installed = int(major), int(minor)
    if first <= installed <= last:
        return None
    differs = "older" if installed < first else "newer"
    return f"WARNING: torch {version} is {differs} than the tested versions, {torch_range()} (docs/torch_versions.md)"


def conflict_with_megatron_core() -> str | None:
    """Describes NVIDIA's package of the same import name if it is installed, or if its clone is on sys.path.

    Reads file names only: importing importlib.metadata takes 20 ms.
    """
    entries: list[str] = []
    for folder in sys.path:
        with suppress(OSError):
            entries += os.listdir(folder or os.curdir)
    for entry in entries:
        name, kind = os.path.splitext(entry)
        project, _, version = name.replace("megatron-core", "megatron_core").partition("-")
        if project == "megatron_core" and kind in (".dist-info", ".egg-info", ".egg-link"):
            # An .egg-info may end with the version of Python, and an .egg-link has no version.
            theirs = " ".join(filter(None, ("NVIDIA's megatron-core", version.partition("-")[0])))
            return (
                f"megatron-stash {__version__} and {theirs} are both installed, and both provide megatron.core: "
                "keep them in separate environments (docs/install.md)"
            )
    for folder in sys.path:
        package = os.path.join(folder, "megatron")
        # Copies of this package have megatron/__main__.py, and Megatron-LM does not.
        if os.path.isfile(f"{package}/core/__init__.py") and not os.path.exists(f"{package}/__main__.py"):
            return f"megatron-stash {__version__} is imported instead of {os.path.abspath(package)} (docs/install.md)"
    return None


def _warn_of_conflict() -> None:
    # One line for all ranks that torchrun starts on this machine.
    if sys.stderr is None or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    if conflict := conflict_with_megatron_core():
        # The module warnings would add a second line: the code of the import.
        sys.stderr.write(f"WARNING: {conflict}\n")


_warn_of_conflict()
