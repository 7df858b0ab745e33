"""Trains Hugging Face's unmodified Qwen3-MoE twice: normally, and with its experts' saved tensors in a paged stash.

    python examples/paged_stash_hf.py                                      most pages on the host
    python examples/paged_stash_hf.py --device-pages 0.8 --host-pages 0    all on the device: saves nothing

Requires transformers 5. The stash is the folder megatron/core/transformer/moe/paged_stash, and benchmarks/live_bytes.py
measures memory.

With experts_implementation="grouped_mm" a layer's experts compute on one buffer of T x K rows: T tokens with K experts
each. None of the rows is padding, so device pages alone save nothing here, because they store the same bytes. The
benefit of the stash for this model is the host tier: rows without a device page are stored in host memory, and are
restored before their layer's backward. If buffers contain padding, device pages also save memory
(examples/paged_stash_pytorch.py).
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
from megatron.core.device import use_deterministic_kernels  # noqa: E402
from megatron.core.transformer.moe.paged_stash import Counter, PagedStash, PagePool, PoolLayout  # noqa: E402

BATCH, SEQUENCE = 4, 64
CONFIG = Qwen3MoeConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    moe_intermediate_size=96,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=4,
    max_position_embeddings=SEQUENCE,
    use_cache=False,
    experts_implementation="grouped_mm",
)


def use_stash(model: nn.Module, stash: PagedStash) -> None:
    """Runs every layer's experts in a context of the stash. Names and weights of the model do not change."""
    for name, module in model.named_modules():
        if isinstance(module, Qwen3MoeExperts):
            module.forward = partial(stashed_forward, stash, name, experts=module.forward)


def stashed_forward(
    stash: PagedStash, name: str, *inputs: Tensor, experts: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """Runs the experts in a context of the stash and returns their output, [T, H].

    inputs: hidden states, [T, H], any float dtype; expert indices and weights, [T, K].
    """
    rows = inputs[1].numel()  # T x K, all live
    with stash.context(name, rows, max_rows=rows):
        return experts(*inputs)


@dataclass
class Run:
    """Results by step.

    bytes_outside: bytes allocated in forward and still alive after it, without pages. counters: counters of the pool.
    """

    losses: list[float] = field(default_factory=list)
    bytes_outside: list[int] = field(default_factory=list)
    counters: list[list[int]] = field(default_factory=list)


def train(steps: int, device: str, *, pool: PagePool | None = None) -> Run:
    """Trains a small model for some steps, with a stash if a pool is given."""
    torch.manual_seed(1)
    model = Qwen3MoeForCausalLM(CONFIG)
    nn.Module.to(model, device)
    stash = None if pool is None else PagedStash(pool)
    if stash is not None:
        use_stash(model, stash)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run = Run()
    for _ in range(steps):
        # Sequences that count upwards from a random number.
        ids = (torch.randint(CONFIG.vocab_size, (BATCH, 1)) + torch.arange(SEQUENCE)) % CONFIG.vocab_size
        with LiveBytes() as made:
            loss = model(input_ids=ids.to(device), labels=ids.to(device)).loss
        run.losses.append(loss.item())
        run.bytes_outside.append(made.total())
        # Checked before backward, because some rows are indices, which must not be used if they were lost.
        if stash is not None and stash.is_void_sync():
            raise SystemExit("Pages ran out: increase --device-pages or --host-pages")
        loss.backward()
        if stash is not None:
            run.counters.append(stash.pool.counters.tolist())
            stash.reset()
        optimizer.step()
        optimizer.zero_grad()
    return run


def compare(plain: Run, stashed: Run, *, page_bytes: int) -> None:
    """Prints one line per step. Raises SystemExit if a loss is not bitwise equal."""
    print("step       loss | saved for backward, MB: plain | stash: outside + device pages | host pages")
    for step, counters in enumerate(stashed.counters):
        pages = [counters[tier] * page_bytes for tier in (Counter.HIGH_WATER_DEVICE, Counter.HIGH_WATER_HOST)]
        numbers = [plain.bytes_outside[step], stashed.bytes_outside[step], *pages]
        before, outside, device, host = (number / 1e6 for number in numbers)
        stash = f"{outside:6.2f} + {device:5.2f} = {outside + device:5.2f} ({(outside + device) / before:4.0%})"
        print(f"{step:4} {stashed.losses[step]:10.6f} | {before:28.2f} | {stash} | {host:10.2f}")
    if stashed.losses != plain.losses:
        raise SystemExit(f"The losses differ. Without the stash they are {plain.losses}")
    print(f"All {len(plain.losses)} losses are bitwise equal to the losses without the stash.")
    print("Every row is live, so all saved device memory is now in host pages. Device pages alone would save nothing.")


def main() -> None:
    """Trains without and with the stash, and compares the losses and the memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--page-bytes", type=int, default=4096)
    parser.add_argument(
        "--device-pages",
        type=float,
        default=0.2,
        help="size of the device tier / saved bytes of the plain run (default: 0.2)",
    )
    parser.add_argument(
        "--host-pages",
        type=float,
        default=0.6,
        help="size of the host tier / saved bytes of the plain run (default: 0.6)",
    )
    options = parser.parse_args()
    # This model accumulates some gradients in an order that depends on threads, so its losses differ between runs.
    use_deterministic_kernels()
    plain = train(options.steps, options.device)
    pages = max(plain.bytes_outside) / options.page_bytes
    try:
        layout = PoolLayout(options.page_bytes, int(options.device_pages * pages), int(options.host_pages * pages))
    except ValueError as error:
        parser.error(str(error))
    stashed = train(options.steps, options.device, pool=PagePool(options.device, layout))
    compare(plain, stashed, page_bytes=options.page_bytes)


if __name__ == "__main__":
    main()
