"""Identifies the version of the files that a measurement belongs to.

Does not import torch, so that it works even if torch fails.
"""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_PARTS = ("megatron", "benchmarks", "tests/gpu", "tests/unit_tests", "tests/distributed", "tests/functional_tests")
_FILES = ("pretrain_gpt.py", "tests/harness.py", "tests/conftest.py")


def commit_of_tree() -> str:
    """Returns the commit of these files.

    In a copy without a repository, returns the variable COMMIT or an empty string.
    """
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        return os.environ.get("COMMIT", "")
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return head.stdout.strip()


def digest_of_files() -> str:
    """Returns a digest of the Python files that GPU checks run. It depends only on contents, committed or not."""
    found = hashlib.blake2b(digest_size=8)
    paths = [path for part in _PARTS for path in (ROOT / part).rglob("*.py")]
    for path in sorted([*paths, *(ROOT / name for name in _FILES)]):
        found.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return found.hexdigest()
