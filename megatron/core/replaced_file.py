"""replaced_file: a file that is written beside its place and takes it when it is complete.

Of single files; folders that appear at once, and files that a checkpoint vouches for, are in dist_checkpointing.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replaced_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which is `path` from the end of the body on: readers see the old or the new one, never a part.

    A body that fails leaves `path` as it was and nothing beside it; a kill may leave `path`.partial-*. Raises OSError.
    """
    # Processes of several nodes, which may write the same file, may share process ids: so random bytes too.
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}-{os.urandom(4).hex()}")
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            # Before it has its name, or a power cut could leave that with nothing in it.
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
