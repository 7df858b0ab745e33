"""Every module can be imported first, so callers need not import modules in a certain order.

In `make test`, the rule import_cycle rejects the usual cause, an import cycle. Only this test finds a module that reads
an attribute such as `megatron.core.x` at import time without importing it.
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
