"""Fuzzing by hand: `python -m tests.fuzz KIND [--seed S] [--count N] [--only NUMBER]`, with any seed."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.kinds import KINDS, try_apart
from tests.fuzz.trials import limit_memory, try_all


def main() -> int:
    """Prints what became of the trials, failures with input and traceback; 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--only", type=int, help="the number of one trial")
    parser.add_argument("--failures", type=int, default=10, help="stop after so many (10)")
    options = parser.parse_args()
    start = time.perf_counter()
    if options.only is None:
        tally = try_apart(options.kind, seed=options.seed, numbers=range(options.count), most_failures=options.failures)
    else:
        with tempfile.TemporaryDirectory() as shared:
            fuzzer = KINDS[options.kind](Path(shared))
            limit_memory()
            tally = try_all(fuzzer, seed=options.seed, numbers=range(options.only, options.only + 1))
    print(f"{options.kind}, seed {options.seed}: {tally}\n{time.perf_counter() - start:.1f} s")
    return int(bool(tally.failures))


if __name__ == "__main__":
    sys.exit(main())
