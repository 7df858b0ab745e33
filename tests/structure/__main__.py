"""`python -m tests.structure`: prints every place that breaks a limit and is not allowed to; exit status 1 if any."""

import sys

from tests.structure.test_structure import breaches

if __name__ == "__main__":
    found = breaches()
    print("\n".join(map(str, found)))
    print(f"{len(found)} places break a limit")
    sys.exit(bool(found))
