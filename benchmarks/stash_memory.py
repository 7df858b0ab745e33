"""Counts a rank's bytes of expert activations at the peak of a training step, with a stash and with its alternatives.

    python benchmarks/stash_memory.py [--only TEXT ...] [--json FILE] [--plot FILE.svg]
    python benchmarks/stash_memory.py --read FILE --plot FILE.svg

Every line is a separate run of the code of pretrain_gpt.py: 8 layers of 16 experts, top-2, fp32, over 8 processes that
are pipeline stages times ranks of experts. A forced routing gives the experts of rank 0 a multiple of the balanced
number of rows, which is also the smallest sufficient c (*needs*). The line describes the rank with the most bytes.

dropless  buffers of the number of received rows, for which the host waits
static    buffers of c times the balanced number of rows; no c below `needs`, which would lose rows
stash     static, and pages for the peak requirement of steps so far plus 10 %
rungs     static, and half of the pages of that peak: tensors without pages are recomputed

*held*, MiB: x, routing weights and gate_up of all passes whose backward has not run yet, at the moment between
two forwards of expert layers when they are largest: buffers, allocated pages, and buffers of restored rows. Additional
memory of a forward in progress and gradients are not counted. *live*: rows in the pages. *arena*: the pool's pages.
*sets*: buffers outside of pages, in units of the largest group's buffers; the law allows one, the scratch. Reported
separately: *index*, integers that the dispatch stores at that moment; *wire*, the maximum of its buffers in any
forward; *dropped*, recomputed tensors; *rss*, the growth of a process's resident memory in the steps, at its peak,
which differs between the lines of a layout only by the experts' part. glibc keeps freed memory in all of them,
including holes, as configured by pretrain_gpt.py.

Asserted for every rank of every run: pages in use <= live bytes / page + 1 for each tensor, at all times; buffers
outside of pages <= one working set at the peak.
"""

import argparse
import json
import os
import sys
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

import pretrain_gpt  # noqa: E402
from benchmarks.held_bytes import ExpertBytes, Peaks  # noqa: E402
from benchmarks.memory_plot import drawing  # noqa: E402
from benchmarks.sides import context as machine  # noqa: E402
from benchmarks.sides import free_port  # noqa: E402
from megatron.core.device import keep_cpu_heap, peak_memory_bytes  # noqa: E402
from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: E402
from megatron.core.transformer.moe.paged_stash import Counter  # noqa: E402
from megatron.core.transformer.moe.permutation import Routing  # noqa: E402
from megatron.training.command_line.config_builder import run_config_of  # noqa: E402
from megatron.training.initialize import start_processes  # noqa: E402
from megatron.training.run import TrainingRun  # noqa: E402
from megatron.training.setup import setup_data, setup_run  # noqa: E402
from megatron.training.training import run_step  # noqa: E402

RANKS, EXPERTS, TOPK, SEQUENCE = 8, 16, 2, 128
WARM_STEPS = 2  # pools are sized by measured peaks from the second step on
FLAGS = f"""
--num-layers 8 --hidden-size 64 --num-attention-heads 4 --num-experts {EXPERTS} --moe-router-topk {TOPK}
--moe-ffn-hidden-size 128 --moe-grouped-gemm --moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall
--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
--seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE} --micro-batch-size 2
--mock-data --tokenizer-type NullTokenizer --vocab-size 512 --num-workers 0
--lr 1e-4 --lr-decay-style constant --train-iters 100000 --eval-iters 0
"""
STASH = "--moe-paged-stash --moe-paged-stash-page-size 16"
FACTOR = "--moe-paged-stash-buffer-size-factor-cuda"
KINDS = {
    "dropless": "",
    "static": "",
    "stash": f"{STASH} {FACTOR} -1.1",
    "rungs": f"{STASH} {FACTOR} -0.5",
}
# Fraction of the tokens whose first choice is expert 0.
SKEWS = {"balanced": 0.0, "half hot": 0.5, "one hot": 1.0}


@dataclass(frozen=True)
class Layout:
    """Numbers of pipeline stages and of model chunks per stage. All ranks of a stage share the experts."""

    stages: int
    chunks: int = 1
    ranks: int = RANKS

    @property
    def expert_ranks(self) -> int:
        """Number of ranks that share the experts of a layer."""
        return self.ranks // self.stages

    @property
    def microbatches(self) -> int:
        """Number of microbatches, large enough for the schedule's steady state."""
        return 2 * self.stages

    @property
    def flags(self) -> list[str]:
        """Flags of pretrain_gpt.py for the layout."""
        sizes = {
            "--pipeline-model-parallel-size": self.stages,
            "--expert-model-parallel-size": self.expert_ranks,
            "--global-batch-size": 2 * self.expert_ranks * self.microbatches,
        }
        if self.chunks > 1:
            sizes["--num-virtual-stages-per-pipeline-rank"] = self.chunks
        return [text for flag, size in sizes.items() for text in (flag, str(size))]

    def __str__(self) -> str:
        return f"pp{self.stages}" + (f" vpp{self.chunks}" if self.chunks > 1 else "") + f" ep{self.expert_ranks}"


