"""Reading and writing the data files of a checkpoint through torch.distributed.checkpoint's file format.

The folder around them (manifest, atomic rename) is in folder.py; what goes where is decided in planner.py.
"""

import io
import pickle
from collections import defaultdict
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

METADATA_FILE = ".metadata"
_DCP = "torch.distributed.checkpoint"
# Everything that torch's pickled metadata of boxes and objects refers to, torch dtypes and layouts apart.
_METADATA_GLOBALS = {
    (f"{_DCP}.metadata", name)
    for name in (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )
} | {(f"{_DCP}.filesystem", "_StorageInfo"), ("torch", "Size"), ("torch.serialization", "_get_layout")}


class CheckpointWriter(FileSystemWriter):
    """One synced file per rank that has anything to write, and torch's metadata file."""

    def __init__(self, folder: Path):
        super().__init__(folder, single_file_per_rank=True, sync_files=True, overwrite=False)

    def storage_meta(self) -> StorageMeta:
        """Nothing: the temporary folder's name has no place in the checkpoint."""
        return StorageMeta()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's items; raises OSError when the disk refuses."""
        # torch would write an empty file for a rank whose boxes others write.
        if plan.items:
            try:
                return super().write_data(plan, planner)
            except RuntimeError as error:
                # torch's zip writer covers a refused write by its own complaint about the file position.
                raise _first_os_error(error) or error from error
        nothing: Future[list[WriteResult]] = Future()
        nothing.set_result([])
        return nothing


class CheckpointReader(FileSystemReader):
    """Reads each stored box once, however many wanted boxes it serves, and unpickles only metadata classes."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata of the whole checkpoint."""
        return read_metadata(Path(self.path))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills the planner's targets, file by file."""
        # By file and stored box: one expert each from a stacked tensor must not read the stack E times.
        by_file: dict[str, dict[MetadataIndex, list[ReadItem]]] = defaultdict(lambda: defaultdict(list))
        for item in plan.items:
            by_file[self.storage_data[item.storage_index].relative_path][item.storage_index].append(item)
        for name, by_stored in by_file.items():
            with open(Path(self.path) / name, "rb") as file:
                for stored, items in by_stored.items():
                    self._read_stored(file, stored, items=items, planner=planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_stored(
        self, file: IO[bytes], stored: MetadataIndex, *, items: list[ReadItem], planner: LoadPlanner
    ) -> None:
        info = self.storage_data[stored]
        file.seek(info.offset)
        # One stored box at a time is all that reading adds to the process's memory.
        content = io.BytesIO(file.read(info.length))
        if items[0].type == LoadItemType.BYTE_IO:
            for item in items:
                planner.load_bytes(item, content)
            return
        tensor = torch.load(content, map_location="cpu", weights_only=True)  # [*stored box]
        for item in items:
            window = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
            target = planner.resolve_tensor(item)
            # Converts dtype and device on the way; check_wanted has said where that is allowed.
            target.copy_(tensor[window])
            planner.commit_tensor(item, target)


def _first_os_error(error: BaseException | None) -> OSError | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error


def read_metadata(folder: Path) -> Metadata:
    """What the checkpoint in `folder` stores; raises ValueError if the metadata file is not what torch writes."""
    try:
        with open(folder / METADATA_FILE, "rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / METADATA_FILE} is corrupt: {error}") from error
    if not isinstance(metadata, Metadata):
        raise ValueError(f"{folder / METADATA_FILE} is corrupt: holds a {type(metadata).__name__}")
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    # A pickle may call anything it can name; metadata needs a handful of classes.
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _METADATA_GLOBALS:
            return super().find_class(module, name)
        # torch pickles a dtype as a bare name in its own namespace.
        if module == "torch" and isinstance(found := vars(torch).get(name), (torch.dtype, torch.layout)):
            return found
        raise pickle.UnpicklingError(f"refers to {module}.{name}")
