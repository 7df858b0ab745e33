"""Runs the training program inside a rank's process and records batches, gradients, reports and states.

Several runs may follow each other in one process. This file contains no tests.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import pretrain_gpt
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import model_logical_pieces
from megatron.core.distributed import DistributedDataParallel
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.core.optimizer.param_groups import ConfigOverrides
from megatron.core.transformer.moe.paged_stash.sizing import LearnedSizes
from megatron.training.callbacks import Callback, CallbackList, EvaluationReport, StepReport
from megatron.training.checkpointing.rng_state import rng_sharded_state
from megatron.training.command_line.config_builder import run_config_of
from megatron.training.command_line.published import publish_run
from megatron.training.initialize import start_processes
from megatron.training.run import TrainingRun
from megatron.training.setup import setup_data, setup_run
from megatron.training.training import run_step, train
from tests.functional_tests.case import Flags
from tests.functional_tests.launch import UNCOMPARED_FIELDS

Batch = dict[str, Tensor]
# A function that returns a context manager, which is active while a run trains.
Setup = Callable[[TrainingRun], AbstractContextManager[Any]]
# Optimizer states are sharded; parameter gathers and gradient reductions overlap with compute in small buckets.
OVERLAPPED_SMALL_BUCKETS: Flags = {
    "use-distributed-optimizer": True,
    "overlap-grad-reduce": True,
    "overlap-param-gather": True,
    "ddp-bucket-size": 1001,
}


@contextmanager
def started_run(
    argv: Sequence[str],
    *,
    forward_step: Callable[..., Any] = pretrain_gpt.forward_step,
    model_provider: Callable[..., nn.Module] = pretrain_gpt.model_provider,
    config_overrides: ConfigOverrides | None = None,
) -> Iterator[TrainingRun]:
    """Sets up a run like `pretrain`, in the process group of the harness, and tears it down afterwards."""
    try:
        args = start_processes(argv=argv)
        run = setup_run(
            run_config_of(args), model_provider, forward_step_func=forward_step, config_overrides=config_overrides
        )
        setup_data(run, pretrain_gpt.train_valid_test_datasets_provider, num_workers=0)
        yield run
    finally:
        publish_run(None)
        parallel_state.destroy_model_parallel()
        destroy_num_microbatches_calculator()


def comparable(report: StepReport) -> dict[str, Any]:
    """Returns the fields of a report that equal runs share, with the others set to None.

    The gradient norm is text, since NaN != NaN.
    """
    uncompared = (UNCOMPARED_FIELDS.keys() - {"stash"}) | {"notes"}
    compared = {name: None if name in uncompared else value for name, value in vars(report).items()}
    return {**compared, "grad_norm": repr(report.grad_norm)}


def train_steps(run: TrainingRun, count: int) -> list[dict[str, Any]]:
    """Trains `count` steps and returns the comparable part of their reports."""
    return [comparable(run.measured(run_step(run)[0])) for _ in range(count)]


@dataclass
class TrainedRun(Callback):
    """A rank's record of a whole run: its reports, and digests of all state that the rest of the run depends on."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[EvaluationReport] = field(default_factory=list)
    state: dict[str, str] = field(default_factory=dict)

    def train(self, run: TrainingRun, *callbacks: Callback, setup: Setup = nullcontext) -> None:
        """Trains to the end of the run, within setup(run), and records it."""
        run.callbacks = CallbackList([self, *callbacks])
        with setup(run):
            train(run)
        # Learned sizes depend on which buffers had to grow; two runs with equal results need not share them.
        run.state.learned_sizes = LearnedSizes()
        self.state = state_of(run)

    def on_step_end(self, report: StepReport) -> None:
        # Stash pages depend on history, which a resumed run or a run without a stash does not share.
        self.steps.append({**comparable(report), "stash": None})

    def on_evaluation_end(self, report: EvaluationReport) -> None:
        self.evaluations.append(report)

    def assert_same(self, reference: "TrainedRun", name: str) -> None:
        """Asserts that all values of every step and evaluation, and the final states, are equal."""
        for step, (own, expected) in enumerate(zip(self.steps, reference.steps, strict=True), 1):
            assert own == expected, f"{name}, step {step}"
        assert self.evaluations == reference.evaluations, name
        assert self.state.keys() == reference.state.keys(), name
        different = [key for key, digest in reference.state.items() if self.state[key] != digest]
        assert not different, f"{name}: {different}"


