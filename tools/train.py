"""Runs the pretrain_gpt.py of this package: `megatron-train`, or `torchrun -m megatron train`.

`import pretrain_gpt` could find another file of this name in the current folder or on PYTHONPATH, for example in a
clone of Megatron-LM. Programs of the package therefore import the module from here.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import megatron

_NAME = "pretrain_gpt"


def _load() -> ModuleType:
    """Imports the file next to the package megatron, unless it is imported already."""
    path = Path(str(megatron.__file__)).resolve().parents[1] / f"{_NAME}.py"
    imported = sys.modules.get(_NAME)
    if imported is not None and imported.__file__ is not None and Path(imported.__file__).resolve() == path:
        return imported
    spec = spec_from_file_location(_NAME, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    # Functions are pickled by the name of their module.
    sys.modules[_NAME] = module
    spec.loader.exec_module(module)
    return module


if TYPE_CHECKING:
    import pretrain_gpt
else:
    pretrain_gpt = _load()

main = pretrain_gpt.main
