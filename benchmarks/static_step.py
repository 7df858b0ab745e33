"""Compares static expert buffers with dropless buffers, and a paged stash with static buffers, interleaved.

    python benchmarks/static_step.py [--rounds 30] [--steps 1] [--only LAYOUT ...] [--json FILE]

Prints CPU seconds, wall time and peak memory, and each side over the first one as medians over the rounds. The model is
the same as in train_step.py. The layouts are:

- one layer in one process
- a training step of two ranks that both have all experts
- a training step of two ranks that share the experts, with either dispatcher
- the same with two microbatches and a stash, with pages for everything and for half
- the same with and without --record-routing, with the meters and log of a run on both sides

With a single expert rank a buffer is large enough for all rows at any factor, so no row is lost.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from benchmarks.sides import Build, print_table, run_rounds, start_side, write_record  # noqa: E402
from benchmarks.train_step import FLAGS, MICRO_BATCH, RANKS, SEQUENCE, build_ours, build_run  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec  # noqa: E402
from megatron.core.transformer.spec_utils import build_module  # noqa: E402
from megatron.training.arguments import core_transformer_config_from_args  # noqa: E402
from megatron.training.callbacks import RunStart  # noqa: E402
from megatron.training.initialize import start_processes  # noqa: E402
from megatron.training.training import run_step  # noqa: E402

BASE = "dropless"
TRACE = Path(tempfile.gettempdir()) / "static_step_routing.jsonl"
# Number of forward and backward passes of the layer in one step of a side.
PASSES = 10
FACTOR = "--moe-expert-rank-capacity-factor"
STASH, PAGES = "--moe-paged-stash", "--moe-paged-stash-buffer-size-factor-cuda"
# A routing similar to a trained router's. A routing that loses rows would save their time.
BALANCED = "--moe-router-force-load-balancing"


def main() -> None:
    """Measures each layout and prints a table."""
    options = parse_options()
    os.environ["OMP_NUM_THREADS"] = "1"
    figures, measured = {}, {}
    for layout, (ranks, builds) in layouts().items():
        if options.only and layout not in options.only:
            continue
        sides = [start_side(name, build, ranks=ranks) for name, build in builds.items()]
        rounds = run_rounds(sides, rounds=options.rounds, steps=options.steps)
        print(f"\n{layout}")
        figures[layout] = print_table(rounds, base=next(iter(builds)))
        measured.update({f"{layout}, {name}": some for name, some in rounds.items()})
    TRACE.unlink(missing_ok=True)
    if options.json is not None:
        write_record(options.json, figures, measured=measured)


def layouts() -> dict[str, tuple[int, dict[str, Build]]]:
    """Returns, for each layout, the number of ranks and the sides by name, with the base first."""
    found: dict[str, tuple[int, dict[str, Build]]] = {
        "layer": (1, sides_of(build_layer, factors=("1.25",))),
        "training step": (RANKS, sides_of(build_ours, factors=("1.25",))),
    }
    for dispatcher in ("allgather", "alltoall"):
        shared = ("--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", dispatcher, BALANCED)
        found[f"training step, experts over 2 ranks, {dispatcher}"] = (
            RANKS,
            sides_of(build_ours, *shared, factors=("1.25", "2")),
        )
        static = partial(build_ours, *shared, FACTOR, "1.25", "--global-batch-size", str(4 * MICRO_BATCH))
        found[f"stash, experts over 2 ranks, {dispatcher}"] = (
            RANKS,
            {
                "static 1.25": static,
                "with a stash": partial(static, STASH),
                "half of the pages": partial(static, STASH, PAGES, "0.5"),
            },
        )
    logged = partial(build_logged, "--global-batch-size", str(4 * MICRO_BATCH), "--expert-model-parallel-size", "2")
    found["routing trace, experts over 2 ranks"] = (
        RANKS,
        {"without": logged, "--record-routing": partial(logged, "--record-routing", str(TRACE))},
    )
    return found


def sides_of(build: Callable[..., Callable[[], None]], *flags: str, factors: tuple[str, ...]) -> dict[str, Build]:
    """Returns the base and a side for each factor. flags: for all sides."""
    static: dict[str, Build] = {f"static {factor}": partial(build, *flags, FACTOR, factor) for factor in factors}
    return {BASE: partial(build, *flags), **static}


def build_logged(*flags: str) -> Callable[[], None]:
    """Builds a training step with its meters and callbacks, as in a run. flags: added to train_step.py's."""
    run = build_run(*flags)
    run.callbacks.on_train_start(RunStart(iteration=0, train_iters=1))

    def step() -> None:
        report, _ = run_step(run)
        run.callbacks.on_step_end(run.measured(report))

    return step


def build_layer(*flags: str) -> Callable[[], None]:
    """Builds forward and backward of one layer in one process. flags: added to train_step.py's."""
    config = core_transformer_config_from_args(start_processes(argv=[*FLAGS.split(), *flags]))
    layer = build_module(get_mlp_module_spec(False, config.num_moe_experts, config.moe_grouped_gemm), config=config)
    generator = torch.Generator().manual_seed(1)
    shape = SEQUENCE, MICRO_BATCH, config.hidden_size
    x, upstream = (torch.randn(shape, generator=generator) for _ in range(2))
    x.requires_grad_()

    def step() -> None:
        for _ in range(PASSES):
            output, _ = layer(x)
            output.backward(upstream)
            x.grad = None
            layer.zero_grad()

    return step


def parse_options() -> argparse.Namespace:
    """Parses the command line of this benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="counted rounds per side (default: 30)")
    parser.add_argument("--steps", type=int, default=1, help="steps per round (default: 1)")
    parser.add_argument("--only", nargs="+", default=[], choices=[*layouts()], help="layouts to measure (default: all)")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
