"""Loads Megatron-Core's checkpoints by presenting their tensors and values as a checkpoint in this project's format.

A run loads the result like its own checkpoint, in any layout, with optimizer state. Nothing is copied: each part of a
stored tensor becomes a piece of a logical tensor, with its place in the same file. megatron_core_files.py reads and
checks the files, and tools/convert_megatron_core.py writes the result to disk.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from megatron.core.dist_checkpointing import VerifiedCheckpoint
from megatron.core.dist_checkpointing.manifest import Piece
from megatron.core.dist_checkpointing.storage import StoredPieces
from megatron.core.logical_tensors import (
    Box,
    LogicalPiece,
    boxes_of_range,
    identity_piece,
    model_logical_pieces,
    pieces_of_tensor,
)
from megatron.core.optimizer.adam import EXP_AVG, EXP_AVG_SQ
from megatron.core.optimizer.state_dict import MASTERS, state_prefix
from megatron.training.checkpointing.megatron_core_files import MegatronCoreFiles
from megatron.training.checkpointing.megatron_objects import FUSED_NORMS, json_values, values_without_state

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(.*)mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)")
_NORM = re.compile(rf"(.*)({'|'.join(re.escape(norm) for norm in FUSED_NORMS.values())})\.(weight|bias)")
_GATED = re.compile(r".*linear_fc1\.(weight|bias)")
EMBEDDING = "embedding.word_embeddings.weight"
# Maps Megatron-Core's kinds of optimizer state to native ones. Its distributed optimizer calls master weights `param`.
_KINDS = {EXP_AVG: EXP_AVG, EXP_AVG_SQ: EXP_AVG_SQ, "fp32_param": MASTERS, "param": MASTERS}

# Section: values.


def megatron_core_values(folder: Path) -> dict[str, Any]:
    """Opens the folder and returns `values_of_files`. Also raises the errors of MegatronCoreFiles.open."""
    return values_of_files(MegatronCoreFiles.open(folder))


def values_of_files(files: MegatronCoreFiles) -> dict[str, Any]:
    """Returns the values that a native checkpoint stores in its common file.

    Raises ValueError naming file and value for an unsupported model, or for an optimizer with unequal step counts.
    """
    try:
        return _values(files)
    except ValueError as error:
        raise ValueError(f"{files.common_place}: {error}") from error


def _values(files: MegatronCoreFiles) -> dict[str, Any]:
    step = _step_of(files.common.get("optimizer"))
    values = values_without_state(files.args or {}, iteration=files.iteration or 0)
    reason = _why_state_is_not_read(files, step)
    values["contents"]["optimizer"] = reason is None
    return {
        **values,
        "not_read": {} if reason is None else {"optimizer": reason},
        "optimizer": {"step": step, "grad_scaler": _scaler_of(files.common.get("optimizer"))},
        "scheduler": _scheduler_of(files.common.get("opt_param_scheduler")),
    }


def _why_state_is_not_read(files: MegatronCoreFiles, step: int | None) -> str | None:
    """Returns why the optimizer state of the files cannot be restored, or None if it can."""
    if files.bucket_states:
        return (
            f"its optimizer state is stored by bucket of the distributed optimizer ({named(files.bucket_states)}), "
            "which is not read; save it with --dist-ckpt-optim-fully-reshardable"
        )
    foreign = sorted(files.states.keys() - _KINDS.keys())
    if foreign:
        return f"its optimizer state {named(foreign)} is not read: only {', '.join(_KINDS)} are"
    if EXP_AVG not in files.states:
        return "it contains no optimizer state"
    return "it contains no step count of the optimizer" if step is None else None


def named(names: Sequence[str], *, most: int = 4) -> str:
    """Returns the first names as one text, and the number of the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _optimizers(state: Any) -> Iterator[Mapping[str, Any]]:
    """Yields the state of each optimizer in a chain, or of a single one, as a mapping with the key `optimizer`."""
    if isinstance(state, Mapping):
        if "optimizer" in state:
            yield state
        elif "param_groups" in state:
            # The optimizer of fp32 parameters stores torch's state directly.
            yield {"optimizer": state}
        else:
            for part in state.values():
                yield from _optimizers(part)


