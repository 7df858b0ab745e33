"""Measures whether experts that compute in 8 bits change the loss that training reaches: paired runs on real text.

    python benchmarks/fp8_loss.py [--seeds 5] [--steps 200] [--folder DIR] [--json FILE]

Trains each model four times: in bf16, with experts in 8 bits by each of the two recipes, and, as a control, in bf16
with another implementation of attention. The control changes only the rounding. Half the micro-batch size, the control
of stash_loss.py, would also change the samples over which the router's balancing loss is averaged. A row of x has one
block of 128 elements or four of 32, and a row of gate_up has twice as many. All sides compute in the pages of a stash,
which changes no bit. See paired_losses.py. The target is a gap of each recipe of at most 0.5 %, as its upper bound.

The learning rate is half of that of stash_loss.py. With its rate, a difference in rounding alone changes the loss of
this model by 0.7 % (standard deviation of four pairs), so that five pairs could not show a gap of 0.5 %.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from benchmarks.paired_losses import CONTROL, Comparison, run  # noqa: E402

COMPARISON = Comparison(
    flags="""
    --num-layers 3 --hidden-size 128 --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 128
    --seq-length 64 --max-position-embeddings 64 --global-batch-size 32 --micro-batch-size 32 --eval-iters 50
    --lr 1e-3 --min-lr 1e-5
    """,
    sides={
        "bf16": "",
        "blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
        "mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8",
        CONTROL: "--attention-backend unfused",
    },
    target_percent=0.5,
    seeds=5,
    steps=200,
)

if __name__ == "__main__":
    run(COMPARISON, __doc__.splitlines()[0])