@dataclass(frozen=True)
class Case:
    """One run. capacity: capacity factor c; None for dropless."""

    layout: Layout
    skew: str
    kind: str
    capacity: float | None

    @property
    def argv(self) -> list[str]:
        """Command line of pretrain_gpt.py."""
        factor = [] if self.capacity is None else ["--moe-expert-rank-capacity-factor", str(self.capacity)]
        return [*FLAGS.split(), *self.layout.flags, *factor, *KINDS[self.kind].split()]

    @property
    def factor_needed(self) -> float:
        """Rows of the fullest rank over the balanced number."""
        own = EXPERTS // self.layout.expert_ranks
        chosen = forced_choices(SKEWS[self.skew], num_tokens=EXPERTS * SEQUENCE)
        return float((chosen < own).float().mean()) * self.layout.expert_ranks

    def __str__(self) -> str:
        capacity = "" if self.capacity is None else f" c{self.capacity:g}"
        return f"{self.layout}, {self.skew}, {self.kind}{capacity}"


# Capacity factors above the number of ranks do not make buffers larger, because there are no more rows.
CAPACITIES = {
    Layout(1): (1.2, 2.0, 4.5, 8.0),
    Layout(2): (4.0,),
    Layout(4): (2.0,),
    Layout(2, chunks=2): (4.0,),
}


def all_cases() -> list[Case]:
    """Returns all runs whose buffers are large enough for the rows."""
    cases = []
    for layout, capacities in CAPACITIES.items():
        # All skews are only needed without a pipeline.
        for skew in SKEWS if layout.stages == 1 else ("balanced", "one hot"):
            found = [Case(layout, skew, kind, c) for c in capacities for kind in ("static", "stash", "rungs")]
            cases.append(Case(layout, skew, "dropless", None))
            cases += [case for case in found if case.capacity is None or case.capacity >= case.factor_needed]
    return cases


def forced_choices(hot_share: float, *, num_tokens: int) -> Tensor:
    """Returns the experts of each token, [T, K], int64.

    The first hot_share of the tokens use expert 0 and one other expert. The rest use all experts in turn.
    """
    tokens = torch.arange(num_tokens)
    in_turn = (tokens.unsqueeze(1) * TOPK + torch.arange(TOPK)) % EXPERTS
    hot = torch.stack([torch.zeros_like(tokens), 1 + tokens % (EXPERTS - 1)], dim=1)
    return torch.where((tokens < hot_share * num_tokens).unsqueeze(1), hot, in_turn)


def force_routing(router: nn.Module, hot_share: float) -> None:
    """Replaces the router's choices. Routing weights and their gradients are unchanged."""

    def choose(router: nn.Module, inputs: Any, chosen: Routing) -> Routing:
        forced = forced_choices(hot_share, num_tokens=len(chosen.indices)).to(chosen.indices.device)
        return Routing(chosen.weights, forced, chosen.num_experts)

    router.register_forward_hook(choose)


@dataclass(frozen=True)
class RankFigures:
    """One rank's measurements.

    arena_bytes: size of the pool's device pages. dropped: tensors recomputed in a step. voids: discarded attempts.
    """

    peaks: Peaks
    arena_bytes: int
    dropped: int
    voids: int
    rss_bytes: int

    def check_memory_law(self) -> None:
        """Raises AssertionError if more memory is in use than rows, page tails and working sets account for."""
        peaks, held = self.peaks, self.peaks.held
        assert peaks.excess_pages <= 0, f"{peaks.excess_pages} pages more than live rows fill plus one per tensor"
        outside, allowed = held.outside, peaks.working_set
        assert self.arena_bytes == 0 or outside <= allowed, f"{outside} bytes outside of pages, {allowed} allowed"
        assert held.pages <= self.arena_bytes, f"{held.pages} bytes of pages in a pool of {self.arena_bytes}"


def train(case: Case) -> RankFigures:
    """Runs training steps as a rank of torchrun, and measures the last one."""
    args = start_processes(argv=case.argv)
    run = setup_run(run_config_of(args), pretrain_gpt.model_provider, forward_step_func=pretrain_gpt.forward_step)
    setup_data(run, pretrain_gpt.train_valid_test_datasets_provider, num_workers=0)
    layers = [part for chunk in run.model for part in chunk.modules() if isinstance(part, MoELayer)]
    for layer in layers:
        force_routing(layer.router, SKEWS[case.skew])
    before = peak_memory_bytes(run.device)
    for _ in range(WARM_STEPS):
        run_step(run)
    # Setup has already called keep_cpu_heap. The pool of a run keeps restored memory if the heap does not.
    with ExpertBytes(layers, keeps_restored=not keep_cpu_heap()) as counted:
        run_step(run)
    return figures_of(run, counted.peaks, rss=peak_memory_bytes(run.device) - before)


