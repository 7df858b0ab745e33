"""Checks without a GPU whether one CUDA graph can capture a training step: `python tools/check_capture.py FLAGS`.

FLAGS are those of pretrain_gpt.py. With --optimizer-cuda-graph the graph includes the optimizer step. With
--cuda-graph-impl local the tool checks the parts of layers named by --cuda-graph-modules. Exit status: 0 if capture
works, 1 if not. All reasons are printed. With --replay N it also trains N more steps with tapes, which behave like
graphs, and compares the results (capture_replay.py).

Trains two steps on mock tokens and checks the third as if it were captured. Loads and writes no files. Start it with
torchrun if the layout needs several processes. Model size does not affect capture: if the model is too large for this
machine, append flags with smaller sizes, because the last occurrence of a flag counts. Everything runs on the CPU.
Where code branches on the device, the CPU branch is checked, except for the transfer of expert rows.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

if not __package__:  # run by its path, as in a clone without installation
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.datasets.data_iterators import BatchPlan, build_data_iterators
from megatron.core.device import default_device
from megatron.core.graphs.safety import Region, collect_refusals
from megatron.core.group_collectives import gather_objects
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.parallel_state import get_process_groups
from megatron.core.process_groups_config import group_rank, group_size
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.timers import Timers
from megatron.core.transformer.moe.paged_stash.sizing import LearnedSizes
from megatron.tools.asked_graphs import (
    WARMUP_STEPS,
    asked_of,
    failures_of,
    leave_files_alone,
    refusals_of_flags,
    send_as_a_gpu_does,
)
from megatron.tools.capture_replay import differences_of_replay
from megatron.tools.train import pretrain_gpt
from megatron.training.checkpointing.rng_state import seed_ranks
from megatron.training.command_line.config_builder import run_config_of
from megatron.training.command_line.published import publish_timers, publish_tokenizer
from megatron.training.config import RunConfig
from megatron.training.error_broadcast import ErrorBroadcast
from megatron.training.errors import exit_on_user_error, message_for_other_ranks
from megatron.training.initialize import leave_process_group, start_processes
from megatron.training.setup import (
    build_model_and_optimizer,
    setup_batches,
    setup_steps,
    setup_tokenizer,
)
from megatron.training.step.expert_memory import build_expert_memory
from megatron.training.step.step_runner import StepRunner


def main(argv: Sequence[str] | None = None) -> None:
    """Checks the command line `argv`, prints the result and exits with its status. None means sys.argv."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--replay", type=int, default=0)
    own, argv = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    with exit_on_user_error():
        found = breaks_of(argv)
        _say(f"{'NOT ' * bool(found)}CAPTURABLE: {asked_of(argv)[0]}", found)
        if own.replay and not found:
            found = differences_of_replay(argv, own.replay)
            same = f"REPLAYED: {own.replay} steps on a tape are bitwise equal to the eager ones"
            _say("DIFFERENT when replayed on a tape" if found else same, found)
    raise SystemExit(int(bool(found)))


def _say(verdict: str, found: Sequence[str]) -> None:
    # All ranks have the same result, and their process group is destroyed.
    if os.environ.get("RANK", "0") == "0":
        print("\n".join([verdict, *(f"{number}. {one}" for number, one in enumerate(found, 1))]), flush=True)


def breaks_of(argv: Sequence[str]) -> list[str]:
    """Returns the flags and source lines of operations that prevent the requested graphs on any rank. Collective."""
    asked, rest = asked_of(argv)
    with ErrorBroadcast(describe=message_for_other_ranks, leave=leave_process_group) as broadcast:
        args = start_processes(argv=rest, broadcast=broadcast)
        refused = refusals_of_flags(args, asked)
        if asked.impl == "local":
            if refused:
                # The model may have no such parts.
                return refused
            # Without a replay, gradients that a part passes to eager code are uninitialized memory.
            args.check_for_nan_in_loss_and_grad = False
        steps, optimizer, graphs = _setup(run_config_of(args))
        batches = _made_up_batches(args)
        for number in range(1, WARMUP_STEPS + 2):
            optimizer.zero_grad()
            _train_step(steps, batches, iteration=number)
        every_rank = gather_objects(graphs.breaks(steps), dist.group.WORLD)
    return list(dict.fromkeys(one for of_rank in [refused, *every_rank] for one in of_rank))


