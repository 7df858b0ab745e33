"""Runs the tests of kernels under compute-sanitizer. Takes the tools to run: memcheck, racecheck, synccheck."""

import subprocess
import sys


def main() -> None:
    """Exits with the status of tests/gpu/sanitize.sh, which is NOT_CHECKED without the tool."""
    words = ["sh", "tests/gpu/sanitize.sh", sys.executable, *sys.argv[1:]]
    sys.exit(subprocess.run(words, check=False).returncode)


if __name__ == "__main__":
    main()
