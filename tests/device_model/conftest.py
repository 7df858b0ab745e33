"""Skips the tests of the device model on machines that cannot build it."""

import os
import shlex
import shutil

import pytest
import torch


@pytest.fixture(autouse=True)
def _can_be_built() -> None:
    """Skips a test unless torch is a CPU build, on which the model emulates CUDA, and a C++ compiler exists."""
    if torch.version.cuda is not None:
        pytest.skip("the device model needs a CPU build of torch")
    # .ci/run sets CI_HAS_BROWSER. In CI, a missing tool is a failure.
    if shutil.which(shlex.split(os.environ.get("CXX", "g++"))[0]) is None and "CI_HAS_BROWSER" not in os.environ:
        pytest.skip("the device model needs a C++ compiler: g++, or that of the variable CXX")