@dataclass
class LintedGraphs:
    """A GraphDevice that captures nothing: runs the passes eagerly and collects what a graph cannot capture."""

    regions: list[Region] = field(default_factory=list)
    _may_be_together: bool = False
    _are_together: bool = False  # whether the next region continues the previous one

    @contextmanager
    def on_capture_stream(self) -> Iterator[None]:
        """Runs its body unchanged."""
        yield

    def new_pool(self) -> None:
        """Returns None, because passes use ordinary memory."""

    @contextmanager
    def capturing(self, pool: None = None) -> Iterator["LintedGraphs"]:
        """Runs its body as a new region and collects operations that a graph cannot capture."""
        earlier = self.regions[-1] if self._are_together else None
        with collect_refusals(get_cuda_rng_tracker().generators(), goes_on_with=earlier) as region:
            self.regions.append(region)
            yield self
            self._are_together = self._may_be_together

    @contextmanager
    def capturing_together(self) -> Iterator[None]:
        """Lets each region in its body use the tensors of the preceding region."""
        self._may_be_together = True
        try:
            yield
        finally:
            self._may_be_together = self._are_together = False

    def replay(self) -> None:
        """Does nothing, because the passes ran eagerly when they were captured."""

    def breaks(self, steps: StepRunner) -> list[str]:
        """Returns the operations that prevent capture. Must be called after the results of the passes were used."""
        assert steps.graph is not None and self.regions, "no step was examined"
        failures = failures_of(steps.graph)
        steps.graph.drop_graphs()
        for region in self.regions:
            region.check_memory()
        return [str(one) for region in self.regions for one in region.refusals] + failures


def _setup(run_config: RunConfig) -> tuple[StepRunner, MegatronOptimizer, LintedGraphs]:
    """Sets up the run as pretrain does, but without checkpoints, logs and data."""
    publish_tokenizer(setup_tokenizer(run_config))
    timers = Timers(0, "minmax", device=default_device())
    publish_timers(timers)
    batches = setup_batches(run_config)
    model, optimizer, _ = build_model_and_optimizer(pretrain_gpt.model_provider, run_config)
    groups, graphs = get_process_groups(), LintedGraphs()
    memory = build_expert_memory(
        model,
        seq_length=run_config.data.seq_length,
        micro_batch_size=run_config.training.micro_batch_size,
        groups=groups,
    )
    steps = setup_steps(
        run_config,
        model,
        forward_step_func=pretrain_gpt.forward_step,
        optimizer=optimizer,
        timers=timers,
        memory=memory,
        graphs=graphs,
    )
    seed_ranks(run_config.training.seed, groups)
    if memory is not None:
        memory.prepare(LearnedSizes(), num_microbatches=batches.final_num_microbatches, pp_group=groups.pp)
    send_as_a_gpu_does(model)
    return steps, optimizer, graphs


def _made_up_batches(args: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    """Returns this rank's mock microbatches of one step; empty on stages that read no data."""
    leave_files_alone(args)
    groups, count = get_process_groups(), get_num_microbatches()
    plan = BatchPlan(
        micro_batch_size=args.micro_batch_size,
        dp_rank=group_rank(groups.dp),
        dp_size=group_size(groups.dp),
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    samples = count * plan.micro_batch_size * plan.dp_size
    datasets = pretrain_gpt.train_valid_test_datasets_provider([samples, 0, 0])
    iterator, _, _ = build_data_iterators(datasets, plan)
    # Stages that read no data.
    return [] if iterator is None else [next(iterator) for _ in range(count)]


def _train_step(steps: StepRunner, batches: list[dict[str, torch.Tensor]], *, iteration: int) -> None:
    iterator = iter(batches) if batches else None
    count = get_num_microbatches()
    steps.train_sync(iterator, num_microbatches=count, iteration=iteration, exit_reasons=list)
    steps.update_sync()


if __name__ == "__main__":
    main()
