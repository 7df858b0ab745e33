"""`python -m tests.structure` prints every violation of a rule, and measures of the code next to other code bases'.

`--rules` prints the rules, and `--anchors` the table of docs/architecture.md. The exit status is 1 if a rule is broken.
"""

import argparse
import sys
from inspect import getdoc

from rich.console import Console

from tests.structure.compared import anchors, table
from tests.structure.rules import ANY_CODE_RULES, PRODUCT_RULES, findings


def main(argv: list[str] | None = None) -> int:
    """Runs the command line. Returns the exit status, which is 1 if a rule is broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.structure", description=__doc__)
    parser.add_argument("--rules", action="store_true", help="print the rules")
    parser.add_argument("--anchors", action="store_true", help="print the table of docs/architecture.md")
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False, markup=False)
    options = parser.parse_args(argv)
    if options.anchors:
        print(anchors(), end="")
        return 0
    if options.rules:
        for name, rule in {**PRODUCT_RULES, **ANY_CODE_RULES}.items():
            console.print(f"{name:18} {getdoc(rule)}", soft_wrap=True)
        return 0
    found = findings()
    for finding in found:
        console.print(str(finding), soft_wrap=True)
    console.print(f"{len(found)} places break a rule\n")
    console.print(table())
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
