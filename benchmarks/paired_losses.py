"""Trains paired runs on real text and compares the losses that they reach. Contains no settings of a comparison.

The sides of a comparison train a small mixture of experts on the text included in Python, for each seed with the same
initial weights and batches. The loss is that of the validation set after the last step. Training amplifies any
difference in rounding, so losses differ even between sides that differ in nothing else. A comparison therefore has a
control, a side that differs from the reference only by its rounding, or hardly by more. The gap of a side is the mean
difference of its pairs relative to the loss of the reference, with the two-sided 95 % confidence interval by Student's
t distribution.
"""

import argparse
import contextlib
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from benchmarks.sides import context as machine
from megatron.tools import preprocess_data, python_corpus, train_tokenizer
from megatron.tools.run_log import EVALUATION_LINE

ROOT = Path(__file__).resolve().parent.parent
CONTROL = "control"
VOCAB_SIZE, TEXT_BYTES = 512, 5_000_000
# Settings of all comparisons: a small model of today's kind, in bf16, with static buffers and a stash.
FLAGS = """
--num-attention-heads 4 --group-query-attention --num-query-groups 2
--moe-grouped-gemm --moe-aux-loss-coeff 1e-2
--moe-expert-rank-capacity-factor 1 --moe-paged-stash --moe-paged-stash-buffer-size-factor-cuda 1.1
--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --bf16
--lr-decay-style cosine --lr-warmup-iters 40 --adam-beta2 0.95 --clip-grad 1.0
--num-workers 0 --split 95,5,0
"""
# Quantiles of Student's t distribution with n - 1 degrees of freedom at 97.5 %, for n pairs.
T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262, 12: 2.201}


class Gap(NamedTuple):
    """Difference of paired losses in percent of the loss: mean, and bounds of its 95 % confidence interval."""

    mean: float
    lower: float
    upper: float

    @staticmethod
    def of(losses: Sequence[float], reference: Sequence[float]) -> "Gap":
        """Returns the gap of losses to those of the reference, pair by pair."""
        percent = [100 * (own / other - 1) for own, other in zip(losses, reference, strict=True)]
        mean = statistics.fmean(percent)
        half = T_975[len(percent)] * statistics.stdev(percent) / math.sqrt(len(percent))
        return Gap(mean, mean - half, mean + half)


class Comparison(NamedTuple):
    """Sides to compare: `flags` in addition to FLAGS for all of them, and the flags of each by its name.

    The first side is the reference, and CONTROL is among the others. target_percent: the largest upper bound of the gap
    of each side except the control. seeds, steps: defaults of the command line.
    """

    flags: str
    sides: Mapping[str, str]
    target_percent: float
    seeds: int
    steps: int

    def gaps(self, losses: Mapping[str, Sequence[float]]) -> dict[str, Gap]:
        """Returns the gaps of all sides except the reference; losses: of each side, in the order of the seeds."""
        reference, *others = self.sides
        return {side: Gap.of(losses[side], losses[reference]) for side in others}


def run(comparison: Comparison, description: str) -> None:
    """Reads the command line, trains all sides, and prints their losses and gaps. Exits with 1 above the target."""
    options = parse_options(comparison, description)
    sides = comparison.sides
    losses: dict[str, list[float]] = {side: [] for side in sides}
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flags = [*shlex.split(FLAGS), *shlex.split(comparison.flags), *prepare(folder)]
        print(f"{'seed':>4}" + "".join(f"{side:>20}" for side in sides))
        pool = stack.enter_context(ThreadPoolExecutor(os.cpu_count()))
        stack.callback(pool.shutdown, cancel_futures=True)  # after a failed run, do not start the others
        seeds = [str(seed) for seed in range(1, options.seeds + 1)]
        runs = [
            [
                pool.submit(validation_loss, [*flags, *shlex.split(own), "--seed", seed], steps=options.steps)
                for own in sides.values()
            ]
            for seed in seeds
        ]
        for seed, of_seed in zip(seeds, runs, strict=True):
            for of_side, one in zip(losses.values(), of_seed, strict=True):
                of_side.append(one.result())
            print(f"{seed:>4}" + "".join(f"{of_side[-1]:>20.5f}" for of_side in losses.values()), flush=True)
    gaps = comparison.gaps(losses)
    for side, gap in gaps.items():
        print(f"{side}: {gap.mean:+.3f} % of the loss (95 %: {gap.lower:+.3f} to {gap.upper:+.3f})")
    target = comparison.target_percent
    hold = {side: gap.upper <= target for side, gap in gaps.items() if side != CONTROL}
    for side, holds in hold.items():
        print(f"{'PASS' if holds else 'FAIL'}: the upper bound of {side} must be at most {target} %")
    if options.json is not None:
        record = {"steps": options.steps, "losses": losses, "gaps": {side: gap._asdict() for side, gap in gaps.items()}}
        options.json.write_text(json.dumps({**record, **machine()}, indent=1) + "\n")
    sys.exit(not all(hold.values()))


def prepare(folder: Path) -> list[str]:
    """Creates the text, a small tokenizer and the tokens, unless the folder has them. Returns flags of the data.

    With a small vocabulary the loss of a small model soon changes slowly, and differences between runs are small.
    """
    text, tokenizer, tokens = folder / "text.jsonl", folder / "tokenizer.json", folder / "tokens"
    model = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer)]
    if not Path(f"{tokens}_text_document.idx").exists():  # written last
        folder.mkdir(parents=True, exist_ok=True)
        size = ["--vocab-size", str(VOCAB_SIZE)]
        statuses = (
            python_corpus.main(["--output", str(text), "--max-bytes", str(TEXT_BYTES)]),
            train_tokenizer.main(["--input", str(text), "--output", str(tokenizer), *size]),
            preprocess_data.main(["--input", str(text), "--output-prefix", str(tokens), "--append-eod", *model]),
        )
        if any(statuses):
            raise SystemExit("the text could not be prepared")
    return [*model, "--data-path", f"{tokens}_text_document"]


def validation_loss(flags: Sequence[str], *, steps: int) -> float:
    """Trains a model in a process with one thread and returns its validation loss after the last step."""
    length = ["--train-iters", str(steps), "--eval-interval", str(steps), "--log-interval", str(steps)]
    training = subprocess.run(
        [sys.executable, str(ROOT / "pretrain_gpt.py"), *flags, *length],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return [float(found[3]) for found in EVALUATION_LINE.finditer(training.stdout) if found[1] == "validation"][-1]


def parse_options(comparison: Comparison, description: str) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=description)
    seeds, steps = comparison.seeds, comparison.steps
    parser.add_argument(
        "--seeds", type=int, default=seeds, choices=sorted(T_975), help=f"number of pairs (default: {seeds})"
    )
    parser.add_argument("--steps", type=int, default=steps, help=f"steps of each run (default: {steps})")
    parser.add_argument("--folder", type=Path, help="keep text, tokenizer and tokens here, and reuse them")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parser.parse_args()
