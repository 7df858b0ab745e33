"""The checksum of a file, as manifests of checkpoints and of index caches hold it; no manifest is read here."""

import zlib
from pathlib import Path

# Large enough for full disk speed, small enough not to matter beside a tensor or an index.
_CHUNK_BYTES = 1 << 22


def file_crc32(path: Path) -> int:
    """CRC-32 of the file's bytes, read in chunks."""
    checksum = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum
