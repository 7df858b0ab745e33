"""Links, anchors, flags and paths in the documentation exist, and the documentation builds as a site.

These tests do not check whether its statements are true.
"""

import re
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt

from megatron.tools.docs_site import anchor, nav_titles, with_repository_links, with_titles
from megatron.training.command_line.flags import flag_table
from tests.structure import tour
from tests.structure.compared import anchors
from tests.structure.measure import ROOT

DOCS = ROOT / "docs"
SITE_PAGES = sorted(DOCS.glob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *SITE_PAGES]
# Every Markdown file of the repository, except in folders without sources: environments, runs, build output.
MARKDOWN = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not {".venv", ".git", "runs", "data", "build", "dist", "site"} & {*path.relative_to(ROOT).parts[:-1]}
    and not path.relative_to(ROOT).parts[0].startswith(".venv-torch-")
)
WRITTEN = [page for page in PAGES if page.name != "flags.md"]  # flags.md is generated from the flag table
FOLDERS = "megatron|tests|tools|configs|docs|docker|examples|benchmarks|requirements|.ci"
LINK = re.compile(r"\]\(([^)\s]+)\)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")
NAMED_PATH = re.compile(rf"`((?:{FOLDERS.replace('.', re.escape('.'))})/[\w./-]+)`")
NAMED_FILE = re.compile(r"`([\w-]+\.(?:py|sh|md|toml))`")
# Flags of third-party programs.
FOREIGN_FLAGS = {"--nproc-per-node", "--standalone", "--nnodes", "--node-rank", "--master-addr", "--master-port"}
FOREIGN_FLAGS |= {"--durations", "--replay", "--max-restarts", "--shutdown-timeout", "--dist"}
FOREIGN_FLAGS |= {"--signal", "--requeue", "--open-mode", "--kill-on-bad-exit", "--wait"}  # of sbatch and srun
FOREIGN_FLAGS |= {"--file", "--tag", "--rm", "--user", "--volume", "--gpus", "--ipc", "--entrypoint"}  # of docker
FOREIGN_FLAGS |= {"--force-reinstall", "--no-deps", "--local-dir"}  # of pip and hf


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_resolves(page: Path) -> None:
    """Checks that links and images lead to files of the repository, and anchors to headings, named by GitHub's rule."""
    missing = []
    for link in _links(page):
        name, _, fragment = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or not target.is_relative_to(ROOT):
            missing.append(link)
        elif fragment and target.suffix == ".md" and fragment not in _anchors(target):
            missing.append(link)
    assert missing == []


def test_anchors_are_those_of_github(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# In pretrain_gpt.py: flags\n\n## A `pretrain()` [script](x.md)\n\n## Weights & Biases\n\n"
        "```\n# no heading\n```\n\n## Weights & Biases\n",
        encoding="utf-8",
    )
    assert _anchors(page) == {"in-pretrain_gptpy-flags", "a-pretrain-script", "weights--biases", "weights--biases-1"}


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_every_flag_exists(page: Path) -> None:
    unknown = set(FLAG.findall(page.read_text(encoding="utf-8"))) - _known_flags() - FOREIGN_FLAGS
    # A wrong flag that an error message quotes.
    assert unknown - {"--num-layer"} == set()


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_every_path_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = [path for path in NAMED_PATH.findall(text) if not (ROOT / path).exists()]
    missing += [name for name in NAMED_FILE.findall(text) if name not in _file_names()]
    assert missing == []


def test_every_page_is_once_in_the_navigation_and_in_the_order_of_the_index() -> None:
    nav = [name for name, _ in nav_titles(_site_config()["nav"]) if name != "README.md"]
    index = [link for link in _links(DOCS / "README.md") if "#" not in link]
    assert nav == index
    assert sorted(nav) == sorted(page.name for page in SITE_PAGES if page.name != "README.md")


def test_every_example_is_listed() -> None:
    listed = {(DOCS / link.partition("#")[0]).resolve() for link in _links(DOCS / "examples.md")}
    examples = [path for path in (ROOT / "examples").iterdir() if path.is_file()]
    assert [path.name for path in {*examples} - listed] == []


@pytest.mark.slow
def test_the_site_builds_and_shows_what_github_shows(tmp_path: Path) -> None:
    """Builds the site without broken links or requests to other servers, with lists, tables and code as on GitHub."""
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "search" / "search_index.json").exists()
    for page in SITE_PAGES:
        built = tmp_path / ("" if page.name == "README.md" else page.stem) / "index.html"
        shown = _Parts()
        shown.feed(built.read_text(encoding="utf-8"))
        assert shown.loaded == [], page.name
        on_github = _Parts()
        on_github.feed(
            "<article>" + MarkdownIt().enable("table").render(page.read_text(encoding="utf-8")) + "</article>"
        )
        assert shown.counts == on_github.counts, page.name


