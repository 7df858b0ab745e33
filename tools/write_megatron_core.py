"""Writes native checkpoints in Megatron-Core's distributed format, so that Megatron-Core can continue from them.

Inverse of megatron/training/checkpointing/megatron_core.py, which describes the names. Only one parameter, or one
optimizer state of it, is in memory at a time.
"""

import argparse
import io
import json
import pickle
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from megatron.core.dist_checkpointing import (
    LogicalPiece,
    ShardedTensor,
    StreamReader,
    VerifiedCheckpoint,
    model_logical_pieces,
    save_stream,
    sharded_tensors,
    verify,
)
from megatron.core.dist_checkpointing import folder as folders
from megatron.core.dist_checkpointing.storage import METADATA_FILE, read_metadata
from megatron.core.logical_tensors import pieces_of_tensor
from megatron.core.optimizer.adam import EXP_AVG, EXP_AVG_SQ
from megatron.core.optimizer.state_dict import MASTERS, state_prefix
from megatron.core.tokenizers import vocab_size_with_padding
from megatron.tools.convert_legacy import model_args
from megatron.tools.stored_checkpoints import checkpoint_of_load
from megatron.training.checkpointing.folder import (
    MEGATRON_CORE_FILE,
    CheckpointFormat,
    iteration_folder,
    write_tracker,
)
from megatron.training.checkpointing.megatron_core import Place, tensors_of, ways_to_store
from megatron.training.checkpointing.megatron_core_files import COMMON_FILE
from megatron.training.checkpointing.run_values import load_run_values
from megatron.training.command_line.config_builder import run_config_of
from megatron.training.gpt_builder import whole_gpt

_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_EXPERT = ".mlp.experts."
# Settings of torch's Adam in the parameter groups, which Megatron-Core compares with its groups on load.
_TORCH_GROUP = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}


@dataclass(frozen=True)
class CoreTarget:
    """The run that will load the files.

    tensor: number of tensor-parallel ranks, which determines the vocabulary padding. expert: number of expert-parallel
    ranks; above 1 its experts have a separate optimizer. distributed: whether it uses the distributed optimizer. fused:
    whether it uses Transformer Engine's layers, in which a router's norm has a separate name. padded_vocab_size: rows
    of its vocabulary; None computes them as Megatron-LM does.
    """

    tensor: int = 1
    expert: int = 1
    distributed: bool = True
    fused: bool = True
    padded_vocab_size: int | None = None

    @property
    def chains_optimizers(self) -> bool:
        """Whether its optimizer is a chain of two, for dense parameters and for experts."""
        return self.expert > 1


def to_megatron_core(load: Path, save: Path, *, target: CoreTarget, step: int | None = None) -> Path:
    """Writes weights and Adam's state as a Megatron-Core checkpoint and returns its folder.

    Raises ValueError for a checkpoint of an unsupported optimizer, for expert-parallel ranks of a model without
    experts, and if the folder already exists. Raises OSError if it cannot be written. Leaves nothing after an error.
    """
    found = checkpoint_of_load(load, step)
    if found.format is not CheckpointFormat.OURS:
        raise ValueError(f"{found.path} is in {found.format.value}: must be in this project's format")
    values, checkpoint = load_run_values(found.path), verify(found.path)
    folder = iteration_folder(save, found.iteration)
    if folder.exists():
        raise ValueError(f"--save is {save}: {folder} already exists and is not overwritten; give a new folder")
    stored = values["args"]
    has_state = values["contents"]["optimizer"]
    if has_state and stored.get("optimizer") not in ("adam", "distributed_fused_adam"):
        raise ValueError(
            f"optimizer is {stored.get('optimizer')!r}: must be adam, the only optimizer whose state can be converted"
        )
    if target.chains_optimizers and not stored.get("num_experts"):
        raise ValueError(f"--target-expert-parallel-size is {target.expert}: must be 1 for a model without experts")
    args = model_args(stored)
    args.unpadded_vocab_size = stored["unpadded_vocab_size"]
    args.padded_vocab_size = _padded_vocab_size(args, target)
    model = whole_gpt(run_config_of(args), padded_vocab_size=args.padded_vocab_size)
    boxes = _Boxes(model, checkpoint, target, args)
    save.mkdir(parents=True, exist_ok=True)
    with folders.atomic_folder(folder) as temporary:
        # save_stream writes the native format to a new folder. Only its data files and index are part of
        # Megatron-Core's format.
        save_stream(boxes.tensors(with_state=has_state), temporary / "tensors", common={}, with_zip_checksums=True)
        for path in (temporary / "tensors").iterdir():
            if path.name == METADATA_FILE or path.suffix == ".distcp":
                path.rename(temporary / path.name)
        shutil.rmtree(temporary / "tensors")
        _add_extra_states(temporary, boxes.extra_states())
        (temporary / MEGATRON_CORE_FILE).write_text(json.dumps(_FORMAT), encoding="utf-8")
        torch.save(_common(values, args, target), temporary / COMMON_FILE)
    write_tracker(str(save), found.iteration)
    return folder


