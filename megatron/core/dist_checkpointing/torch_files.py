"""What torch.save wrote, read by an allow-list: no code that a file names is run."""

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch


def load_allowed(source: Path | IO[bytes], where: object, *, allowed: Sequence[Any] = (), mmap: bool = False) -> Any:
    """The content of a file: tensors and plain values, and objects of the classes in `allowed`.

    Raises ValueError naming `where` it is from if it is damaged or refers to anything else. mmap: tensors stay on disk.
    """
    try:
        with torch.serialization.safe_globals(list(allowed)):
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except (
        RuntimeError,
        pickle.UnpicklingError,
        EOFError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
        MemoryError,
        AssertionError,
    ) as error:
        # Torch's advice, to unpickle without a check, is not ours.
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{where} cannot be read: {reason}") from error
