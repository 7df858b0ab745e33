"""Traces a walk and prints it in the form of docs/tour.md; see tests/structure/tour.py.

PYTHONPATH=. .venv/bin/python tests/distributed/print_walk.py batch
"""

import sys

from tests.distributed import batch_walk, flag_walk, gradient_walk, token_walk
from tests.distributed.walks import lines
from tests.structure.tour import as_lines


def trace(name: str) -> list[str]:
    """Returns `file: qualname` of each function on a walk.

    name: batch, token, stash, activation, gradient or flag.
    """
    match name:
        case "batch":
            return lines(batch_walk.trace_batch())
        case "token":
            return lines(token_walk.trace_token(token_walk.Buffers.DYNAMIC)[0])
        case "stash":
            return token_walk.without_activation(token_walk.trace_token(token_walk.Buffers.STASH)[0])
        case "activation":
            return lines(token_walk.trace_activation())
        case "gradient":
            return gradient_walk.trace_walk()[0].lines()
        case "flag":
            return lines(flag_walk.trace_flag())
        case _:
            raise ValueError(f"the walk is {name!r}: must be batch, token, stash, activation, gradient or flag")


if __name__ == "__main__":
    print("\n".join(as_lines(trace(sys.argv[1]))))
