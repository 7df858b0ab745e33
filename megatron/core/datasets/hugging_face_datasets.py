"""Finds the Arrow files of Hugging Face datasets, in folders written by `save_to_disk` and for datasets on the hub.

table_files.py reads the files.
"""

import json
import sys
from pathlib import Path
from typing import Any

HUB_PREFIX = "hf:"
_STATE, _SPLITS = "state.json", "dataset_dict.json"


def saved_dataset_files(folder: Path) -> list[Path] | None:
    """Returns the files of a dataset that `save_to_disk` wrote, or None if the folder is not such a dataset.

    Raises ValueError if the folder contains several splits or is damaged, and FileNotFoundError if a file is missing.
    """
    if (folder / _SPLITS).is_file():
        splits = _stored(folder / _SPLITS).get("splits", [])
        named = ", ".join(str(folder / split) for split in splits)
        raise ValueError(f"{folder} contains a dataset with several splits: must be one of {named}")
    if not (folder / _STATE).is_file() or not (folder / "dataset_info.json").is_file():
        return None
    state = _stored(folder / _STATE)
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise ValueError(f"{folder} stores its row order separately: save the dataset again with datasets >= 2")
    try:
        files = [folder / file["filename"] for file in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder / _STATE} lists no data files: must be written by save_to_disk") from error
    missing = next((path for path in files if not path.is_file()), None)
    if missing is not None:
        raise FileNotFoundError(f"{missing} does not exist, but {folder / _STATE} lists it")
    return files


def hub_dataset_files(name: str) -> list[Path]:
    """Returns the files of hf:NAME[:[CONFIG:]SPLIT], which the library `datasets` downloads into its cache.

    NAME may also be a folder with data files in the layout of the hub. SPLIT is train by default. Raises ValueError if
    the name is invalid or the dataset cannot be loaded.
    """
    path, *words = name.removeprefix(HUB_PREFIX).split(":")
    split = words[-1] if words else "train"
    if not path or not all(words) or "[" in name or len(words) > 2:
        raise ValueError(f"{name}: must be {HUB_PREFIX}NAME, {HUB_PREFIX}NAME:SPLIT or {HUB_PREFIX}NAME:CONFIG:SPLIT")
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"{name} requires the package datasets: pip install 'megatron-stash[data]'") from error
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        dataset = datasets.load_dataset(path, words[0] if len(words) == 2 else None, split=split)
    except (ValueError, OSError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"{name} cannot be loaded by the library datasets: {' '.join(str(error).split())}") from error
    files = [Path(file["filename"]) for file in dataset.cache_files]
    if not files:
        raise ValueError(f"{name} is not cached in files: unset HF_DATASETS_IN_MEMORY_MAX_SIZE")
    return files


def _stored(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: must contain a JSON object, got {type(found).__name__}")
    return found
