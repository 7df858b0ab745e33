"""Measures whether a stash of 8 bits changes the loss that training reaches: paired runs on real text.

    python benchmarks/stash_loss.py [--seeds 8] [--steps 300] [--folder DIR] [--json FILE]

Trains a small mixture of experts in bf16 on the text included in Python, for each seed three times, with the same
initial weights and batches: with a stash that stores rows as they are, with --moe-paged-stash-dtype mxfp8, and, as a
control, with rows as they are and half the micro-batch size, which changes only the order of sums. The loss is that of
the validation set after the last step. Training amplifies any difference in rounding, so pairs differ even in the
control. Prints, for the 8 bits and for the control, the mean difference of the pairs relative to the loss, and its
two-sided 95 % confidence interval by Student's t distribution. The target is an upper bound of at most 0.2 %.
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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from benchmarks.sides import context as machine  # noqa: E402
from megatron.tools import preprocess_data, python_corpus, train_tokenizer  # noqa: E402
from megatron.tools.run_log import EVALUATION_LINE  # noqa: E402

TARGET_PERCENT = 0.2
BATCH, VOCAB_SIZE, TEXT_BYTES = 32, 512, 5_000_000
SIDES = {
    "rows as they are": ["--micro-batch-size", str(BATCH)],
    "8 bits": ["--micro-batch-size", str(BATCH), "--moe-paged-stash-dtype", "mxfp8"],
    "control": ["--micro-batch-size", str(BATCH // 2)],
}
FLAGS = f"""
--num-layers 3 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2
--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-grouped-gemm --moe-aux-loss-coeff 1e-2
--moe-expert-rank-capacity-factor 1 --moe-paged-stash --moe-paged-stash-buffer-size-factor-cuda 1.1
--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --bf16
--seq-length 64 --max-position-embeddings 64 --global-batch-size {BATCH}
--lr 2e-3 --min-lr 2e-5 --lr-decay-style cosine --lr-warmup-iters 40 --adam-beta2 0.95 --clip-grad 1.0
--num-workers 0 --split 95,5,0 --eval-iters 100
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


def main() -> None:
    """Trains all sides and prints their losses and gaps."""
    options = parse_options()
    losses: dict[str, list[float]] = {side: [] for side in SIDES}
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        data = prepare(folder)
        print(f"{'seed':>4}" + "".join(f"{side:>20}" for side in SIDES))
        pool = stack.enter_context(ThreadPoolExecutor(os.cpu_count()))
        train = partial(validation_loss, data, steps=options.steps)
        seeds = [str(seed) for seed in range(1, options.seeds + 1)]
        runs = [[pool.submit(train, [*more, "--seed", seed]) for more in SIDES.values()] for seed in seeds]
        for seed, of_seed in zip(seeds, runs, strict=True):
            for own, run in zip(losses.values(), of_seed, strict=True):
                own.append(run.result())
            print(f"{seed:>4}" + "".join(f"{of_side[-1]:>20.5f}" for of_side in losses.values()), flush=True)
    reference = losses["rows as they are"]
    gaps = {side: Gap.of(losses[side], reference) for side in ("8 bits", "control")}
    for side, gap in gaps.items():
        print(f"{side}: {gap.mean:+.3f} % of the loss (95 %: {gap.lower:+.3f} to {gap.upper:+.3f})")
    holds = gaps["8 bits"].upper <= TARGET_PERCENT
    print(f"{'PASS' if holds else 'FAIL'}: the upper bound of 8 bits must be at most {TARGET_PERCENT} %")
    if options.json is not None:
        record = {"steps": options.steps, "losses": losses, "gaps": {side: gap._asdict() for side, gap in gaps.items()}}
        options.json.write_text(json.dumps({**record, **machine()}, indent=1) + "\n")
    sys.exit(not holds)


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


def validation_loss(data: Sequence[str], flags: Sequence[str], *, steps: int) -> float:
    """Trains a model in a process with one thread and returns its validation loss after the last step."""
    length = ["--train-iters", str(steps), "--eval-interval", str(steps), "--log-interval", str(steps)]
    words = [str(word) for word in (*shlex.split(FLAGS), *data, *length, *flags)]
    run = subprocess.run(
        [sys.executable, str(ROOT / "pretrain_gpt.py"), *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return [float(found[3]) for found in EVALUATION_LINE.finditer(run.stdout) if found[1] == "validation"][-1]


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=8, choices=sorted(T_975), help="number of pairs (default: 8)")
    parser.add_argument("--steps", type=int, default=300, help="steps of each run (default: 300)")
    parser.add_argument("--folder", type=Path, help="keep text, tokenizer and tokens here, and reuse them")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
