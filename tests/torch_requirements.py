"""Writes what an environment with another torch contains: `python tests/torch_requirements.py VERSION FILE`.

`make test-torch` installs it. Packages and versions are those of requirements/cpu.txt, except torch's, and those that
depend on torch's. Runs before the environment exists, with any Python from 3.11: imports nothing that is installed.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from megatron import TESTED_TORCH  # noqa: E402

# CUDA builds of torch pin Triton, and torch 2.11 needs an older setuptools. The bounds are those of pyproject.toml.
FREE = {"triton": "triton>=3.6", "setuptools": "setuptools>=77"}


def with_torch(version: str, pins: str) -> str:
    """Returns the lines of a pin file with this version of torch.

    Raises ValueError if the version is not one of a release, or is older than the package supports.
    """
    example = ".".join(map(str, (*TESTED_TORCH[1], 1)))
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise ValueError(f"VERSION is {version!r}, but must name a release of torch: make test-torch VERSION={example}")
    major, minor, _ = map(int, version.split("."))
    if (major, minor) < TESTED_TORCH[0]:
        oldest = ".".join(map(str, TESTED_TORCH[0]))
        raise ValueError(f"VERSION is {version}, but the package requires torch {oldest} or newer")
    changed = {**FREE, "torch": f"torch=={version}"}
    lines = [line for line in pins.splitlines() if line and not line.startswith("#")]
    return "".join(f"{changed.get(line.partition('==')[0], line)}\n" for line in lines)


def main(version: str, path: Path) -> None:
    """Writes the file, unless it already has this text: a newer file makes `make` install again."""
    text = with_torch(version, (ROOT / "requirements" / "cpu.txt").read_text(encoding="utf-8"))
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    try:
        main(sys.argv[1], Path(sys.argv[2]))
    except ValueError as error:
        sys.exit(str(error))
