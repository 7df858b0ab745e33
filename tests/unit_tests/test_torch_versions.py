"""The range of tested torch versions is the same wherever it is stated, and `make test-torch` installs what it says."""

import re
import tomllib

import pytest
import torch

import megatron
from megatron import TESTED_TORCH, torch_range, untested_torch
from tests.harness import ROOT
from tests.torch_requirements import main, with_torch

PINS = (ROOT / "requirements" / "cpu.txt").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
RANGE = re.compile(r"torch (\d+\.\d+ to \d+\.\d+)")
# The page that the GPU checks write states their own requirements.
PAGES = [path for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")) if path.name != "gpu_results.md"]


def test_the_installer_requires_the_oldest_tested_torch_and_refuses_no_newer_one() -> None:
    (requirement,) = [one for one in PROJECT["dependencies"] if one.startswith("torch")]
    assert requirement == "torch>=" + ".".join(map(str, TESTED_TORCH[0]))


def test_every_page_states_the_tested_range() -> None:
    stated = {str(path.relative_to(ROOT)): set(RANGE.findall(path.read_text(encoding="utf-8"))) for path in PAGES}
    assert {name: ranges for name, ranges in stated.items() if ranges - {torch_range()}} == {}
    assert {name for name, ranges in stated.items() if ranges} >= {
        "README.md",
        "docs/install.md",
        "docs/torch_versions.md",
    }


@pytest.mark.parametrize("name", ["cpu.txt", "cuda.txt"])
def test_pinned_versions_of_torch_are_tested_ones(name: str) -> None:
    pins = (ROOT / "requirements" / name).read_text(encoding="utf-8")
    (version,) = re.findall(r"^torch==(.+)$", pins, re.MULTILINE)
    assert untested_torch(version) is None


@pytest.mark.parametrize(
    ("version", "differs"),
    [
        ("2.10.0", "older"),
        ("2.11.0", None),
        ("2.13.0+cpu", None),
        ("2.14.1", None),
        ("2.14.0a0+gitc0ffee", None),
        ("2.15.0.dev20270101", "newer"),
        ("3.0.0", "newer"),
    ],
)
def test_a_torch_outside_the_range_gives_a_line_with_its_version_and_the_range(
    version: str, differs: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron, "TESTED_TORCH", ((2, 11), (2, 14)))
    expected = f"WARNING: torch {version} is {differs} than the tested versions, 2.11 to 2.14 (docs/torch_versions.md)"
    assert untested_torch(version) == (expected if differs else None)


def test_the_installed_torch_is_not_older_than_the_range() -> None:
    assert "older" not in (untested_torch(torch.__version__) or "")


def test_an_environment_with_another_torch_differs_in_torch_and_what_depends_on_it() -> None:
    def pins(text: str) -> set[str]:
        return {line for line in text.splitlines() if not line.startswith("#")}

    written = pins(with_torch("2.14.1", PINS))
    assert written - pins(PINS) == {"torch==2.14.1", "triton>=3.6", "setuptools>=77"}
    assert {line.partition("==")[0] for line in pins(PINS) - written} == {"torch", "triton", "setuptools"}


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("", "VERSION is '', but must name a release of torch"),
        ("2.14", "VERSION is '2.14', but must name a release of torch: make test-torch VERSION=2.14.1"),
        ("2.14.1+cpu", "must name a release of torch"),
        ("2.10.0", "VERSION is 2.10.0, but the package requires torch 2.11 or newer"),
    ],
)
def test_a_version_that_is_none_or_too_old_is_refused(version: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        with_torch(version, PINS)


def test_an_unchanged_environment_is_not_installed_twice(tmp_path) -> None:
    path = tmp_path / "environment" / "requirements.txt"
    main("2.14.1", path)
    written = path.stat().st_mtime_ns
    main("2.14.1", path)
    assert path.stat().st_mtime_ns == written
    main("2.13.0", path)
    assert "\ntorch==2.13.0\n" in path.read_text(encoding="utf-8")
