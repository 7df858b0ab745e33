"""Converts a hub model to a canonical checkpoint or back, one tensor at a time, without building the model.

names.py maps the tensors, and settings.py interprets config.json.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import (
    ShardedTensor,
    StreamReader,
    VerifiedCheckpoint,
    save_stream,
    sharded_tensors,
)
from megatron.core.tokenizers import vocab_size_with_padding
from megatron.tools.hugging_face.companions import CONFIG_FILE, carry, companions_of, read_config, write_config
from megatron.tools.hugging_face.families import Family
from megatron.tools.hugging_face.names import HubTensor, hub_tensors, is_mtp_tensor
from megatron.tools.hugging_face.quantized import PlainFiles
from megatron.tools.hugging_face.settings import (
    config_of_settings,
    family_of_config,
    settings_of_config,
    unread_keys,
    with_defaults,
)
from megatron.tools.merge_adapters import merge_adapters
from megatron.tools.safetensors_files import TensorFiles, TensorKind, new_folder, write_tensor_files
from megatron.tools.stored_checkpoints import NOT_WEIGHTS, checkpoint_of_load
from megatron.training.arguments import parse_args
from megatron.training.checkpointing.folder import COMPANION_FOLDER, RELEASE, complete_iterations, write_release_tracker
from megatron.training.checkpointing.run_values import args_to_json, load_run_values
from megatron.training.checkpointing.train_state import TrainState

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Remains in fp32, because updates of 1e-3 would be lost in half precision.
_NEVER_CONVERTED = "router.expert_bias"
# Weights of all norms, including those of queries, keys, latents and multi-token prediction.
_NORM_WEIGHTS = ("layernorm.weight", "enorm.weight", "hnorm.weight")
# Tables that older versions of transformers stored with the weights.
_DERIVED = "rotary_emb.inv_freq"
_OUTPUT, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# End of the name of a tensor with all experts of a layer.
_STACKED = ".experts.gate_up_proj"
_MAX_NAMED = 4


@dataclass(frozen=True)
class HubModel:
    """A hub model in a folder: its family, settings, files and required tensors.

    left_out: tensors in the files that are not converted. unread: keys of config.json that are not read, although they
    are not known to be without effect.
    """

    family: Family
    settings: dict[str, Any]
    files: PlainFiles
    tensors: tuple[HubTensor, ...]
    left_out: tuple[str, ...]
    unread: tuple[str, ...]

    @classmethod
    def open(cls, folder: Path) -> "HubModel":
        """Opens the model without reading tensor values.

        Raises ValueError naming tensors that are missing, unknown or have the wrong shape.
        """
        config = read_config(folder)
        family, settings = family_of_config(config), settings_of_config(config)
        files = PlainFiles(TensorFiles(folder), config)
        if not any(is_mtp_tensor(name, settings) for name in files.kinds):
            # transformers does not write them.
            settings["mtp_num_layers"] = None
        has_stacked = not family.names.interleaved and any(name.endswith(_STACKED) for name in files.kinds)
        names = family.names.in_memory if has_stacked else family.names
        every = tuple(hub_tensors(family, settings, names=names))
        tensors = tuple(tensor for tensor in every if tensor.copy_of is None)
        _check_presence(tensors, files)
        _check_copies(every, files)
        return cls(family, settings, files, tensors, _extra_tensors(every, files), tuple(unread_keys(config)))

    def dtype(self) -> torch.dtype:
        """Returns the most common dtype of its tensors."""
        return Counter(self.files.kinds[tensor.name].dtype for tensor in self.tensors).most_common(1)[0][0]


def from_hub(load: Path, save: Path, *, dtype: torch.dtype | None = None) -> Path:
    """Writes the hub model in the folder `load` as a checkpoint to start from and returns its folder.

    dtype: dtype of the stored weights; None keeps their dtypes. Raises ValueError naming errors in config.json or the
    files, or if `save` already contains checkpoints.
    """
    model = HubModel.open(load)
    if complete_iterations(save) or (save / RELEASE).exists():
        raise ValueError(f"--save is {save}: it already contains checkpoints; give a new folder")
    for name in model.left_out:
        print(f"not converted: {name}")
    for key in model.unread:
        print(f"not read from {CONFIG_FILE}: {key}")
    target = save / RELEASE
    common = {
        "iteration": 0,
        "train_state": TrainState(iteration=0).state_dict(),
        "args": _run_arguments(model, dtype or model.dtype(), companions=save / COMPANION_FOLDER, source=load),
        "contents": {"optimizer": False, "rng": False},
        "frozen": [],
    }
    save_stream(_boxes(model, dtype), target, common=common)
    carry(load, save / COMPANION_FOLDER)
    write_release_tracker(str(save))
    return target


def to_hub(
    load: Path,
    save: Path,
    *,
    step: int | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int,
    reference: Path | None = None,
) -> Path:
    """Writes the weights of a checkpoint to the new folder `save` as a model for transformers, and returns `save`.

    Merges low-rank adapters into the weights, through a temporary checkpoint. dtype: dtype of the written tensors; None
    keeps the stored dtypes. reference: hub folder whose config.json and tokenizer are copied; None uses the companion
    files next to the checkpoint, or a new config.json. Raises ValueError if there is no checkpoint, or if no
    architecture supports its settings.
    """
    found = checkpoint_of_load(load, step)
    arguments = load_run_values(found.path)["args"]
    if arguments.get("lora_rank") is not None:
        # In the same file system as the result, because it is as large.
        with TemporaryDirectory(dir=save.parent, prefix=".merged-") as folder:
            merged = Path(folder) / "merged"
            merge_adapters(load, merged, step=step)
            return to_hub(merged, save, dtype=dtype, max_shard_bytes=max_shard_bytes, reference=reference)
    settings = _model_settings(arguments)
    companions = reference or companions_of(found.path)
    with new_folder(save) as temporary:
        checkpoint = dist_checkpointing.verify(found.path)
        weights = dtype or checkpoint.tensors["embedding.word_embeddings.weight"][1]
        carried = None if companions is None else read_config(companions)
        config = config_of_settings(settings, dtype=str(weights).removeprefix("torch."), carried=carried)
        if companions is not None:
            carry(companions, temporary)
        if config != carried:
            write_config(temporary, config)
        source = _StoredModel(checkpoint, tuple(hub_tensors(family_of_config(config), settings)), dtype=dtype)
        source.norms_lack_one = settings["layernorm_zero_centered_gamma"]
        metadata = {"total_parameters": source.num_parameters}
        write_tensor_files(
            temporary, source.kinds, read=source.read, max_shard_bytes=max_shard_bytes, metadata=metadata
        )
    return save


class _StoredModel:
    """The tensors of a checkpoint under their hub names.

    norms_lack_one: whether the checkpoint stores norm weights minus 1 (--apply-layernorm-1p), unlike hub files.
    """

    norms_lack_one = False

    def __init__(
        self, checkpoint: VerifiedCheckpoint, tensors: tuple[HubTensor, ...], *, dtype: torch.dtype | None
    ) -> None:
        self._reader = StreamReader(checkpoint)
        self._tensors = {tensor.name: tensor for tensor in tensors}
        stored = checkpoint.tensors
        wanted = {piece.key for tensor in tensors for piece in tensor.pieces}
        unknown = sorted(key for key in stored.keys() - wanted if not key.startswith(NOT_WEIGHTS))
        missing = sorted(wanted - stored.keys())
        if unknown or missing:
            raise ValueError(f"{checkpoint.folder} belongs to another model: {_named(missing, unknown)}")
        self.kinds = {
            tensor.name: TensorKind(tensor.shape, _dtype_of(tensor, stored, dtype=dtype)) for tensor in tensors
        }
        self.num_parameters = sum(torch.Size(tensor.shape).numel() for tensor in tensors)

    def read(self, name: str) -> Tensor:
        """Returns a tensor by its hub name, in its hub shape and the dtype in `kinds`."""
        kind = self.kinds[name]
        tensor = torch.empty(kind.shape, dtype=kind.dtype)
        pieces = list(self._tensors[name].pieces)
        if self.norms_lack_one and all(piece.key.endswith(_NORM_WEIGHTS) for piece in pieces):
            # Added in fp32, and rounded once.
            stored = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
            self._reader.fill(sharded_tensors(pieces, stored, allow_cast=True))
            return stored.add_(1).to(tensor.dtype)
        self._reader.fill(sharded_tensors(pieces, tensor, allow_cast=True))
        return tensor


def _boxes(model: HubModel, dtype: torch.dtype | None) -> Iterator[ShardedTensor]:
    """Yields the stored tensors of a hub model. Only one tensor of the files is in memory at a time.

    dtype: dtype of the result; None keeps each tensor's dtype.
    """
    for tensor in model.tensors:
        values = model.files.read(tensor.name)
        if dtype is not None and not _keeps_its_type(tensor):
            values = values.to(dtype)
        boxes = sharded_tensors(list(tensor.pieces), values)
        del values
        while boxes:
            yield boxes.pop(0)


def _keeps_its_type(tensor: HubTensor) -> bool:
    return all(piece.key.endswith(_NEVER_CONVERTED) for piece in tensor.pieces)


def _check_copies(tensors: tuple[HubTensor, ...], files: PlainFiles) -> None:
    """Raises ValueError if the copies of a tensor that checkpoints store only once differ. A copy may be absent."""
    for tensor in tensors:
        if tensor.copy_of is None or tensor.name not in files.kinds:
            continue
        if not files.have_same(tensor.name, tensor.copy_of):
            raise ValueError(
                f"{files.file_of(tensor.name)}: {tensor.name} and {tensor.copy_of} differ, but a checkpoint stores "
                "one tensor for both"
            )


def _dtype_of(
    tensor: HubTensor, stored: Mapping[str, tuple[tuple[int, ...], torch.dtype]], *, dtype: torch.dtype | None
) -> torch.dtype:
    own = stored[tensor.pieces[0].key][1]
    return own if dtype is None or _keeps_its_type(tensor) else dtype


def _check_presence(tensors: tuple[HubTensor, ...], files: PlainFiles) -> None:
    missing = [tensor.name for tensor in tensors if tensor.name not in files.kinds]
    if missing:
        hint = ""
        if missing == [_OUTPUT]:
            hint = "; it is not required if tie_word_embeddings is true in config.json"
        raise ValueError(f"{files.folder} does not match its {CONFIG_FILE}: {_named(missing, [])}{hint}")
    for tensor in tensors:
        found = files.kinds[tensor.name].shape
        if found == tensor.shape:
            continue
        where = f"{files.file_of(tensor.name)}: {tensor.name} has shape {list(found)}"
        if tensor.name in (_EMBEDDING, _OUTPUT) and found[1:] == tensor.shape[1:]:
            raise ValueError(f"{where}, but vocab_size is {tensor.shape[0]} in {CONFIG_FILE}")
        raise ValueError(f"{where}: must be {list(tensor.shape)} according to {CONFIG_FILE}")
    odd = [t.name for t in tensors if files.kinds[t.name].dtype not in (*DTYPES.values(), torch.float64)]
    if odd:
        kind = files.kinds[odd[0]].dtype
        raise ValueError(f"{files.file_of(odd[0])}: {odd[0]} is {kind}: weights must be plain numbers such as bf16")


def _extra_tensors(tensors: tuple[HubTensor, ...], files: PlainFiles) -> tuple[str, ...]:
    """Returns the names of tensors in the files that a checkpoint does not require.

    Raises ValueError if the files contain tensors of a different model.
    """
    extra = sorted(files.kinds.keys() - {tensor.name for tensor in tensors})
    unknown = [name for name in extra if not name.endswith(_DERIVED)]
    if unknown == [_OUTPUT] and files.have_same(_OUTPUT, _EMBEDDING):
        unknown = []
    if unknown:
        hint = ""
        if unknown == [_OUTPUT]:
            hint = f"; it differs from {_EMBEDDING}, although tie_word_embeddings is true in {CONFIG_FILE}"
        raise ValueError(f"{files.folder} does not match its {CONFIG_FILE}: {_named([], unknown)}{hint}")
    return tuple(extra)


def _named(missing: list[str], unknown: list[str]) -> str:
    words = []
    for names, what in ((missing, "there is no"), (unknown, "unused")):
        if names:
            more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
            words.append(f"{what} {', '.join(names[:_MAX_NAMED])}{more}")
    return "; ".join(words)


def _run_arguments(model: HubModel, dtype: torch.dtype, *, companions: Path, source: Path) -> dict[str, Any]:
    """Returns the arguments that a run of this model would store, for --use-checkpoint-args and tools."""
    args = parse_args(argv=[])
    vars(args).update(model.settings)
    args.unpadded_vocab_size = args.vocab_size
    args.padded_vocab_size = vocab_size_with_padding(
        args.vocab_size, divisible_by=args.make_vocab_size_divisible_by, tensor_parallel_size=1
    )
    args.params_dtype, args.bf16, args.fp16 = dtype, dtype == torch.bfloat16, dtype == torch.float16
    if (source / "tokenizer.json").is_file():
        args.tokenizer_type, args.tokenizer_model = "HuggingFaceTokenizer", str(companions.resolve())
    elif (source / "tokenizer.model").is_file():
        args.tokenizer_type, args.tokenizer_model = "Llama2Tokenizer", str((companions / "tokenizer.model").resolve())
    stored = args_to_json(vars(args))
    # The sequence length belongs to the run, not to the model.
    del stored["seq_length"]
    return stored


def _model_settings(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a run's checkpoint, with the unpadded vocabulary size.

    Raises ValueError for a setting that changes the logits, and that config.json and weights cannot express.
    """
    for name in ("moe_router_load_balancing_type", "spec"):
        value = stored.get(name)
        if value is not None and (name == "spec" or "sinkhorn" in value):
            raise ValueError(
                f"--{name.replace('_', '-')} is {value}: cannot be converted, because no architecture has it"
            )
    return with_defaults({**stored, "vocab_size": stored["unpadded_vocab_size"]})
