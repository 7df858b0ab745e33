"""Copies the files that accompany the weights of a hub model: config.json, tokenizer, generation settings.

They are stored in a folder next to the checkpoints, which a run copies to its own --save folder.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from megatron.tools.hugging_face.config_kinds import require_known_kinds
from megatron.training.checkpointing.folder import COMPANION_FOLDER

CONFIG_FILE = "config.json"
# Weights in any format, and their indices.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")


def read_config(folder: Path) -> dict[str, Any]:
    """Reads the config.json of a folder.

    Raises ValueError if it does not exist, is not a JSON object, or contains a value of the wrong type.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{folder} contains no {CONFIG_FILE}: give the folder of a model of transformers")
    try:
        config = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not a JSON object: {error}") from error
    require_known_kinds(config)
    return config


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Writes config.json in transformers' format."""
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def carry(source: Path, target: Path) -> None:
    """Copies all files of a folder except weights and hidden files. Creates `target`."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, target / path.name)


def companions_of(checkpoint: Path) -> Path | None:
    """Returns the folder of companion files next to a checkpoint, or None if there is none."""
    folder = checkpoint.parent / COMPANION_FOLDER
    return folder if (folder / CONFIG_FILE).is_file() else None
