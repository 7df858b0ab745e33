"""Trains with DistributedFusedAdam in a custom training loop. The command line names the case and its settings."""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from megatron.core.optimizer import DistributedFusedAdam

sys.path.insert(0, str(Path(__file__).resolve().parent))

from step_log import Network, batch, digest_of_state, log_step, start  # type: ignore[import-not-found]

STEPS, SAVED_STEP, CLIP = 5, 3, 0.5
MIB = 1 << 20


@dataclass(frozen=True)
class Settings:
    """Settings of a case.

    adam: arguments of the optimizer's constructor. scale: initial loss scale; step 3 overflows. unscaled_by: object
    that divides gradients by the scale before clipping; None clips scaled gradients, which torch requires for fp16
    parameters. grid: size of the group that shards each state, and size of the group that replicates it.
    """

    adam: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    memory_format: torch.memory_format = torch.contiguous_format
    microbatches: int = 1
    scale: float | None = None
    unscaled_by: str | None = "scaler"
    groups: Callable[[nn.Module], Any] = nn.Module.parameters
    grid: tuple[int, int] | None = None


def _two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Returns two parameter groups: weights, and all other parameters with a different rate and no weight decay."""
    params = list(model.parameters())
    weights = [param for param in params if param.dim() > 1]
    others = [param for param in params if param.dim() <= 1]
    return [{"params": weights}, {"params": others, "lr": 0.01, "weight_decay": 0.0, "betas": (0.8, 0.9)}]


SMALL_BUCKETS = {"bucket_cap_mb": 2048 / MIB}
BF16, CHANNELS_LAST = torch.bfloat16, torch.channels_last
NO_MASTERS = {"store_params": False, "store_param_remainders": True}
SCALED = {"dtype": torch.float16, "with_scaled_states": True}
CASES = {
    "plain": Settings(),
    "microbatches": Settings(SMALL_BUCKETS, microbatches=3),
    "not_overlapped": Settings({**SMALL_BUCKETS, "overlap_grad_sync": False}, microbatches=2),
    "gathered_in_forward": Settings({**SMALL_BUCKETS, "overlap_param_sync": True}),
    "scaled": Settings(SMALL_BUCKETS, scale=2.0**16),
    "scaled_fp16": Settings(SMALL_BUCKETS, dtype=torch.float16, scale=2.0**8, unscaled_by=None),
    "unscaled": Settings(SMALL_BUCKETS, scale=2.0**16, unscaled_by="optimizer"),
    "channels_last": Settings({**SMALL_BUCKETS, "grad_sync_dtype": BF16}, dtype=BF16, memory_format=CHANNELS_LAST),
    "remainders": Settings({**SMALL_BUCKETS, **NO_MASTERS}, dtype=BF16),
    "scaled_states": Settings({**SMALL_BUCKETS, **SCALED}, dtype=BF16),
    "grid": Settings(SMALL_BUCKETS, grid=(2, 2)),
    "groups": Settings({**SMALL_BUCKETS, "adam_w_mode": False, "contiguous_grad_buffer": True}, groups=_two_groups),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Trains the case, logs the losses, gradient norm and parameters of each step, and saves after SAVED_STEP."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--load", help="checkpoint of SAVED_STEP to continue from")
    options = parser.parse_args(argv)
    settings = CASES[options.case]
    rank, _ = start()
    model, optimizer = build(settings)
    scaler = None
    if settings.scale is not None:
        scaler = torch.amp.GradScaler("cpu", init_scale=settings.scale, growth_interval=2)
    first = 1
    if options.load is not None:
        load(options.load, model, optimizer=optimizer)
        first = SAVED_STEP + 1
    for step in range(first, STEPS + 1):
        optimizer.zero_grad()
        losses = backward(model, optimizer, settings=settings, scaler=scaler, step=step, rank=rank)
        norm = update(optimizer, scaler, settings=settings)
        optimizer.param_sync()
        more = {} if scaler is None else {"scale": scaler.get_scale()}
        if step == STEPS:
            more["state"] = digest_of_state(optimizer.state_dict(state_dict_format="torch"))
        log_step(step, losses, params=model.parameters(), grad_norm=repr(float(norm)), **more)
        if step == SAVED_STEP:
            dcp.save(state_of(model, optimizer), checkpoint_id=f"ckpt/iter_{step:07d}")
    if dist.is_initialized():
        dist.destroy_process_group()


def state_of(model: nn.Module, optimizer: DistributedFusedAdam) -> dict[str, Any]:
    """Returns the state dict that torch.distributed.checkpoint saves or loads in place."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def load(folder: str, model: nn.Module, *, optimizer: DistributedFusedAdam) -> None:
    """Restores model and optimizer from a checkpoint."""
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def update(optimizer: DistributedFusedAdam, scaler: "torch.amp.GradScaler | None", *, settings: Settings) -> Tensor:
    """Clips gradients and updates parameters. Returns the gradient norm before clipping, [], fp32."""
    if scaler is None:
        norm = optimizer.clip_grad_norm(CLIP)
        optimizer.step()
        return norm
    if settings.unscaled_by == "optimizer":
        optimizer.unscale_grads(grad_scaler=scaler)
        norm = optimizer.clip_grad_norm(CLIP)
        optimizer.step(grad_scaler=scaler)
    else:
        if settings.unscaled_by == "scaler":
            scaler.unscale_(optimizer)
        norm = optimizer.clip_grad_norm(CLIP)
        scaler.step(optimizer)
    scaler.update()
    return norm


def build(settings: Settings) -> tuple[nn.Module, DistributedFusedAdam]:
    """Builds a model and its optimizer. Equal settings produce equal initial weights."""
    torch.manual_seed(1234)
    model = Network().to(dtype=settings.dtype, memory_format=settings.memory_format)
    groups = {} if settings.grid is None else grid_groups(settings.grid)
    optimizer = DistributedFusedAdam(settings.groups(model), lr=0.02, weight_decay=0.1, **{**settings.adam, **groups})
    return model, optimizer


def backward(
    model: nn.Module,
    optimizer: DistributedFusedAdam,
    *,
    settings: Settings,
    scaler: "torch.amp.GradScaler | None",
    step: int,
    rank: int,
) -> list[Tensor]:
    """Runs forward and backward for every microbatch of a step and returns the losses, each [] fp32.

    Gradients are reduced in the last microbatch.
    """
    losses = []
    for number in range(settings.microbatches):
        pictures, labels = batch(step, rank, number=number)
        pictures = pictures.to(dtype=settings.dtype, memory_format=settings.memory_format)
        is_last = number == settings.microbatches - 1
        with nullcontext() if is_last else optimizer.no_sync():
            loss = nn.functional.cross_entropy(model(pictures).float(), labels) / settings.microbatches
            factor = float("inf") if scaler is not None and step == 3 and rank == 0 else 1.0
            (loss if scaler is None else scaler.scale(loss) * factor).backward()
        losses.append(loss.detach())
    return losses


def grid_groups(sizes: tuple[int, int]) -> dict[str, Any]:
    """Returns the optimizer's process groups for a grid over all ranks. Adjacent ranks shard each state.

    sizes: number of ranks that shard each state, number of copies.
    """
    shards, copies = sizes
    ranks = torch.arange(shards * copies).view(copies, shards)
    distributed, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
    redundant, _ = dist.new_subgroups_by_enumeration(ranks.t().tolist())
    return {
        "process_group": dist.group.WORLD,
        "distributed_process_group": distributed,
        "redundant_process_group": redundant,
    }


if __name__ == "__main__":
    main()
