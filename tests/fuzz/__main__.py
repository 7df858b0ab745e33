"""Runs a fuzzer: `python -m tests.fuzz KIND --count N [--seed S]`, or `--reproduce BLOB` for one reported failure."""

import argparse
import sys
import time

from tests.fuzz.engine import fuzz, reproduce
from tests.fuzz.kinds import KINDS


def main() -> int:
    """Prints the verdicts, and each failure with its input, traceback and blob. Returns 1 if there is a failure."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("kind", choices=list(KINDS))
    parser.add_argument("--count", type=int, default=1000, help="number of examples (1000)")
    parser.add_argument("--seed", type=int, default=0, help="draws other examples (0)")
    parser.add_argument("--reproduce", metavar="BLOB", help="check the one example of a reported failure")
    options = parser.parse_args()
    start = time.perf_counter()
    factory = KINDS[options.kind]
    if options.reproduce:
        tally = reproduce(factory, blob=options.reproduce)
    else:
        tally = fuzz(factory, count=options.count, seed=options.seed)
    print(f"{options.kind}: {tally}\n{time.perf_counter() - start:.1f} s")
    return int(bool(tally.failures))


if __name__ == "__main__":
    sys.exit(main())
