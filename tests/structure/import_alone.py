"""`python -m tests.structure.import_alone MODULE...`: prints those whose import fails where no other was imported.

A module's import begins with its packages', so it is tried in a fork of a process that has imported just these.
"""

import gc
import importlib
import os
import sys
import traceback

# What the project's modules import and is slow to.
OTHERS = ["numpy", "tokenizers", "torch", "torch._dynamo", "torch.distributed.checkpoint", "yaml"]


def _try_below(package: str, modules: list[str]) -> None:
    """Tries the package's modules and packages, in a process that has imported the package."""
    # A collection in a fork would copy every page that it shares with this process.
    gc.freeze()
    depth = package.count(".") + 1 if package else 0
    below = [module for module in modules if not package or module.startswith(f"{package}.")]
    for name in sorted({".".join(module.split(".")[: depth + 1]) for module in below}):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                importlib.import_module(name)
                _try_below(name, below)
                status = 0
            finally:
                if status:
                    traceback.print_exc()
                os._exit(status)
        if os.waitpid(child, 0)[1] != 0:
            print(name, flush=True)


if __name__ == "__main__":
    for other in OTHERS:
        importlib.import_module(other)
    _try_below("", sys.argv[1:])
