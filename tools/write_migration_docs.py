"""Writes the table of public names in docs/python_names.md: `python -m tools.write_migration_docs`.

The text above the table is written by hand and is not changed.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from megatron.tools.compare_api import Comparison, Verdict, compare_all, counts

PAGE = Path(__file__).resolve().parents[1] / "docs" / "python_names.md"
MARK = "<!-- Below this line: python -m tools.write_migration_docs. Do not edit. -->\n"


def with_table(page: str, comparisons: Sequence[Comparison]) -> str:
    """Returns the page with the table of these comparisons. Raises ValueError for a page without MARK."""
    head, mark, _ = page.partition(MARK)
    if not mark:
        raise ValueError(f"docs/python_names.md does not contain the line {MARK.strip()!r}")
    return head + mark + "\n".join(["", *_summary(comparisons), *_modules(comparisons)])


def _summary(comparisons: Sequence[Comparison]) -> list[str]:
    found = counts(comparisons)
    here = sum(found.values())
    return [
        f"Of {len(comparisons):,} names, {len(comparisons) - here:,} belong to unsupported features. Of the other "
        f"{here:,}, {found[Verdict.SAME]:,} ({100 * found[Verdict.SAME] / here:.1f}%) are the same, "
        f"{found[Verdict.THIN]} are thin and {found[Verdict.MISSING]} are missing.",
        "",
    ]


def _modules(comparisons: Sequence[Comparison]) -> list[str]:
    lines = []
    for module, rows in groupby(comparisons, key=lambda row: row.name.module):
        lines += [f"### {module}", "", "| names | here | why |", "|---|---|---|"]
        for owner, members in groupby(list(rows), key=_owner):
            lines += _rows_of(owner, list(members))
        lines.append("")
    return lines


def _owner(row: Comparison) -> str:
    if row.name.kind == "class":
        return row.name.name
    return row.name.owner


def _rows_of(owner: str, members: Sequence[Comparison]) -> Iterable[str]:
    # Names with the same verdict and reason share a row, at the position of the first name.
    groups: dict[tuple[str, str], list[str]] = {}
    for row in members:
        groups.setdefault((row.verdict.value, shown_reason(row)), []).append(_shown(row))
    prefix = f"`{owner}`: " if owner else ""
    for (verdict, why), names in groups.items():
        yield f"| {prefix}{', '.join(f'`{name}`' for name in names)} | {verdict} | {why} |"


def _shown(row: Comparison) -> str:
    return "the class" if row.name.kind == "class" else row.name.name


def shown_reason(row: Comparison) -> str:
    """Returns the text of the last column: the differences, or why the name is unsupported or has no effect."""
    notes = [row.why]
    if row.unsupported:
        # A field that exists accepts its default. Other names of unsupported features give the reason for their
        # absence.
        is_field = row.name.kind == "field" and row.verdict is not Verdict.MISSING
        notes = [row.why, f"only with its default: {row.unsupported}"] if is_field else [row.unsupported]
    if row.no_effect:
        notes.append(f"accepted without effect: {row.no_effect}")
    return "; ".join(note for note in notes if note).replace("|", "\\|")


def main() -> None:
    """Rewrites the table in docs/python_names.md."""
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), compare_all()), encoding="utf-8")


if __name__ == "__main__":
    main()
