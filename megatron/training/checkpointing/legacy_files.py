"""Reads Megatron-LM's older checkpoint format: one pickled file per tensor-, pipeline- and expert-parallel rank.

    DIR/latest_checkpointed_iteration.txt
    DIR/iter_0000100/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt

Format and names are those of Megatron-LM's core models (`--ckpt-format torch`). Optimizer state is not read, because
these files store it by position in lists. legacy.py presents the weights under native keys, and
tools/legacy_checkpoint.py writes such files.
"""

import argparse
import re
import types
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.storage import check_records, load_allowed
from megatron.training.checkpointing.folder import LEGACY_FILE, LEGACY_FILES
from megatron.training.checkpointing.megatron_objects import ALLOWED, FUSED_NORMS, KNOWN_VALUES, NOT_WEIGHTS, VERSIONS
from megatron.training.checkpointing.train_state import is_count

_RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_EMBEDDING = "embedding.word_embeddings.weight"
# Arguments that determine how a model is divided among the ranks' files.
LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
    "sequence_parallel",
)


@dataclass(frozen=True, order=True)
class LegacyRank:
    """Coordinates of a rank in the parallel layout of the files."""

    tensor: int = 0
    pipeline: int = 0
    expert: int = 0

    def folder(self, *, num_stages: int, num_expert_ranks: int) -> str:
        """Returns the name of the rank's folder in a layout of the given sizes."""
        stage = f"_{self.pipeline:03d}" if num_stages > 1 else ""
        expert = f"_{self.expert:03d}" if num_expert_ranks > 1 else ""
        return f"mp_rank_{self.tensor:02d}{stage}{expert}"


@dataclass(frozen=True)
class LegacyFile:
    """Contents of one file.

    chunks: for each virtual stage, memory-mapped parameters by Megatron's names, any shape. unknown: names of other
    values that no reader here knows.
    """

    path: Path
    args: dict[str, Any]
    iteration: int
    chunks: list[dict[str, Tensor]]
    unknown: tuple[str, ...]


@dataclass(frozen=True)
class LegacyFiles:
    """The files of one iteration. Only the first file has been read.

    paths: maps the name of a rank's folder to the path of its file.
    """

    folder: Path
    first: LegacyFile
    paths: dict[str, Path]

    @classmethod
    def open(cls, folder: Path) -> "LegacyFiles":
        """Reads the first file. Raises the errors of read_legacy, and ValueError if the folder contains no files."""
        found = sorted(folder.glob(LEGACY_FILES))
        paths = {path.parent.name: path for path in found if _RANK_FOLDER.fullmatch(path.parent.name)}
        if not paths:
            raise ValueError(
                f"{folder} has no mp_rank_XX/{LEGACY_FILE}: it is not a checkpoint in the older format "
                "(--ckpt-format torch)"
            )
        return cls(folder, read_legacy(next(iter(paths.values()))), paths)

    @property
    def layout(self) -> dict[str, Any]:
        """Arguments that determine how the model is divided among files.

        Raises ValueError if experts have a different tensor-parallel size than other layers.
        """
        tensor, experts = self._size("tensor"), self.first.args.get("expert_tensor_parallel_size")
        if experts not in (None, tensor):
            raise ValueError(
                f"{self.first.path}: expert_tensor_parallel_size is {experts!r:.60}: must equal "
                f"tensor_model_parallel_size, {tensor}"
            )
        return {name: self.first.args[name] for name in LAYOUT if name in self.first.args}

    def ranks(self) -> list[LegacyRank]:
        """Returns all ranks for which the arguments require a file.

        Raises ValueError naming the first missing file, or an argument that is not a valid size.
        """
        sizes = {name: self._size(name) for name in ("tensor", "pipeline", "expert")}
        found = []
        # Ranks are generated lazily, because the sizes in a damaged file may be huge.
        for rank in ranks_of_layout(**sizes):
            if self._name(rank) not in self.paths:
                words = " x ".join(f"{name} {size}" for name, size in sizes.items())
                raise ValueError(
                    f"{self.folder} has no {self._name(rank)}/{LEGACY_FILE}, although its arguments describe "
                    f"{words} ranks"
                )
            found.append(rank)
        return found

    def path(self, rank: LegacyRank) -> Path:
        """Returns the path of a rank's file."""
        return self.paths[self._name(rank)]

    def vocabulary_rows(self, *, num_tokens: int) -> int:
        """Returns the number of rows of the whole embedding, including padding.

        Raises ValueError if there are fewer rows than the tokenizer has tokens.
        """
        embedding = self.first.chunks[0].get(_EMBEDDING)
        if embedding is None or embedding.ndim != 2:
            raise ValueError(f"{self.first.path} has no {_EMBEDDING} with at least one row")
        rows = embedding.shape[0] * self._size("tensor")
        if not 0 < num_tokens <= rows:
            raise ValueError(
                f"the vocabulary has {num_tokens} tokens: must be from 1 to {rows}, the number of rows of "
                f"{_EMBEDDING} in {self.folder}"
            )
        return rows

    def _name(self, rank: LegacyRank) -> str:
        return rank.folder(num_stages=self._size("pipeline"), num_expert_ranks=self._size("expert"))

    def _size(self, kind: str) -> int:
        name = f"{kind}_model_parallel_size"
        size = self.first.args.get(name, 1)
        if not is_count(size) or not size:
            raise ValueError(f"{self.first.path}: {name} is {size!r:.60}: must be a positive integer")
        return int(size)


