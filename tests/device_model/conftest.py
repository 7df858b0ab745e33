"""Skips the tests of the device model where it cannot be built."""

import os
import shlex
import shutil

import pytest
import torch


@pytest.fixture(autouse=True)
def _can_be_built() -> None:
    """The model takes the place of CUDA, which a CPU build of torch lacks, and compiles one file of C++."""
    if torch.version.cuda is not None:
        pytest.skip("the device model needs a CPU build of torch")
    # .ci/run sets CI_HAS_BROWSER: there a missing tool is a failure.
    if shutil.which(shlex.split(os.environ.get("CXX", "g++"))[0]) is None and "CI_HAS_BROWSER" not in os.environ:
        pytest.skip("the device model needs a C++ compiler: g++, or that of the variable CXX")
