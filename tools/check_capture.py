"""Says without a GPU whether the passes of a training step can be one CUDA graph: `python tools/check_capture.py` with
the flags of pretrain_gpt.py; with --optimizer-cuda-graph the optimizer's step too, and with --cuda-graph-impl local the
parts of layers that --cuda-graph-modules names. Exit status 0: they can; 1: all that breaks it is printed.

Trains two steps on made-up tokens, and looks at the third as it would be captured; nothing is loaded or written. A
layout needs its processes: start it with torchrun, as the training. What can be captured does not depend on sizes:
where the model is too large for this machine append smaller ones, as the last of a flag counts.
All runs on the CPU. Of code that chooses by device the CPU's choice is looked at, except in how experts' rows travel.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

import pretrain_gpt  # noqa: E402
from megatron.core.datasets.data_iterators import BatchPlan, build_data_iterators  # noqa: E402
from megatron.core.device import default_device  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.graph_safety import Region, collect_refusals  # noqa: E402
from megatron.core.group_collectives import gather_objects  # noqa: E402
from megatron.core.num_microbatches_calculator import get_num_microbatches  # noqa: E402
from megatron.core.optimizer import MegatronOptimizer  # noqa: E402
from megatron.core.parallel_state import get_process_groups  # noqa: E402
from megatron.core.process_groups_config import group_rank, group_size  # noqa: E402
from megatron.core.tensor_parallel import get_cuda_rng_tracker  # noqa: E402
from megatron.core.timers import Timers  # noqa: E402
from megatron.core.transformer.cuda_graphs import CudaGraphManager  # noqa: E402
from megatron.core.transformer.moe.dispatch_static import MoEStaticAlltoAllTokenDispatcher  # noqa: E402
from megatron.core.transformer.moe.paged_stash.learned_sizes import LearnedSizes  # noqa: E402
from megatron.core.transformer.moe.static_parts import padded_parts  # noqa: E402
from megatron.training.command_line.errors import CommandLineError  # noqa: E402
from megatron.training.command_line.graph_checks import check_graphs  # noqa: E402
from megatron.training.errors import exit_on_user_error, message_for_other_ranks  # noqa: E402
from megatron.training.expert_memory import build_expert_memory  # noqa: E402
from megatron.training.failure_board import FailureBoard  # noqa: E402
from megatron.training.global_vars import publish_timers, publish_tokenizer  # noqa: E402
from megatron.training.initialize import initialize_megatron, leave_process_group, seed_ranks  # noqa: E402
from megatron.training.setup import (  # noqa: E402
    setup_batches,
    setup_model_and_optimizer,
    setup_steps,
    setup_tokenizer,
)
from megatron.training.step_runner import StepGraph, StepRunner  # noqa: E402

_WARMUP_STEPS = 2
_DATA = ("data_path", "train_data_path", "valid_data_path", "test_data_path", "data_args_path")


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the verdict on the command line `argv`, or the process's own, and exits with its status."""
    argv = sys.argv[1:] if argv is None else argv
    with exit_on_user_error():
        breaks = breaks_of(argv)
    what = str(asked_of(argv)[0])
    # All ranks know the same, and their group has ended.
    if os.environ.get("RANK", "0") == "0":
        print(f"NOT CAPTURABLE: {what}" if breaks else f"CAPTURABLE: {what}")
        print("".join(f"{number}. {one}\n" for number, one in enumerate(breaks, 1)), end="", flush=True)
    raise SystemExit(int(bool(breaks)))


@dataclass(frozen=True)
class Asked:
    """What of a command line is about graphs. modules: those of local, none for its default."""

    impl: str = "full_iteration"
    modules: tuple[str, ...] = ()
    with_optimizer: bool = False

    def __str__(self) -> str:
        modules = f" --cuda-graph-modules {' '.join(self.modules)}" if self.modules else ""
        return f"--cuda-graph-impl {self.impl}{modules}" + " --optimizer-cuda-graph" * self.with_optimizer

    def give_to(self, args: argparse.Namespace) -> None:
        """Writes them into parsed flags."""
        args.cuda_graph_impl, args.cuda_graph_warmup_steps = self.impl, _WARMUP_STEPS
        args.cuda_graph_modules, args.optimizer_cuda_graph = list(self.modules), self.with_optimizer


