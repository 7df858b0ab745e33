"""Megatron's older checkpoint format: one pickled file per tensor-, pipeline- and expert-parallel rank.

    DIR/latest_checkpointed_iteration.txt
    DIR/iter_0000100/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt

Format and names are those of Megatron-LM's core models (`--ckpt-format torch`). Reads weights only, because these files
store optimizer states by position in lists. convert_legacy.py knows the layouts.
"""

import argparse
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.storage import load_allowed
from megatron.training.checkpointing.folder import (
    RELEASE,
    TRACKER_FILE,
    iteration_folder,
    iteration_of_text,
    read_tracker,
)
from megatron.training.checkpointing.megatron_objects import ALLOWED, FUSED_NORMS, NOT_WEIGHTS
from megatron.training.checkpointing.train_state import is_count

MODEL_FILE = "model_optim_rng.pt"
_RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
# Earlier versions order the rows of query, key and value differently.
_VERSIONS = (2.0, 3.0)
CHECKPOINT_VERSION = 3.0


@dataclass(frozen=True, order=True)
class LegacyRank:
    """A rank's coordinates in the layout of the files."""

    tensor: int = 0
    pipeline: int = 0
    expert: int = 0

    def folder(self, *, num_stages: int, num_expert_ranks: int) -> str:
        """Returns the name of its folder in a layout of the given sizes."""
        stage = f"_{self.pipeline:03d}" if num_stages > 1 else ""
        expert = f"_{self.expert:03d}" if num_expert_ranks > 1 else ""
        return f"mp_rank_{self.tensor:02d}{stage}{expert}"


@dataclass(frozen=True)
class LegacyFile:
    """Contents of one file. chunks: parameters of each virtual stage by Megatron's names, of any shape,
    memory-mapped.
    """

    path: Path
    args: dict[str, Any]
    iteration: int
    chunks: list[dict[str, Tensor]]


def find_legacy(folder: Path, *, step: int | None) -> Path:
    """Returns the folder of an iteration; None means the tracker's. Raises ValueError if there is none in this
    format.
    """
    if step is not None:
        found = iteration_folder(folder, step)
    else:
        text = read_tracker(folder)
        if text is None:
            raise ValueError(
                f"--load is {folder}: it has no {TRACKER_FILE}; give the folder above iter_..., or --ckpt-step"
            )
        iteration = iteration_of_text(text)
        if text == RELEASE:
            found = folder / RELEASE
        elif iteration is not None:
            found = iteration_folder(folder, iteration)
        else:
            raise ValueError(f"{folder / TRACKER_FILE} holds {text[:40]!r}: must be an iteration number or {RELEASE!r}")
    if not any(found.glob(f"mp_rank_*/{MODEL_FILE}")):
        raise ValueError(
            f"{found} has no mp_rank_XX/{MODEL_FILE}: it is no checkpoint of the older format (--ckpt-format torch)"
        )
    return found


def legacy_files(folder: Path) -> dict[str, Path]:
    """Returns the files of an iteration by the names of their ranks' folders."""
    return {
        path.parent.name: path
        for path in sorted(folder.glob(f"mp_rank_*/{MODEL_FILE}"))
        if _RANK_FOLDER.fullmatch(path.parent.name)
    }


def read_legacy(path: Path) -> LegacyFile:
    """Reads a file without running code: unpickles only tensors, arguments and counters.

    Raises ValueError naming the file if it holds other objects, is damaged, or is of an older kind of model.
    """
    return _checked(path, load_allowed(path, path, allowed=ALLOWED, mmap=True))


