"""Runs of the training program inside a rank's process, step by step, with what they read and computed written down.

Several runs may follow each other in one process. What they are compared with is the tests' matter.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from megatron.training.callbacks import StepReport
from megatron.training.global_vars import publish_run
from megatron.training.initialize import initialize_megatron
from megatron.training.rng_state import rng_sharded_state
from megatron.training.run import TrainingRun
from megatron.training.setup import setup_data, setup_run
from megatron.training.training import train_step
from tests.functional_tests.case import Flags

Batch = dict[str, Tensor]
# The optimizer's state is cut over ranks, in small buckets whose gathers and reductions run beside the passes.
SHARDED: Flags = {
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
    """A run set up as `pretrain` does, in the process group that the harness made, which it leaves as it was."""
    try:
        args = initialize_megatron(argv=argv)
        run = setup_run(args, model_provider, forward_step_func=forward_step, config_overrides=config_overrides)
        setup_data(run, pretrain_gpt.train_valid_test_datasets_provider, num_workers=0)
        yield run
    finally:
        publish_run(None)
        parallel_state.destroy_model_parallel()
        destroy_num_microbatches_calculator()


def comparable(report: StepReport) -> dict[str, Any]:
    """Every number of a step that two equal runs share: not time or memory. The norm as text: NaN equals no NaN."""
    return {
        **vars(report),
        "seconds": None,
        "memory": None,
        "held": None,
        "notes": None,
        "grad_norm": repr(report.grad_norm),
    }


def train_steps(run: TrainingRun, count: int) -> list[dict[str, Any]]:
    """What the next steps report, as `comparable` has it."""
    return [comparable(run.measured(train_step(run)[0])) for _ in range(count)]


@dataclass
class Recorder:
    """What a rank read and what gradients it had. batches: by step, then microbatch. grads: by step, then name."""

    batches: list[list[Batch]] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)

    def attach(self, run: TrainingRun) -> None:
        """Writes down the batches and the reduced gradients of all steps from now on."""
        assert run.train_iterator is not None
        run.train_iterator = self._watch(run.train_iterator)
        # Directly behind the reduction: the optimizer's kernel divides by the clip factor in place.
        for chunk in run.model:
            vars(chunk)["finish_grad_sync"] = partial(self._finish_grad_sync, chunk, chunk.finish_grad_sync)

    def _watch(self, iterator: Iterator[Batch]) -> Iterator[Batch]:
        for batch in iterator:
            if len(self.batches) == len(self.grads):
                self.batches.append([])
            self.batches[-1].append(batch)
            yield batch

    def _finish_grad_sync(self, model: DistributedDataParallel, finish_grad_sync: Callable[[], None]) -> None:
        finish_grad_sync()
        self.grads.append({_plain_name(name): grad.clone() for name, grad in model.named_main_grads()})


@dataclass
class Recording:
    """A rank's part of a run. initial, final: parameters by Megatron's names, before and after it."""

    batches: list[list[Batch]]
    grads: list[dict[str, Tensor]]
    reports: list[StepReport]
    initial: dict[str, Tensor]
    final: dict[str, Tensor]


def record_run(argv: Sequence[str], steps: int, *, save: bool = False, **parts: Callable[..., Any]) -> Recording:
    """Makes `steps` steps, and at the end a checkpoint if `save`; parts: as for started_run."""
    recorder = Recorder()
    with started_run(argv, **parts) as run:
        recorder.attach(run)
        initial = parameters(*run.model)
        reports = [train_step(run)[0] for _ in range(steps)]
        if save:
            run.save_checkpoint()
        return Recording(recorder.batches, recorder.grads, reports, initial, parameters(*run.model))


def gather_parameters(run: TrainingRun) -> None:
    """Waits for what the last step's gathers bring, for who reads parameters of a run outside their modules."""
    for chunk in run.model:
        chunk.start_param_sync(force_sync=True)


def parameters(*model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters, any shape and float dtype, by name without the wrappers' prefixes."""
    named = (item for chunk in model for item in chunk.named_parameters())
    return {_plain_name(name): parameter.detach().clone() for name, parameter in named}


def _plain_name(name: str) -> str:
    return name.removeprefix("module.").removeprefix("module.")


def state_of(run: TrainingRun) -> dict[str, str]:
    """All that the rest of a run depends on, by name: digests of tensors, the rest as text."""
    assert run.optimizer is not None and run.scheduler is not None
    gather_parameters(run)
    named = ((index, item) for index, chunk in enumerate(run.model) for item in chunk.state_dict().items())
    tensors: dict[str, Tensor] = {f"{index} {name}": value for index, (name, value) in named}
    pieces = {name: piece for chunk in run.model for name, piece in model_logical_pieces(chunk).items()}
    boxes = [*run.optimizer.sharded_state(pieces), *rng_sharded_state(run.groups)]
    tensors |= {f"{box.key} {box.global_offset}": box.data for box in boxes}
    groups = [(group["lr"], group["weight_decay"]) for group in run.optimizer.param_groups]
    others = [run.optimizer.state_dict(), run.scheduler.state_dict(), groups, run.state.state_dict()]
    return {**{name: _digest(tensor) for name, tensor in tensors.items()}, "others": repr(others)}


def check_relay(argvs: Sequence[Sequence[str]], order: Sequence[int], folder: str) -> None:
    """A run of argvs[0], and the same steps in a relay: each of `order`, indices of argvs, makes two of them, from the
    checkpoint of the one before. The last must cut buckets, and so states, as the whole run does.
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


def _digest(tensor: Tensor) -> str:
    mine = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    data = mine.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data.tobytes(), digest_size=16).hexdigest()
