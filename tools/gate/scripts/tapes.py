"""pretrain_gpt.py on the CPU with tapes instead of CUDA graphs; ends with an error if nothing was captured."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pretrain_gpt
from megatron.core.graph_tape import Tape, TapeGraphs

# Modules that look up `graph_device`, what captures on a GPU; the newest first. Add to it when the name moves.
PLACES = ("megatron.training.setup",)


class CountedTapes(TapeGraphs):
    """Counts captures."""

    num_captures = 0

    @contextmanager
    def capturing(self) -> Iterator[Tape]:
        CountedTapes.num_captures += 1
        with super().capturing() as tape:
            yield tape


def use_tapes() -> None:
    """Lets flags that ask for CUDA graphs get tapes."""
    for place in PLACES:
        module = importlib.import_module(place)
        if hasattr(module, "graph_device"):
            vars(module)["graph_device"] = CountedTapes
            return
    raise SystemExit(f"error: graph_device is in none of {', '.join(PLACES)}: add its new place to {__file__}")


if __name__ == "__main__":
    use_tapes()
    pretrain_gpt.main(sys.argv[1:])
    if CountedTapes.num_captures == 0:
        raise SystemExit("error: the flags ask for graphs, and nothing was captured")