def write_legacy(
    path: Path, args: Mapping[str, Any], *, iteration: int, chunks: Sequence[Mapping[str, Tensor]]
) -> None:
    """Writes one rank's file. chunks: as in LegacyFile, any shape and dtype. args: arguments that Megatron reads from
    it.
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


def _checked(path: Path, content: Any) -> LegacyFile:
    if not isinstance(content, dict) or not {"args", "iteration"} <= content.keys():
        raise ValueError(f"{path} holds no training run's checkpoint: must have args and iteration")
    args, iteration, version = content["args"], content["iteration"], content.get("checkpoint_version", 0)
    if not isinstance(args, (argparse.Namespace, types.SimpleNamespace)) or not is_count(iteration):
        raise ValueError(f"{path} holds {args!r:.60} as args and {iteration!r:.60} as iteration: no training run's")
    if type(version) not in (int, float) or version not in _VERSIONS:
        raise ValueError(
            f"{path} is of checkpoint_version {version!r:.60}: must be 2.0 or 3.0, whose query, key and value lie alike"
        )
    chunks = _chunks(path, content)
    return LegacyFile(path, dict(vars(args)), iteration, [_tensors(path, chunk) for chunk in chunks])


def _chunks(path: Path, content: Mapping[str, Any]) -> list[dict[str, Any]]:
    names = ["model"] if "model" in content else sorted((n for n in content if _is_chunk(n)), key=_number)
    chunks = [content[name] for name in names]
    if any(not isinstance(chunk, dict) or not all(isinstance(name, str) for name in chunk) for chunk in chunks):
        raise ValueError(f"{path} holds a model that has no parameters by name")
    if not chunks or any("language_model" in chunk for chunk in chunks):
        raise ValueError(
            f"{path} holds no core model (--use-mcore-models): convert it by the Megatron that wrote it first"
        )
    return chunks


def _is_chunk(name: Any) -> bool:
    return isinstance(name, str) and re.fullmatch(r"model[0-9]{1,4}", name) is not None


def _number(name: str) -> int:
    return int(name.removeprefix("model"))


def _tensors(path: Path, chunk: Mapping[str, Any]) -> dict[str, Tensor]:
    kept = {name: value for name, value in chunk.items() if not name.endswith(NOT_WEIGHTS)}
    for name, value in kept.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{path} holds a {type(value).__name__} as {name}: must be a tensor")
        if value.layout is not torch.strided or value.is_meta or not value.is_floating_point():
            kind = f"{value.dtype} {value.layout} tensor on {value.device}"
            raise ValueError(f"{path} holds a {kind} as {name}: must be numbers with fractions, as weights are")
    return kept


# Parameter names: of files with either implementation of layers, and of models here.

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_FUSED = re.compile(r"(.+)\.layer_norm_(weight|bias)")
_EXPERT_OF_MANY = re.compile(r"mlp\.experts\.linear_(fc1|fc2)\.(weight|bias)(\d+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_(fc1|fc2)\.(weight|bias)")
_STACKED = re.compile(r"mlp\.experts\.weight([12])")


@dataclass(frozen=True)
class ChunkFacts:
    """Facts that the names of a chunk lack. first_layer: index of its layer 0 in the model. num_experts: of this
    rank.
    """

    first_layer: int
    num_experts: int
    hidden_size: int


def to_names_here(chunk: Mapping[str, Tensor], facts: ChunkFacts) -> dict[str, Tensor]:
    """Returns the tensors of a chunk, of any shape and dtype, by names of models here with sequential experts."""
    found: dict[str, Tensor] = {}
    for name, tensor in chunk.items():
        layer = _LAYER.fullmatch(name)
        if layer is None:
            found[name] = tensor
            continue
        prefix = f"decoder.layers.{int(layer[1]) + facts.first_layer}."
        found.update((prefix + inner, part) for inner, part in _parts_here(layer[2], tensor, facts=facts))
    return found


def to_legacy_names(chunk: Mapping[str, Tensor], facts: ChunkFacts, *, fused: bool) -> dict[str, Tensor]:
    """Inverse of to_names_here, for tensors of any shape and dtype. fused: names of Transformer Engine's layers, with
    norms inside the next linear layer and experts numbered in one module.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in chunk.items():
        layer = _LAYER.fullmatch(name)
        if layer is None:
            found[name] = tensor
            continue
        inner = layer[2]
        if fused:
            inner = _fused_name(inner, prefix=name.removesuffix(inner), chunk=chunk)
        found[f"decoder.layers.{int(layer[1]) - facts.first_layer}.{inner}"] = tensor
    return found


def _parts_here(inner: str, tensor: Tensor, *, facts: ChunkFacts) -> Iterator[tuple[str, Tensor]]:
    if (fused := _FUSED.fullmatch(inner)) and fused[1] in FUSED_NORMS:
        yield f"{FUSED_NORMS[fused[1]]}.{fused[2]}", tensor
    elif expert := _EXPERT_OF_MANY.fullmatch(inner):
        yield f"mlp.experts.local_experts.{expert[3]}.linear_{expert[1]}.{expert[2]}", tensor
    elif stacked := _STACKED.fullmatch(inner):
        if not tensor.numel() or tensor.numel() % (facts.num_experts * facts.hidden_size or tensor.numel() + 1):
            raise ValueError(
                f"{inner} has shape {list(tensor.shape)}: must hold {facts.num_experts} experts of hidden size "
                f"{facts.hidden_size}"
            )
        # Stored as [experts, in, out], regardless of the shape.
        rows = facts.hidden_size if stacked[1] == "1" else -1
        columns = -1 if stacked[1] == "1" else facts.hidden_size
        for number, weight in enumerate(tensor.reshape(facts.num_experts, rows, columns)):
            yield f"mlp.experts.local_experts.{number}.linear_fc{stacked[1]}.weight", weight.t().contiguous()
    else:
        yield inner, tensor


def _fused_name(inner: str, *, prefix: str, chunk: Mapping[str, Tensor]) -> str:
    if expert := _EXPERT.fullmatch(inner):
        return f"mlp.experts.linear_{expert[2]}.{expert[3]}{expert[1]}"
    for linear, norm in FUSED_NORMS.items():
        # The norms before a router, and before the two projections of latent attention, stay separate.
        if inner.startswith(f"{norm}.") and f"{prefix}{linear}.weight" in chunk:
            return f"{linear}.layer_norm_{inner.removeprefix(norm + '.')}"
    return inner
