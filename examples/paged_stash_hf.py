"""Hugging Face's Qwen3-MoE, unmodified, trained twice: as it is, and with what its experts keep in a paged stash.

    python examples/paged_stash_hf.py                                     some pages on the device, the rest on the host
    python examples/paged_stash_hf.py --device-pages 1 --host-pages 0     all on the device

Needs transformers 5 and, of this framework, the folder megatron/core/transformer/moe/paged_stash alone.

With experts_implementation="grouped_mm" a layer's experts work on one buffer of T x K rows: T tokens with K experts
each. No row of it is padding, so that device pages alone save nothing here: they hold the same bytes. What the stash
brings to this model is the host tier: what the device's pages do not hold waits in host memory, and comes back before
its layer's backward. Where buffers have room to spare the pages themselves save: examples/paged_stash_pytorch.py.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from benchmarks.live_bytes import LiveBytes  # noqa: E402
from megatron.core.transformer.moe.paged_stash import Counter, PagedStash, PagePool, PoolLayout  # noqa: E402

BATCH, SEQUENCE = 4, 64
CONFIG = Qwen3MoeConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    moe_intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=4,
    max_position_embeddings=SEQUENCE,
    use_cache=False,
    experts_implementation="grouped_mm",
)
HIGH_WATER = (Counter.HIGH_WATER_DEVICE, Counter.HIGH_WATER_HOST)


def use_stash(model: nn.Module, stash: PagedStash) -> None:
    """Lets every layer's experts run in a context of the stash; names and weights of the model stay as they are."""
    for name, module in model.named_modules():
        if isinstance(module, Qwen3MoeExperts):
            module.forward = partial(stashed_forward, stash, name, experts=module.forward)


def stashed_forward(
    stash: PagedStash, name: str, *inputs: Tensor, experts: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """inputs: hidden states [T, H], any float dtype, experts and weights of each token [T, K]. Returns [T, H]."""
    rows = inputs[1].numel()  # T x K, all of them live
    with stash.context(name, rows, max_rows=rows):
        return experts(*inputs)


@dataclass
class Run:
    """What a training saw of each step: the exact loss; bytes held for backward outside of pages; pages."""

    losses: list[str] = field(default_factory=list)
    held_bytes: list[int] = field(default_factory=list)
    pages: list[list[int]] = field(default_factory=list)


def train(steps: int, device: str, *, pool: PagePool | None = None) -> Run:
    """Trains a small model for some steps, with a stash if there is a pool for it."""
    torch.manual_seed(1)
    model = Qwen3MoeForCausalLM(CONFIG)
    nn.Module.to(model, device)
    stash = None if pool is None else PagedStash(pool)
    if stash is not None:
        use_stash(model, stash)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = Run()
    for _ in range(steps):
        starts, strides = torch.randint(CONFIG.vocab_size, (BATCH, 1)), torch.randint(1, 4, (BATCH, 1))
        ids = ((starts + strides * torch.arange(SEQUENCE)) % CONFIG.vocab_size).to(device)
        with LiveBytes() as made:
            loss = model(input_ids=ids, labels=ids).loss
        run.held_bytes.append(made.total())
        loss.backward()
        if stash is not None:
            counters = stash.pool.counters.tolist()
            run.pages.append([counters[which] for which in HIGH_WATER])
            if stash.is_void_sync():
                raise SystemExit("Some rows found no pages, so that gradients are wrong: give more pages")
            stash.reset()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item().hex())
    return run


def print_both(plain: Run, stashed: Run, *, page_bytes: int) -> None:
    """A line a step, and what was the most."""
    print("          loss   held for backward, MB: plain    with the stash: outside + device pages, host pages")
    on_device = []
    for step, (device, host) in enumerate(stashed.pages):
        on_device.append(stashed.held_bytes[step] + device * page_bytes)
        print(
            f"step {step}  {float.fromhex(stashed.losses[step]):.4f}  {plain.held_bytes[step] / 1e6:27.2f}"
            f"{stashed.held_bytes[step] / 1e6:27.2f} + {device * page_bytes / 1e6:.2f}, {host * page_bytes / 1e6:.2f}"
        )
    most, share = max(on_device), max(on_device) / max(plain.held_bytes)
    print(f"Most on the device: {max(plain.held_bytes):,} bytes plain, {most:,} with the stash, {share:.0%}.")
    print("Every row is live, so that what the device no longer holds is on the host: pages alone save nothing here.")
    if stashed.losses != plain.losses:
        raise SystemExit("Losses differ: a bug")
    print(f"All {len(plain.losses)} losses are equal, bit for bit.")


def main() -> None:
    """Trains without and with the stash, and prints both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--page-bytes", type=int, default=4096)
    what = "tier of the pool, as a share of what the plain run holds for backward"
    parser.add_argument("--device-pages", type=float, default=0.2, help=f"device {what} (default: 0.2)")
    parser.add_argument("--host-pages", type=float, default=0.8, help=f"host {what} (default: 0.8)")
    options = parser.parse_args()
    plain = train(options.steps, options.device)
    pages = max(plain.held_bytes) / options.page_bytes
    layout = PoolLayout(options.page_bytes, int(options.device_pages * pages), int(options.host_pages * pages))
    stashed = train(options.steps, options.device, pool=PagePool(options.device, layout))
    print_both(plain, stashed, page_bytes=options.page_bytes)


if __name__ == "__main__":
    main()
