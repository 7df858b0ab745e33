"""Measures the capacity and page factors that freshly initialized routers require in each step, and simulates pools.

    python benchmarks/stash_factors.py [--only SHAPE ...] [--steps 150] [--folder DIR] [--json FILE]

Trains six small models with the routers of published models, on the text included in Python. Two processes share the
experts, with buffers that no routing can exceed (c 2) and a paged stash of factor 1.1. --record-routing records the
tokens of each expert. From this routing, which does not depend on pages, stash_plan computes the factors that the worst
rank required in each step, and simulates pools of other sizes. It also simulates eight ranks that share the experts,
with microbatches from the same steps. The simulation of the run's own pool must match the run's counters in each step.

First table, for steps 1 to 10, 11 to 50 and later steps, as median / p99 / maximum:

rows        --moe-expert-rank-capacity-factor required
pages       --moe-paged-stash-buffer-size-factor-cuda required to store every tensor
-m          the multiple of the measured requirement, given as a negative factor, with which the later steps would have
            had all pages: fresh, in a run that measured its first step, and resumed from a checkpoint of step 50

Second table: percentages of all gate_ups that are recomputed, by the device's factor.
"""

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

import pretrain_gpt  # noqa: E402
from benchmarks.sides import context as machine  # noqa: E402
from megatron.core.transformer.moe.paged_stash import Counter  # noqa: E402
from megatron.core.transformer.moe.paged_stash.sizing import factor_at  # noqa: E402
from megatron.planner.stash.outlook import needs_of_steps  # noqa: E402
from megatron.planner.stash.routing import RoutingSpan, traced_spans  # noqa: E402
from megatron.planner.stash.stages import PlannedRun, planned_run  # noqa: E402
from megatron.planner.stash.walk import Walk, walk  # noqa: E402
from megatron.tools.quickstart import Workspace, prepare, tokenizer_flags  # noqa: E402
from megatron.tools.run_log import Series, read_run  # noqa: E402
from megatron.training.arguments import read_run_config  # noqa: E402
from megatron.training.callbacks.routing_trace import read_routing  # noqa: E402

RANKS = 2
MORE_RANKS = 8
FACTORS = (0.9, 1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.4, 1.5, 1.75, 2.0)
# First and last step of each part of a run, starting at 1.
PARTS = {"1-10": (1, 10), "11-50": (11, 50), "later": (51, None)}
RESUMED_AT = 50
FLAGS = f"""
--hidden-size 64 --num-attention-heads 4 --normalization RMSNorm --position-embedding-type rope
--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
--seq-length 256 --max-position-embeddings 256
--moe-grouped-gemm --moe-token-dispatcher-type alltoall --expert-model-parallel-size {RANKS}
--moe-expert-rank-capacity-factor {RANKS} --moe-paged-stash --moe-paged-stash-buffer-size-factor-cuda 1.1
--lr 2e-3 --lr-decay-style constant --lr-warmup-iters 20 --adam-beta2 0.95 --eval-iters 0 --num-workers 0
--split 100,0,0
"""


