"""Writes the text of the Python installation as a corpus: `python tools/python_corpus.py --output corpus.jsonl`.

Documents: modules of the standard library, topics of the language reference, docstrings of modules written in C.
Downloads nothing. Other Python versions produce a different, similar corpus.
"""

import argparse
import hashlib
import importlib
import inspect
import json
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics

DEFAULT_MAX_BYTES = 20_000_000
# Third-party code, and modules that are tables or test data.
LEFT_OUT = frozenset(
    "site-packages dist-packages __pycache__ encodings _bundled pgen2 data tests_data bad_coding lib-dynload".split()
)
LEFT_OUT_FILES = frozenset({"pydoc_data/topics.py"})
TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})


@dataclass(frozen=True)
class Document:
    """A text and the name of its source."""

    source: str
    text: str


def main(argv: list[str] | None = None) -> int:
    """Writes the corpus and returns the exit status."""
    options = parse_options(argv)
    path = Path(options.output)
    try:
        documents = shuffled(take(unique(all_documents()), max_bytes=options.max_bytes))
        write(documents, path)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    num_bytes = sum(len(document.text.encode()) for document in documents)
    print(f"{len(documents):,} documents, {num_bytes / 1e6:.1f} MB of text of Python {sys.version.split()[0]}: {path}")
    return 0


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None, allow_abbrev=False)
    parser.add_argument("--output", required=True, metavar="FILE", help="the .jsonl file to write")
    parser.add_argument(
        "--max-bytes",
        type=int,
        default=DEFAULT_MAX_BYTES,
        help=f"maximum size of the text in bytes (default: {DEFAULT_MAX_BYTES:,})",
    )
    options = parser.parse_args(argv)
    if options.max_bytes < 1:
        parser.error(f"--max-bytes is {options.max_bytes}: must be at least 1")
    return options


def all_documents() -> Iterator[Document]:
    """Yields reference topics and C modules, then the library, then its tests. The last documents are dropped first."""
    yield from (Document(f"topic {name}", text) for name, text in sorted(topics.topics.items()))
    yield from builtin_documents()
    library = Path(sysconfig.get_path("stdlib"))
    files = shuffled_paths(library)
    yield from source_documents(library, (file for file in files if not TEST_FOLDERS & set(file.parts)))
    yield from source_documents(library, (file for file in files if TEST_FOLDERS & set(file.parts)))


def builtin_documents() -> Iterator[Document]:
    """Yields one document per module written in C, which has no source file, with its docstrings."""
    for name in sorted(sys.builtin_module_names):
        module = importlib.import_module(name)
        members = sorted(vars(module).items())
        texts = [f"{name}.{key}\n\n{inspect.getdoc(member)}" for key, member in members if _has_own_doc(member)]
        if texts:
            yield Document(f"builtin {name}", "\n\n\n".join([f"module {name}\n\n{inspect.getdoc(module)}", *texts]))


def _has_own_doc(member: object) -> bool:
    return inspect.isroutine(member) and bool(inspect.getdoc(member))


def shuffled_paths(library: Path) -> list[Path]:
    """Returns all source files relative to `library`, sorted by hashes of their names.

    The order is the same on every machine.
    """
    files = (file.relative_to(library) for file in library.rglob("*.py"))
    kept = (file for file in files if not LEFT_OUT & set(file.parts) and file.as_posix() not in LEFT_OUT_FILES)
    return sorted(kept, key=lambda file: _digest(file.as_posix()))


def source_documents(library: Path, files: Iterable[Path]) -> Iterator[Document]:
    """Yields the source files that are UTF-8. A few test modules of the library intentionally are not."""
    for file in files:
        try:
            text = (library / file).read_bytes().decode()
        except UnicodeDecodeError:
            continue
        yield Document(file.as_posix(), text)


def unique(documents: Iterable[Document]) -> Iterator[Document]:
    """Yields the documents without empty and repeated texts."""
    seen = set()
    for document in documents:
        digest = _digest(document.text.strip())
        if document.text.strip() and digest not in seen:
            seen.add(digest)
            yield document


def take(documents: Iterable[Document], *, max_bytes: int) -> list[Document]:
    """Returns the first documents whose texts fit in `max_bytes`. Raises ValueError if none fits."""
    taken = []
    left = max_bytes
    for document in documents:
        left -= len(document.text.encode())
        if left < 0:
            break
        taken.append(document)
    if not taken:
        raise ValueError(f"--max-bytes is {max_bytes}: the first document is longer")
    return taken


def shuffled(documents: Iterable[Document]) -> list[Document]:
    """Returns documents sorted by hashes of their sources, so that every part of the corpus has a similar mix."""
    # Hashes differ from those in shuffled_paths: if text was dropped, only files with low hashes of that kind remain.
    return sorted(documents, key=lambda document: _digest(f"order {document.source}"))


def write(documents: Iterable[Document], path: Path) -> None:
    """Writes the documents as JSON lines. The file has a temporary name until it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    with open(partial, "w", encoding="utf-8", newline="\n") as file:
        for document in documents:
            file.write(json.dumps({"text": document.text, "source": document.source}, ensure_ascii=False) + "\n")
    os.replace(partial, path)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
