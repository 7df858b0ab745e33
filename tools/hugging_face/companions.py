"""What lies beside the weights of a model of the hub and is carried along: config.json, tokenizer, generation settings.

Checkpoints keep it in a folder of its own; a run takes that along to the folder that it saves to.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from megatron.training.checkpointing.folder import COMPANION_FOLDER
from tools.hugging_face.config_kinds import require_known_kinds

CONFIG_FILE = "config.json"
# Weights in any format, and what says where they are.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a folder; ValueError where there is none, no JSON object in it, or a value of a wrong kind."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{folder} has no {CONFIG_FILE}: give the folder of a model of transformers")
    try:
        config = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not a JSON object: {error}") from error
    require_known_kinds(config)
    return config


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Writes config.json as transformers does."""
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def carry(source: Path, target: Path) -> None:
    """Copies every file of a folder but weights, hidden files and folders; `target` is made."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, target / path.name)


def companions_of(checkpoint: Path) -> Path | None:
    """The folder of companions beside a checkpoint, if there is one."""
    folder = checkpoint.parent / COMPANION_FOLDER
    return folder if (folder / CONFIG_FILE).is_file() else None