@dataclass(frozen=True)
class Shape:
    """Flags of a model and its batch.

    micro_batch: samples of a rank's microbatch. num_microbatches: microbatches per step.
    """

    flags: str
    micro_batch: int
    num_microbatches: int

    def batch(self, ranks: int) -> list[str]:
        """Returns the batch-size flags for a step on `ranks` ranks.

        The total number of microbatches is the same as on RANKS ranks, but each rank has at least one. If a step
        requires more microbatches than were recorded, the simulation draws them from the recorded ones of that step.
        """
        num_microbatches = max(1, self.num_microbatches * RANKS // ranks)
        size = ranks * self.micro_batch * num_microbatches
        return ["--micro-batch-size", str(self.micro_batch), "--global-batch-size", str(size)]


GATED = "--swiglu --disable-bias-linear"
SHAPES = {
    "Mixtral: 8 top-2, loss 1e-2": Shape(
        f"{GATED} --num-layers 6 --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 224"
        " --moe-aux-loss-coeff 1e-2",
        micro_batch=4,
        num_microbatches=1,
    ),
    "Qwen3: 64 top-8, loss 1e-3": Shape(
        f"{GATED} --num-layers 6 --num-experts 64 --moe-router-topk 8 --moe-ffn-hidden-size 24"
        " --moe-aux-loss-coeff 1e-3",
        micro_batch=2,
        num_microbatches=2,
    ),
    "DeepSeek: 32 top-4, sigmoid, bias": Shape(
        f"{GATED} --num-layers 6 --moe-layer-freq [0]*1+[1]*5 --num-experts 32 --moe-router-topk 4"
        " --moe-ffn-hidden-size 24 --ffn-hidden-size 128 --moe-shared-expert-intermediate-size 24"
        " --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-topk-scaling-factor 2.5"
        " --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-dtype fp32"
        " --moe-router-load-balancing-type none",
        micro_batch=4,
        num_microbatches=1,
    ),
    "gpt-oss: 32 top-4, no balancing": Shape(
        "--quick-geglu --num-layers 5 --num-experts 32 --moe-router-topk 4 --moe-ffn-hidden-size 64"
        " --moe-router-load-balancing-type none",
        micro_batch=4,
        num_microbatches=1,
    ),
    "Switch: 16 top-1, loss 1e-2": Shape(
        "--disable-bias-linear --num-layers 8 --moe-layer-freq 2 --num-experts 16 --moe-router-topk 1"
        " --moe-router-pre-softmax --moe-ffn-hidden-size 256 --moe-aux-loss-coeff 1e-2",
        micro_batch=8,
        num_microbatches=1,
    ),
    "DBRX: 16 top-4, loss 5e-2": Shape(
        f"{GATED} --num-layers 6 --num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 112"
        " --moe-aux-loss-coeff 5e-2",
        micro_batch=1,
        num_microbatches=4,
    ),
}


def main() -> None:
    """Trains the shapes and prints both tables."""
    options = parse_options()
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workspace = Workspace(folder, (folder / "text.jsonl",))
        prepare(workspace)
        shapes = {
            name: measure(name, workspace, steps=options.steps)
            for name in SHAPES
            if not options.only or any(text in name for text in options.only)
        }
    print_tables(shapes)
    if options.json is not None:
        options.json.write_text(json.dumps({"steps": options.steps, "shapes": shapes, **machine()}, indent=1) + "\n")


def measure(name: str, workspace: Workspace, *, steps: int) -> dict[str, Any]:
    """Trains a shape, unless the folder contains its run, and returns results by number of ranks that share experts."""
    shape, out = SHAPES[name], workspace.folder / name.partition(":")[0]
    trace = out / "routing.jsonl.gz"
    flags = [*shlex.split(FLAGS + shape.flags), *tokenizer_flags(workspace), "--data-path", workspace.tokens]
    words = [str(word) for word in (*flags, "--train-iters", steps)]
    if not trace.exists():
        train([*words, *shape.batch(RANKS), "--save", str(out), "--record-routing", str(trace)])
    recorded = sum(1 for _ in read_routing(trace))
    if recorded != steps:
        raise ValueError(f"--steps is {steps}, but {trace} has {recorded}: use that number, or a different --folder")
    found = {}
    for ranks in (RANKS, MORE_RANKS):
        # The capacity lets a rank receive all rows, so that no step overflows.
        sizes = ["--expert-model-parallel-size", str(ranks), "--moe-expert-rank-capacity-factor", str(ranks)]
        run, spans = planned([*words, *shape.batch(ranks), *sizes], trace, ranks=ranks)
        if ranks == RANKS:
            check_simulation(read_run(out).series, walk(run, run.flags, spans=spans, grows=True))
        found[str(ranks)] = figures_of(run, spans)
    return found


def train(words: Sequence[str]) -> None:
    """Runs pretrain_gpt.py on RANKS single-threaded processes."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    subprocess.run(
        [*torchrun, str(ROOT / "pretrain_gpt.py"), *words, "--log-interval", "50"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
    )


def planned(words: Sequence[str], trace: Path, *, ranks: int) -> tuple[PlannedRun, list[RoutingSpan]]:
    """Returns a planned run with these flags on that many ranks, and its steps from a recorded routing."""
    run_config = read_run_config([*words, "--dry-run", "--world-size", str(ranks)])
    # The experts of the recorded runs, on a CPU, are not padded.
    run = planned_run(run_config.changed(moe_expert_row_alignment=1), pretrain_gpt.model_provider)
    spans, _ = traced_spans(read_routing(trace), run, num_groups=run.ranks.num_groups, seed=run_config.training.seed)
    return run, spans


def check_simulation(logged: Mapping[str, Series], simulated: Walk) -> None:
    """Raises AssertionError unless the simulated recomputation matches the run's in each step, for the run's pool.

    logged: the run's series by name.
    """
    counted = sum(stage.counters[Counter.DROPPED_GATE_UP].sum(axis=1) for stage in simulated.stages)
    in_run = logged["stash/rungs/dropped_gate_up"].values
    assert (counted == in_run).all(), f"dropped_gate_up: {counted.tolist()} simulated, {in_run.tolist()} in the run"


def figures_of(run: PlannedRun, spans: Sequence[RoutingSpan]) -> dict[str, Any]:
    """Returns the results for both tables."""
    needs = needs_of_steps(run, spans)
    recomputed = {}
    for factor in FACTORS:
        flags = replace(run.flags, moe_paged_stash_buffer_size_factor_cuda=factor)
        recomputed[f"{factor:g}"] = recomputed_shares(walk(run, flags, spans=spans, grows=True), groups=num_groups(run))
    return {
        "rows": by_part(needs.rows),
        "pages": by_part(needs.pages),
        "learned": learned_multiples(run, spans),
        "recomputed": recomputed,
    }


def by_part(needed: np.ndarray) -> dict[str, dict[str, float]]:
    """Returns median, p99 and maximum over the steps of each part. needed: [S], fp64; the last part may be missing."""
    found = {}
    for part, (first, last) in PARTS.items():
        values = needed[first - 1 : last].tolist()
        if values:
            found[part] = spread(values)
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """Returns the median, p99 and maximum of the values."""
    return {"median": factor_at(0.5, values), "p99": factor_at(0.99, values), "most": max(values)}


def num_groups(run: PlannedRun) -> int:
    """Returns the number of expert groups that a rank stashes in a step."""
    return sum(move.is_taken for move in run.stages[0].moves(run.num_microbatches, run.prefetch_groups))


def recomputed_shares(simulated: Walk, *, groups: int) -> dict[str, dict[str, float]]:
    """Returns the fraction of recomputed gate_ups on the worst rank, and the fraction of steps with any.

    groups: expert groups that a rank stashes in a step. Also counts attempts that overflowed.
    """
    (stage,) = simulated.stages
    gate_ups = stage.counters[Counter.DROPPED_GATE_UP].max(axis=1) / groups
    found = {}
    for part, (first, last) in PARTS.items():
        here = slice(first - 1, last)
        if len(gate_ups[here]):
            found[part] = {
                "gate_up": float(gate_ups[here].mean()),
                "steps_with_gate_up": float((gate_ups[here] > 0).mean()),
                "overflows": int(simulated.discards[here].sum()),
            }
    return found


def learned_multiples(run: PlannedRun, spans: Sequence[RoutingSpan]) -> dict[str, dict[str, float]]:
    """Returns the pages that later steps required over the measured requirement, on the worst rank.

    fresh: only the first step is measured. resumed: all steps up to RESUMED_AT are measured, over all ranks.
    """
    (span,), (stage,) = spans, walk(run, run.flags, spans=spans, grows=False).stages
    ranks = run.ranks
    capacity = run.flags.moe_expert_rank_capacity_factor
    assert capacity is not None, "FLAGS set it"
    needs = run.needs(run.flags, 0, num_microbatches=run.num_microbatches, max_rows=ranks.max_rows(capacity))
    # Layer -> [S, N], fp64.
    shares = {layer: rows.max(axis=0) / ranks.balanced_rows for layer, rows in span.rows.items()}
    of_first = [
        needs.pages_of_shares({layer: float(share[0, rank]) for layer, share in shares.items()})
        for rank in range(stage.pages_wanted.shape[1])
    ]
    of_many = needs.pages_of_shares({layer: float(share[:RESUMED_AT].max()) for layer, share in shares.items()})
    found = {}
    for name, measured in (("fresh", np.array(of_first)), ("resumed", np.array(of_many))):
        multiples = (stage.pages_wanted[RESUMED_AT:] / np.maximum(measured, 1)).max(axis=1).tolist()
        if multiples:
            found[name] = spread(multiples)
    return found


def print_tables(shapes: dict[str, Any]) -> None:
    """Prints the factors that steps required, then the tensors that pools of each size recompute."""
    rows = {f"{name}, {ranks}": found for name, by_ranks in shapes.items() for ranks, found in by_ranks.items()}
    columns = [f"{what} {part}" for what in ("rows", "pages") for part in PARTS] + ["-m fresh", "-m resumed"]
    print(f"\n{'shape, ranks':38}" + "".join(f"{column:>20}" for column in columns))
    for name, found in rows.items():
        cells = [found[what].get(part) for what in ("rows", "pages") for part in PARTS]
        cells += [found["learned"].get(kind) for kind in ("fresh", "resumed")]
        texts = ["" if cell is None else " / ".join(f"{number:.2f}" for number in cell.values()) for cell in cells]
        print(f"{name:38}" + "".join(f"{text:>20}" for text in texts))
    print(f"\n{'gate_up recomputed, %':38}" + "".join(f"{factor:>15g}" for factor in FACTORS))
    for name, found in rows.items():
        shares = [found["recomputed"][f"{factor:g}"].values() for factor in FACTORS]
        texts = [" / ".join(f"{100 * part['gate_up']:.0f}" for part in by_part) for by_part in shares]
        print(f"{name:38}" + "".join(f"{text:>15}" for text in texts))


def parse_options() -> argparse.Namespace:
    """Parses the command line of this benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="shapes whose name contains one of these words")
    parser.add_argument("--steps", type=int, default=150, help="steps to train (default: 150)")
    parser.add_argument("--folder", type=Path, help="folder for text, tokens and runs, which are reused if they exist")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    for text in options.only:
        if not any(text in name for name in SHAPES):
            parser.error(f"--only is {text!r}, which no shape name contains; shapes: {'; '.join(SHAPES)}")
    return options


if __name__ == "__main__":
    main()
