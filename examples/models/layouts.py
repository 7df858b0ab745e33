"""Prints the flags of the layout in layouts.yaml for a model on a number of GPUs, one word per line, for pretrain.sh.

    examples/models/layouts.py                      the models and the GPUs that they can be trained on
    examples/models/layouts.py MODEL                the smallest number of GPUs that it has a layout for
    examples/models/layouts.py MODEL 16             its flags on 16 GPUs
    examples/models/layouts.py MODEL 2 --tiny       flags of the tiny model on 2 processes: each size is reduced

Starts nothing. docs/flags.md describes the flags.
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
# Omitted for a tiny model, whose four layers are split evenly over the stages.
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
    """Reads each model's layouts by number of GPUs per model replica, in the order of --list-models."""
    models: dict[str, dict[int, Layout]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))["models"]
    return models


def layouts_of(model: str) -> dict[int, Layout]:
    """Returns the layouts of one model. Raises ValueError with the nearest name for an unknown model."""
    models = read_layouts()
    if model not in models:
        begun = [name for name in models if name.startswith(model)]
        near = get_close_matches(model, begun, n=1) or get_close_matches(model, models, n=1)
        meant = f"; did you mean {near[0]}?" if near else f": must be one of {', '.join(models)}"
        raise ValueError(f"MODEL is {model}: unknown model{meant}")
    return models[model]


def layout_for(model: str, gpus: int) -> Layout:
    """Returns the largest layout of which `gpus` is a multiple. Raises ValueError if there is none."""
    layouts = layouts_of(model)
    fitting = [size for size in layouts if gpus > 0 and gpus % size == 0]
    if not fitting:
        sizes = " or ".join(str(size) for size in sorted(layouts))
        raise ValueError(
            f"GPUS is {gpus}: must be a multiple of {sizes} for {model} (SCALE=tiny trains a tiny one on 1, 2 or 4)"
        )
    return layouts[max(fitting)]


def tiny_layout(layout: Layout, processes: int) -> Layout:
    """Returns the layout of the tiny model on 1, 2 or 4 processes.

    Uses two ranks for each dimension that `layout` splits, as far as there are enough processes.
    """
    if processes not in (1, 2, 4):
        raise ValueError(f"GPUS is {processes}: must be 1, 2 or 4 processes with SCALE=tiny")
    small = {flag: value for flag, value in layout.items() if flag not in _OF_MANY_LAYERS} | _TINY_RUN
    left = processes
    # Expert parallelism uses the ranks of tensor and data parallelism, so it needs no additional ranks.
    small[EXPERTS] = 2 if layout.get(EXPERTS, 1) > 1 and processes > 1 else 1
    for size in (STAGES, TENSOR) if processes == 4 else (TENSOR,):
        small[size] = 2 if layout.get(size, 1) > 1 and left > 1 else 1
        left //= small[size]
    if processes < 4:
        small[STAGES] = 1
    return small


def words(layout: Layout) -> list[str]:
    """Converts a layout to command-line words. A flag whose value is true has no value word."""
    found = []
    for flag, value in layout.items():
        found.append(f"--{flag}")
        if value is not True:
            found += [str(one) for one in (value if isinstance(value, list) else [value])]
    return found


def main(argv: list[str] | None = None) -> int:
    """Prints the requested flags. Exits with status 2 and a one-line error if there is no such layout."""
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
