"""What each kind of layer of a model computes and sends for a microbatch, by the run's own step of a short model.

Stages of any length are added up of it in stage_load.py; recorders by part are part_work.py's.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.distributed.param_and_grad_buffer import buffer_kind
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model
from megatron.planner.layer_facts import LayerKind, distinct_kinds, part_at, probe_args
from megatron.planner.part_work import NO_WORK, PartMessages, PartRecorder, PartWork, Table, together, without
from megatron.planner.plan import ForwardStep, as_rank, batch_of, pipeline_of
from megatron.planner.rates import Kernels
from megatron.planner.rehearsal import live_rows, rehearsing
from megatron.planner.step_time import BACKWARD, FORWARD, GRADS, PARAMS
from megatron.planner.traffic import Traffic
from megatron.training.setup import setup_model_and_optimizer

# Whose messages of gradients and parameters depend on how they lie in buckets.
_DATA_GROUPS = ("dp", "dp_cp", "edp")


@dataclass(frozen=True)
class ModelWork:
    """The kernels and messages of one rank of a layout, by part.

    embedding: of the first chunk of a pipeline; end: of what the last chunk has in addition to its layers, without a
    pipeline also the embedding. update: the optimizer's kernels for state_bytes of states. tied: messages about a table
    that the first and the last stage share. told: other messages sent once a step, without gradients and parameters of
    data-parallel ranks.
    """

    embedding: PartWork
    layers: Mapping[LayerKind, PartWork]
    end: PartWork
    update: Kernels
    state_bytes: int
    tied: tuple[Traffic, ...]
    told: tuple[Traffic, ...]

    def scaled(self, *, samples: float, experts: float, expert_ranks: float) -> "ModelWork":
        """Returns the work with every part scaled; see PartWork.scaled."""
        scale = partial(PartWork.scaled, samples=samples, experts=experts, expert_ranks=expert_ranks)
        layers = {kind: scale(part) for kind, part in self.layers.items()}
        return replace(self, embedding=scale(self.embedding), layers=layers, end=scale(self.end))


@dataclass(frozen=True)
class _Stage:
    """The recorded work of one stage of the short model. once: messages outside of passes."""

    parts: dict[str, PartWork]
    once: tuple[Traffic, ...]
    update: Kernels
    state_bytes: int


def model_work(
    args: argparse.Namespace,
    model_provider: Callable[..., nn.Module],
    *,
    forward_step: ForwardStep,
    of_each_kind: int = 2,
    has_all_replicas: bool = True,
) -> ModelWork:
    """Traces a step of a short model of validated args and returns its work by part.

    Raises ValueError as the run would for a layer that cannot be built. of_each_kind: layers that are run. The second
    one is like all that follow it, while the first may be mistaken for a part of what precedes it where its backward
    begins; 1 is faster. has_all_replicas: whether the short run has as many data-parallel ranks as the run.
    """
    kinds = distinct_kinds(args)
    pattern = [kind for kind in kinds for _ in range(of_each_kind)]
    probe = probe_args(args, pattern, has_all_replicas=has_all_replicas)
    stages = []
    for rank in pipeline_of(probe, 0):
        with as_rank(probe, rank) as groups:
            stages.append(_stage_of(probe, model_provider, forward_step=forward_step, groups=groups))
    last = stages[-1]
    layers = {
        kind: last.parts.get(f"layer {(number + 1) * of_each_kind - 1}", NO_WORK) for number, kind in enumerate(kinds)
    }
    # What parts are taken for the others' adds up all the same.
    end = without(together(last.parts.values()), [layers[kind] for kind in pattern])
    first = together(stages[0].parts.values()) if len(stages) > 1 else NO_WORK
    return ModelWork(
        first,
        layers,
        end,
        last.update,
        last.state_bytes,
        tied=tuple(one for one in last.once if _is_tied(one)) if len(stages) > 1 else (),
        told=tuple(one for one in last.once if not _is_tied(one) and not _is_data(one)),
    )


def _stage_of(
    args: argparse.Namespace,
    model_provider: Callable[..., nn.Module],
    *,
    forward_step: ForwardStep,
    groups: ProcessGroupCollection,
) -> _Stage:
    model, optimizer, _ = setup_model_and_optimizer(model_provider, ModelType.encoder_or_decoder, args=args)
    recorder = PartRecorder(
        model[0],
        live_rows=live_rows(args),
        part_of=partial(part_at, num_layers=len(unwrap_model(model[0]).decoder.layers)),
        tables=_tables(model[0], args),
    )
    messages = PartMessages(groups, lambda: recorder.part)
    with rehearsing(
        args, model, optimizer=optimizer, forward_step=forward_step, groups=groups, note=recorder.note
    ) as rehearsal:
        with recorder.recording():
            rehearsal.step(1, batch=batch_of(args), modes=[messages])
    once = tuple(one for one in messages.take() if one.phase not in (FORWARD, BACKWARD) and not _is_transfer(one))
    return _Stage(
        recorder.parts(messages.of_passes),
        once,
        recorder.update,
        state_bytes=sum(optimizer.state_bytes.values()),
    )


def _tables(chunk: nn.Module, args: argparse.Namespace) -> dict[int, list[Table]]:
    """Maps storages to the tables of a chunk's parameters and of their gradients, which have the same layout."""
    found: dict[int, list[Table]] = {}
    for param in chunk.parameters():
        kind = buffer_kind(param, grad_reduce_in_fp32=not args.grad_reduce_in_bf16, experts_apart=True)
        start = int(param.storage_offset())
        table = Table(start, start + param.numel(), kind.is_expert, tuple(param.shape))
        found.setdefault(param.untyped_storage()._cdata, []).append(table)
    assert isinstance(chunk, _BaseDataParallel), "wrapped as runs do"
    for buffer in chunk.all_buffers:
        of_params = found.get(buffer.param_data.untyped_storage()._cdata, [])
        found[buffer.grad_data.untyped_storage()._cdata] = of_params
    return found


def _is_data(one: Traffic) -> bool:
    return one.phase == PARAMS or (one.phase == GRADS and one.group in _DATA_GROUPS)


def _is_tied(one: Traffic) -> bool:
    return one.phase == GRADS and one.group in ("pp", "embd")


def _is_transfer(one: Traffic) -> bool:
    return one.operation in ("send", "receive")
