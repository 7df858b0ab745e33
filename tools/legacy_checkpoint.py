"""Writes Megatron-LM's legacy checkpoint format, with one file per tensor-, pipeline- and expert-parallel rank.

megatron/training/checkpointing/legacy_files.py describes and reads the format. convert_legacy.py handles the layouts.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.training.checkpointing.legacy_files import LAYER_NAME, ChunkFacts
from megatron.training.checkpointing.megatron_objects import FUSED_NORMS

CHECKPOINT_VERSION = 3.0
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_(fc1|fc2)\.(weight|bias)")


def write_legacy(
    path: Path, args: Mapping[str, Any], *, iteration: int, chunks: Sequence[Mapping[str, Tensor]]
) -> None:
    """Writes one rank's file.

    chunks: tensors of each model chunk by name, as in LegacyFile, any shape and dtype. args: arguments that Megatron
    reads from the file.
    """
    models = (
        {"model": dict(chunks[0])} if len(chunks) == 1 else {f"model{i}": dict(one) for i, one in enumerate(chunks)}
    )
    content = {
        "args": argparse.Namespace(**args),
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": iteration,
        **models,
    }
    path.parent.mkdir(parents=True)
    torch.save(content, path)


def to_legacy_names(chunk: Mapping[str, Tensor], facts: ChunkFacts, *, fused: bool) -> dict[str, Tensor]:
    """Renames tensors of any shape and dtype to Megatron's names. Inverse of legacy_files.to_names_here.

    fused: use the names of Transformer Engine's layers, whose norms are part of the next linear layer and whose experts
    are numbered inside one module.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in chunk.items():
        layer = LAYER_NAME.fullmatch(name)
        if layer is None:
            found[name] = tensor
            continue
        inner = layer[2]
        if fused:
            inner = _fused_name(inner, prefix=name.removesuffix(inner), chunk=chunk)
        found[f"decoder.layers.{int(layer[1]) - facts.first_layer}.{inner}"] = tensor
    return found


def _fused_name(inner: str, *, prefix: str, chunk: Mapping[str, Tensor]) -> str:
    if expert := _EXPERT.fullmatch(inner):
        return f"mlp.experts.linear_{expert[2]}.{expert[3]}{expert[1]}"
    for linear, norm in FUSED_NORMS.items():
        # The norms before a router, and before the two projections of latent attention, remain separate.
        if inner.startswith(f"{norm}.") and f"{prefix}{linear}.weight" in chunk:
            return f"{linear}.layer_norm_{inner.removeprefix(norm + '.')}"
    return inner
