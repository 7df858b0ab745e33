"""Pytest hooks of every run: deselects, skips and orders tests, configures hypothesis, reports compiled kernels."""

import gc
import os
import random
from collections.abc import Generator
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.counts import long_count
from tests.harness import SEED

pytest.register_assert_rewrite("tests.functional_tests.expectations")
# Name of a kernel -> registers, spilled bytes, shared bytes and cubin bytes on each architecture.
COMPILED = pytest.StashKey[dict[str, list[str]]]()
settings.register_profile(
    "project",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=long_count(50, soak=2000),
    suppress_health_check=[HealthCheck.too_slow],  # the machine may be busy
)
settings.load_profile("project")
# One thread, as in the ranks. Sums then have the same order on any machine, and small tensors do not need more.
torch.set_num_threads(1)
# Weights & Biases writes files and sends nothing. Ranks inherit this setting.
os.environ.setdefault("WANDB_MODE", "offline")
# Tests may run as a task of a job. The processes that they start are not tasks of it.
for _name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "PMI_", "PMIX_"))]:
    del os.environ[_name]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--order-seed", type=int, metavar="SEED", help="run files, and the tests of a file, in random order"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Disables garbage collection while tests are collected, since each collection would walk all imported modules."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not os.environ.get("SOAK"):
        _leave_out_soak(config, items)
    if not torch.cuda.is_available():
        _skip_gpu(items)
    _order_files(items, seed=config.getoption("--order-seed"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seeds the random generators, so that a test does not depend on the tests that ran before it."""
    random.seed(SEED)
    numpy.random.seed(SEED)
    torch.manual_seed(SEED)


def pytest_collection_finish(session: pytest.Session) -> None:
    # Imported modules and items live as long as the process. Without this, every full collection would walk them all.
    gc.collect()
    gc.freeze()


def _leave_out_soak(config: pytest.Config, items: list[pytest.Item]) -> None:
    soak = [item for item in items if item.get_closest_marker("soak") is not None]
    if soak:
        config.hook.pytest_deselected(items=soak)
        items[:] = [item for item in items if item.get_closest_marker("soak") is None]


def _skip_gpu(items: list[pytest.Item]) -> None:
    for item in items:
        # Keywords also include the names of folders, and a checkout may lie in a folder called gpu.
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _order_files(items: list[pytest.Item], *, seed: int | None) -> None:
    """Shuffles files and tests by `seed`, or puts the files with the most slow tests first, to balance the workers."""
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    if seed is None:
        names = sorted(
            files, key=lambda name: -sum(item.get_closest_marker("slow") is not None for item in files[name])
        )
    else:
        shuffle = random.Random(seed).shuffle
        names = sorted(files)
        shuffle(names)
        for tests in files.values():
            shuffle(tests)
    items[:] = [item for name in names for item in files[name]]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Sends the kernels that a pytest-xdist worker compiled to the process that prints the summary."""
    output = vars(session.config).get("workeroutput")
    if output is not None:
        output["compiled"] = session.config.stash.get(COMPILED, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Collects the data of the kernels that a worker compiled. A worker that crashed has no output."""
    compiled = vars(node).get("workeroutput", {}).get("compiled", {})
    node.config.stash.setdefault(COMPILED, {}).update(compiled)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    kernels = config.stash.get(COMPILED, {})
    if kernels:
        terminalreporter.section(
            "kernels: registers, spilled bytes, shared bytes, cubin bytes on sm_80 | sm_90 | sm_100"
        )
    for name, figures in kernels.items():
        terminalreporter.write_line(f"{name:40} {' | '.join(figures)}")
