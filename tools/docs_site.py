"""Adapts the documentation's pages, written for GitHub, to the site that mkdocs builds. A hook in mkdocs.yml.

Three things differ. The site contains only docs/, so links to other files lead to the repository's pages. Headings
get the same anchors as on GitHub. A link whose text is the file name of a page shows that page's title instead.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#])")


def on_config(config: Any) -> Any:
    """Makes mkdocs use GitHub's rule for heading anchors. Called by mkdocs once per build."""
    config["mdx_configs"].setdefault("toc", {})["slugify"] = anchor
    return config


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Returns a page's Markdown with its links adapted to the site. Called by mkdocs for each page."""
    titled = with_titles(markdown, titles=dict(nav_titles(config["nav"])))
    return with_repository_links(titled, folder=Path(page.file.abs_src_path).parent, repo_url=config["repo_url"])


def nav_titles(nav: Any) -> Iterator[tuple[str, str]]:
    """Yields the file name and title of each page in mkdocs' navigation."""
    for entry in nav:
        for title, target in entry.items():
            if isinstance(target, str):
                yield target, title
            else:
                yield from nav_titles(target)


def with_titles(markdown: str, *, titles: dict[str, str]) -> str:
    """Replaces the text of links `[page.md](page.md)` by the page's title."""

    def to_title(found: re.Match[str]) -> str:
        return f"[{titles.get(found[1], found[1])}]"

    return re.sub(r"\[([\w-]+\.md)\](?=\(\1)", to_title, markdown)


def with_repository_links(markdown: str, *, folder: Path, repo_url: str) -> str:
    """Replaces relative links to files outside docs/ by links to the repository.

    Args: folder: The folder of the page. repo_url: Address of the repository.

    Raises: ValueError: If the target of a link does not exist.
    """

    def to_site(found: re.Match[str]) -> str:
        target = (folder / found[1]).resolve()
        if "://" in found[1] or target.is_relative_to(ROOT / "docs"):
            return found[1]
        if not target.exists():
            raise ValueError(f"{folder.name}: broken link to {found[1]}")
        kind = "tree" if target.is_dir() else "blob"
        return f"{repo_url.rstrip('/')}/{kind}/HEAD/{target.relative_to(ROOT).as_posix()}"

    return LINK.sub(to_site, markdown)


def anchor(heading: str, separator: str = "-") -> str:
    """Returns a heading's anchor by GitHub's rule: lower case, no punctuation, spaces replaced by dashes."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)