def ranks_of_layout(*, tensor: int, pipeline: int, expert: int) -> Iterator[LegacyRank]:
    """Yields the coordinates of all ranks in a layout of the given sizes."""
    for first in range(tensor):
        for second in range(pipeline):
            for third in range(expert):
                yield LegacyRank(first, second, third)


def read_legacy(path: Path) -> LegacyFile:
    """Reads a file without executing code from it: only tensors, arguments and counters are unpickled.

    Raises ValueError naming the file if it contains other objects, is damaged, or stores an unsupported older model.
    """
    return _checked(path, load_allowed(path, path, allowed=ALLOWED, mmap=True))


def check_legacy(path: Path) -> None:
    """Verifies a whole file against torch.save's checksums. Raises ValueError naming a file that is corrupt."""
    try:
        with zipfile.ZipFile(path) as archive:
            check_records(archive)
    except (zipfile.BadZipFile, zlib.error, RuntimeError, ValueError, EOFError) as error:
        raise ValueError(f"{path} is corrupt: {error}") from error


def _checked(path: Path, content: Any) -> LegacyFile:
    if not isinstance(content, dict) or not {"args", "iteration"} <= content.keys():
        raise ValueError(f"{path} is not a checkpoint of a training run: args and iteration are missing")
    args, iteration, version = content["args"], content["iteration"], content.get("checkpoint_version", 0)
    if not isinstance(args, (argparse.Namespace, types.SimpleNamespace)) or not is_count(iteration):
        raise ValueError(
            f"{path} is not a checkpoint of a training run: args is {args!r:.60} and iteration is {iteration!r:.60}"
        )
    if type(version) not in (int, float) or version not in VERSIONS:
        raise ValueError(
            f"{path} has checkpoint_version {version!r:.60}: must be 2.0 or 3.0, which share the order of query, "
            "key and value rows"
        )
    chunks = _chunks(path, content)
    unknown = sorted(str(name) for name in content.keys() - KNOWN_VALUES - {"model"} if not _is_chunk(name))
    return LegacyFile(path, dict(vars(args)), iteration, [_tensors(path, chunk) for chunk in chunks], tuple(unknown))


def _chunks(path: Path, content: Mapping[str, Any]) -> list[dict[str, Any]]:
    names = ["model"] if "model" in content else sorted((n for n in content if _is_chunk(n)), key=_number)
    chunks = [content[name] for name in names]
    if any(not isinstance(chunk, dict) or not all(isinstance(name, str) for name in chunk) for chunk in chunks):
        raise ValueError(f"{path} holds a model without named parameters")
    if not chunks or any("language_model" in chunk for chunk in chunks):
        raise ValueError(
            f"{path} does not hold a core model (--use-mcore-models): first convert it with the Megatron version "
            "that wrote it"
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
            raise ValueError(f"{path} holds a {kind} as {name}: must be floating-point numbers")
    return kept


# Parameter names in files of either layer implementation, and in this project's models.

LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_FUSED = re.compile(r"(.+)\.layer_norm_(weight|bias)")
_EXPERT_OF_MANY = re.compile(r"mlp\.experts\.linear_(fc1|fc2)\.(weight|bias)(\d+)")
_STACKED = re.compile(r"mlp\.experts\.weight([12])")


@dataclass(frozen=True)
class ChunkFacts:
    """Facts about a model chunk that its parameter names do not express.

    first_layer: index of the chunk's first layer in the model, from 0. num_experts: number of local experts.
    """

    first_layer: int
    num_experts: int
    hidden_size: int


def to_names_here(chunk: Mapping[str, Tensor], facts: ChunkFacts) -> dict[str, Tensor]:
    """Returns views of a chunk's tensors under this project's names, with sequential experts: any shape and dtype."""
    found: dict[str, Tensor] = {}
    for name, tensor in chunk.items():
        layer = LAYER_NAME.fullmatch(name)
        if layer is None:
            found[name] = tensor
            continue
        prefix = f"decoder.layers.{int(layer[1]) + facts.first_layer}."
        found.update((prefix + inner, part) for inner, part in _parts_here(layer[2], tensor, facts=facts))
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
            yield f"mlp.experts.local_experts.{number}.linear_fc{stacked[1]}.weight", weight.t()
    else:
        yield inner, tensor
