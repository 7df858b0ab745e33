"""Measures the best learning rate by width, with and without maximal update parametrisation (--use-mup).

    python benchmarks/mup_transfer.py [--steps 80] [--json benchmarks/results/mup_transfer_cpu.json]

Trains a 2-layer GPT on a random process of tokens, whose next token depends on the last two, once for each width
and learning rate. Prints the mean loss of the last steps. At the first width, both parametrisations are the same.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

VOCAB, LENGTH, BATCH, HEAD = 64, 32, 16, 16
KEPT_STEPS = 20


def main() -> None:
    """Trains all models, prints the losses and writes them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0**power for power in range(-11, -3)])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    table: dict[str, dict[int, dict[str, Any]]] = {}
    for use_mup in (True, False):
        title = "with --use-mup" if use_mup else "without"
        print(f"{title:16}" + "".join(f"{rate:9.5f}" for rate in options.rates) + "  best")
        rows = table[title] = {}
        for width in options.widths:
            base = options.widths[0] if use_mup else None
            losses = [last_loss(width, rate, steps=options.steps, base=base) for rate in options.rates]
            best = options.rates[losses.index(min(losses))]
            rows[width] = {"losses": dict(zip(map(str, options.rates), losses)), "best": best}
            print(f"{width:16}" + "".join(f"{loss:9.3f}" for loss in losses) + f"  {best:.5f}", flush=True)
    if options.json is not None:
        setting = {"steps": options.steps, "torch": torch.__version__}
        options.json.write_text(json.dumps({**setting, **table}, indent=1) + "\n", encoding="ascii")


def last_loss(width: int, rate: float, *, steps: int, base: int | None) -> float:
    """Trains a model and returns the mean loss of the last steps.

    base: hidden size of the base model; None without the parametrisation. A non-finite loss counts as the loss of an
    untrained model.
    """
    config = TransformerConfig(
        num_layers=2,
        hidden_size=width,
        num_attention_heads=width // HEAD,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization="RMSNorm",
        add_bias_linear=False,
        init_seed=1,
        use_mup=base is not None,
        mup_base_hidden_size=base,
    )
    layers = get_gpt_decoder_block_spec(config)
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(),
        GPTModel(config, layers, VOCAB, LENGTH, position_embedding_type="rope"),
    )
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=rate, weight_decay=0.0), [model])
    process, positions = TokenProcess(), torch.arange(LENGTH).expand(BATCH, LENGTH)
    losses = []
    for step in range(steps):
        tokens = process.batch(step)
        for group in optimizer.param_groups:
            group["lr"] = rate * group["lr_mult"] * min(1, (step + 1) / 10) * (1 - step / steps)
        optimizer.zero_grad()
        loss = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean()
        loss.backward()
        finalize_model_grads([model])
        optimizer.step()
        losses.append(loss.item())
    mean = sum(losses[-KEPT_STEPS:]) / KEPT_STEPS
    return mean if math.isfinite(mean) else math.log(VOCAB)


class TokenProcess:
    """Token sequences whose next token is drawn from scores that depend on the two preceding tokens."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(11)
        self.first = 2 * torch.randn(VOCAB, VOCAB, generator=generator)
        self.second = 2 * torch.randn(VOCAB, VOCAB, generator=generator)

    def batch(self, step: int) -> torch.Tensor:
        """Returns the batch of a step, [BATCH, LENGTH + 1], int64. Equal steps return equal batches."""
        generator = torch.Generator().manual_seed(1000 + step)
        tokens = [torch.randint(VOCAB, (BATCH,), generator=generator) for _ in range(2)]
        while len(tokens) <= LENGTH:
            scores = self.first[tokens[-1]] + self.second[tokens[-2]]
            tokens.append(torch.multinomial(scores.softmax(-1), 1, generator=generator)[:, 0])
        return torch.stack(tokens, dim=1)


if __name__ == "__main__":
    main()
