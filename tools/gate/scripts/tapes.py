"""Runs pretrain_gpt.py on the CPU with tapes instead of CUDA graphs, and counts captures and replays in steps.jsonl.

Ends with an error if nothing was captured.
"""

import importlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pretrain_gpt

try:
    from megatron.core.graphs.tape import Tape, TapeGraphs
except ModuleNotFoundError:  # a version older than the package
    from megatron.core.graphs.tape import Tape, TapeGraphs

# Modules that look up `graph_device`, a GPU's capture device, newest first. Add the new module when it moves.
PLACES = ("megatron.training.setup",)


class CountedTapes(TapeGraphs):
    """Tapes that count captures and replays, because a run that replays nothing would have the same losses."""

    num_captures = num_replays = 0

    @contextmanager
    def capturing(self, *pool: Any) -> Iterator[Tape]:
        CountedTapes.num_captures += 1
        with super().capturing(*pool) as tape:
            replay = tape.replay

            def counted(*args: Any, **kwargs: Any) -> Any:
                CountedTapes.num_replays += 1
                return replay(*args, **kwargs)

            vars(tape)["replay"] = counted
            yield tape


def use_tapes() -> None:
    """Makes the flags that request CUDA graphs use tapes instead."""
    for place in PLACES:
        module = importlib.import_module(place)
        if hasattr(module, "graph_device"):
            vars(module)["graph_device"] = CountedTapes
            return
    raise SystemExit(f"error: none of {', '.join(PLACES)} defines graph_device: add its new module to {__file__}")


if __name__ == "__main__":
    use_tapes()
    pretrain_gpt.main(sys.argv[1:])
    if CountedTapes.num_captures == 0:
        raise SystemExit("error: the flags request graphs, but nothing was captured")
    if os.environ["RANK"] == "0":
        counts = {"graphs": {"captures": CountedTapes.num_captures, "replays": CountedTapes.num_replays}}
        with Path("steps.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps({"iteration": 1, **counts}) + "\n")
