"""`python -m tests.structure.import_alone MODULE...` prints the modules that fail if they are imported first.

Importing a module first imports its packages, so each module is tried in a fork of a process that has imported only
the module's packages.
"""

import gc
import importlib
import os
import sys
import traceback

# Slow third-party imports, done once before the forks.
OTHERS = ["numpy", "tokenizers", "torch", "torch._dynamo", "torch.distributed.checkpoint", "yaml"]


def _try_below(package: str, modules: list[str]) -> None:
    """Imports each module and subpackage of `package` in a fork of this process, which has imported the package."""
    # A garbage collection in a fork would copy every memory page that it shares with this process.
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
