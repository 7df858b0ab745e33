"""Cache of arrays on disk, keyed by a description of their inputs and rebuilt if damaged.

The cache requires no locks, because every file is written under a temporary name and renamed, and equal descriptions
yield equal arrays. Ranks, nodes and jobs may therefore write concurrently.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megatron.core.files import file_crc32, replaced_file


class IndexCache:
    """Cache of the arrays that are built from one set of inputs, the description; stored in `folder`.

    Files: KEY-NAME.npy for each array, and KEY-manifest.json with the description, sizes and checksums, written last.
    trusted: uses files of the correct size without verifying checksums or calling `check`.
    """

    def __init__(self, folder: Path, *, label: str, description: Mapping[str, Any], trusted: bool = False) -> None:
        self.folder = folder
        self._trusted = trusted
        self.description = json.loads(json.dumps(description, sort_keys=True))
        digest = hashlib.md5(json.dumps(self.description).encode(), usedforsecurity=False).hexdigest()
        self.key = f"{digest}-{label}"

    def load_or_build(
        self, build: Callable[[], Mapping[str, np.ndarray]], *, check: Callable[[Mapping[str, np.ndarray]], None]
    ) -> dict[str, np.ndarray]:
        """Returns the cached arrays as read-only memory maps. Calls `build` and stores its result if there are none.

        check: raises ValueError for arrays that `build` cannot have returned. Raises OSError if the folder is not
        writable.
        """
        arrays = self.load(check)
        if arrays is None:
            built = dict(build())
            self.store(built)
            arrays = self.load(check) or built
        return arrays

    def load(self, check: Callable[[Mapping[str, np.ndarray]], None]) -> dict[str, np.ndarray] | None:
        """Returns the arrays, or None if a file is missing, damaged, from other inputs, or rejected by `check`."""
        try:
            facts_by_name = self._read_manifest()
            arrays = {name: self._load_array(name, facts) for name, facts in facts_by_name.items()}
            if not self._trusted:
                check(arrays)
            return arrays
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            # The manifest may contain anything. An unreadable cache is rebuilt.
            return None

    def holds_files(self) -> bool:
        """Returns whether all files of the description exist with the correct sizes. Does not read the arrays."""
        try:
            return all(self._array_path(name, facts).is_file() for name, facts in self._read_manifest().items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return False

    def store(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Writes the files, the manifest last. Raises OSError if the folder is not writable."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            facts = {name: self._store_array(name, array) for name, array in arrays.items()}
            text = json.dumps({"description": self.description, "arrays": facts}, indent=1)
            self._replace("manifest.json", lambda file: file.write(text.encode()))
        except OSError as error:
            raise OSError(
                f"the index cache {self.folder} cannot be written ({error.strerror or error}): set --data-cache-path "
                "to a writable folder"
            ) from error

    def _path(self, name: str) -> Path:
        return self.folder / f"{self.key}-{name}"

    def _read_manifest(self) -> dict[str, dict[str, int]]:
        """Returns size and checksum of each array. Raises ValueError if the manifest's description differs."""
        manifest = json.loads(self._path("manifest.json").read_text())
        if manifest["description"] != self.description:
            raise ValueError("the cache was built from different inputs")
        facts_by_name: dict[str, dict[str, int]] = manifest["arrays"]
        return facts_by_name

    def _array_path(self, name: str, facts: Mapping[str, int]) -> Path:
        """Returns the path of an array's file. Raises ValueError if the file size differs from the manifest."""
        path = self._path(f"{name}.npy")
        if path.stat().st_size != facts["bytes"]:
            raise ValueError(f"{path} is damaged")
        return path

    def _load_array(self, name: str, facts: Mapping[str, int]) -> np.ndarray:
        path = self._array_path(name, facts)
        if not self._trusted and file_crc32(path) != facts["crc32"]:
            raise ValueError(f"{path} is damaged")
        # np.load would also read archives and pickles. The view is a plain array, because np.memmap does extra work for
        # every element that is read.
        return np.lib.format.open_memmap(path, mode="r").view(np.ndarray)

    def _store_array(self, name: str, array: np.ndarray) -> dict[str, int]:
        path = self._replace(f"{name}.npy", lambda file: np.save(file, array, allow_pickle=False))
        return {"bytes": path.stat().st_size, "crc32": file_crc32(path)}

    def _replace(self, name: str, write: Callable[[BinaryIO], Any]) -> Path:
        path = self._path(name)
        with replaced_file(path) as file:
            write(file)
        return path
