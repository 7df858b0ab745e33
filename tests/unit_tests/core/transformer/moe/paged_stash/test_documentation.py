"""The examples in docs/stash_library.md run, print the output shown on the page, and train as it claims."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.structure.measure import ROOT

PAGE = (ROOT / "docs" / "stash_library.md").read_text(encoding="utf-8")
SMALL, LOOP = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_example_prints_and_trains_as_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    weights: list[list[torch.Tensor]] = []
    for source in (LOOP, LOOP.replace("device_pages=100", "device_pages=1000")):
        names: dict[str, Any] = {}
        exec(compile(source, "docs/stash_library.md", "exec"), names)
        weights.append([weight for pair in names["weights"] for weight in pair])
    printed = capsys.readouterr().out.splitlines()
    assert [f"    {line}" for line in printed[:3]] == [line for line in PAGE.splitlines() if re.match(r"    \d ", line)]
    assert printed[:3] != printed[3:] and all(map(torch.equal, *weights))


def test_the_small_example_gives_the_gradients_of_plain_code() -> None:
    gradients: list[list[torch.Tensor]] = []
    for source in (SMALL, re.sub(r"with stash\.context\(.*?\):", "if True:", SMALL)):
        names: dict[str, Any] = {}
        torch.manual_seed(0)
        exec(compile(source, "docs/stash_library.md", "exec"), names)
        gradients.append([weight.grad for weight in names["weights"]])
    assert "stash.context" not in source and all(map(torch.equal, *gradients))


def test_the_small_example_runs_where_torch_and_numpy_alone_are_installed(tmp_path: Path) -> None:
    link_installed(["torch", "numpy"], tmp_path)
    assert (tmp_path / "torch").is_dir() and not (tmp_path / "yaml").exists()
    # -S hides all other installed packages.
    command = [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {[str(ROOT), str(tmp_path)]}\n{SMALL}"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, env={"OMP_NUM_THREADS": "1"}).stdout
    assert f"It prints `{printed.strip()}`" in PAGE


def link_installed(packages: list[str], folder: Path) -> None:
    """Links the files of installed packages, and of their dependencies, into a folder."""
    waiting, seen = list(packages), set(packages)
    while waiting:
        try:
            distribution = importlib.metadata.distribution(waiting.pop())
        except importlib.metadata.PackageNotFoundError:
            continue  # required only on other platforms
        names = {path.parts[0] for path in distribution.files or ()} - {"..", "__pycache__"}
        # Packages of a CUDA build of torch share folders, such as nvidia.
        for name in names - {path.name for path in folder.iterdir()}:
            (folder / name).symlink_to(str(distribution.locate_file(name)))
        required = [requirement for requirement in distribution.requires or () if "extra ==" not in requirement]
        names = {re.split(r"[^\w.-]", requirement)[0] for requirement in required} - seen
        waiting, seen = [*waiting, *names], seen | names
