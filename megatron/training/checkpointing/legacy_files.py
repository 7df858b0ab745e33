"""Reads Megatron-LM's older checkpoint format: one pickled file per tensor-, pipeline- and expert-parallel rank.

    DIR/latest_checkpointed_iteration.txt
    DIR/iter_0000100/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt

Format and names are those of Megatron-LM's core models (`--ckpt-format torch`). Optimizer state is not read, because
these files store it by position in lists. legacy.py shows the weights under the keys of our own checkpoints, and
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
from megatron.training.checkpointing.megatron_objects import ALLOWED, FUSED_NORMS, NOT_WEIGHTS
from megatron.training.checkpointing.train_state import is_count

_RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
# Earlier versions order the rows of query, key and value differently.
_VERSIONS = (2.0, 3.0)
_EMBEDDING = "embedding.word_embeddings.weight"
# Arguments that divide a model into the files of ranks.
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


@dataclass(frozen=True)
class LegacyFiles:
    """The files of an iteration, of which the first has been read. paths: by the names of their ranks' folders."""

    folder: Path
    first: LegacyFile
    paths: dict[str, Path]

    @classmethod
    def open(cls, folder: Path) -> "LegacyFiles":
        """Reads the first file. Raises ValueError naming the file as read_legacy does, or the folder if it has none."""
        found = sorted(folder.glob(LEGACY_FILES))
        paths = {path.parent.name: path for path in found if _RANK_FOLDER.fullmatch(path.parent.name)}
        if not paths:
            raise ValueError(
                f"{folder} has no mp_rank_XX/{LEGACY_FILE}: it is no checkpoint of the older format "
                "(--ckpt-format torch)"
            )
        return cls(folder, read_legacy(next(iter(paths.values()))), paths)

    @property
    def layout(self) -> dict[str, Any]:
        """The arguments that divide the model into files. Raises ValueError for experts divided in another way."""
        tensor, experts = self._size("tensor"), self.first.args.get("expert_tensor_parallel_size")
        if experts not in (None, tensor):
            raise ValueError(
                f"{self.first.path}: expert_tensor_parallel_size is {experts!r:.60}: must be that of other layers, "
                f"{tensor}"
            )
        return {name: self.first.args[name] for name in LAYOUT if name in self.first.args}

    def ranks(self) -> list[LegacyRank]:
        """Returns all ranks that have a file by the arguments. Raises ValueError naming the first file that is missing,
        or an argument that is no size.
        """
        sizes = {name: self._size(name) for name in ("tensor", "pipeline", "expert")}
        found = []
        # Lazy, because the sizes in a damaged file may be huge.
        for rank in ranks_of_layout(**sizes):
            if self._name(rank) not in self.paths:
                words = " x ".join(f"{name} {size}" for name, size in sizes.items())
                raise ValueError(
                    f"{self.folder} has no {self._name(rank)}/{LEGACY_FILE}, of the {words} ranks of its arguments"
                )
            found.append(rank)
        return found

    def path(self, rank: LegacyRank) -> Path:
        """Returns the path of a rank's file."""
        return self.paths[self._name(rank)]

    def vocabulary_rows(self, *, num_tokens: int) -> int:
        """Returns the rows of the whole embedding, with padding. Raises ValueError if they are fewer than the tokens of
        the tokenizer.
        """
        embedding = self.first.chunks[0].get(_EMBEDDING)
        if embedding is None or embedding.ndim != 2:
            raise ValueError(f"{self.first.path} has no {_EMBEDDING} with rows")
        rows = embedding.shape[0] * self._size("tensor")
        if not 0 < num_tokens <= rows:
            raise ValueError(
                f"the vocabulary has {num_tokens} tokens: must be 1 to the {rows} rows of {_EMBEDDING} in {self.folder}"
            )
        return rows

    def _name(self, rank: LegacyRank) -> str:
        return rank.folder(num_stages=self._size("pipeline"), num_expert_ranks=self._size("expert"))

    def _size(self, kind: str) -> int:
        name = f"{kind}_model_parallel_size"
        size = self.first.args.get(name, 1)
        if not is_count(size) or not size:
            raise ValueError(f"{self.first.path}: {name} is {size!r:.60}: must be a whole number above 0")
        return int(size)


def ranks_of_layout(*, tensor: int, pipeline: int, expert: int) -> Iterator[LegacyRank]:
    """Yields all ranks that have a file."""
    for first in range(tensor):
        for second in range(pipeline):
            for third in range(expert):
                yield LegacyRank(first, second, third)


def read_legacy(path: Path) -> LegacyFile:
    """Reads a file without running code: unpickles only tensors, arguments and counters.

    Raises ValueError naming the file if it holds other objects, is damaged, or is of an older kind of model.
    """
    return _checked(path, load_allowed(path, path, allowed=ALLOWED, mmap=True))


def check_legacy(path: Path) -> None:
    """Reads all of a file and compares it with torch.save's checksums. Raises ValueError naming the file."""
    try:
        with zipfile.ZipFile(path) as archive:
            check_records(archive)
    except (zipfile.BadZipFile, zlib.error, RuntimeError, ValueError, EOFError) as error:
        raise ValueError(f"{path} is corrupt: {error}") from error


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

LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_FUSED = re.compile(r"(.+)\.layer_norm_(weight|bias)")
_EXPERT_OF_MANY = re.compile(r"mlp\.experts\.linear_(fc1|fc2)\.(weight|bias)(\d+)")
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
    """Returns views of a chunk's tensors, of any shape and dtype, by names of models here with sequential experts."""
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