def _step_of(state: Any) -> int | None:
    """Returns the number of updates, which the state stores once or once per parameter group; None if not stored."""
    counts = []
    for part in _optimizers(state):
        inner = part["optimizer"]
        if isinstance(inner, Mapping):
            shared = inner.get("state")
            if isinstance(shared, Mapping) and "common_step" in shared:
                counts.append(shared["common_step"])
            counts += [group["step"] for group in inner.get("param_groups") or () if "step" in group]
    numbers = {int(count) for count in counts}
    if len(numbers) > 1:
        raise ValueError(f"parameters have been updated {sorted(numbers)} times: must be one number for all")
    return numbers.pop() if numbers else None


def _scaler_of(state: Any) -> dict[str, float] | None:
    for part in _optimizers(state):
        scaler = part.get("grad_scaler")
        if isinstance(scaler, Mapping):
            return {str(name): float(value) for name, value in scaler.items()}
    return None


def _scheduler_of(state: Any) -> dict[str, Any] | None:
    return json_values(state) if isinstance(state, Mapping) and "num_steps" in state else None


# Section: tensors.


def as_checkpoint(
    files: MegatronCoreFiles,
    model: nn.Module,
    *,
    values: dict[str, Any],
    with_masters: bool,
    with_state: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> VerifiedCheckpoint:
    """Presents the tensors of all files under native keys. The ranks share the reading of the files. Collective.

    model: the unsharded model on the meta device, with ungrouped experts and the stored vocabulary size. values: the
    result of `values_of_files`, which becomes the `common` values. with_masters: whether 16-bit parameters have fp32
    masters. An fp32 run has no masters and ignores the copies in the files. with_state: whether to include optimizer
    state. Raises ValueError naming the tensor if a weight is missing, has an unexpected shape, or belongs to no
    parameter.
    """
    places = places_of_model(files, model)
    checked = files.checked(process_group)
    logical = model_logical_pieces(model)
    view = _View(files, checked, {}, {})
    for name, tensor in tensors_of(model).items():
        parts, shape = pieces_of_tensor(name, tensor, logical), tuple(tensor.shape)
        view.add(parts, places[name], shape, prefix="", keys=None)
        for kind, keys in files.states.items() if with_state else ():
            ours = _KINDS.get(kind)
            if ours is not None and (with_masters or ours != MASTERS) and all(p.key in keys for p in places[name]):
                view.add(parts, places[name], shape, prefix=state_prefix(ours), keys=keys)
    return _TheirCheckpoint(files.folder, {}, Metadata(view.entries), view.pieces, values)


@dataclass(frozen=True)
class _TheirCheckpoint(VerifiedCheckpoint):
    """A checkpoint with native keys, backed by Megatron-Core's files. values: the result of `values_of_files`."""

    values: dict[str, Any]

    @property
    def common(self) -> dict[str, Any]:
        """Values of the common file, as passed when the checkpoint was opened."""
        return self.values


def vocabulary_rows(files: MegatronCoreFiles, *, num_tokens: int) -> int:
    """Returns the number of rows of the stored embedding. Raises ValueError if it is less than num_tokens.

    num_tokens: number of tokens in the tokenizer's vocabulary.
    """
    rows = files.shape(EMBEDDING)[0] if EMBEDDING in files.weights else 0
    if not 0 < num_tokens <= rows:
        raise ValueError(
            f"the vocabulary has {num_tokens} tokens: must be from 1 to {rows}, the number of rows of {EMBEDDING} "
            f"in {files.folder}"
        )
    return rows


@dataclass
class _View:
    """Collects pieces and entries of logical tensors."""

    files: MegatronCoreFiles
    checked: StoredPieces
    pieces: StoredPieces
    entries: dict[str, Any]

    def add(
        self,
        parts: list[LogicalPiece],
        places: list["Place"],
        parameter: tuple[int, ...],
        *,
        prefix: str,
        keys: Mapping[str, str] | None,
    ) -> None:
        """Adds the logical tensors of a parameter, or of one kind of its optimizer state.

        parameter: shape of the parameter, which `places_of_model` has compared with the stored weights. keys: maps the
        stored key of a weight to the key of its state; None adds the weights themselves.
        """
        for place in places:
            key = place.key
            if keys is not None:
                key = keys[key]
                require_shape(self.files, key, place.shape(parameter))
            properties = TensorProperties(dtype=self.files.dtype(key))
            for part in parts:
                self.entries[prefix + part.key] = TensorStorageMetadata(
                    properties, torch.Size(part.global_shape), chunks=[]
                )
            for name, piece in self.checked[key]:
                for found in pieces_here(piece, place, parts, parameter, itemsize=properties.dtype.itemsize):
                    renamed = replace(found, key=prefix + found.key)
                    self.pieces.setdefault(renamed.key, []).append((name, renamed))


@dataclass(frozen=True)
class Place:
    """A box of a stored tensor that contains a parameter, or the first or second half of its rows.

    rows: index and size of each leading dimension, which selects the layer, the expert, or both.
    """

    key: str
    rows: tuple[tuple[int, int], ...]
    half: int | None = None

    def shape(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the stored tensor. parameter: shape of the parameter."""
        height = (parameter[0] // (1 if self.half is None else 2),)
        return (*(size for _, size in self.rows), *height, *parameter[1:])


def pieces_here(
    piece: Piece, place: Place, parts: list[LogicalPiece], parameter: tuple[int, ...], *, itemsize: int
) -> Iterator[Piece]:
    """Yields the parts of a stored piece that belong to a parameter, as pieces of its logical tensors.

    parts: the parameter's logical pieces. parameter: shape of the parameter. No elements are copied. Each result is
    contiguous in the file, so a piece that covers several layers, or query, key and value, yields several results. See
    [Note: from a stored box to file bytes].
    """
    found = _slice_of_place(piece, place, parameter, itemsize=itemsize)
    if found is None:
        return
    box, byte_start = found
    for key, logical_box, first_element in _split(box, parts, parameter):
        yield replace(piece, key=key, box=logical_box, data_start=byte_start + first_element * itemsize)


# [Note: from a stored box to file bytes]
# A stored piece holds the qkv weights [4, H] of layers 0 and 1, stacked: a box of shape [2, 4, H]. The rows of each
# weight are two queries, a key and a value. For the parameter of layer 1:
# 1. _slice_of_place selects the layer. The resulting box is rows 0 to 4 of the parameter. Its byte_start is the piece's
#    start plus the bytes of layer 0, which are 4 * H * itemsize.
# 2. _runs splits the box into contiguous runs. Here there is one run, of 4 * H elements.
# 3. _split intersects runs with logical tensors: query is 2 * H elements from first_element 0, key is H from 2 * H, and
#    value is H from 3 * H. Each begins at byte_start + first_element * itemsize in the file.


def _slice_of_place(piece: Piece, place: Place, parameter: tuple[int, ...], *, itemsize: int) -> tuple[Box, int] | None:
    """Returns the box of the parameter that a stored piece contains, and the file offset at which the box begins.

    Returns None if the piece belongs to other layers or experts.
    """
    assert piece.box is not None and piece.data_start is not None, "a checked piece of a tensor"
    lead = len(place.rows)
    index = tuple(row for row, _ in place.rows)
    in_piece = tuple(row - start for row, start in zip(index, piece.box.offset[:lead], strict=True))
    if not all(0 <= at < size for at, size in zip(in_piece, piece.box.shape[:lead], strict=True)):
        return None
    box = Box(piece.box.offset[lead:], piece.box.shape[lead:])
    num_boxes_before = 0
    for at, size in zip(in_piece, piece.box.shape[:lead], strict=True):
        num_boxes_before = num_boxes_before * size + at
    byte_start = piece.data_start + num_boxes_before * box.volume * itemsize
    if place.half is not None:
        # The half begins in the middle of the parameter's rows.
        box = Box((box.offset[0] + place.half * (parameter[0] // 2), *box.offset[1:]), box.shape)
    return box, byte_start


def _split(box: Box, parts: list[LogicalPiece], parameter: tuple[int, ...]) -> Iterator[tuple[str, Box, int]]:
    """Splits a box of the parameter into contiguous boxes of its logical tensors.

    Yields for each box the key of the logical tensor, the box, and the index of its first element in `box`.
    """
    if len(parts) == 1 and _is_plain(parts[0], parameter):
        # The tensor is stored unchanged, possibly as one of several experts, so a box maps to a single box.
        before = len(parts[0].shape) - len(parameter)
        yield parts[0].key, Box(parts[0].global_offset[:before] + box.offset, (1,) * before + box.shape), 0
        return
    for run in _runs(box, parameter):
        # Strides of the parameter, row-major.
        run_element = sum(o * math.prod(parameter[dim + 1 :]) for dim, o in enumerate(run.index))
        for part in parts:
            held = boxes_of_range(part, start=run_element, end=run_element + run.length)
            for one in (one for window in held for one in _contiguous_boxes(window, part.stride)):
                element = part.storage_offset + sum(o * s for o, s in zip(one.offset, part.stride, strict=True))
                offset = tuple(g + o for g, o in zip(part.global_offset, one.offset, strict=True))
                yield part.key, Box(offset, one.shape), run.start + element - run_element


def _is_plain(part: LogicalPiece, parameter: tuple[int, ...]) -> bool:
    before = len(part.shape) - len(parameter)
    plain = identity_piece(part.key, parameter)
    window = (part.shape[before:], part.stride[before:], part.storage_offset, part.global_shape[before:])
    return part.shape[:before] == (1,) * before and window == (plain.shape, plain.stride, 0, plain.shape)


@dataclass(frozen=True)
class _Run:
    """A run of elements that is contiguous both in a box and in the parameter.

    index: position of the first element in the parameter. start: index of the first element within the box.
    """

    index: tuple[int, ...]
    start: int
    length: int


def _runs(box: Box, parameter: tuple[int, ...]) -> Iterator[_Run]:
    """Yields the contiguous runs of a box of a parameter."""
    # Dimensions from `dim` on are complete, so they form contiguous runs together with a range of dimension dim - 1.
    dim = len(parameter)
    while dim > 0 and box.shape[dim - 1] == parameter[dim - 1]:
        dim -= 1
    outer = max(dim - 1, 0)
    length = math.prod(box.shape[outer:])
    for number, index in enumerate(itertools.product(*(range(size) for size in box.shape[:outer]))):
        first = (*(o + i for o, i in zip(box.offset, index)), *box.offset[outer:])
        yield _Run(first, number * length, length)


def _contiguous_boxes(box: Box, stride: tuple[int, ...]) -> Iterator[Box]:
    """Splits a box into boxes that are contiguous and row-major in memory. stride: strides of the box's window."""
    dim, inner = len(box.shape), 1
    # For example, keys and values lie between the queries of different groups.
    while dim > 0 and (box.shape[dim - 1] == 1 or stride[dim - 1] == inner):
        dim -= 1
        inner *= box.shape[dim]
    for index in itertools.product(*(range(size) for size in box.shape[:dim])):
        offset = (*(o + i for o, i in zip(box.offset, index)), *box.offset[dim:])
        yield Box(offset, (*(1 for _ in index), *box.shape[dim:]))


def places_of_model(files: MegatronCoreFiles, model: nn.Module) -> dict[str, list[Place]]:
    """Returns the places of each parameter and buffer, by native name.

    Raises ValueError if a parameter is missing or has an unexpected shape, or if a stored weight has no parameter.
    """
    num_layers = len({found[1] for name, _ in model.named_parameters() if (found := _LAYER.fullmatch(name))})
    num_experts = len({found[2] for name, _ in model.named_parameters() if (found := _EXPERT.fullmatch(name))})
    places = {}
    for name, tensor in tensors_of(model).items():
        places[name] = _places(name, files, num_layers=num_layers, num_experts=num_experts)
        for place in places[name]:
            require_shape(files, place.key, place.shape(tuple(tensor.shape)))
    unknown = sorted(files.weights - {place.key for found in places.values() for place in found})
    if unknown:
        more = f", and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise ValueError(
            f"{files.folder} has {unknown[0]}{more}, which does not belong to the model that its arguments describe"
        )
    return places


def require_shape(files: MegatronCoreFiles, key: str, wanted: tuple[int, ...]) -> None:
    """Raises ValueError unless a stored tensor has the shape required by the model's parameter."""
    found = files.shape(key)
    if found != wanted:
        raise ValueError(
            f"{files.folder} has {key} with shape {list(found)}: must be {list(wanted)} according to its arguments"
        )


def _places(name: str, files: MegatronCoreFiles, *, num_layers: int, num_experts: int) -> list[Place]:
    """Returns the places of a parameter in the first storage scheme whose keys all exist. Raises ValueError if none."""
    ways = list(ways_to_store(name, num_layers=num_layers, num_experts=num_experts))
    for way in ways:
        if all(place.key in files.weights for place in way.places):
            return way.places
    raise ValueError(f"{files.folder} has no {ways[0].places[0].key}: parameter {name} of its model is missing")


@dataclass(frozen=True)
class Way:
    """One storage scheme of a parameter. places: a single place, or one each for gate and up projection.

    layers_stacked, experts_stacked: whether the tensor has a dimension of layers, or of experts. norm_is_fused: whether
    the parameter is a norm stored inside the linear layer that follows it.
    """

    places: list[Place]
    layers_stacked: bool
    experts_stacked: bool
    norm_is_fused: bool


def ways_to_store(name: str, *, num_layers: int, num_experts: int) -> Iterator[Way]:
    """Yields all storage schemes of a parameter.

    Layers and experts may be stacked or separate, gate and up projection joined or separate, and a norm may be stored
    under its own name or inside the next linear layer.
    """
    for expert_key, expert_rows in _expert_keys(name, num_experts=num_experts):
        for norm_key in _norm_keys(expert_key):
            layer = _LAYER.fullmatch(norm_key)
            stacked = [(f"decoder.layers.{layer[2]}", ((int(layer[1]), num_layers),))] if layer else []
            for key, rows in (*stacked, (norm_key, ())):
                facts = (bool(rows), bool(expert_rows), norm_key != expert_key)
                yield Way([Place(key, (*rows, *expert_rows))], *facts)
                if _GATED.fullmatch(key):
                    halves = enumerate((f"{key}_w", f"{key}_v"))
                    yield Way([Place(half_key, (*rows, *expert_rows), half) for half, half_key in halves], *facts)


def _expert_keys(name: str, *, num_experts: int) -> Iterator[tuple[str, tuple[tuple[int, int], ...]]]:
    expert = _EXPERT.fullmatch(name)
    if expert is None:
        yield name, ()
        return
    before, inner = f"{expert[1]}mlp.experts.experts.", f"{expert[3]}.{expert[4]}"
    yield before + inner, ((int(expert[2]), num_experts),)
    yield f"{before}{expert[2]}.{inner}", ()


def _norm_keys(name: str) -> Iterator[str]:
    norm = _NORM.fullmatch(name)
    if norm is not None:
        # A norm that is separate in the model may be stored inside the next linear layer.
        for linear, own in FUSED_NORMS.items():
            if own == norm[2]:
                yield f"{norm[1]}{linear}.layer_norm_{norm[3]}"
    yield name


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns parameters, without duplicates, and persistent buffers, by name: any shape and dtype, meta device."""
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: value for name, value in model.state_dict().items() if name not in aliases}
    return {**dict(model.named_parameters()), **buffers}
