"""Small modules in DistributedDataParallel in every mode, and hooks that count calls or keep gradients.

Holds no tests.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.distributed.grad_hooks import ReadyBucket, RunState
from megatron.core.distributed.layout import Span
from megatron.core.model_parallel_config import ModelParallelConfig
from tests.unit_tests.core.optimizer.reference import microbatches

SHARDED = {"use_distributed_optimizer": True}
OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 37}
RELEASED = {"release_gradients": True, "bucket_size": 37}
STANDING: list[dict[str, Any]] = [
    {},
    OVERLAP,
    {**SHARDED, **OVERLAP},
    {**SHARDED, **OVERLAP, "overlap_param_gather": True},
    {**SHARDED, "shard_gradients": True, "bucket_size": 37},
    {**SHARDED, "shard_gradients": True, **OVERLAP, "overlap_param_gather": True},
]
MODES = [
    *STANDING,
    RELEASED,
    {**SHARDED, **RELEASED, **OVERLAP, "overlap_param_gather": True},
    {**SHARDED, **RELEASED, "shard_gradients": True},
]


def wrap(module: nn.Module, mode: dict[str, Any], **config: Any) -> DistributedDataParallel:
    """Wraps the module in a deterministic DistributedDataParallel with fp32 gradients."""
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **mode)
    return DistributedDataParallel(ModelParallelConfig(deterministic_mode=True, **config), settings, module)


def earlier(model: DistributedDataParallel) -> Callable[[], AbstractContextManager[None]]:
    """Returns the context manager for all microbatches but the last: no_sync for sharded gradients, else accumulate."""
    # With sharded gradients, accumulate() reduces every microbatch, which rounds sums differently than without shards.
    return model.no_sync if model.ddp_config.shard_gradients else model.accumulate


def backward(model: DistributedDataParallel, step: int, *, count: int = 2) -> None:
    """Runs the microbatches of a step, and reduces their gradients."""
    dtype = next(model.parameters()).dtype
    model.zero_grad_buffer()
    inputs = microbatches(10 * step + dist.get_rank(), count, dtype=dtype)
    for number, x in enumerate(inputs):
        with earlier(model)() if number < count - 1 else nullcontext():
            model(x).float().square().mean().backward()
    finalize_model_grads([model])


def in_each_mode(body: Callable[[dict[str, Any]], None], layout: dict[str, int] | None = None) -> None:
    """Calls `body` with every mode. layout: sizes of the parallel groups to initialize first."""
    if layout:
        parallel_state.initialize_model_parallel(**layout)
    for mode in MODES:
        body(mode)


def trained(model: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """Returns the parameters that require gradients, by name."""
    return {name: param for name, param in model.module.named_parameters() if param.requires_grad}


class Counted:
    """Counts the calls of hooks by kind and parameter name; a bucket counts once for each of its parameters."""

    def __init__(self) -> None:
        self.seen: Counter[tuple[str, str]] = Counter()

    def on_param(self, name: str) -> Callable[[nn.Parameter], None]:
        """Returns a post-accumulate hook for the parameter `name`."""

        def count(owned: nn.Parameter) -> None:
            assert owned.grad is not None and owned.grad.shape == owned.shape
            self.seen["param", name] += 1

        return count

    def on_bucket(self, bucket: ReadyBucket) -> None:
        """Counts a bucket hook's call for each parameter of the bucket."""
        assert bucket.shard.shape == bucket.grad.shape
        self.seen.update(("bucket", one.name) for one in bucket.slices)

    def after(self, found: list[ReadyBucket]) -> None:
        """Counts a post-backward hook's call for each parameter."""
        self.seen.update(("backward", one.name) for bucket in found for one in bucket.slices)

    def take(self) -> Counter[tuple[str, str]]:
        """Returns the counts since the previous take() and resets them."""
        seen, self.seen = self.seen, Counter()
        return seen


def once(names: Any) -> Counter[tuple[str, str]]:
    """Returns the counts of a step in which every hook of these parameters ran once."""
    return Counter({(kind, name): 1 for kind in ("param", "bucket", "backward") for name in names})


class Kept:
    """A consumer in the role of an optimizer in backward; keeps the gradients of every bucket by buffer and bucket."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.grads: dict[tuple[int, int], torch.Tensor] = {}
        self.num_begun, self._buffers = 0, model.all_buffers
        model.set_consumer(self)
        model.set_state_provider(self.states)

    def begin(self) -> None:
        """Drops the gradients of the previous step."""
        self.grads.clear()
        self.num_begun += 1

    def take(self, bucket: ReadyBucket, place: Any) -> None:
        """Keeps the gradients of a bucket."""
        key = self._buffers.index(place.buffer), place.layout.index
        assert key not in self.grads
        assert bucket.grad.numel() == place.buffer.owned_spans()[place.layout.index].numel
        self.grads[key] = bucket.keep()

    def states(self, place: Any) -> list[RunState]:
        """Returns one state per bucket, with the parameters as their own masters."""
        span = place.buffer.owned_spans()[place.layout.index]
        master = place.buffer.param_data[span.start : span.end]
        return [RunState(Span(0, span.numel), {"lr": 0.5}, master, {"count": torch.ones(span.numel)})]


def after_step(state: RunState, grad: torch.Tensor, step: int) -> dict[str, torch.Tensor]:
    """Returns the state after a step of torch's optimizer. grad: gradient of the same elements."""
    param = nn.Parameter(state.master.clone())
    param.grad = grad.to(param.dtype)
    rate, decay = state.settings["lr"], state.settings["weight_decay"]
    rule: torch.optim.Optimizer
    if "exp_avg" in state.moments:
        betas, eps = state.settings["betas"], state.settings["eps"]
        rule = torch.optim.AdamW([param], lr=rate, weight_decay=decay, betas=betas, eps=eps)
        rule.state[param]["step"] = torch.tensor(float(step))
    else:
        rule = torch.optim.SGD([param], lr=rate, weight_decay=decay, momentum=state.settings["momentum"])
    rule.state[param].update({name: moment.clone() for name, moment in state.moments.items()})
    rule.step()
    return {"master": param.detach(), **{name: rule.state[param][name] for name in state.moments}}
