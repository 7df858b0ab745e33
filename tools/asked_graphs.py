"""What a command line asks of CUDA graphs, for the tools that look at it without a GPU."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from megatron.core.transformer.cuda_graphs import CudaGraphManager
from megatron.core.transformer.moe.dispatch_static import MoEStaticAlltoAllTokenDispatcher
from megatron.core.transformer.moe.static_parts import padded_parts
from megatron.training.command_line.errors import CommandLineError
from megatron.training.command_line.graph_checks import check_graphs
from megatron.training.step_runner import StepGraph

WARMUP_STEPS = 2
_DATA = ("data_path", "train_data_path", "valid_data_path", "test_data_path", "data_args_path")
_WRITTEN = ("save", "load", "tensorboard_dir", "record_routing")


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
        args.cuda_graph_impl, args.cuda_graph_warmup_steps = self.impl, WARMUP_STEPS
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


def failures_of(graph: StepGraph) -> list[str]:
    """Errors that ended a capture."""
    if isinstance(graph, CudaGraphManager):
        return [f"{name} failed: {failure}" for name, failure in graph.failures.items()]
    return [] if graph.failure is None else [f"the passes failed: {graph.failure}"]


def send_as_a_gpu_does(model: Sequence[nn.Module]) -> None:
    """Rows of a fixed number for each rank: on the CPU, where that is no wait, the host reads how many there are."""
    for module in (module for chunk in model for module in chunk.modules()):
        dispatcher = vars(module).get("token_dispatcher")
        if isinstance(dispatcher, MoEStaticAlltoAllTokenDispatcher):
            dispatcher.wire = replace(dispatcher.wire, layout=padded_parts)


def leave_files_alone(args: argparse.Namespace) -> None:
    """Data is made up, and nothing is loaded or written."""
    for name in (*_DATA, *_WRITTEN):
        vars(args)[name] = None
    args.mock_data, args.log_progress, args.profile, args.record_memory_history = True, False, False, False
