"""Converts weights of Megatron-Core's own distributed checkpoints to canonical checkpoints, one parameter at a time.

Maps each parameter of the model to keys and boxes of stored tensors. megatron_core_files.py reads and checks the files.
Shape letters are those of megatron/core/README.md; L is the number of layers.
"""

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron.core.dist_checkpointing import (
    ShardedTensor,
    StreamReader,
    model_logical_pieces,
    save_stream,
    sharded_tensors,
)
from megatron.planner.fake_ranks import fake_rank
from megatron.training.arguments import parse_args
from megatron.training.checkpointing.folder import RELEASE, iteration_folder, write_release_tracker, write_tracker
from megatron.training.checkpointing.run_values import check_arguments
from megatron.training.gpt_builder import build_gpt
from tools.convert_legacy import common_of_weights, json_values, model_args
from tools.legacy_checkpoint import FUSED_NORMS
from tools.megatron_core_files import COMMON_FILE, MegatronCoreFiles, find_megatron_core

_EMBEDDING = "embedding.word_embeddings.weight"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(.*)mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)")
_NORM = re.compile(rf"(.*)({'|'.join(re.escape(norm) for norm in FUSED_NORMS.values())})\.(weight|bias)")
_GATED = re.compile(r".*linear_fc1\.(weight|bias)")
# With these flags the same weights are a model that does not exist here.
_OTHER_MODELS = (
    "layernorm_zero_centered_gamma",
    "apply_layernorm_1p",
    "qk_l2_norm",
    "apply_residual_connection_post_layernorm",
    "no_rope_freq",
)