def asked_of(argv: Sequence[str]) -> tuple[Asked, list[str]]:
    """What is asked for, and the rest: flags of graphs are refused without a GPU, or with what is to be explained."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--cuda-graph-impl")
    parser.add_argument("--cuda-graph-modules", nargs="+", default=[])
    parser.add_argument("--cuda-graph-warmup-steps")
    parser.add_argument("--optimizer-cuda-graph", action="store_true")
    found, rest = parser.parse_known_args(argv)
    impl = "local" if found.cuda_graph_impl == "local" else Asked.impl
    return Asked(impl, tuple(found.cuda_graph_modules), found.optimizer_cuda_graph), rest


def refusals_of_flags(args: argparse.Namespace, asked: Asked) -> list[str]:
    """Why no such graph can be had, as far as flags say it; `args` has what is asked for from now on."""
    asked.give_to(args)
    try:
        check_graphs(args)
    except CommandLineError as error:
        return [str(error)]
    return []


def breaks_of(argv: Sequence[str]) -> list[str]:
    """What breaks the graphs of the command line, on any rank: flags, operations with their lines. Collective."""
    asked, rest = asked_of(argv)
    with FailureBoard(describe=message_for_other_ranks, leave=leave_process_group) as board:
        args = initialize_megatron(argv=rest, board=board)
        refused = refusals_of_flags(args, asked)
        if asked.impl == "local":
            if refused:
                # There may be no such parts.
                return refused
            # What a part's backward gives to eager ones is what memory held, as nothing is replayed.
            args.check_for_nan_in_loss_and_grad = False
        steps, optimizer, graphs = _setup(args)
        batches = _made_up_batches(args)
        for number in range(1, _WARMUP_STEPS + 2):
            optimizer.zero_grad()
            _train_step(steps, batches, iteration=number)
        every_rank = gather_objects(graphs.breaks(steps), dist.group.WORLD)
    return list(dict.fromkeys(one for of_rank in [refused, *every_rank] for one in of_rank))


@dataclass
class LintedGraphs:
    """A GraphDevice that captures nothing: the passes run, and are looked at."""

    regions: list[Region] = field(default_factory=list)
    _may_be_together: bool = False
    _are_together: bool = False  # whether the next region goes on where the last one ended

    @contextmanager
    def on_capture_stream(self) -> Iterator[None]:
        """See GraphDevice."""
        yield

    @contextmanager
    def capturing(self) -> Iterator["LintedGraphs"]:
        """See GraphDevice."""
        earlier = self.regions[-1] if self._are_together else None
        with collect_refusals(get_cuda_rng_tracker().generators(), goes_on_with=earlier) as region:
            self.regions.append(region)
            yield self
            self._are_together = self._may_be_together

    @contextmanager
    def capturing_together(self) -> Iterator[None]:
        """See GraphDevice."""
        self._may_be_together = True
        try:
            yield
        finally:
            self._may_be_together = self._are_together = False

    def replay(self) -> None:
        """See Graph: what was to be captured has run already."""

    def breaks(self, steps: StepRunner) -> list[str]:
        """What was found, once the results have been used."""
        assert steps.graph is not None and self.regions, "no step was looked at"
        failures = failures_of(steps.graph)
        steps.graph.drop_graphs()
        for region in self.regions:
            region.check_memory()
        return [str(one) for region in self.regions for one in region.refusals] + failures


def failures_of(graph: StepGraph) -> list[str]:
    """Errors that ended a capture."""
    if isinstance(graph, CudaGraphManager):
        return [f"{name} failed: {failure}" for name, failure in graph.failures.items()]
    return [] if graph.failure is None else [f"the passes failed: {graph.failure}"]


def _setup(args: argparse.Namespace) -> tuple[StepRunner, MegatronOptimizer, LintedGraphs]:
    """As pretrain does, without checkpoints, logs and data."""
    publish_tokenizer(setup_tokenizer(args))
    timers = Timers(0, "minmax", device=default_device())
    publish_timers(timers)
    batches = setup_batches(args)
    model, optimizer, _ = setup_model_and_optimizer(
        pretrain_gpt.model_provider, ModelType.encoder_or_decoder, args=args
    )
    groups, graphs = get_process_groups(), LintedGraphs()
    memory = build_expert_memory(model, args, groups=groups)
    steps = setup_steps(
        args,
        model,
        forward_step_func=pretrain_gpt.forward_step,
        optimizer=optimizer,
        timers=timers,
        memory=memory,
        graphs=graphs,
    )
    seed_ranks(args.seed, groups)
    if memory is not None:
        memory.prepare(LearnedSizes(), num_microbatches=batches.final_num_microbatches, pp_group=groups.pp)
    _send_as_a_gpu_does(model)
    return steps, optimizer, graphs


def _send_as_a_gpu_does(model: Sequence[nn.Module]) -> None:
    """Rows of a fixed number for each rank: on the CPU, where that is no wait, the host reads how many there are."""
    for module in (module for chunk in model for module in chunk.modules()):
        dispatcher = vars(module).get("token_dispatcher")
        if isinstance(dispatcher, MoEStaticAlltoAllTokenDispatcher):
            dispatcher.wire = replace(dispatcher.wire, layout=padded_parts)


def _made_up_batches(args: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    """The microbatches of a step of this rank, as data iterators give them."""
    for name in _DATA:
        vars(args)[name] = None
    args.mock_data = True
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
    # Of stages that read nothing.
    return [] if iterator is None else [next(iterator) for _ in range(count)]


def _train_step(steps: StepRunner, batches: list[dict[str, torch.Tensor]], *, iteration: int) -> None:
    iterator = iter(batches) if batches else None
    count = get_num_microbatches()
    steps.train_sync(iterator, num_microbatches=count, iteration=iteration, exit_reasons=list)
    steps.update_sync()


if __name__ == "__main__":
    main()
