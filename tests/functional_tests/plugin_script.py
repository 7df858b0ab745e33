"""Runs the example of a script in Megatron-LM's form as `python SCRIPT` does. Holds no tests."""

import runpy
import sys

from tests.functional_tests.launch import ROOT

SCRIPT = ROOT / "examples" / "megatron_plugins" / "pretrain_plugins.py"


def main(argv: list[str]) -> None:
    """Runs the script with these words on its command line."""
    sys.argv = [str(SCRIPT), *argv]
    runpy.run_path(str(SCRIPT), run_name="__main__")