@dataclass(frozen=True)
class _Place:
    """A box of a stored tensor with the shape of a parameter, or of the first or second half of its rows.

    rows: layer, expert, or both: sizes and offsets of the dimensions before those of the parameter.
    """

    key: str
    rows: tuple[tuple[int, int], ...]
    half: int | None = None

    def window(self, parameter: Tensor) -> ShardedTensor:
        """Returns the box that reads into `parameter`, which has any shape and dtype."""
        part = parameter if self.half is None else parameter.chunk(2)[self.half]
        shape = tuple(part.shape)
        data = part.view(*(1 for _ in self.rows), *shape)
        sizes, offsets = (tuple(row[i] for row in self.rows) for i in (1, 0))
        return ShardedTensor.at(self.key, data, (*sizes, *shape), (*offsets, *(0 for _ in shape)))

    def shape(self, parameter: Tensor) -> tuple[int, ...]:
        """Returns the shape of the stored tensor for a parameter of any shape and dtype."""
        height = (parameter.shape[0] // (1 if self.half is None else 2),)
        return (*(size for _, size in self.rows), *height, *parameter.shape[1:])


def from_megatron_core(
    load: Path, save: Path, *, step: int | None = None, vocab_size: int | None = None, settings: Path | None = None
) -> tuple[Path, int]:
    """Writes the weights as a canonical checkpoint; returns its folder and the number of stored entries that are no
    weights.

    vocab_size: number of tokens of the tokenizer, if the arguments lack it. settings: a YAML file with the model's
    flags, if common.pt has no arguments. Raises ValueError naming a file, tensor or argument that is missing or does
    not fit.
    """
    files = MegatronCoreFiles.open(find_megatron_core(load, step=step))
    folder = save / RELEASE if files.iteration is None else iteration_folder(save, files.iteration)
    if folder.exists():
        raise ValueError(f"--save is {save}: {folder} is there already, and is not overwritten; give a new folder")
    args = _args_of_files(files, vocab_size=vocab_size, settings=settings)
    common = common_of_weights(args, files.args or {}, iteration=files.iteration or 0)
    with fake_rank(args, 0, world_size=1):
        with torch.device("meta"):
            model = build_gpt(args)
        save_stream(_boxes(files, model, places=_places_of_model(files, model)), folder, common=common)
    if files.iteration is None:
        write_release_tracker(str(save))
    else:
        write_tracker(str(save), files.iteration)
    return folder, files.num_left


def _args_of_files(files: MegatronCoreFiles, *, vocab_size: int | None, settings: Path | None) -> argparse.Namespace:
    where = files.folder / COMMON_FILE
    if settings is not None:
        where, found = settings, vars(parse_args(argv=["--config", str(settings)]))
    elif files.args is not None:
        found = files.args
    else:
        raise ValueError(f"{where} has no arguments: give --model-config, a YAML file with the flags of the model")
    stored = json_values(found)
    for name in _OTHER_MODELS:
        if stored.get(name):
            raise ValueError(f"{where}: {name} is {stored[name]!r:.60}: such models are not known here, must be unset")
    try:
        check_arguments(stored)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    args = model_args(stored)
    if _EMBEDDING not in files.shapes:
        raise ValueError(f"{files.folder} has no {_EMBEDDING}")
    rows, tokens = files.shapes[_EMBEDDING][0], vocab_size or stored.get("vocab_size")
    if tokens is None:
        raise ValueError(f"{where} does not say how many tokens the tokenizer has: give --vocab-size")
    if not 0 < tokens <= rows:
        raise ValueError(f"the vocabulary has {tokens} tokens: must be 1 to the {rows} rows of {_EMBEDDING}")
    args.padded_vocab_size, args.unpadded_vocab_size = rows, tokens
    return args


def _places_of_model(files: MegatronCoreFiles, model: nn.Module) -> dict[str, list[_Place]]:
    """Returns the place of each parameter and buffer by its name here. Every stored weight must belong to one."""
    num_layers = len({found[1] for name, _ in model.named_parameters() if (found := _LAYER.fullmatch(name))})
    num_experts = len({found[2] for name, _ in model.named_parameters() if (found := _EXPERT.fullmatch(name))})
    places = {}
    for name, tensor in _tensors_of(model).items():
        places[name] = _places(name, files, num_layers=num_layers, num_experts=num_experts)
        for place in places[name]:
            _check_shape(files, place, wanted=place.shape(tensor))
    unknown = sorted(files.shapes.keys() - {place.key for found in places.values() for place in found})
    if unknown:
        more = f", and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise ValueError(f"{files.folder} has {unknown[0]}{more}, which the model of its arguments has not")
    return places


def _check_shape(files: MegatronCoreFiles, place: _Place, *, wanted: tuple[int, ...]) -> None:
    found = files.shapes[place.key]
    if found != wanted:
        raise ValueError(
            f"{files.folder} has {place.key} with shape {list(found)}: must be {list(wanted)} by its arguments"
        )


def _places(name: str, files: MegatronCoreFiles, *, num_layers: int, num_experts: int) -> list[_Place]:
    """Returns the first way to store a parameter whose keys exist."""
    ways = list(_ways(name, num_layers=num_layers, num_experts=num_experts))
    for places in ways:
        if all(place.key in files.shapes for place in places):
            return places
    # The last way uses the parameter's name here.
    raise ValueError(f"{files.folder} has no {ways[0][0].key}, which is {name} of the model of its arguments")


def _ways(name: str, *, num_layers: int, num_experts: int) -> Iterator[list[_Place]]:
    """Yields all ways to store a parameter: layers stacked or not, both names of a norm, and the same for experts, gate
    and up.
    """
    for expert_key, expert_rows in _expert_keys(name, num_experts=num_experts):
        for norm_key in _norm_keys(expert_key):
            layer = _LAYER.fullmatch(norm_key)
            stacked = [(f"decoder.layers.{layer[2]}", ((int(layer[1]), num_layers),))] if layer else []
            for key, rows in (*stacked, (norm_key, ())):
                yield [_Place(key, (*rows, *expert_rows))]
                if _GATED.fullmatch(key):
                    halves = enumerate((f"{key}_w", f"{key}_v"))
                    yield [_Place(half_key, (*rows, *expert_rows), half) for half, half_key in halves]


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
        # A separate norm may still be stored under its name inside the next linear layer.
        for linear, own in FUSED_NORMS.items():
            if own == norm[2]:
                yield f"{norm[1]}{linear}.layer_norm_{norm[3]}"
    yield name


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns each parameter once, and persistent buffers, of any shape, on the meta device."""
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: value for name, value in model.state_dict().items() if name not in aliases}
    return {**dict(model.named_parameters()), **buffers}


def _boxes(files: MegatronCoreFiles, model: nn.Module, *, places: dict[str, list[_Place]]) -> Iterator[ShardedTensor]:
    """Yields the boxes of the stored tensors, of any shape and in the stored dtype, with one parameter in memory at a
    time.
    """
    pieces, reader = model_logical_pieces(model), StreamReader(files.checkpoint)
    for name, tensor in _tensors_of(model).items():
        values = torch.empty(tensor.shape, dtype=files.dtype(places[name][0].key))
        reader.fill([place.window(values) for place in places[name]])
        boxes = sharded_tensors(pieces[name], values) if name in pieces else [ShardedTensor.whole(name, values)]
        del values
        while boxes:
            yield boxes.pop(0)
