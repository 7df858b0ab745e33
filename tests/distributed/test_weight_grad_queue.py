"""Weight gradients that a WeightGradQueue computes later change no bit of training, however gradients are reduced."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
    TorchFullyShardedDataParallelConfig,
)
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import DistributedFusedAdam, OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import CheckpointFunction
from tests.distributed.wrapper_modes import wrapper_modes
from tests.harness import run_on_ranks
from tests.unit_tests.core.models.small_models import small_batch, small_config, small_model
from tests.unit_tests.core.tensor_parallel.test_weight_grad_queue import (
    FLAG,
    FULL,
    MOE,
    Lagging,
    Watching,
    linear,
)

FIELDS: dict[str, dict[str, Any]] = {
    "experts": MOE,
    "experts alone served": MOE,
    "recomputed, mtp": {**MOE, **FULL, "mtp_num_layers": 1},
    "deterministic": {**MOE, "deterministic_mode": True},
}
MODES = {
    **wrapper_modes(bucket_size=3000),
    "debug": ({"overlap_grad_reduce": True, "bucket_size": 3000, "ddp_debug": True}, {}),
}
RUNS: list[tuple[str, str]] = [
    *(("experts", mode) for mode in MODES),
    *(("recomputed, mtp", mode) for mode in ("ddp, overlapped", "zero2, overlapped", "zero1 in backward")),
    ("deterministic", "zero2"),
    *(("experts alone served", mode) for mode in ("zero2, overlapped", "ddp in backward")),
]
STEPS, MICROBATCHES = 3, 2


def _model(fields: str) -> Any:
    return small_model(small_config(**FIELDS[fields]), share_embeddings_and_output_weights=True)


def _backwards(model: nn.Module, queue: Lagging | None, step: int, accumulating: Any) -> None:
    for number in range(MICROBATCHES):
        with nullcontext() if number == MICROBATCHES - 1 else accumulating():
            input_ids, position_ids, labels = small_batch()
            loss = model(input_ids, position_ids, None, labels=labels).mean() * (1 + step + number + dist.get_rank())
            with nullcontext() if queue is None else queue.holding():
                loss.backward()


def _queue(model: nn.Module, lag: int | None, part: str = "") -> Lagging | None:
    """Returns a queue that serves parameters whose names contain `part`; lag: as in Lagging, or -1 for no queue."""
    if lag == -1:
        return None
    queue = Lagging(lag)
    queue.serve((name, param) for name, param in model.named_parameters() if part in name)
    return queue


def _trained(fields: str, mode: str, lag: int | None) -> dict[str, Tensor]:
    """Trains in a mode of the wrapper and returns the parameters."""
    model, (settings, optimizing) = _model(fields), MODES[mode]
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(**settings), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.01, clip_grad=0.5, **optimizing), [wrapped])
    queue = _queue(model, lag, part=".experts." if fields == "experts alone served" else "")
    for step in range(STEPS):
        optimizer.zero_grad()
        _backwards(wrapped, queue, step, wrapped.accumulate)
        wrapped.finish_grad_sync()
        optimizer.step()
    wrapped.start_param_sync(force_sync=True)
    assert queue is None or queue.most > (lag or 3)
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def _trained_unwrapped(lag: int | None) -> dict[str, Tensor]:
    """Trains with DistributedFusedAdam alone, whose hooks find gradients of plain autograd."""
    model = _model("experts")
    optimizer = DistributedFusedAdam(model.parameters(), lr=0.01, bucket_cap_mb=0.01)
    queue = _queue(model, lag)
    for step in range(STEPS):
        optimizer.zero_grad()
        _backwards(model, queue, step, optimizer.no_sync)
        optimizer.step()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


class Twice(nn.Module):
    """A weight with two uses, each in a recomputed part with a backward of its own, and other weights in between.

    between: called in backward after the first of these parts.
    """

    def __init__(self, between: Callable[[], None]) -> None:
        super().__init__()
        self.between = between
        self.others = nn.ParameterList([torch.ones(4) for _ in range(4)])
        # Last, so that it is reduced first.
        self.weight = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(2)))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = CheckpointFunction.apply(partial(linear, weight=self.weight), False, x)
        for other in self.others:
            hidden = hidden * other
        hidden = Watching.apply(hidden, self.between)
        product: Tensor = CheckpointFunction.apply(partial(linear, weight=self.weight), False, hidden)
        return product.square().sum()


def _trained_twice(lag: int | None) -> Tensor:
    """Updates the weight in backward, which must wait for both gradients, although the first is computed outside."""
    queue = Lagging(lag)
    module, (settings, _) = Twice(queue.run), MODES["ddp in backward"]
    config = DistributedDataParallelConfig(**{**settings, "bucket_size": 4})
    wrapped = DistributedDataParallel(ModelParallelConfig(), config, module)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.01, clip_grad=0.0, optimizer_in_backward=True), [wrapped])
    if lag != -1:
        queue.serve(module.named_parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        with queue.holding():
            wrapped(torch.ones(3, 4, requires_grad=True)).backward()
        wrapped.finish_grad_sync()
        optimizer.step()
    assert lag == -1 or queue.most == 1
    return module.weight.detach()


def _refused_by_fsdp2() -> None:
    config = TorchFullyShardedDataParallelConfig()
    model = _model("experts")
    queue = _queue(model, None)
    with pytest.raises(ValueError, match=f"is served by a WeightGradQueue .{FLAG}, .*call release.. on the queue"):
        TorchFullyShardedDataParallel(model.config, config, model)
    assert queue is not None
    queue.release()
    wrapped = TorchFullyShardedDataParallel(model.config, config, model)
    with pytest.raises(ValueError, match=f"is a DTensor, as in .* omit {FLAG}, or --use-torch-fsdp2"):
        _queue(wrapped, None)


def _compare() -> None:
    parallel_state.initialize_model_parallel()
    for fields, mode in RUNS:
        expected, *found = (_trained(fields, mode, lag) for lag in (-1, None, 2))
        for one in found:
            differing = [name for name, param in expected.items() if not torch.equal(param, one[name])]
            assert not differing, (fields, mode, differing)
    expected, *found = (_trained_unwrapped(lag) for lag in (-1, None, 2))
    assert all(torch.equal(param, one[name]) for one in found for name, param in expected.items())
    assert torch.equal(_trained_twice(-1), _trained_twice(None))
    _refused_by_fsdp2()


def test_training_has_the_same_bits_in_all_modes() -> None:
    run_on_ranks(_compare, 2)
