"""What holds for all tests: GPU tests are skipped without a GPU, property tests draw the same examples each time."""

import pytest
import torch
from hypothesis import settings

from tests.counts import long_count

pytest.register_assert_rewrite("tests.functional_tests.expectations")
settings.register_profile("project", deadline=None, derandomize=True, max_examples=long_count(50, soak=2000))
settings.load_profile("project")
# One thread, as in the ranks: sums keep their order on any machine, and small tensors gain nothing from more.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        # Keywords have the names of folders too: a checkout may be in one that is called gpu.
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