def _padded_vocab_size(args: argparse.Namespace, target: CoreTarget) -> int:
    tokens: int = args.unpadded_vocab_size
    if target.padded_vocab_size is None:
        return vocab_size_with_padding(
            tokens, divisible_by=args.make_vocab_size_divisible_by, tensor_parallel_size=target.tensor
        )
    if target.padded_vocab_size < tokens or target.padded_vocab_size % target.tensor:
        raise ValueError(
            f"--target-padded-vocab-size is {target.padded_vocab_size}: must be at least the {tokens} tokens of the "
            f"tokenizer, and a multiple of the {target.tensor} tensor-parallel ranks"
        )
    return target.padded_vocab_size


@dataclass(frozen=True)
class _Source:
    """Native tensors that become one kind of Megatron-Core tensors.

    prefix: prefix of the native keys, empty for weights. their_kind: kind of optimizer state; None for weights. dtype:
    dtype of the written tensors; None means the stored dtype.
    """

    prefix: str
    their_kind: str | None
    dtype: torch.dtype | None = None


class _Boxes:
    """Reads a checkpoint's tensors as Megatron-Core's tensors."""

    def __init__(
        self, model: nn.Module, checkpoint: VerifiedCheckpoint, target: CoreTarget, args: argparse.Namespace
    ) -> None:
        self._tensors, self._pieces = tensors_of(model), model_logical_pieces(model)
        self._checkpoint, self._target = checkpoint, target
        self._reader = StreamReader(checkpoint)
        self._num_layers = args.num_layers
        self._num_experts = args.num_experts or 0
        # If all layers are of the same kind they are stacked in one tensor; otherwise each has separate tensors.
        names = {name.split(".", 3)[3] for name in self._tensors if name.startswith("decoder.layers.")}
        counts = [
            sum(f"decoder.layers.{layer}.{name}" in self._tensors for layer in range(args.num_layers)) for name in names
        ]
        self._stacked = all(count == args.num_layers for count in counts)

    def tensors(self, *, with_state: bool) -> Iterator[ShardedTensor]:
        """Yields the weights and optionally their optimizer states, any shape, in the stored dtype."""
        sources = [_Source(prefix="", their_kind=None)]
        if with_state:
            sources += [_Source(state_prefix(kind), kind) for kind in (EXP_AVG, EXP_AVG_SQ)]
            their_masters = "param" if self._target.distributed else MASTERS
            if any(key.startswith(state_prefix(MASTERS)) for key in self._checkpoint.tensors):
                sources.append(_Source(state_prefix(MASTERS), their_masters))
            elif self._target.distributed:
                # The distributed optimizer always stores an fp32 copy of the weights.
                sources.append(_Source("", their_masters, dtype=torch.float32))
        for name, tensor in self._tensors.items():
            pieces = pieces_of_tensor(name, tensor, self._pieces)
            for source in sources:
                if source.their_kind is not None and name not in self._pieces:
                    continue  # a buffer has no state
                yield self._box(name, tuple(tensor.shape), pieces, source)

    def extra_states(self) -> list[str]:
        """Returns the keys of the empty `_extra_state` entries that Megatron's layers require on load."""
        keys = []
        for name in self._tensors:
            module, _, leaf = name.rpartition(".")
            last = module.rpartition(".")[2]
            if leaf != "weight" or not (last.startswith("linear_") or (self._target.fused and "norm" in last)):
                continue
            place = self._place(name)
            if ".layer_norm_" in place.key:
                continue  # its norm is part of the linear layer
            rows = place.rows or ((0, 1),)
            index, sizes = (".".join(str(row[part]) for row in rows) for part in (0, 1))
            keys.append(f"{place.key.removesuffix('.weight')}._extra_state/shard_{index}_{sizes}")
            if self._target.fused and name.endswith("self_attention.linear_proj.weight"):
                core = place.key.replace("linear_proj.weight", "core_attention")
                keys.append(f"{core}._extra_state/shard_{index}_{sizes}")
        return keys

    def _box(self, name: str, shape: tuple[int, ...], pieces: Sequence[LogicalPiece], source: _Source) -> ShardedTensor:
        dtype = source.dtype or self._checkpoint.tensors[source.prefix + pieces[0].key][1]
        values = torch.zeros(shape, dtype=dtype)  # padding rows stay zero
        self._reader.fill(sharded_tensors(list(pieces), values, prefix=source.prefix, allow_cast=True))
        place = self._place(name)
        lead = tuple(1 for _ in place.rows)
        offset = (*(row for row, _ in place.rows), *(0 for _ in shape))
        key = place.key
        if source.their_kind is not None:
            chain = ""
            if self._target.chains_optimizers:
                chain = "chained_1." if _EXPERT in name else "chained_0."
            key = f"{chain}optimizer.state.{source.their_kind}.{place.key}"
        return ShardedTensor.at(key, values.view(*lead, *shape), place.shape(shape), offset)

    def _place(self, name: str) -> Place:
        """Returns a parameter's place, with gate and up in one tensor and experts stacked."""
        is_router_norm = name.endswith(("pre_mlp_layernorm.weight", "pre_mlp_layernorm.bias"))
        # Transformer Engine has no layer that fuses a norm with a router.
        is_separate = (
            self._target.fused and is_router_norm and f"{name.rsplit('.', 2)[0]}.mlp.router.weight" in self._tensors
        )
        [place] = next(
            way.places
            for way in ways_to_store(name, num_layers=self._num_layers, num_experts=self._num_experts)
            if len(way.places) == 1
            and way.experts_stacked == (_EXPERT in name)
            and way.layers_stacked == (self._stacked and name.startswith("decoder.layers."))
            # A norm that can be fused is always fused, because ways_to_store yields the fused variant first.
            and not (is_separate and way.norm_is_fused)
        )
        return place


