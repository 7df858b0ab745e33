"""Defines a fault: a text replacement in one file. tools/seeded_faults.py and tests/device_model detect it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """A defect made by replacing `old` by `new` in `file`. kind: the class of mistake."""

    name: str
    kind: str
    file: str
    old: str
    new: str

    def is_named(self, texts: Sequence[str] | None) -> bool:
        """Returns whether its name, kind or file contains one of `texts`. None matches every fault."""
        return texts is None or any(text in part for text in texts for part in (self.name, self.kind, self.file))

    def changed(self, text: str) -> str:
        """Returns the file's text with the fault. Raises ValueError unless `text` contains `old` exactly once."""
        if text.count(self.old) != 1:
            raise ValueError(
                f"fault {self.name!r}: its text occurs {text.count(self.old)} times in {self.file}, must be 1"
            )
        return text.replace(self.old, self.new)

    def put_into(self, tree: Path) -> None:
        """Applies the fault to the file in `tree`. Raises ValueError unless the file contains `old` exactly once."""
        path = tree / self.file
        path.write_text(self.changed(path.read_text(encoding="utf-8") if path.exists() else ""), encoding="utf-8")
