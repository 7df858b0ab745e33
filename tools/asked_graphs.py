"""Parses the CUDA graph flags of a command line, for tools that check graph capture without a GPU."""

import argparse
import atexit
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

from torch import nn

from megatron.core.transformer.cuda_graphs import CudaGraphManager
from megatron.core.transformer.moe.dispatch_static import MoEStaticAlltoAllTokenDispatcher, padded_rank_rows
from megatron.training.arguments import parse_args
from megatron.training.command_line.conflicts import check_graphs
from megatron.training.command_line.flags import flag_table
from megatron.training.command_line.yaml_config import config_text
from megatron.training.step.step_runner import StepGraph

WARMUP_STEPS = 2
_DATA = ("data_path", "train_data_path", "valid_data_path", "test_data_path", "data_args_path")
_WRITTEN = ("save", "load", "tensorboard_dir", "record_routing")


@dataclass(frozen=True)
class Asked:
    """CUDA graph flags of a command line.

    modules: parts of a layer captured by --cuda-graph-impl local; None means its default.
    """

    impl: str = "full_iteration"
    modules: tuple[str, ...] = ()
    with_optimizer: bool = False

    def __str__(self) -> str:
        modules = f" --cuda-graph-modules {' '.join(self.modules)}" if self.modules else ""
        return f"--cuda-graph-impl {self.impl}{modules}" + " --optimizer-cuda-graph" * self.with_optimizer

    def give_to(self, args: argparse.Namespace) -> None:
        """Writes the flags to parsed arguments."""
        args.cuda_graph_impl, args.cuda_graph_warmup_steps = self.impl, WARMUP_STEPS
        args.cuda_graph_modules, args.optimizer_cuda_graph = list(self.modules), self.with_optimizer


def asked_of(argv: Sequence[str]) -> tuple[Asked, list[str]]:
    """Returns the requested CUDA graphs, and the remaining settings as the words `--config FILE`.

    The graph flags are removed from FILE, because argument validation rejects them on a machine without a GPU.
    """
    args, table = parse_args(argv=argv), flag_table()
    impl = "local" if args.cuda_graph_impl == "local" else Asked.impl
    asked = Asked(impl, tuple(args.cuda_graph_modules), args.optimizer_cuda_graph)
    args.cuda_graph_impl, args.cuda_graph_modules, args.optimizer_cuda_graph = "none", [], False
    # Parsing reads the launcher's world size. As a setting it would apply to the planner.
    args.world_size = table.by_dest["world_size"].default
    with NamedTemporaryFile("w", suffix=".yaml", delete=False, encoding="utf-8") as file:
        file.write(config_text(vars(args), table=table, script_dests=frozenset()))
    atexit.register(Path(file.name).unlink, missing_ok=True)
    return asked, ["--config", file.name]


def refusals_of_flags(args: argparse.Namespace, asked: Asked) -> list[str]:
    """Sets the requested graph flags in `args` and returns the reasons why other flags rule out these graphs."""
    asked.give_to(args)
    return [*check_graphs(args)]


def failures_of(graph: StepGraph) -> list[str]:
    """Returns the errors that aborted the captures of a step graph."""
    if isinstance(graph, CudaGraphManager):
        return [f"{name} failed: {failure}" for name, failure in graph.failures.items()]
    return [] if graph.failure is None else [f"the passes failed: {graph.failure}"]


def send_as_a_gpu_does(model: Sequence[nn.Module]) -> None:
    """Makes all-to-all dispatchers send padded rows, as on a GPU.

    On the CPU they would otherwise read the number of rows on the host.
    """
    for module in (module for chunk in model for module in chunk.modules()):
        dispatcher = vars(module).get("token_dispatcher")
        if isinstance(dispatcher, MoEStaticAlltoAllTokenDispatcher):
            dispatcher.layout = padded_rank_rows


def leave_files_alone(args: argparse.Namespace) -> None:
    """Selects mock data and clears every flag that would load or write files."""
    for name in (*_DATA, *_WRITTEN):
        vars(args)[name] = None
    args.mock_data, args.log_progress, args.profile, args.record_memory_history = True, False, False, False
