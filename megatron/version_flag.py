"""The flag --version of the package's programs."""

import argparse
import os
from collections.abc import Sequence
from typing import Any

from megatron import __version__


def installed_versions() -> str:
    """Returns the versions of this package and of torch, without importing torch, which takes a second."""
    # Imported here because it takes 20 ms, and few calls of a program ask for versions.
    from importlib.metadata import version

    return f"megatron-stash {__version__}, torch {version('torch')}"


class PrintVersions(argparse.Action):
    """Prints the versions of this package and torch on the first rank, and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        text = "print the versions of megatron-stash and torch, and exit"
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=text)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        if os.environ.get("RANK", "0") == "0":
            print(installed_versions())
        parser.exit()
