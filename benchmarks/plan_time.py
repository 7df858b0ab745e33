"""Compares the step time that a plan estimates for this machine with the measured step time.

Run `python benchmarks/plan_time.py`. Uses the model and the two processes of train_step.py, and the same model without
experts. The machine is described by the entry "cpu" (MEGATRON_DEVICES; device_figures.py measures it). Prints
medians over rounds and estimate / measured.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

import pretrain_gpt  # noqa: E402
from benchmarks.sides import run_rounds, start_side  # noqa: E402
from benchmarks.train_step import FLAGS, RANKS, build_ours  # noqa: E402
from megatron.planner.plan import plan_run  # noqa: E402
from megatron.planner.step_time import run_time  # noqa: E402
from megatron.training.arguments import read_run_config  # noqa: E402
from megatron.training.command_line.config_builder import run_config_of  # noqa: E402
from megatron.training.compute.devices import CPU_NAME, NAME_VARIABLE, planned_device  # noqa: E402
from megatron.training.initialize import start_processes  # noqa: E402
from megatron.training.setup import setup_data, setup_run  # noqa: E402
from megatron.training.training import run_step  # noqa: E402

_OF_EXPERTS = ("--num-experts", "--moe-router-topk", "--moe-ffn-hidden-size", "--moe-router-load-balancing-type")


def main() -> None:
    """Measures both models and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="counted rounds (default: 8)")
    parser.add_argument("--steps", type=int, default=3, help="steps per round (default: 3)")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    builds = {"experts": build_ours, "dense": build_dense}
    # Ranks wait for each other, so that other load on the machine affects both.
    sides = [start_side(name, build, ranks=RANKS) for name, build in builds.items()]
    rounds = run_rounds(sides, rounds=options.rounds, steps=options.steps)
    # Wall time depends on other load on the machine. CPU time does not, and excludes a rank's waits.
    print("           estimate s   wall s   cpu s of a rank   estimate / wall   estimate / cpu")
    for name, flags in (("experts", FLAGS.split()), ("dense", dense_flags())):
        estimate = estimated_seconds(flags)
        seconds = statistics.median(one.wall_seconds for one in rounds[name])
        cpu = statistics.median(one.cpu_seconds for one in rounds[name]) / RANKS
        figures = f"{estimate:12.3f}{seconds:9.3f}{cpu:18.3f}{estimate / seconds:18.2f}{estimate / cpu:17.2f}"
        print(f"{name:9}{figures}")


def dense_flags() -> list[str]:
    """Returns FLAGS without experts, with a feed-forward width equal to a token's in the MoE model."""
    words = FLAGS.split()
    kept, at = [], 0
    while at < len(words):
        if words[at] in _OF_EXPERTS:
            at += 2
            continue
        if words[at] != "--moe-grouped-gemm":
            kept.append(words[at])
        at += 1
    return [*kept, "--ffn-hidden-size", "1024"]


def build_dense() -> Callable[[], None]:
    """Builds a training step of the model without experts."""
    args = start_processes(argv=dense_flags())
    run = setup_run(run_config_of(args), pretrain_gpt.model_provider, forward_step_func=pretrain_gpt.forward_step)
    setup_data(run, pretrain_gpt.train_valid_test_datasets_provider, num_workers=0)
    return lambda: run_step(run) and None


def estimated_seconds(flags: list[str]) -> float:
    """Returns the estimated step time of a run with these flags on RANKS ranks of this machine."""
    run_config = read_run_config([*flags, "--dry-run", "--world-size", str(RANKS)])
    plan = plan_run(run_config, pretrain_gpt.model_provider, forward_step_func=pretrain_gpt.forward_step)
    step = run_time(plan, run_config, device=planned_device({**os.environ, NAME_VARIABLE: CPU_NAME}))
    assert step is not None, "the run trains"
    return step.seconds


if __name__ == "__main__":
    main()