def _add_extra_states(folder: Path, keys: Sequence[str]) -> None:
    """Adds one empty object to the data files and maps all keys to it."""
    content = io.BytesIO()
    torch.save([None], content)  # an empty state, as Megatron's layers save it
    name = f"__{len(list(folder.glob('*.distcp')))}_0.distcp"
    (folder / name).write_bytes(content.getvalue())
    metadata = read_metadata(folder)
    entries, places = dict(metadata.state_dict_metadata), dict(metadata.storage_data)
    for key in keys:
        entries[key] = BytesStorageMetadata()
        places[MetadataIndex(key)] = _StorageInfo(name, 0, len(content.getvalue()))
    with open(folder / METADATA_FILE, "wb") as file:
        pickle.dump(replace(metadata, state_dict_metadata=entries, storage_data=places), file)


def _common(values: Mapping[str, Any], args: argparse.Namespace, target: CoreTarget) -> dict[str, Any]:
    """Returns the contents of common.pt: the non-tensor values that Megatron-LM's scripts store."""
    stored, state = values["args"], values["train_state"]
    position = {name: state[name] for name in ("consumed_train_samples", "consumed_valid_samples")}
    common: dict[str, Any] = {
        "args": argparse.Namespace(**{**stored, **position, "padded_vocab_size": args.padded_vocab_size}),
        "checkpoint_version": 3.0,
        "iteration": values["iteration"],
        "num_floating_point_operations_so_far": 0,
    }
    if values["contents"]["optimizer"]:
        common["optimizer"] = _optimizer(values, target)
        if values["scheduler"] is not None:
            common["opt_param_scheduler"] = values["scheduler"]
    if target.distributed:
        common["content_metadata"] = {"distrib_optim_sharding_type": "fully_reshardable"}
    return common


def _optimizer(values: Mapping[str, Any], target: CoreTarget) -> dict[Any, Any]:
    dense = _one_optimizer(values, target, expert=False)
    return {0: dense, 1: _one_optimizer(values, target, expert=True)} if target.chains_optimizers else dense


def _one_optimizer(values: Mapping[str, Any], target: CoreTarget, *, expert: bool) -> dict[str, Any]:
    step, args = float(values["optimizer"]["step"]), values["args"]
    groups = [_group(args, decayed=decayed, expert=expert) for decayed in ((True,) if expert else (True, False))]
    scaler = values["optimizer"].get("grad_scaler")
    common: dict[str, Any] = {} if scaler is None else {"grad_scaler": _scaler(scaler)}
    if target.distributed:
        groups = [{**group, "step": step} for group in groups]
        return {**common, "optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"}
    inner = {"state": {"common_step": torch.tensor(step)}, "param_groups": groups}
    # The optimizer of fp32 parameters stores torch's state directly.
    is_fp32 = not (args.get("bf16") or args.get("fp16"))
    return inner if is_fp32 else {**common, "optimizer": inner}


def _scaler(scaler: Mapping[str, float]) -> dict[str, Any]:
    scale = {"scale": torch.tensor([float(scaler["scale"])])} if "scale" in scaler else {}
    return {**{name: int(value) for name, value in scaler.items() if name != "scale"}, **scale}


def _group(args: Mapping[str, Any], *, decayed: bool, expert: bool) -> dict[str, Any]:
    decay = args.get("weight_decay", 0.01)
    return {
        "is_expert_parallel": expert,
        "default_config": True,
        "wd_mult": 1.0 if decayed else 0.0,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "max_lr": args.get("lr"),
        "min_lr": args.get("min_lr"),
        "lr": args.get("lr"),
        "betas": (args.get("adam_beta1", 0.9), args.get("adam_beta2", 0.999)),
        "eps": args.get("adam_eps", 1e-8),
        "weight_decay": decay if decayed else 0.0,
        **_TORCH_GROUP,
    }
