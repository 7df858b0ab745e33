"""A small net in TorchFullyShardedDataParallel, its training runs, and hooks that record their calls.

Holds no tests.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from megatron.core.dist_checkpointing import model_logical_pieces
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
    TorchFullyShardedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.distributed.grad_hooks import ReadyBucket
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

T = TypeVar("T", bound=Any)
STEPS, WORDS = 3, 11
DETERMINISTIC = ModelParallelConfig(deterministic_mode=True)
FSDP2 = TorchFullyShardedDataParallelConfig(grad_reduce_in_fp32=True)
# (loss of a step's last micro-batch, gradient norm)
Loss = tuple[float, float]
# Calls set_reshard_after_backward(False) on torch's module, so weights stay gathered through backward and updates.
KEPT_ALWAYS = "kept over backwards"
MODES = {
    "freed": FSDP2,
    "kept": replace(FSDP2, reshard_after_forward=False),
    "offloaded": replace(FSDP2, cpu_offload=True),
    "gathered ahead": replace(FSDP2, forward_prefetch=2, backward_prefetch=2),
    KEPT_ALWAYS: FSDP2,
}


class Net(nn.Module):
    """Embedding, three residual MLPs of odd widths, and an output layer.

    `unused` gets no gradient; `tied` shares the embedding weight with the output.
    """

    def __init__(self, *, tied: bool = False, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(WORDS, 6)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 6)) for _ in range(3))
        self.out = nn.Linear(6, WORDS, bias=False)
        self.unused = nn.Linear(1, 3)
        self.recompute = recompute
        if tied:
            self.out.weight = self.table.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.table(words)
        for layer in self.layers:
            hidden = hidden + (checkpoint(layer, hidden, use_reentrant=True) if self.recompute else layer(hidden))
        return self.out(hidden).float()


def wrap_net(net: nn.Module, config: DistributedDataParallelConfig | None = FSDP2) -> Any:
    """Wraps the net in TorchFullyShardedDataParallel, or in DistributedDataParallel if `config` is None."""
    if isinstance(config, TorchFullyShardedDataParallelConfig):
        return TorchFullyShardedDataParallel(DETERMINISTIC, config, net)
    return DistributedDataParallel(DETERMINISTIC, DistributedDataParallelConfig(grad_reduce_in_fp32=True), net)


def loss_of_words(wrapped: nn.Module, generator: torch.Generator) -> torch.Tensor:
    """Returns the mean loss on the next random words of a generator: scalar."""
    words = torch.randint(0, WORDS, (4, 5), generator=generator)
    return nn.functional.cross_entropy(wrapped(words).view(-1, WORDS), words.roll(1, 1).view(-1))


def train_losses(wrapped: Any, *, bf16: bool = False, microbatches: int = 1, is_reduced: bool = True) -> list[Loss]:
    """Trains with Adam and returns each step's loss and gradient norm.

    is_reduced: gradients are reduced after each micro-batch, not once per step.
    """
    config = OptimizerConfig(optimizer="adam", lr=0.01, bf16=bf16, clip_grad=1.0, deterministic_mode=True)
    optimizer = get_megatron_optimizer(config, [wrapped])
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        for left in reversed(range(microbatches)):
            earlier = wrapped.accumulate if is_reduced else wrapped.no_sync
            with earlier() if left else nullcontext():
                loss = loss_of_words(wrapped, generator) / microbatches
                loss.backward()
        wrapped.finish_grad_sync()
        _, norm, _ = optimizer.step()
        losses.append((loss.item(), norm))
    return losses


class Counted:
    """Records the calls of hooks, in order, by kind and parameter name."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def on_param(self, name: str) -> Callable[[nn.Parameter], None]:
        """Returns a post-accumulate hook for the parameter `name`."""

        def note(owned: nn.Parameter) -> None:
            assert isinstance(owned, DTensor) and isinstance(owned.grad, DTensor) and owned.grad.shape == owned.shape
            self.seen.append(("param", name))

        return note

    def on_bucket(self, bucket: ReadyBucket) -> None:
        """Records a bucket hook's call for each parameter of the bucket."""
        assert bucket.shard.shape == bucket.grad.shape
        self.seen += [("bucket", one.name) for one in bucket.slices]

    def after(self, found: list[ReadyBucket]) -> None:
        """Records a post-backward hook's call for each parameter."""
        self.seen += [("after", one.name) for bucket in found for one in bucket.slices]

    def watch(self, net: nn.Module, wrap: Callable[[nn.Module], T]) -> T:
        """Wraps the net and registers hooks of all kinds on every parameter, on the first one before wrapping."""
        first, *others = net.named_parameters()
        first[1].register_post_accumulate_grad_hook(self.on_param(first[0]))
        wrapped = wrap(net)
        params = dict(wrapped.module.named_parameters())
        for name, _ in others:
            wrapped.register_post_accumulate_grad_hook(params[name], self.on_param(name))
        wrapped.register_bucket_ready_hook(self.on_bucket)
        wrapped.register_post_backward_hook(params.values(), self.after)
        return wrapped

    def take(self) -> list[tuple[str, str]]:
        """Returns the calls recorded since the previous take() and clears the record."""
        seen, self.seen = self.seen, []
        return seen


class Run:
    """Trains a module under FSDP2 with a learning rate that halves every second step.

    settings: fields of OptimizerConfig; clip_grad is 0 by default.
    """

    def __init__(self, module: nn.Module, *, mode: str = "freed", in_backward: bool = True, **settings: Any) -> None:
        checked = settings.pop("check_for_nan_in_grad", False)
        config = replace(MODES[mode], release_gradients=in_backward, check_for_nan_in_grad=checked)
        self.model = TorchFullyShardedDataParallel(DETERMINISTIC, config, module)
        self.model.module.set_reshard_after_backward(mode != KEPT_ALWAYS)
        if not in_backward:
            settings.pop("optimizer_in_backward_clip", None)
        given: dict[str, Any] = {
            "lr": 0.05,
            "clip_grad": 0.0,
            "deterministic_mode": True,
            "log_num_zeros_in_grad": True,
        }
        given |= {"optimizer_in_backward": in_backward}
        self.optimizer = get_megatron_optimizer(OptimizerConfig(**{**given, **settings}), [self.model])
        self.generator = torch.Generator().manual_seed(dist.get_rank())
        self.num_steps = 0

    def backward(self, *, count: int = 1, factor: float = 1.0) -> float:
        """Runs the forward and backward passes of a step and returns the loss.

        count: number of micro-batches. factor: multiplies the loss.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = 0.05 * 0.5 ** (self.num_steps // 2)
        self.optimizer.zero_grad()
        total = 0.0
        for left in reversed(range(count)):
            with self.model.accumulate() if left else nullcontext():
                loss = loss_of_words(self.model, self.generator) * (factor / count)
                self.optimizer.scale_loss(loss).backward()
            total += loss.item()
        return total

    def step(self, *, count: int = 1, factor: float = 1.0) -> list[Any]:
        """Runs a training step and returns its report. count: number of micro-batches. factor: multiplies the loss."""
        loss = self.backward(count=count, factor=factor)
        finalize_model_grads([self.model])
        self.num_steps += 1
        return [loss, *self.optimizer.step(), float(self.optimizer.get_loss_scale()), self.optimizer.params_norm()]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies this rank's weight shards and optimizer states into a dictionary by name."""
        boxes = self.optimizer.sharded_state(model_logical_pieces(self.model))
        states = {f"{box.key} {box.global_offset}": box.data.clone() for box in boxes}
        return {one.range.name: one.values.clone() for one in self.model.shard_weights()} | states
