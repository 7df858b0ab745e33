"""Compares training with CUDA graphs, which tapes replace on the CPU, with eager training of the same command line.

Used by `check_capture.py --replay`. core/graphs/tape.py defines tapes. It finds host values that change between steps,
which checking a single step cannot find: a graph would keep using the number, list or flag that it captured. Both runs
use --deterministic-mode.

The report of every step, and the final parameters, buffers and optimizer states must be bitwise equal. Other host state
and other tensors are not compared.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron.core.dist_checkpointing import model_logical_pieces
from megatron.core.distributed import DistributedDataParallel
from megatron.core.graphs.tape import Tape, TapeGraphs
from megatron.core.group_collectives import gather_objects
from megatron.tools.asked_graphs import WARMUP_STEPS, asked_of, failures_of, leave_files_alone, send_as_a_gpu_does
from megatron.tools.train import pretrain_gpt
from megatron.training.callbacks import StepReport
from megatron.training.command_line.config_builder import run_config_of
from megatron.training.error_broadcast import ErrorBroadcast
from megatron.training.errors import message_for_other_ranks
from megatron.training.initialize import leave_process_group, start_processes
from megatron.training.run import TrainingRun
from megatron.training.setup import setup_data, setup_run
from megatron.training.training import run_step

# Fields that may differ between two equivalent runs.
_OF_THE_MACHINE = frozenset({"seconds", "memory", "held", "notes", "stash"})


@dataclass(frozen=True)
class _Trained:
    """One rank's results of a run.

    steps: step reports as text, in which NaN equals NaN. state: digests of parameters, buffers and optimizer tensors,
    and the optimizer's numbers, by name. failures: reasons why no graphs were captured.
    """

    steps: list[dict[str, str]]
    state: dict[str, str]
    failures: list[str]


class _CountedTapes(TapeGraphs):
    """Tapes that count captures."""

    def __init__(self) -> None:
        super().__init__()
        self.num_captures = 0

    @contextmanager
    def capturing(self, pool: Any = None) -> Iterator[Tape]:
        self.num_captures += 1
        with super().capturing(pool) as tape:
            yield tape


def differences_of_replay(argv: Sequence[str], num_steps: int) -> list[str]:
    """Returns each rank's first difference between training with and without graphs; empty if there is none.

    Collective. num_steps: number of replayed steps after the warm-up steps.
    """
    eager, replayed = _train(argv, num_steps, tapes=None), _train(argv, num_steps, tapes=_CountedTapes())
    found = []
    for rank, (own, expected) in enumerate(zip(replayed, eager, strict=True)):
        first = own.failures or _first_difference(own, expected)
        found += [f"rank {rank}: {one}" for one in first]
    return found


def _first_difference(own: _Trained, expected: _Trained) -> list[str]:
    for number, (step, eager) in enumerate(zip(own.steps, expected.steps, strict=True), 1):
        for name, value in step.items():
            if value != eager[name]:
                return [f"step {number}: {name} is {value} with graphs, but {eager[name]} without"]
    names = [name for name, digest in own.state.items() if digest != expected.state.get(name)]
    return [f"after step {len(own.steps)}: {name} differs with and without graphs" for name in names[:1]]


def _train(argv: Sequence[str], num_steps: int, *, tapes: _CountedTapes | None) -> list[_Trained]:
    """Trains the run and returns the results of each rank. tapes: replace CUDA graphs; None trains eagerly."""
    asked, rest = asked_of(argv)
    with ErrorBroadcast(describe=message_for_other_ranks, leave=leave_process_group) as broadcast:
        # On the CPU, other kernels for experts in fp32 need the row offsets on the host.
        args = start_processes(argv=[*rest, "--deterministic-mode"], broadcast=broadcast)
        leave_files_alone(args)
        if tapes is not None:
            asked.give_to(args)
        run_config = run_config_of(args)
        run = setup_run(
            run_config, pretrain_gpt.model_provider, forward_step_func=pretrain_gpt.forward_step, graphs=tapes
        )
        send_as_a_gpu_does(run.model)
        count = WARMUP_STEPS + num_steps
        samples = count * run.batches.running.final_size
        setup_data(run, lambda _: pretrain_gpt.train_valid_test_datasets_provider([samples, 0, 0]), num_workers=0)
        steps = [_comparable(run_step(run)[0]) for _ in range(count)]
        failures = [] if run.steps.graph is None else failures_of(run.steps.graph)
        if tapes is not None and not failures and tapes.num_captures == 0:
            failures.append("nothing was captured")
        trained = _Trained(steps, state_of(run), failures)
        if run.steps.graph is not None:
            run.steps.graph.drop_graphs()
        return gather_objects(trained, dist.group.WORLD)


def _comparable(report: StepReport) -> dict[str, str]:
    return {name: repr(value) for name, value in vars(report).items() if name not in _OF_THE_MACHINE}


def state_of(run: TrainingRun) -> dict[str, str]:
    """Returns digests of parameters, buffers and optimizer tensors, and the optimizer's numbers as text. Collective."""
    named: dict[str, Tensor] = {}
    for index, chunk in enumerate(run.model):
        if isinstance(chunk, DistributedDataParallel):
            # All-gathers of updated parameters may still be in flight.
            chunk.start_param_sync(force_sync=True)
        named |= {f"{index} {name}": tensor for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers())}
    assert run.optimizer is not None, "a run that trains"
    pieces = {name: piece for chunk in run.model for name, piece in model_logical_pieces(chunk).items()}
    boxes = run.optimizer.sharded_state(pieces)
    named |= {f"the optimizer's {box.key} from {box.global_offset}": box.data for box in boxes}
    digests = {name: _digest(tensor) for name, tensor in named.items()}
    return {**digests, "the optimizer's common_state": repr(run.optimizer.common_state())}


def _digest(tensor: Tensor) -> str:
    mine = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    data = mine.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data.tobytes(), digest_size=16).hexdigest()
