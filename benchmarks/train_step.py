"""Compares training steps of this framework with the same model in plain PyTorch, interleaved in one run.

    python benchmarks/train_step.py [--rounds 8] [--steps 3] [--json FILE]

Prints CPU seconds, wall time and peak memory of a step, and ours / plain as medians over the rounds. Two processes
with one thread each train one model: 4 layers, hidden 256, 8 experts top-2, sequence 256,
microbatch 4, fp32, AdamW with clipping. While one side steps, the other waits.
"""

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

import pretrain_gpt  # noqa: E402
from benchmarks.plain_model import PlainConfig, PlainModel  # noqa: E402
from benchmarks.sides import print_table, run_rounds, start_side, write_record  # noqa: E402
from megatron.core.device import keep_cpu_heap  # noqa: E402
from megatron.training.command_line.config_builder import run_config_of  # noqa: E402
from megatron.training.initialize import start_processes  # noqa: E402
from megatron.training.run import TrainingRun  # noqa: E402
from megatron.training.setup import setup_data, setup_run  # noqa: E402
from megatron.training.training import run_step  # noqa: E402

RANKS = 2
SEQUENCE, MICRO_BATCH = 256, 4
# Suffixes of the names of PlainGroupedMoE's expert weights.
EXPERT_WEIGHTS = (".fc1", ".fc2")
FLAGS = f"""
--num-layers 4 --hidden-size 256 --num-attention-heads 4 --num-experts 8 --moe-router-topk 2
--moe-ffn-hidden-size 512 --moe-grouped-gemm --moe-router-load-balancing-type none
--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
--seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE} --micro-batch-size {MICRO_BATCH}
--mock-data --tokenizer-type NullTokenizer --vocab-size 8192 --num-workers 0
--lr 1e-4 --lr-decay-style constant --train-iters 100000 --eval-iters 0
"""


def main() -> None:
    """Measures both sides and prints the table."""
    options = parse_options()
    os.environ["OMP_NUM_THREADS"] = "1"
    # pretrain_gpt.py makes glibc keep its heap. A plain script uses torch's default, unless requested otherwise.
    plain = partial(build_plain, keeps_heap=options.plain_keeps_heap)
    sides = [start_side("plain", plain, ranks=RANKS), start_side("ours", build_ours, ranks=RANKS)]
    rounds = run_rounds(sides, rounds=options.rounds, steps=options.steps)
    figures = print_table(rounds, base="plain")["ours"]
    print(f"allocator: ours keeps glibc's heap, plain {'does too' if options.plain_keeps_heap else 'does not'}")
    if options.json is not None:
        write_record(options.json, figures, measured=rounds)


def parse_options() -> argparse.Namespace:
    """Parses the command line of this benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="counted rounds per side (default: 8)")
    parser.add_argument("--steps", type=int, default=3, help="steps per round (default: 3)")
    parser.add_argument(
        "--plain-keeps-heap",
        action="store_true",
        help="apply our allocator setting (glibc keeps memory) to the plain side as well",
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parser.parse_args()


def build_plain(
    config: PlainConfig = PlainConfig(),  # noqa: B008  # frozen
    *,
    sequence: int = SEQUENCE,
    keeps_heap: bool = False,
) -> Callable[[], None]:
    """Builds DDP, fused AdamW and torch's clipping around the plain model.

    keeps_heap: applies the same allocator setting as this framework.
    """
    if keeps_heap:
        keep_cpu_heap()
    dist.init_process_group("gloo")
    torch.manual_seed(1234)
    plain = PlainModel(config)
    if config.expert_parallel:
        # torch's DDP averages the gradients that it reduces, and ignores the experts, which differ between ranks.
        experts = [name for name, _ in plain.named_parameters() if name.endswith(EXPERT_WEIGHTS)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(plain, experts)
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    return plain_step(model, optimizer, config=config, sequence=sequence)


def plain_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, config: PlainConfig, sequence: int = SEQUENCE
) -> Callable[[], None]:
    """Returns a training step for any wrapper of the plain model whose forward returns the loss."""

    def step() -> None:
        tokens = torch.randint(config.vocab_size, (MICRO_BATCH, sequence + 1))
        loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        if config.expert_parallel:
            clip_with_parallel_experts(model)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return step


def clip_with_parallel_experts(model: nn.Module) -> None:
    """Clips to the norm over all ranks. First averages the experts' gradients, which DDP leaves as sums over ranks."""
    grads: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for name, param in model.named_parameters():
        assert param.grad is not None
        grads[name.endswith(EXPERT_WEIGHTS)].append(param.grad)
    torch._foreach_div_(grads[True], dist.get_world_size())
    squares = torch.nn.utils.get_total_norm(grads[True]).square()
    dist.all_reduce(squares)
    squares += torch.nn.utils.get_total_norm(grads[False]).square()
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, squares.sqrt())


def build_run(*flags: str) -> TrainingRun:
    """Sets up a run as pretrain_gpt.py does. flags: added to FLAGS."""
    args = start_processes(argv=[*FLAGS.split(), *flags])
    run = setup_run(run_config_of(args), pretrain_gpt.model_provider, forward_step_func=pretrain_gpt.forward_step)
    setup_data(run, pretrain_gpt.train_valid_test_datasets_provider, num_workers=0)
    return run


def build_ours(*flags: str) -> Callable[[], None]:
    """Builds the complete training step of pretrain_gpt.py, including data and statistics. flags: added to FLAGS."""
    run = build_run(*flags)

    def step() -> None:
        run_step(run)

    return step


if __name__ == "__main__":
    main()
