"""Every module can be the first one imported: no import order is needed that only some callers keep."""

import importlib
import os

import pytest

from tests.harness import run_on_ranks
from tests.structure.measure import Source, read_sources


def _importable_alone(modules: list[str]) -> list[str]:
    """The modules whose import fails in a process that has imported nothing of the project."""
    failed = []
    for module in modules:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                importlib.import_module(module)
                status = 0
            finally:
                os._exit(status)
        if os.waitpid(child, 0)[1] != 0:
            failed.append(module)
    return failed


@pytest.mark.slow
def test_every_module_imports_on_its_own() -> None:
    modules = [source.module for source in read_sources("megatron", "tools") if not _needs_optional_package(source)]
    assert run_on_ranks(_importable_alone, 1, modules, backend=None) == [[]]


def _needs_optional_package(source: Source) -> bool:
    return source.module.startswith("megatron.core.extensions.")
