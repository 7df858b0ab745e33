"""What the documentation names exists: links, flags, paths. Whether its sentences are true is not checked here."""

import re
from functools import cache
from pathlib import Path

import pytest

from megatron.training.command_line.flags import flag_table
from tests.structure.compared import anchors
from tests.structure.measure import ROOT

DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *DOCS]
WRITTEN = [page for page in PAGES if page.name != "flags.md"]  # that one comes from the flag table itself
FOLDERS = "megatron|tests|tools|configs|docs|docker|examples|benchmarks|requirements|.ci"
LINK = re.compile(r"\]\(([^)\s]+)\)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")
NAMED_PATH = re.compile(rf"`((?:{FOLDERS.replace('.', re.escape('.'))})/[\w./-]+)`")
NAMED_FILE = re.compile(r"`([\w-]+\.(?:py|sh|md|toml))`")
# Programs that are not ours.
FOREIGN_FLAGS = {"--nproc-per-node", "--standalone", "--nnodes", "--node-rank", "--master-addr", "--master-port"}
FOREIGN_FLAGS |= {"--durations", "--replay", "--max-restarts", "--shutdown-timeout", "--dist"}
FOREIGN_FLAGS |= {"--signal", "--requeue", "--open-mode", "--kill-on-bad-exit", "--wait"}  # of sbatch and srun
FOREIGN_FLAGS |= {"--file", "--tag", "--rm", "--user", "--volume", "--gpus", "--ipc", "--entrypoint"}  # of docker
FOREIGN_FLAGS |= {"--force-reinstall", "--no-deps"}  # of pip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_resolves(page: Path) -> None:
    targets = [target.partition("#")[0] for target in LINK.findall(page.read_text(encoding="utf-8"))]
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert missing == []


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_every_flag_exists(page: Path) -> None:
    unknown = set(FLAG.findall(page.read_text(encoding="utf-8"))) - _known_flags() - FOREIGN_FLAGS
    # What an error message quotes as a mistake.
    assert unknown - {"--num-layer"} == set()


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_every_path_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = [path for path in NAMED_PATH.findall(text) if not (ROOT / path).exists()]
    missing += [name for name in NAMED_FILE.findall(text) if name not in _file_names()]
    assert missing == []


def test_every_page_and_example_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / target).resolve() for target in LINK.findall(index.read_text(encoding="utf-8"))}
    examples = [path for path in (ROOT / "examples").iterdir() if path.is_file()]
    assert [path.name for path in {*DOCS, *examples} - linked - {index}] == []


def test_the_reading_order_names_files() -> None:
    """A tour line is a path below the last line that ended in a slash, or a whole path."""
    tour = (ROOT / "docs" / "README.md").read_text(encoding="utf-8").partition("```\n")[2].partition("```")[0]
    folder, missing = ROOT, []
    for line in tour.splitlines():
        name = line.split()[0]
        folder = ROOT if not line.startswith(" ") else folder
        missing += [] if (folder / name).exists() else [line]
        folder = ROOT / name if name.endswith("/") else folder
    assert tour and missing == []


@cache
def _known_flags() -> frozenset[str]:
    """Flags of training programs, and those that tools, tests and examples define."""
    programs = [
        path for folder in ("tools", "examples", "benchmarks", "tests") for path in (ROOT / folder).rglob("*.py")
    ]
    own = {flag for path in programs for flag in re.findall(r'add(?:_argument)?\(\s*"(--[\w-]+)"', path.read_text())}
    return frozenset(own | {"--help"} | {word for flag in flag_table().flags for word in flag.flags})


@cache
def _file_names() -> frozenset[str]:
    top = [path for path in ROOT.iterdir() if path.is_file()]
    below = [path for folder in FOLDERS.split("|") for path in (ROOT / folder).rglob("*") if path.is_file()]
    return frozenset(path.name for path in (*top, *below))


@pytest.mark.slow
def test_the_table_of_the_architecture_is_what_the_code_has() -> None:
    assert anchors() in (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_the_glossary_defines_each_term_once() -> None:
    rows = re.findall(r"^\| ([^|]+?) \|", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    terms = [term for row in rows if row not in ("term", "---") for term in row.split(", ")]
    assert len(terms) == len(set(terms)) > 60, sorted(term for term in set(terms) if terms.count(term) > 1)