@dataclass
class Recorder:
    """Records a rank's batches, by step and microbatch, and its reduced gradients, by step and name."""

    batches: list[list[Batch]] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)

    def attach(self, run: TrainingRun) -> None:
        """Records the batches and the reduced gradients of all following steps."""
        assert run.train_iterator is not None
        run.train_iterator = self._watch(run.train_iterator)
        # Recorded directly after the reduction, since the optimizer's kernel applies the clip factor in place.
        for chunk in run.model:
            vars(chunk)["finish_grad_sync"] = partial(self._finish_grad_sync, chunk, chunk.finish_grad_sync)

    def _watch(self, iterator: Iterator[Batch]) -> Iterator[Batch]:
        for batch in iterator:
            if len(self.batches) == len(self.grads):
                self.batches.append([])
            self.batches[-1].append(batch)
            yield batch

    def _finish_grad_sync(
        self, model: DistributedDataParallel, finish_grad_sync: Callable[[bool], None], force_all_reduce: bool = False
    ) -> None:
        finish_grad_sync(force_all_reduce)
        self.grads.append({_plain_name(name): grad.clone() for name, grad in model.named_main_grads()})


@dataclass
class Recording:
    """A rank's record of a run. initial, final: parameters by Megatron name, before and after the run."""

    batches: list[list[Batch]]
    grads: list[dict[str, Tensor]]
    reports: list[StepReport]
    initial: dict[str, Tensor]
    final: dict[str, Tensor]


def record_run(argv: Sequence[str], steps: int, *, save: bool = False, **parts: Callable[..., Any]) -> Recording:
    """Trains `steps` steps, then saves a checkpoint if `save`. parts: keyword arguments of started_run."""
    recorder = Recorder()
    with started_run(argv, **parts) as run:
        recorder.attach(run)
        initial = parameters(*run.model)
        reports = [run_step(run)[0] for _ in range(steps)]
        if save:
            run.save_checkpoint()
        return Recording(recorder.batches, recorder.grads, reports, initial, parameters(*run.model))


def gather_parameters(run: TrainingRun) -> None:
    """Waits for the parameter gathers of the last step, so that parameters can be read outside their modules."""
    for chunk in run.model:
        chunk.start_param_sync(force_sync=True)


def parameters(*model: nn.Module) -> dict[str, Tensor]:
    """Copies all parameters, by name without the wrappers' prefixes."""
    named = (item for chunk in model for item in chunk.named_parameters())
    return {_plain_name(name): parameter.detach().clone() for name, parameter in named}


def _plain_name(name: str) -> str:
    return name.removeprefix("module.").removeprefix("module.")


def state_of(run: TrainingRun) -> dict[str, str]:
    """Returns all state that the rest of a run depends on, by name: tensors as digests, the rest as text."""
    assert run.optimizer is not None and run.scheduler is not None
    gather_parameters(run)
    named = ((index, item) for index, chunk in enumerate(run.model) for item in chunk.state_dict().items())
    tensors: dict[str, Tensor] = {f"{index} {name}": value for index, (name, value) in named}
    pieces = {name: piece for chunk in run.model for name, piece in model_logical_pieces(chunk).items()}
    boxes = [*run.optimizer.sharded_state(pieces), *rng_sharded_state(run.groups)]
    tensors |= {f"{box.key} {box.global_offset}": box.data for box in boxes}
    groups = [(group["lr"], group["weight_decay"]) for group in run.optimizer.param_groups]
    others = [run.optimizer.common_state(), run.scheduler.state_dict(), groups, run.state.state_dict()]
    return {**{name: digest_of(tensor) for name, tensor in tensors.items()}, "others": repr(others)}


def check_relay(argvs: Sequence[Sequence[str]], order: Sequence[int], folder: str) -> None:
    """Asserts that a run split into legs of two steps reports the same as one uninterrupted run of argvs[0].

    Leg i uses argvs[order[i]] and resumes from the previous leg's checkpoint. Final states are compared too, so the
    last leg must use the same buckets as the uninterrupted run.
    """
    with started_run(argvs[0]) as run:
        expected, final = train_steps(run, 2 * len(order)), state_of(run)
    seen = []
    for leg, index in enumerate(order):
        source = ["--load", f"{folder}/{leg - 1}"] if leg else []
        with started_run([*argvs[index], *source, "--save", f"{folder}/{leg}"]) as run:
            seen += train_steps(run, 2)
            run.save_checkpoint()
            last = state_of(run)
    assert seen == expected
    assert last == final


def digest_of(tensor: Tensor) -> str:
    """Returns a hash of the bytes of a tensor, or of this rank's shard of a DTensor."""
    mine = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    data = mine.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data.tobytes(), digest_size=16).hexdigest()
