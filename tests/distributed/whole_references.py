"""Single-process reference runs that layouts of the same model are compared with. Holds no tests."""

from collections.abc import Callable, Mapping
from functools import cache

from tests.distributed.parity import WholeRun, run_layout
from tests.functional_tests.case import Flags


def references(models: Mapping[str, tuple[str, Flags]]) -> Callable[[str], WholeRun]:
    """Returns a function that runs one of the models in a single process and caches the result.

    models: (base, flags) by name.
    """

    @cache
    def run(model: str) -> WholeRun:
        base, flags = models[model]
        return run_layout(base, 1, flags)

    return run
