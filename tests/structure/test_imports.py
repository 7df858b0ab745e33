"""Every module can be the first one imported: no import order is needed that only some callers keep.

In `make test` the rule import_cycle refuses the usual reason, imports in a circle. A module that reads, at import, an
attribute such as `megatron.core.x` without importing it is found here alone.
"""

import subprocess
import sys

import pytest

from tests.structure.measure import ROOT, Source, read_sources


@pytest.mark.soak
def test_every_module_imports_on_its_own() -> None:
    modules = [source.module for source in read_sources("megatron", "tools") if not _needs_optional_package(source)]
    command = [sys.executable, "-m", "tests.structure.import_alone", *modules]
    tried = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=True)
    assert tried.stdout.split() == [], tried.stderr


def _needs_optional_package(source: Source) -> bool:
    return source.module.startswith("megatron.core.extensions.")
