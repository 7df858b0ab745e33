"""The entry points that training scripts know: get_forward_backward_func and the functions it returns.

Thin: schedule.py lists the actions, runner.py executes them.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from megatron.core.model_parallel_config import validate_callables
from megatron.core.parallel_state import existing_process_groups
from megatron.core.pipeline_parallel.runner import ForwardStep, ScheduleRunner
from megatron.core.pipeline_parallel.schedule import forward_only as without_backward
from megatron.core.pipeline_parallel.schedule import no_pipelining_schedule
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config


def get_forward_backward_func() -> Callable[..., list[dict[str, torch.Tensor]]]:
    """The function that runs forward and backward of all microbatches of a step in the current layout.

    It returns a report a microbatch: name to a tensor [] or [2] (sum, count), fp32.
    """
    return forward_backward_no_pipelining


@record_function("forward_backward_no_pipelining")
def forward_backward_no_pipelining(
    *,
    forward_step_func: ForwardStep,
    data_iterator: Iterator[Any] | list[Iterator[Any]] | None,
    model: nn.Module | list[nn.Module],
    num_microbatches: int,
    seq_length: int | None = None,
    micro_batch_size: int | None = None,
    forward_only: bool = False,
    pg_collection: ProcessGroupCollection | None = None,
) -> list[dict[str, torch.Tensor]]:
    """Runs `num_microbatches` one after the other without pipeline stages.

    Returns what the loss function reported of each: name to a tensor [] or [2] (sum, count), fp32.
    `seq_length` and `micro_batch_size` are what stages would exchange; without stages they have no part.
    pg_collection: the groups of this rank; None: those of parallel_state, if there are any.
    """
    chunk = _only(model)
    config = get_model_config(chunk)
    # Again, because scripts set them after the configuration was made.
    validate_callables(config)
    runner = ScheduleRunner(
        forward_step=forward_step_func,
        data_iterator=_only(data_iterator),
        model=chunk,
        config=config,
        num_microbatches=num_microbatches,
        cp_group=(pg_collection or existing_process_groups()).cp,
    )
    actions = no_pipelining_schedule(num_microbatches)
    if not forward_only:
        return runner.run(actions)
    with torch.no_grad():
        return runner.run(without_backward(actions))


def _only(item: Any) -> Any:
    """Scripts may pass lists with one entry a model chunk; without pipelining there is one."""
    if not isinstance(item, list):
        return item
    if len(item) != 1:
        raise ValueError(f"{len(item)} model chunks were given: without pipeline parallelism there is exactly 1")
    return item[0]
