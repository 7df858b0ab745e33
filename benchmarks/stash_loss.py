"""Measures whether a stash of 8 bits changes the loss that training reaches: paired runs on real text.

    python benchmarks/stash_loss.py [--seeds 8] [--steps 300] [--folder DIR] [--json FILE]

Trains each model in bf16 three times: with a stash that stores rows as they are, with --moe-paged-stash-dtype mxfp8,
and, as a control, with rows as they are and half the micro-batch size. The control changes the order of sums, and the
samples over which the router's balancing loss is averaged. See paired_losses.py. The target is a gap of the 8 bits of
at most 0.2 %, as its upper bound.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from benchmarks.paired_losses import CONTROL, Comparison, run  # noqa: E402

BATCH = 32
COMPARISON = Comparison(
    flags=f"""
    --num-layers 3 --hidden-size 64 --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 64
    --seq-length 64 --max-position-embeddings 64 --global-batch-size {BATCH} --eval-iters 100
    --lr 2e-3 --min-lr 2e-5
    """,
    sides={
        "rows as they are": f"--micro-batch-size {BATCH}",
        "8 bits": f"--micro-batch-size {BATCH} --moe-paged-stash-dtype mxfp8",
        CONTROL: f"--micro-batch-size {BATCH // 2}",
    },
    target_percent=0.2,
    seeds=8,
    steps=300,
)

if __name__ == "__main__":
    run(COMPARISON, __doc__.splitlines()[0])
