"""Flags of the layout that layouts.yaml has for a model on a number of GPUs, one word a line, for pretrain.sh.

    examples/models/layouts.py                      the models, and the GPUs that they can be trained on
    examples/models/layouts.py MODEL                the fewest GPUs that it has a layout for
    examples/models/layouts.py MODEL 16             its flags on 16 GPUs
    examples/models/layouts.py MODEL 2 --tiny       of the tiny model, on so many processes: each size is cut down

Starts nothing; what the flags mean is in docs/flags.md.
"""

import argparse
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).with_name("layouts.yaml")
Layout = Mapping[str, Any]
TENSOR, STAGES, EXPERTS = (f"{part}-model-parallel-size" for part in ("tensor", "pipeline", "expert"))
# Which layers a stage has follows from their number alone in a tiny model, which has four.
_OF_MANY_LAYERS = (
    "decoder-first-pipeline-num-layers",
    "decoder-last-pipeline-num-layers",
    "num-virtual-stages-per-pipeline-rank",
)
_TINY_RUN = {
    "model-scale": "tiny",
    "seq-length": 64,
    "micro-batch-size": 1,
    "global-batch-size": 8,
    "train-iters": 4,
    "lr": 1e-3,
    "log-interval": 2,
    "eval-iters": 1,
    "num-workers": 0,
}


def read_layouts() -> dict[str, dict[int, Layout]]:
    """For each model, in the order of --list-models, its layouts by the GPUs that one copy takes."""
    models: dict[str, dict[int, Layout]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))["models"]
    return models


def layouts_of(model: str) -> dict[int, Layout]:
    """The layouts of one model; ValueError, with the nearest name, for one that has none."""
    models = read_layouts()
    if model not in models:
        begun = [name for name in models if name.startswith(model)]
        near = get_close_matches(model, begun, n=1) or get_close_matches(model, models, n=1)
        meant = f"; did you mean {near[0]}?" if near else f": must be one of {', '.join(models)}"
        raise ValueError(f"MODEL is {model}: not known{meant}")
    return models[model]


def layout_for(model: str, gpus: int) -> Layout:
    """The largest layout of which `gpus` is a whole number of copies; ValueError if there is none."""
    layouts = layouts_of(model)
    fitting = [size for size in layouts if gpus > 0 and gpus % size == 0]
    if not fitting:
        sizes = " or ".join(str(size) for size in sorted(layouts))
        raise ValueError(
            f"GPUS is {gpus}: must be a multiple of {sizes} for {model} (SCALE=tiny trains a tiny one on 1, 2 or 4)"
        )
    return layouts[max(fitting)]


def tiny_layout(layout: Layout, processes: int) -> Layout:
    """The same for the tiny model: two ranks for each way in which `layout` cuts, as far as there are processes."""
    if processes not in (1, 2, 4):
        raise ValueError(f"GPUS is {processes}: must be 1, 2 or 4 processes with SCALE=tiny")
    small = {flag: value for flag, value in layout.items() if flag not in _OF_MANY_LAYERS} | _TINY_RUN
    left = processes
    # Experts are spread over the ranks that tensors or samples are cut over: they take none of their own.
    small[EXPERTS] = 2 if layout.get(EXPERTS, 1) > 1 and processes > 1 else 1
    for size in (STAGES, TENSOR) if processes == 4 else (TENSOR,):
        small[size] = 2 if layout.get(size, 1) > 1 and left > 1 else 1
        left //= small[size]
    if processes < 4:
        small[STAGES] = 1
    return small


def words(layout: Layout) -> list[str]:
    """The layout as words of a command line: a flag alone where the value is true."""
    found = []
    for flag, value in layout.items():
        found.append(f"--{flag}")
        if value is not True:
            found += [str(one) for one in (value if isinstance(value, list) else [value])]
    return found


def main(argv: list[str] | None = None) -> int:
    """Prints what the command line asks for; exit status 2, and one line that says why, if there is no such thing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("gpus", nargs="?", type=int)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(argv)
    try:
        if options.model is None:
            lines = [f"{name:<18} {' or '.join(map(str, sizes))} GPUs" for name, sizes in read_layouts().items()]
        elif options.gpus is None:
            lines = [str(min(layouts_of(options.model)))]
        elif options.tiny:
            lines = words(tiny_layout(next(iter(layouts_of(options.model).values())), options.gpus))
        else:
            lines = words(layout_for(options.model, options.gpus))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