def run_rank(case: Case, connection: Connection, *, rank: int, port: int) -> None:
    """Runs one process of a case and sends its results."""
    torch.set_num_threads(1)
    sizes = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": case.layout.ranks, "MASTER_PORT": port}
    os.environ.update({name: str(size) for name, size in sizes.items()}, MASTER_ADDR="127.0.0.1")
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        connection.send(train(case))
    dist.destroy_process_group()


def figures_of(run: TrainingRun, peaks: Peaks, *, rss: int) -> RankFigures:
    """Returns the results of this rank's last step."""
    step = None if run.expert_memory is None else run.expert_memory.last_step
    if step is None or step.layout is None:
        return RankFigures(peaks, arena_bytes=0, dropped=0, voids=0, rss_bytes=rss)
    dropped = step.counters[Counter.DROPPED_GATE_UP]
    arena = step.layout.device_pages * step.layout.page_bytes
    return RankFigures(peaks, arena_bytes=arena, dropped=dropped, voids=step.num_discards, rss_bytes=rss)


def measure(case: Case) -> list[RankFigures]:
    """Runs a case in separate processes, checks the memory law and returns the results of each rank."""
    context, port = get_context("forkserver"), free_port()
    ranks = []
    for rank in range(case.layout.ranks):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=run_rank, args=(case, theirs), kwargs={"rank": rank, "port": port})
        process.start()
        theirs.close()
        ranks.append((process, ours))
    figures = [connection.recv() for _, connection in ranks]
    for process, _ in ranks:
        process.join()
    for one in figures:
        one.check_memory_law()
    return figures


def line_of(case: Case, ranks: list[RankFigures]) -> dict[str, Any]:
    """Returns a table line: the results of the rank with the most bytes, and maxima over ranks."""
    most = max(ranks, key=lambda one: one.peaks.held.activations)
    held = most.peaks.held
    return {
        "layout": str(case.layout),
        "skew": case.skew,
        "needs": case.factor_needed,
        "kind": case.kind,
        "capacity": case.capacity,
        "held_bytes": held.activations,
        "sets": held.outside / most.peaks.working_set if most.peaks.working_set else None,
        "working_set_bytes": most.peaks.working_set,
        "arena_bytes": most.arena_bytes,
        "dropped": most.dropped,
        "wire_bytes": max(one.peaks.wire for one in ranks),
        "rss_bytes": max(one.rss_bytes for one in ranks),
        **{f"at_peak_{name}": number for name, number in asdict(held).items()},
    }


def print_line(line: dict[str, Any]) -> None:
    """Prints one line of the table."""
    mib = [line[name] / 2**20 for name in ("held_bytes", "at_peak_live", "arena_bytes", "at_peak_index", "wire_bytes")]
    capacity = "" if line["capacity"] is None else f"{line['capacity']:g}"
    sets = "" if line["sets"] is None else f"{line['sets']:.2f}"
    print(
        f"{line['layout']:14}{line['skew']:10}{line['needs']:6.2f}  {line['kind']:10}{capacity:>5}"
        + "".join(f"{number:8.1f}" for number in mib)
        + f"{sets:>6}{line['dropped']:9}{line['rss_bytes'] / 2**20:8.0f}",
        flush=True,
    )


def main() -> None:
    """Measures or reads the lines, and prints the table."""
    options = parse_options()
    os.environ["OMP_NUM_THREADS"] = "1"
    print(
        f"{'layout':14}{'skew':10}{'needs':>6}  {'kind':10}{'c':>5}"
        f"{'held':>8}{'live':>8}{'arena':>8}{'index':>8}{'wire':>8}{'sets':>6}{'dropped':>9}{'rss':>8}"
    )
    lines: list[dict[str, Any]] = [] if options.read is None else json.loads(options.read.read_text())["lines"]
    for line in lines:
        print_line(line)
    for case in all_cases() if options.read is None else ():
        if all(text in str(case) for text in options.only):
            lines.append(line_of(case, measure(case)))
            print_line(lines[-1])
            if options.json is not None:
                options.json.write_text(json.dumps({"lines": lines, **machine()}, indent=1) + "\n")
    if options.plot is not None:
        options.plot.write_text(drawing(lines, layout=str(Layout(1))))


def parse_options() -> argparse.Namespace:
    """Parses the command line of this benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        help='runs whose names contain all of these texts, for example "pp1 ep8" "one hot"',
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="also draw memory over the capacity factor")
    parser.add_argument(
        "--read", type=Path, metavar="FILE", help="measure nothing, and use the results of an earlier --json"
    )
    return parser.parse_args()


if __name__ == "__main__":
    get_context("forkserver").set_forkserver_preload(["benchmarks.stash_memory"])
    main()
