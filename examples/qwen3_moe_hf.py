"""Trains Hugging Face's own Qwen3-MoE over several processes, with data parallelism, ZeRO and a paged stash, without
its Trainer.

    python examples/qwen3_moe_hf.py --check
    torchrun --nproc-per-node 3 examples/qwen3_moe_hf.py --check --save /tmp/counting
    torchrun --nproc-per-node 2 examples/qwen3_moe_hf.py --from /tmp/counting --steps 5
    torchrun --nproc-per-node 2 examples/qwen3_moe_hf.py --optimizer fused_adam --no-stash

The module is transformers' module, with the same weight names. --optimizer selects how its gradients and Adam's states
are sharded:

    zero2        DistributedDataParallel with sharded gradients, and distributed_fused_adam (default)
    zero1        DistributedDataParallel with whole gradients, reduced once per step, and a sharded Adam
    fused_adam   only the class DistributedFusedAdam, sharded like zero2. It reduces gradients itself, so the module is
                 not wrapped; a wrapper would look for gradients that are already released

In all three modes gradients are reduced during backward. The experts' saved tensors are stored in a paged stash
(paged_stash_hf.py describes its benefit for this model). --check trains plain PyTorch on one process with AdamW and the
whole batch, and fails if a loss has a relative difference above 1e-4.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from benchmarks.live_bytes import LiveBytes  # noqa: E402
from examples.paged_stash_hf import CONFIG, use_stash  # noqa: E402
from megatron.core.device import default_device, peak_memory_bytes, prepare_device, require_launch  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.model_parallel_config import ModelParallelConfig  # noqa: E402
from megatron.core.optimizer import DistributedFusedAdam, OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.transformer.moe.paged_stash import Counter, PagedStash, PagePool, PoolLayout  # noqa: E402

LR, DECAY, CLIP = 3e-3, 0.1, 1.0
TOLERANCE = 1e-4  # relative difference of a loss
PAGE_BYTES = 4096


@dataclass(frozen=True)
class Trainer:
    """The model and optimizer functions that a training step uses.

    forward: the module or its wrapper. adds_up: context for all microbatches but the last. step: clips and updates, and
    returns the global gradient norm. gather: waits until every weight is up to date.
    """

    model: Qwen3MoeForCausalLM
    forward: Callable[..., Any]
    zero_grad: Callable[[], object]
    adds_up: Callable[[], AbstractContextManager[Any]]
    step: Callable[[], float]
    gather: Callable[[], object]


def under_ddp(model: Qwen3MoeForCausalLM, *, is_zero2: bool) -> Trainer:
    """Wraps the model with DistributedDataParallel and builds a sharded optimizer.

    is_zero2: shard the gradients as well. Gradients are reduced bucket by bucket.
    """
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        shard_gradients=is_zero2,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        bucket_size=50_000,
        grad_reduce_in_fp32=True,
    )
    ddp = DistributedDataParallel(ModelParallelConfig(deterministic_mode=True), settings, model)
    config = OptimizerConfig(
        optimizer="distributed_fused_adam" if is_zero2 else "adam",
        lr=LR,
        weight_decay=DECAY,
        clip_grad=CLIP,
        use_distributed_optimizer=True,
        bf16=next(model.parameters()).dtype == torch.bfloat16,
    )
    optimizer = get_megatron_optimizer(config, [ddp])

    def step() -> float:
        ddp.finish_grad_sync()
        _, norm, _ = optimizer.step()
        return float(norm or 0.0)

    # Sharded gradients are reduced in every backward, because no rank keeps whole gradients.
    adds_up = nullcontext if is_zero2 else ddp.no_sync
    return Trainer(model, ddp, optimizer.zero_grad, adds_up, step, partial(ddp.wait_params, model.parameters()))


def under_fused_adam(model: Qwen3MoeForCausalLM) -> Trainer:
    """Builds DistributedFusedAdam, which reduces gradients during backward. The module is not wrapped."""
    optimizer = DistributedFusedAdam(decay_groups(model), lr=LR, bucket_cap_mb=0.2, overlap_param_sync=True)

    def step() -> float:
        norm = optimizer.clip_grad_norm(CLIP)
        optimizer.step()
        return float(norm)

    return Trainer(model, model, optimizer.zero_grad, nullcontext, step, optimizer.param_sync)


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Returns parameter groups with weight decay for matrices but not for norms, as get_megatron_optimizer does."""
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.dim() > 1], "weight_decay": DECAY},
        {"params": [param for param in params if param.dim() == 1], "weight_decay": 0.0},
    ]


