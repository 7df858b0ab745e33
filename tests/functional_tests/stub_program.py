"""A stand-in for pretrain_gpt that logs made-up steps, so that the runner can be tested without training."""

import argparse
import json
import os
import sys
from pathlib import Path


def main(argv: list[str]) -> None:
    """Writes `--train-iters` steps to steps.jsonl on rank 0. The losses depend only on `--lr`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensorboard-dir", type=Path)
    parser.add_argument("--train-iters", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--stray-rank", type=int, default=-1)
    args = parser.parse_args(argv)
    if os.environ["RANK"] == str(args.stray_rank):
        print("error: --stray-rank is wrong", file=sys.stderr)
        raise SystemExit(1)
    if os.environ["RANK"] == "0":
        lines = [{"iteration": i, "lm_loss": args.lr / i, "grad_norm": 1.0} for i in range(1, args.train_iters + 1)]
        lines.append({"iteration": args.train_iters, "validation_loss": 0.5})
        Path("steps.jsonl").write_text("".join(json.dumps({**line, "seconds": os.getpid()}) + "\n" for line in lines))
