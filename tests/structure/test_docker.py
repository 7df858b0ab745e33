"""The Dockerfiles copy only files that exist and are sent to the daemon, and docs/install.md shows their commands."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.structure.measure import ROOT

DOCKERFILES = sorted((ROOT / "docker").iterdir())
PAGE = ROOT / "docs" / "install.md"


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """Returns (instruction, arguments) in order, without comments and with continued lines joined."""
    lines = [line for line in dockerfile.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split()[0], line.partition(" ")[2]) for line in joined.splitlines() if line]


def sent_names() -> set[str]:
    """Returns the root's entries that .dockerignore does not exclude. It excludes everything except these names."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    first, *rules = [line for line in lines if line and not line.startswith("#")]
    assert first == "*"
    return {rule.removeprefix("!") for rule in rules if rule.startswith("!")}


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_what_is_copied_exists_and_is_sent(dockerfile: Path) -> None:
    copied = [words.split()[:-1] for name, words in instructions(dockerfile) if name in ("COPY", "ADD")]
    assert copied
    for source in (source for sources in copied for source in sources):
        assert (ROOT / source).exists(), source
        assert source == "." or Path(source).parts[0] in sent_names(), source


def test_what_a_wheel_is_built_from_is_sent() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    modules = {f"{name}.py" for name in settings["tool"]["setuptools"]["py-modules"]}
    files = {settings["project"]["readme"], *settings["project"]["license-files"], "pyproject.toml", "setup.py"}
    links = {(ROOT / "megatron" / name).resolve().name for name in ("configs", "tools")}
    needed = {"megatron", *modules, *files, *links}
    assert needed <= sent_names()
    assert [name for name in sorted(sent_names()) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_the_page_has_the_commands_of_the_file(dockerfile: Path) -> None:
    """Compares the page with a Dockerfile's first comment, which contains the commands to build and run the image."""
    head = dockerfile.read_text(encoding="utf-8").partition("FROM")[0]
    commands = "".join(line.removeprefix("# ") + "\n" for line in head.splitlines())
    assert commands.startswith(f"docker build --file docker/{dockerfile.name} ")
    assert f"```\n{commands}```\n" in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_versions_are_pinned_and_the_user_is_not_root(dockerfile: Path) -> None:
    steps = instructions(dockerfile)
    images = [words.split()[0] for name, words in steps if name == "FROM"]
    assert all(re.fullmatch(r"\w+:\d+\.\d+\.\d+-[\w-]+", image) for image in images), images
    (install,) = [words for name, words in steps if name == "RUN" and "pip install" in words]
    (constraints,) = re.findall(r"--constraint /tmp/(\S+)", install)
    pins = (ROOT / "requirements" / constraints).read_text(encoding="utf-8").splitlines()
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in pins if not line.startswith("#"))
    assert [words for name, words in steps if name == "USER"][-1] == "megatron"


def test_images_pin_what_every_extra_requires() -> None:
    """Both pin files list the packages of `all` and `cuda`, with equal versions except for torch and setuptools."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    (chosen,) = extras["all"]
    names = [*re.findall(r"[\w-]+", chosen.partition("[")[2]), "cuda"]
    wanted = [*project["dependencies"], *(requirement for name in names for requirement in extras[name])]
    pins = {name: read_pins(ROOT / "requirements" / name) for name in ("cpu.txt", "cuda.txt")}
    for name, versions in pins.items():
        assert {re.split(r"[<>=]", requirement)[0].lower() for requirement in wanted} <= versions.keys(), name
    common = pins["cpu.txt"].keys() & pins["cuda.txt"].keys()
    assert {name for name in common if pins["cpu.txt"][name] != pins["cuda.txt"][name]} == {"torch", "setuptools"}


def read_pins(path: Path) -> dict[str, str]:
    """Returns the version of each package in a pin file, by lower-case package name."""
    lines = [line.lower() for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def test_the_page_lists_every_command_and_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = PAGE.read_text(encoding="utf-8")
    # The extra `te` installs nothing.
    named = [*project["scripts"], *(project["optional-dependencies"].keys() - {"te"})]
    assert [name for name in named if f"\n| `{name}` |" not in page] == []