TRAINERS: dict[str, Callable[[Qwen3MoeForCausalLM], Trainer]] = {
    "zero1": partial(under_ddp, is_zero2=False),
    "zero2": partial(under_ddp, is_zero2=True),
    "fused_adam": under_fused_adam,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Trains on the processes that a launcher started, or on a single process."""
    options = parse_options(argv)
    require_launch()
    device = default_device()
    prepare_device(device)
    joins = "RANK" in os.environ and not dist.is_initialized()
    if joins:
        dist.init_process_group()
    model = build_model(options).to(device)
    stash = None if options.no_stash else build_stash(model, options)
    trainer = TRAINERS[options.optimizer](model)
    losses = []
    for step in range(options.steps):
        loss, norm = train_step(trainer, stash, step=step, options=options)
        losses.append(mean_over_ranks(loss))
        report(step, loss=losses[-1], norm=norm, stash=stash, device=device)
        if stash is not None:
            stash.reset()
    trainer.gather()
    if rank_and_size()[0] == 0:
        if stash is not None and options.steps:
            report_footprint(stash)
        if options.save:
            save(model, options.save)
        if options.check:
            compare(losses, options)
    if dist.is_initialized():
        dist.barrier()
    if joins:
        dist.destroy_process_group()


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line of this example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--from", dest="source", type=Path, help="folder with a Qwen3-MoE model; default: a tiny random model"
    )
    parser.add_argument("--save", type=Path, help="folder to save the model to, for from_pretrained")
    parser.add_argument("--optimizer", choices=TRAINERS, default="zero2")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=12, help="texts per step, over all processes (default: 12)")
    parser.add_argument("--micro-batch", type=int, default=2, help="texts per backward (default: 2)")
    parser.add_argument("--sequence", type=int, default=64, help="tokens per text (default: 64)")
    parser.add_argument("--bf16", action="store_true", help="use bf16 weights with fp32 masters")
    parser.add_argument("--no-stash", action="store_true", help="do not use a stash for the experts")
    parser.add_argument(
        "--device-pages",
        type=float,
        default=0.1,
        help="size of the device tier / bytes saved for backward (default: 0.1)",
    )
    parser.add_argument(
        "--host-pages", type=float, default=0.7, help="size of the host tier / bytes saved for backward (default: 0.7)"
    )
    parser.add_argument("--check", action="store_true", help="compare losses with plain PyTorch on one process")
    options = parser.parse_args(argv)
    if options.batch % (options.micro_batch * rank_and_size()[1]):
        parser.error(f"--batch {options.batch} must be a multiple of --micro-batch x processes")
    if options.check and options.bf16:
        parser.error("--check compares in fp32: omit --bf16")
    if options.source and not (options.source / "config.json").is_file():
        parser.error(f"--from is {options.source}: must be a folder with a config.json")
    return options


def build_model(options: argparse.Namespace) -> Qwen3MoeForCausalLM:
    """Builds the model on the CPU in fp32 or bf16, with the same weights on all ranks.

    Raises SystemExit if the folder contains a different kind of model.
    """
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    torch.manual_seed(1234)
    if options.source is None:
        return Qwen3MoeForCausalLM(CONFIG).to(dtype)
    config = Qwen3MoeConfig.get_config_dict(options.source)[0]
    if config.get("model_type") != "qwen3_moe":
        raise SystemExit(f"--from {options.source} contains a {config.get('model_type')} model: must be qwen3_moe")
    # grouped_mm uses one buffer for all experts, with a number of rows that does not depend on the routing.
    return Qwen3MoeForCausalLM.from_pretrained(options.source, dtype=dtype, experts_implementation="grouped_mm")


def build_stash(model: Qwen3MoeForCausalLM, options: argparse.Namespace) -> PagedStash:
    """Builds a stash for the experts of every layer.

    Its pool is sized by the saved bytes of one text, times --micro-batch. Raises SystemExit if that is less than a
    page.
    """
    ids = texts(model, step=0, options=options)[:1]
    with LiveBytes() as made:
        # Assigned to a name so that the saved tensors are alive when they are counted.
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    pages = made.total() * options.micro_batch / PAGE_BYTES
    del loss
    try:
        layout = PoolLayout(PAGE_BYTES, int(options.device_pages * pages), int(options.host_pages * pages))
    except ValueError as error:
        raise SystemExit(f"--device-pages {options.device_pages}, --host-pages {options.host_pages}: {error}") from None
    stash = PagedStash(PagePool(str(model.device), layout))
    use_stash(model, stash)
    return stash


def train_step(
    trainer: Trainer, stash: PagedStash | None, *, step: int, options: argparse.Namespace
) -> tuple[Tensor, float]:
    """Runs one step of several microbatches.

    Returns this rank's mean loss, [], fp32, and the global gradient norm.
    """
    rank, ranks = rank_and_size()
    own = texts(trainer.model, step=step, options=options).chunk(ranks)[rank]
    *first, last = own.split(options.micro_batch)
    backward = partial(_backward, trainer, stash=stash, share=1 / (len(first) + 1))
    trainer.zero_grad()
    with trainer.adds_up():
        losses = [backward(ids) for ids in first]
    losses.append(backward(last))
    return torch.stack(losses).sum(), trainer.step()


def _backward(trainer: Trainer, ids: Tensor, *, stash: PagedStash | None, share: float) -> Tensor:
    """Runs forward and backward. Returns `share` times the microbatch's loss, [], fp32. ids: [M, S], int64."""
    loss = trainer.forward(input_ids=ids, labels=ids, use_cache=False).loss * share
    # Checked before backward, because some rows are indices, which must not be used if they were lost.
    if stash is not None and stash.is_void_sync():
        raise SystemExit("Pages ran out: increase --device-pages or --host-pages")
    loss.backward()
    return loss.detach().float()


def texts(model: Qwen3MoeForCausalLM, *, step: int, options: argparse.Namespace) -> Tensor:
    """Returns all texts of a step, [B, S], int64, on the model's device. They are the same for any number of processes.

    The texts count upwards from a random number. Replace them by your data.
    """
    vocabulary = model.config.vocab_size
    first = torch.randint(vocabulary, (options.batch, 1), generator=torch.Generator().manual_seed(step))
    return ((first + torch.arange(options.sequence)) % vocabulary).to(model.device)


def rank_and_size() -> tuple[int, int]:
    """Returns this process's rank and the number of processes."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def mean_over_ranks(loss: Tensor) -> float:
    """Returns the mean of the ranks' losses. loss: [], fp32, different on each rank."""
    if dist.is_initialized():
        dist.all_reduce(loss)
    return loss.item() / rank_and_size()[1]


def report(step: int, *, loss: float, norm: float, stash: PagedStash | None, device: torch.device) -> None:
    """Prints a step on rank 0: loss, gradient norm, the device's peak memory so far, and the peak of pages in use."""
    if rank_and_size()[0]:
        return
    memory = f"peak {peak_memory_bytes(device) / 1e6:.1f} MB"
    if stash is not None:
        counters = stash.pool.occupancy_sync().counters
        tiers = (counters[tier] * PAGE_BYTES / 1e6 for tier in (Counter.HIGH_WATER_DEVICE, Counter.HIGH_WATER_HOST))
        memory += " | pages: device {:.2f} MB, host {:.2f} MB".format(*tiers)
    print(f"step {step + 1}: loss {loss:.9f} grad norm {norm:.5f} | {memory}", flush=True)


def report_footprint(stash: PagedStash) -> None:
    """Prints the bytes that experts save for backward on the device, without and with the stash."""
    found = stash.footprint()
    static, arena, sets = (size / 1e6 for size in (found.static_bytes, found.arena_bytes, found.working_set_bytes))
    print(
        f"experts save {static:.2f} MB for backward; the device has {arena:.2f} MB of pages + {sets:.2f} MB of "
        f"buffers: saves {found.saving:.0%}",
        flush=True,
    )


def save(model: Qwen3MoeForCausalLM, folder: Path) -> None:
    """Saves the model for from_pretrained, loads it and continues a text with it."""
    model.save_pretrained(folder)
    loaded = Qwen3MoeForCausalLM.from_pretrained(folder)
    written = loaded.generate(torch.arange(8)[None], max_new_tokens=8, do_sample=False, pad_token_id=0)
    print(f"saved to {folder}; 0 to 7 is continued by {written[0, 8:].tolist()}", flush=True)


def compare(losses: Sequence[float], options: argparse.Namespace) -> None:
    """Trains plain PyTorch on this process. Raises SystemExit if a loss differs by more than the tolerance."""
    model = build_model(options).to(default_device())
    optimizer = torch.optim.AdamW(decay_groups(model), lr=LR)
    for step, loss in enumerate(losses):
        ids = texts(model, step=step, options=options)
        expected = model(input_ids=ids, labels=ids, use_cache=False).loss
        if not abs(loss - expected.item()) <= TOLERANCE * expected.item():
            raise SystemExit(f"step {step + 1}: the loss is {loss}, but plain PyTorch has {expected.item()}")
        optimizer.zero_grad()
        expected.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    print(f"All {len(losses)} losses agree with plain PyTorch and AdamW within {TOLERANCE}.", flush=True)


if __name__ == "__main__":
    main()
