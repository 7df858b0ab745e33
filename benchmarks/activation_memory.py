"""Measures the savings and costs of activation recompute and offloading, on the layers of the model for CPU benchmarks.

    python benchmarks/activation_memory.py [--rounds 5] [--json FILE]

For each setting it reports the bytes saved for backward on the device after a forward of the layers, counted tensor by
tensor; the bytes in host buffers; and the CPU time of forward and backward, as the median over rounds of the
ratio to the plain model. All settings are interleaved in one process with one thread.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from benchmarks.live_bytes import LiveBytes  # noqa: E402
from benchmarks.sides import context  # noqa: E402
from megatron.core.device import keep_cpu_heap  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # noqa: E402
from megatron.core.transformer.enums import AttnBackend  # noqa: E402
from megatron.core.transformer.rope import RotaryEmbedding  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlock  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

SEQUENCE, MICRO_BATCH, HIDDEN, HEADS = 256, 4, 256, 4
LAYERS: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "ffn_hidden_size": 512,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.0,
    "normalization": "RMSNorm",
    "activation_func": F.silu,
    "gated_linear_unit": True,
    "add_bias_linear": False,
}
EXPERTS = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_grouped_gemm": True}
UNFUSED = {"attention_backend": AttnBackend.unfused}


def full(method: str, layers: int) -> dict[str, Any]:
    """Returns the settings that recompute whole layers."""
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}


def selective(*modules: str) -> dict[str, Any]:
    """Returns the settings that recompute parts of layers."""
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


def offload(*modules: str) -> dict[str, Any]:
    """Returns the settings that offload parts of layers."""
    return {
        "fine_grained_activation_offloading": True,
        "offload_modules": list(modules),
        "min_offloaded_tensor_size": 65536,
    }


MODELS: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "experts": (
        EXPERTS,
        {
            "full, uniform 1": full("uniform", 1),
            "full, uniform 2": full("uniform", 2),
            "full, block 2": full("block", 2),
            "layernorm": selective("layernorm"),
            "moe": selective("moe"),
            "core_attn": selective("core_attn"),
            "offload attn_norm qkv_linear core_attn attn_proj mlp_norm": offload(
                "attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"
            ),
            "offload expert_fc1 moe_act": offload("expert_fc1", "moe_act"),
            "offload 2 layers": {"cpu_offloading_num_layers": 2, "min_offloaded_tensor_size": 65536},
        },
    ),
    "dense, unfused attention": (
        UNFUSED,
        {
            "core_attn": selective("core_attn"),
            "mlp": selective("mlp"),
            "offload core_attn attn_proj": offload("core_attn", "attn_proj"),
        },
    ),
}


@dataclass
class Row:
    """One setting of one model.

    waiting: bytes saved for backward. host: bytes in host buffers. seconds: CPU seconds of each round.
    """

    model: str
    setting: str
    waiting: int
    host: int
    seconds: list[float]
    block: TransformerBlock
    rotary: Any

    def step(self) -> None:
        """Runs forward and backward."""
        start = time.process_time()
        self.forward().sum().backward()
        self.seconds.append(time.process_time() - start)

    def forward(self) -> Tensor:
        """Runs the layers and returns their output, [S, B, H], fp32."""
        torch.manual_seed(1)
        hidden = torch.randn(SEQUENCE, MICRO_BATCH, HIDDEN, requires_grad=True)
        return self.block(hidden, None, rotary_pos_emb=self.rotary(SEQUENCE))


def build(model: str, setting: str, *, fields: dict[str, Any]) -> Row:
    """Builds the layers with one setting, runs a warm-up step and counts their bytes."""
    config = TransformerConfig(**{**LAYERS, **fields})
    block = TransformerBlock(config, get_gpt_decoder_block_spec(config), post_layer_norm=False)
    row = Row(model, setting, 0, 0, [], block, RotaryEmbedding(HIDDEN // HEADS, SEQUENCE))
    row.step()
    with LiveBytes() as made:
        output = row.forward()
    offloader = block.arrangement.offloader
    # Does not count the output, which later layers save, and the input, which earlier layers save.
    row.waiting = made.total() - output.nbytes
    row.host = offloader.buffers.lent_bytes if offloader else 0
    output.sum().backward()
    row.seconds.clear()
    return row


def main() -> None:
    """Measures all settings and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds per setting (default: 5)")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_cpu_heap()
    figures = []
    for model, (fields, settings) in MODELS.items():
        rows = [build(model, name, fields={**fields, **setting}) for name, setting in {"plain": {}, **settings}.items()]
        for _ in range(options.rounds):
            for row in rows:
                row.step()
        figures += [figures_of(row, plain=rows[0]) for row in rows]
    print(f"{'model':26}{'setting':60}{'waiting MiB':>12}{'of plain':>10}{'host MiB':>10}{'cpu x':>8}")
    for one in figures:
        print(
            f"{one['model']:26}{one['setting']:60}{one['waiting_bytes'] / 2**20:12.1f}{one['of_plain']:10.2f}"
            f"{one['host_bytes'] / 2**20:10.1f}{one['cpu_x']:8.2f}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps({"rows": figures, "rounds": options.rounds, **context()}, indent=1) + "\n")


def figures_of(row: Row, *, plain: Row) -> dict[str, Any]:
    """Returns a row's results relative to the plain row of its model."""
    return {
        "model": row.model,
        "setting": row.setting,
        "waiting_bytes": row.waiting,
        "of_plain": row.waiting / plain.waiting,
        "host_bytes": row.host,
        "cpu_x": statistics.median(ours / theirs for ours, theirs in zip(row.seconds, plain.seconds)),
    }


if __name__ == "__main__":
    main()
