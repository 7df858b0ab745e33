"""The entry points used by training scripts: get_forward_backward_func and the functions it returns.

This is a thin layer: schedule.py lists the passes, transfers.py derives the transfers between stages, and runner.py
executes both.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron.core.config_field import require_defaults
from megatron.core.device.trace_ranges import trace_range
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.parallel_state import (
    check_placement,
    existing_process_groups,
    get_virtual_pipeline_model_parallel_world_size,
)
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.runner import ForwardStep, ScheduleRunner
from megatron.core.pipeline_parallel.schedule import configured_schedule, pipeline_of
from megatron.core.pipeline_parallel.transfers import pipeline_programs
from megatron.core.process_groups_config import ProcessGroupCollection, group_size
from megatron.core.tensor_parallel.tied_weights import follow_owner_once
from megatron.core.utils import get_model_config

ForwardBackward = Callable[..., list[Any]]


def get_forward_backward_func(
    pp_size: int | None = None,
    vp_size: int | None = None,
    schedule_pg_collection: ProcessGroupCollection | None = None,
) -> ForwardBackward:
    """Returns the function that runs forward and backward of all microbatches of a step in the current layout.

    pp_size, vp_size: pipeline stages and chunks per stage; None means the values of parallel_state.
    schedule_pg_collection: the groups of the schedule, which determine the number of stages if pp_size is None; the
    returned function uses them unless it is called with other groups. All three possible functions accept the same
    keywords, see `forward_backward`.
    """
    groups = schedule_pg_collection or existing_process_groups()
    stages = group_size(groups.pp) if pp_size is None else pp_size
    chunks = get_virtual_pipeline_model_parallel_world_size() if vp_size is None else vp_size
    chosen: ForwardBackward
    if stages == 1:
        chosen = forward_backward_no_pipelining
    elif chunks in (None, 1):
        chosen = forward_backward_pipelining_without_interleaving
    else:
        chosen = forward_backward_pipelining_with_interleaving
    return chosen if schedule_pg_collection is None else partial(chosen, pg_collection=schedule_pg_collection)


@trace_range("forward_backward_no_pipelining")
def forward_backward_no_pipelining(**arguments: Any) -> list[Any]:
    """Runs the microbatches one after the other, without pipeline stages. Keywords: see `forward_backward`."""
    return forward_backward(**arguments)


@trace_range("forward_backward_pipelining_without_interleaving")
def forward_backward_pipelining_without_interleaving(**arguments: Any) -> list[Any]:
    """Runs 1F1B over pipeline stages with one model chunk each. Keywords: see `forward_backward`."""
    return forward_backward(**arguments)


@trace_range("forward_backward_pipelining_with_interleaving")
def forward_backward_pipelining_with_interleaving(**arguments: Any) -> list[Any]:
    """Runs interleaved 1F1B over pipeline stages with several model chunks each. Keywords: see `forward_backward`."""
    return forward_backward(**arguments)


def forward_backward(
    *,
    forward_step_func: ForwardStep,
    data_iterator: Iterator[Any] | list[Iterator[Any] | None] | None,
    model: nn.Module | list[nn.Module],
    num_microbatches: int,
    seq_length: int | None = None,
    micro_batch_size: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    pg_collection: ProcessGroupCollection | None = None,
    **rest: Any,
) -> list[Any]:
    """Runs forward and backward of `num_microbatches` in the order that stages and chunks require. Collective.

    data_iterator, model: a single object, or a list with one per model chunk. seq_length, micro_batch_size: stages
    exchange tensors of shape [seq_length / cp (and / tp under sequence parallelism), micro_batch_size, hidden_size],
    hidden_dtype; unused without stages. collect_non_loss_data, with forward_only: see ScheduleRunner. pg_collection:
    the groups of this rank; None means the groups of parallel_state, if there are any. rest: other keywords of
    Megatron, see check_rest. Returns the loss function's report of each microbatch on the stage with the last part of
    the model, an empty list on other stages. A report maps names to tensors, [] or [2] (sum, count), fp32.
    """
    check_rest(rest, seq_length=seq_length)
    if collect_non_loss_data and not forward_only:
        raise ValueError(
            "collect_non_loss_data is True: requires forward_only, because there is no loss to run backward from"
        )
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches is {num_microbatches}: must be at least 1")
    chunks = list(model) if isinstance(model, list) else [model]
    config = get_model_config(chunks[0])
    groups = pg_collection or existing_process_groups()
    communicator = _communicator(rest.get("p2p_communicator"), groups, config)
    schedule = configured_schedule(config)
    pipeline = pipeline_of(schedule, communicator.num_stages, len(chunks))
    if pg_collection is None and communicator.num_stages > 1:
        check_placement(config.pipeline_schedule)
    if pipeline.is_v and communicator.stage == pipeline.loss_stage:
        # The wrapper of a chunk does not see the other chunk, which may have a copy of its embeddings.
        follow_owner_once(chunks)
    programs = pipeline_programs(
        pipeline,
        num_microbatches,
        schedule,
        without_backward=forward_only,
        overlap=config.overlap_p2p_comm,
    )
    if communicator.num_stages > 1:
        if seq_length is None or micro_batch_size is None:
            raise ValueError(
                f"seq_length is {seq_length} and micro_batch_size is {micro_batch_size}: pipeline stages require both"
            )
        parts = group_size(groups.cp) * (group_size(groups.tp) if config.sequence_parallel else 1)
        communicator.agree_on_shape((seq_length // parts, micro_batch_size, config.hidden_size))
    runner = ScheduleRunner(
        forward_step=forward_step_func,
        data_iterators=_one_a_chunk(data_iterator, chunks),
        model=chunks,
        config=config,
        num_microbatches=num_microbatches,
        communicator=communicator,
        cp_group=groups.cp,
        non_loss_data=collect_non_loss_data,
    )
    with torch.no_grad() if forward_only else nullcontext():
        return runner.run(programs[communicator.stage])


def check_rest(rest: dict[str, Any], *, seq_length: int | None) -> None:
    """Raises ValueError for keywords that Megatron supports but this function does not, TypeError for unknown ones.

    decoder_seq_length must be seq_length, because models are decoder-only. first_val_step is ignored; in Megatron it
    determines when 8-bit weights are converted. adjust_tensor_shapes_fn must be None, force_all_reduce False.
    p2p_communicator: see _communicator.
    """
    known = {"decoder_seq_length", "first_val_step", "adjust_tensor_shapes_fn", "p2p_communicator", "force_all_reduce"}
    unknown = sorted(rest.keys() - known)
    if unknown:
        raise TypeError(f"unexpected keyword arguments: {', '.join(unknown)}")
    require_defaults(
        "forward_backward",
        "stages exchange tensors of one shape, and finalize_model_grads_func reduces gradients as configured in the "
        "wrapper",
        adjust_tensor_shapes_fn=(rest.get("adjust_tensor_shapes_fn"), None),
        force_all_reduce=(rest.get("force_all_reduce") or False, False),
    )
    if rest.get("decoder_seq_length") not in (None, seq_length):
        raise ValueError(
            f"decoder_seq_length is {rest['decoder_seq_length']}: models have no encoder, so it must be seq_length "
            f"({seq_length})"
        )


def _communicator(given: Any, groups: ProcessGroupCollection, config: ModelParallelConfig) -> P2PCommunicator:
    """Returns the given communicator, or builds one over the stages of the groups.

    Raises ValueError for other classes, whose transfers the runner could not post, and for a different number of
    stages.
    """
    if given is None:
        return P2PCommunicator(groups.pp, config)
    if not isinstance(given, P2PCommunicator):
        raise ValueError(
            f"p2p_communicator is {type(given).__name__}: must be P2PCommunicator of "
            "megatron.core.pipeline_parallel.p2p_communication, or a subclass"
        )
    if given.num_stages != group_size(groups.pp):
        raise ValueError(
            f"p2p_communicator has {given.num_stages} stages: must have the {group_size(groups.pp)} stages of "
            "pg_collection"
        )
    return given


def _one_a_chunk(iterators: Any, chunks: list[nn.Module]) -> list[Any]:
    if not isinstance(iterators, list):
        iterators = [iterators]
    if len(iterators) != len(chunks):
        raise ValueError(
            f"data_iterator has {len(iterators)} iterators for {len(chunks)} model chunks: must be a list with one for "
            "each"
        )
    return iterators
