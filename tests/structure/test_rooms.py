"""The tables of rooms (files) in docs/architecture.md list two packages' files. Each imports only files above it."""

import ast
import re

import pytest

from tests.structure.compared import implementers
from tests.structure.measure import PRODUCT, ROOT, Source, imported_modules, read_sources

PACKAGES = ("distributed", "optimizer")
PAGE = ROOT / "docs" / "architecture.md"
# Public classes whose names begin with an underscore, as in Megatron.
MEGATRON_CLASSES = {"_ParamAndGradBuffer", "_ParamAndGradBucket", "_ParamAndGradBucketGroup", "_BaseDataParallel"}

# Protocols that users' models or optimizers implement.
FOR_USERS = {"GradConsumer", "FinalizesStep", "KnowsInitialValues", "KnownValues", "Resets"}


def listed_rooms(package: str) -> dict[str, set[str]]:
    """Returns the public classes listed for each room of a package, in the order of the package's table."""
    table = PAGE.read_text().partition(f"\n### {package}\n")[2].partition("\n#")[0]
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|$", table, re.MULTILINE)
    return {room: {name for name in classes.strip().split(", ") if name} for room, classes in rows}


def files(package: str) -> dict[str, Source]:
    sources = read_sources(f"megatron/core/{package}")
    return {source.path.stem: source for source in sources if source.path.stem != "__init__"}


@pytest.mark.parametrize("package", PACKAGES)
def test_each_file_is_a_room(package: str) -> None:
    assert set(listed_rooms(package)) == set(files(package))


@pytest.mark.parametrize("package", PACKAGES)
def test_a_room_imports_only_from_rooms_above_it(package: str) -> None:
    found = files(package)
    prefix = f"megatron.core.{package}."
    above: set[str] = set()
    for room in listed_rooms(package):
        known = frozenset(f"{prefix}{name}" for name in found)
        imported = {module for module, _ in imported_modules(found[room], known) if module in known}
        imported = {module.removeprefix(prefix) for module in imported}
        assert imported <= above, f"{room} imports {sorted(imported - above)}, which are listed below it"
        above.add(room)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_room_lists_its_public_classes(package: str) -> None:
    found = files(package)
    for room, listed in listed_rooms(package).items():
        names = {node.name for node in found[room].tree.body if isinstance(node, ast.ClassDef)}
        assert listed == {name for name in names if not name.startswith("_") or name in MEGATRON_CLASSES}, room


@pytest.mark.parametrize("package", PACKAGES)
def test_a_protocol_has_several_implementers(package: str) -> None:
    own = {node.name for source in files(package).values() for node in source.classes}
    counts = {name: len(found) for name, found in implementers(read_sources(*PRODUCT)).items() if name in own}
    assert [name for name, count in counts.items() if count < 2 and name not in FOR_USERS] == []