def test_links_are_adapted_for_the_site() -> None:
    text = "[a](../README.md#see) [b](../megatron/core) [c](moe.md#balance) [d](https://x.y/z) ![e](pipeline.svg)"
    expected = (
        "[a](https://forge/ours/blob/HEAD/README.md#see) [b](https://forge/ours/tree/HEAD/megatron/core) "
        "[c](moe.md#balance) [d](https://x.y/z) ![e](pipeline.svg)"
    )
    assert with_repository_links(text, folder=DOCS, repo_url="https://forge/ours/") == expected
    titled = with_titles("[moe.md](moe.md#balance), [here](moe.md), [x.md](x.md)", titles={"moe.md": "Experts"})
    assert titled == "[Experts](moe.md#balance), [here](moe.md), [x.md](x.md)"
    with pytest.raises(ValueError, match="no_such_file.py"):
        with_repository_links("[a](../no_such_file.py)", folder=DOCS, repo_url="https://forge/ours")


def test_the_tour_links_the_file_of_each_name() -> None:
    assert tour.PAGE.read_text(encoding="utf-8") == tour.page_with_links()


def test_the_reading_order_names_files() -> None:
    """Checks that each line names an existing path, either complete or, if indented, below the last folder."""
    section = (DOCS / "architecture.md").read_text(encoding="utf-8").partition("## The code in reading order\n")[2]
    listing = section.partition("```\n")[2].partition("```")[0]
    folder, missing = ROOT, []
    for line in listing.splitlines():
        name = line.split()[0]
        folder = ROOT if not line.startswith(" ") else folder
        missing += [] if (folder / name).exists() else [line]
        folder = ROOT / name if name.endswith("/") else folder
    assert listing and missing == []


class _Parts(HTMLParser):
    """Counts lists, tables, code blocks and headings of a page's article. loaded: URLs of files on other servers."""

    COUNTED = ("h1", "h2", "h3", "h4", "ul", "ol", "li", "table", "tr", "td", "th", "pre", "img", "blockquote")

    def __init__(self) -> None:
        super().__init__()
        self.counts = dict.fromkeys(self.COUNTED, 0)
        self.loaded: list[str] = []
        self._in_article = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        address = named.get("src") or (named.get("href") if tag == "link" else None) or ""
        if "://" in address and named.get("rel") != "canonical":
            self.loaded.append(address)
        self._in_article |= tag == "article"
        if self._in_article and tag in self.counts:
            self.counts[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        self._in_article &= tag != "article"


@cache
def _site_config() -> dict[str, Any]:
    """Returns the settings of mkdocs.yml, with the defaults of environment variables."""

    class Loader(yaml.SafeLoader):
        pass

    def default(loader: yaml.SafeLoader, node: yaml.SequenceNode) -> Any:
        return loader.construct_sequence(node)[-1]

    Loader.add_constructor("!ENV", default)
    return dict(yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader))


@cache
def _links(page: Path) -> list[str]:
    """Returns the targets of a page's relative links and images, in their order on the page."""
    return [link for link in LINK.findall(_without_code(page)) if not re.match(r"[a-z]+:", link)]


@cache
def _anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings as on GitHub, which appends numbers to repeated anchors."""
    found: list[str] = []
    for heading in re.findall(r"^#{1,6} +(.+?) *$", _without_code(page), re.MULTILINE):
        first = anchor(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading))
        repeated = sum(one == first or re.fullmatch(rf"{re.escape(first)}-\d+", one) is not None for one in found)
        found.append(f"{first}-{repeated}" if repeated else first)
    return {*found}


def _without_code(page: Path) -> str:
    return re.sub(r"^( *)```.*?^\1```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@cache
def _known_flags() -> frozenset[str]:
    """Returns the flags of training programs, and all flags defined by tools, examples, benchmarks and tests."""
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
    assert anchors() in (DOCS / "architecture.md").read_text(encoding="utf-8")


def test_the_glossary_defines_each_term_once() -> None:
    rows = re.findall(r"^\| ([^|]+?) \|", (DOCS / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    terms = [term for row in rows if row not in ("term", "---") for term in row.split(", ")]
    assert len(terms) == len(set(terms)) > 60, sorted(term for term in set(terms) if terms.count(term) > 1)
